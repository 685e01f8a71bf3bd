//! Zeroed memory of plain values, taken from the kernel in large pages where it has them.
//!
//! Look-ups that hit a table of many megabytes anywhere miss the address cache as often as the data
//! caches: with pages of 4 KiB each costs a walk through the page tables too.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A type for which all bytes zero are a value.
///
/// # Safety
/// The promise is the implementer's: no references, no niches.
pub unsafe trait Zeroed: Copy {}

/// A slice that owns its pages.
pub struct Pages<T: Zeroed> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl<T: Zeroed + Send> Send for Pages<T> {}
// SAFETY: as above; shared access is that of a slice.
unsafe impl<T: Zeroed + Sync> Sync for Pages<T> {}

impl<T: Zeroed> Pages<T> {
    /// `len` values of zero bytes. Panics without memory, as a vector does.
    pub fn zeroed(len: usize) -> Pages<T> {
        let bytes = len.checked_mul(size_of::<T>()).expect("a length that fits memory");
        if bytes == 0 {
            return Pages { start: NonNull::dangling(), len: 0 };
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping that touches no other; its result is checked.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            panic!("no memory for {bytes} bytes: {}", io::Error::last_os_error());
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the mapping is ours; a kernel without large pages says so and changes nothing.
        unsafe {
            libc::madvise(start, bytes, libc::MADV_HUGEPAGE)
        };
        // A mapping begins at a page, which is more than any value is aligned to.
        Pages { start: NonNull::new(start.cast()).expect("not null"), len }
    }
}

impl<T: Zeroed> Default for Pages<T> {
    fn default() -> Self {
        Pages::zeroed(0)
    }
}

impl<T: Zeroed> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many values lie there, zero or written since; zero is a value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Zeroed> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Zeroed> Drop for Pages<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: mapped by `zeroed` with this length, and nobody holds a reference.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len * size_of::<T>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // SAFETY: any bytes are a number.
    unsafe impl Zeroed for u64 {}

    #[test]
    fn memory_is_zero_and_keeps_what_is_written() {
        for len in [0, 1, 511, 3 << 18] {
            let mut pages = Pages::<u64>::zeroed(len);
            assert_eq!(pages.len(), len);
            assert!(pages.iter().all(|value| *value == 0));
            for (at, value) in pages.iter_mut().enumerate() {
                *value = at as u64;
            }
            assert!(pages.iter().enumerate().all(|(at, value)| *value == at as u64));
        }
    }
}
