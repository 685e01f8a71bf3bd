//! Lanes that are added one by one, so that sums have one order on every machine.

/// Numbers that are computed side by side: a vector register of AVX2, two of SSE2 or NEON.
pub const LANES: usize = 8;

/// Runs `body` compiled for AVX2 where the machine has it. Nothing is contracted or reordered by
/// that: both forms give the same bits.
macro_rules! widest {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $kind),*) $(-> $out)? {
            #[inline(always)]
            fn plain($($arg: $kind),*) $(-> $out)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $kind),*) $(-> $out)? {
                    plain($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the machine has the instructions that this was compiled for.
                    #[allow(unsafe_code)]
                    return unsafe { avx2($($arg),*) };
                }
            }
            plain($($arg),*)
        }
    };
}
pub(crate) use widest;

/// Sum of squares: four registers of partial sums, added in the order of their lanes.
#[inline(always)]
pub(crate) fn sum_of_squares(values: &[f32]) -> f32 {
    let mut partial = [[0.0_f32; LANES]; 4];
    let (wide, rest) = values.as_chunks::<{ 4 * LANES }>();
    for chunk in wide {
        for (sums, part) in partial.iter_mut().zip(chunk.as_chunks::<LANES>().0) {
            for (sum, value) in sums.iter_mut().zip(part) {
                *sum += value * value;
            }
        }
    }
    let mut sums = [0.0_f32; LANES];
    for (lane, sum) in sums.iter_mut().enumerate() {
        *sum = (partial[0][lane] + partial[1][lane]) + (partial[2][lane] + partial[3][lane]);
    }
    let mut total = 0.0;
    for sum in sums {
        total += sum;
    }
    for value in rest {
        total += value * value;
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_squares_is_right_for_every_length() {
        for length in 0..200_u16 {
            let values: Vec<f32> = (0..length).map(|i| f32::from(i % 13) - 6.0).collect();
            let exact: f32 = values.iter().map(|value| value * value).sum();
            assert!((sum_of_squares(&values) - exact).abs() <= 1e-4 * exact, "{length}");
        }
    }
}
