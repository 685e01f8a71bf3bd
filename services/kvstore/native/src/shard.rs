//! What a shard is called, and the header that says so. Source: kvcache-and-balancing.md, section 6.

use std::hash::Hasher;

use crate::crc;
use crate::table::Key16;

pub const SHARD_HEADER_BYTES: usize = 128;

/// What a shard is called: two attempts to put one key never share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId {
    pub key: Key16,
    pub shard: u8,
    pub put_id: u64,
}

/// The id and data length in a shard header; None if it is not one.
pub fn parse_header(header: &[u8]) -> Option<(ShardId, u32)> {
    let sound = header.len() >= SHARD_HEADER_BYTES
        && &header[..4] == b"DKSH"
        && header[4] == 1
        && word(header, 124) == crc::crc32c(&header[..124]);
    sound.then(|| {
        let key = header[24..40].try_into().expect("16 bytes");
        (ShardId { key, shard: header[5], put_id: long(header, 56) }, word(header, 12))
    })
}

pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Keys are cut from digests under a secret, and put ids are random: nobody can aim at one bucket,
/// so mixing is enough.
#[derive(Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value as u64);
    }

    fn write_usize(&mut self, _length: usize) {}

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(26) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // The map takes its bucket from the low bits, which a product mixes least.
        self.0 ^ self.0 >> 32
    }
}
