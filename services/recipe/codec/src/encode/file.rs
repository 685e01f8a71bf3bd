//! Reads a `tokenizer.json`: a byte-level BPE with the pre-tokenizer of recipe.md section 1.1.
//!
//! A file that asks for anything this crate does not do is refused, never approximated.

use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

/// The three splits of recipe.md section 1.1, in their order.
pub const SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+\
     |[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+\
     | ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];

/// Why a tokenizer file was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError(pub String);

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tokenizer file: {}", self.0)
    }
}

impl std::error::Error for LoadError {}

/// An entry of the added vocabulary. The spelling is matched as written: the flags that would
/// make white space around it count are refused at load.
#[derive(Clone, Debug, Deserialize)]
pub struct AddedToken {
    pub id: u32,
    pub content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    /// Matched after the others, in the text they leave.
    #[serde(default)]
    pub normalized: bool,
}

/// What the file says, with the byte-level alphabet already undone.
#[derive(Debug)]
pub struct TokenizerFile {
    pub added: Vec<AddedToken>,
    /// (bytes, id) of the base vocabulary.
    pub vocab: Vec<(Vec<u8>, u32)>,
    /// Index into `vocab` of left part, right part and result, in merge order.
    pub merges: Vec<[u32; 3]>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: RawModel,
}

#[derive(Deserialize)]
struct RawModel {
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Entries,
    merges: Vec<RawMerge>,
}

/// The vocabulary in file order, without a hash map in between.
struct Entries(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of token to id")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::with_capacity(1 << 17);
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawMerge {
    Joined(String),
    Pair(String, String),
}

/// The byte that each symbol of the byte-level alphabet stands for.
///
/// Printable Latin-1 stands for itself; the other 68 bytes got U+0100 and up, in byte order.
fn symbol_to_byte(symbol: char) -> Option<u8> {
    let code = symbol as u32;
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Undoes the byte-level alphabet; a string with a foreign symbol stands for its own UTF-8.
pub fn symbols_to_bytes(symbols: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = symbols.chars().map(symbol_to_byte).collect();
    bytes.unwrap_or_else(|| symbols.as_bytes().to_vec())
}

impl TokenizerFile {
    /// Parses and checks the file. Errors name what this crate does not do.
    pub fn parse(json: &[u8]) -> Result<Self, LoadError> {
        let raw: Raw = serde_json::from_slice(json).map_err(|e| LoadError(e.to_string()))?;
        let refuse = |what: &str| Err(LoadError(what.to_owned()));
        check_normalizer(&raw.normalizer)?;
        check_pre_tokenizer(&raw.pre_tokenizer)?;
        let model = &raw.model;
        if model.dropout.is_some_and(|p| p != 0.0)
            || model.unk_token.is_some()
            || model.byte_fallback
            || model.ignore_merges
            || model.continuing_subword_prefix.as_deref().is_some_and(|s| !s.is_empty())
            || model.end_of_word_suffix.as_deref().is_some_and(|s| !s.is_empty())
        {
            return refuse(
                "only a plain byte-level BPE is supported (no dropout, unknown token, byte \
                 fallback, subword affixes or ignored merges)",
            );
        }
        for token in &raw.added_tokens {
            if token.single_word || token.lstrip || token.rstrip || token.content.is_empty() {
                return Err(LoadError(format!(
                    "added token {:?} is empty or has single_word, lstrip or rstrip",
                    token.content
                )));
            }
        }
        let merges = resolve_merges(&raw.model)?;
        let vocab = raw.model.vocab.0.iter().map(|(s, id)| (symbols_to_bytes(s), *id)).collect();
        Ok(TokenizerFile { added: raw.added_tokens, vocab, merges })
    }
}

fn check_normalizer(normalizer: &Value) -> Result<(), LoadError> {
    let empty = normalizer.is_null()
        || (normalizer["type"] == "Sequence"
            && normalizer["normalizers"].as_array().is_some_and(Vec::is_empty));
    if empty { Ok(()) } else { Err(LoadError("a normalizer is not supported".to_owned())) }
}

fn check_pre_tokenizer(pre_tokenizer: &Value) -> Result<(), LoadError> {
    let steps = pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let splits_fit = steps.len() == SPLITS.len() + 1
        && steps.iter().zip(SPLITS).all(|(step, regex)| {
            step["type"] == "Split"
                && step["pattern"]["Regex"] == regex
                && step["behavior"] == "Isolated"
                && step["invert"] != true
        });
    let byte_level = steps.last().is_some_and(|step| {
        step["type"] == "ByteLevel"
            && step["add_prefix_space"] == false
            && step["use_regex"] == false
    });
    if pre_tokenizer["type"] == "Sequence" && splits_fit && byte_level {
        return Ok(());
    }
    Err(LoadError("the pre-tokenizer is not the sequence this codec implements".to_owned()))
}

fn resolve_merges(model: &RawModel) -> Result<Vec<[u32; 3]>, LoadError> {
    let entries = &model.vocab.0;
    let index: std::collections::HashMap<&str, u32> =
        entries.iter().enumerate().map(|(i, (token, _))| (token.as_str(), i as u32)).collect();
    let mut joined = String::new();
    let mut merges = Vec::with_capacity(model.merges.len());
    for (rank, merge) in model.merges.iter().enumerate() {
        let parts = match merge {
            RawMerge::Pair(left, right) => Some((left.as_str(), right.as_str())),
            RawMerge::Joined(both) => both.split_once(' '),
        };
        let found = parts.and_then(|(left, right)| {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            Some([*index.get(left)?, *index.get(right)?, *index.get(joined.as_str())?])
        });
        let Some(found) = found else {
            return Err(LoadError(format!("merge {rank} names a token outside the vocabulary")));
        };
        merges.push(found);
    }
    Ok(merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut seen: Vec<u8> =
            (0..0x200).filter_map(char::from_u32).filter_map(symbol_to_byte).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(symbol_to_byte('Ġ'), Some(b' '));
        assert_eq!(symbol_to_byte('Ċ'), Some(b'\n'));
    }

    #[test]
    fn a_symbol_outside_the_alphabet_makes_the_string_stand_for_itself() {
        assert_eq!(symbols_to_bytes("<｜User｜>"), "<｜User｜>".as_bytes());
        assert_eq!(symbols_to_bytes("ä½ł"), "你".as_bytes());
    }

    #[test]
    fn what_we_do_not_do_is_refused() {
        let error = TokenizerFile::parse(br#"{"model":{"vocab":{},"merges":[]}}"#).unwrap_err();
        assert!(error.0.contains("pre-tokenizer"), "{error}");
        assert!(TokenizerFile::parse(b"{").is_err());
    }
}
