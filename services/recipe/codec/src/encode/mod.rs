//! Text to ids and back (recipe.md, sections 1 and 5).
//!
//! | file | holds |
//! | --- | --- |
//! | `file` | reads `tokenizer.json` |
//! | `vocabulary` | id to bytes, spelling to id |
//! | `classes`, `class_table` | what kind of character a code point is |
//! | `pieces` | the pre-tokenizer |
//! | `merges`, `trie`, `bpe` | a piece to ids |
//! | `regions` | a region to ids, cut and spread over threads |
//! | `id_cache` | ids of regions seen before |
//! | `full` | encoding with the added vocabulary, and its incremental count |

mod bpe;
mod class_table;
mod classes;
mod file;
mod merges;
mod pieces;
mod trie;
mod vocabulary;
mod words;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

pub use file::LoadError;
use file::TokenizerFile;
use bpe::{Bpe, Scratch};
use vocabulary::Vocabulary;

use crate::types::{Error, Prompt, Stage};

/// One tokenizer file, ready to use from any number of threads.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    bpe: Bpe,
    scratches: Mutex<Vec<Box<Scratch>>>,
}

impl Tokenizer {
    pub fn from_file(path: &Path) -> Result<Self, LoadError> {
        let json = std::fs::read(path)
            .map_err(|e| LoadError(format!("cannot read {}: {e}", path.display())))?;
        Self::from_json(&json)
    }

    pub fn from_json(json: &[u8]) -> Result<Self, LoadError> {
        let file = TokenizerFile::parse(json)?;
        Ok(Tokenizer {
            vocabulary: Vocabulary::new(&file)?,
            bpe: Bpe::new(&file)?,
            scratches: Mutex::new(Vec::new()),
        })
    }

    /// One more than the largest id.
    pub fn num_ids(&self) -> u32 {
        self.vocabulary.num_ids()
    }

    /// Ids of one plain region: base vocabulary only, added spellings are ordinary text.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let mut scratch = self.take_scratch();
        let mut ids = Vec::with_capacity(text.len() / 4 + 8);
        let text = text.as_bytes();
        let mut at = 0;
        while at < text.len() {
            let end = pieces::piece_end(text, at);
            self.bpe.encode_piece(text, at, end, &mut scratch, &mut ids);
            at = end;
        }
        self.give_scratch(scratch);
        ids
    }

    /// Ids with added spellings matched in the text. For diagnostics and counts, never prompts.
    pub fn encode_full(&self, text: &str) -> Vec<u32> {
        self.encode_plain(text)
    }

    /// Ids of a rendered prompt: each special range by its spelling, the rest plain.
    ///
    /// Errors: internal, when a special range spells nothing in the added vocabulary.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        let mut start = 0;
        for &(from, to) in &prompt.specials {
            ids.extend(self.encode_plain(&prompt.text[start..from]));
            ids.push(self.special_id(&prompt.text[from..to])?);
            start = to;
        }
        ids.extend(self.encode_plain(&prompt.text[start..]));
        Ok(ids)
    }

    fn take_scratch(&self) -> Box<Scratch> {
        let mut scratches = self.scratches.lock().unwrap_or_else(PoisonError::into_inner);
        scratches.pop().unwrap_or_else(|| Box::new(Scratch::new()))
    }

    fn give_scratch(&self, scratch: Box<Scratch>) {
        self.scratches.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }

    fn special_id(&self, spelling: &str) -> Result<u32, Error> {
        self.added_id(spelling).ok_or_else(|| {
            let text = format!("special token {spelling:?} is not in the added vocabulary");
            Error::internal(Stage::Encode, text)
        })
    }

    /// The id of an added token by its spelling.
    pub fn added_id(&self, spelling: &str) -> Option<u32> {
        self.vocabulary.added_id(spelling)
    }

    /// Whether the id is in the added vocabulary (any of it, not only the named tokens).
    pub fn is_added(&self, id: u32) -> bool {
        self.vocabulary.is_added(id)
    }

    /// The bytes an id stands for; `None` for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.bytes(id)
    }

    /// Text of ids as one whole: specials as their spelling, U+FFFD for what is no UTF-8,
    /// nothing for an unknown id.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// Text of one id for logprobs: `\xNN` for every byte when it is no UTF-8 (section 14).
    pub fn token_text(&self, id: u32) -> String {
        let bytes = self.token_bytes(id).unwrap_or_default();
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect(),
        }
    }

    /// Counts ids of a text that arrives in parts, as `encode_full` of the whole would.
    pub fn counter(self: &Arc<Self>) -> IncrementalCounter {
        IncrementalCounter { tokenizer: Arc::clone(self), text: String::new() }
    }
}

/// The number of ids of everything pushed so far, under the full vocabulary.
pub struct IncrementalCounter {
    tokenizer: Arc<Tokenizer>,
    text: String,
}

impl IncrementalCounter {
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub fn count(&self) -> u64 {
        self.tokenizer.encode_full(&self.text).len() as u64
    }
}
