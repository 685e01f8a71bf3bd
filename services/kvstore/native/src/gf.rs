//! Arithmetic of GF(2^8) with polynomial 0x11d, and the matrices of the Cauchy code.

/// x^8 + x^4 + x^3 + x^2 + 1.
pub const POLYNOMIAL: u16 = 0x11d;

const fn times(a: u8, b: u8) -> u8 {
    let mut product = 0u16;
    let mut shifted = a as u16;
    let mut bits = b;
    while bits != 0 {
        if bits & 1 == 1 {
            product ^= shifted;
        }
        shifted <<= 1;
        if shifted & 0x100 != 0 {
            shifted ^= POLYNOMIAL;
        }
        bits >>= 1;
    }
    product as u8
}

/// `MUL[a][b]` = a·b.
pub static MUL: [[u8; 256]; 256] = {
    let mut table = [[0u8; 256]; 256];
    let mut a = 0;
    while a < 256 {
        // Row by linearity: 8 products of powers of two give the other 248.
        let mut b = 1;
        while b < 256 {
            let low = b & (b - 1);
            table[a][b] =
                if low == 0 { times(a as u8, b as u8) } else { table[a][low] ^ table[a][b ^ low] };
            b += 1;
        }
        a += 1;
    }
    table
};

pub fn mul(a: u8, b: u8) -> u8 {
    MUL[a as usize][b as usize]
}

/// Multiplicative inverse; panics at 0, which no valid matrix asks for.
pub fn inverse(a: u8) -> u8 {
    assert_ne!(a, 0, "zero has no inverse");
    // a^254, by squaring: 254 = 2 + 4 + ... + 128.
    let (mut power, mut result) = (a, 1);
    for _ in 0..7 {
        power = mul(power, power);
        result = mul(result, power);
    }
    result
}

/// The (k+m) x k generator: identity, then rows whose entry (r, j) is the inverse of r XOR j.
/// The same matrix as ISA-L's `gf_gen_cauchy1_matrix`.
pub fn cauchy(k: usize, m: usize) -> Vec<u8> {
    let mut matrix = vec![0; (k + m) * k];
    for row in 0..k {
        matrix[row * k + row] = 1;
    }
    for row in k..k + m {
        for column in 0..k {
            matrix[row * k + column] = inverse((row ^ column) as u8);
        }
    }
    matrix
}

/// Inverse of an n x n matrix; None when it is singular.
pub fn invert(matrix: &[u8], n: usize) -> Option<Vec<u8>> {
    let mut left = matrix.to_vec();
    let mut right = vec![0; n * n];
    for row in 0..n {
        right[row * n + row] = 1;
    }
    for pivot in 0..n {
        let row = (pivot..n).find(|row| left[row * n + pivot] != 0)?;
        for column in 0..n {
            left.swap(row * n + column, pivot * n + column);
            right.swap(row * n + column, pivot * n + column);
        }
        let scale = inverse(left[pivot * n + pivot]);
        for column in 0..n {
            left[pivot * n + column] = mul(left[pivot * n + column], scale);
            right[pivot * n + column] = mul(right[pivot * n + column], scale);
        }
        for row in (0..n).filter(|row| *row != pivot) {
            let factor = left[row * n + pivot];
            if factor == 0 {
                continue;
            }
            for column in 0..n {
                let (l, r) = (left[pivot * n + column], right[pivot * n + column]);
                left[row * n + column] ^= mul(factor, l);
                right[row * n + column] ^= mul(factor, r);
            }
        }
    }
    Some(right)
}

/// The 8x8 bit matrix of "times c" in the byte order that the GFNI affine instruction reads:
/// byte 7-i of the word is the row that gives bit i of the product.
pub fn affine(c: u8) -> u64 {
    let mut word = 0u64;
    for bit in 0..8 {
        let mut row = 0u8;
        for input in 0..8 {
            row |= (mul(c, 1 << input) >> bit & 1) << input;
        }
        word |= (row as u64) << (8 * (7 - bit));
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_inverse_times_its_number_is_one() {
        for a in 1..=255u8 {
            assert_eq!(mul(a, inverse(a)), 1);
        }
    }

    #[test]
    fn t_ec_vec_coefficients() {
        let matrix = cauchy(10, 2);
        let row10 = [0xdd, 0x98, 0xad, 0x9d, 0x5d, 0x96, 0x3d, 0xaa, 0x8e, 0xf4];
        let row11 = [0x98, 0xdd, 0x9d, 0xad, 0x96, 0x5d, 0xaa, 0x3d, 0xf4, 0x8e];
        assert_eq!(matrix[100..110], row10);
        assert_eq!(matrix[110..120], row11);
    }

    /// What the instruction computes, from its description, so that the matrices are proven also
    /// on machines without it.
    fn emulated_affine(matrix: u64, x: u8) -> u8 {
        (0..8).fold(0, |out, bit| {
            let row = (matrix >> (8 * (7 - bit))) as u8;
            out | (((row & x).count_ones() as u8 & 1) << bit)
        })
    }

    #[test]
    fn affine_matrices_multiply() {
        for c in 0..=255u8 {
            for x in 0..=255u8 {
                assert_eq!(emulated_affine(affine(c), x), mul(c, x));
            }
        }
    }
}
