//! Whole pieces looked up at once: most words of a text are one token.
//!
//! The key is the piece itself, padded with zeros to 15 bytes, and its length: comparing keys
//! compares the bytes, so a hit is exact.

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
        let mask = MASKS[len];
        Key { low: low & mask.0, high: high & mask.1 | (len as u64) << 56 }
    }

    #[inline(always)]
    fn hash(self) -> u64 {
        let product = u128::from(self.low ^ 0x2D35_8DCC_AA6C_78A5)
            * u128::from(self.high ^ 0x8BB8_4B93_962E_ACC9);
        (product as u64) ^ (product >> 64) as u64
    }
}

#[derive(Clone, Copy, Default)]
struct Slot {
    key: Key,
    id: u32,
}

/// Fixed after it was built.
pub struct WordTable {
    slots: Vec<Slot>,
    mask: usize,
}

impl WordTable {
    pub fn new(words: &[(Vec<u8>, u32)]) -> Self {
        let short = || words.iter().filter(|word| word.0.len() <= MAX_KEY_LEN);
        let num_slots = (short().count() * 2).next_power_of_two().max(16);
        let mut table = WordTable { slots: vec![Slot::default(); num_slots], mask: num_slots - 1 };
        for (bytes, id) in short() {
            let key = Key::new(bytes, 0, bytes.len());
            let mut at = key.hash() as usize & table.mask;
            while table.slots[at].key != Key::default() {
                at = (at + 1) & table.mask;
            }
            table.slots[at] = Slot { key, id: *id };
        }
        table
    }

    #[inline(always)]
    pub fn get(&self, key: Key) -> Option<u32> {
        let mut at = key.hash() as usize & self.mask;
        loop {
            let slot = &self.slots[at];
            if slot.key == key {
                return Some(slot.id);
            }
            if slot.key == Key::default() {
                return None;
            }
            at = (at + 1) & self.mask;
        }
    }
}

/// Ids of one entry of the cache.
pub const MAX_CACHED_IDS: usize = 3;
const CACHE_BITS: u32 = 13;

/// Pieces of a few tokens seen lately: one place per hash, a newer piece replaces an older.
pub struct WordCache {
    entries: Vec<Cached>,
}

#[derive(Clone, Copy, Default)]
struct Cached {
    key: Key,
    num_ids: u32,
    ids: [u32; MAX_CACHED_IDS],
}

impl WordCache {
    pub fn new() -> Self {
        WordCache { entries: vec![Cached::default(); 1 << CACHE_BITS] }
    }

    #[inline(always)]
    pub fn get(&self, key: Key) -> Option<&[u32]> {
        let entry = &self.entries[(key.hash() >> (64 - CACHE_BITS)) as usize];
        (entry.key == key).then(|| &entry.ids[..entry.num_ids as usize])
    }

    pub fn put(&mut self, key: Key, ids: &[u32]) {
        if ids.len() > MAX_CACHED_IDS {
            return;
        }
        let entry = &mut self.entries[(key.hash() >> (64 - CACHE_BITS)) as usize];
        entry.key = key;
        entry.num_ids = ids.len() as u32;
        entry.ids[..ids.len()].copy_from_slice(ids);
    }
}
