//! SHA-256 hash chain over blocks of token ids (kvcache-and-balancing.md, section 2).
//!
//! A chain cannot be hashed in parallel: each message begins with the digest before it. What can be
//! saved is everything around the rounds. A block without media whose bytes are whole lines of
//! SHA-256 (128 tokens are) goes to the compression function in three pieces, of which the middle
//! one is the caller's memory; nothing else is copied or buffered. Then the latency of the
//! processor's SHA instructions is all that is left.

use sha2::digest::generic_array::GenericArray;
use sha2::digest::typenum::U64;
use sha2::{Digest, Sha256};

/// A full key of one block.
pub type Key = [u8; 32];

const LINE: usize = 64;
type Line = GenericArray<u8, U64>;

/// Keys of the complete blocks of `tokens` (raw u32 little-endian bytes), chained from `parent`.
///
/// `extras[i]` is the already encoded media list of block i (36 bytes an item); a block without
/// one has no media. The incomplete tail has no key.
pub fn chain(
    parent: &Key,
    tokens: &[u8],
    block_tokens: usize,
    extras: &[(usize, Vec<u8>)],
) -> Vec<Key> {
    let mut keys = vec![Key::default(); num_blocks(tokens, block_tokens)];
    chain_into(parent, tokens, block_tokens, extras, &mut keys);
    keys
}

/// How many complete blocks these bytes hold.
pub fn num_blocks(tokens: &[u8], block_tokens: usize) -> usize {
    tokens.len() / (block_tokens * 4).max(1)
}

/// As `chain`, into `keys`, which has room for all of them.
pub fn chain_into(
    parent: &Key,
    tokens: &[u8],
    block_tokens: usize,
    extras: &[(usize, Vec<u8>)],
    keys: &mut [Key],
) {
    let block_bytes = (block_tokens * 4).max(1);
    let mut plain = block_bytes.is_multiple_of(LINE).then(|| Plain::new(block_bytes));
    let mut next_extra = extras.iter().peekable();
    let mut previous = *parent;
    for (index, (block, key)) in tokens.chunks_exact(block_bytes).zip(keys).enumerate() {
        let extra = next_extra.next_if(|(at, _)| *at == index);
        previous = match (&mut plain, extra) {
            (Some(plain), None) => plain.key(&previous, block),
            (_, extra) => key_of(&previous, block, extra.map_or(&[], |(_, extra)| extra)),
        };
        *key = previous;
    }
}

/// The key of one block by the definition.
fn key_of(parent: &Key, block: &[u8], extra: &[u8]) -> Key {
    let mut hash = Sha256::new();
    hash.update(parent);
    hash.update(block);
    hash.update(((extra.len() / 36) as u16).to_le_bytes());
    hash.update(extra);
    hash.finalize().into()
}

/// First and last line of the message `parent + block + u16 0`, padded as SHA-256 wants it.
struct Plain {
    first: [u8; LINE],
    last: [u8; LINE],
}

impl Plain {
    const HALF: usize = LINE / 2;

    fn new(block_bytes: usize) -> Plain {
        let (first, mut last) = ([0; LINE], [0; LINE]);
        // Behind the block's last 32 bytes: the count of media, one set bit, the length in bits.
        last[Plain::HALF + 2] = 0x80;
        last[LINE - 8..]
            .copy_from_slice(&(8 * (size_of::<Key>() + block_bytes + 2) as u64).to_be_bytes());
        Plain { first, last }
    }

    fn key(&mut self, parent: &Key, block: &[u8]) -> Key {
        /// What SHA-256 starts with (FIPS 180-4, 5.3.3).
        const START: [u32; 8] = [
            0x6a09_e667,
            0xbb67_ae85,
            0x3c6e_f372,
            0xa54f_f53a,
            0x510e_527f,
            0x9b05_688c,
            0x1f83_d9ab,
            0x5be0_cd19,
        ];
        let (head, rest) = block.split_at(Plain::HALF);
        let (middle, tail) = rest.split_at(rest.len() - Plain::HALF);
        self.first[..Plain::HALF].copy_from_slice(parent);
        self.first[Plain::HALF..].copy_from_slice(head);
        self.last[..Plain::HALF].copy_from_slice(tail);
        let mut state = START;
        sha2::compress256(&mut state, lines(&self.first));
        sha2::compress256(&mut state, lines(middle));
        sha2::compress256(&mut state, lines(&self.last));
        let mut key = Key::default();
        for (bytes, word) in key.chunks_exact_mut(4).zip(state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        key
    }
}

/// The same bytes as whole lines.
fn lines(bytes: &[u8]) -> &[Line] {
    assert!(bytes.len().is_multiple_of(LINE));
    // SAFETY: a Line is 64 bytes without alignment or padding, and the length is whole lines.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / LINE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chain by the definition, block for block.
    fn slow_chain(
        parent: &Key,
        tokens: &[u8],
        block_tokens: usize,
        extras: &[(usize, Vec<u8>)],
    ) -> Vec<Key> {
        let mut previous = *parent;
        let blocks = tokens.chunks_exact(4 * block_tokens).enumerate();
        blocks
            .map(|(index, block)| {
                let extra = extras.iter().find(|(at, _)| *at == index);
                previous = key_of(&previous, block, extra.map_or(&[], |(_, extra)| extra));
                previous
            })
            .collect()
    }

    #[test]
    fn keys_follow_the_definition_at_every_block_size_and_alignment() {
        let bytes: Vec<u8> =
            (0..9_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for block_tokens in [1, 3, 15, 16, 17, 32, 48, 64, 127, 128, 256] {
            for (from, to) in [(0, 8_192), (1, 8_193), (4, 9_000), (3, 700), (0, 0)] {
                let tokens = &bytes[from..to];
                assert_eq!(
                    chain(&[5; 32], tokens, block_tokens, &[]),
                    slow_chain(&[5; 32], tokens, block_tokens, &[]),
                    "{block_tokens} tokens, bytes {from} to {to}"
                );
            }
        }
    }

    #[test]
    fn media_change_their_block_and_all_behind_it() {
        let tokens = vec![7; 5 * 512];
        let extras = [(1, vec![3; 36]), (3, vec![4; 72])];
        let with = chain(&[0; 32], &tokens, 128, &extras);
        assert_eq!(with, slow_chain(&[0; 32], &tokens, 128, &extras));
        let without = chain(&[0; 32], &tokens, 128, &[]);
        assert_eq!(with[0], without[0]);
        assert!((1..5).all(|i| with[i] != without[i]));
    }
}
