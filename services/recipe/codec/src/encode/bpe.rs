//! One piece to ids.
//!
//! An encoding is the only sequence of tokens in which every pair of neighbours may touch (see
//! `merges`), so it can be searched for from the left: take the longest token that may touch the
//! one before, and go back where none fits. For each position there is only one valid sequence that
//! ends there, so a position that failed once has failed for good: the search is linear.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cjk::CjkChars;
use super::file::{LoadError, TokenizerFile};
use super::merges::{Merges, Token};
use super::pieces::piece_end;
use super::small::merge_bytes;
use super::trie::Trie;
use super::words::{Head, Key, MAX_CACHED_IDS, MAX_KEY_LEN, WordCache, WordTable};

/// Text between two checks of the room left for ids.
const BLOCK_BYTES: usize = 4096;

/// 65536 pieces of 32 bytes. In 8 MB of prose or code 3 % of the pieces are not in it; a table a
/// sixteenth of that size, near enough for the fastest cache, misses 14 % and costs more.
const RECENT_BITS: u32 = 16;

/// Longest piece that is merged from its bytes. A short piece needs few rules and those are the
/// frequent ones, near in the caches; what the search looks up for it is not.
const MAX_MERGED_LEN: usize = 24;

pub struct Bpe {
    merges: Merges,
    trie: Trie,
    words: WordTable,
    cjk: CjkChars,
}

/// Memory that one thread reuses from piece to piece.
pub struct Scratch {
    recent: WordCache,
    tokens: Vec<Token>,
    /// Positions where no continuation exists, ascending bit order; grown on the first failure.
    dead: Vec<u64>,
    /// Candidates tried by the last search: what bounds its time.
    num_tried: usize,
}

impl Scratch {
    pub fn new() -> Self {
        Scratch {
            recent: WordCache::new(RECENT_BITS),
            tokens: Vec::new(),
            dead: Vec::new(),
            num_tried: 0,
        }
    }
}

/// Scratches of one tokenizer: as many as threads ever used it at once.
#[derive(Default)]
pub struct Scratches(Mutex<Vec<Scratch>>);

impl Scratches {
    pub fn with<R>(&self, use_it: impl FnOnce(&mut Scratch) -> R) -> R {
        let mut scratch = self.lock().pop().unwrap_or_else(Scratch::new);
        let result = use_it(&mut scratch);
        self.lock().push(scratch);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bpe {
    pub fn new(file: &TokenizerFile) -> Result<Self, LoadError> {
        let merges = Merges::new(file)?;
        let mut words = Vec::with_capacity(merges.num_tokens() as usize);
        for token in (0..merges.num_tokens()).filter(|token| merges.is_reachable(*token)) {
            let mut bytes = Vec::with_capacity(merges.len(token));
            merges.write_bytes(token, &mut bytes);
            words.push((bytes, token));
        }
        let cjk = CjkChars::new(&merges);
        Ok(Bpe { cjk, trie: Trie::new(&merges), words: WordTable::new(&words, &merges), merges })
    }

    /// Appends the ids of a text, piece by piece.
    pub fn encode_pieces(&self, text: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let mut at = 0;
        while at < text.len() {
            // No byte gives more than one id, so these pieces fit but perhaps the last, and what
            // comes after that one reserves again.
            let block_end = text.len().min(at + BLOCK_BYTES);
            ids.reserve(BLOCK_BYTES + MAX_CACHED_IDS);
            while at < block_end {
                let end = piece_end(text, at);
                let len = end - at;
                if len > MAX_KEY_LEN {
                    self.encode_long(text, at..end, scratch, ids);
                    at = end;
                    continue;
                }
                let key = Key::new(text, at, len);
                let hash = key.hash();
                match scratch.recent.get(key, hash) {
                    Some((cached, num_ids)) => {
                        debug_assert!(ids.capacity() - ids.len() >= MAX_CACHED_IDS);
                        // SAFETY: reserved above. Copying all of a fixed number and counting some
                        // of them has no branch on how many there are.
                        unsafe {
                            let target = ids.as_mut_ptr().add(ids.len());
                            target.cast::<[u32; MAX_CACHED_IDS]>().write_unaligned(*cached);
                            ids.set_len(ids.len() + num_ids);
                        }
                    }
                    None => self.encode_uncommon(text, at..end, key, hash, scratch, ids),
                }
                at = end;
            }
        }
    }

    /// The encoding of one piece, in tokens: by the search alone, for a piece of any length.
    pub fn search_tokens(&self, piece: &[u8], scratch: &mut Scratch) -> Vec<Token> {
        self.search(piece, 0..piece.len(), scratch);
        scratch.tokens.clone()
    }

    pub fn token_len(&self, token: Token) -> usize {
        self.merges.len(token)
    }

    pub fn write_ids(&self, tokens: &[Token], ids: &mut Vec<u32>) {
        ids.extend(tokens.iter().map(|token| self.merges.id(*token)));
    }

    #[inline(never)]
    fn encode_uncommon(
        &self,
        text: &[u8],
        piece: Range<usize>,
        key: Key,
        hash: u64,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) {
        if let Some((_, id)) = self.words.get(key, hash) {
            ids.push(id);
            return scratch.recent.put(key, hash, &[id]);
        }
        let start = ids.len();
        self.encode_long(text, piece, scratch, ids);
        scratch.recent.put(key, hash, &ids[start..]);
    }

    #[inline(never)]
    fn encode_long(
        &self,
        text: &[u8],
        piece: Range<usize>,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) {
        if text[piece.start] >= 0xE0 && self.cjk.encode(&text[piece.clone()], &self.merges, ids) {
            return;
        }
        if piece.len() > MAX_KEY_LEN {
            // Of a short piece the table has told that it is no token.
            let whole = self.trie.longest(&text[piece.clone()]);
            if self.merges.len(whole) == piece.len() {
                return ids.push(self.merges.id(whole));
            }
        }
        if piece.len() <= MAX_MERGED_LEN {
            return merge_bytes(&text[piece], &self.merges, ids);
        }
        self.search(text, piece, scratch);
        self.write_ids(&scratch.tokens, ids);
    }

    /// The longest token at the start of `text[at..end]`.
    #[inline(always)]
    fn longest(&self, text: &[u8], at: usize, end: usize) -> Token {
        let len = end - at;
        if len > MAX_KEY_LEN {
            return self.trie.longest(&text[at..end]);
        }
        // Nothing in one look-up depends on another, so they overlap; a walk down the trie waits
        // for memory at each byte.
        let head = Head::new(text, at, len);
        for len in (2..=len).rev() {
            let key = head.key(len);
            if let Some((token, _)) = self.words.get(key, key.hash()) {
                return token;
            }
        }
        Token::from(text[at])
    }

    /// Leaves the encoding of a piece in `scratch.tokens`.
    fn search(&self, text: &[u8], piece: Range<usize>, scratch: &mut Scratch) {
        let Scratch { tokens, dead, num_tried, .. } = scratch;
        tokens.clear();
        *num_tried = 0;
        dead.clear();
        let Range { start, end } = piece;
        let mut at = start;
        while at < end {
            let mut candidate = Some(self.longest(text, at, end));
            // Goes on until a token was placed; each turn takes back one placed token.
            loop {
                let fits = |token: Token| {
                    !is_dead(dead, at - start + self.merges.len(token))
                        && tokens.last().is_none_or(|last| self.merges.may_touch(*last, token))
                };
                while let Some(token) = candidate {
                    *num_tried += 1;
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
                mark_dead(dead, at - start, end - start);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary in which long tokens tempt the search and are then refused.
    fn tempting() -> Bpe {
        let mut vocab: Vec<(Vec<u8>, u32)> = (0..=255u8).map(|b| (vec![b], u32::from(b))).collect();
        let mut merges = Vec::new();
        let add = |left: usize, right: usize, vocab: &mut Vec<(Vec<u8>, u32)>| {
            let bytes = [vocab[left].0.as_slice(), vocab[right].0.as_slice()].concat();
            vocab.push((bytes, vocab.len() as u32));
            vocab.len() - 1
        };
        let (a, b) = (usize::from(b'a'), usize::from(b'b'));
        for (left, right) in [(a, a), (a, b), (b, a)] {
            let merged = add(left, right, &mut vocab);
            merges.push([left as u32, right as u32, merged as u32]);
        }
        let mut last = 256;
        for _ in 0..6 {
            let merged = add(last, last, &mut vocab);
            merges.push([last as u32, last as u32, merged as u32]);
            let odd = add(merged, 257, &mut vocab);
            merges.push([merged as u32, 257, odd as u32]);
            last = merged;
        }
        Bpe::new(&TokenizerFile { added: Vec::new(), vocab, merges }).expect("a proper vocabulary")
    }

    /// Merges as the rules say: least rank, leftmost first. Quadratic.
    fn by_the_rules(bpe: &Bpe, piece: &[u8]) -> Vec<Token> {
        let mut tokens: Vec<Token> = piece.iter().map(|byte| Token::from(*byte)).collect();
        loop {
            let pairs = tokens.windows(2).enumerate();
            let found =
                pairs.filter_map(|(at, pair)| Some((bpe.merges.merged(pair[0], pair[1])?, at)));
            let Some((merged, at)) = found.min() else { return tokens };
            tokens[at] = merged;
            tokens.remove(at + 1);
        }
    }

    #[test]
    fn the_search_finds_what_the_rules_give() {
        let bpe = tempting();
        let mut scratch = Scratch::new();
        let mut bits = 1u64;
        for len in 1..200 {
            for _ in 0..20 {
                let piece: Vec<u8> = (0..len)
                    .map(|_| {
                        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                        if bits >> 61 == 0 { b'b' } else { b'a' }
                    })
                    .collect();
                let wanted = by_the_rules(&bpe, &piece);
                assert_eq!(bpe.search_tokens(&piece, &mut scratch), wanted, "{piece:?}");
            }
        }
    }

    #[test]
    fn the_search_tries_a_bounded_number_of_candidates_per_byte() {
        let bpe = tempting();
        let mut scratch = Scratch::new();
        for pattern in ["a", "ab", "aab", "aaaab", "b", "abaab", "aaaaaaaaaaaaaaaab"] {
            for len in [1_000, 10_000, 100_000] {
                let piece: Vec<u8> = pattern.bytes().cycle().take(len).collect();
                bpe.search(&piece, 0..len, &mut scratch);
                assert!(scratch.num_tried <= 16 * len, "{pattern}: {}", scratch.num_tried);
            }
        }
    }
}
