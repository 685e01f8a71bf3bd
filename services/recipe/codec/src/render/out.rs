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
    /// First bytes of the grounding spellings.
    starts_grounding: [bool; 256],
}

impl<'a> Out<'a> {
    pub fn new(tokens: &'a SpecialTokens, capacity: usize) -> Self {
        let mut starts_grounding = [false; 256];
        for special in GROUNDING {
            if let Some(byte) = tokens.get(special).bytes().next() {
                starts_grounding[usize::from(byte)] = true;
            }
        }
        let prompt = Prompt { text: String::with_capacity(capacity), specials: Vec::new() };
        Out { prompt, tokens, starts_grounding }
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
        while let Some(found) =
            bytes[at..].iter().position(|byte| self.starts_grounding[usize::from(*byte)])
        {
            at += found;
            let length = GROUNDING
                .iter()
                .map(|special| self.tokens.get(*special))
                .find(|spelling| {
                    !spelling.is_empty() && bytes[at..].starts_with(spelling.as_bytes())
                })
                .map(str::len);
            match length {
                Some(length) => {
                    self.prompt.specials.push((start + at, start + at + length));
                    at += length;
                }
                None => at += 1,
            }
        }
    }
}
