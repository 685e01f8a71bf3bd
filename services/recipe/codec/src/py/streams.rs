//! Output streams for Python: many in one table, advanced one by one or in a batch.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::{Value, json};

use super::tokenizer::Tokenizer;
use super::{ids_from_bytes, refused, special_tokens};
use crate::request::{StreamState, parsing_from_json};
use crate::stream::batch::{BatchOutput, StreamTable};
use crate::stream::{
    BackendFinish, Chunk, EventBuffer, Failure, FinishReason, Op, Processor, StageTable, Stream,
    StreamConfig, TokenLogprob, Vocabulary,
};

/// Per id: its log probability, then ids and log probabilities of alternatives.
type LogprobTuple = (f32, Vec<(u32, f32)>);

/// SSE bytes, error text, whether the stream is over.
type Pushed<'py> = (Bound<'py, PyBytes>, Option<String>, bool);

/// SSE bytes of all, where each one's end, (index, error text), indices of those that are over.
type PushedBatch<'py> = (Bound<'py, PyBytes>, Vec<usize>, Vec<(usize, String)>, Vec<usize>);

fn finish_reason(name: &str) -> PyResult<BackendFinish> {
    match name {
        "stop" => Ok(BackendFinish::Stop),
        "length" => Ok(BackendFinish::Length),
        "content_filter" => Ok(BackendFinish::ContentFilter),
        _ => Err(PyValueError::new_err(format!("unknown finish reason {name:?}"))),
    }
}

fn token_logprobs(list: Option<Vec<LogprobTuple>>) -> Option<Vec<TokenLogprob>> {
    let read = |(logprob, top)| TokenLogprob { logprob, top };
    list.map(|list| list.into_iter().map(read).collect())
}

#[pyclass(module = "services.recipe._codec")]
#[derive(Default)]
pub struct Streams {
    table: StreamTable,
    events: EventBuffer,
    batch: BatchOutput,
}

impl Streams {
    fn stream(&mut self, handle: u32) -> PyResult<&mut Stream> {
        self.table
            .get_mut(handle)
            .ok_or_else(|| PyKeyError::new_err(format!("no stream has the handle {handle}")))
    }

    fn push<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        chunk: Chunk<'_>,
        now: u64,
    ) -> PyResult<Pushed<'py>> {
        let Streams { table, events, .. } = self;
        events.clear();
        let stream = table
            .get_mut(handle)
            .ok_or_else(|| PyKeyError::new_err(format!("no stream has the handle {handle}")))?;
        let error = stream.push(chunk, now, events).err().map(|error| error.message);
        Ok((PyBytes::new(py, events.sse()), error, stream.is_over()))
    }
}

#[pymethods]
impl Streams {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.table.len()
    }

    /// Opens a stream and returns its handle.
    #[pyo3(signature = (
        parse_state, tokenizer, *, response_id, model=None, created, call_id_seed, eager=false,
        separate_usage=false, signature=None, spellings=None, writes_events=None,
        keeps_response=None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments on the Python side")]
    fn open(
        &mut self,
        parse_state: &[u8],
        tokenizer: Option<&Tokenizer>,
        response_id: String,
        model: Option<String>,
        created: u64,
        call_id_seed: u128,
        eager: bool,
        separate_usage: bool,
        signature: Option<String>,
        spellings: Option<Vec<String>>,
        writes_events: Option<bool>,
        keeps_response: Option<bool>,
    ) -> PyResult<u32> {
        let state = StreamState::from_json(parse_state).map_err(|e| refused("request", &e))?;
        let config = StreamConfig {
            response_id,
            model: model.unwrap_or(state.model),
            created,
            call_id_seed,
            eager,
            separate_usage,
            signature,
            special_tokens: special_tokens(spellings)?,
            writes_events,
            keeps_response,
        };
        let vocabulary = tokenizer.map(|tokenizer| Arc::clone(&tokenizer.0) as Arc<dyn Vocabulary>);
        let stream = Stream::from_parts(&state.parsing, &state.response, &config, vocabulary);
        Ok(self.table.insert(stream))
    }

    fn ready<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        prompt_tokens: u32,
        prompt_cache_hit_tokens: u32,
        system_fingerprint: Option<&str>,
        now: u64,
    ) -> PyResult<Pushed<'py>> {
        let chunk = Chunk::Ready { prompt_tokens, prompt_cache_hit_tokens, system_fingerprint };
        self.push(py, handle, chunk, now)
    }

    fn text<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        content: &str,
        token_count: u32,
        now: u64,
    ) -> PyResult<Pushed<'py>> {
        self.push(py, handle, Chunk::Text { content, token_count }, now)
    }

    fn tokens<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        token_ids: &[u8],
        logprobs: Option<Vec<LogprobTuple>>,
        now: u64,
    ) -> PyResult<Pushed<'py>> {
        let ids = ids_from_bytes(token_ids)?;
        let logprobs = token_logprobs(logprobs);
        let chunk = Chunk::Tokens { ids: &ids, logprobs: logprobs.as_deref() };
        self.push(py, handle, chunk, now)
    }

    fn finish<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        reason: &str,
        now: u64,
    ) -> PyResult<Pushed<'py>> {
        self.push(py, handle, Chunk::Finish(finish_reason(reason)?), now)
    }

    /// Ends the input without a finish chunk; returns SSE bytes.
    fn close<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        now: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut events = EventBuffer::default();
        self.stream(handle)?.close(now, &mut events);
        Ok(PyBytes::new(py, events.sse()))
    }

    /// Ends the stream with its protocol's failure frame; returns SSE bytes.
    fn fail<'py>(
        &mut self,
        py: Python<'py>,
        handle: u32,
        reason: String,
        message: String,
        request_id: String,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut events = EventBuffer::default();
        self.stream(handle)?.fail(&Failure { reason, message, request_id }, &mut events);
        Ok(PyBytes::new(py, events.sse()))
    }

    /// Gives each stream its ids: all arguments but `now` little-endian u32.
    fn push_tokens<'py>(
        &mut self,
        py: Python<'py>,
        handles: &[u8],
        counts: &[u8],
        token_ids: &[u8],
        now: u64,
    ) -> PyResult<PushedBatch<'py>> {
        let (handles, counts) = (ids_from_bytes(handles)?, ids_from_bytes(counts)?);
        let ids = ids_from_bytes(token_ids)?;
        let Streams { table, batch, .. } = self;
        py.detach(|| table.push_tokens(&handles, &counts, &ids, now, batch))
            .map_err(|error| PyValueError::new_err(error.message))?;
        let errors = batch.errors.iter().map(|(k, error)| (*k, error.message.clone())).collect();
        let sse = PyBytes::new(py, batch.events.sse());
        Ok((sse, batch.ends.clone(), errors, batch.over.clone()))
    }

    /// The complete response as JSON, as far as it has come.
    fn folded<'py>(&mut self, py: Python<'py>, handle: u32) -> PyResult<Bound<'py, PyBytes>> {
        let folded = self.stream(handle)?.folded();
        Ok(PyBytes::new(py, &folded))
    }

    /// Prompt, cached, completion and reasoning tokens.
    fn usage(&mut self, handle: u32) -> PyResult<(u64, u64, u64, Option<u64>)> {
        let usage = self.stream(handle)?.usage();
        Ok((
            usage.prompt_tokens,
            usage.prompt_cache_hit_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        ))
    }

    fn is_over(&mut self, handle: u32) -> PyResult<bool> {
        Ok(self.stream(handle)?.is_over())
    }

    /// Throws a stream away; whether there was one.
    fn remove(&mut self, handle: u32) -> bool {
        self.table.remove(handle).is_some()
    }
}

/// The output parser alone, for conformance vectors: operations as JSON.
#[pyclass(module = "services.recipe._codec")]
pub struct Parser(Processor);

#[pymethods]
impl Parser {
    #[new]
    fn new(parsing: &str, tokenizer: Option<&Tokenizer>) -> PyResult<Self> {
        let value: Value =
            serde_json::from_str(parsing).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let parsing = parsing_from_json(&value)
            .ok_or_else(|| PyValueError::new_err("bad parsing options"))?;
        let table = Arc::new(StageTable::new(&parsing, &special_tokens(None)?));
        let is_thinking = parsing.thinking_initial_stage.is_some();
        let vocabulary = tokenizer.map(|tokenizer| Arc::clone(&tokenizer.0) as Arc<dyn Vocabulary>);
        Ok(Parser(Processor::new(table, vocabulary, is_thinking, true, false)))
    }

    #[getter]
    fn is_over(&self) -> bool {
        self.0.is_over()
    }

    fn text(&mut self, content: &str, token_count: u32) -> PyResult<String> {
        self.push(Chunk::Text { content, token_count })
    }

    fn tokens(&mut self, token_ids: &[u8]) -> PyResult<String> {
        let ids = ids_from_bytes(token_ids)?;
        self.push(Chunk::Tokens { ids: &ids, logprobs: None })
    }

    fn finish(&mut self, reason: &str) -> PyResult<String> {
        self.push(Chunk::Finish(finish_reason(reason)?))
    }
}

impl Parser {
    fn push(&mut self, chunk: Chunk<'_>) -> PyResult<String> {
        let mut ops = Vec::new();
        self.0
            .push(chunk, &mut |op: Op<'_>| ops.extend(op_json(op)))
            .map_err(|error| refused("request", &error))?;
        Ok(Value::Array(ops).to_string())
    }
}

fn op_json(op: Op<'_>) -> Option<Value> {
    Some(match op {
        Op::Start { .. } => json!(["start"]),
        Op::Content { text, .. } => json!(["content", text]),
        Op::Reasoning { text, .. } => json!(["reasoning", text]),
        Op::CallBegin => return None,
        Op::CallNamed(name) => json!(["call", name]),
        Op::CallArgs(fragment) => json!(["args", fragment]),
        Op::Finish { reason, usage, .. } => {
            let word = match reason {
                FinishReason::Length => "length",
                FinishReason::ToolCalls => "tool_calls",
                FinishReason::ContentFilter => "content_filter",
                FinishReason::Stop | FinishReason::StopSequence | FinishReason::EndOfStream => {
                    "stop"
                }
            };
            json!(["finish", word, usage.completion_tokens])
        }
    })
}
