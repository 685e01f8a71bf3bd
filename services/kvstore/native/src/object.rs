//! The 256-byte header of a stored block, and the check that decides whether bytes may be used.

use twox_hash::XxHash3_128;

use crate::crc;

pub const OBJECT_HEADER_BYTES: usize = 256;

/// Why an object may not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reject {
    /// Not a header, or damaged.
    Header = 5,
    /// Another block: the index key is only the first half of the full one.
    Key = 6,
    /// Written under another layout.
    Layout = 7,
    /// The payload does not have the header's digest or length.
    Payload = 8,
}

/// xxh3-128 in its canonical (big-endian) form.
pub fn digest(payload: &[u8]) -> [u8; 16] {
    XxHash3_128::oneshot(payload).to_be_bytes()
}

/// The same under a seed, for comparisons that nobody outside may aim at.
pub fn seeded_digest(payload: &[u8], seed: u64) -> [u8; 16] {
    XxHash3_128::oneshot_with_seed(seed, payload).to_be_bytes()
}

/// Checks everything that a reader knows: header checksum, full key, layout, length, digest.
pub fn verify(
    header: &[u8],
    payload: &[u8],
    key: &[u8; 32],
    layout: &[u8; 32],
) -> Result<(), Reject> {
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
    let sound = header.len() == OBJECT_HEADER_BYTES
        && &header[..8] == b"DIKVBLK1"
        && header[8..12] == [0, 1, 1, 0]
        && word(252) == crc::crc32c(&header[..252]);
    if !sound {
        return Err(Reject::Header);
    }
    if header[16..48] != *key {
        return Err(Reject::Key);
    }
    if header[80..112] != *layout {
        return Err(Reject::Layout);
    }
    if word(120) as usize != payload.len() || header[128..144] != digest(payload) {
        return Err(Reject::Payload);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(payload: &[u8], key: &[u8; 32], layout: &[u8; 32]) -> Vec<u8> {
        let mut header = vec![0; OBJECT_HEADER_BYTES];
        header[..8].copy_from_slice(b"DIKVBLK1");
        header[8..12].copy_from_slice(&[0, 1, 1, 0]);
        header[16..48].copy_from_slice(key);
        header[80..112].copy_from_slice(layout);
        header[120..124].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        header[128..144].copy_from_slice(&digest(payload));
        let crc = crc::crc32c(&header[..252]);
        header[252..].copy_from_slice(&crc.to_le_bytes());
        header
    }

    #[test]
    fn only_the_right_bytes_pass() {
        let (key, layout, payload) = ([7; 32], [9; 32], vec![3; 5_000]);
        let good = header(&payload, &key, &layout);
        assert_eq!(verify(&good, &payload, &key, &layout), Ok(()));
        let mut other_key = key;
        other_key[31] ^= 1;
        assert_eq!(verify(&good, &payload, &other_key, &layout), Err(Reject::Key));
        assert_eq!(verify(&good, &payload, &key, &[8; 32]), Err(Reject::Layout));
        assert_eq!(verify(&good, &payload[1..], &key, &layout), Err(Reject::Payload));
        for byte in [0, 100, 4_999] {
            let mut bad = payload.clone();
            bad[byte] ^= 0x10;
            assert_eq!(verify(&good, &bad, &key, &layout), Err(Reject::Payload));
        }
        for byte in 0..OBJECT_HEADER_BYTES {
            let mut bad = good.clone();
            bad[byte] ^= 1;
            assert_eq!(verify(&bad, &payload, &key, &layout), Err(Reject::Header), "byte {byte}");
        }
        assert_eq!(verify(&good[..255], &payload, &key, &layout), Err(Reject::Header));
    }
}
