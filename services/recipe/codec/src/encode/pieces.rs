//! The pre-tokenizer of recipe.md section 1.1, by hand: where does the piece at a position end?
//!
//! The three regex splits run one inside the other. Here one pass does it: digits and CJK runs
//! (rules 1 and 2) bound the stretch that rule 3 sees, so to rule 3 their first character looks
//! like the end of the text, and the end of a CJK run looks the same from inside it. A piece then
//! depends only on the text from its start on, never on what came before.

use super::ascii::{self, BLOCK};
use super::classes::{
    ASCII, CJK, Class, LETTER, MARK, NEWLINE, NUMBER, OTHER, PUNCT, SPACE, class_of,
};

/// The stretch of rule 3 ends: end of text, a digit, or the border of a CJK run.
const END: Class = 0;

/// Pieces that are found before the first of them is looked up.
pub const MAX_PIECES: usize = 128;

/// The ends of consecutive pieces.
pub struct PieceEnds {
    ends: [usize; MAX_PIECES],
    num: usize,
}

impl PieceEnds {
    pub fn new() -> Self {
        PieceEnds { ends: [0; MAX_PIECES], num: 0 }
    }

    /// Finds the ends of the pieces from `start` on, which must be the start of one: at least one
    /// unless the text ends there.
    #[inline(always)]
    pub fn find(&mut self, text: &[u8], start: usize) -> &[usize] {
        self.num = 0;
        let mut at = start;
        while at < text.len() && self.num <= MAX_PIECES - BLOCK {
            let block = text[at..].first_chunk::<BLOCK>().filter(|block| block[0] < 0x80);
            if let Some(block) = block {
                let found = ascii::starts(block);
                let mut bits = found.bits & !1;
                let mut last = 0;
                while bits != 0 {
                    last = bits.trailing_zeros() as usize;
                    self.push(at + last);
                    bits &= bits - 1;
                }
                at += last;
                // The last piece is not seen whole; the next block begins with it, unless it
                // leads to a byte that no block can tell, or fills this one.
                if !found.is_cut && last != 0 {
                    continue;
                }
            }
            at = piece_end(text, at);
            self.push(at);
        }
        &self.ends[..self.num]
    }

    #[inline(always)]
    fn push(&mut self, end: usize) {
        self.ends[self.num] = end;
        self.num += 1;
    }
}

/// Returns the end of the piece that starts at `start`, which must be the start of a piece.
#[inline(always)]
pub fn piece_end(text: &[u8], start: usize) -> usize {
    let first = text[start];
    if first >= 0x80 {
        return cjk_letters_end(text, start).unwrap_or_else(|| any_piece_end(text, start));
    }
    let class = ASCII[first as usize];
    // A word, with the one character before it that belongs to it: a space, or for ASCII
    // letters any ASCII punctuation.
    if class == LETTER {
        return letters_end(text, start, start + 1);
    }
    if ascii_class(text, start + 1) == LETTER {
        if class == PUNCT {
            return ascii_letters_end(text, start + 2);
        }
        if first == b' ' {
            return letters_end(text, start, start + 2);
        }
    }
    match class {
        NUMBER => ascii_number_end(text, start),
        PUNCT => ascii_punct_end(text, start),
        SPACE if first == b' ' => ascii_spaces_end(text, start),
        _ => any_piece_end(text, start),
    }
}

#[inline(always)]
fn ascii_class(text: &[u8], at: usize) -> Class {
    // Past the end and beyond ASCII alike: no class.
    text.get(at).map_or(0, |byte| ASCII[*byte as usize])
}

/// Up to three digits; a digit beyond ASCII might be one of them.
#[inline(always)]
fn ascii_number_end(text: &[u8], start: usize) -> usize {
    let mut end = start + 1;
    while end < start + 3 && ascii_class(text, end) == NUMBER {
        end += 1;
    }
    if end < start + 3 && text.get(end).is_some_and(|byte| *byte >= 0x80) {
        return any_piece_end(text, start);
    }
    end
}

/// Punctuation that no letter follows at once.
#[inline(always)]
fn ascii_punct_end(text: &[u8], start: usize) -> usize {
    let mut end = start + 1;
    while ascii_class(text, end) == PUNCT {
        end += 1;
    }
    if text.get(end).is_some_and(|byte| *byte >= 0x80) {
        return any_piece_end(text, start);
    }
    while ascii_class(text, end) == NEWLINE {
        end += 1;
    }
    end
}

/// A run of spaces before a letter, punctuation or a digit; a single one belongs to punctuation.
#[inline(always)]
fn ascii_spaces_end(text: &[u8], start: usize) -> usize {
    let mut end = start + 1;
    while text.get(end) == Some(&b' ') {
        end += 1;
    }
    match ascii_class(text, end) {
        LETTER if end > start + 1 => end - 1,
        PUNCT if end > start + 1 => end - 1,
        PUNCT => ascii_punct_end(text, end),
        // The stretch ends at a digit, so all of the run is one piece.
        NUMBER => end,
        _ => any_piece_end(text, start),
    }
}

/// A run of letters known to reach `from`; anything beyond ASCII is left to the general rules.
#[inline(always)]
fn letters_end(text: &[u8], start: usize, from: usize) -> usize {
    let end = ascii_letters_end(text, from);
    match text.get(end) {
        Some(&next) if next >= 0x80 => any_piece_end(text, start),
        _ => end,
    }
}

/// The end of the run of `[A-Za-z]` that reaches `from`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ascii_letters_end(text: &[u8], mut from: usize) -> usize {
    use std::arch::x86_64::{
        _mm_add_epi8, _mm_cmplt_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_or_si128,
        _mm_set1_epi8,
    };
    while from + 16 <= text.len() {
        // SAFETY: 16 bytes from `from` lie inside the slice, and SSE2 is part of x86_64.
        let letters = unsafe {
            let bytes = _mm_loadu_si128(text.as_ptr().add(from).cast());
            let folded = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
            // Moves 'a' to the smallest signed byte, so that one comparison tests the range.
            let moved = _mm_add_epi8(folded, _mm_set1_epi8((0x80u8.wrapping_sub(b'a')) as i8));
            _mm_movemask_epi8(_mm_cmplt_epi8(moved, _mm_set1_epi8(-128 + 26))) as u32
        };
        if letters != 0xFFFF {
            return from + (!letters).trailing_zeros() as usize;
        }
        from += 16;
    }
    ascii_letters_end_by_byte(text, from)
}

#[cfg(not(target_arch = "x86_64"))]
use ascii_letters_end_by_byte as ascii_letters_end;

#[inline]
fn ascii_letters_end_by_byte(text: &[u8], from: usize) -> usize {
    let rest = &text[from..];
    from + rest.iter().position(|b| !b.is_ascii_alphabetic()).unwrap_or(rest.len())
}

/// The end of a run of CJK letters, the whole of most Chinese pieces; `None` if `start` has none.
#[inline]
fn cjk_letters_end(text: &[u8], start: usize) -> Option<usize> {
    let mut at = start;
    while let Some(&[a, b, c]) = text.get(at..at + 3) {
        if a & 0xF0 != 0xE0 {
            break;
        }
        let code = (u32::from(a) & 0xF) << 12 | (u32::from(b) & 0x3F) << 6 | u32::from(c) & 0x3F;
        let class = class_of(code);
        if class != CJK | LETTER && class != CJK | MARK {
            break;
        }
        at += 3;
    }
    (at > start).then_some(at)
}

/// Decodes the character at `at`; the text is UTF-8 and `at` a character border.
#[inline(always)]
fn char_at(text: &[u8], at: usize) -> (u32, usize) {
    let low = |i: usize| u32::from(text[at + i]) & 0x3F;
    let first = u32::from(text[at]);
    match first {
        0..0x80 => (first, 1),
        0x80..0xE0 => ((first & 0x1F) << 6 | low(1), 2),
        0xE0..0xF0 => ((first & 0xF) << 12 | low(1) << 6 | low(2), 3),
        _ => ((first & 7) << 18 | low(1) << 12 | low(2) << 6 | low(3), 4),
    }
}

/// Class and width of the character at `at`.
#[inline(always)]
pub fn class_at(text: &[u8], at: usize) -> (Class, usize) {
    if text[at] < 0x80 {
        return (ASCII[text[at] as usize], 1);
    }
    let (code, width) = char_at(text, at);
    (class_of(code), width)
}

/// The start of the character before `at`, which is not 0.
pub fn previous_char_start(text: &[u8], at: usize) -> usize {
    let is_start = |at: &usize| text[*at] & 0xC0 != 0x80;
    (0..at).rev().find(is_start).unwrap_or(0)
}

/// What rule 3 sees from one stretch: the text up to its end.
struct Stretch<'a> {
    text: &'a [u8],
    /// `CJK` inside a CJK run, else 0.
    run: Class,
}

impl Stretch<'_> {
    /// Class (without the CJK flag) and width of the character at `at`; `END` past the stretch.
    #[inline(always)]
    fn peek(&self, at: usize) -> (Class, usize) {
        if at >= self.text.len() {
            return (END, 0);
        }
        let (class, width) = class_at(self.text, at);
        if class & NUMBER != 0 || class & CJK != self.run {
            return (END, 0);
        }
        (class & !CJK, width)
    }

    #[inline(always)]
    fn run_end(&self, mut at: usize, classes: Class) -> usize {
        loop {
            let (class, width) = self.peek(at);
            if class & classes == 0 {
                return at;
            }
            at += width;
        }
    }
}

/// The rules in their general form; `piece_end` only shortens the frequent cases.
fn any_piece_end(text: &[u8], start: usize) -> usize {
    let (class, width) = class_at(text, start);
    if class & NUMBER != 0 {
        return number_end(text, start);
    }
    let stretch = Stretch { text, run: class & CJK };
    let class = class & !CJK;
    let after = start + width;
    let (next, next_width) = stretch.peek(after);

    // [ascii punctuation][A-Za-z]+
    if class == PUNCT && text[start] < 0x80 && text.get(after).is_some_and(u8::is_ascii_alphabetic)
    {
        return ascii_letters_end(text, after);
    }
    // [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
    if class & (LETTER | MARK) != 0 {
        return stretch.run_end(after, LETTER | MARK);
    }
    if class & (SPACE | OTHER) != 0 && next & (LETTER | MARK) != 0 {
        return stretch.run_end(after + next_width, LETTER | MARK);
    }
    //  ?[\p{P}\p{S}]+[\r\n]*
    if class == PUNCT || (text[start] == b' ' && next == PUNCT) {
        let end = stretch.run_end(after, PUNCT);
        return stretch.run_end(end, NEWLINE);
    }
    if class & (SPACE | NEWLINE) != 0 {
        return white_space_end(&stretch, start);
    }
    // No alternative matches here: one piece up to where the next match starts.
    unmatched_end(&stretch, after)
}

fn number_end(text: &[u8], start: usize) -> usize {
    let mut end = start;
    for _ in 0..3 {
        if end == text.len() {
            break;
        }
        let (class, width) = class_at(text, end);
        if class & NUMBER == 0 {
            break;
        }
        end += width;
    }
    end
}

/// `\s*[\r\n]+`, else `\s+(?!\S)`, else `\s+`, over the run of white space at `start`.
fn white_space_end(stretch: &Stretch, start: usize) -> usize {
    let (mut end, mut last, mut newline_end) = (start, start, None);
    loop {
        let (class, width) = stretch.peek(end);
        if class & (SPACE | NEWLINE) == 0 {
            // The last space of a run is left for the word after it, if there is one.
            let keep_last = class == END || last == start;
            return newline_end.unwrap_or(if keep_last { end } else { last });
        }
        last = end;
        end += width;
        if class & NEWLINE != 0 {
            newline_end = Some(end);
        }
    }
}

fn unmatched_end(stretch: &Stretch, mut at: usize) -> usize {
    loop {
        let (class, width) = stretch.peek(at);
        if class != OTHER || stretch.peek(at + width).0 & (LETTER | MARK) != 0 {
            return at;
        }
        at += width;
    }
}
