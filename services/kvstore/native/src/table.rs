//! Index table: 16-byte key to the metadata record of a block, 40 bytes an entry.
//!
//! Open addressing with Robin Hood order. The home of a key is its hash scaled to the capacity, so
//! capacity need not be a power of two (growth by a quarter keeps a block under 64 bytes, slack
//! included) and entries lie in the order of their hashes, which gives a cursor that survives
//! growth. Keys are cut from SHA-256 under a secret (section 2), so nobody can aim at one bucket,
//! and the key itself is the hash.

use crate::crc;

pub type Key16 = [u8; 16];

/// Length of one log entry, on disk and on the wire.
pub const LOG_ENTRY_BYTES: usize = 80;
pub const OP_SET: u8 = 1;
pub const OP_REMOVE: u8 = 2;

pub const STATE_COMMITTED: u8 = 1;
pub const STATE_DEGRADED: u8 = 2;
pub const STATE_EVICTING: u8 = 3;
pub const STATE_TOMBSTONE: u8 = 4;

/// One access epoch, in seconds.
pub const EPOCH_S: u64 = 600;

/// Metadata of one block (kvcache-and-balancing.md, 3.3). State 0 marks a free slot of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Record {
    pub put_id: u64,
    pub index: u32,
    pub created_s: u32,
    pub access_epoch: u32,
    pub shards: u16,
    /// Low four bits the state, high four the TTL class.
    state_class: u8,
    pub flags: u8,
}

impl Record {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        put_id: u64,
        index: u32,
        created_s: u32,
        access_epoch: u32,
        shards: u16,
        state: u8,
        class: u8,
        flags: u8,
    ) -> Record {
        Record {
            put_id,
            index,
            created_s,
            access_epoch,
            shards,
            state_class: state & 15 | class << 4,
            flags,
        }
    }

    pub fn state(&self) -> u8 {
        self.state_class & 15
    }

    pub fn class(&self) -> u8 {
        self.state_class >> 4
    }

    fn is_readable(&self) -> bool {
        matches!(self.state(), STATE_COMMITTED | STATE_DEGRADED)
    }

    /// True once the class's time to live has passed since the end of the last epoch of access.
    pub fn is_expired(&self, now_s: u64, ttl_s: &[u64]) -> bool {
        let ttl_s = ttl_s.get(self.class() as usize).copied().unwrap_or(0);
        now_s > (self.access_epoch as u64 + 1) * EPOCH_S + ttl_s
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Entry {
    key: Key16,
    record: Record,
}

const _: () = assert!(size_of::<Entry>() == 40);

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Every key asked for is there.
    All = 0,
    Absent = 1,
    /// Tombstone, being evicted, or expired.
    Evicted = 2,
}

#[derive(Default)]
pub struct Table {
    entries: Vec<Entry>,
    /// Homes lie in [0, homes); behind them a tail that takes the last run, so nothing wraps.
    homes: usize,
    len: usize,
}

const TAIL: usize = 256;
const MIN_HOMES: usize = 64;

fn hash_of(key: &Key16) -> u64 {
    u64::from_le_bytes(key[8..].try_into().expect("8 bytes"))
}

impl Table {
    pub fn new() -> Table {
        Table::with_homes(MIN_HOMES)
    }

    fn with_homes(homes: usize) -> Table {
        Table { entries: vec![Entry::default(); homes + TAIL], homes, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory that the table holds.
    pub fn memory_bytes(&self) -> usize {
        self.entries.len() * size_of::<Entry>()
    }

    fn home(&self, hash: u64) -> usize {
        ((hash as u128 * self.homes as u128) >> 64) as usize
    }

    fn is_free(&self, at: usize) -> bool {
        self.entries[at].record.state_class == 0
    }

    fn find(&self, key: &Key16) -> Option<usize> {
        let home = self.home(hash_of(key));
        let mut at = home;
        while at < self.entries.len() && !self.is_free(at) {
            let entry = &self.entries[at];
            if entry.key == *key {
                return Some(at);
            }
            // In Robin Hood order nothing with our home lies behind a later home.
            if self.home(hash_of(&entry.key)) > home {
                return None;
            }
            at += 1;
        }
        None
    }

    pub fn get(&self, key: &Key16) -> Option<Record> {
        self.find(key).map(|at| self.entries[at].record)
    }

    /// Inserts or replaces. A record without a state would be invisible and is refused.
    pub fn set(&mut self, key: &Key16, record: Record) {
        assert_ne!(record.state(), 0, "a record needs a state");
        if let Some(at) = self.find(key) {
            self.entries[at].record = record;
            return;
        }
        if (self.len + 1) * 20 > self.homes * 17 {
            self.grow();
        }
        while !self.insert_new(Entry { key: *key, record }) {
            self.grow();
        }
    }

    /// False, with nothing changed, when the run would pass the end of the tail.
    fn insert_new(&mut self, entry: Entry) -> bool {
        let home = self.home(hash_of(&entry.key));
        let mut at = home;
        while at < self.entries.len()
            && !self.is_free(at)
            && self.home(hash_of(&self.entries[at].key)) <= home
        {
            at += 1;
        }
        let mut end = at;
        while end < self.entries.len() && !self.is_free(end) {
            end += 1;
        }
        if end == self.entries.len() {
            return false;
        }
        self.entries.copy_within(at..end, at + 1);
        self.entries[at] = entry;
        self.len += 1;
        true
    }

    fn grow(&mut self) {
        let mut homes = self.homes + self.homes / 4;
        'larger: loop {
            let mut larger = Table::with_homes(homes);
            for entry in self.entries.iter().filter(|entry| entry.record.state_class != 0) {
                if !larger.insert_new(*entry) {
                    homes += homes / 4;
                    continue 'larger;
                }
            }
            *self = larger;
            return;
        }
    }

    pub fn remove(&mut self, key: &Key16) -> Option<Record> {
        let mut at = self.find(key)?;
        let record = self.entries[at].record;
        // Shift the run back by one; an entry in its home stays.
        while at + 1 < self.entries.len()
            && !self.is_free(at + 1)
            && self.home(hash_of(&self.entries[at + 1].key)) <= at
        {
            self.entries[at] = self.entries[at + 1];
            at += 1;
        }
        self.entries[at] = Entry::default();
        self.len -= 1;
        Some(record)
    }

    /// How many leading keys are stored and alive, and why the next one is not.
    ///
    /// `keys` holds a key every `stride` bytes (16 for index keys, 32 for full ones).
    pub fn match_prefix(
        &self,
        keys: &[u8],
        stride: usize,
        now_s: u64,
        ttl_s: &[u64],
    ) -> (usize, Stop) {
        const AHEAD: usize = 12;
        let count = keys.len() / stride;
        let key =
            |i: usize| -> Key16 { keys[i * stride..i * stride + 16].try_into().expect("16 bytes") };
        for i in 0..count.min(AHEAD) {
            self.prefetch(&key(i));
        }
        for i in 0..count {
            if i + AHEAD < count {
                self.prefetch(&key(i + AHEAD));
            }
            match self.get(&key(i)) {
                None => return (i, Stop::Absent),
                Some(record) if !record.is_readable() || record.is_expired(now_s, ttl_s) => {
                    return (i, Stop::Evicted);
                }
                Some(_) => {}
            }
        }
        (count, Stop::All)
    }

    /// Look-ups in a big table are cache misses; asking ahead lets a dozen of them overlap.
    #[inline]
    fn prefetch(&self, key: &Key16) {
        #[cfg(target_arch = "x86_64")]
        {
            let at = self.home(hash_of(key));
            // SAFETY: a home is inside the table, and a prefetch reads nothing.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                    self.entries.as_ptr().add(at).cast(),
                )
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = key;
    }

    /// Sets the access epoch and raises the class of the keys that are stored and change by it.
    /// Returns the log entries of the change, numbered from `first_seq`.
    pub fn touch(
        &mut self,
        keys: &[u8],
        stride: usize,
        epoch: u32,
        class: u8,
        n_pg: u16,
        first_seq: u64,
    ) -> Vec<u8> {
        let mut log = Vec::new();
        let mut seq = first_seq;
        for key in keys.chunks_exact(stride) {
            let key: Key16 = key[..16].try_into().expect("16 bytes");
            let Some(at) = self.find(&key) else { continue };
            let record = &mut self.entries[at].record;
            if !record.is_readable() || record.access_epoch >= epoch && record.class() >= class {
                continue;
            }
            record.access_epoch = record.access_epoch.max(epoch);
            record.state_class = record.state() | record.class().max(class) << 4;
            log.extend_from_slice(&encode_entry(seq, OP_SET, &key, record, &[0; 16], n_pg));
            seq += 1;
        }
        log
    }

    /// Keys in the order of eviction: expired, then least access epoch, then larger block index
    /// (leaves before parents), then key. Only readable blocks; at most `limit` of them.
    /// The flag says whether the block is expired.
    pub fn eviction_order(
        &self,
        now_s: u64,
        ttl_s: &[u64],
        limit: usize,
        only_expired: bool,
    ) -> Vec<(Key16, bool)> {
        type Rank = (bool, u32, std::cmp::Reverse<u32>, Key16);
        let mut ranks: Vec<Rank> = self
            .entries
            .iter()
            .filter(|entry| entry.record.is_readable())
            .map(|entry| {
                let alive = !entry.record.is_expired(now_s, ttl_s);
                (alive, entry.record.access_epoch, std::cmp::Reverse(entry.record.index), entry.key)
            })
            .filter(|rank| !(only_expired && rank.0))
            .collect();
        if limit < ranks.len() && limit > 0 {
            ranks.select_nth_unstable(limit - 1);
        }
        ranks.truncate(limit);
        ranks.sort_unstable();
        ranks.into_iter().map(|(alive, _, _, key)| (key, !alive)).collect()
    }

    /// Tombstones and evictions in progress last touched before `epoch`.
    pub fn stale(&self, state: u8, epoch: u32) -> Vec<Key16> {
        let is_stale =
            |entry: &&Entry| entry.record.state() == state && entry.record.access_epoch < epoch;
        self.entries.iter().filter(is_stale).map(|entry| entry.key).collect()
    }

    /// Applies whole log entries. Stops at the first entry that is cut short or damaged.
    /// Returns the bytes consumed and the sequence number of the last entry applied (0: none).
    pub fn apply_log(&mut self, log: &[u8]) -> (usize, u64) {
        let (mut consumed, mut last_seq) = (0, 0);
        for bytes in log.chunks_exact(LOG_ENTRY_BYTES) {
            let Some((seq, op, key, record)) = decode_entry(bytes) else { break };
            match op {
                OP_SET => self.set(&key, record),
                _ => drop(self.remove(&key)),
            }
            consumed += LOG_ENTRY_BYTES;
            last_seq = seq;
        }
        (consumed, last_seq)
    }

    /// Takes over the records that another log sets, as entries of our own log numbered from
    /// `first_seq`; what that log removes is only named, for another log may still hold it.
    pub fn merge(&mut self, log: &[u8], n_pg: u16, first_seq: u64) -> (Vec<u8>, Vec<Key16>) {
        let (mut entries, mut removed) = (Vec::with_capacity(log.len()), Vec::new());
        let mut seq = first_seq;
        for bytes in log.chunks_exact(LOG_ENTRY_BYTES) {
            let Some((_, op, key, record)) = decode_entry(bytes) else { break };
            if op != OP_SET {
                removed.push(key);
                continue;
            }
            self.set(&key, record);
            entries.extend_from_slice(&encode_entry(seq, OP_SET, &key, &record, &[0; 16], n_pg));
            seq += 1;
        }
        (entries, removed)
    }

    /// Part of a snapshot: entries with a hash of at least `from`, about `limit` of them, as log
    /// entries numbered `seq`. Also the next `from`; None at the end. The order is that of the
    /// hashes, so an entry present throughout is never left out, whatever is set, removed or grown
    /// between two calls.
    pub fn snapshot(&self, from: u64, limit: usize, seq: u64, n_pg: u16) -> (Vec<u8>, Option<u64>) {
        let mut log = Vec::new();
        let mut count = 0;
        let mut at = self.home(from);
        while at < self.entries.len() {
            let entry = &self.entries[at];
            let hash = hash_of(&entry.key);
            if !self.is_free(at) && hash >= from {
                // Cut only between two homes: inside one the entries are not sorted.
                if count >= limit && self.home(hash) > self.home(hash_of(&self.entries[at - 1].key))
                {
                    let home = self.home(hash);
                    return (log, Some(self.first_hash_of(home)));
                }
                log.extend_from_slice(&encode_entry(
                    seq,
                    OP_SET,
                    &entry.key,
                    &entry.record,
                    &[0; 16],
                    n_pg,
                ));
                count += 1;
            }
            at += 1;
        }
        (log, None)
    }

    fn first_hash_of(&self, home: usize) -> u64 {
        ((home as u128) << 64).div_ceil(self.homes as u128) as u64
    }

    /// Number of records per (state, class), as (state, class, count).
    pub fn census(&self) -> Vec<(u8, u8, usize)> {
        let mut counts = [0usize; 256];
        for entry in &self.entries {
            counts[entry.record.state_class as usize] += 1;
        }
        (1..256)
            .filter(|at| counts[*at] > 0)
            .map(|at| (at as u8 & 15, at as u8 >> 4, counts[at]))
            .collect()
    }
}

/// Placement group of a key (section 4).
pub fn pg_of(key: &Key16, n_pg: u16) -> u16 {
    u16::from_be_bytes([key[0], key[1]]) % n_pg.max(1)
}

/// One log entry: `seq u64, op u8, 3 zero bytes, key16, record of 48 bytes, crc32c`.
pub fn encode_entry(
    seq: u64,
    op: u8,
    key: &Key16,
    record: &Record,
    parent: &Key16,
    n_pg: u16,
) -> [u8; LOG_ENTRY_BYTES] {
    let mut bytes = [0; LOG_ENTRY_BYTES];
    bytes[..8].copy_from_slice(&seq.to_le_bytes());
    bytes[8] = op;
    bytes[12..28].copy_from_slice(key);
    bytes[28..76].copy_from_slice(&encode_record(record, parent, pg_of(key, n_pg)));
    let crc = crc::crc32c(&bytes[..76]);
    bytes[76..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn encode_record(record: &Record, parent: &Key16, pg: u16) -> [u8; 48] {
    let mut bytes = [0; 48];
    bytes[..8].copy_from_slice(&record.put_id.to_le_bytes());
    bytes[8..24].copy_from_slice(parent);
    bytes[24..28].copy_from_slice(&record.index.to_le_bytes());
    bytes[28..32].copy_from_slice(&record.created_s.to_le_bytes());
    bytes[32..36].copy_from_slice(&record.access_epoch.to_le_bytes());
    bytes[36] = record.class();
    bytes[37] = record.state();
    bytes[38..40].copy_from_slice(&record.shards.to_le_bytes());
    bytes[40..42].copy_from_slice(&pg.to_le_bytes());
    bytes[42..44].copy_from_slice(&(record.flags as u16).to_le_bytes());
    let crc = crc::crc32c(&bytes[..44]);
    bytes[44..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// None for an entry that is damaged or of an unknown kind.
pub fn decode_entry(bytes: &[u8]) -> Option<(u64, u8, Key16, Record)> {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let half = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"));
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    if bytes.len() != LOG_ENTRY_BYTES || word(76) != crc::crc32c(&bytes[..76]) {
        return None;
    }
    let op = bytes[8];
    let state = bytes[28 + 37];
    let sound =
        op == OP_REMOVE || op == OP_SET && (STATE_COMMITTED..=STATE_TOMBSTONE).contains(&state);
    if !sound || word(72) != crc::crc32c(&bytes[28..72]) {
        return None;
    }
    let record = Record::new(
        long(28),
        word(52),
        word(56),
        word(60),
        half(66),
        state,
        bytes[28 + 36],
        half(70) as u8,
    );
    Some((long(0), op, bytes[12..28].try_into().expect("16 bytes"), record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const TTL_S: [u64; 3] = [0, 259_200, 604_800];

    fn key(n: u64) -> Key16 {
        let mut state = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = || {
            state ^= state >> 29;
            state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
            state ^= state >> 32;
            state
        };
        let mut key = [0; 16];
        key[..8].copy_from_slice(&next().to_le_bytes());
        key[8..].copy_from_slice(&next().to_le_bytes());
        key
    }

    fn record(index: u32, epoch: u32) -> Record {
        Record::new(7, index, 0, epoch, 0xfff, STATE_COMMITTED, 1, 0)
    }

    #[test]
    fn the_table_behaves_as_a_map_under_random_edits() {
        let (mut table, mut model) = (Table::new(), BTreeMap::new());
        let mut state = 1u64;
        for step in 0..60_000u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = key(state >> 33 & 0xfff);
            if state >> 20 & 3 == 0 {
                assert_eq!(table.remove(&key), model.remove(&key));
            } else {
                table.set(&key, record(step, 0));
                model.insert(key, record(step, 0));
            }
            assert_eq!(table.len(), model.len());
        }
        for n in 0..0x1000 {
            assert_eq!(table.get(&key(n)), model.get(&key(n)).copied());
        }
    }

    #[test]
    fn a_block_costs_at_most_64_bytes_at_any_size_past_the_first_thousands() {
        let mut table = Table::new();
        for n in 0..300_000u64 {
            table.set(&key(n), record(1, 0));
            assert!(n < 4_000 || table.memory_bytes() <= 64 * table.len(), "at {n}");
        }
    }

    #[test]
    fn t_match_a_hole_ends_the_prefix() {
        let mut table = Table::new();
        for n in [1, 2, 3, 4, 5, 7] {
            table.set(&key(n), record(n as u32, 0));
        }
        let keys: Vec<u8> = (1..=8).flat_map(key).collect();
        assert_eq!(table.match_prefix(&keys, 16, 0, &TTL_S), (5, Stop::Absent));
        assert_eq!(table.match_prefix(&keys[..80], 16, 0, &TTL_S), (5, Stop::All));
        table.set(&key(2), Record::new(7, 2, 0, 0, 0, STATE_TOMBSTONE, 1, 0));
        assert_eq!(table.match_prefix(&keys, 16, 0, &TTL_S), (1, Stop::Evicted));
    }

    #[test]
    fn t_gc_3_ends_of_life() {
        let agent = record(1, 0);
        assert!(!agent.is_expired(259_800, &TTL_S) && agent.is_expired(259_801, &TTL_S));
        let mut table = Table::new();
        table.set(&key(1), agent);
        assert_eq!(table.touch(&key(1), 16, 426, 2, 1024, 9).len(), LOG_ENTRY_BYTES);
        let chat = table.get(&key(1)).unwrap();
        assert!(!chat.is_expired(861_000, &TTL_S) && chat.is_expired(861_001, &TTL_S));
        assert!(table.touch(&key(1), 16, 426, 1, 1024, 9).is_empty());
    }

    #[test]
    fn t_gc_2_leaves_go_before_parents() {
        let mut table = Table::new();
        for n in 1..=4 {
            table.set(&key(n), record(n as u32, 5));
        }
        table.touch(&[key(1), key(2)].concat(), 16, 6, 1, 1024, 0);
        let order: Vec<Key16> =
            table.eviction_order(0, &TTL_S, 9, false).into_iter().map(|(key, _)| key).collect();
        assert_eq!(order, [key(4), key(3), key(2), key(1)]);
        assert_eq!(table.eviction_order(0, &TTL_S, 2, false).len(), 2);
        assert!(table.eviction_order(0, &TTL_S, 9, true).is_empty());
    }

    #[test]
    fn snapshots_and_logs_rebuild_the_table_and_damage_ends_them() {
        let mut table = Table::new();
        for n in 0..5_000 {
            table.set(&key(n), record(n as u32, 3));
        }
        let (mut copy, mut from, mut parts) = (Table::new(), Some(0), 0);
        while let Some(start) = from {
            let (log, next) = table.snapshot(start, 100, 42, 1024);
            assert_eq!(copy.apply_log(&log), (log.len(), 42));
            // Growth between two parts must not lose anything.
            for n in 0..50 {
                table.set(&key(1_000_000 + parts * 50 + n), record(1, 1));
            }
            (from, parts) = (next, parts + 1);
        }
        assert!(parts > 20);
        assert!((0..5_000).all(|n| copy.get(&key(n)) == table.get(&key(n))));

        let (log, _) = table.snapshot(0, usize::MAX, 1, 1024);
        for flip in [0, 8, 20, 40, 75, 79] {
            let mut bad = log[..3 * LOG_ENTRY_BYTES].to_vec();
            bad[LOG_ENTRY_BYTES + flip] ^= 1;
            assert_eq!(Table::new().apply_log(&bad).0, LOG_ENTRY_BYTES, "byte {flip}");
        }
        assert_eq!(Table::new().apply_log(&log[..LOG_ENTRY_BYTES * 2 - 1]).0, LOG_ENTRY_BYTES);
    }
}
