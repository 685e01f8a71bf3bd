//! CRC-32C (Castagnoli), seeded so that a checksum can be continued over pieces.

const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// CRC-32C of `data`.
pub fn crc32c(data: &[u8]) -> u32 {
    extend(0, data)
}

/// CRC-32C of what `seed` was computed over, followed by `data`.
pub fn extend(seed: u32, data: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        if data.len() >= FOLD_AT_LEAST && can_fold() {
            // SAFETY: the processor has the instructions.
            return unsafe { extend_folding(seed, data) };
        }
        if data.len() >= FOLD_AT_LEAST && can_fold_half() {
            // SAFETY: the processor has the instructions.
            return unsafe { extend_folding_half(seed, data) };
        }
        if std::arch::is_x86_feature_detected!("sse4.2") {
            // SAFETY: the processor has the instruction.
            return unsafe { extend_sse42(seed, data) };
        }
    }
    extend_plain(seed, data)
}

pub fn extend_plain(seed: u32, data: &[u8]) -> u32 {
    !data.iter().fold(!seed, |crc, byte| (crc >> 8) ^ TABLE[((crc ^ *byte as u32) & 0xff) as usize])
}

/// Below this the set-up of a fold costs more than it saves.
#[cfg(target_arch = "x86_64")]
const FOLD_AT_LEAST: usize = 512;

#[cfg(target_arch = "x86_64")]
fn can_fold() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

#[cfg(target_arch = "x86_64")]
fn can_fold_half() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

/// x^n modulo the polynomial; the lowest bit is the highest power, as everywhere in this file.
#[cfg(target_arch = "x86_64")]
const fn power(n: u32) -> u32 {
    let (mut value, mut left) = (0x8000_0000u32, n);
    while left > 0 {
        value = if value & 1 == 1 { (value >> 1) ^ POLYNOMIAL } else { value >> 1 };
        left -= 1;
    }
    value
}

/// What the two halves of 16 bytes are multiplied by to stand so many bytes further on.
///
/// A product of two 64-bit values whose bits run backwards comes out one power short, and a 32-bit
/// factor in a 64-bit register stands for itself times x^32: hence 31 and -33.
#[cfg(target_arch = "x86_64")]
const fn factors(num_bytes: u32) -> [u64; 2] {
    [power(8 * num_bytes + 31) as u64, power(8 * num_bytes - 33) as u64]
}

/// Carry-less products move four registers of 64 bytes over the next 256 at a time, about four
/// times as fast as three lanes of crc32 instructions. At least 256 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
fn extend_folding(seed: u32, data: &[u8]) -> u32 {
    use std::arch::x86_64::*;
    const WIDE: usize = 64;
    const STEP: usize = 4 * WIDE;
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold(sum: __m512i, by: __m512i, next: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(sum, by);
        let high = _mm512_clmulepi64_epi128::<0x11>(sum, by);
        _mm512_ternarylogic_epi64::<0x96>(low, high, next)
    }
    const BY_STEP: [u64; 2] = factors(STEP as u32);
    const BY_WIDE: [u64; 2] = factors(WIDE as u32);
    const BY_16: [u64; 2] = factors(16);
    let wide = |by: [u64; 2]| _mm512_broadcast_i32x4(_mm_set_epi64x(by[1] as i64, by[0] as i64));
    let (steps, rest) = data.as_chunks::<STEP>();
    let load = |step: &[u8; STEP], at: usize| {
        // SAFETY: four times 64 bytes are there; the load is unaligned.
        unsafe { _mm512_loadu_si512(step.as_ptr().add(WIDE * at).cast()) }
    };
    let mut sums: [__m512i; 4] = std::array::from_fn(|at| load(&steps[0], at));
    let begun = _mm512_zextsi128_si512(_mm_cvtsi32_si128(!seed as i32));
    sums[0] = _mm512_xor_si512(sums[0], begun);
    let by_step = wide(BY_STEP);
    for step in &steps[1..] {
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum = fold(*sum, by_step, load(step, at));
        }
    }
    let by_wide = wide(BY_WIDE);
    let mut sum = sums[0];
    for next in &sums[1..] {
        sum = fold(sum, by_wide, *next);
    }
    let quarters = [
        _mm512_extracti32x4_epi32::<0>(sum),
        _mm512_extracti32x4_epi32::<1>(sum),
        _mm512_extracti32x4_epi32::<2>(sum),
        _mm512_extracti32x4_epi32::<3>(sum),
    ];
    let mut last = quarters[0];
    for next in &quarters[1..] {
        last = fold_16(last, BY_16, *next);
    }
    close(last, rest)
}

/// The same in registers of 32 bytes, for processors without the wide ones: a third faster than the
/// lanes. At least 128 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
fn extend_folding_half(seed: u32, data: &[u8]) -> u32 {
    use std::arch::x86_64::*;
    const HALF: usize = 32;
    const STEP: usize = 4 * HALF;
    #[target_feature(enable = "avx2,vpclmulqdq")]
    fn fold(sum: __m256i, by: __m256i, next: __m256i) -> __m256i {
        let low = _mm256_clmulepi64_epi128::<0x00>(sum, by);
        let high = _mm256_clmulepi64_epi128::<0x11>(sum, by);
        _mm256_xor_si256(_mm256_xor_si256(low, high), next)
    }
    const BY_STEP: [u64; 2] = factors(STEP as u32);
    const BY_HALF: [u64; 2] = factors(HALF as u32);
    const BY_16: [u64; 2] = factors(16);
    let both =
        |by: [u64; 2]| _mm256_broadcastsi128_si256(_mm_set_epi64x(by[1] as i64, by[0] as i64));
    let (steps, rest) = data.as_chunks::<STEP>();
    let (halves, rest) = rest.as_chunks::<HALF>();
    // SAFETY: 32 bytes are there; the load is unaligned.
    let load = |half: &[u8; HALF]| unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
    let parts = |step: &[u8; STEP]| -> [__m256i; 4] {
        let (halves, _) = step.as_chunks::<HALF>();
        std::array::from_fn(|at| load(&halves[at]))
    };
    let mut sums = parts(&steps[0]);
    let begun = _mm256_zextsi128_si256(_mm_cvtsi32_si128(!seed as i32));
    sums[0] = _mm256_xor_si256(sums[0], begun);
    let by_step = both(BY_STEP);
    for step in &steps[1..] {
        for (sum, next) in sums.iter_mut().zip(parts(step)) {
            *sum = fold(*sum, by_step, next);
        }
    }
    let by_half = both(BY_HALF);
    let mut sum = sums[0];
    for next in &sums[1..] {
        sum = fold(sum, by_half, *next);
    }
    for half in halves {
        sum = fold(sum, by_half, load(half));
    }
    let second = _mm256_extracti128_si256::<1>(sum);
    close(fold_16(_mm256_castsi256_si128(sum), BY_16, second), rest)
}

/// Moves 16 bytes over the next 16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "pclmulqdq")]
fn fold_16(
    sum: std::arch::x86_64::__m128i,
    by: [u64; 2],
    next: std::arch::x86_64::__m128i,
) -> std::arch::x86_64::__m128i {
    use std::arch::x86_64::*;
    let by = _mm_set_epi64x(by[1] as i64, by[0] as i64);
    let low = _mm_clmulepi64_si128::<0x00>(sum, by);
    let high = _mm_clmulepi64_si128::<0x11>(sum, by);
    _mm_xor_si128(_mm_xor_si128(low, high), next)
}

/// The checksum of what was folded into 16 bytes and of the bytes behind it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn close(sum: std::arch::x86_64::__m128i, rest: &[u8]) -> u32 {
    use std::arch::x86_64::*;
    let (words, tail) = rest.as_chunks::<8>();
    let mut crc = _mm_crc32_u64(0, _mm_cvtsi128_si64(sum) as u64);
    crc = _mm_crc32_u64(crc, _mm_extract_epi64::<1>(sum) as u64);
    for word in words {
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(*word));
    }
    !tail.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
}

/// Three lanes hide the three cycles that one crc32 instruction takes; the lanes are joined by
/// shifting a checksum over the zeros that follow it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn extend_sse42(seed: u32, data: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    const LANE: usize = 1024;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let mut crc = !seed as u64;
    let mut blocks = data.chunks_exact(3 * LANE);
    for block in &mut blocks {
        let (first, rest) = block.split_at(LANE);
        let (second, third) = rest.split_at(LANE);
        let (mut a, mut b, mut c) = (crc, 0u64, 0u64);
        for at in (0..LANE).step_by(8) {
            a = _mm_crc32_u64(a, word(&first[at..at + 8]));
            b = _mm_crc32_u64(b, word(&second[at..at + 8]));
            c = _mm_crc32_u64(c, word(&third[at..at + 8]));
        }
        crc = (shift_lane(shift_lane(a as u32) ^ b as u32) ^ c as u32) as u64;
    }
    let mut words = blocks.remainder().chunks_exact(8);
    for bytes in &mut words {
        crc = _mm_crc32_u64(crc, word(bytes));
    }
    let mut crc = crc as u32;
    for byte in words.remainder() {
        crc = _mm_crc32_u8(crc, *byte);
    }
    !crc
}

/// Table of "1,024 zero bytes later", one row per byte of the register.
#[cfg(target_arch = "x86_64")]
static SHIFT: std::sync::LazyLock<[[u32; 256]; 4]> = std::sync::LazyLock::new(|| {
    let zeros = |mut crc: u32| {
        for _ in 0..1024 {
            crc = (crc >> 8) ^ TABLE[(crc & 0xff) as usize];
        }
        crc
    };
    // Linear over GF(2): 32 single bits are enough to build all rows.
    let bits: Vec<u32> = (0..32).map(|bit| zeros(1 << bit)).collect();
    let mut table = [[0u32; 256]; 4];
    for (row, entries) in table.iter_mut().enumerate() {
        for (byte, entry) in entries.iter_mut().enumerate() {
            *entry = (0..8)
                .filter(|bit| byte >> bit & 1 == 1)
                .fold(0, |crc, bit| crc ^ bits[8 * row + bit]);
        }
    }
    table
});

#[cfg(target_arch = "x86_64")]
fn shift_lane(crc: u32) -> u32 {
    let table = &*SHIFT;
    (0..4).fold(0, |sum, row| sum ^ table[row][(crc >> (8 * row) & 0xff) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_the_polynomial() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn the_fast_path_equals_the_plain_one_at_every_length() {
        let data: Vec<u8> =
            (0..10_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let lengths = (0..1_100).chain(3_000..3_200).chain([6_143, 6_144, 6_145, 9_999]);
        for len in lengths {
            for from in [0, 1, len / 2] {
                let some = &data[from.min(len)..len];
                assert_eq!(extend(7, some), extend_plain(7, some), "length {len} from {from}");
                #[cfg(target_arch = "x86_64")]
                if std::arch::is_x86_feature_detected!("sse4.2") {
                    // SAFETY: the processor has the instruction.
                    let lanes = unsafe { extend_sse42(7, some) };
                    assert_eq!(lanes, extend_plain(7, some), "lanes, length {len} from {from}");
                }
                #[cfg(target_arch = "x86_64")]
                if some.len() >= 128 && can_fold_half() {
                    // SAFETY: the processor has the instructions.
                    let folded = unsafe { extend_folding_half(7, some) };
                    assert_eq!(folded, extend_plain(7, some), "half, length {len} from {from}");
                }
            }
        }
    }

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let data: Vec<u8> = (0..5_000u32).map(|i| (i * 31) as u8).collect();
        for cut in [0, 1, 8, 3_071, 3_072, 4_999] {
            assert_eq!(extend(crc32c(&data[..cut]), &data[cut..]), crc32c(&data));
        }
    }
}
