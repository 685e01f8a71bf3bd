//! The stream vectors: events of every chunk, their grouping, the tail, the error, the response.

mod support;

use std::path::Path;
use std::sync::Arc;

use pelagos_codec::convert::{Options, convert};
use pelagos_codec::stream::{
    Chunk, EventBuffer, FinishReason, Op, Processor, StageTable, Stream, StreamConfig,
};
use pelagos_codec::types::{Protocol, SpecialTokens};
use serde_json::{Value, json};

/// The parser's operations in the words of `stream_parser.jsonl`.
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
                _ => "stop",
            };
            json!(["finish", word, usage.completion_tokens])
        }
    })
}

#[test]
fn parser_vectors_pass_for_every_cut() {
    let mut failures = Vec::new();
    let mut num_runs = 0;
    for line in support::golden_lines("stream_parser.jsonl") {
        let parsing = support::parsing(&line["parsing"]);
        let table = Arc::new(StageTable::new(&parsing, &SpecialTokens::default()));
        let finish = Chunk::Finish(support::backend_finish(&line["finish"]));
        for run in line["runs"].as_array().expect("runs") {
            num_runs += 1;
            let vocabulary = (line["kind"] == "tokens").then(support::vocabulary);
            let is_thinking = parsing.thinking_initial_stage.is_some();
            let mut processor =
                Processor::new(Arc::clone(&table), vocabulary, is_thinking, true, false);
            let mut out: Vec<Value> = Vec::new();
            let mut push = |chunk: Chunk<'_>, out: &mut Vec<Value>| {
                if processor.is_over() {
                    return;
                }
                let mut ops = Vec::new();
                processor.push(chunk, &mut |op: Op<'_>| ops.extend(op_json(op))).expect("no error");
                out.push(Value::Array(ops));
            };
            for chunk in run["chunks"].as_array().expect("chunks") {
                match chunk.as_str() {
                    Some(content) => push(Chunk::Text { content, token_count: 1 }, &mut out),
                    None => {
                        let ids = support::ids(chunk);
                        push(Chunk::Tokens { ids: &ids, logprobs: None }, &mut out);
                    }
                }
            }
            push(finish, &mut out);
            if Value::Array(out.clone()) != run["out"] {
                failures.push(format!(
                    "{} {}\n  chunks {}\n  got    {}\n  wanted {}",
                    line["id"],
                    line["parsing"],
                    run["chunks"],
                    Value::Array(out),
                    run["out"]
                ));
            }
        }
    }
    let shown = failures.iter().take(5).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {num_runs} runs failed:\n{shown}", failures.len());
}

/// Sets times to zero and call ids to their fixed shape, as the vectors have them.
fn normalise(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, item) in map.iter_mut() {
                let is_time = matches!(key.as_str(), "created" | "created_at" | "completed_at");
                match item {
                    Value::Number(_) if is_time => *item = json!(0),
                    Value::String(id) if matches!(key.as_str(), "id" | "call_id") => {
                        *id = without_random(id);
                    }
                    _ => normalise(item),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(normalise),
        _ => {}
    }
}

fn without_random(id: &str) -> String {
    let random = id.len().saturating_sub(24);
    match id.starts_with("call_") && id.is_ascii() && random >= "call_00_".len() {
        true => format!("{}RANDOM", &id[..random]),
        false => id.to_owned(),
    }
}

/// Reads one event back. Its bytes must be the compact spelling of what they say.
fn read_event(name: Option<&'static str>, bytes: &[u8]) -> Value {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let mut value: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(value.to_string(), text, "compact, shortest numbers");
    assert_eq!(name, value["type"].as_str().filter(|_| name.is_some()), "the SSE name");
    normalise(&mut value);
    value
}

fn take_events(out: &mut EventBuffer) -> Value {
    let events = out.iter().map(|(name, bytes)| read_event(name, bytes)).collect();
    out.clear();
    Value::Array(events)
}

/// Compares through text, because equality of objects does not see the order of keys.
fn expect(what: &str, got: &Value, wanted: &Value, differences: &mut Vec<String>) {
    let (got, wanted) = (got.to_string(), wanted.to_string());
    if got != wanted {
        let at = got.bytes().zip(wanted.bytes()).take_while(|(a, b)| a == b).count();
        let from = (0..=at.saturating_sub(80))
            .rev()
            .find(|&i| got.is_char_boundary(i) && wanted.is_char_boundary(i))
            .unwrap_or(0);
        let cut = |text: &str| text[from..].chars().take(240).collect::<String>();
        differences.push(format!(
            "  {what}\n    got    …{}\n    wanted …{}",
            cut(&got),
            cut(&wanted)
        ));
    }
}

fn check_line(protocol: Protocol, line: &Value) -> Vec<String> {
    let body = line["request"].to_string();
    let request = convert(protocol, body.as_bytes(), &Options::default()).expect("it converts");
    let config = StreamConfig {
        response_id: line["response_id"].as_str().expect("an id").to_owned(),
        model: line["model"].as_str().expect("a model").to_owned(),
        created: 1_700_000_000,
        call_id_seed: 11,
        writes_events: Some(true),
        keeps_response: Some(true),
        ..StreamConfig::default()
    };
    let vocabulary = (line["tokenizer"] == true).then(support::vocabulary);
    let mut stream = Stream::new(&request, &config, vocabulary);
    let mut out = EventBuffer::default();
    let mut events = Vec::new();
    let mut error = Value::Null;
    for chunk in line["chunks"].as_array().expect("chunks") {
        if stream.is_over() {
            break;
        }
        let chunk = support::OwnedChunk::from_json(chunk);
        if let Err(failed) = stream.push(chunk.as_chunk(), 1_700_000_009, &mut out) {
            error = json!(failed.message);
            break;
        }
        events.push(take_events(&mut out));
    }
    stream.close(1_700_000_009, &mut out);
    let tail = take_events(&mut out);
    let mut differences = Vec::new();
    let wanted = line["events"].as_array().expect("events");
    expect("number of pushes", &json!(events.len()), &json!(wanted.len()), &mut differences);
    for (index, (got, wanted)) in events.iter().zip(wanted).enumerate() {
        expect(&format!("events of chunk {index}"), got, wanted, &mut differences);
    }
    expect("tail", &tail, &line["tail"], &mut differences);
    expect("error", &error, &line["error"], &mut differences);
    expect("final", &read_event(None, &stream.folded()), &line["final"], &mut differences);
    differences
}

/// Checks the golden lines of a protocol and the corners kept in the crate.
fn check_protocol(protocol: Protocol, word: &str) {
    let name = format!("stream_{word}.jsonl");
    let corners = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/stream").join(&name);
    let mut lines = support::golden_lines(&name);
    lines.extend(support::json_lines(&corners));
    let mut failures = Vec::new();
    for line in &lines {
        let differences = check_line(protocol, line);
        if !differences.is_empty() {
            let shown = differences.iter().take(3).cloned().collect::<Vec<_>>().join("\n");
            failures.push(format!("{} {} {}\n{shown}", line["id"], line["scenario"], line["mode"]));
        }
    }
    let shown = failures.iter().take(6).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} lines failed:\n{shown}", failures.len(), lines.len());
}

#[test]
fn chat_vectors_pass() {
    check_protocol(Protocol::Chat, "chat");
}

#[test]
fn responses_vectors_pass() {
    check_protocol(Protocol::Responses, "responses");
}

#[test]
fn messages_vectors_pass() {
    check_protocol(Protocol::Messages, "messages");
}
