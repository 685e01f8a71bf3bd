//! RMSNorm of rows. Source: model.md, section 4.

use crate::wide::{sum_of_squares, widest};

/// Reciprocal of the root mean square of a row.
#[inline(always)]
#[allow(clippy::cast_precision_loss)]
pub(crate) fn scale_of(row: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(row) / row.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub(crate) fn norm_row(row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = scale_of(row, eps);
    if weight.is_empty() {
        for (out, value) in out.iter_mut().zip(row) {
            *out = value * scale;
        }
    } else {
        for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
            *out = value * scale * weight;
        }
    }
}

widest! {
    /// Norms rows of `width` values; an empty weight stands for ones. `out` is as long as `rows`.
    pub fn rms_norm(rows: &[f32], width: usize, weight: &[f32], eps: f32, out: &mut [f32]) {
        for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            norm_row(row, weight, eps, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_a_root_mean_square_of_one_and_are_alone() {
        let rows: Vec<f32> = (0..60_u8).map(|i| f32::from(i) - 20.0).collect();
        let mut out = vec![0.0; 60];
        rms_norm(&rows, 20, &[], 0.0, &mut out);
        for row in out.chunks_exact(20) {
            assert!((sum_of_squares(row) / 20.0 - 1.0).abs() < 1e-5);
        }
        let mut alone = vec![0.0; 20];
        rms_norm(&rows[20..40], 20, &[], 0.0, &mut alone);
        assert_eq!(alone, out[20..40]);
    }

    #[test]
    fn a_weight_scales_channels() {
        let mut out = vec![0.0; 4];
        rms_norm(&[3.0, 3.0, -3.0, 3.0], 2, &[2.0, -1.0], 0.0, &mut out);
        assert_eq!(out, [2.0, -1.0, -2.0, -1.0]);
    }
}
