//! Start, finish, usage and errors of one stream, independent of protocol (recipe.md, section 14).

use std::sync::Arc;

use super::ops::{
    BackendFinish, Chunk, FinishReason, Op, Sink, TokenCounter, TokenLogprob, Usage, Vocabulary,
};
use super::parser::Parser;
use super::pieces::{IdBuffer, PieceKind};
use super::stages::StageTable;
use crate::types::{Error, Stage};

/// Turns backend chunks into operations, up to and including Finish.
pub struct Processor {
    parser: Parser,
    vocabulary: Option<Arc<dyn Vocabulary>>,
    ids: IdBuffer,
    /// Whether log probabilities are written out; one protocol never shows them.
    keeps_logprobs: bool,
    usage: Usage,
    counter: Option<Box<dyn TokenCounter>>,
    system_fingerprint: Option<String>,
    has_started: bool,
    has_named_call: bool,
    is_over: bool,
    has_finished: bool,
}

impl Processor {
    /// Starts a processor. Reasoning is counted in thinking mode with a vocabulary.
    pub fn new(
        table: Arc<StageTable>,
        vocabulary: Option<Arc<dyn Vocabulary>>,
        is_thinking: bool,
        keeps_logprobs: bool,
        eager: bool,
    ) -> Self {
        let counter = vocabulary.clone().filter(|_| is_thinking).map(|known| known.counter());
        Processor {
            parser: Parser::new(table, eager),
            vocabulary,
            ids: IdBuffer::default(),
            keeps_logprobs,
            usage: Usage::default(),
            counter,
            system_fingerprint: None,
            has_started: false,
            has_named_call: false,
            is_over: false,
            has_finished: false,
        }
    }

    /// Whether Finish was produced.
    pub fn has_finished(&self) -> bool {
        self.has_finished
    }

    /// Whether Finish was produced or an error ended the stream.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Token counts up to here, for the ledger of a stream that failed; reasoning is not counted.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Processes one chunk.
    ///
    /// Errors: ids without a vocabulary, log probabilities of another length than the ids, a chunk
    /// after the end. Each ends the stream without Finish.
    pub fn push(&mut self, chunk: Chunk<'_>, sink: &mut impl Sink) -> Result<(), Error> {
        if self.parser.stop_sequence().is_some() {
            // The backend learns of the match later than we do; what it sends until then is moot.
            return Ok(());
        }
        if self.is_over {
            return Err(Error::internal(
                Stage::Stream,
                "chunk received after the end of the stream",
            ));
        }
        match chunk {
            Chunk::Ready { prompt_tokens, prompt_cache_hit_tokens, system_fingerprint } => {
                if !self.has_started {
                    self.usage.prompt_tokens = u64::from(prompt_tokens);
                    self.usage.prompt_cache_hit_tokens = u64::from(prompt_cache_hit_tokens);
                    self.system_fingerprint = system_fingerprint.map(str::to_owned);
                    self.start(sink);
                }
            }
            Chunk::Text { content, token_count } => {
                self.piece(content, PieceKind::Text, token_count, None, sink);
            }
            Chunk::Tokens { ids, logprobs } => self.tokens(ids, logprobs, sink)?,
            Chunk::Finish(reason) => {
                let reason = match reason {
                    // Asked before the flush: a name that is still held back names no call.
                    BackendFinish::Stop if self.has_named_call => FinishReason::ToolCalls,
                    BackendFinish::Stop => FinishReason::Stop,
                    BackendFinish::Length => FinishReason::Length,
                    BackendFinish::ContentFilter => FinishReason::ContentFilter,
                };
                self.finish(reason, sink);
            }
        }
        Ok(())
    }

    /// Ends the input without a finish chunk; does nothing when the stream is over.
    pub fn close(&mut self, sink: &mut impl Sink) {
        if !self.is_over {
            self.finish(FinishReason::EndOfStream, sink);
        }
    }

    /// Ends the stream without Finish.
    pub fn abort(&mut self) {
        self.is_over = true;
    }

    fn tokens(
        &mut self,
        ids: &[u32],
        logprobs: Option<&[TokenLogprob]>,
        sink: &mut impl Sink,
    ) -> Result<(), Error> {
        let Some(vocabulary) = self.vocabulary.clone() else {
            return Err(self.fail("token chunk received without a tokenizer".to_owned()));
        };
        if let Some(entries) = logprobs
            && entries.len() != ids.len()
        {
            return Err(self.fail(format!(
                "invalid log probabilities: {} log probabilities for {} token IDs",
                entries.len(),
                ids.len()
            )));
        }
        let entries = logprobs.filter(|_| self.keeps_logprobs);
        for (at, &id) in ids.iter().enumerate() {
            let bytes = vocabulary.token_bytes(id);
            let entry = entries.map(|entries| (vocabulary.as_ref(), id, &entries[at]));
            if vocabulary.is_added(id) {
                if !self.ids.is_blank() {
                    self.flush_ids(PieceKind::Plain, sink);
                }
                self.ids.push(bytes, entry);
                self.flush_ids(PieceKind::Special, sink);
            } else {
                self.ids.push(bytes, entry);
            }
            if self.is_over {
                return Ok(());
            }
        }
        if self.ids.is_settled() {
            self.flush_ids(PieceKind::Plain, sink);
        }
        Ok(())
    }

    fn flush_ids(&mut self, kind: PieceKind, sink: &mut impl Sink) {
        if self.is_over {
            return;
        }
        let mut ids = std::mem::take(&mut self.ids);
        ids.flush(|text, num_ids, logprobs| self.piece(text, kind, num_ids, logprobs, sink));
        self.ids = ids;
    }

    fn piece(
        &mut self,
        text: &str,
        kind: PieceKind,
        num_tokens: u32,
        logprobs: Option<&[u8]>,
        sink: &mut impl Sink,
    ) {
        self.start(sink);
        self.usage.completion_tokens += u64::from(num_tokens);
        let counter = &mut self.counter;
        let has_named_call = &mut self.has_named_call;
        self.parser.push(text, kind, logprobs, &mut Tap { sink, counter, has_named_call });
        if self.parser.stop_sequence().is_some() {
            self.finish(FinishReason::StopSequence, sink);
        }
    }

    fn start(&mut self, sink: &mut impl Sink) {
        if !self.has_started {
            self.has_started = true;
            let system_fingerprint = self.system_fingerprint.as_deref();
            sink.op(Op::Start { usage: self.usage, system_fingerprint });
        }
    }

    fn finish(&mut self, reason: FinishReason, sink: &mut impl Sink) {
        self.start(sink);
        let counter = &mut self.counter;
        let has_named_call = &mut self.has_named_call;
        self.parser.flush(&mut Tap { sink: &mut *sink, counter, has_named_call });
        self.usage.reasoning_tokens = self.counter.as_mut().map(|counter| counter.count());
        let stop_sequence = self.parser.stop_sequence();
        sink.op(Op::Finish { reason, stop_sequence, usage: self.usage });
        self.is_over = true;
        self.has_finished = true;
    }

    fn fail(&mut self, message: String) -> Error {
        self.is_over = true;
        Error::internal(Stage::Stream, message)
    }
}

/// Sees the operations on their way: counts reasoning, notes the first named call.
struct Tap<'a, S> {
    sink: &'a mut S,
    counter: &'a mut Option<Box<dyn TokenCounter>>,
    has_named_call: &'a mut bool,
}

impl<S: Sink> Sink for Tap<'_, S> {
    fn op(&mut self, op: Op<'_>) {
        match op {
            Op::Reasoning { text, .. } => {
                if let Some(counter) = self.counter {
                    counter.push(text);
                }
            }
            Op::CallNamed(_) => *self.has_named_call = true,
            _ => {}
        }
        self.sink.op(op);
    }
}
