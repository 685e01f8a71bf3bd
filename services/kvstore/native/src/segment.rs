//! Segment files of fixed slots, with an index log beside them: the disk of one storage node or of
//! the embedded backend.
//!
//! A slot holds one shard: a header of 128 bytes and its data. The slot is written first, then the
//! index log names it; nothing reads a slot that the log does not name. `sync` flushes segments,
//! then writes a mark; at opening, entries before the last mark are trusted (and still checked by
//! every read), entries after it are verified in full and freed when torn. A lost log is rebuilt
//! from the headers. Why not LMDB: docs/adr.

use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::crc;
use crate::table::Key16;

pub const SHARD_HEADER_BYTES: usize = 128;
const PAGE: u64 = 4096;
const LOG_RECORD: usize = 48;
const OP_PUT: u8 = 1;
const OP_DELETE: u8 = 2;
const OP_SYNC: u8 = 3;

/// What a shard is called: two attempts to put one key never share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId {
    pub key: Key16,
    pub shard: u8,
    pub put_id: u64,
}

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

#[derive(Clone, Copy)]
struct Place {
    slot: u32,
    len: u32,
    created_s: u32,
}

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
    index: HashMap<ShardId, Place>,
    owners: Vec<Option<ShardId>>,
    /// Slots of existing segments without an owner; the highest is taken last so that a store that
    /// is little used stays in few segments.
    free: Vec<u32>,
    segments: Vec<Option<Arc<File>>>,
    dirty: Vec<bool>,
    log: File,
    /// Records ever written before this log file began: numbers of records never repeat.
    log_base: u64,
    num_log_records: u64,
    is_synced: bool,
    unsynced_bytes: u64,
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

fn encode_log(op: u8, id: &ShardId, place: &Place) -> [u8; LOG_RECORD] {
    let mut bytes = [0; LOG_RECORD];
    bytes[0] = op;
    bytes[1] = id.shard;
    bytes[4..8].copy_from_slice(&place.slot.to_le_bytes());
    bytes[8..24].copy_from_slice(&id.key);
    bytes[24..32].copy_from_slice(&id.put_id.to_le_bytes());
    bytes[32..36].copy_from_slice(&place.len.to_le_bytes());
    bytes[36..40].copy_from_slice(&place.created_s.to_le_bytes());
    let crc = crc::crc32c(&bytes[..44]);
    bytes[44..].copy_from_slice(&crc.to_le_bytes());
    bytes
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
            if file.metadata()?.len() < geometry.segment_bytes() {
                file.set_len(geometry.segment_bytes())?;
            }
            segments.push(Some(Arc::new(file)));
        }
        let log_path = dir.join("index.log");
        let log = std::fs::read(&log_path).unwrap_or_default();
        let mut inner = Inner {
            geometry,
            index: HashMap::new(),
            owners: vec![None; geometry.num_slots() as usize],
            free: Vec::new(),
            dirty: vec![false; segments.len()],
            segments,
            log: owner_only(&log_path, false)?,
            log_base: 0,
            num_log_records: 0,
            is_synced: true,
            unsynced_bytes: 0,
        };
        let mut recovery =
            if log.len() < LOG_RECORD { inner.rebuild() } else { inner.replay(&log) };
        recovery.num_shards = inner.index.len() as u64;
        for number in
            (0..max_segments).rev().filter(|number| inner.segments[*number as usize].is_some())
        {
            let first = number * geometry.slots_per_segment;
            let slots = (first..first + geometry.slots_per_segment).rev();
            inner.free.extend(slots.filter(|slot| inner.owners[*slot as usize].is_none()));
        }
        inner.compact(dir)?;
        Ok(Store {
            dir: dir.to_path_buf(),
            geometry,
            inner: Mutex::new(inner),
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
            if inner.index.contains_key(&id) {
                return Ok(inner.next_number().saturating_sub(1));
            }
            let slot = match inner.free.pop() {
                Some(slot) => slot,
                None => self.add_segment(&mut inner)?,
            };
            match inner.segments[self.geometry.segment_of(slot)].clone() {
                Some(file) => (slot, file),
                None => return Err(StoreError::Full),
            }
        };
        let written = write_all_at(&file, pieces, self.geometry.offset(slot));
        let mut inner = self.lock();
        if let Err(error) = written {
            inner.free.push(slot);
            return Err(error.into());
        }
        if inner.index.contains_key(&id) {
            inner.free.push(slot);
            return Ok(inner.next_number().saturating_sub(1));
        }
        let place = Place { slot, len, created_s: word(header, 64) };
        if let Err(error) = inner.append(OP_PUT, &id, &place) {
            inner.free.push(slot);
            return Err(error.into());
        }
        inner.assign(id, place);
        inner.dirty[self.geometry.segment_of(slot)] = true;
        inner.unsynced_bytes += total as u64;
        Ok(inner.next_number() - 1)
    }

    /// Takes room for one more segment and returns one of its slots; Full at the capacity.
    fn add_segment(&self, inner: &mut Inner) -> Result<u32, StoreError> {
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
        inner.segments[number as usize] = Some(Arc::new(file));
        let first = number * self.geometry.slots_per_segment;
        inner.free.extend((first + 1..first + self.geometry.slots_per_segment).rev());
        Ok(first)
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
    pub fn delete(&self, ids: &[ShardId]) -> Result<usize, StoreError> {
        let mut inner = self.lock();
        let mut count = 0;
        for id in ids {
            let Some(place) = inner.index.get(id).copied() else { continue };
            inner.append(OP_DELETE, id, &place)?;
            if let Some(slot) = inner.release(id) {
                inner.free.push(slot);
                count += 1;
            }
        }
        if inner.num_log_records > 4 * inner.index.len() as u64 + 4096 {
            inner.compact(&self.dir)?;
        }
        Ok(count)
    }

    /// Group commit: when it returns n, every shard whose put returned less than n is on the disk.
    pub fn sync(&self) -> Result<u64, StoreError> {
        let (files, covered) = {
            let mut inner = self.lock();
            inner.unsynced_bytes = 0;
            let dirty: Vec<usize> =
                (0..inner.dirty.len()).filter(|number| inner.dirty[*number]).collect();
            if inner.is_synced {
                return Ok(inner.next_number());
            }
            let files: Vec<Arc<File>> =
                dirty.iter().filter_map(|number| inner.segments[*number].clone()).collect();
            inner.dirty.fill(false);
            (files, inner.next_number())
        };
        for file in &files {
            file.sync_data()?;
        }
        let log = {
            let mut inner = self.lock();
            // A compaction in between has flushed everything up to here and began a new file.
            if let Some(covered_here) = covered.checked_sub(inner.log_base) {
                let mark = ShardId { key: [0; 16], shard: 0, put_id: covered_here };
                let is_all = inner.next_number() == covered;
                inner.append(OP_SYNC, &mark, &Place { slot: 0, len: 0, created_s: 0 })?;
                inner.is_synced = is_all;
            }
            inner.log.try_clone()?
        };
        log.sync_data()?;
        Ok(covered)
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
                    self.delete(&[id])?;
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
                + inner.num_log_records * LOG_RECORD as u64,
            unsynced_bytes: inner.unsynced_bytes,
            num_log_records: inner.num_log_records,
        }
    }
}

impl Inner {
    fn replay(&mut self, log: &[u8]) -> Recovery {
        let mut records = Vec::new();
        for bytes in log.chunks_exact(LOG_RECORD) {
            if word(bytes, 44) != crc::crc32c(&bytes[..44]) {
                break;
            }
            records.push(bytes);
        }
        let mut marks = records.iter().filter(|bytes| bytes[0] == OP_SYNC);
        let num_trusted = marks.next_back().map_or(0, |bytes| long(bytes, 24));
        let mut suspects = Vec::new();
        for (number, bytes) in records.iter().enumerate() {
            let key = bytes[8..24].try_into().expect("16 bytes");
            let id = ShardId { key, shard: bytes[1], put_id: long(bytes, 24) };
            let place =
                Place { slot: word(bytes, 4), len: word(bytes, 32), created_s: word(bytes, 36) };
            match bytes[0] {
                OP_PUT if self.is_usable(&place) => {
                    self.assign(id, place);
                    if number as u64 >= num_trusted {
                        suspects.push(id);
                    }
                }
                OP_DELETE => drop(self.release(&id)),
                _ => {}
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
        Recovery { num_torn: torn, ..Recovery::default() }
    }

    /// Without a log the headers tell everything; each shard is verified in full.
    fn rebuild(&mut self) -> Recovery {
        let mut recovery = Recovery::default();
        let mut buffer = vec![0; self.geometry.slot_bytes as usize];
        for slot in 0..self.owners.len() as u32 {
            let Some(file) = self.segments[self.geometry.segment_of(slot)].clone() else {
                continue;
            };
            recovery.was_rebuilt = true;
            let header = &mut [0; SHARD_HEADER_BYTES];
            if file.read_exact_at(header, self.geometry.offset(slot)).is_err() {
                continue;
            }
            let Some((id, len)) = parse_header(header) else { continue };
            let place = Place { slot, len, created_s: word(header, 64) };
            if !self.is_usable(&place)
                || self.geometry.read_verified(Some(&file), &id, &place, &mut buffer).is_err()
            {
                recovery.num_torn += 1;
                continue;
            }
            self.assign(id, place);
        }
        recovery
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
        let mut bytes = Vec::with_capacity((self.index.len() + 1) * LOG_RECORD);
        for (id, place) in &self.index {
            bytes.extend_from_slice(&encode_log(OP_PUT, id, place));
        }
        let mark = ShardId { key: [0; 16], shard: 0, put_id: self.index.len() as u64 };
        bytes.extend_from_slice(&encode_log(
            OP_SYNC,
            &mark,
            &Place { slot: 0, len: 0, created_s: 0 },
        ));
        let mut file = owner_only(&path, true)?;
        file.write_all(&bytes)?;
        file.sync_data()?;
        std::fs::rename(&path, dir.join("index.log"))?;
        File::open(dir)?.sync_all()?;
        self.log = file;
        self.log_base += self.num_log_records;
        self.num_log_records = self.index.len() as u64 + 1;
        self.is_synced = true;
        self.unsynced_bytes = 0;
        Ok(())
    }

    fn next_number(&self) -> u64 {
        self.log_base + self.num_log_records
    }

    fn append(&mut self, op: u8, id: &ShardId, place: &Place) -> io::Result<()> {
        // Writing at the known end also repairs a record that a full disk cut short.
        self.log
            .write_all_at(&encode_log(op, id, place), self.num_log_records * LOG_RECORD as u64)?;
        self.num_log_records += 1;
        self.is_synced = false;
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

fn write_all_at(file: &File, pieces: &[&[u8]], offset: u64) -> io::Result<()> {
    let vectors: Vec<libc::iovec> = pieces
        .iter()
        .map(|piece| libc::iovec { iov_base: piece.as_ptr() as *mut _, iov_len: piece.len() })
        .collect();
    let total: usize = pieces.iter().map(|piece| piece.len()).sum();
    // SAFETY: the vectors point into slices that outlive the call, which only reads them.
    let written = unsafe {
        libc::pwritev(
            file.as_raw_fd(),
            vectors.as_ptr(),
            vectors.len() as i32,
            offset as libc::off_t,
        )
    };
    match written {
        -1 => Err(io::Error::last_os_error()),
        count if count as usize == total => Ok(()),
        // The disk filled up or a signal came in between: piece by piece says which.
        _ => pieces
            .iter()
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
