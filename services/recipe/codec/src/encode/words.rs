//! Whole pieces looked up at once: most words of a text are one token.
//!
//! The key is the piece itself, padded with zeros to 15 bytes, and its length: comparing keys
//! compares the bytes, so a hit is exact.

use super::huge::HugeVec;
use super::merges::{Merges, Token};

/// Longest piece that fits a key.
pub const MAX_KEY_LEN: usize = 15;

#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Key {
    low: u64,
    high: u64,
}

/// Keeps the first `len` bytes of a 16-byte load.
static MASKS: [(u64, u64); MAX_KEY_LEN + 1] = {
    let mut masks = [(0, 0); MAX_KEY_LEN + 1];
    let mut len = 0;
    while len <= MAX_KEY_LEN {
        let mask = (1u128 << (8 * len)) - 1;
        masks[len] = (mask as u64, (mask >> 64) as u64);
        len += 1;
    }
    masks
};

impl Key {
    /// The key of `text[start..start + len]`; `len` in `1..=MAX_KEY_LEN`.
    #[inline(always)]
    pub fn new(text: &[u8], start: usize, len: usize) -> Key {
        Head::new(text, start, len).key(len)
    }

    #[inline(always)]
    pub fn hash(self) -> u64 {
        let product = u128::from(self.low ^ 0x2D35_8DCC_AA6C_78A5)
            * u128::from(self.high ^ 0x8BB8_4B93_962E_ACC9);
        (product as u64) ^ (product >> 64) as u64
    }
}

/// The bytes at a place, from which the keys of all pieces that start there follow.
#[derive(Clone, Copy)]
pub struct Head {
    low: u64,
    high: u64,
}

impl Head {
    /// At least `len` bytes of `text[start..]`, more where there are more.
    #[inline(always)]
    pub fn new(text: &[u8], start: usize, len: usize) -> Head {
        let bytes: [u8; 16] = match text.get(start..start + 16) {
            Some(bytes) => bytes.try_into().unwrap_or_default(),
            None => {
                let mut bytes = [0; 16];
                bytes[..len].copy_from_slice(&text[start..start + len]);
                bytes
            }
        };
        let (low, high) = bytes.split_at(8);
        let low = u64::from_le_bytes(low.try_into().unwrap_or_default());
        let high = u64::from_le_bytes(high.try_into().unwrap_or_default());
        Head { low, high }
    }

    /// The key of the first `len` bytes; `len` in `1..=MAX_KEY_LEN`.
    #[inline(always)]
    pub fn key(self, len: usize) -> Key {
        let mask = MASKS[len];
        Key { low: self.low & mask.0, high: self.high & mask.1 | (len as u64) << 56 }
    }
}

/// No id: what a table answers for a piece that it does not hold.
pub const NO_ID: u32 = u32::MAX;

const SLOTS: usize = 3;

/// Three tokens in one line of the cache: a look-up waits for memory once.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line {
    low: [u64; SLOTS],
    high: [u64; SLOTS],
    /// Filled from the left; `NO_ID` in an empty slot.
    ids: [u32; SLOTS],
}

const EMPTY: Line = Line { low: [0; SLOTS], high: [0; SLOTS], ids: [NO_ID; SLOTS] };

/// All short tokens, with their ids. Fixed after it was built.
pub struct WordTable {
    lines: HugeVec<Line>,
    mask: usize,
}

impl WordTable {
    /// `words` with the most frequent first: those stay in the line that is looked at first.
    pub fn new(words: &[(Vec<u8>, Token)], merges: &Merges) -> Self {
        let short = || words.iter().filter(|word| word.0.len() <= MAX_KEY_LEN);
        let num_lines = (short().count() / 2).next_power_of_two();
        let mut table = WordTable { lines: HugeVec::new(num_lines, EMPTY), mask: num_lines - 1 };
        for (bytes, token) in short() {
            let key = Key::new(bytes, 0, bytes.len());
            let mut at = key.hash() as usize & table.mask;
            let slot = loop {
                match table.lines[at].ids.iter().position(|id| *id == NO_ID) {
                    Some(slot) => break slot,
                    None => at = (at + 1) & table.mask,
                }
            };
            let line = &mut table.lines[at];
            (line.low[slot], line.high[slot]) = (key.low, key.high);
            line.ids[slot] = merges.id(*token);
        }
        table
    }

    /// Starts to load what `get` will look at.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        prefetch(&self.lines[hash as usize & self.mask]);
    }

    /// The id of a token; `NO_ID` for any other piece, and for the key of no piece.
    #[inline(always)]
    pub fn get(&self, key: Key, hash: u64) -> u32 {
        let mut at = hash as usize & self.mask;
        loop {
            let line = &self.lines[at];
            let is = |slot: usize| (line.low[slot] ^ key.low) | (line.high[slot] ^ key.high) == 0;
            let slot = if is(2) { 2 } else { usize::from(is(1)) };
            // An empty slot holds the key of no piece, and `NO_ID`.
            if slot != 0 || is(0) {
                return line.ids[slot];
            }
            if line.ids[SLOTS - 1] == NO_ID {
                return NO_ID;
            }
            at = (at + 1) & self.mask;
        }
    }
}

/// Starts to load a value, of one line of the cache.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Ids of one entry of a cache.
pub const MAX_CACHED_IDS: usize = 4;

/// Pieces seen lately: one place per hash, a newer piece replaces an older.
pub struct WordCache {
    entries: HugeVec<Cached>,
    shift: u32,
}

/// The number of ids lies in the upper half of the key's length byte, so that an entry is half a
/// cache line.
#[derive(Clone, Copy, Default)]
struct Cached {
    key: Key,
    ids: [u32; MAX_CACHED_IDS],
}

const NUM_IDS_SHIFT: u32 = 60;

impl WordCache {
    pub fn new(bits: u32) -> Self {
        WordCache { entries: HugeVec::new(1 << bits, Cached::default()), shift: 64 - bits }
    }

    /// Starts to load what `get` will look at.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        prefetch(&self.entries[(hash >> self.shift) as usize]);
    }

    /// The ids and how many of them count.
    #[inline(always)]
    pub fn get(&self, key: Key, hash: u64) -> Option<(&[u32; MAX_CACHED_IDS], usize)> {
        let entry = &self.entries[(hash >> self.shift) as usize];
        let difference =
            (entry.key.low ^ key.low) | ((entry.key.high ^ key.high) & ((1 << NUM_IDS_SHIFT) - 1));
        (difference == 0).then_some((&entry.ids, (entry.key.high >> NUM_IDS_SHIFT) as usize))
    }

    /// Remembers a piece of 1 to `MAX_CACHED_IDS` ids; one of more is not kept.
    #[inline]
    pub fn put(&mut self, key: Key, hash: u64, ids: &[u32]) {
        if ids.len() > MAX_CACHED_IDS {
            return;
        }
        let entry = &mut self.entries[(hash >> self.shift) as usize];
        let high = key.high | (ids.len() as u64) << NUM_IDS_SHIFT;
        entry.key = Key { low: key.low, high };
        entry.ids[..ids.len()].copy_from_slice(ids);
    }
}
