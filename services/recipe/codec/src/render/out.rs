//! The growing prompt.

use crate::types::{Prompt, Special, SpecialTokens};

/// Grounding tokens, the only ones that assistant text may spell.
const GROUNDING: [Special; 8] = [
    Special::Ref,
    Special::RefEnd,
    Special::Box,
    Special::BoxEnd,
    Special::Point,
    Special::PointEnd,
    Special::Polygon,
    Special::PolygonEnd,
];

pub struct Out<'a> {
    pub prompt: Prompt,
    tokens: &'a SpecialTokens,
    /// The grounding spellings that are not empty.
    grounding: Vec<&'a str>,
    /// The byte that all of them start with, if they share one: `<` by default.
    grounding_start: Option<u8>,
}

impl<'a> Out<'a> {
    pub fn new(tokens: &'a SpecialTokens, capacity: usize) -> Self {
        let spellings = GROUNDING.iter().map(|special| tokens.get(*special));
        let grounding: Vec<&str> = spellings.filter(|spelling| !spelling.is_empty()).collect();
        let start = grounding.first().map(|spelling| spelling.as_bytes()[0]);
        let grounding_start =
            start.filter(|byte| grounding.iter().all(|spelling| spelling.as_bytes()[0] == *byte));
        let prompt = Prompt { text: String::with_capacity(capacity), specials: Vec::new() };
        Out { prompt, tokens, grounding, grounding_start }
    }

    /// Writes a control token; an empty spelling writes nothing and makes no range.
    pub fn special(&mut self, special: Special) {
        let spelling = self.tokens.get(special);
        if spelling.is_empty() {
            return;
        }
        let start = self.prompt.text.len();
        self.prompt.text.push_str(spelling);
        self.prompt.specials.push((start, self.prompt.text.len()));
    }

    pub fn plain(&mut self, text: &str) {
        self.prompt.text.push_str(text);
    }

    /// Writes text of the template in which every `⟦D⟧`, `⟦T⟧` and `⟦/T⟧` is a control token.
    pub fn template(&mut self, text: &str) {
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('⟦') {
            self.plain(before);
            let Some((name, after)) = after.split_once('⟧') else { break };
            self.special(match name {
                "T" => Special::ThinkingStart,
                "/T" => Special::ThinkingEnd,
                _ => Special::Dsml,
            });
            rest = after;
        }
        self.plain(rest);
    }

    /// Writes content with the placeholders it already has.
    pub fn content(&mut self, content: &Prompt) {
        let start = self.prompt.text.len();
        self.prompt.text.push_str(&content.text);
        let shifted = content.specials.iter().map(|(from, to)| (start + from, start + to));
        self.prompt.specials.extend(shifted);
    }

    /// Writes assistant text; grounding spellings become special, leftmost first.
    pub fn grounded(&mut self, text: &str) {
        let start = self.prompt.text.len();
        self.prompt.text.push_str(text);
        let bytes = text.as_bytes();
        let mut at = 0;
        while let Some(found) = self.next_candidate(&bytes[at..]) {
            at += found;
            let found =
                self.grounding.iter().find(|token| bytes[at..].starts_with(token.as_bytes()));
            match found {
                Some(token) => {
                    self.prompt.specials.push((start + at, start + at + token.len()));
                    at += token.len();
                }
                None => at += 1,
            }
        }
    }

    /// Where a grounding spelling may start: the next byte that one of them starts with.
    fn next_candidate(&self, bytes: &[u8]) -> Option<usize> {
        match self.grounding_start {
            Some(start) => memchr::memchr(start, bytes),
            None => bytes.iter().position(|byte| {
                self.grounding.iter().any(|spelling| spelling.as_bytes()[0] == *byte)
            }),
        }
    }
}
