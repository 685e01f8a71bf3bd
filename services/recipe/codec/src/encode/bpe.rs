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
use super::pieces::{MAX_PIECES, PieceEnds};
use super::small::{Group, MAX_PARTS, Results};
use super::trie::Trie;
use super::words::{Head, Key, MAX_KEY_LEN, NO_ID, WordCache, WordTable};

/// 65536 pieces of 32 bytes, of those that are no token.
const RECENT_BITS: u32 = 16;

/// Tokens of one piece that a scratch keeps room for.
const MAX_KEPT_TOKENS: usize = 64 << 10;

pub struct Bpe {
    merges: Merges,
    trie: Trie,
    words: WordTable,
    cjk: CjkChars,
}

/// Memory that one thread reuses from piece to piece.
pub struct Scratch {
    recent: WordCache,
    group: Group,
    results: Results,
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
            group: Group::new(),
            results: Results::new(),
            tokens: Vec::new(),
            dead: Vec::new(),
            num_tried: 0,
        }
    }

    /// Gives back what one huge piece took.
    fn shrink(&mut self) {
        if self.tokens.capacity() > MAX_KEPT_TOKENS {
            self.tokens = Vec::new();
            self.dead = Vec::new();
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
        scratch.shrink();
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

    /// Appends the ids of a text.
    ///
    /// Many pieces are found before the first is looked up: by then the memory that it needs is
    /// on its way, and the waits overlap.
    pub fn encode_pieces(&self, text: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let mut pieces = PieceEnds::new();
        let mut keys = [(Key::default(), 0); MAX_PIECES];
        let mut found = [NO_ID; MAX_PIECES];
        let mut missing = [0u8; MAX_PIECES];
        let mut at = 0;
        while at < text.len() {
            let ends = pieces.find(text, at);
            let mut start = at;
            for (&end, slot) in ends.iter().zip(&mut keys) {
                let len = end - start;
                // A longer piece gets the key of no piece.
                let key =
                    if len <= MAX_KEY_LEN { Key::new(text, start, len) } else { Key::default() };
                let hash = key.hash();
                self.words.prefetch(hash);
                *slot = (key, hash);
                start = end;
            }
            let mut num_missing = 0;
            for (index, (&(key, hash), id)) in keys.iter().zip(&mut found[..ends.len()]).enumerate()
            {
                *id = self.words.get(key, hash);
                missing[num_missing & (MAX_PIECES - 1)] = index as u8;
                num_missing += usize::from(*id == NO_ID);
            }
            ids.reserve(ends.len());
            let missing = &missing[..num_missing];
            for &index in missing {
                scratch.recent.prefetch(keys[usize::from(index)].1);
            }
            let piece = |index: usize| if index == 0 { at } else { ends[index - 1] }..ends[index];
            scratch.results.clear(missing.len());
            for (number, &index) in missing.iter().enumerate() {
                let (key, hash) = keys[usize::from(index)];
                self.encode_uncommon(text, piece(usize::from(index)), key, hash, number, scratch);
            }
            scratch.group.run(&self.merges, &mut scratch.results);
            let mut done = 0;
            for (number, &index) in missing.iter().enumerate() {
                let index = usize::from(index);
                ids.extend_from_slice(&found[done..index]);
                let own = scratch.results.get(number);
                ids.extend_from_slice(own);
                if piece(index).len() <= MAX_KEY_LEN {
                    scratch.recent.put(keys[index].0, keys[index].1, own);
                } else if own.is_empty() {
                    self.search(text, piece(index), scratch);
                    self.write_ids(&scratch.tokens, ids);
                }
                done = index + 1;
            }
            ids.extend_from_slice(&found[done..ends.len()]);
            at = ends[ends.len() - 1];
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

    /// A piece that is no short token: puts its ids for `number`, perhaps only when the group
    /// runs; none of a piece that has to be searched.
    #[inline]
    fn encode_uncommon(
        &self,
        text: &[u8],
        piece: Range<usize>,
        key: Key,
        hash: u64,
        number: usize,
        scratch: &mut Scratch,
    ) {
        let Scratch { recent, group, results, .. } = scratch;
        let bytes = &text[piece];
        if bytes.len() <= MAX_KEY_LEN
            && let Some((cached, num_ids)) = recent.get(key, hash)
        {
            return results.put(number, cached[..num_ids].iter().copied());
        }
        if bytes[0] >= 0xE0 {
            let fill = |tokens: &mut _| self.cjk.tokens(bytes, tokens);
            if group.add_tokens(fill, number, &self.merges, results) {
                return;
            }
        }
        if bytes.len() > MAX_KEY_LEN {
            // Of a short piece the table has told that it is no token.
            let whole = self.trie.longest(bytes);
            if self.merges.len(whole) == bytes.len() {
                return results.put(number, [self.merges.id(whole)]);
            }
        }
        if bytes.len() <= MAX_PARTS {
            group.add_bytes(bytes, number, &self.merges, results);
        }
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
            let id = self.words.get(key, key.hash());
            if id != NO_ID {
                return self.merges.token(id);
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
    fn merging_side_by_side_gives_what_the_rules_give() {
        let bpe = tempting();
        let mut group = Group::new();
        let mut bits = 5u64;
        for round in 0..200 {
            let mut results = Results::new();
            let pieces: Vec<Vec<u8>> = (0..1 + round % 40)
                .map(|_| {
                    let mut next = || {
                        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                        bits >> 58
                    };
                    let len = 1 + next() as usize % MAX_PARTS;
                    (0..len).map(|_| if next() % 8 == 0 { b'b' } else { b'a' }).collect()
                })
                .collect();
            results.clear(pieces.len());
            for (number, piece) in pieces.iter().enumerate() {
                if number % 3 == 0 {
                    let fill = |tokens: &mut [Token; MAX_PARTS]| {
                        for (token, byte) in tokens.iter_mut().zip(piece) {
                            *token = Token::from(*byte);
                        }
                        Some(piece.len())
                    };
                    assert!(group.add_tokens(fill, number, &bpe.merges, &mut results));
                } else {
                    group.add_bytes(piece, number, &bpe.merges, &mut results);
                }
            }
            group.run(&bpe.merges, &mut results);
            for (number, piece) in pieces.iter().enumerate() {
                let wanted = by_the_rules(&bpe, piece);
                let wanted: Vec<u32> = wanted.iter().map(|token| bpe.merges.id(*token)).collect();
                assert_eq!(results.get(number), wanted, "{piece:?}");
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
