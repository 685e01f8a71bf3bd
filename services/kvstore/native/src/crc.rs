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
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instruction.
        return unsafe { extend_sse42(seed, data) };
    }
    extend_plain(seed, data)
}

pub fn extend_plain(seed: u32, data: &[u8]) -> u32 {
    !data.iter().fold(!seed, |crc, byte| (crc >> 8) ^ TABLE[((crc ^ *byte as u32) & 0xff) as usize])
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
        for len in (0..70).chain(3_000..3_200).chain([6_143, 6_144, 6_145, 9_999]) {
            assert_eq!(extend(7, &data[..len]), extend_plain(7, &data[..len]), "length {len}");
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
