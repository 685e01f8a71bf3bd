//! The pre-tokenizer for ASCII, 64 bytes at a time: one bit per byte that starts a piece.
//!
//! The block must begin at the start of a piece. A piece depends only on the text from its start
//! on (see `pieces`), so nothing needs to be known of what lies before the block.

/// Bytes of one block.
pub const BLOCK: usize = 64;

/// Where each kind of byte stands in a block, first byte in the lowest bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kinds {
    letter: u64,
    number: u64,
    /// `\p{P}` and `\p{S}`: everything printable that is no letter, digit or space
    punct: u64,
    /// The space alone
    space: u64,
    /// Tab, vertical tab and form feed
    tab: u64,
    newline: u64,
    /// Everything else: beyond ASCII, or a control
    foreign: u64,
}

/// What a block tells.
pub struct Starts {
    /// Starts of pieces, those that nothing after the block can change. Bit 0 is always set.
    pub bits: u64,
    /// Whether the block holds a byte that is not for these rules; `bits` ends before it.
    pub is_cut: bool,
}

/// Finds the pieces of a block that begins at the start of one.
///
/// The comments name the rules of recipe.md, section 1.1, third regex:
/// `A [punct][A-Za-z]+`, `B [other]?[letters]+`, `C  ?[punct]+[\r\n]*`, `D \s*[\r\n]+`,
/// `E \s+(?!\S)`, `F \s+`.
#[inline(always)]
pub fn starts(block: &[u8; BLOCK]) -> Starts {
    let kinds = Kinds::of(block);
    let Kinds { letter, number, punct, space, tab, newline, foreign } = kinds;
    let blank = space | tab;

    // C takes the space before punctuation, and the newlines right after it.
    let punct_starts = punct & !((punct | space) << 1);
    let after_punct = newline & (punct << 1);
    let taken_newlines = newline & !after_punct.wrapping_add(newline);

    // A takes letters after punctuation that starts a piece, B after any blank.
    let letter_starts = letter & !((letter | blank | punct_starts) << 1);

    // White space: D up to the last newline of the run, then E all that is left but the last
    // blank, which B or C takes; before a digit the rest is one piece.
    let white = (blank | newline) & !taken_newlines;
    let white_starts = white & !(white << 1);
    let last_blanks = blank & ((letter | punct) >> 1);
    let after_newline = blank & !(blank << 1) & (newline << 1);
    let rest_starts = after_newline & !spread_down((newline >> 1) & blank, blank);

    let bits = 1
        | punct_starts
        | letter_starts
        | number_starts(number)
        | white_starts
        | last_blanks
        | rest_starts;

    // Blanks at the end of what is seen: only the start of their run is certain.
    let num_seen = foreign.trailing_zeros();
    let seen = if num_seen == 64 { u64::MAX } else { (1 << num_seen) - 1 };
    let at_top = if num_seen == 0 { 0 } else { (blank & seen) << (64 - num_seen) };
    let num_open = at_top.leading_ones();
    let open = if num_open == 0 { 0 } else { seen & !(seen >> num_open) };
    Starts { bits: 1 | bits & seen & (!open | white_starts), is_cut: foreign != 0 }
}

/// Groups of three from the start of each run.
#[inline(always)]
fn number_starts(number: u64) -> u64 {
    let mut starts = number & !(number << 1);
    let fourth = number & number << 1 & number << 2 & number << 3;
    let mut new = starts << 3 & fourth;
    while new != 0 {
        starts |= new;
        new = new << 3 & fourth;
    }
    starts
}

/// `seeds` and all bits of `within` that lie right below one of them without a gap.
#[inline(always)]
fn spread_down(seeds: u64, within: u64) -> u64 {
    let (mut spread, mut open) = (seeds, within);
    for step in [1, 2, 4, 8, 16, 32] {
        spread |= open & spread >> step;
        open &= open >> step;
    }
    spread
}

impl Kinds {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn of(block: &[u8; BLOCK]) -> Kinds {
        use std::arch::x86_64::{
            __m128i, _mm_add_epi8, _mm_andnot_si128, _mm_cmpeq_epi8, _mm_cmplt_epi8,
            _mm_loadu_si128, _mm_movemask_epi8, _mm_or_si128, _mm_set1_epi8,
        };
        const LOWEST: u8 = 0x80;
        let mut kinds = Kinds::default();
        for at in (0..BLOCK).step_by(16) {
            // SAFETY: 16 bytes from `at` lie inside the block, and SSE2 is part of x86_64.
            unsafe {
                let is = |bytes, byte: u8| _mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8));
                // Moves `first` to the smallest signed byte: one comparison tests the range.
                let within = |bytes, first: u8, num: u8| {
                    let moved =
                        _mm_add_epi8(bytes, _mm_set1_epi8(LOWEST.wrapping_sub(first) as i8));
                    _mm_cmplt_epi8(moved, _mm_set1_epi8(LOWEST.wrapping_add(num) as i8))
                };
                let bits = |mask: __m128i| u64::from(_mm_movemask_epi8(mask) as u16) << at;
                let bytes = _mm_loadu_si128(block.as_ptr().add(at).cast());
                let letter = within(_mm_or_si128(bytes, _mm_set1_epi8(0x20)), b'a', 26);
                let number = within(bytes, b'0', 10);
                let newline = _mm_or_si128(is(bytes, b'\n'), is(bytes, b'\r'));
                let white = within(bytes, b'\t', 5);
                // Signed: everything beyond ASCII is below the space as well.
                let low = _mm_cmplt_epi8(bytes, _mm_set1_epi8(0x20));
                let foreign = _mm_or_si128(_mm_andnot_si128(white, low), is(bytes, 0x7F));
                kinds.letter |= bits(letter);
                kinds.number |= bits(number);
                kinds.space |= bits(is(bytes, b' '));
                kinds.tab |= bits(_mm_andnot_si128(newline, white));
                kinds.newline |= bits(newline);
                kinds.foreign |= bits(foreign);
            }
        }
        let Kinds { letter, number, space, tab, newline, foreign, .. } = kinds;
        kinds.punct = !(letter | number | space | tab | newline | foreign);
        kinds
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(block: &[u8; BLOCK]) -> Kinds {
        Kinds::by_byte(block)
    }

    #[cfg(any(test, not(target_arch = "x86_64")))]
    fn by_byte(block: &[u8; BLOCK]) -> Kinds {
        let mut kinds = Kinds::default();
        for (at, byte) in block.iter().enumerate() {
            let kind = match byte {
                b'a'..=b'z' | b'A'..=b'Z' => &mut kinds.letter,
                b'0'..=b'9' => &mut kinds.number,
                b'\n' | b'\r' => &mut kinds.newline,
                b' ' => &mut kinds.space,
                b'\t' | 0x0B | 0x0C => &mut kinds.tab,
                0x21..=0x7E => &mut kinds.punct,
                _ => &mut kinds.foreign,
            };
            *kind |= 1 << at;
        }
        kinds
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::piece_end;
    use super::*;

    #[test]
    fn kinds_of_every_byte_are_right_at_every_place() {
        for byte in 0..=255u8 {
            for at in 0..BLOCK {
                let mut block = [b'x'; BLOCK];
                block[at] = byte;
                assert_eq!(Kinds::of(&block), Kinds::by_byte(&block), "{byte:#x} at {at}");
            }
        }
    }

    /// Every start that a block tells is where the rules, one piece after another, put it; and it
    /// tells all but the last few.
    #[test]
    fn starts_are_those_of_the_rules_whatever_follows_the_block() {
        let mut bits = 7u64;
        let mut random = |below: usize| {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (bits >> 33) as usize % below
        };
        let alphabets: [&[u8]; 8] = [
            b"a (\n1",
            b"ab  \t\n\r.",
            b"  \n",
            b" (\n",
            b"123 a",
            b"a \x00(",
            b"aaaaab ",
            b"\t \n\x0Ba(1",
        ];
        for round in 0..60_000 {
            let alphabet = alphabets[round % alphabets.len()];
            let mut text: Vec<u8> = (0..96).map(|_| alphabet[random(alphabet.len())]).collect();
            if round % 3 == 0 {
                let at = random(90);
                text.splice(at..at, "é".bytes());
            }
            text.truncate(96);
            while std::str::from_utf8(&text).is_err() {
                text.pop();
            }
            let block = text[..BLOCK].try_into().expect("64 bytes");
            let told = starts(block);
            let mut wanted = 0u64;
            let mut at = 0;
            while at < BLOCK {
                wanted |= 1 << at;
                at = piece_end(&text, at);
            }
            let num_told = 64 - told.bits.leading_zeros();
            let seen = if num_told == 64 { u64::MAX } else { (1 << num_told) - 1 };
            assert_eq!(told.bits, wanted & seen, "{:?}", String::from_utf8_lossy(&text));
            let cut = block.iter().position(|b| *b >= 0x7F || *b == 0);
            assert_eq!(told.is_cut, cut.is_some());
            // What is not told lies in the white space at the end of what is seen.
            let missed = wanted & !seen & if let Some(at) = cut { (1 << at) - 1 } else { !0 };
            for at in (0..BLOCK).filter(|at| missed >> at & 1 != 0) {
                let rest = &block[at..cut.unwrap_or(BLOCK)];
                assert!(rest.iter().all(|b| b" \t\x0B".contains(b)), "{text:?}");
            }
        }
    }
}
