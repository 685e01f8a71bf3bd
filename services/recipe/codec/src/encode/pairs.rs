//! The merge rules as a table: (left, right) to the merged token, one line of the cache a look-up.
//!
//! A pair is 40 bits. A one-to-one mixing turns it into a line's number and a rest; the rest in
//! the line, with how many lines further it had to go, is then the same as the pair.

use super::huge::HugeVec;
use super::merges::Token;
use super::words::prefetch;

pub const TOKEN_BITS: u32 = 20;
const PAIR_BITS: u32 = 2 * TOKEN_BITS;
const PAIR_MASK: u64 = (1 << PAIR_BITS) - 1;

/// Two neighbours, mixed.
#[derive(Clone, Copy)]
pub struct Pair(u64);

impl Pair {
    #[inline(always)]
    pub fn new(left: Token, right: Token) -> Self {
        let pair = u64::from(left) << TOKEN_BITS | u64::from(right);
        // Each step can be undone: it folds the upper half in, or multiplies by an odd number.
        let folded = pair ^ pair >> TOKEN_BITS;
        Pair(folded.wrapping_mul(0x9E37_79B9_7F4A_7C15) & PAIR_MASK)
    }
}

const SLOTS: usize = 8;
/// Fewer lines would leave a rest of more bits than `MAX_REST_BITS`.
const MIN_LINE_BITS: u32 = 13;
const MAX_REST_BITS: u32 = PAIR_BITS - MIN_LINE_BITS;
/// How far from its own line a pair may lie.
const MAX_MOVES: u32 = (1 << (32 - MAX_REST_BITS)) - 2;
/// No rest of a pair: it would be one that was moved too far.
const EMPTY: u32 = u32::MAX;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line {
    /// Filled from the left. The number of moves above the rest.
    rests: [u32; SLOTS],
    merged: [Token; SLOTS],
}

pub struct PairTable {
    lines: HugeVec<Line>,
    line_bits: u32,
}

impl PairTable {
    /// `merged(k)` is `parts[k]` merged. No pair comes twice.
    pub fn new(parts: &[(Token, Token)], merged: impl Fn(usize) -> Token) -> Self {
        let mut line_bits = (parts.len() / 4).next_power_of_two().trailing_zeros();
        line_bits = line_bits.max(MIN_LINE_BITS);
        loop {
            if let Some(table) = Self::of_size(parts, &merged, line_bits) {
                return table;
            }
            line_bits += 1;
        }
    }

    /// `None` if some pair would lie too far from its own line.
    fn of_size(
        parts: &[(Token, Token)],
        merged: impl Fn(usize) -> Token,
        line_bits: u32,
    ) -> Option<Self> {
        let empty = Line { rests: [EMPTY; SLOTS], merged: [0; SLOTS] };
        let mut table = PairTable { lines: HugeVec::new(1 << line_bits, empty), line_bits };
        for (index, &(left, right)) in parts.iter().enumerate() {
            let (mut at, rest) = table.place(Pair::new(left, right));
            let mut moves = 0;
            let slot = loop {
                match table.lines[at].rests.iter().position(|rest| *rest == EMPTY) {
                    Some(slot) => break slot,
                    None if moves == MAX_MOVES => return None,
                    None => (at, moves) = ((at + 1) & ((1 << line_bits) - 1), moves + 1),
                }
            };
            table.lines[at].rests[slot] = rest | moves << MAX_REST_BITS;
            table.lines[at].merged[slot] = merged(index);
        }
        Some(table)
    }

    /// A pair's own line, and what tells it from the others of the line.
    #[inline(always)]
    fn place(&self, pair: Pair) -> (usize, u32) {
        let rest_bits = PAIR_BITS - self.line_bits;
        ((pair.0 >> rest_bits) as usize, (pair.0 & ((1 << rest_bits) - 1)) as u32)
    }

    /// Starts to load what `get` will look at.
    #[inline(always)]
    pub fn prefetch(&self, pair: Pair) {
        prefetch(&self.lines[self.place(pair).0]);
    }

    #[inline(always)]
    pub fn get(&self, pair: Pair) -> Option<Token> {
        let (at, rest) = self.place(pair);
        let line = &self.lines[at];
        let equal = line.equal_to(rest);
        if equal != 0 {
            return Some(line.merged[equal.trailing_zeros() as usize % SLOTS]);
        }
        if line.rests[SLOTS - 1] == EMPTY { None } else { self.get_moved(at, rest) }
    }

    #[cold]
    fn get_moved(&self, mut at: usize, rest: u32) -> Option<Token> {
        for moves in 1..=MAX_MOVES {
            at = (at + 1) & (self.lines.len() - 1);
            let line = &self.lines[at];
            let equal = line.equal_to(rest | moves << MAX_REST_BITS);
            if equal != 0 {
                return Some(line.merged[equal.trailing_zeros() as usize]);
            }
            if line.rests[SLOTS - 1] == EMPTY {
                break;
            }
        }
        None
    }
}

impl Line {
    /// A bit for each slot of this rest.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn equal_to(&self, rest: u32) -> u32 {
        use std::arch::x86_64::{
            _mm_cmpeq_epi32, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32,
            _mm_set1_epi32,
        };
        // SAFETY: a line is aligned to 64 bytes and begins with 8 rests; SSE2 is part of x86_64.
        unsafe {
            let rests = self.rests.as_ptr().cast();
            let wanted = _mm_set1_epi32(rest as i32);
            let low = _mm_cmpeq_epi32(_mm_load_si128(rests), wanted);
            let high = _mm_cmpeq_epi32(_mm_load_si128(rests.add(1)), wanted);
            let all = _mm_packs_epi32(low, high);
            _mm_movemask_epi8(_mm_packs_epi16(all, all)) as u32 & 0xFF
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    #[inline(always)]
    fn equal_to(&self, rest: u32) -> u32 {
        let bit = |slot: usize| u32::from(self.rests[slot] == rest) << slot;
        (0..SLOTS).fold(0, |bits, slot| bits | bit(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_is_found_and_no_other() {
        // So many pairs in the smallest table that many lines overflow.
        let mut parts: Vec<(Token, Token)> = Vec::new();
        for left in 0..230 {
            parts.extend((0..230).map(|right| (left * 7, right * 4099 % (1 << TOKEN_BITS))));
        }
        let table =
            PairTable::of_size(&parts, |index| index as Token, MIN_LINE_BITS).expect("it fits");
        assert!(table.lines.iter().any(|line| line.rests[0] >> MAX_REST_BITS != 0));
        for (index, &(left, right)) in parts.iter().enumerate() {
            assert_eq!(table.get(Pair::new(left, right)), Some(index as Token));
            assert_eq!(table.get(Pair::new(left + 1, right)), None);
            assert_eq!(table.get(Pair::new(right, left + 1)), None);
        }
    }

    #[test]
    fn a_table_grows_until_no_pair_lies_too_far() {
        let parts: Vec<_> = (0..300_000).map(|index| (index, index ^ 5)).collect();
        assert!(PairTable::of_size(&parts, |index| index as Token, MIN_LINE_BITS).is_none());
        let table = PairTable::new(&parts, |index| index as Token);
        for (index, &(left, right)) in parts.iter().enumerate() {
            assert_eq!(table.get(Pair::new(left, right)), Some(index as Token));
        }
    }
}
