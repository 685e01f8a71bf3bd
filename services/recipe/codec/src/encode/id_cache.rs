//! Ids of text encoded before: a conversation that grew costs only what is new in it.
//!
//! Bounded in bytes, the longest unused goes first. An entry keeps its text and a hit compares it,
//! so no choice of inputs makes one text answer for another.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What an entry costs beside its text and ids.
const ENTRY_BYTES: usize = 160;

/// No entry: the end of the list.
const NONE: usize = usize::MAX;

pub struct IdCache {
    seed: u64,
    max_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    by_hash: HashMap<u64, usize>,
    entries: Vec<Entry>,
    free: Vec<usize>,
    /// Entries from the latest used to the longest unused; `None` while empty.
    ends: Option<(usize, usize)>,
    num_bytes: usize,
}

pub struct Entry {
    hash: u64,
    text: Box<[u8]>,
    ids: Arc<[u32]>,
    newer: usize,
    older: usize,
}

impl Entry {
    fn num_bytes(&self) -> usize {
        num_entry_bytes(&self.text, &self.ids)
    }
}

fn num_entry_bytes(text: &[u8], ids: &[u32]) -> usize {
    text.len() + size_of_val(ids) + ENTRY_BYTES
}

impl IdCache {
    /// `max_bytes` of 0 keeps nothing.
    pub fn new(max_bytes: usize) -> Self {
        // A seed of its own for each process, so that nobody can aim at one place.
        let seed = RandomState::new().hash_one(0);
        IdCache { seed, max_bytes, state: Mutex::default() }
    }

    pub fn hash(&self, text: &[u8]) -> u64 {
        xxh3_64_with_seed(text, self.seed)
    }

    pub fn get(&self, hash: u64, text: &[u8]) -> Option<Arc<[u32]>> {
        let mut state = self.lock();
        let index = *state.by_hash.get(&hash)?;
        if *state.entries[index].text != *text {
            return None;
        }
        state.unlink(index);
        state.link_newest(index);
        Some(Arc::clone(&state.entries[index].ids))
    }

    /// What `put` keeps of a text; `None` for more than the cache may hold.
    pub fn entry(&self, hash: u64, text: &[u8], ids: &[u32]) -> Option<Entry> {
        if num_entry_bytes(text, ids) > self.max_bytes {
            return None;
        }
        Some(Entry { hash, text: text.into(), ids: ids.into(), newer: NONE, older: NONE })
    }

    /// Keeps entries, the last one as the latest used.
    pub fn put(&self, entries: impl IntoIterator<Item = Entry>) {
        let mut state = self.lock();
        for entry in entries {
            state.put(entry, self.max_bytes);
        }
    }

    /// Bytes held now.
    pub fn num_bytes(&self) -> usize {
        self.lock().num_bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn put(&mut self, entry: Entry, max_bytes: usize) {
        if let Some(&index) = self.by_hash.get(&entry.hash) {
            self.remove(index);
        }
        self.num_bytes += entry.num_bytes();
        while self.num_bytes > max_bytes {
            let Some((_, oldest)) = self.ends else { break };
            self.remove(oldest);
        }
        let hash = entry.hash;
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[index] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        };
        self.by_hash.insert(hash, index);
        self.link_newest(index);
    }

    fn unlink(&mut self, index: usize) {
        let (newer, older) = (self.entries[index].newer, self.entries[index].older);
        if newer != NONE {
            self.entries[newer].older = older;
        }
        if older != NONE {
            self.entries[older].newer = newer;
        }
        self.ends = match self.ends {
            Some((newest, oldest)) if newest == index && oldest == index => None,
            Some((newest, oldest)) if newest == index => Some((older, oldest)),
            Some((newest, oldest)) if oldest == index => Some((newest, newer)),
            ends => ends,
        };
    }

    fn link_newest(&mut self, index: usize) {
        let (older, oldest) = match self.ends {
            Some((newest, oldest)) => (newest, oldest),
            None => (NONE, index),
        };
        self.entries[index].newer = NONE;
        self.entries[index].older = older;
        if older != NONE {
            self.entries[older].newer = index;
        }
        self.ends = Some((index, oldest));
    }

    fn remove(&mut self, index: usize) {
        self.unlink(index);
        let entry = &mut self.entries[index];
        self.num_bytes -= entry.num_bytes();
        self.by_hash.remove(&entry.hash);
        entry.text = Box::default();
        entry.ids = Arc::new([]);
        self.free.push(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(cache: &IdCache, text: &str, ids: &[u32]) {
        cache.put(cache.entry(cache.hash(text.as_bytes()), text.as_bytes(), ids));
    }

    fn get(cache: &IdCache, text: &str) -> Option<Vec<u32>> {
        cache.get(cache.hash(text.as_bytes()), text.as_bytes()).map(|ids| ids.to_vec())
    }

    #[test]
    fn the_longest_unused_goes_first_and_the_bound_holds() {
        let one = "a".len() + 4 + ENTRY_BYTES;
        let cache = IdCache::new(3 * one);
        for (text, id) in [("a", 1), ("b", 2), ("c", 3)] {
            put(&cache, text, &[id]);
        }
        assert_eq!(get(&cache, "a"), Some(vec![1]));
        put(&cache, "d", &[4]);
        assert_eq!(cache.num_bytes(), 3 * one);
        assert_eq!(get(&cache, "b"), None);
        assert_eq!(
            [get(&cache, "a"), get(&cache, "c"), get(&cache, "d")].map(|ids| ids.is_some()),
            [true; 3]
        );
    }

    #[test]
    fn texts_of_one_hash_never_answer_for_each_other() {
        let cache = IdCache::new(1 << 20);
        cache.put(cache.entry(7, b"mine", &[1]));
        assert_eq!(cache.get(7, b"thine"), None);
        cache.put(cache.entry(7, b"thine", &[2]));
        assert_eq!(cache.get(7, b"mine"), None);
        assert_eq!(cache.get(7, b"thine").as_deref(), Some(&[2][..]));
        assert_eq!(cache.num_bytes(), "thine".len() + 4 + ENTRY_BYTES);
    }

    #[test]
    fn what_is_too_large_is_not_kept() {
        let cache = IdCache::new(100);
        put(&cache, &"x".repeat(200), &[1]);
        assert_eq!(cache.num_bytes(), 0);
        put(&IdCache::new(0), "x", &[1]);
    }

    #[test]
    fn a_long_random_run_stays_linked_and_bounded() {
        let cache = IdCache::new(20 * (ENTRY_BYTES + 8));
        let mut state = 1u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let text = format!("t{}", state >> 58);
            match get(&cache, &text) {
                Some(ids) => assert_eq!(ids, [(state >> 58) as u32]),
                None => put(&cache, &text, &[(state >> 58) as u32]),
            }
            assert!(cache.num_bytes() <= 20 * (ENTRY_BYTES + 8));
        }
    }
}
