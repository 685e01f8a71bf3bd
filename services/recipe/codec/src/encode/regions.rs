//! A region of any size to ids, cut where the pre-tokenizer provably splits.
//!
//! A piece depends only on the text from its start on (see `pieces`), and it looks beyond its end
//! only at the character that ends it. So a text may be cut before a character that starts a
//! piece whatever comes before it, if the piece before ends there even at the end of a text:
//!
//! * between a digit and anything else, and at the border of a CJK run (rules 1 and 2);
//! * between a letter or mark and white space: no rule joins these two.

use std::ops::Range;

use rayon::prelude::*;

use super::bpe::{Bpe, Scratches};
use super::classes::{CJK, LETTER, MARK, NEWLINE, NUMBER, SPACE};
use super::pieces::{class_at, piece_end, previous_char_start};

/// Text that one task encodes: large enough that starting it costs nothing beside.
pub const TASK_BYTES: usize = 32 << 10;

/// A piece above this is encoded in windows of `TASK_BYTES`.
const HUGE_PIECE_BYTES: usize = 4 * TASK_BYTES;

/// How far a window reaches into the next. A common token is nearly always found at once.
const OVERLAP_BYTES: usize = 512;

/// Whether a cut may lie at `at`, a character border inside `text`.
pub fn is_cut(text: &[u8], at: usize) -> bool {
    let (before, _) = class_at(text, previous_char_start(text, at));
    let (after, _) = class_at(text, at);
    before & (LETTER | MARK) != 0 && after & (SPACE | NEWLINE) != 0
        || before & CJK != after & CJK
        || before & NUMBER != after & NUMBER
}

/// The first cut at or after `from`; the end of the text if there is none.
fn next_cut(text: &[u8], from: usize) -> usize {
    let is_cut = |at: &usize| *at > 0 && text[*at] & 0xC0 != 0x80 && is_cut(text, *at);
    (from..text.len()).find(is_cut).unwrap_or(text.len())
}

/// Cuts a text into parts of at least `min_bytes` (but the last), each at the first cut after that.
/// The cuts depend only on what precedes them, so a text that grew keeps its earlier parts.
pub fn parts(text: &[u8], min_bytes: usize) -> Vec<Range<usize>> {
    let mut parts = Vec::with_capacity(text.len() / min_bytes + 1);
    let mut start = 0;
    while start < text.len() {
        let end = next_cut(text, start.saturating_add(min_bytes));
        parts.push(start..end);
        start = end;
    }
    parts
}

/// Encodes one part on the threads of the current pool: its pieces one by one, but a huge one in
/// windows side by side.
pub fn encode_part(bpe: &Bpe, part: &[u8], scratches: &Scratches) -> Vec<u32> {
    let mut ids = Vec::with_capacity(part.len() / 3 + 8);
    if part.len() < HUGE_PIECE_BYTES {
        scratches.with(|scratch| bpe.encode_pieces(part, scratch, &mut ids));
        return ids;
    }
    // No cut came for long, so there is a huge piece in it.
    let mut at = 0;
    while at < part.len() {
        let piece = &part[at..piece_end(part, at)];
        if piece.len() < HUGE_PIECE_BYTES {
            scratches.with(|scratch| bpe.encode_pieces(piece, scratch, &mut ids));
        } else {
            bpe.write_ids(&encode_windows(bpe, piece, scratches), &mut ids);
        }
        at += piece.len();
    }
    ids
}

/// Encodes one huge piece in overlapping windows, joined at a token that both sides have.
///
/// Any part of an encoding is the encoding of that part, and two that overlap in one token can be
/// joined there (see `merges`).
fn encode_windows(bpe: &Bpe, piece: &[u8], scratches: &Scratches) -> Vec<u32> {
    let starts: Vec<usize> = (0..piece.len()).step_by(TASK_BYTES).collect();
    let window = |start: usize| {
        let end = piece.len().min(start + TASK_BYTES + OVERLAP_BYTES);
        Window::new(bpe, piece, start..end, scratches)
    };
    let windows: Vec<Window> = starts.into_par_iter().map(window).collect();
    let join = |left: Window, right| left.join(right, bpe, piece, scratches);
    windows.into_iter().reduce(join).map_or(Vec::new(), |window| window.tokens)
}

struct Window {
    range: Range<usize>,
    tokens: Vec<u32>,
}

impl Window {
    fn new(bpe: &Bpe, piece: &[u8], range: Range<usize>, scratches: &Scratches) -> Self {
        let tokens = scratches.with(|scratch| bpe.search_tokens(&piece[range.clone()], scratch));
        Window { range, tokens }
    }

    /// The last border between tokens at or before `at`: its place, and the token it starts.
    fn border_before(&self, at: usize, bpe: &Bpe) -> (usize, usize) {
        let (mut place, mut index) = (self.range.end, self.tokens.len());
        while place > at {
            index -= 1;
            place -= bpe.token_len(self.tokens[index]);
        }
        (place, index)
    }

    fn join(mut self, right: Window, bpe: &Bpe, piece: &[u8], scratches: &Scratches) -> Window {
        let range = self.range.start..right.range.end;
        if let Some((left_index, right_index)) = self.common_token(&right, bpe) {
            self.tokens.truncate(left_index);
            self.tokens.extend_from_slice(&right.tokens[right_index..]);
            return Window { range, tokens: self.tokens };
        }
        // Encodes from a border of the left window to the end of the right one. What lies left of
        // the border stays valid if the token right of it is the same as before.
        let mut reach = OVERLAP_BYTES;
        loop {
            let target = right.range.start.saturating_sub(reach).max(range.start);
            let (place, index) = self.border_before(target, bpe);
            let again = Window::new(bpe, piece, place..range.end, scratches);
            if index == 0 || again.tokens.first() == self.tokens.get(index) {
                self.tokens.truncate(index);
                self.tokens.extend_from_slice(&again.tokens);
                return Window { range, tokens: self.tokens };
            }
            reach = reach.saturating_mul(2);
        }
    }

    /// The indices of the first token that both windows have at the same place.
    fn common_token(&self, right: &Window, bpe: &Bpe) -> Option<(usize, usize)> {
        let (mut left_place, mut left_index) = self.border_before(right.range.start, bpe);
        let (mut right_place, mut right_index) = (right.range.start, 0);
        while left_index < self.tokens.len() && right_index < right.tokens.len() {
            let (left, other) = (self.tokens[left_index], right.tokens[right_index]);
            if left_place == right_place && left == other {
                return Some((left_index, right_index));
            }
            if left_place <= right_place {
                left_place += bpe.token_len(left);
                left_index += 1;
            } else {
                right_place += bpe.token_len(other);
                right_index += 1;
            }
        }
        None
    }
}
