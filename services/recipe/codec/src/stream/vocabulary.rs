//! The codec's own tokenizer as a stream's vocabulary.

use std::sync::Arc;

use super::ops::{TokenCounter, Vocabulary};
use crate::encode::{IncrementalCounter, Tokenizer};

impl Vocabulary for Tokenizer {
    fn token_bytes(&self, id: u32) -> &[u8] {
        Tokenizer::token_bytes(self, id).unwrap_or_default()
    }

    fn is_added(&self, id: u32) -> bool {
        Tokenizer::is_added(self, id)
    }

    fn counter(self: Arc<Self>) -> Box<dyn TokenCounter> {
        Box::new(Tokenizer::counter(&self))
    }
}

impl TokenCounter for IncrementalCounter {
    fn push(&mut self, text: &str) {
        IncrementalCounter::push(self, text);
    }

    fn count(&mut self) -> u64 {
        IncrementalCounter::count(self)
    }
}
