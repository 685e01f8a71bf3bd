//! One piece to ids.
//!
//! An encoding is the only sequence of tokens in which every pair of neighbours may touch (see
//! `merges`), so it can be searched for from the left: take the longest token that may touch the
//! one before, and go back where none fits. For each position there is only one valid sequence that
//! ends there, so a position that failed once has failed for good: the search is linear.

use super::file::{LoadError, TokenizerFile};
use super::merges::{Merges, Token};
use super::trie::Trie;
use super::words::{Key, MAX_KEY_LEN, WordCache, WordTable};

pub struct Bpe {
    merges: Merges,
    trie: Trie,
    words: WordTable,
}

/// Memory that one thread reuses from piece to piece.
pub struct Scratch {
    cache: WordCache,
    tokens: Vec<Token>,
    /// Positions where no continuation exists, ascending bit order; grown on the first failure.
    dead: Vec<u64>,
}

impl Scratch {
    pub fn new() -> Self {
        Scratch { cache: WordCache::new(), tokens: Vec::new(), dead: Vec::new() }
    }
}

impl Bpe {
    pub fn new(file: &TokenizerFile) -> Result<Self, LoadError> {
        let merges = Merges::new(file)?;
        let mut words = Vec::with_capacity(merges.num_tokens() as usize);
        for token in (0..merges.num_tokens()).filter(|token| merges.is_reachable(*token)) {
            let mut bytes = Vec::with_capacity(merges.len(token));
            merges.write_bytes(token, &mut bytes);
            words.push((bytes, merges.id(token)));
        }
        Ok(Bpe { trie: Trie::new(&merges), words: WordTable::new(&words), merges })
    }

    /// Appends the ids of `text[start..end]`, one piece.
    #[inline(always)]
    pub fn encode_piece(
        &self,
        text: &[u8],
        start: usize,
        end: usize,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) {
        let len = end - start;
        if len > MAX_KEY_LEN {
            return self.encode_long(&text[start..end], scratch, ids);
        }
        let key = Key::new(text, start, len);
        if let Some(id) = self.words.get(key) {
            ids.push(id);
            return;
        }
        self.encode_uncommon(&text[start..end], key, scratch, ids);
    }

    #[inline(never)]
    fn encode_uncommon(&self, piece: &[u8], key: Key, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if let Some(cached) = scratch.cache.get(key) {
            ids.extend_from_slice(cached);
            return;
        }
        let start = ids.len();
        self.encode_long(piece, scratch, ids);
        scratch.cache.put(key, &ids[start..]);
    }

    fn encode_long(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        self.search(piece, scratch);
        ids.extend(scratch.tokens.iter().map(|token| self.merges.id(*token)));
    }

    /// Leaves the encoding of `piece` in `scratch.tokens`.
    fn search(&self, piece: &[u8], scratch: &mut Scratch) {
        let Scratch { tokens, dead, .. } = scratch;
        tokens.clear();
        dead.clear();
        let mut at = 0;
        while at < piece.len() {
            let mut candidate = Some(self.trie.longest(&piece[at..]));
            // Goes on until a token was placed; each turn takes back one placed token.
            loop {
                let fits = |token: Token| {
                    !is_dead(dead, at + self.merges.len(token))
                        && tokens.last().is_none_or(|last| self.merges.may_touch(*last, token))
                };
                while let Some(token) = candidate {
                    if fits(token) {
                        break;
                    }
                    candidate = self.trie.shorter(token);
                }
                if let Some(token) = candidate {
                    tokens.push(token);
                    at += self.merges.len(token);
                    break;
                }
                let Some(last) = tokens.pop() else {
                    unreachable!("every text has an encoding");
                };
                mark_dead(dead, at, piece.len());
                at -= self.merges.len(last);
                candidate = self.trie.shorter(last);
            }
        }
    }
}

#[inline(always)]
fn is_dead(dead: &[u64], at: usize) -> bool {
    dead.get(at >> 6).is_some_and(|word| word >> (at & 63) & 1 != 0)
}

#[cold]
fn mark_dead(dead: &mut Vec<u64>, at: usize, len: usize) {
    if dead.is_empty() {
        dead.resize((len >> 6) + 1, 0);
    }
    dead[at >> 6] |= 1 << (at & 63);
}
