//! What the stream tests share: golden files, the tokenizer file, chunks from JSON.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod counting;
pub mod sha256;
pub mod streams;

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use pelagos_codec::encode::Tokenizer;
use pelagos_codec::stream::{BackendFinish, Chunk, TokenLogprob, Vocabulary};
use pelagos_codec::types::{Parsing, ThinkingStage};
use serde_json::Value;

pub fn repo_root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    root.canonicalize().expect("the crate lies three folders below the root")
}

/// The folder of golden vectors; without it the test fails, it does not pass over.
pub fn golden_folder() -> PathBuf {
    let folder = match std::env::var_os("PELAGOS_GOLDEN") {
        Some(folder) => PathBuf::from(folder),
        None => repo_root().join("../shared/golden/recipe"),
    };
    assert!(folder.is_dir(), "no golden vectors in {}; set PELAGOS_GOLDEN", folder.display());
    folder
}

pub fn golden_lines(name: &str) -> Vec<Value> {
    json_lines(&golden_folder().join(name))
}

pub fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    assert!(!lines.is_empty(), "{} is empty", path.display());
    lines
}

/// The V4.1 tokenizer that set-up builds, or the file that `PELAGOS_TOKENIZER` names.
pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let tokenizer = Tokenizer::from_file(&tokenizer_file());
        Arc::new(tokenizer.unwrap_or_else(|error| panic!("no tokenizer; run set-up: {error:?}")))
    });
    Arc::clone(&TOKENIZER)
}

/// Where the V4.1 tokenizer file is.
pub fn tokenizer_file() -> PathBuf {
    match std::env::var_os("PELAGOS_TOKENIZER") {
        Some(path) => PathBuf::from(path),
        None => repo_root().join("build/tokenizer/tokenizer-v41.json"),
    }
}

pub fn vocabulary() -> Arc<dyn Vocabulary> {
    tokenizer()
}

/// Reads the `parsing` object of the vectors; absent keys are tools on, the rest off.
pub fn parsing(value: &Value) -> Parsing {
    let flag = |key: &str, absent| value[key].as_bool().unwrap_or(absent);
    Parsing {
        parse_tool_calls: flag("parse_tool_calls", true),
        starts_in_tool_calls: flag("starts_in_tool_calls", false),
        parse_json_output: flag("parse_json_output", false),
        thinking_initial_stage: match value["thinking_initial_stage"].as_str() {
            None => None,
            Some("reasoning_start") => Some(ThinkingStage::ReasoningStart),
            Some("reasoning_continuation") => Some(ThinkingStage::ReasoningContinuation),
            Some("content_continuation") => Some(ThinkingStage::ContentContinuation),
            Some(other) => panic!("unknown stage {other}"),
        },
        stop_sequences: value["stop_sequences"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|stop| stop.as_str().expect("a string").to_owned())
            .collect(),
    }
}

pub fn backend_finish(word: &Value) -> BackendFinish {
    match word.as_str() {
        Some("stop") => BackendFinish::Stop,
        Some("length") => BackendFinish::Length,
        Some("content_filter") => BackendFinish::ContentFilter,
        other => panic!("unknown finish reason {other:?}"),
    }
}

/// A chunk that owns its data.
#[derive(Clone, Debug)]
pub enum OwnedChunk {
    Ready(u32, u32, Option<String>),
    Text(String, u32),
    Tokens(Vec<u32>, Option<Vec<TokenLogprob>>),
    Finish(BackendFinish),
}

impl OwnedChunk {
    pub fn from_json(value: &Value) -> Self {
        let number = |key: &str| value[key].as_u64().unwrap_or(0) as u32;
        match value["kind"].as_str() {
            Some("ready") => OwnedChunk::Ready(
                number("prompt_tokens"),
                number("prompt_cache_hit_tokens"),
                value["system_fingerprint"].as_str().map(str::to_owned),
            ),
            Some("text") => OwnedChunk::Text(
                value["content"].as_str().expect("a string").to_owned(),
                number("token_count"),
            ),
            Some("tokens") => OwnedChunk::Tokens(
                ids(&value["token_ids"]),
                value["logprobs"].as_array().map(|list| list.iter().map(logprob).collect()),
            ),
            Some("finish") => OwnedChunk::Finish(backend_finish(&value["finish_reason"])),
            other => panic!("unknown chunk {other:?}"),
        }
    }

    pub fn as_chunk(&self) -> Chunk<'_> {
        match self {
            OwnedChunk::Ready(prompt_tokens, prompt_cache_hit_tokens, fingerprint) => {
                Chunk::Ready {
                    prompt_tokens: *prompt_tokens,
                    prompt_cache_hit_tokens: *prompt_cache_hit_tokens,
                    system_fingerprint: fingerprint.as_deref(),
                }
            }
            OwnedChunk::Text(content, token_count) => {
                Chunk::Text { content, token_count: *token_count }
            }
            OwnedChunk::Tokens(ids, logprobs) => {
                Chunk::Tokens { ids, logprobs: logprobs.as_deref() }
            }
            OwnedChunk::Finish(reason) => Chunk::Finish(*reason),
        }
    }
}

pub fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().expect("a list of ids");
    list.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn logprob(value: &Value) -> TokenLogprob {
    let number = |value: &Value| value.as_f64().expect("a number") as f32;
    TokenLogprob {
        logprob: number(&value[0]),
        top: value[1]
            .as_array()
            .expect("a list")
            .iter()
            .map(|pair| (pair[0].as_u64().expect("an id") as u32, number(&pair[1])))
            .collect(),
    }
}
