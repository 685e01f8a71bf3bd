//! Hyper-connections: coefficients of the streams, and closing a site. Source: model.md, section 5.

use crate::norm::{norm_row, scale_of};
use crate::wide::{LANES, widest};

/// Streams at most; the coefficients of eight rows lie on the stack.
pub const MOST_STREAMS: usize = 8;

/// What `mixes` needs beside its rows.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    pub streams: usize,
    /// [streams * (streams + 2)]
    pub base: &'a [f32],
    /// of the three kinds of coefficients
    pub scale: [f32; 3],
    pub iterations: usize,
    pub hc_eps: f32,
    pub norm_eps: f32,
}

type Planes = [[f32; LANES]; MOST_STREAMS * MOST_STREAMS];

/// Makes a positive matrix per lane doubly stochastic; columns come first and last.
///
/// The steps depend on each other, so lanes are rows: one row costs what eight do.
#[inline(always)]
fn sinkhorn(planes: &mut Planes, streams: usize, iterations: usize, eps: f32) {
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in planes[..streams * streams].chunks_exact_mut(streams) {
                let mut sums = [eps; LANES];
                for plane in row.iter() {
                    for (sum, value) in sums.iter_mut().zip(plane) {
                        *sum += value;
                    }
                }
                for plane in row {
                    for (value, sum) in plane.iter_mut().zip(&sums) {
                        *value /= sum;
                    }
                }
            }
        }
        for column in 0..streams {
            let mut sums = [eps; LANES];
            for row in 0..streams {
                for (sum, value) in sums.iter_mut().zip(&planes[row * streams + column]) {
                    *sum += value;
                }
            }
            for row in 0..streams {
                for (value, sum) in planes[row * streams + column].iter_mut().zip(&sums) {
                    *value /= sum;
                }
            }
        }
    }
}

fn sigmoid(value: f32) -> f32 {
    1.0 / (1.0 + (-value).exp())
}

widest! {
    /// Coefficients of every row: pre and post [n, M], comb [n, M, M].
    ///
    /// `h`: [n, M * D] streams; `z`: [n, M * (M + 2)], their product with the site's matrix.
    pub fn mixes(
        h: &[f32],
        z: &[f32],
        site: &Site<'_>,
        pre: &mut [f32],
        post: &mut [f32],
        comb: &mut [f32],
    ) {
        let m = site.streams;
        let count = z.len() / (m * (m + 2));
        if count == 0 {
            return;
        }
        let width = h.len() / count;
        let square = m * m;
        let mut planes: Planes = [[1.0; LANES]; MOST_STREAMS * MOST_STREAMS];
        for first in (0..count).step_by(LANES) {
            let last = count.min(first + LANES);
            for row in first..last {
                let lane = row - first;
                let norm = scale_of(&h[row * width..][..width], site.norm_eps);
                let z = &z[row * m * (m + 2)..][..m * (m + 2)];
                let logit = |at: usize, kind: usize| z[at] * norm * site.scale[kind] + site.base[at];
                for stream in 0..m {
                    pre[row * m + stream] = sigmoid(logit(stream, 0)) + site.hc_eps;
                    post[row * m + stream] = 2.0 * sigmoid(logit(m + stream, 1));
                }
                for i in 0..m {
                    let mut logits = [0.0_f32; MOST_STREAMS];
                    let mut most = f32::NEG_INFINITY;
                    for (j, value) in logits[..m].iter_mut().enumerate() {
                        *value = logit(2 * m + i * m + j, 2);
                        most = most.max(*value);
                    }
                    let mut total = 0.0;
                    for value in &mut logits[..m] {
                        *value = (*value - most).exp();
                        total += *value;
                    }
                    for j in 0..m {
                        planes[i * m + j][lane] = logits[j] / total + site.hc_eps;
                    }
                }
            }
            // The usual number, known to the compiler, unrolls its loops.
            match m {
                4 => sinkhorn(&mut planes, 4, site.iterations, site.hc_eps),
                _ => sinkhorn(&mut planes, m, site.iterations, site.hc_eps),
            }
            for row in first..last {
                let out = &mut comb[row * square..][..square];
                for (value, plane) in out.iter_mut().zip(&planes) {
                    *value = plane[row - first];
                }
            }
        }
    }
}

/// The coefficients that close a site and open the next.
#[derive(Clone, Copy, Debug)]
pub struct Closing<'a> {
    pub streams: usize,
    /// [n, M]
    pub post: &'a [f32],
    /// [n, M, M]
    pub comb: &'a [f32],
    /// [n, M]
    pub pre: &'a [f32],
    /// [D]
    pub weight: &'a [f32],
    pub eps: f32,
}

widest! {
    /// Closes a site and opens the next: the new streams [n, M, D] and the next site's input [n, D].
    ///
    /// `y`: [n, D], what the site gave; `h`: [n, M, D], the streams before it.
    pub fn close(y: &[f32], h: &[f32], closing: &Closing<'_>, out: &mut [f32], x: &mut [f32]) {
        let (m, width) = (closing.streams, closing.weight.len());
        let rows = y
            .chunks_exact(width)
            .zip(h.chunks_exact(m * width))
            .zip(out.chunks_exact_mut(m * width))
            .zip(x.chunks_exact_mut(width))
            .enumerate();
        let mut sum = vec![0.0_f32; width];
        for (row, (((y, h), out), x)) in rows {
            let comb = &closing.comb[row * m * m..][..m * m];
            sum.fill(0.0);
            for (j, stream) in out.chunks_exact_mut(width).enumerate() {
                let post = closing.post[row * m + j];
                for (out, y) in stream.iter_mut().zip(y) {
                    *out = post * y;
                }
                for (i, before) in h.chunks_exact(width).enumerate() {
                    let share = comb[i * m + j];
                    for (out, before) in stream.iter_mut().zip(before) {
                        *out += share * before;
                    }
                }
                let pre = closing.pre[row * m + j];
                for (sum, value) in sum.iter_mut().zip(stream.iter()) {
                    *sum += pre * value;
                }
            }
            norm_row(&sum, closing.weight, closing.eps, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers between -1 and 1 that look random.
    fn noise(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 12.9898).sin()).collect()
    }

    fn site<'a>(streams: usize, base: &'a [f32], iterations: usize) -> Site<'a> {
        Site { streams, base, scale: [0.5, 1.0, 3.0], iterations, hc_eps: 1e-6, norm_eps: 1e-6 }
    }

    fn coefficients(m: usize, h: &[f32], z: &[f32], iterations: usize) -> [Vec<f32>; 3] {
        let (rows, base) = (z.len() / (m * (m + 2)), noise(m * (m + 2)));
        let mut out = [vec![0.0; rows * m], vec![0.0; rows * m], vec![0.0; rows * m * m]];
        let [pre, post, comb] = &mut out;
        mixes(h, z, &site(m, &base, iterations), pre, post, comb);
        out
    }

    #[test]
    fn the_combination_is_doubly_stochastic_for_any_number_of_streams() {
        for m in 1..=MOST_STREAMS {
            let [pre, post, comb] =
                coefficients(m, &noise(3 * m * 16), &noise(3 * m * (m + 2)), 40);
            for matrix in comb.chunks_exact(m * m) {
                for at in 0..m {
                    let row: f32 = matrix[at * m..][..m].iter().sum();
                    let column: f32 = (0..m).map(|i| matrix[i * m + at]).sum();
                    assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-4, "{m}");
                }
            }
            assert!(pre.iter().all(|value| (0.0..1.0).contains(value)));
            assert!(post.iter().all(|value| (0.0..2.0).contains(value)));
        }
    }

    #[test]
    fn a_row_has_the_same_bits_beside_others() {
        let (m, width, rows) = (4, 48, 19);
        let (h, z) = (noise(rows * m * width), noise(rows * m * (m + 2)));
        let [pre, post, comb] = coefficients(m, &h, &z, 20);
        for row in 0..rows {
            let (h, z) =
                (&h[row * m * width..][..m * width], &z[row * m * (m + 2)..][..m * (m + 2)]);
            let alone = coefficients(m, h, z, 20);
            assert_eq!(alone[0], pre[row * m..][..m]);
            assert_eq!(alone[1], post[row * m..][..m]);
            assert_eq!(alone[2], comb[row * m * m..][..m * m]);
        }
    }

    #[test]
    fn no_rows_are_no_work() {
        assert!(coefficients(4, &[], &[], 20).iter().all(Vec::is_empty));
    }

    #[test]
    fn closing_mixes_adds_collapses_and_norms() {
        let (m, width, rows) = (2, 6, 3);
        let (y, h) = (noise(rows * width), noise(rows * m * width));
        let (post, comb, pre) = (noise(rows * m), noise(rows * m * m), noise(rows * m));
        let weight = noise(width);
        let closing =
            Closing { streams: m, post: &post, comb: &comb, pre: &pre, weight: &weight, eps: 1e-6 };
        let (mut out, mut x) = (vec![0.0; h.len()], vec![0.0; y.len()]);
        close(&y, &h, &closing, &mut out, &mut x);
        for row in 0..rows {
            let mut sums = vec![0.0; width];
            for j in 0..m {
                for d in 0..width {
                    let mut expected = post[row * m + j] * y[row * width + d];
                    for i in 0..m {
                        expected += comb[row * m * m + i * m + j] * h[(row * m + i) * width + d];
                    }
                    assert!((out[(row * m + j) * width + d] - expected).abs() < 1e-6);
                    sums[d] += pre[row * m + j] * expected;
                }
            }
            let mut normed = vec![0.0; width];
            norm_row(&sums, &weight, 1e-6, &mut normed);
            for (a, b) in normed.iter().zip(&x[row * width..]) {
                assert!((a - b).abs() < 1e-4);
            }
        }
    }
}
