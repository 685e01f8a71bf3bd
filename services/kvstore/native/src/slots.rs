//! Where slots lie in segment files, and whole reads and writes of one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::crc;
use crate::index_log::Place;
use crate::shard::{SHARD_HEADER_BYTES, ShardId, parse_header, word};

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

/// How slots lie in segments.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub slot_bytes: u64,
    pub slots_per_segment: u32,
    pub max_segments: u32,
}

impl Geometry {
    pub fn segment_of(&self, slot: u32) -> usize {
        (slot / self.slots_per_segment) as usize
    }

    pub fn offset(&self, slot: u32) -> u64 {
        (slot % self.slots_per_segment) as u64 * self.slot_bytes
    }

    pub fn num_slots(&self) -> u32 {
        self.max_segments * self.slots_per_segment
    }

    pub fn segment_bytes(&self) -> u64 {
        self.slots_per_segment as u64 * self.slot_bytes
    }

    /// Reads a whole shard into the front of `buffer` and checks all of it.
    pub fn read_verified(
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

pub(crate) fn owner_only(path: &Path, truncate: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(truncate).mode(0o600).open(path)
}

pub(crate) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    // SAFETY: a plain call on an open descriptor.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

pub(crate) fn segment_path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("seg-{number:04}"))
}

/// Writes pieces and what pads them, one behind the other.
pub(crate) fn write_all_at(
    file: &File,
    pieces: &[&[u8]],
    padding: &[u8],
    offset: u64,
) -> io::Result<()> {
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

pub(crate) fn read_all_at(file: &File, pieces: &mut [&mut [u8]], offset: u64) -> io::Result<()> {
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
