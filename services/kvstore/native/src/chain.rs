//! SHA-256 hash chain over blocks of token ids (kvcache-and-balancing.md, section 2).

use sha2::{Digest, Sha256};

/// A full key of one block.
pub type Key = [u8; 32];

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
    let block_bytes = block_tokens * 4;
    let mut keys = Vec::with_capacity(tokens.len() / block_bytes.max(1));
    let mut previous = *parent;
    let mut next_extra = extras.iter().peekable();
    for (index, block) in tokens.chunks_exact(block_bytes).enumerate() {
        let mut hash = Sha256::new();
        hash.update(previous);
        hash.update(block);
        match next_extra.next_if(|(at, _)| *at == index) {
            Some((_, extra)) => {
                hash.update(((extra.len() / 36) as u16).to_le_bytes());
                hash.update(extra);
            }
            None => hash.update(0u16.to_le_bytes()),
        }
        previous = hash.finalize().into();
        keys.push(previous);
    }
    keys
}
