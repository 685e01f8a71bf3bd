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

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::crc;
use crate::index_log::{Place, RECORD_BYTES, Record};
use crate::segment_state::{Recovery, State};
use crate::shard::{SHARD_HEADER_BYTES, ShardId, parse_header, word};
use crate::slots::{
    Geometry, Miss, StoreError, allocate, owner_only, read_all_at, segment_path, write_all_at,
};

const PAGE: u64 = 4096;
/// Records of the log beyond four a shard before it is written anew: it counts for little beside
/// the segments of a small store too.
const LOG_SLACK: u64 = 1024;

/// Bad shards that were freed, shards read, and the next slot.
pub type Scrubbed = (Vec<(ShardId, Miss)>, u64, Option<u32>);

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

pub struct Store {
    dir: PathBuf,
    geometry: Geometry,
    state: Mutex<State>,
    /// One group commit at a time: a second one must not answer before the first one's flush.
    sync_turn: Mutex<()>,
    pub recovery: Recovery,
    lock_file: File,
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
        let (mut state, recovery) =
            State::recover(geometry, segments, owner_only(&log_path, false)?, &log);
        if let Err(error) = state.compact(dir) {
            // A disk without room must not keep the store from reading what it has (P-34).
            if !matches!(error, StoreError::Full) {
                return Err(error);
            }
            state.is_synced = false;
            state.is_log_stale = recovery.was_rebuilt;
        }
        Ok(Store {
            dir: dir.to_path_buf(),
            geometry,
            state: Mutex::new(state),
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
            let mut state = self.lock();
            state.freshen_log(&self.dir)?;
            if state.index.contains_key(&id) {
                return Ok(state.log.next_number().saturating_sub(1));
            }
            self.take_slot(&mut state)?
        };
        // Whole pages: the kernel zeroes, or reads, the rest of a page that is written in part.
        const ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];
        let padding = &ZEROS[..total.next_multiple_of(ZEROS.len()) - total];
        let written = write_all_at(&file, pieces, padding, self.geometry.offset(slot));
        let mut state = self.lock();
        state.writing.retain(|other| *other != slot);
        if let Err(error) = written {
            state.give_back(slot);
            return Err(error.into());
        }
        if let Some(place) = state.index.get(&id).copied() {
            // Another put of the same shard was faster; or a rescan took up this very slot.
            if place.slot != slot {
                state.give_back(slot);
            }
            return Ok(state.log.next_number().saturating_sub(1));
        }
        let place = Place { slot, len, created_s: word(header, 64) };
        state.log.push(&Record::Put(id, place));
        state.is_synced = false;
        state.assign(id, place);
        state.dirty[self.geometry.segment_of(slot)] = true;
        state.unsynced_bytes += total as u64;
        Ok(state.log.next_number() - 1)
    }

    /// A slot that the log claims, and its file, for the caller to write. Full at the capacity, or
    /// when the disk has no room for the claim.
    fn take_slot(&self, state: &mut State) -> Result<(u32, Arc<File>), StoreError> {
        if state.ready.is_empty() {
            if state.free.is_empty() {
                self.add_segment(state)?;
            }
            state.claim()?;
        }
        let slot = state.ready.pop().ok_or(StoreError::Full)?;
        let file = state.segments[self.geometry.segment_of(slot)].clone();
        let file = file.ok_or(StoreError::Full)?;
        state.writing.push(slot);
        Ok((slot, file))
    }

    /// Takes room for one more segment, whose slots are free; Full at the capacity.
    fn add_segment(&self, state: &mut State) -> Result<(), StoreError> {
        let number = (0..self.geometry.max_segments)
            .find(|number| state.segments[*number as usize].is_none());
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
        state.segments[number as usize] = Some(Arc::new(file));
        let first = number * self.geometry.slots_per_segment;
        state.free.extend((first..first + self.geometry.slots_per_segment).rev());
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic while the lock was held is a bug of ours that the index may have survived; every
        // read checks what it gets, so going on is safe.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
            let state = self.lock();
            let place = *state.index.get(id).ok_or(Miss::Absent)?;
            (place, state.segments[self.geometry.segment_of(place.slot)].clone())
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
            let state = self.lock();
            let place = *state.index.get(id).ok_or(Miss::Absent)?;
            (place, state.segments[self.geometry.segment_of(place.slot)].clone())
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
        let mut state = self.lock();
        state.freshen_log(&self.dir)?;
        let mut count = 0;
        for id in ids {
            let Some(place) = state.index.get(id).copied() else { continue };
            let blanked = state.blank(place.slot, erase);
            state.log.push(&Record::Delete(*id));
            state.is_synced = false;
            let logged = state.log.flush();
            // Either is enough to forget it; a disk without room for the record allows the first.
            if erase || logged.is_err() {
                if blanked.is_err() && logged.is_err() {
                    state.log.pop(1);
                }
                blanked?;
            }
            if let Some(slot) = state.release(id) {
                state.free.push(slot);
                count += 1;
            }
        }
        if state.log.num_records() > 4 * state.index.len() as u64 + LOG_SLACK {
            state.compact(&self.dir)?;
        }
        Ok(count)
    }

    /// Group commit: when it returns n, every shard whose put returned less than n is on the disk.
    pub fn sync(&self) -> Result<u64, StoreError> {
        let _turn = self.sync_turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (dirty, covered) = {
            let mut state = self.lock();
            state.freshen_log(&self.dir)?;
            state.unsynced_bytes = 0;
            if state.is_synced {
                return Ok(state.log.next_number());
            }
            let dirty: Vec<(usize, Arc<File>)> = (0..state.dirty.len())
                .filter(|number| state.dirty[*number])
                .filter_map(|number| Some((number, state.segments[number].clone()?)))
                .collect();
            state.dirty.fill(false);
            (dirty, state.log.next_number())
        };
        for (_, file) in &dirty {
            if let Err(error) = file.sync_data() {
                // What was not flushed is still to be flushed: the next call must not skip it.
                let mut state = self.lock();
                dirty.iter().for_each(|(number, _)| state.dirty[*number] = true);
                return Err(error.into());
            }
        }
        let log = {
            let mut state = self.lock();
            // A compaction in between has flushed everything up to here and began a new file.
            if let Some(covered_here) = covered.checked_sub(state.log.base()) {
                let is_all = state.log.next_number() == covered;
                state.log.push(&Record::Mark(covered_here));
                // No reason to call what is on the disk not durable when the disk is full: the
                // claims are in the log, and opening reads more than it must.
                let marked = state.log.flush();
                if marked.is_err() {
                    state.log.pop(1);
                }
                state.is_synced = is_all && marked.is_ok();
            }
            state.log.try_clone_file()?
        };
        log.sync_data()?;
        Ok(covered)
    }

    /// Takes up shards that lie in slots which the log does not name, for an owner whose own records
    /// say that some are missing; returns how many.
    pub fn rescan(&self) -> Result<u64, StoreError> {
        let mut state = self.lock();
        state.freshen_log(&self.dir)?;
        let found = state.take_up_unnamed(0..self.geometry.num_slots()).num_shards;
        if found > 0 {
            let state = &mut *state;
            for slots in [&mut state.free, &mut state.ready] {
                slots.retain(|slot| state.owners[*slot as usize].is_none());
            }
            state.compact(&self.dir)?;
        }
        Ok(found)
    }

    /// Ids from the given slot on, at most `limit`, with their creation time; and the next slot.
    pub fn list(&self, from_slot: u32, limit: usize) -> (Vec<(ShardId, u32, u32)>, Option<u32>) {
        let state = self.lock();
        let mut found = Vec::new();
        for slot in from_slot..state.owners.len() as u32 {
            if found.len() == limit {
                return (found, Some(slot));
            }
            if let Some(id) = state.owners[slot as usize] {
                let place = state.index[&id];
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
                let state = self.lock();
                let Some(id) = state.owners[slot as usize] else { continue };
                (id, state.index[&id], state.segments[self.geometry.segment_of(slot)].clone())
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
                let state = self.lock();
                let Some(place) = state.index.get(&id).copied() else { continue };
                (place, state.segments[self.geometry.segment_of(place.slot)].clone())
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
        let state = self.lock();
        let segments = state.segments.iter().flatten().count() as u64;
        Stat {
            num_slots: self.geometry.max_segments as u64 * self.geometry.slots_per_segment as u64,
            num_used: state.index.len() as u64,
            slot_bytes: self.geometry.slot_bytes,
            disk_bytes: segments
                * self.geometry.slots_per_segment as u64
                * self.geometry.slot_bytes
                + state.log.num_records() * RECORD_BYTES as u64,
            unsynced_bytes: state.unsynced_bytes,
            num_log_records: state.log.num_records(),
        }
    }
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
