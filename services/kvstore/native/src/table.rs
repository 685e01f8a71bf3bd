//! Index table: 16-byte key to the metadata record of a block, in 42 bytes an entry.
//!
//! What a match needs of three entries (keys, states, epochs) shares one cache line; what only an
//! eviction or a put asks for lies in an array beside it. So most look-ups are one miss of the
//! caches, and the lines of many are on their way at once.
//!
//! Open addressing with Robin Hood order over lines. The home of a key is its hash scaled to the
//! number of lines, so that need not be a power of two (growth by a quarter keeps a block under 64
//! bytes, slack included) and entries lie in the order of their hashes, which gives a cursor that
//! survives growth. Keys are cut from SHA-256 under a secret (section 2), so nobody can aim at one
//! line, and the key itself is the hash.

use crate::crc;
use crate::pages::{Pages, Zeroed};

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
        (self.access_epoch as u64) < first_alive_epoch(self.class(), now_s, ttl_s)
    }
}

/// The earliest epoch of last access that a block of this class has not outlived.
fn first_alive_epoch(class: u8, now_s: u64, ttl_s: &[u64]) -> u64 {
    let ttl_s = ttl_s.get(class as usize).copied().unwrap_or(0);
    now_s.saturating_sub(ttl_s).div_ceil(EPOCH_S).saturating_sub(1)
}

/// Entries that share a line.
const WIDTH: usize = 3;

/// What a match asks for, of three entries. A state of 0 marks a free place; behind one nothing
/// follows whose home this line or an earlier one is.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Line {
    keys: [Key16; WIDTH],
    access_epochs: [u32; WIDTH],
    state_classes: [u8; WIDTH],
    _unused: u8,
}

/// The rest of one record.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Rest {
    /// In halves: a whole one would widen the entry to 24 bytes.
    put_id: [u32; 2],
    index: u32,
    created_s: u32,
    shards: u16,
    flags: u8,
    _unused: u8,
}

const _: () = assert!(size_of::<Line>() == 64 && size_of::<Rest>() == 20);
// SAFETY: numbers and arrays of them, without padding.
unsafe impl Zeroed for Line {}
// SAFETY: as above.
unsafe impl Zeroed for Rest {}

#[derive(Clone, Copy)]
struct Entry {
    key: Key16,
    record: Record,
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Every key asked for is there.
    All = 0,
    Absent = 1,
    /// Tombstone, being evicted, or expired.
    Evicted = 2,
}

/// An entry's number is three times that of its line, plus its place there.
#[derive(Default)]
pub struct Table {
    lines: Pages<Line>,
    rests: Pages<Rest>,
    /// Homes are the lines [0, homes); behind them a tail that takes the last run, so nothing wraps.
    homes: usize,
    len: usize,
}

const TAIL: usize = 86;
const MIN_HOMES: usize = 22;

fn hash_of(key: &Key16) -> u64 {
    u64::from_le_bytes(key[8..].try_into().expect("8 bytes"))
}

impl Table {
    pub fn new() -> Table {
        Table::with_homes(MIN_HOMES)
    }

    fn with_homes(homes: usize) -> Table {
        let num_lines = homes + TAIL;
        let rests = Pages::zeroed(num_lines * WIDTH);
        Table { lines: Pages::zeroed(num_lines), rests, homes, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory that the table holds.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&*self.lines) + size_of_val(&*self.rests)
    }

    /// The line where a key's search begins.
    fn home(&self, hash: u64) -> usize {
        ((hash as u128 * self.homes as u128) >> 64) as usize
    }

    fn key(&self, at: usize) -> &Key16 {
        &self.lines[at / WIDTH].keys[at % WIDTH]
    }

    fn home_at(&self, at: usize) -> usize {
        self.home(hash_of(self.key(at)))
    }

    fn is_free(&self, at: usize) -> bool {
        self.lines[at / WIDTH].state_classes[at % WIDTH] == 0
    }

    fn record(&self, at: usize) -> Record {
        let (line, place, rest) = (&self.lines[at / WIDTH], at % WIDTH, &self.rests[at]);
        Record {
            put_id: rest.put_id[0] as u64 | (rest.put_id[1] as u64) << 32,
            index: rest.index,
            created_s: rest.created_s,
            access_epoch: line.access_epochs[place],
            shards: rest.shards,
            state_class: line.state_classes[place],
            flags: rest.flags,
        }
    }

    fn entry(&self, at: usize) -> Entry {
        Entry { key: *self.key(at), record: self.record(at) }
    }

    fn write(&mut self, at: usize, entry: &Entry) {
        let (line, place, record) = (&mut self.lines[at / WIDTH], at % WIDTH, &entry.record);
        line.keys[place] = entry.key;
        line.access_epochs[place] = record.access_epoch;
        line.state_classes[place] = record.state_class;
        self.rests[at] = Rest {
            put_id: [record.put_id as u32, (record.put_id >> 32) as u32],
            index: record.index,
            created_s: record.created_s,
            shards: record.shards,
            flags: record.flags,
            _unused: 0,
        };
    }

    /// Moves one entry to a place that is free or was moved away before.
    fn shift(&mut self, from: usize, to: usize) {
        let (line, place) = (self.lines[from / WIDTH], from % WIDTH);
        let into = &mut self.lines[to / WIDTH];
        into.keys[to % WIDTH] = line.keys[place];
        into.access_epochs[to % WIDTH] = line.access_epochs[place];
        into.state_classes[to % WIDTH] = line.state_classes[place];
        self.rests[to] = self.rests[from];
    }

    /// All entries, in the order of their homes.
    fn entries(&self) -> impl Iterator<Item = Entry> {
        (0..self.rests.len()).filter(|at| !self.is_free(*at)).map(|at| self.entry(at))
    }

    fn find(&self, key: &Key16) -> Option<usize> {
        let home = self.home(hash_of(key));
        for at in home * WIDTH..self.rests.len() {
            // In Robin Hood order nothing with our home lies behind a later home.
            if self.is_free(at) || self.home_at(at) > home {
                return None;
            }
            if self.key(at) == key {
                return Some(at);
            }
        }
        None
    }

    pub fn get(&self, key: &Key16) -> Option<Record> {
        self.find(key).map(|at| self.record(at))
    }

    /// Inserts or replaces. A record without a state would be invisible and is refused.
    pub fn set(&mut self, key: &Key16, record: Record) {
        assert_ne!(record.state(), 0, "a record needs a state");
        let entry = Entry { key: *key, record };
        if let Some(at) = self.find(key) {
            self.write(at, &entry);
            return;
        }
        if (self.len + 1) * 20 > self.homes * WIDTH * 17 {
            self.grow();
        }
        while !self.insert_new(&entry) {
            self.grow();
        }
    }

    /// False, with nothing changed, when the run would pass the end of the tail.
    fn insert_new(&mut self, entry: &Entry) -> bool {
        let home = self.home(hash_of(&entry.key));
        let mut at = home * WIDTH;
        while at < self.rests.len() && !self.is_free(at) && self.home_at(at) <= home {
            at += 1;
        }
        let mut end = at;
        while end < self.rests.len() && !self.is_free(end) {
            end += 1;
        }
        if end == self.rests.len() {
            return false;
        }
        for to in (at + 1..=end).rev() {
            self.shift(to - 1, to);
        }
        self.write(at, entry);
        self.len += 1;
        true
    }

    fn grow(&mut self) {
        let mut homes = self.homes + self.homes / 4;
        'larger: loop {
            let mut larger = Table::with_homes(homes);
            for entry in self.entries() {
                if !larger.insert_new(&entry) {
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
        let record = self.record(at);
        // Shift the run back by one; an entry that would leave its home for an earlier line stays.
        while at + 1 < self.rests.len()
            && !self.is_free(at + 1)
            && self.home_at(at + 1) * WIDTH <= at
        {
            self.shift(at + 1, at);
            at += 1;
        }
        self.write(at, &Entry { key: Key16::default(), record: Record::default() });
        self.len -= 1;
        Some(record)
    }

    /// How many leading keys are stored and alive, and why the next one is not.
    ///
    /// `keys` holds a key every `stride` bytes (16 for index keys, 32 for full ones).
    ///
    /// In a big table a look-up is a miss of all caches, so many are under way at a time. Most keys
    /// are found in their home line; the next line is sent for on behalf of the others, which are
    /// searched a batch later.
    pub fn match_prefix(
        &self,
        keys: &[u8],
        stride: usize,
        now_s: u64,
        ttl_s: &[u64],
    ) -> (usize, Stop) {
        let count = keys.len() / stride;
        let key =
            |i: usize| -> Key16 { keys[i * stride..i * stride + 16].try_into().expect("16 bytes") };
        let first_alive = FirstAlive::new(now_s, ttl_s);
        let sent_for = |i: usize| {
            let home = self.home(hash_of(&key(i)));
            self.prefetch(home);
            home
        };
        let mut homes = [0; AHEAD];
        for (home, i) in homes.iter_mut().zip(0..count) {
            *home = sent_for(i);
        }
        let mut late = [Late::new(), Late::new()];
        // One turn more than there are batches, for the late ones of the last.
        for (turn, from) in (0..count + AHEAD).step_by(AHEAD).enumerate() {
            let [this, before] = late.get_disjoint_mut([turn % 2, (turn + 1) % 2]).expect("two");
            this.count = 0;
            for (of_i, i) in homes.iter_mut().zip(from..count) {
                let home = *of_i;
                if i + AHEAD < count {
                    *of_i = sent_for(i + AHEAD);
                }
                if !self.lines[home].holds_alive(&key(i), &first_alive) {
                    // Behind the last home lies the tail.
                    self.prefetch(home + 1);
                    this.push(i, home + 1);
                }
            }
            for (i, next) in before.items() {
                if self.lines[next].holds_alive(&key(i), &first_alive) {
                    continue;
                }
                match self.get(&key(i)) {
                    None => return (i, Stop::Absent),
                    Some(record) if !first_alive.holds(record.state_class, record.access_epoch) => {
                        return (i, Stop::Evicted);
                    }
                    Some(_) => {}
                }
            }
            before.count = 0;
        }
        (count, Stop::All)
    }

    #[inline]
    fn prefetch(&self, line: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a home and the tail behind it are inside the table, and a prefetch reads
            // nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.lines.as_ptr().add(line).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
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
            let mut record = self.record(at);
            if !record.is_readable() || record.access_epoch >= epoch && record.class() >= class {
                continue;
            }
            record.access_epoch = record.access_epoch.max(epoch);
            record.state_class = record.state() | record.class().max(class) << 4;
            self.write(at, &Entry { key, record });
            log.extend_from_slice(&encode_entry(seq, OP_SET, &key, &record, &[0; 16], n_pg));
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
            .entries()
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
            |entry: &Entry| entry.record.state() == state && entry.record.access_epoch < epoch;
        self.entries().filter(is_stale).map(|entry| entry.key).collect()
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
        for at in self.home(from) * WIDTH..self.rests.len() {
            let hash = hash_of(self.key(at));
            if self.is_free(at) || hash < from {
                continue;
            }
            // Cut only between two homes: inside one the entries are not sorted.
            let home = self.home(hash);
            if count >= limit && home > self.home_at(at - 1) {
                return (log, Some(self.first_hash_of(home)));
            }
            let record = self.record(at);
            log.extend_from_slice(&encode_entry(
                seq,
                OP_SET,
                self.key(at),
                &record,
                &[0; 16],
                n_pg,
            ));
            count += 1;
        }
        (log, None)
    }

    fn first_hash_of(&self, home: usize) -> u64 {
        ((home as u128) << 64).div_ceil(self.homes as u128) as u64
    }

    /// Number of records per (state, class), as (state, class, count).
    pub fn census(&self) -> Vec<(u8, u8, usize)> {
        let mut counts = [0usize; 256];
        for state_class in self.lines.iter().flat_map(|line| line.state_classes) {
            counts[state_class as usize] += 1;
        }
        (1..256)
            .filter(|at| counts[*at] > 0)
            .map(|at| (at as u8 & 15, at as u8 >> 4, counts[at]))
            .collect()
    }
}

/// Look-ups under way at a time. Evenly, one sent for with each that is compared: in bursts they wait
/// for each other.
const AHEAD: usize = 48;

/// The first epoch that is alive, for each state and class in one byte.
struct FirstAlive([u64; 256]);

impl FirstAlive {
    fn new(now_s: u64, ttl_s: &[u64]) -> FirstAlive {
        // Free places and what may not be read are never alive.
        let mut epochs = [u64::MAX; 256];
        for class in 0..16u8 {
            let epoch = first_alive_epoch(class, now_s, ttl_s);
            for state in [STATE_COMMITTED, STATE_DEGRADED] {
                epochs[(state | class << 4) as usize] = epoch;
            }
        }
        FirstAlive(epochs)
    }

    #[inline]
    fn holds(&self, state_class: u8, access_epoch: u32) -> bool {
        access_epoch as u64 >= self.0[state_class as usize]
    }
}

impl Line {
    /// Whether the key is in this line, stored and alive. Compares all three: that costs less than
    /// to guess, key for key, at which of them the search will end.
    #[inline]
    fn holds_alive(&self, key: &Key16, first_alive: &FirstAlive) -> bool {
        let number = |key: &Key16| u128::from_le_bytes(*key);
        let equal = |at: usize| usize::from(number(&self.keys[at]) == number(key)) << at;
        let found = equal(0) | equal(1) | equal(2);
        let at = (found.trailing_zeros() as usize).min(WIDTH - 1);
        found != 0 && first_alive.holds(self.state_classes[at], self.access_epochs[at])
    }
}

/// Keys of one batch that are not alive in their home lines, and the next lines.
struct Late {
    keys: [(usize, usize); AHEAD],
    count: usize,
}

impl Late {
    fn new() -> Late {
        Late { keys: [(0, 0); AHEAD], count: 0 }
    }

    fn push(&mut self, number: usize, next_line: usize) {
        self.keys[self.count] = (number, next_line);
        self.count += 1;
    }

    fn items(&self) -> impl Iterator<Item = (usize, usize)> {
        self.keys[..self.count].iter().copied()
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
#[path = "table_tests.rs"]
mod tests;
