//! Incremental marker matching over (byte, segment kind) pairs (recipe.md, section 13.2).

use super::pieces::PieceKind;

const SPECIAL: u16 = 0x100;

/// One marker's bytes with the restart links of Knuth, Morris and Pratt.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// A byte, plus `SPECIAL` when only a special piece (or text) may supply it.
    symbols: Box<[u16]>,
    /// `restart[n]`: how many symbols still match when the one after `n` matched ones does not.
    restart: Box<[u32]>,
}

impl Pattern {
    /// Builds the pattern of `segments`: text and whether it is a special token.
    pub fn new(segments: &[(&str, bool)]) -> Self {
        let symbols: Box<[u16]> = segments
            .iter()
            .flat_map(|&(text, special)| {
                let kind = if special { SPECIAL } else { 0 };
                text.bytes().map(move |byte| u16::from(byte) | kind)
            })
            .collect();
        assert!(!symbols.is_empty(), "a marker has at least one byte");
        // Links compare pairs, not bytes, so they also hold where text matches either kind.
        let mut restart = vec![0u32; symbols.len()].into_boxed_slice();
        let mut matched = 0;
        for at in 1..symbols.len() {
            while matched > 0 && symbols[matched] != symbols[at] {
                matched = restart[matched - 1] as usize;
            }
            if symbols[matched] == symbols[at] {
                matched += 1;
            }
            restart[at] = matched as u32;
        }
        Pattern { symbols, restart }
    }

    pub fn num_bytes(&self) -> usize {
        self.symbols.len()
    }

    pub fn first_byte(&self) -> u8 {
        self.symbols[0] as u8
    }

    /// Returns how many symbols match after `input`; `matched` is less than the length.
    fn advance(&self, mut matched: usize, input: Input) -> usize {
        while matched > 0 && self.symbols[matched] & input.mask != input.symbol {
            matched = self.restart[matched - 1] as usize;
        }
        if self.symbols[matched] & input.mask == input.symbol {
            matched += 1;
        }
        matched
    }
}

/// One byte of a piece, ready to be compared with symbols.
#[derive(Clone, Copy)]
pub struct Input {
    symbol: u16,
    mask: u16,
}

impl Input {
    pub fn new(byte: u8, kind: PieceKind) -> Self {
        match kind {
            PieceKind::Text => Input { symbol: u16::from(byte), mask: 0xff },
            PieceKind::Plain => Input { symbol: u16::from(byte), mask: 0x1ff },
            PieceKind::Special => Input { symbol: u16::from(byte) | SPECIAL, mask: 0x1ff },
        }
    }

    fn is_newline(self) -> bool {
        self.symbol & 0xff == u16::from(b'\n')
    }
}

/// How a marker treats newlines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The pattern alone.
    Exact,
    /// Any number of newlines directly before the pattern belong to the match.
    AfterNewlines,
    /// A newline as the first byte of the stage; the pattern is that newline.
    Leading,
}

/// How far one marker has matched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    matched: usize,
    newlines: usize,
}

impl Progress {
    /// Bytes that must be held back for this marker.
    pub fn held(self) -> usize {
        self.matched + self.newlines
    }

    /// Takes one byte; returns the length of the match if it is complete now.
    pub fn advance(
        &mut self,
        form: Form,
        pattern: &Pattern,
        input: Input,
        is_first: bool,
    ) -> Option<usize> {
        match form {
            Form::Leading => return (is_first && input.is_newline()).then_some(1),
            Form::Exact => self.matched = pattern.advance(self.matched, input),
            Form::AfterNewlines => {
                if self.matched == 0 && input.is_newline() {
                    self.newlines += 1;
                    return None;
                }
                let matched = pattern.advance(self.matched, input);
                if matched <= self.matched {
                    self.newlines = 0;
                }
                self.matched = matched;
            }
        }
        (self.matched == pattern.num_bytes()).then(|| self.held())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(pattern: &Pattern, form: Form, bytes: &[u8], kind: PieceKind) -> Vec<(usize, usize)> {
        let mut progress = Progress::default();
        let mut matches = Vec::new();
        for (at, &byte) in bytes.iter().enumerate() {
            let input = Input::new(byte, kind);
            if let Some(length) = progress.advance(form, pattern, input, at == 0) {
                matches.push((at, length));
                progress = Progress::default();
            }
        }
        matches
    }

    #[test]
    fn restarts_at_the_longest_border() {
        let pattern = Pattern::new(&[("aab", false)]);
        assert_eq!(feed(&pattern, Form::Exact, b"aaaab", PieceKind::Plain), [(4, 3)]);
        let pattern = Pattern::new(&[("abab", false)]);
        assert_eq!(feed(&pattern, Form::Exact, b"ababab", PieceKind::Text), [(3, 4)]);
    }

    #[test]
    fn special_bytes_match_special_pieces_and_text_only() {
        let pattern = Pattern::new(&[("x", true)]);
        assert_eq!(feed(&pattern, Form::Exact, b"x", PieceKind::Plain), []);
        assert_eq!(feed(&pattern, Form::Exact, b"x", PieceKind::Special), [(0, 1)]);
        assert_eq!(feed(&pattern, Form::Exact, b"x", PieceKind::Text), [(0, 1)]);
    }

    #[test]
    fn a_newline_that_breaks_a_partial_match_is_not_counted() {
        let pattern = Pattern::new(&[("<d", false)]);
        let after = Form::AfterNewlines;
        assert_eq!(feed(&pattern, after, b"\n\n<d", PieceKind::Plain), [(3, 4)]);
        assert_eq!(feed(&pattern, after, b"\n<\n\n<d", PieceKind::Plain), [(5, 3)]);
        assert_eq!(feed(&pattern, after, b"\n<<d", PieceKind::Plain), [(3, 2)]);
    }
}
