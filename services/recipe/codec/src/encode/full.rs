//! Encoding with the added vocabulary matched in the text, and the count of ids as text arrives.
//!
//! Never for prompts: there a special token exists only where the template put it.

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::Tokenizer;
use super::file::{LoadError, TokenizerFile};
use super::regions::{Cut, cut_at, next_cut};

/// Finds added spellings: leftmost, longest; first those that are matched in the raw text, then,
/// in what is left between them, the others.
pub struct AddedMatcher {
    passes: Vec<Pass>,
    /// Whether no spelling holds a cut of this kind, so that a text may be cut there.
    may_cut_at_space: bool,
    may_cut_at_cjk: bool,
}

struct Pass {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

/// A stretch of text, or an added token in it.
pub enum Segment<'a> {
    Plain(&'a str),
    Added(u32),
}

impl AddedMatcher {
    pub fn new(file: &TokenizerFile) -> Result<Self, LoadError> {
        let mut passes = Vec::new();
        for normalized in [false, true] {
            let tokens = || file.added.iter().filter(|token| token.normalized == normalized);
            if tokens().next().is_none() {
                continue;
            }
            let automaton = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(tokens().map(|token| &token.content))
                .map_err(|error| LoadError(format!("added tokens: {error}")))?;
            passes.push(Pass { automaton, ids: tokens().map(|token| token.id).collect() });
        }
        let has_cut = |kind: Cut| {
            file.added.iter().any(|token| {
                let text = token.content.as_bytes();
                next_cut(text, 1, |cut| cut == kind) < text.len()
            })
        };
        Ok(AddedMatcher {
            passes,
            may_cut_at_space: !has_cut(Cut::LetterSpace),
            may_cut_at_cjk: !has_cut(Cut::CjkBorder),
        })
    }

    /// Splits a text into plain stretches and added tokens, in order.
    pub fn split<'a>(&self, text: &'a str) -> Vec<Segment<'a>> {
        let mut segments = vec![Segment::Plain(text)];
        for pass in &self.passes {
            segments = segments.into_iter().flat_map(|segment| pass.split(segment)).collect();
        }
        segments
    }

    /// Whether what lies on the two sides of this cut is encoded the same apart as together.
    fn may_cut(&self, cut: Cut) -> bool {
        match cut {
            Cut::LetterSpace => self.may_cut_at_space,
            Cut::CjkBorder => self.may_cut_at_cjk,
            Cut::NumberBorder => false,
        }
    }
}

impl Pass {
    fn split<'a>(&self, segment: Segment<'a>) -> Vec<Segment<'a>> {
        let Segment::Plain(text) = segment else {
            return vec![segment];
        };
        let mut segments = Vec::new();
        let mut start = 0;
        for found in self.automaton.find_iter(text) {
            if found.start() > start {
                segments.push(Segment::Plain(&text[start..found.start()]));
            }
            segments.push(Segment::Added(self.ids[found.pattern().as_usize()]));
            start = found.end();
        }
        if start < text.len() {
            segments.push(Segment::Plain(&text[start..]));
        }
        segments
    }
}

/// The number of ids of everything pushed so far, under the full vocabulary.
///
/// Text is counted for good up to a cut that no added spelling crosses; what follows waits. The
/// waiting text is short unless there is no such cut in the text at all, and then it is looked at
/// again only when it has doubled.
pub struct IncrementalCounter {
    tokenizer: Arc<Tokenizer>,
    num_counted: u64,
    waiting: String,
    /// Length of the waiting text at which a cut is looked for next.
    look_at: usize,
}

/// Waiting text below this is not worth a look: it is the most that `count` has to encode, about
/// ten microseconds.
const MIN_LOOK_BYTES: usize = 1024;

impl IncrementalCounter {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        IncrementalCounter {
            tokenizer,
            num_counted: 0,
            waiting: String::new(),
            look_at: MIN_LOOK_BYTES,
        }
    }

    pub fn push(&mut self, text: &str) {
        self.waiting.push_str(text);
        if self.waiting.len() >= self.look_at {
            if let Some(cut) = self.last_cut() {
                self.num_counted += self.tokenizer.count_full(&self.waiting[..cut]);
                self.waiting.drain(..cut);
            }
            self.look_at = MIN_LOOK_BYTES.max(2 * self.waiting.len());
        }
    }

    /// The number of ids so far, as if the text ended here.
    pub fn count(&self) -> u64 {
        self.num_counted + self.tokenizer.count_full(&self.waiting)
    }

    /// The last cut of the waiting text. The character after a cut never changes, so text that
    /// comes later does not matter.
    fn last_cut(&self) -> Option<usize> {
        let text = self.waiting.as_bytes();
        let matcher = self.tokenizer.added_matcher();
        (1..text.len()).rev().find(|&at| {
            self.waiting.is_char_boundary(at)
                && cut_at(text, at).is_some_and(|cut| matcher.may_cut(cut))
        })
    }
}
