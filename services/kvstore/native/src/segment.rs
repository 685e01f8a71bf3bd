//! Segment files of fixed slots, with an index log beside them: the disk of one storage node or of
//! the embedded backend.
//!
//! A slot holds one shard: a header of 128 bytes and its data. The index log claims free slots, a few
//! dozen at a time, before they are written; later it names what lies in them. `sync` flushes
//! segments, then writes the records that wait and a mark. At opening, entries before the last mark
//! are trusted (and still checked by every read); entries after it, and claimed slots that nothing
//! names, are verified in full and freed when torn. A lost or damaged log is made good from the
//! headers; a deleted shard's header is blanked, so that nothing that was deleted comes back that
//! way. Why not LMDB, and why claims: docs/adr.

use std::collections::{BTreeSet, HashMap};
use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::{BuildHasherDefault, Hasher};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::crc;
use crate::index_log::{self, IndexLog, Place, RECORD_BYTES, Record};
use crate::table::Key16;

pub const SHARD_HEADER_BYTES: usize = 128;
const PAGE: u64 = 4096;
/// Slots claimed with one write to the log. An opening after a crash reads as many more.
const CLAIM_AT_ONCE: usize = 4 * index_log::SLOTS_PER_CLAIM;

/// What a shard is called: two attempts to put one key never share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId {
    pub key: Key16,
    pub shard: u8,
    pub put_id: u64,
}

/// Keys are cut from digests under a secret, and put ids are random: nobody can aim at one bucket,
/// so mixing is enough.
#[derive(Default)]
struct IdHasher(u64);

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

type Index = HashMap<ShardId, Place, BuildHasherDefault<IdHasher>>;

#[derive(Debug)]
pub enum StoreError {
    /// No free slot, or the disk has no room for another segment.
    Full,
    /// The shard does not fit a slot, or its header does not describe it.
    BadShard(&'static str),
    Io(io::Error),
}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> StoreError {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => StoreError::Full,
            _ => StoreError::Io(error),
        }
    }
}

/// Why a read gave nothing. Every one of them is a miss to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    Absent = 1,
    /// The file or the device failed, or the file is shorter than it was.
    Io = 2,
    /// The slot holds something else now, or its header is damaged.
    Header = 3,
    /// The data do not have the header's checksum.
    Data = 4,
}

/// Bad shards that were freed, shards read, and the next slot.
pub type Scrubbed = (Vec<(ShardId, Miss)>, u64, Option<u32>);

/// How slots lie in segments.
#[derive(Clone, Copy)]
struct Geometry {
    slot_bytes: u64,
    slots_per_segment: u32,
    max_segments: u32,
}

impl Geometry {
    fn segment_of(&self, slot: u32) -> usize {
        (slot / self.slots_per_segment) as usize
    }

    fn offset(&self, slot: u32) -> u64 {
        (slot % self.slots_per_segment) as u64 * self.slot_bytes
    }

    fn num_slots(&self) -> u32 {
        self.max_segments * self.slots_per_segment
    }

    fn segment_bytes(&self) -> u64 {
        self.slots_per_segment as u64 * self.slot_bytes
    }

    /// Reads a whole shard into the front of `buffer` and checks all of it.
    fn read_verified(
        &self,
        file: Option<&File>,
        id: &ShardId,
        place: &Place,
        buffer: &mut [u8],
    ) -> Result<(), Miss> {
        let shard = &mut buffer[..SHARD_HEADER_BYTES + place.len as usize];
        file.ok_or(Miss::Io)?
            .read_exact_at(shard, self.offset(place.slot))
            .map_err(|_| Miss::Io)?;
        if parse_header(shard) != Some((*id, place.len)) {
            return Err(Miss::Header);
        }
        if crc::crc32c(&shard[SHARD_HEADER_BYTES..]) != word(shard, 68) {
            return Err(Miss::Data);
        }
        Ok(())
    }
}

struct Inner {
    geometry: Geometry,
    index: Index,
    owners: Vec<Option<ShardId>>,
    /// Slots of existing segments without an owner; the highest is taken last so that a store that
    /// is little used stays in few segments.
    free: Vec<u32>,
    /// Of those, taken out of `free`: the ones that the log claims, to be used next.
    ready: Vec<u32>,
    /// Claimed slots that somebody is writing.
    writing: Vec<u32>,
    segments: Vec<Option<Arc<File>>>,
    dirty: Vec<bool>,
    log: IndexLog,
    is_synced: bool,
    unsynced_bytes: u64,
    /// The log on disk does not say what lives (a disk without room kept it from being written
    /// anew): nothing may be appended before it does.
    is_log_stale: bool,
}

/// Numbers of a store, for metrics and waterlines.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub num_slots: u64,
    pub num_used: u64,
    pub slot_bytes: u64,
    pub disk_bytes: u64,
    pub unsynced_bytes: u64,
    pub num_log_records: u64,
}

/// What opening found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    pub num_shards: u64,
    pub num_torn: u64,
    pub was_rebuilt: bool,
}

pub struct Store {
    dir: PathBuf,
    geometry: Geometry,
    inner: Mutex<Inner>,
    /// One group commit at a time: a second one must not answer before the first one's flush.
    sync_turn: Mutex<()>,
    pub recovery: Recovery,
    lock_file: File,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
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

fn owner_only(path: &Path, truncate: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(truncate).mode(0o600).open(path)
}

fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    // SAFETY: a plain call on an open descriptor.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

impl Store {
    /// Opens or creates the store in `dir`, which only one process may have open.
    ///
    /// Room is taken a segment at a time: files never pass `max_segments * segment_bytes`.
    pub fn open(
        dir: &Path,
        slot_bytes: u64,
        segment_bytes: u64,
        max_segments: u32,
    ) -> Result<Store, StoreError> {
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(PAGE) || segment_bytes < slot_bytes {
            return Err(StoreError::BadShard("slot_bytes: whole pages, at most a segment"));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let lock = owner_only(&dir.join("lock"), false)?;
        // SAFETY: a plain call on an open descriptor.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(io::Error::last_os_error().into());
        }
        let geometry = Geometry {
            slot_bytes,
            slots_per_segment: (segment_bytes / slot_bytes) as u32,
            max_segments,
        };
        let mut segments = Vec::new();
        for number in 0..max_segments {
            let file =
                match OpenOptions::new().read(true).write(true).open(segment_path(dir, number)) {
                    Ok(file) => file,
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        segments.push(None);
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                };
            // A segment cut short is made whole again; its lost slots fail their checksums.
            // On a disk without room it stays short: slots past its end fail to be read, no more.
            if file.metadata()?.len() < geometry.segment_bytes()
                && let Err(error) = file.set_len(geometry.segment_bytes()).map_err(StoreError::from)
                && !matches!(error, StoreError::Full)
            {
                return Err(error);
            }
            segments.push(Some(Arc::new(file)));
        }
        let log_path = dir.join("index.log");
        let log = std::fs::read(&log_path).unwrap_or_default();
        let mut inner = Inner {
            geometry,
            index: Index::default(),
            owners: vec![None; geometry.num_slots() as usize],
            free: Vec::new(),
            ready: Vec::new(),
            writing: Vec::new(),
            dirty: vec![false; segments.len()],
            segments,
            log: IndexLog::new(owner_only(&log_path, false)?, (log.len() / RECORD_BYTES) as u64),
            is_synced: true,
            unsynced_bytes: 0,
            is_log_stale: false,
        };
        let mut recovery =
            if log.len() < RECORD_BYTES { inner.rebuild() } else { inner.replay(&log) };
        recovery.num_shards = inner.index.len() as u64;
        for number in
            (0..max_segments).rev().filter(|number| inner.segments[*number as usize].is_some())
        {
            let first = number * geometry.slots_per_segment;
            let slots = (first..first + geometry.slots_per_segment).rev();
            inner.free.extend(slots.filter(|slot| inner.owners[*slot as usize].is_none()));
        }
        if let Err(error) = inner.compact(dir) {
            // A disk without room must not keep the store from reading what it has (P-34).
            if !matches!(error, StoreError::Full) {
                return Err(error);
            }
            inner.is_synced = false;
            inner.is_log_stale = recovery.was_rebuilt;
        }
        Ok(Store {
            dir: dir.to_path_buf(),
            geometry,
            inner: Mutex::new(inner),
            sync_turn: Mutex::new(()),
            recovery,
            lock_file: lock,
        })
    }

    /// Lets another process open the directory; nothing may be written after it.
    pub fn unlock(&self) {
        // SAFETY: a plain call on an open descriptor.
        unsafe { libc::flock(self.lock_file.as_raw_fd(), libc::LOCK_UN) };
    }

    /// Stores one shard given as pieces that follow each other, the header first. Returns the
    /// number of the log record: the shard is durable once `sync` has returned a larger number.
    /// Storing an id again changes nothing.
    pub fn put(&self, pieces: &[&[u8]]) -> Result<u64, StoreError> {
        let header = pieces.first().copied().unwrap_or_default();
        let (id, len) = parse_header(header).ok_or(StoreError::BadShard("damaged header"))?;
        let total: usize = pieces.iter().map(|piece| piece.len()).sum();
        if total != SHARD_HEADER_BYTES + len as usize || total as u64 > self.geometry.slot_bytes {
            return Err(StoreError::BadShard("length does not fit the header or the slot"));
        }
        let (slot, file) = {
            let mut inner = self.lock();
            inner.freshen_log(&self.dir)?;
            if inner.index.contains_key(&id) {
                return Ok(inner.log.next_number().saturating_sub(1));
            }
            self.take_slot(&mut inner)?
        };
        // Whole pages: the kernel zeroes, or reads, the rest of a page that is written in part.
        const ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];
        let padding = &ZEROS[..total.next_multiple_of(ZEROS.len()) - total];
        let written = write_all_at(&file, pieces, padding, self.geometry.offset(slot));
        let mut inner = self.lock();
        inner.writing.retain(|other| *other != slot);
        if let Err(error) = written {
            inner.give_back(slot);
            return Err(error.into());
        }
        if let Some(place) = inner.index.get(&id).copied() {
            // Another put of the same shard was faster; or a rescan took up this very slot.
            if place.slot != slot {
                inner.give_back(slot);
            }
            return Ok(inner.log.next_number().saturating_sub(1));
        }
        let place = Place { slot, len, created_s: word(header, 64) };
        inner.log.push(&Record::Put(id, place));
        inner.is_synced = false;
        inner.assign(id, place);
        inner.dirty[self.geometry.segment_of(slot)] = true;
        inner.unsynced_bytes += total as u64;
        Ok(inner.log.next_number() - 1)
    }

    /// A slot that the log claims, and its file, for the caller to write. Full at the capacity, or
    /// when the disk has no room for the claim.
    fn take_slot(&self, inner: &mut Inner) -> Result<(u32, Arc<File>), StoreError> {
        if inner.ready.is_empty() {
            if inner.free.is_empty() {
                self.add_segment(inner)?;
            }
            inner.claim()?;
        }
        let slot = inner.ready.pop().ok_or(StoreError::Full)?;
        let file = inner.segments[self.geometry.segment_of(slot)].clone();
        let file = file.ok_or(StoreError::Full)?;
        inner.writing.push(slot);
        Ok((slot, file))
    }

    /// Takes room for one more segment, whose slots are free; Full at the capacity.
    fn add_segment(&self, inner: &mut Inner) -> Result<(), StoreError> {
        let number = (0..self.geometry.max_segments)
            .find(|number| inner.segments[*number as usize].is_none());
        let number = number.ok_or(StoreError::Full)?;
        let path = segment_path(&self.dir, number);
        let file = owner_only(&path, true)?;
        if let Err(error) =
            allocate(&file, self.geometry.slots_per_segment as u64 * self.geometry.slot_bytes)
        {
            // A segment taken in part would hold the room that others wait for.
            let _ = std::fs::remove_file(&path);
            return Err(error.into());
        }
        // Flushing data later does not promise that the file is found by its name.
        file.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        inner.segments[number as usize] = Some(Arc::new(file));
        let first = number * self.geometry.slots_per_segment;
        inner.free.extend((first..first + self.geometry.slots_per_segment).rev());
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // A panic while the lock was held is a bug of ours that the index may have survived; every
        // read checks what it gets, so going on is safe.
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Reads one shard into `head` and then `body`; together they must be as long as its data.
    /// The checksum over the data is left out with `check_data` false, for callers who have a
    /// stronger one.
    pub fn get(
        &self,
        id: &ShardId,
        head: &mut [u8],
        body: &mut [u8],
        check_data: bool,
    ) -> Result<(), Miss> {
        let (place, file) = {
            let inner = self.lock();
            let place = *inner.index.get(id).ok_or(Miss::Absent)?;
            (place, inner.segments[self.geometry.segment_of(place.slot)].clone())
        };
        let file = file.ok_or(Miss::Io)?;
        if place.len as usize != head.len() + body.len() {
            return Err(Miss::Header);
        }
        let mut header = [0; SHARD_HEADER_BYTES];
        read_all_at(&file, &mut [&mut header, head, body], self.geometry.offset(place.slot))
            .map_err(|_| Miss::Io)?;
        if parse_header(&header) != Some((*id, place.len)) {
            return Err(Miss::Header);
        }
        if check_data && crc::extend(crc::crc32c(head), body) != word(&header, 68) {
            return Err(Miss::Data);
        }
        Ok(())
    }

    /// The whole shard, header and data, checked.
    pub fn get_shard(&self, id: &ShardId) -> Result<Vec<u8>, Miss> {
        let (place, file) = {
            let inner = self.lock();
            let place = *inner.index.get(id).ok_or(Miss::Absent)?;
            (place, inner.segments[self.geometry.segment_of(place.slot)].clone())
        };
        let mut buffer = vec![0; SHARD_HEADER_BYTES + place.len as usize];
        self.geometry.read_verified(file.as_deref(), id, &place, &mut buffer)?;
        Ok(buffer)
    }

    pub fn len_of(&self, id: &ShardId) -> Option<u32> {
        self.lock().index.get(id).map(|place| place.len)
    }

    /// Frees the slots of these shards; ids that are not there are skipped. Returns how many were.
    /// With `erase` their bytes are overwritten too, or it fails.
    pub fn delete(&self, ids: &[ShardId], erase: bool) -> Result<usize, StoreError> {
        let mut inner = self.lock();
        inner.freshen_log(&self.dir)?;
        let mut count = 0;
        for id in ids {
            let Some(place) = inner.index.get(id).copied() else { continue };
            let blanked = inner.blank(place.slot, erase);
            inner.log.push(&Record::Delete(*id));
            inner.is_synced = false;
            let logged = inner.log.flush();
            // Either is enough to forget it; a disk without room for the record allows the first.
            if erase || logged.is_err() {
                if blanked.is_err() && logged.is_err() {
                    inner.log.pop(1);
                }
                blanked?;
            }
            if let Some(slot) = inner.release(id) {
                inner.free.push(slot);
                count += 1;
            }
        }
        if inner.log.num_records() > 4 * inner.index.len() as u64 + 4096 {
            inner.compact(&self.dir)?;
        }
        Ok(count)
    }

    /// Group commit: when it returns n, every shard whose put returned less than n is on the disk.
    pub fn sync(&self) -> Result<u64, StoreError> {
        let _turn = self.sync_turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (dirty, covered) = {
            let mut inner = self.lock();
            inner.freshen_log(&self.dir)?;
            inner.unsynced_bytes = 0;
            if inner.is_synced {
                return Ok(inner.log.next_number());
            }
            let dirty: Vec<(usize, Arc<File>)> = (0..inner.dirty.len())
                .filter(|number| inner.dirty[*number])
                .filter_map(|number| Some((number, inner.segments[number].clone()?)))
                .collect();
            inner.dirty.fill(false);
            (dirty, inner.log.next_number())
        };
        for (_, file) in &dirty {
            if let Err(error) = file.sync_data() {
                // What was not flushed is still to be flushed: the next call must not skip it.
                let mut inner = self.lock();
                dirty.iter().for_each(|(number, _)| inner.dirty[*number] = true);
                return Err(error.into());
            }
        }
        let log = {
            let mut inner = self.lock();
            // A compaction in between has flushed everything up to here and began a new file.
            if let Some(covered_here) = covered.checked_sub(inner.log.base()) {
                let is_all = inner.log.next_number() == covered;
                inner.log.push(&Record::Mark(covered_here));
                // No reason to call what is on the disk not durable when the disk is full: the
                // claims are in the log, and opening reads more than it must.
                let marked = inner.log.flush();
                if marked.is_err() {
                    inner.log.pop(1);
                }
                inner.is_synced = is_all && marked.is_ok();
            }
            inner.log.try_clone_file()?
        };
        log.sync_data()?;
        Ok(covered)
    }

    /// Takes up shards that lie in slots which the log does not name, for an owner whose own records
    /// say that some are missing; returns how many.
    pub fn rescan(&self) -> Result<u64, StoreError> {
        let mut inner = self.lock();
        inner.freshen_log(&self.dir)?;
        let found = inner.take_up_unnamed(0..self.geometry.num_slots()).num_shards;
        if found > 0 {
            let inner = &mut *inner;
            for slots in [&mut inner.free, &mut inner.ready] {
                slots.retain(|slot| inner.owners[*slot as usize].is_none());
            }
            inner.compact(&self.dir)?;
        }
        Ok(found)
    }

    /// Ids from the given slot on, at most `limit`, with their creation time; and the next slot.
    pub fn list(&self, from_slot: u32, limit: usize) -> (Vec<(ShardId, u32, u32)>, Option<u32>) {
        let inner = self.lock();
        let mut found = Vec::new();
        for slot in from_slot..inner.owners.len() as u32 {
            if found.len() == limit {
                return (found, Some(slot));
            }
            if let Some(id) = inner.owners[slot as usize] {
                let place = inner.index[&id];
                found.push((id, place.len, place.created_s));
            }
        }
        (found, None)
    }

    /// Reads every shard in `num_slots` slots from `from_slot` on; frees and returns the bad ones.
    pub fn scrub(&self, from_slot: u32, num_slots: u32) -> Result<Scrubbed, StoreError> {
        let total = self.geometry.num_slots() as u64;
        let end = (from_slot as u64 + num_slots as u64).min(total) as u32;
        let mut buffer = vec![0; self.geometry.slot_bytes as usize];
        let (mut bad, mut checked) = (Vec::new(), 0);
        for slot in from_slot..end {
            let (id, place, file) = {
                let inner = self.lock();
                let Some(id) = inner.owners[slot as usize] else { continue };
                (id, inner.index[&id], inner.segments[self.geometry.segment_of(slot)].clone())
            };
            checked += 1;
            if let Err(miss) =
                self.geometry.read_verified(file.as_deref(), &id, &place, &mut buffer)
            {
                // Deleted and overwritten while we read is no fault.
                if self.lock().owners[slot as usize] == Some(id) {
                    self.delete(&[id], false)?;
                    bad.push((id, miss));
                }
            }
        }
        Ok((bad, checked, ((end as u64) < total).then_some(end)))
    }

    /// Headers of the shards in slots from `from_slot` on, at most `limit`: what rebuilds metadata.
    pub fn headers(&self, from_slot: u32, limit: usize) -> (Vec<u8>, Option<u32>) {
        let (ids, next) = self.list(from_slot, limit);
        let mut headers = Vec::with_capacity(ids.len() * SHARD_HEADER_BYTES);
        for (id, _, _) in ids {
            let (place, file) = {
                let inner = self.lock();
                let Some(place) = inner.index.get(&id).copied() else { continue };
                (place, inner.segments[self.geometry.segment_of(place.slot)].clone())
            };
            let mut header = [0; SHARD_HEADER_BYTES];
            let read =
                file.map(|file| file.read_exact_at(&mut header, self.geometry.offset(place.slot)));
            if matches!(read, Some(Ok(()))) && parse_header(&header) == Some((id, place.len)) {
                headers.extend_from_slice(&header);
            }
        }
        (headers, next)
    }

    pub fn stat(&self) -> Stat {
        let inner = self.lock();
        let segments = inner.segments.iter().flatten().count() as u64;
        Stat {
            num_slots: self.geometry.max_segments as u64 * self.geometry.slots_per_segment as u64,
            num_used: inner.index.len() as u64,
            slot_bytes: self.geometry.slot_bytes,
            disk_bytes: segments
                * self.geometry.slots_per_segment as u64
                * self.geometry.slot_bytes
                + inner.log.num_records() * RECORD_BYTES as u64,
            unsynced_bytes: inner.unsynced_bytes,
            num_log_records: inner.log.num_records(),
        }
    }
}

impl Inner {
    fn replay(&mut self, log: &[u8]) -> Recovery {
        let records = index_log::parse(log);
        let marks = records.iter().filter_map(|(_, record)| match record {
            Record::Mark(number) => Some(*number),
            _ => None,
        });
        // Every log is begun with what lives and a mark: one without any has lost its beginning.
        let last_mark = marks.max();
        let num_trusted = last_mark.unwrap_or(0);
        let num_sound = records.iter().filter(|(number, _)| *number < num_trusted).count() as u64;
        let mut suspects = Vec::new();
        // What was claimed and never named: somebody may have written there when the process died.
        let mut unnamed = BTreeSet::new();
        for (number, record) in records {
            match record {
                Record::Put(id, place) if self.is_usable(&place) => {
                    self.assign(id, place);
                    unnamed.remove(&place.slot);
                    if number >= num_trusted {
                        suspects.push(id);
                    }
                }
                Record::Put(..) | Record::Mark(_) | Record::Unknown => {}
                Record::Delete(id) => drop(self.release(&id)),
                Record::Claim(slots) => unnamed.extend(slots),
            }
        }
        let mut torn = 0;
        let mut buffer = vec![0; self.geometry.slot_bytes as usize];
        for id in suspects {
            let Some(place) = self.index.get(&id).copied() else { continue };
            let file = self.segments[self.geometry.segment_of(place.slot)].clone();
            if self.geometry.read_verified(file.as_deref(), &id, &place, &mut buffer).is_err() {
                self.release(&id);
                torn += 1;
            }
        }
        let mut recovery = Recovery { num_torn: torn, ..Recovery::default() };
        // Records that were on the disk are gone. A torn end is no reason: nothing in it was
        // called durable, and looking through all free slots of a large disk takes long.
        recovery.was_rebuilt = num_sound < num_trusted || last_mark.is_none();
        let num_slots = self.geometry.num_slots();
        recovery.num_torn += if recovery.was_rebuilt {
            self.take_up_unnamed(0..num_slots).num_torn
        } else {
            self.take_up_unnamed(unnamed.into_iter().filter(|slot| *slot < num_slots)).num_torn
        };
        recovery
    }

    /// Without a log the headers tell everything.
    fn rebuild(&mut self) -> Recovery {
        let was_rebuilt = self.segments.iter().any(|file| file.is_some());
        Recovery { was_rebuilt, ..self.take_up_unnamed(0..self.geometry.num_slots()) }
    }

    /// Looks through these slots for shards that the index does not name; each is verified in full.
    /// One may lie in a slot that a lost record gave away: whoever is said to own it is overwritten.
    fn take_up_unnamed(&mut self, slots: impl IntoIterator<Item = u32>) -> Recovery {
        let mut recovery = Recovery::default();
        let mut buffer = vec![0; self.geometry.slot_bytes as usize];
        for slot in slots {
            let segment = self.geometry.segment_of(slot);
            let Some(file) = self.segments[segment].clone() else { continue };
            let header = &mut [0; SHARD_HEADER_BYTES];
            if file.read_exact_at(header, self.geometry.offset(slot)).is_err() {
                continue;
            }
            let Some((id, len)) = parse_header(header) else { continue };
            let place = Place { slot, len, created_s: word(header, 64) };
            if self.index.contains_key(&id) {
                continue;
            }
            if !self.is_usable(&place)
                || self.geometry.read_verified(Some(&file), &id, &place, &mut buffer).is_err()
            {
                recovery.num_torn += 1;
                continue;
            }
            self.assign(id, place);
            self.dirty[segment] = true;
            recovery.num_shards += 1;
        }
        recovery
    }

    /// Notes in the log that the next free slots are going to be written.
    fn claim(&mut self) -> io::Result<()> {
        let slots = self.free.split_off(self.free.len().saturating_sub(CLAIM_AT_ONCE));
        for record in index_log::claims(&slots) {
            self.log.push(&record);
        }
        self.is_synced = false;
        if let Err(error) = self.log.flush() {
            self.log.pop(slots.len().div_ceil(index_log::SLOTS_PER_CLAIM));
            self.free.extend(slots);
            return Err(error);
        }
        self.ready = slots;
        Ok(())
    }

    /// Makes a slot ready again that was claimed and not put to use. It is blank then: opening must
    /// not find there a shard that nobody was told of, or a second copy that outlives the first.
    fn give_back(&mut self, slot: u32) {
        // A device that fails here leaves at worst an orphan.
        let _ = self.blank(slot, false);
        self.ready.push(slot);
    }

    /// Makes a slot's header say nothing, or all of the slot.
    fn blank(&mut self, slot: u32, all: bool) -> io::Result<()> {
        let segment = self.geometry.segment_of(slot);
        let len = if all { self.geometry.slot_bytes as usize } else { SHARD_HEADER_BYTES };
        let Some(file) = &self.segments[segment] else { return Ok(()) };
        self.dirty[segment] = true;
        self.is_synced = false;
        file.write_all_at(&vec![0; len], self.geometry.offset(slot))
    }

    fn freshen_log(&mut self, dir: &Path) -> Result<(), StoreError> {
        if self.is_log_stale { self.compact(dir) } else { Ok(()) }
    }

    fn is_usable(&self, place: &Place) -> bool {
        (place.slot as usize) < self.owners.len()
            && self.segments[self.geometry.segment_of(place.slot)].is_some()
            && place.len as u64 + SHARD_HEADER_BYTES as u64 <= self.geometry.slot_bytes
    }

    /// Writes the log anew with only what lives, and replaces the old one.
    fn compact(&mut self, dir: &Path) -> Result<(), StoreError> {
        for file in self.segments.iter().flatten() {
            file.sync_data()?;
        }
        let path = dir.join("index.new");
        let claimed: Vec<u32> = self.ready.iter().chain(&self.writing).copied().collect();
        let puts = self.index.iter().map(|(id, place)| Record::Put(*id, *place));
        let mut bytes = Vec::with_capacity((self.index.len() + claimed.len() + 1) * RECORD_BYTES);
        for record in index_log::claims(&claimed).chain(puts) {
            bytes.extend_from_slice(&record.encode());
        }
        let mark = Record::Mark((bytes.len() / RECORD_BYTES) as u64);
        bytes.extend_from_slice(&mark.encode());
        let mut file = owner_only(&path, true)?;
        file.write_all(&bytes)?;
        file.sync_data()?;
        std::fs::rename(&path, dir.join("index.log"))?;
        File::open(dir)?.sync_all()?;
        self.log.go_on_in(file, (bytes.len() / RECORD_BYTES) as u64);
        self.is_synced = true;
        self.is_log_stale = false;
        self.unsynced_bytes = 0;
        Ok(())
    }

    /// Makes the slot the id's own; whoever held the slot, or the id another slot, loses it.
    fn assign(&mut self, id: ShardId, place: Place) {
        if let Some(former) = self.owners[place.slot as usize].take() {
            self.index.remove(&former);
        }
        if let Some(former) = self.index.insert(id, place) {
            self.owners[former.slot as usize] = None;
        }
        self.owners[place.slot as usize] = Some(id);
    }

    fn release(&mut self, id: &ShardId) -> Option<u32> {
        let place = self.index.remove(id)?;
        self.owners[place.slot as usize] = None;
        Some(place.slot)
    }
}

fn segment_path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("seg-{number:04}"))
}

/// Writes pieces and what pads them, one behind the other.
fn write_all_at(file: &File, pieces: &[&[u8]], padding: &[u8], offset: u64) -> io::Result<()> {
    // Vectors for the pieces of any shard of ours; what is beyond them is written piece by piece.
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 8];
    let padded = || pieces.iter().copied().chain([padding]);
    let mut count = 0;
    for (vector, piece) in vectors.iter_mut().zip(padded()) {
        *vector = libc::iovec { iov_base: piece.as_ptr() as *mut _, iov_len: piece.len() };
        count += 1;
    }
    let total: usize = padded().map(<[u8]>::len).sum();
    // SAFETY: the vectors point into slices that outlive the call, which only reads them.
    let written =
        unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), count, offset as libc::off_t) };
    match written {
        -1 => Err(io::Error::last_os_error()),
        count if count as usize == total => Ok(()),
        // The disk filled up or a signal came in between: piece by piece says which.
        _ => padded()
            .try_fold(offset, |at, piece| {
                file.write_all_at(piece, at).map(|()| at + piece.len() as u64)
            })
            .map(drop),
    }
}

fn read_all_at(file: &File, pieces: &mut [&mut [u8]], offset: u64) -> io::Result<()> {
    let vectors: Vec<libc::iovec> = pieces
        .iter_mut()
        .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() })
        .collect();
    let total: usize = pieces.iter().map(|piece| piece.len()).sum();
    // SAFETY: the vectors point into exclusive slices that outlive the call.
    let read = unsafe {
        libc::preadv(
            file.as_raw_fd(),
            vectors.as_ptr(),
            vectors.len() as i32,
            offset as libc::off_t,
        )
    };
    if read == total as isize {
        return Ok(());
    }
    let mut at = offset;
    for piece in pieces.iter_mut() {
        file.read_exact_at(piece, at)?;
        at += piece.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
