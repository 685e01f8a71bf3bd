//! Values that enter and leave a stream: backend chunks, parser operations, usage.

use std::sync::Arc;

/// One log probability entry of a `tokens` chunk, one per id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprob {
    pub logprob: f32,
    /// Alternatives as (id, log probability), in the backend's order.
    pub top: Vec<(u32, f32)>,
}

/// Why the backend stopped. What the client is told also depends on what was parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendFinish {
    Stop,
    Length,
    ContentFilter,
}

/// One update from the backend (recipe.md, section 13.1).
#[derive(Clone, Copy, Debug)]
pub enum Chunk<'a> {
    Ready { prompt_tokens: u32, prompt_cache_hit_tokens: u32, system_fingerprint: Option<&'a str> },
    Text { content: &'a str, token_count: u32 },
    Tokens { ids: &'a [u32], logprobs: Option<&'a [TokenLogprob]> },
    Finish(BackendFinish),
}

/// Why the stream ended, before each protocol gives it its own word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    Stop,
    StopSequence,
    EndOfStream,
    Length,
    ToolCalls,
    ContentFilter,
}

/// Token counts; `reasoning_tokens` is known only in thinking mode with a vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub prompt_cache_hit_tokens: u64,
    pub completion_tokens: u64,
    pub reasoning_tokens: Option<u64>,
}

/// What the parser found, in no protocol's words (recipe.md, section 14).
///
/// `logprobs` is the JSON of the piece's entries joined by commas, without brackets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op<'a> {
    Start { usage: Usage, system_fingerprint: Option<&'a str> },
    Content { text: &'a str, logprobs: Option<&'a [u8]> },
    Reasoning { text: &'a str, logprobs: Option<&'a [u8]> },
    CallBegin,
    CallNamed(&'a str),
    CallArgs(&'a str),
    Finish { reason: FinishReason, stop_sequence: Option<&'a str>, usage: Usage },
}

/// Takes the operations in the order in which they happen.
pub trait Sink {
    fn op(&mut self, op: Op<'_>);
}

impl<F: FnMut(Op<'_>)> Sink for F {
    fn op(&mut self, op: Op<'_>) {
        self(op)
    }
}

/// What a stream needs of a tokenizer.
pub trait Vocabulary: Send + Sync {
    /// Returns the bytes that `id` stands for: byte-level symbols mapped back to bytes, the
    /// spelling of an added token; empty for an unknown id.
    fn token_bytes(&self, id: u32) -> &[u8];

    /// Whether `id` belongs to the added vocabulary, named by the codec or not.
    fn is_added(&self, id: u32) -> bool;

    /// Returns a counter of full-vocabulary ids that takes its text in parts.
    fn counter(self: Arc<Self>) -> Box<dyn TokenCounter>;
}

/// Counts the ids of a growing text under the full vocabulary, special spellings as one.
pub trait TokenCounter: Send + Sync {
    fn push(&mut self, text: &str);

    /// Returns the count of everything pushed. Costs the unsettled tail, not the whole text.
    fn count(&mut self) -> u64;
}
