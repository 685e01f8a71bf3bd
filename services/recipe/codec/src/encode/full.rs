//! Encoding with the added vocabulary matched in the text, and the count of ids as text arrives.
//!
//! Never for prompts: there a special token exists only where the template put it.

use std::collections::HashSet;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::Tokenizer;
use super::file::{LoadError, TokenizerFile};
use super::regions::is_cut;

/// Finds added spellings: leftmost, longest; first those that are matched in the raw text, then,
/// in what is left between them, the others.
pub struct AddedMatcher {
    passes: Vec<Pass>,
    /// Characters that stand side by side in some spelling: nothing may be cut between them.
    neighbours: HashSet<(char, char)>,
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
        let neighbours = file.added.iter().flat_map(|token| {
            let text = token.content.as_str();
            text.chars().zip(text.chars().skip(1))
        });
        let neighbours = neighbours.collect();
        Ok(AddedMatcher { passes, neighbours })
    }

    /// Splits a text into plain stretches and added tokens, in order.
    pub fn split<'a>(&self, text: &'a str) -> Vec<Segment<'a>> {
        let mut segments = vec![Segment::Plain(text)];
        for pass in &self.passes {
            segments = segments.into_iter().flat_map(|segment| pass.split(segment)).collect();
        }
        segments
    }

    /// Whether an added spelling may cross the border between these two characters.
    fn may_cross(&self, before: char, after: char) -> bool {
        self.neighbours.contains(&(before, after))
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
/// waiting text is short unless one piece of it is long, and then it is looked at again only when it
/// has doubled.
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
        let backwards = self.waiting.char_indices().rev();
        backwards.clone().zip(backwards.skip(1)).find_map(|((at, after), (_, before))| {
            (is_cut(text, at) && !matcher.may_cross(before, after)).then_some(at)
        })
    }
}
