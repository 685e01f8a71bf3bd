//! Backend chunks to protocol events, and the complete response folded from them.
//!
//! | file | holds |
//! | --- | --- |
//! | `ops` | chunks, operations, usage; what a stream needs of a tokenizer |
//! | `pieces` | ids to text that ends on whole characters |
//! | `markers` | incremental matching of markers |
//! | `stages` | the table of stages and actions |
//! | `parser` | decided bytes to operations |
//! | `processor` | start, finish, usage, errors |
//! | `events` | the three protocols |
//! | `call_id`, `write` | call ids; JSON into a buffer |
//! | `batch` | many streams advanced by one call |
//!
//! Sources: recipe.md, sections 13 to 15 and 17.

pub mod batch;
pub mod call_id;
pub mod events;
pub mod markers;
pub mod ops;
pub mod parser;
pub mod pieces;
pub mod processor;
pub mod stages;
mod vocabulary;
mod write;

use std::sync::Arc;

pub use call_id::CallIds;
use events::chat::{ChatOptions, ChatWriter};
pub use events::failure::Failure;
use events::messages::{MessagesOptions, MessagesWriter};
use events::responses::{ResponsesOptions, ResponsesWriter};
pub use events::{Event, EventBuffer};
pub use ops::{
    BackendFinish, Chunk, FinishReason, Op, Sink, TokenCounter, TokenLogprob, Usage, Vocabulary,
};
pub use processor::Processor;
pub use stages::StageTable;

use crate::types::{Error, Parsing, Request, ResponseOptions, SpecialTokens, ThinkingStage};

/// What one stream is told at its start, besides the request.
#[derive(Clone, Debug, Default)]
pub struct StreamConfig {
    pub response_id: String,
    /// The public name that the response shows.
    pub model: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// 128 random bits, for the ids of tool calls.
    pub call_id_seed: u128,
    /// Release text as soon as it is certain instead of in whole pieces. The complete response is
    /// the same; the cut of the events is not the contract's.
    pub eager: bool,
    /// Chat: usage in a chunk of its own with `"choices":[]`, for strict clients (UR-17).
    pub separate_usage: bool,
    /// Messages: ends thinking blocks in place of the response id.
    pub signature: Option<String>,
    pub special_tokens: SpecialTokens,
    /// Write events; None: if the request asked for a stream.
    pub writes_events: Option<bool>,
    /// Keep the complete response; None: if the request did not ask for a stream. A stream that
    /// keeps none holds O(pending marker) in Chat and Messages; Responses repeats its text at the
    /// end and so keeps it in any case.
    pub keeps_response: Option<bool>,
}

/// One response on its way from the backend to the client.
pub struct Stream {
    processor: Processor,
    protocol: ProtocolSink,
}

struct ProtocolSink {
    writer: Writer,
    call_ids: CallIds,
    is_thinking: bool,
    has_reasoned: bool,
    has_failed: bool,
}

enum Writer {
    Chat(ChatWriter),
    Messages(MessagesWriter),
    Responses(Box<ResponsesWriter>),
}

impl Stream {
    /// Opens the stream of an accepted request.
    pub fn new(
        request: &Request,
        config: &StreamConfig,
        vocabulary: Option<Arc<dyn Vocabulary>>,
    ) -> Self {
        Self::from_parts(&request.parsing, &request.response, config, vocabulary)
    }

    /// Opens a stream from the two parts of a request that it needs.
    pub fn from_parts(
        parsing: &Parsing,
        response: &ResponseOptions,
        config: &StreamConfig,
        vocabulary: Option<Arc<dyn Vocabulary>>,
    ) -> Self {
        let table = Arc::new(StageTable::new(parsing, &config.special_tokens));
        let is_thinking = parsing.thinking_initial_stage.is_some();
        // One protocol never shows log probabilities; they are checked and not written out.
        let keeps_logprobs = !matches!(response, ResponseOptions::Messages { .. });
        Stream {
            processor: Processor::new(table, vocabulary, is_thinking, keeps_logprobs, config.eager),
            protocol: ProtocolSink {
                writer: Writer::new(parsing, response, config),
                call_ids: CallIds::new(config.call_id_seed),
                is_thinking,
                has_reasoned: false,
                has_failed: false,
            },
        }
    }

    /// Takes one chunk and appends its events; `now` is in seconds since the epoch.
    ///
    /// Errors: see [`Processor::push`]; the stream is over then, and the caller may still
    /// [`Stream::fail`] it.
    pub fn push(&mut self, chunk: Chunk<'_>, now: u64, out: &mut EventBuffer) -> Result<(), Error> {
        let protocol = &mut self.protocol;
        self.processor.push(chunk, &mut |op: Op<'_>| protocol.op(op, now, out))
    }

    /// Ends the input without a finish chunk; does nothing when the stream is over.
    pub fn close(&mut self, now: u64, out: &mut EventBuffer) {
        let protocol = &mut self.protocol;
        self.processor.close(&mut |op: Op<'_>| protocol.op(op, now, out));
    }

    /// Ends a stream that has begun with the protocol's failure frame instead of its finish.
    ///
    /// Does nothing after the finish, or the second time.
    pub fn fail(&mut self, failure: &Failure, out: &mut EventBuffer) {
        if self.processor.has_finished() || std::mem::replace(&mut self.protocol.has_failed, true) {
            return;
        }
        self.processor.abort();
        match &mut self.protocol.writer {
            Writer::Chat(writer) => writer.fail(failure, out),
            Writer::Messages(writer) => writer.fail(failure, out),
            Writer::Responses(writer) => writer.fail(failure, self.processor.usage(), out),
        }
    }

    /// Whether the finish was written or an error ended the stream.
    pub fn is_over(&self) -> bool {
        self.processor.is_over()
    }

    /// Token counts up to here; reasoning only after the finish.
    pub fn usage(&self) -> Usage {
        self.processor.usage()
    }

    /// Returns the JSON of the complete response, as far as it has come.
    pub fn folded(&self) -> Vec<u8> {
        match &self.protocol.writer {
            Writer::Chat(writer) => writer.folded(),
            Writer::Messages(writer) => writer.folded(),
            Writer::Responses(writer) => writer.folded(),
        }
    }
}

impl ProtocolSink {
    fn op(&mut self, op: Op<'_>, now: u64, out: &mut EventBuffer) {
        match op {
            Op::Start { usage, system_fingerprint } => match &mut self.writer {
                Writer::Chat(writer) => writer.start(system_fingerprint, out),
                Writer::Messages(writer) => writer.start(usage, out),
                Writer::Responses(writer) => writer.start(out),
            },
            Op::Content { text, logprobs } => match &mut self.writer {
                Writer::Chat(writer) => writer.content(text, logprobs, out),
                Writer::Messages(writer) => writer.content(text, out),
                Writer::Responses(writer) => writer.content(text, logprobs, out),
            },
            Op::Reasoning { text, logprobs } => {
                self.has_reasoned |= !text.is_empty();
                match &mut self.writer {
                    Writer::Chat(writer) => writer.reasoning(text, logprobs, out),
                    Writer::Messages(writer) => writer.reasoning(text, out),
                    Writer::Responses(writer) => writer.reasoning(text, out),
                }
            }
            Op::CallBegin => {}
            Op::CallNamed(name) => {
                let id = self.call_ids.next(self.is_thinking && !self.has_reasoned);
                match &mut self.writer {
                    Writer::Chat(writer) => writer.call_named(name, &id, out),
                    Writer::Messages(writer) => writer.call_named(name, &id, out),
                    Writer::Responses(writer) => writer.call_named(name, &id, out),
                }
            }
            Op::CallArgs(fragment) => match &mut self.writer {
                Writer::Chat(writer) => writer.call_args(fragment, out),
                Writer::Messages(writer) => writer.call_args(fragment, out),
                Writer::Responses(writer) => writer.call_args(fragment, out),
            },
            Op::Finish { reason, stop_sequence, usage } => match &mut self.writer {
                Writer::Chat(writer) => writer.finish(reason, usage, out),
                Writer::Messages(writer) => writer.finish(reason, stop_sequence, usage, out),
                Writer::Responses(writer) => writer.finish(reason, usage, now, out),
            },
        }
    }
}

impl Writer {
    fn new(parsing: &Parsing, response: &ResponseOptions, config: &StreamConfig) -> Self {
        let is_stream = match response {
            ResponseOptions::Chat { stream, .. }
            | ResponseOptions::Messages { stream }
            | ResponseOptions::Responses { stream, .. } => *stream,
        };
        let writes_events = config.writes_events.unwrap_or(is_stream);
        let keeps_response = config.keeps_response.unwrap_or(!is_stream);
        let id = config.response_id.clone();
        let model = config.model.clone();
        let created = config.created;
        let is_thinking = parsing.thinking_initial_stage.is_some();
        match response {
            ResponseOptions::Chat { include_usage, .. } => {
                Writer::Chat(ChatWriter::new(ChatOptions {
                    id,
                    model,
                    created,
                    is_thinking,
                    begins_in_reasoning: matches!(
                        parsing.thinking_initial_stage,
                        Some(ThinkingStage::ReasoningStart | ThinkingStage::ReasoningContinuation)
                    ),
                    shows_null_usage: *include_usage || !is_stream,
                    separate_usage: config.separate_usage,
                    writes_events,
                    keeps_response,
                }))
            }
            ResponseOptions::Messages { .. } => {
                let signature = config.signature.clone().unwrap_or_else(|| id.clone());
                Writer::Messages(MessagesWriter::new(MessagesOptions {
                    id,
                    model,
                    is_thinking,
                    signature,
                    writes_events,
                    keeps_response,
                }))
            }
            ResponseOptions::Responses {
                echo,
                namespaces,
                custom_tools,
                client_tool_search,
                ..
            } => Writer::Responses(Box::new(ResponsesWriter::new(ResponsesOptions {
                id,
                model,
                created,
                echo: echo.clone(),
                namespaces: namespaces.as_ref().map(|list| {
                    let split = |(name, space, local): &(String, String, String)| {
                        (name.clone(), (space.clone(), local.clone()))
                    };
                    list.iter().map(split).collect()
                }),
                custom_tools: custom_tools.clone(),
                client_tool_search: *client_tool_search,
                writes_events,
            }))),
        }
    }
}
