//! What a segment store knows: which slot holds what, which are free, and the log that says so.
//!
//! Nothing here locks; the store holds its lock around every call.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::hash::BuildHasherDefault;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::index_log::{self, IndexLog, Place, RECORD_BYTES, Record};
use crate::shard::{IdHasher, SHARD_HEADER_BYTES, ShardId, parse_header, word};
use crate::slots::{Geometry, StoreError, owner_only};

/// Slots claimed with one write to the log. An opening after a crash reads as many more.
const CLAIM_AT_ONCE: usize = 4 * index_log::SLOTS_PER_CLAIM;

pub(crate) type Index = HashMap<ShardId, Place, BuildHasherDefault<IdHasher>>;

pub(crate) struct State {
    pub geometry: Geometry,
    pub index: Index,
    pub owners: Vec<Option<ShardId>>,
    /// Slots of existing segments without an owner; the highest is taken last so that a store that
    /// is little used stays in few segments.
    pub free: Vec<u32>,
    /// Of those, taken out of `free`: the ones that the log claims, to be used next.
    pub ready: Vec<u32>,
    /// Claimed slots that somebody is writing.
    pub writing: Vec<u32>,
    pub segments: Vec<Option<Arc<File>>>,
    pub dirty: Vec<bool>,
    pub log: IndexLog,
    pub is_synced: bool,
    pub unsynced_bytes: u64,
    /// The log on disk does not say what lives (a disk without room kept it from being written
    /// anew): nothing may be appended before it does.
    pub is_log_stale: bool,
}

/// What opening found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    pub num_shards: u64,
    pub num_torn: u64,
    pub was_rebuilt: bool,
}

impl State {
    /// Takes over what the log and the headers in these segments tell.
    pub fn recover(
        geometry: Geometry,
        segments: Vec<Option<Arc<File>>>,
        log_file: File,
        log: &[u8],
    ) -> (State, Recovery) {
        let mut state = State {
            geometry,
            index: Index::default(),
            owners: vec![None; geometry.num_slots() as usize],
            free: Vec::new(),
            ready: Vec::new(),
            writing: Vec::new(),
            dirty: vec![false; segments.len()],
            segments,
            log: IndexLog::new(log_file, (log.len() / RECORD_BYTES) as u64),
            is_synced: true,
            unsynced_bytes: 0,
            is_log_stale: false,
        };
        let mut recovery =
            if log.len() < RECORD_BYTES { state.rebuild() } else { state.replay(log) };
        recovery.num_shards = state.index.len() as u64;
        for number in (0..geometry.max_segments)
            .rev()
            .filter(|number| state.segments[*number as usize].is_some())
        {
            let first = number * geometry.slots_per_segment;
            let slots = (first..first + geometry.slots_per_segment).rev();
            state.free.extend(slots.filter(|slot| state.owners[*slot as usize].is_none()));
        }
        (state, recovery)
    }

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
    pub fn take_up_unnamed(&mut self, slots: impl IntoIterator<Item = u32>) -> Recovery {
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
    pub fn claim(&mut self) -> io::Result<()> {
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
    pub fn give_back(&mut self, slot: u32) {
        // A device that fails here leaves at worst an orphan.
        let _ = self.blank(slot, false);
        self.ready.push(slot);
    }

    /// Makes a slot's header say nothing, or all of the slot.
    pub fn blank(&mut self, slot: u32, all: bool) -> io::Result<()> {
        let segment = self.geometry.segment_of(slot);
        let len = if all { self.geometry.slot_bytes as usize } else { SHARD_HEADER_BYTES };
        let Some(file) = &self.segments[segment] else { return Ok(()) };
        self.dirty[segment] = true;
        self.is_synced = false;
        file.write_all_at(&vec![0; len], self.geometry.offset(slot))
    }

    pub fn freshen_log(&mut self, dir: &Path) -> Result<(), StoreError> {
        if self.is_log_stale { self.compact(dir) } else { Ok(()) }
    }

    fn is_usable(&self, place: &Place) -> bool {
        (place.slot as usize) < self.owners.len()
            && self.segments[self.geometry.segment_of(place.slot)].is_some()
            && place.len as u64 + SHARD_HEADER_BYTES as u64 <= self.geometry.slot_bytes
    }

    /// Writes the log anew with only what lives, and replaces the old one.
    pub fn compact(&mut self, dir: &Path) -> Result<(), StoreError> {
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
    pub fn assign(&mut self, id: ShardId, place: Place) {
        if let Some(former) = self.owners[place.slot as usize].take() {
            self.index.remove(&former);
        }
        if let Some(former) = self.index.insert(id, place) {
            self.owners[former.slot as usize] = None;
        }
        self.owners[place.slot as usize] = Some(id);
    }

    pub fn release(&mut self, id: &ShardId) -> Option<u32> {
        let place = self.index.remove(id)?;
        self.owners[place.slot as usize] = None;
        Some(place.slot)
    }
}
