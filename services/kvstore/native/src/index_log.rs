//! The index log of a segment store: records of 48 bytes that say which shard has which slot.
//!
//! A record is `op u8, number u8, 2 zero bytes, 40 bytes that depend on op, crc32c`. Records wait in
//! memory until something has to be on the file: a claim, a deletion, a group commit. A put needs
//! none of these. The slot it writes was claimed before, a few dozen at a time, and an opening looks
//! into every claimed slot that no later record names: that is what makes an acknowledged put
//! survive the death of the process at a fortieth of a call into the kernel.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::crc;
use crate::shard::ShardId;

pub const RECORD_BYTES: usize = 48;
/// How many slots one claim names.
pub const SLOTS_PER_CLAIM: usize = 10;

const OP_PUT: u8 = 1;
const OP_DELETE: u8 = 2;
const OP_SYNC: u8 = 3;
const OP_CLAIM: u8 = 4;

/// Where a shard lies, how long its data are, when it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub slot: u32,
    pub len: u32,
    pub created_s: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    Put(ShardId, Place),
    Delete(ShardId),
    /// Everything before the record of this number is on the disk.
    Mark(u64),
    /// Slots without an owner that are going to be written; at most `SLOTS_PER_CLAIM`.
    Claim(Vec<u32>),
    /// Sound, and of a kind that only another version knows.
    Unknown,
}

impl Record {
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        match self {
            Record::Put(id, place) => {
                name(&mut bytes, OP_PUT, id);
                bytes[4..8].copy_from_slice(&place.slot.to_le_bytes());
                bytes[32..36].copy_from_slice(&place.len.to_le_bytes());
                bytes[36..40].copy_from_slice(&place.created_s.to_le_bytes());
            }
            Record::Delete(id) => name(&mut bytes, OP_DELETE, id),
            Record::Mark(number) => {
                bytes[0] = OP_SYNC;
                bytes[24..32].copy_from_slice(&number.to_le_bytes());
            }
            Record::Unknown => {}
            Record::Claim(slots) => {
                bytes[0] = OP_CLAIM;
                bytes[1] = slots.len() as u8;
                for (field, slot) in bytes[4..44].chunks_exact_mut(4).zip(slots) {
                    field.copy_from_slice(&slot.to_le_bytes());
                }
            }
        }
        let crc = crc::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// None for a record that is damaged.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Record> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        if word(44) != crc::crc32c(&bytes[..44]) {
            return None;
        }
        let long = u64::from_le_bytes(bytes[24..32].try_into().expect("8 bytes"));
        let id = ShardId {
            key: bytes[8..24].try_into().expect("16 bytes"),
            shard: bytes[1],
            put_id: long,
        };
        Some(match bytes[0] {
            OP_PUT => Record::Put(id, Place { slot: word(4), len: word(32), created_s: word(36) }),
            OP_DELETE => Record::Delete(id),
            OP_SYNC => Record::Mark(long),
            OP_CLAIM if bytes[1] as usize <= SLOTS_PER_CLAIM => {
                Record::Claim((0..bytes[1] as usize).map(|at| word(4 + 4 * at)).collect())
            }
            _ => Record::Unknown,
        })
    }
}

fn name(bytes: &mut [u8; RECORD_BYTES], op: u8, id: &ShardId) {
    bytes[0] = op;
    bytes[1] = id.shard;
    bytes[8..24].copy_from_slice(&id.key);
    bytes[24..32].copy_from_slice(&id.put_id.to_le_bytes());
}

/// The records of these slots, `SLOTS_PER_CLAIM` at a time.
pub fn claims(slots: &[u32]) -> impl Iterator<Item = Record> {
    slots.chunks(SLOTS_PER_CLAIM).map(|some| Record::Claim(some.to_vec()))
}

/// The sound records of a log, with their places in it; a damaged one is skipped, for the others
/// say by themselves what they mean.
pub fn parse(log: &[u8]) -> Vec<(u64, Record)> {
    let (records, _) = log.as_chunks();
    (0..).zip(records).filter_map(|(at, bytes)| Some((at, Record::decode(bytes)?))).collect()
}

/// A log that is written: its file, and the records that are not yet in it.
pub struct IndexLog {
    file: File,
    /// Records ever written before this file began: numbers of records never repeat.
    base: u64,
    num_written: u64,
    waiting: Vec<u8>,
}

impl IndexLog {
    /// Over a file that holds `num_written` records, whole or not.
    pub fn new(file: File, num_written: u64) -> IndexLog {
        IndexLog { file, base: 0, num_written, waiting: Vec::new() }
    }

    /// Number of the next record. A put is durable once a group commit covered more than its own.
    pub fn next_number(&self) -> u64 {
        self.base + self.num_records()
    }

    /// Number of the first record of this file.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Records of this file, those that wait for it included.
    pub fn num_records(&self) -> u64 {
        self.num_written + (self.waiting.len() / RECORD_BYTES) as u64
    }

    pub fn push(&mut self, record: &Record) {
        self.waiting.extend_from_slice(&record.encode());
    }

    /// Takes back so many of the last records that still wait.
    pub fn pop(&mut self, count: usize) {
        self.waiting.truncate(self.waiting.len() - count * RECORD_BYTES);
    }

    /// Hands all that waits to the kernel. After an error it still waits: writing at the known end
    /// repairs what a full disk cut short.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.waiting, self.num_written * RECORD_BYTES as u64)?;
        self.num_written = self.num_records();
        self.waiting.clear();
        Ok(())
    }

    /// Goes on in a file that holds `num_written` records, which stand for all there were.
    pub fn go_on_in(&mut self, file: File, num_written: u64) {
        *self = IndexLog { file, base: self.next_number(), num_written, waiting: Vec::new() };
    }

    #[cfg(test)]
    pub fn swap_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// Another handle to the file, to flush it without holding the store.
    pub fn try_clone_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_damaged_ones_do_not() {
        let id = ShardId { key: [7; 16], shard: 11, put_id: 1 << 60 };
        let place = Place { slot: 70_000, len: 11_520, created_s: 9 };
        let records = [
            Record::Put(id, place),
            Record::Delete(id),
            Record::Mark(3),
            Record::Claim(vec![]),
            Record::Unknown,
            Record::Claim((1..11).map(|slot| slot << 20).collect()),
        ];
        let mut log: Vec<u8> = records.iter().flat_map(Record::encode).collect();
        log.extend([0; RECORD_BYTES + 5]);
        let found: Vec<Record> = parse(&log).into_iter().map(|(_, record)| record).collect();
        assert_eq!(found, records);
        for at in 0..RECORD_BYTES {
            for record in &records {
                let mut bytes = record.encode();
                bytes[at] ^= 4;
                assert_eq!(Record::decode(&bytes), None, "byte {at} of {record:?}");
            }
        }
    }

    #[test]
    fn many_slots_make_several_claims() {
        let slots: Vec<u32> = (0..25).collect();
        let named: Vec<usize> = claims(&slots)
            .map(|record| match record {
                Record::Claim(some) => some.len(),
                _ => 0,
            })
            .collect();
        assert_eq!(named, [10, 10, 5]);
    }
}
