//! Runs streams to their end, and draws random ones from a seed.

use pelagos_codec::stream::{BackendFinish, EventBuffer, Stream, StreamConfig};
use pelagos_codec::types::{Parsing, Protocol, ResponseOptions};
use serde_json::{Map, Value, json};

use super::{OwnedChunk, tokenizer, vocabulary};

pub const PROTOCOLS: [Protocol; 3] = [Protocol::Chat, Protocol::Responses, Protocol::Messages];

/// A small generator with a fixed course (splitmix64): a failing case is its seed.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// What a stream gave: events of every chunk and of the end, the error, the complete response.
pub struct Outcome {
    pub events: Vec<Vec<Value>>,
    pub sse: String,
    pub error: Option<String>,
    pub folded: Value,
}

impl Outcome {
    pub fn all(&self) -> impl Iterator<Item = &Value> {
        self.events.iter().flatten()
    }
}

pub fn response_options(protocol: Protocol) -> ResponseOptions {
    match protocol {
        Protocol::Chat => ResponseOptions::Chat { stream: true, include_usage: false },
        Protocol::Messages => ResponseOptions::Messages { stream: true },
        Protocol::Responses => ResponseOptions::Responses {
            stream: true,
            echo: Map::new(),
            namespaces: None,
            custom_tools: vec!["apply_patch".to_owned()],
            client_tool_search: true,
        },
    }
}

/// A stream that both writes its events and keeps its response.
pub fn config() -> StreamConfig {
    StreamConfig {
        response_id: "r1".to_owned(),
        model: "m".to_owned(),
        call_id_seed: 5,
        writes_events: Some(true),
        keeps_response: Some(true),
        ..StreamConfig::default()
    }
}

pub fn open(protocol: Protocol, parsing: &Parsing, config: &StreamConfig) -> Stream {
    Stream::from_parts(parsing, &response_options(protocol), config, Some(vocabulary()))
}

/// Pushes the chunks and closes the input.
pub fn run(mut stream: Stream, chunks: &[OwnedChunk]) -> Outcome {
    let mut out = EventBuffer::default();
    let mut outcome =
        Outcome { events: Vec::new(), sse: String::new(), error: None, folded: Value::Null };
    let take = |out: &mut EventBuffer, outcome: &mut Outcome| {
        outcome.events.push(
            out.iter().map(|(_, json)| serde_json::from_slice(json).expect("JSON")).collect(),
        );
        outcome.sse.push_str(std::str::from_utf8(out.sse()).expect("UTF-8"));
        out.clear();
    };
    for chunk in chunks {
        if stream.is_over() {
            break;
        }
        if let Err(error) = stream.push(chunk.as_chunk(), 1, &mut out) {
            outcome.error = Some(error.message);
        }
        take(&mut out, &mut outcome);
    }
    stream.close(1, &mut out);
    take(&mut out, &mut outcome);
    outcome.folded = serde_json::from_slice(&stream.folded()).expect("JSON");
    outcome
}

/// Cuts text at random character boundaries; the tokens are all counted on the first chunk.
pub fn cut_text(rng: &mut Rng, text: &str, finish: BackendFinish) -> Vec<OwnedChunk> {
    let longest = *rng.pick(&[1, 2, 5, 20, 1000]);
    let mut chunks = vec![OwnedChunk::Text(String::new(), 100)];
    let mut characters = text.chars().peekable();
    while characters.peek().is_some() {
        let length = 1 + rng.below(longest);
        chunks.push(OwnedChunk::Text(characters.by_ref().take(length).collect(), 0));
    }
    chunks.push(OwnedChunk::Finish(finish));
    chunks
}

/// Cuts ids at random places.
pub fn cut_ids(rng: &mut Rng, ids: &[u32], finish: BackendFinish) -> Vec<OwnedChunk> {
    let longest = *rng.pick(&[1, 2, 5, 20, 1000]);
    let mut chunks = Vec::new();
    let mut rest = ids;
    while !rest.is_empty() {
        let (head, tail) = rest.split_at((1 + rng.below(longest)).min(rest.len()));
        chunks.push(OwnedChunk::Tokens(head.to_vec(), None));
        rest = tail;
    }
    chunks.push(OwnedChunk::Finish(finish));
    chunks
}

/// Encodes model output: the added tokens it uses by id, all else plain.
pub fn model_ids(text: &str) -> Vec<u32> {
    const SPECIALS: [&str; 4] = ["｜DSML｜", "</think>", "<think>", "<｜end▁of▁sentence｜>"];
    let tokenizer = tokenizer();
    let mut ids = Vec::new();
    let mut rest = text;
    loop {
        let next = SPECIALS
            .iter()
            .filter_map(|special| rest.find(special).map(|at| (at, *special)))
            .min_by_key(|(at, _)| *at);
        let Some((at, special)) = next else { break };
        ids.extend(tokenizer.encode_plain(&rest[..at]));
        ids.push(tokenizer.added_id(special).expect("a V4.1 vocabulary"));
        rest = &rest[at + special.len()..];
    }
    ids.extend(tokenizer.encode_plain(rest));
    ids
}

/// One call in the model's markup, with its parameters as (name, is a string, value).
pub fn call(name: &str, parameters: &[(&str, bool, &str)]) -> String {
    let parameters: Vec<String> = parameters
        .iter()
        .map(|(key, is_string, value)| {
            format!(
                "<｜DSML｜ parameter name=\"{key}\" string=\"{is_string}\">{value}</｜DSML｜ parameter>"
            )
        })
        .collect();
    format!("<｜DSML｜ invoke name=\"{name}\">\n{}\n</｜DSML｜ invoke>", parameters.join("\n"))
}

pub fn calls(invokes: &[String]) -> String {
    format!("\n\n<｜DSML｜ calls>\n{}\n</｜DSML｜ calls>", invokes.join("\n"))
}

/// Content and reasoning of a complete response, whichever protocol it is in.
pub fn visible(protocol: Protocol, folded: &Value) -> (String, String) {
    let join = |items: &Value, kind: &str, path: &[&str]| {
        let mut text = String::new();
        for item in items.as_array().into_iter().flatten().filter(|item| item["type"] == kind) {
            let found = path.iter().fold(item, |value, key| match key.parse::<usize>() {
                Ok(index) => &value[index],
                Err(_) => &value[*key],
            });
            text.push_str(found.as_str().unwrap_or_default());
        }
        text
    };
    match protocol {
        Protocol::Chat => {
            let message = &folded["choices"][0]["message"];
            let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
            (text("content"), text("reasoning_content"))
        }
        Protocol::Messages => {
            let content = &folded["content"];
            (join(content, "text", &["text"]), join(content, "thinking", &["thinking"]))
        }
        Protocol::Responses => {
            let output = &folded["output"];
            let path = ["content", "0", "text"];
            (join(output, "message", &path), join(output, "reasoning", &path))
        }
    }
}

/// The calls of a complete response as (id, name, arguments), whichever protocol it is in.
pub fn folded_calls(protocol: Protocol, folded: &Value) -> Vec<(String, String, Value)> {
    let parse = |text: &Value| {
        let text = text.as_str().unwrap_or_default();
        serde_json::from_str(text).unwrap_or_else(|_| json!(text))
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (list, kind) = match protocol {
        Protocol::Chat => (&folded["choices"][0]["message"]["tool_calls"], "function"),
        Protocol::Messages => (&folded["content"], "tool_use"),
        Protocol::Responses => (&folded["output"], "function_call"),
    };
    list.as_array()
        .into_iter()
        .flatten()
        .filter(|item| item["type"] == kind)
        .map(|item| match protocol {
            Protocol::Chat => {
                let function = &item["function"];
                (text(&item["id"]), text(&function["name"]), parse(&function["arguments"]))
            }
            Protocol::Messages => (text(&item["id"]), text(&item["name"]), item["input"].clone()),
            Protocol::Responses => {
                (text(&item["call_id"]), text(&item["name"]), parse(&item["arguments"]))
            }
        })
        .collect()
}
