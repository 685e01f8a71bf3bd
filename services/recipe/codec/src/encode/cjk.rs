//! Pieces of CJK characters: merged from whole characters instead of from bytes.
//!
//! Three merges in four of such a piece only put characters together. They can be skipped where no
//! merge ever takes a part of the character away from it; that is read off the merge rules once.

use super::merges::{Merges, NUM_BYTES, Token};
use super::small::MAX_PARTS;

/// The first and last code point that can be in a CJK piece.
const FIRST: u32 = 0x3040;
const LAST: u32 = 0x9FA5;
const NONE: Token = u32::MAX;

pub struct CjkChars {
    /// The token of a character that always comes to be whole, by code point from `FIRST`.
    tokens: Vec<Token>,
}

impl CjkChars {
    pub fn new(merges: &Merges) -> Self {
        let mut tokens: Vec<Token> = (FIRST..=LAST).map(|code| char_token(code, merges)).collect();
        let taken = TakenApart::new(merges);
        for token in &mut tokens {
            if *token != NONE && taken.may_lose_a_part(*token, merges) {
                *token = NONE;
            }
        }
        CjkChars { tokens }
    }

    /// Writes what a piece can be merged from: a token for each character that always comes to be
    /// whole, the bytes of any other. Says how many; `None` if the piece holds a character that is
    /// not CJK, or gives too many.
    ///
    /// Merging goes by rank, and a character's own merges come before any that takes it whole; so
    /// it may as well start whole, whatever its neighbours start as.
    #[inline]
    pub fn tokens(&self, piece: &[u8], tokens: &mut [Token; MAX_PARTS]) -> Option<usize> {
        let (chars, rest) = piece.as_chunks::<3>();
        if !rest.is_empty() {
            return None;
        }
        let mut num = 0;
        for &bytes in chars {
            let [a, b, c] = bytes.map(u32::from);
            // Bytes of another shape give some other code point, which is checked again below.
            let code = (a & 0xF) << 12 | (b & 0x3F) << 6 | c & 0x3F;
            let &whole = self.tokens.get(code.wrapping_sub(FIRST) as usize)?;
            if a & 0xF0 != 0xE0 {
                return None;
            }
            if whole != NONE {
                *tokens.get_mut(num)? = whole;
                num += 1;
            } else {
                tokens.get_mut(num..num + 3)?.copy_from_slice(&[a, b, c]);
                num += 3;
            }
        }
        Some(num)
    }
}

/// The token that a character's bytes merge to on their own, if they merge to one.
fn char_token(code: u32, merges: &Merges) -> Token {
    let mut buffer = [0; 4];
    let Some(char) = char::from_u32(code) else {
        return NONE;
    };
    let bytes = char.encode_utf8(&mut buffer).as_bytes();
    let [a, b, c] = [bytes[0], bytes[1], bytes[2]].map(u32::from);
    let left_first = merges.merged(a, b).and_then(|ab| merges.merged(ab, c));
    let right_first = merges.merged(b, c).and_then(|bc| merges.merged(a, bc));
    [left_first, right_first]
        .into_iter()
        .flatten()
        .find(|token| merges.is_reachable(*token))
        .unwrap_or(NONE)
}

/// For each token: the first merge that can join it to a neighbour inside CJK text.
struct TakenApart {
    by_left: Vec<Token>,
    by_right: Vec<Token>,
}

impl TakenApart {
    fn new(merges: &Merges) -> Self {
        let num_tokens = merges.num_tokens() as usize;
        let (mut by_left, mut by_right) = (vec![NONE; num_tokens], vec![NONE; num_tokens]);
        for merged in NUM_BYTES..merges.num_tokens() {
            let Some((left, right)) = merges.parts(merged) else { continue };
            // A neighbour inside CJK text ends in a continuation byte, or starts with a lead byte.
            if (0x80..0xC0).contains(&merges.last_byte(left)) {
                by_left[right as usize] = by_left[right as usize].min(merged);
            }
            if (0xE3..0xEA).contains(&merges.first_byte(right)) {
                by_right[left as usize] = by_right[left as usize].min(merged);
            }
        }
        TakenApart { by_left, by_right }
    }

    /// Whether a part of the character can merge with a neighbour before it becomes whole.
    fn may_lose_a_part(&self, whole: Token, merges: &Merges) -> bool {
        let (mut first, mut last) = (whole, whole);
        while let Some((left, _)) = merges.parts(first) {
            // At equal rank the merge further left comes first.
            if self.by_left[left as usize] <= first {
                return true;
            }
            first = left;
        }
        while let Some((_, right)) = merges.parts(last) {
            if self.by_right[right as usize] < last {
                return true;
            }
            last = right;
        }
        false
    }
}
