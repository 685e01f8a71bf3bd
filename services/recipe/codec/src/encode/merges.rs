//! The merge rules, and the one question the encoder asks of them: may two tokens be neighbours?
//!
//! Tokens are numbered here in the order in which they come to be: 0..=255 are the bytes, then one
//! per merge. The encoder needs a *proper* vocabulary: both parts of a merge exist before it. Then
//! merging by rank, leftmost first, is the same as one pass per rank, and it follows that
//!
//! * a sequence of tokens is the encoding of its text if and only if every token alone and every
//!   pair of neighbours alone is the encoding of its own text;
//! * so any part of an encoding is the encoding of that part, and two encodings that overlap in
//!   one token can be joined there.
//!
//! Why: take the first merge that crosses the border between two tokens. Before it, nothing
//! crossed, so both sides went through the same states as on their own, and the pair on its own
//! makes that same merge.

use super::file::{LoadError, TokenizerFile};
pub use super::pairs::Pair;
use super::pairs::{PairTable, TOKEN_BITS};

/// A token in order of creation: a byte, or 256 + the rank of the merge that makes it.
pub type Token = u32;

pub const NUM_BYTES: u32 = 256;

/// A token must fit the 20 bits it has in `PairTable`, and the 24 bits in `Trie`.
const MAX_MERGES: usize = (1 << TOKEN_BITS) - 1 - NUM_BYTES as usize;

pub struct Merges {
    /// Left and right part by `token - 256`.
    parts: Vec<(Token, Token)>,
    pairs: PairTable,
    /// What two bytes merge to, by `left << 8 | right`; `u32::MAX` for nothing.
    byte_pairs: Vec<Token>,
    /// The id in the file.
    ids: Vec<u32>,
    /// The token of an id, `u32::MAX` for an id of none.
    tokens: Vec<Token>,
    /// Length in bytes.
    lens: Vec<u32>,
    /// Whether merging the token's own bytes gives the token; others never appear.
    reachable: Vec<bool>,
}

impl Merges {
    pub fn new(file: &TokenizerFile) -> Result<Self, LoadError> {
        const NONE: u32 = u32::MAX;
        if file.merges.len() >= MAX_MERGES {
            return Err(LoadError(format!("more than {MAX_MERGES} merges")));
        }
        let mut token_of = vec![NONE; file.vocab.len()];
        let mut ids = vec![NONE; NUM_BYTES as usize];
        for (entry, (bytes, id)) in file.vocab.iter().enumerate() {
            if let [byte] = bytes[..] {
                token_of[entry] = u32::from(byte);
                ids[byte as usize] = *id;
            }
        }
        if let Some(byte) = ids.iter().position(|id| *id == NONE) {
            return Err(LoadError(format!("byte {byte:#04x} has no token")));
        }
        let mut lens = vec![1; NUM_BYTES as usize];
        let mut parts = Vec::with_capacity(file.merges.len());
        for (rank, &[left, right, result]) in file.merges.iter().enumerate() {
            let (left, right) = (token_of[left as usize], token_of[right as usize]);
            if left == NONE || right == NONE {
                return Err(LoadError(format!("merge {rank} uses a token made by a later merge")));
            }
            if token_of[result as usize] != NONE {
                return Err(LoadError(format!("merge {rank} makes a token a second time")));
            }
            token_of[result as usize] = NUM_BYTES + rank as u32;
            ids.push(file.vocab[result as usize].1);
            lens.push(lens[left as usize] + lens[right as usize]);
            parts.push((left, right));
        }
        let pairs = PairTable::new(&parts, |rank| NUM_BYTES + rank as Token);
        let byte_pairs = (0..1 << 16).map(|pair| pairs.get(Pair::new(pair >> 8, pair & 0xFF)));
        let byte_pairs = byte_pairs.map(|merged| merged.unwrap_or(NONE)).collect();
        let mut tokens = vec![NONE; ids.iter().max().map_or(0, |id| *id as usize + 1)];
        for (token, id) in ids.iter().enumerate() {
            tokens[*id as usize] = token as Token;
        }
        let reachable = Vec::new();
        let mut merges = Merges { parts, pairs, byte_pairs, ids, tokens, lens, reachable };
        merges.reachable = vec![true; NUM_BYTES as usize];
        for index in 0..merges.parts.len() {
            let (left, right) = merges.parts[index];
            let whole = merges.reachable[left as usize]
                && merges.reachable[right as usize]
                && merges.is_border(left, right, u32::MAX, false);
            merges.reachable.push(whole);
        }
        Ok(merges)
    }

    pub fn num_tokens(&self) -> u32 {
        self.ids.len() as u32
    }

    #[inline(always)]
    pub fn id(&self, token: Token) -> u32 {
        self.ids[token as usize]
    }

    /// The token of an id that `id` gave.
    #[inline(always)]
    pub fn token(&self, id: u32) -> Token {
        self.tokens[id as usize]
    }

    #[inline(always)]
    pub fn len(&self, token: Token) -> usize {
        self.lens[token as usize] as usize
    }

    pub fn is_reachable(&self, token: Token) -> bool {
        self.reachable[token as usize]
    }

    /// Appends the bytes of a token.
    pub fn write_bytes(&self, token: Token, out: &mut Vec<u8>) {
        match self.parts(token) {
            None => out.push(token as u8),
            Some((left, right)) => {
                self.write_bytes(left, out);
                self.write_bytes(right, out);
            }
        }
    }

    /// The token that merging two neighbours gives, if there is such a merge.
    #[inline(always)]
    pub fn merged(&self, left: Token, right: Token) -> Option<Token> {
        self.pairs.get(Pair::new(left, right))
    }

    /// Starts to load what `merged` will look at.
    #[inline(always)]
    pub fn prefetch(&self, pair: Pair) {
        self.pairs.prefetch(pair);
    }

    /// `merged` of two bytes.
    #[inline(always)]
    pub fn merged_bytes(&self, left: u8, right: u8) -> Option<Token> {
        let merged = self.byte_pairs[usize::from(left) << 8 | usize::from(right)];
        (merged != u32::MAX).then_some(merged)
    }

    pub fn parts(&self, token: Token) -> Option<(Token, Token)> {
        let index = token.checked_sub(NUM_BYTES)?;
        Some(self.parts[index as usize])
    }

    pub fn first_byte(&self, mut token: Token) -> u8 {
        while let Some((left, _)) = self.parts(token) {
            token = left;
        }
        token as u8
    }

    pub fn last_byte(&self, mut token: Token) -> u8 {
        while let Some((_, right)) = self.parts(token) {
            token = right;
        }
        token as u8
    }

    /// Whether the two tokens, side by side, stay two: no merge crosses their border.
    #[inline]
    pub fn may_touch(&self, left: Token, right: Token) -> bool {
        self.is_border(left, right, u32::MAX, true)
    }

    /// Takes the last merge on either side of the border back, again and again, and looks at each
    /// state whether the pair at the border would have merged before that last merge came.
    ///
    /// `limit`: the first token whose creation comes too late to take the pair away. At equal rank
    /// the left one comes first, hence the `+ 1` on the right side.
    fn is_border(&self, mut left: Token, mut right: Token, mut limit: u32, mut look: bool) -> bool {
        loop {
            if look && self.pairs.get(Pair::new(left, right)).is_some_and(|merged| merged < limit) {
                return false;
            }
            look = true;
            if left < NUM_BYTES && right < NUM_BYTES {
                return true;
            }
            // The larger one came last, and is no byte.
            if left > right {
                limit = left;
                left = self.parts[(left - NUM_BYTES) as usize].1;
            } else {
                limit = right + 1;
                right = self.parts[(right - NUM_BYTES) as usize].0;
            }
        }
    }
}
