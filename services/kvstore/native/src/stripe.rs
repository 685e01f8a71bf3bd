//! An object cut into k data and m parity shards, each behind its header (sections 3.2 and 4).

use std::mem::MaybeUninit;

use crate::crc;
use crate::ec::{Code, EcError, Path};
use crate::shard::SHARD_HEADER_BYTES;

/// Length of each shard's data, as its header says.
pub fn data_len(template: &[u8; SHARD_HEADER_BYTES]) -> usize {
    u32::from_le_bytes(template[12..16].try_into().expect("4 bytes")) as usize
}

/// Fills all shards, memory that nobody has written before: clearing it first would cost as much as
/// the parity. Each piece of the object is read once; what is behind its end is zero.
///
/// `template` is the header of any shard; number and checksums are filled in. BadShape, with
/// nothing filled, when the object is longer than k shards, or `shards` are not k + m of header and
/// data.
pub fn cut(
    code: &Code,
    path: Path,
    template: &[u8; SHARD_HEADER_BYTES],
    object: &[&[u8]],
    shards: &mut [&mut [MaybeUninit<u8>]],
) -> Result<(), EcError> {
    let len = data_len(template);
    let total: usize = object.iter().map(|piece| piece.len()).sum();
    let even = shards.iter().all(|shard| shard.len() == SHARD_HEADER_BYTES + len);
    if shards.len() != code.k + code.m || !even || total > code.k * len {
        return Err(EcError::BadShape);
    }
    let mut rest = object.iter().copied();
    let mut piece: &[u8] = &[];
    let mut data: Vec<&[u8]> = Vec::with_capacity(code.k + code.m);
    let mut parity: Vec<&mut [u8]> = Vec::with_capacity(code.m);
    let mut headers = Vec::with_capacity(code.k + code.m);
    for (number, shard) in shards.iter_mut().enumerate() {
        let (header, body) = shard.split_at_mut(SHARD_HEADER_BYTES);
        headers.push(header);
        let mut at = 0;
        while number < code.k && at < len {
            if piece.is_empty() {
                match rest.next() {
                    Some(next) => piece = next,
                    None => break,
                }
            }
            let (part, behind) = piece.split_at(piece.len().min(len - at));
            write(&mut body[at..at + part.len()], part);
            (at, piece) = (at + part.len(), behind);
        }
        body[at..].fill(MaybeUninit::new(0));
        // SAFETY: written up to `at`, and zeros behind.
        let body = unsafe { std::slice::from_raw_parts_mut(body.as_mut_ptr().cast::<u8>(), len) };
        if number < code.k {
            data.push(body);
        } else {
            parity.push(body);
        }
    }
    code.encode(path, &data, &mut parity)?;
    data.extend(parity.iter().map(|body| &**body));
    for (number, (header, body)) in headers.into_iter().zip(&data).enumerate() {
        let mut filled = *template;
        filled[5] = number as u8;
        filled[68..72].copy_from_slice(&crc::crc32c(body).to_le_bytes());
        let sum = crc::crc32c(&filled[..124]);
        filled[124..].copy_from_slice(&sum.to_le_bytes());
        write(header, &filled);
    }
    Ok(())
}

/// Copies into memory that may never have been written. Panics unless both are as long.
fn write(to: &mut [MaybeUninit<u8>], from: &[u8]) {
    assert_eq!(to.len(), from.len());
    // SAFETY: as long as each other, and an exclusive borrow cannot overlap a shared one.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast(), from.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::parse_header;

    fn template(len: u32) -> [u8; SHARD_HEADER_BYTES] {
        let mut header = [0; SHARD_HEADER_BYTES];
        header[..5].copy_from_slice(b"DKSH\x01");
        header[12..16].copy_from_slice(&len.to_le_bytes());
        header
    }

    fn unwritten(shards: &mut [Vec<u8>]) -> Vec<&mut [MaybeUninit<u8>]> {
        let slice = |shard: &mut Vec<u8>| -> &mut [MaybeUninit<u8>] {
            // SAFETY: bytes may be looked at as bytes that might not be; `cut` only writes whole ones.
            unsafe { std::slice::from_raw_parts_mut(shard.as_mut_ptr().cast(), shard.len()) }
        };
        shards.iter_mut().map(slice).collect()
    }

    #[test]
    fn shards_hold_the_object_its_parity_and_sound_headers() {
        let code = Code::new(4, 2);
        let object: Vec<u8> = (0..450u32).map(|i| (i * 31) as u8).collect();
        for cut_at in [0, 1, 127, 128, 129, 256, 449, 450] {
            let mut shards = vec![vec![0xee; SHARD_HEADER_BYTES + 128]; 6];
            let mut slices = unwritten(&mut shards);
            let pieces = [&object[..cut_at], &[], &object[cut_at..]];
            cut(&code, Path::best(), &template(128), &pieces, &mut slices).unwrap();
            let bodies: Vec<&[u8]> = shards.iter().map(|shard| &shard[128..]).collect();
            let mut padded = object.clone();
            padded.resize(512, 0);
            assert_eq!(bodies[..4].concat(), padded, "cut at {cut_at}");
            let mut parity = vec![vec![0; 128]; 2];
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
            code.encode(Path::Plain, &bodies[..4], &mut outputs).unwrap();
            assert_eq!(bodies[4..], parity);
            for (number, shard) in shards.iter().enumerate() {
                let (id, len) = parse_header(shard).unwrap();
                assert_eq!((id.shard as usize, len), (number, 128));
                assert_eq!(shard[68..72], crc::crc32c(&shard[128..]).to_le_bytes());
            }
        }
    }

    #[test]
    fn an_object_too_long_or_shards_of_other_lengths_are_refused() {
        let code = Code::new(2, 1);
        let mut shards = vec![vec![0; SHARD_HEADER_BYTES + 64]; 3];
        let mut slices = unwritten(&mut shards);
        let long = [0; 129];
        let result = cut(&code, Path::Plain, &template(64), &[&long], &mut slices);
        assert_eq!(result, Err(EcError::BadShape));
        let result = cut(&code, Path::Plain, &template(65), &[&long[..9]], &mut slices);
        assert_eq!(result, Err(EcError::BadShape));
        let result = cut(&code, Path::Plain, &template(64), &[&long[..9]], &mut slices[..2]);
        assert_eq!(result, Err(EcError::BadShape));
    }
}
