//! Short sequences of tokens, merged rule by rule.

use super::merges::{Merges, Token};

/// Longest sequence that is merged here; the work grows with its square.
pub const MAX_PARTS: usize = 64;

/// A merge that could come next: the merged token, which is also its rank, above the place of its
/// left part. The least of them is the next merge, leftmost first at equal rank.
type Candidate = i32;

const NO_CANDIDATE: Candidate = Candidate::MAX;
const PLACE_BITS: u32 = 6;
/// Candidates are compared this many at a time.
const LANES: usize = 8;

/// Merges the bytes of a short piece and appends the ids of what is left.
#[inline]
pub fn merge_bytes(piece: &[u8], merges: &Merges, ids: &mut Vec<u32>) {
    let mut tokens = [0; MAX_PARTS];
    for (token, byte) in tokens.iter_mut().zip(piece) {
        *token = Token::from(*byte);
    }
    let first = |place: usize| merges.merged_bytes(piece[place], piece[place + 1]);
    merge(&mut tokens, piece.len(), first, merges, ids);
}

/// Merges `tokens[..len]` and appends the ids of what is left. `len` in `1..=MAX_PARTS`.
#[inline]
pub fn merge_tokens(
    tokens: &mut [Token; MAX_PARTS],
    len: usize,
    merges: &Merges,
    ids: &mut Vec<u32>,
) {
    let start = *tokens;
    let first = |place: usize| merges.merged(start[place], start[place + 1]);
    merge(tokens, len, first, merges, ids);
}

/// `first` tells what the tokens at a place and after it merge to before any other merge.
#[inline(always)]
fn merge(
    tokens: &mut [Token; MAX_PARTS],
    len: usize,
    first: impl Fn(usize) -> Option<Token>,
    merges: &Merges,
    ids: &mut Vec<u32>,
) {
    let candidate_of = |place: usize, merged: Option<Token>| match merged {
        Some(merged) => (merged << PLACE_BITS | place as u32) as Candidate,
        None => NO_CANDIDATE,
    };
    let candidate = |place, left, right| candidate_of(place, merges.merged(left, right));
    let mut candidates = [NO_CANDIDATE; MAX_PARTS];
    let mut next = [0u8; MAX_PARTS];
    let mut previous = [0u8; MAX_PARTS];
    for place in 0..len {
        next[place] = place as u8 + 1;
        previous[place] = (place as u8).wrapping_sub(1);
        if place + 1 < len {
            candidates[place] = candidate_of(place, first(place));
        }
    }
    let compared = len.next_multiple_of(LANES);
    loop {
        let best = least(&candidates[..compared]);
        if best == NO_CANDIDATE {
            break;
        }
        let at = best as usize & (MAX_PARTS - 1);
        let merged = best as u32 >> PLACE_BITS;
        let taken = next[at] as usize;
        let after = next[taken] as usize;
        tokens[at] = merged;
        next[at] = after as u8;
        candidates[taken] = NO_CANDIDATE;
        candidates[at] = NO_CANDIDATE;
        if after < len {
            previous[after] = at as u8;
            candidates[at] = candidate(at, merged, tokens[after]);
        }
        if at > 0 {
            let before = previous[at] as usize;
            candidates[before] = candidate(before, tokens[before], merged);
        }
    }
    let mut at = 0;
    while at < len {
        ids.push(merges.id(tokens[at]));
        at = next[at] as usize;
    }
}

#[inline(always)]
fn least(candidates: &[Candidate]) -> Candidate {
    let mut lanes = [NO_CANDIDATE; LANES];
    for chunk in candidates.chunks_exact(LANES) {
        for (lane, candidate) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).min(*candidate);
        }
    }
    lanes.into_iter().fold(NO_CANDIDATE, Candidate::min)
}
