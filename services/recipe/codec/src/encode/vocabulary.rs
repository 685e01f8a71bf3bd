//! Id to bytes and spelling to id.

use std::collections::HashMap;

use super::file::{LoadError, TokenizerFile, symbols_to_bytes};

/// Ids far above the number of tokens would only waste memory; no real file has them.
const MAX_ID: u32 = 1 << 22;

pub struct Vocabulary {
    /// All tokens' bytes, one after another; `starts[id]..starts[id + 1]`.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    kinds: Vec<Kind>,
    added: HashMap<String, u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unknown,
    Base,
    Added,
}

impl Vocabulary {
    pub fn new(file: &TokenizerFile) -> Result<Self, LoadError> {
        let ids = file.vocab.iter().map(|(_, id)| *id).chain(file.added.iter().map(|t| t.id));
        let num_ids = ids.max().map_or(0, |id| id + 1);
        if num_ids > MAX_ID {
            return Err(LoadError(format!("id {} is above the limit {MAX_ID}", num_ids - 1)));
        }
        let mut of_id: Vec<(Kind, Vec<u8>)> = vec![(Kind::Unknown, Vec::new()); num_ids as usize];
        for (bytes, id) in &file.vocab {
            of_id[*id as usize] = (Kind::Base, bytes.clone());
        }
        let mut added = HashMap::with_capacity(file.added.len());
        for token in &file.added {
            of_id[token.id as usize] = (Kind::Added, symbols_to_bytes(&token.content));
            added.insert(token.content.clone(), token.id);
        }
        let mut bytes = Vec::new();
        let mut starts = vec![0];
        for (_, token) in &of_id {
            bytes.extend_from_slice(token);
            starts.push(bytes.len() as u32);
        }
        let kinds = of_id.iter().map(|(kind, _)| *kind).collect();
        Ok(Vocabulary { bytes, starts, kinds, added })
    }

    pub fn num_ids(&self) -> u32 {
        self.kinds.len() as u32
    }

    pub fn added_id(&self, spelling: &str) -> Option<u32> {
        self.added.get(spelling).copied()
    }

    pub fn is_added(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Added)
    }

    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        if *self.kinds.get(index)? == Kind::Unknown {
            return None;
        }
        Some(&self.bytes[self.starts[index] as usize..self.starts[index + 1] as usize])
    }
}
