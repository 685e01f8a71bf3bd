//! Ids of the tool calls that we generate (recipe.md, section 6.11).

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const NUM_RANDOM: usize = 20;

/// Makes one stream's ids from a seed, so that the core stays free of randomness.
#[derive(Clone, Debug)]
pub struct CallIds {
    seed: u128,
    num_made: u32,
}

impl CallIds {
    /// `seed` holds 128 random bits; the same seed gives the same ids.
    pub fn new(seed: u128) -> Self {
        CallIds { seed, num_made: 0 }
    }

    /// Returns the next id. `is_unreasoned` marks a call made in thinking mode before any
    /// reasoning; conversion reads the mark back (recipe.md, section 6.5).
    pub fn next(&mut self, is_unreasoned: bool) -> String {
        let index = self.num_made;
        self.num_made += 1;
        let mut block = [0u8; 20];
        block[..16].copy_from_slice(&self.seed.to_le_bytes());
        block[16..].copy_from_slice(&index.to_le_bytes());
        let mut bits = xxh3_128(&block);
        let mark = if is_unreasoned { "ET_" } else { "" };
        let mut id = format!("call_{index:02}_{mark}");
        for _ in 0..NUM_RANDOM {
            id.push(char::from(ALPHABET[(bits % 62) as usize]));
            bits /= 62;
        }
        let checksum = checksum(&id);
        id.push_str(&format!("{checksum:04}"));
        id
    }
}

/// Returns the four-digit checksum of what stands before it: XXH3-64 without underscores.
pub fn checksum(head: &str) -> u64 {
    xxh3_64(head.replace('_', "").as_bytes()) % 10_000
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids that the official codec has made.
    #[test]
    fn checksums_agree_with_ids_seen_elsewhere() {
        for id in ["call_00_nZiiUiUEF1lDNVJnsXbC9117", "call_00_ET_sr8KQAyTuOSBLdHhdFPS8435"] {
            let (head, digits) = id.split_at(id.len() - 4);
            assert_eq!(format!("{:04}", checksum(head)), digits);
        }
    }

    #[test]
    fn ids_differ_and_have_their_shape() {
        let mut ids = CallIds::new(7);
        let made: Vec<String> = (0..200).map(|index| ids.next(index == 1)).collect();
        let mut distinct = made.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), made.len());
        assert!(made[0].starts_with("call_00_") && made[0].len() == 8 + 20 + 4);
        assert!(made[1].starts_with("call_01_ET_"));
        assert!(made[123].starts_with("call_123_"));
    }
}
