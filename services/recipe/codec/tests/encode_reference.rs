//! The encoder against a slow, obvious one: the regex splits one inside the other, then merging from
//! bytes by rank.

mod support;

use std::collections::HashMap;
use std::sync::LazyLock;

use pelagos_codec::encode::{Limits, Tokenizer};
use regex::Regex;
use serde_json::Value;
use support::streams::Rng;
use support::tokenizer;

struct Reference {
    numbers: Regex,
    cjk: Regex,
    words: Regex,
    white_space: Regex,
    ids: HashMap<Vec<u8>, u32>,
    ranks: HashMap<(Vec<u8>, Vec<u8>), usize>,
}

impl Reference {
    /// Reads the tokenizer file on its own; the splits are those of recipe.md, section 1.1.
    fn load() -> Self {
        let json = std::fs::read(support::tokenizer_file()).expect("the tokenizer file");
        let file: Value = serde_json::from_slice(&json).expect("JSON");
        let byte_of = alphabet();
        let bytes = |text: &str| -> Option<Vec<u8>> {
            text.chars().map(|c| byte_of.get(&c).copied()).collect()
        };
        let vocab = file["model"]["vocab"].as_object().expect("a vocabulary");
        let ids = vocab
            .iter()
            .filter_map(|(token, id)| Some((bytes(token)?, id.as_u64().expect("an id") as u32)));
        let merges = file["model"]["merges"].as_array().expect("merges");
        let ranks = merges.iter().enumerate().map(|(rank, merge)| {
            let (left, right) = merge.as_str().and_then(|m| m.split_once(' ')).expect("a pair");
            ((bytes(left).expect("bytes"), bytes(right).expect("bytes")), rank)
        });
        let regex = |pattern: &str| Regex::new(pattern).expect("a pattern");
        Reference {
            numbers: regex(r"\p{N}{1,3}"),
            cjk: regex("[一-龥぀-ゟ゠-ヿ]+"),
            // Without the two alternatives for white space at the end: one looks ahead.
            words: regex(
                "^(?:[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+\
                 |[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+\
                 | ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+)",
            ),
            white_space: regex(r"^\s+"),
            ids: ids.collect(),
            ranks: ranks.collect(),
        }
    }

    fn pieces<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut pieces = Vec::new();
        for by_number in isolated(&self.numbers, text) {
            for by_cjk in isolated(&self.cjk, by_number) {
                self.split_words(by_cjk, &mut pieces);
            }
        }
        pieces
    }

    /// The third split, tried at each place in turn; what no match covers stays together.
    fn split_words<'a>(&self, text: &'a str, pieces: &mut Vec<&'a str>) {
        let (mut uncovered, mut at) = (0, 0);
        while at < text.len() {
            let rest = &text[at..];
            let len = match self.words.find(rest) {
                Some(found) => found.end(),
                None => self.white_space_len(rest),
            };
            if len == 0 {
                at += rest.chars().next().map_or(0, char::len_utf8);
                continue;
            }
            pieces.extend(Some(&text[uncovered..at]).filter(|piece| !piece.is_empty()));
            pieces.push(&rest[..len]);
            at += len;
            uncovered = at;
        }
        pieces.extend(Some(&text[uncovered..]).filter(|piece| !piece.is_empty()));
    }

    /// `\s+(?!\S)|\s+`
    fn white_space_len(&self, text: &str) -> usize {
        let Some(run) = self.white_space.find(text) else { return 0 };
        let last = run.as_str().chars().next_back().map_or(0, char::len_utf8);
        match run.end() == text.len() || run.end() == last {
            true => run.end(),
            false => run.end() - last,
        }
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        for piece in self.pieces(text) {
            let mut parts: Vec<Vec<u8>> = piece.bytes().map(|byte| vec![byte]).collect();
            loop {
                let rank = |at: usize| {
                    let pair = (parts[at].clone(), parts[at + 1].clone());
                    self.ranks.get(&pair).map(|rank| (*rank, at))
                };
                let Some((_, at)) = (0..parts.len() - 1).filter_map(rank).min() else { break };
                let right = parts.remove(at + 1);
                parts[at].extend(right);
            }
            ids.extend(parts.iter().map(|part| self.ids[part]));
        }
        ids
    }
}

/// Matches and what lies between them, in order.
fn isolated<'a>(regex: &Regex, text: &'a str) -> Vec<&'a str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for found in regex.find_iter(text) {
        parts.extend(Some(&text[start..found.start()]).filter(|part| !part.is_empty()));
        parts.push(found.as_str());
        start = found.end();
    }
    parts.extend(Some(&text[start..]).filter(|part| !part.is_empty()));
    parts
}

/// The byte-level alphabet: printable Latin-1 for itself, the others from U+0100 on.
fn alphabet() -> HashMap<char, u8> {
    let is_plain = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let moved = (0..=255).filter(|byte| !is_plain(*byte));
    let moved = moved.enumerate().map(|(index, byte)| (0x100 + index as u32, byte));
    let plain = (0..=255).filter(|byte| is_plain(*byte)).map(|byte| (u32::from(byte), byte));
    plain.chain(moved).filter_map(|(code, byte)| Some((char::from_u32(code)?, byte))).collect()
}

static REFERENCE: LazyLock<Reference> = LazyLock::new(Reference::load);

fn assert_same(text: &str) {
    assert_eq!(tokenizer().encode_plain(text), REFERENCE.encode(text), "{text:?}");
}

/// Characters of every class, and at the borders of the classes' ranges.
const CHARACTERS: &[&str] = &[
    "a",
    "B",
    "z",
    "Z",
    " ",
    " ",
    "  ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\u{b}",
    "\u{85}",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "1",
    "9",
    "٣",
    "½",
    "〇",
    ".",
    ",",
    "(",
    "_",
    "'",
    "/",
    "$",
    "…",
    "—",
    "你",
    "的",
    "一",
    "龥",
    "龦",
    "あ",
    "ん",
    "ア",
    "ー",
    "・",
    "゠",
    "゛",
    "\u{3040}",
    "\u{3099}",
    "é",
    "e\u{301}",
    "\u{301}",
    "ß",
    "Ω",
    "я",
    "한",
    "ก",
    "ि",
    "\u{0}",
    "\u{1f}",
    "\u{7f}",
    "\u{200b}",
    "\u{200d}",
    "\u{feff}",
    "😀",
    "👩‍👩‍👧",
    "\u{e000}",
    "\u{10ffff}",
    "<｜User｜>",
    "</think>",
    "the",
    " value",
    "return",
    "tion",
    "不",
    "中国",
    "人民",
];

#[test]
fn any_mixture_of_classes_is_encoded_as_by_the_regexes() {
    let mut rng = Rng(7);
    for _ in 0..2_500 {
        let text: String =
            (0..1 + rng.below(24)).map(|_| *rng.pick(CHARACTERS)).collect::<Vec<_>>().concat();
        assert_same(&text);
    }
}

#[test]
fn any_code_points_are_encoded_as_by_the_regexes() {
    let mut rng = Rng(8);
    for round in 0..2_000 {
        let highest = *rng.pick(&[0x80, 0x250, 0x3200, 0xA000, 0x11_0000]);
        let text: String = (0..1 + rng.below(if round % 100 == 0 { 300 } else { 20 }))
            .filter_map(|_| char::from_u32(rng.below(highest) as u32))
            .collect();
        if !text.is_empty() {
            assert_same(&text);
        }
    }
}

#[test]
fn long_pieces_are_merged_as_by_the_rules() {
    let mut rng = Rng(9);
    for alphabet in ["a", "ab", "etaoinsrh", "的一是不了", "的你\u{3099}ー"] {
        let letters: Vec<char> = alphabet.chars().collect();
        for len in [1, 14, 15, 16, 17, 23, 24, 25, 26, 63, 64, 65, 66, 130, 300] {
            let text: String = (0..len).map(|_| *rng.pick(&letters)).collect();
            assert_same(&text);
        }
    }
}

/// The same text on one thread and, cut, on several.
#[test]
fn cuts_and_windows_change_nothing() {
    let load = |num_threads| {
        let limits = Limits { num_threads, cache_bytes: 0 };
        Tokenizer::with_limits(&support::tokenizer_file(), limits).expect("a tokenizer")
    };
    let (one, three) = (load(1), load(3));
    let mut rng = Rng(10);
    let mixture = |rng: &mut Rng| *rng.pick(CHARACTERS);
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut texts: Vec<String> =
        vec![(0..120_000).map(|_| mixture(&mut rng)).collect(), "a".repeat(400_000)];
    texts.push((0..400_000).map(|_| rng.pick(&letters).as_str()).collect());
    texts.push("的".repeat(140_000));
    texts.push("ab".repeat(200_000));
    texts.push(" ".repeat(400_000) + "x");
    for text in texts {
        let start: String = text.chars().take(20).collect();
        assert_eq!(one.encode_plain(&text), three.encode_plain(&text), "{start:?}…");
    }
}

#[test]
fn the_count_is_that_of_the_whole_however_it_is_cut() {
    let mut rng = Rng(11);
    for round in 0..200 {
        let text: String = (0..rng.below(2_000)).map(|_| *rng.pick(CHARACTERS)).collect();
        let mut counter = tokenizer().counter();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let mut at = (1 + rng.below(40)).min(rest.len());
            while !rest.is_char_boundary(at) {
                at += 1;
            }
            counter.push(&rest[..at]);
            rest = &rest[at..];
        }
        assert_eq!(counter.count(), tokenizer().count_full(&text), "round {round}");
    }
}
