//! Prints the time of convert + render: 100 turns and 20 tools, per API, and of a 30 MB body.
//!
//! `cargo bench --bench convert`. The target is 1 ms for the conversation (recipe.md, section 16).

use std::hint::black_box;
use std::time::{Duration, Instant};

use pelagos_codec::convert::{self, Options};
use pelagos_codec::render;
use pelagos_codec::types::Protocol;
use serde_json::{Value, json};

const NUM_TURNS: usize = 100;
const NUM_TOOLS: usize = 20;

fn main() {
    let options = Options::default();
    for (name, protocol, body) in [
        ("chat", Protocol::Chat, chat()),
        ("responses", Protocol::Responses, responses()),
        ("messages", Protocol::Messages, messages()),
    ] {
        let body = body.to_string();
        let (convert_us, total_us) = measure(protocol, body.as_bytes(), &options, 400);
        println!(
            "{name}: {} KB, {NUM_TURNS} turns, {NUM_TOOLS} tools: convert {convert_us:.0} µs, \
             convert + render {total_us:.0} µs (median)",
            body.len() / 1024
        );
    }
    let image = format!("data:image/png;base64,{}", "QUJD".repeat(30 << 18));
    let body = json!({"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": image}},
    ]}]})
    .to_string();
    let (convert_us, total_us) = measure(Protocol::Chat, body.as_bytes(), &options, 5);
    println!(
        "chat: one image, {} MB: convert {:.1} ms, convert + render {:.1} ms (median)",
        body.len() >> 20,
        convert_us / 1000.0,
        total_us / 1000.0
    );
}

/// Median microseconds of convert, and of convert + render.
fn measure(protocol: Protocol, body: &[u8], options: &Options, num_runs: usize) -> (f64, f64) {
    let (mut converts, mut totals) = (Vec::new(), Vec::new());
    for _ in 0..num_runs {
        let start = Instant::now();
        let request = convert::convert(protocol, black_box(body), options).expect("converts");
        converts.push(start.elapsed());
        let version = request.model_version;
        black_box(render::render(&request.conversation, version, &options.special_tokens));
        totals.push(start.elapsed());
    }
    (median_us(converts), median_us(totals))
}

fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn parameters(number: usize) -> Value {
    json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": format!("Path of the file, case {number}.")},
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
            "mode": {"type": "string", "enum": ["read", "write", "append"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
        },
        "required": ["path", "mode"],
        "additionalProperties": false,
    })
}

fn text(number: usize) -> String {
    format!("Turn {number}: please look at the second file and say what changed since then. ")
        .repeat(3)
}

fn arguments(number: usize) -> Value {
    json!({"path": format!("src/part_{number}.rs"), "limit": number, "mode": "read", "tags": ["a"]})
}

fn chat() -> Value {
    let mut messages = vec![json!({"role": "system", "content": text(0)})];
    for turn in 0..NUM_TURNS {
        let (id, arguments) = (format!("call_{turn}"), arguments(turn).to_string());
        messages.push(json!({"role": "user", "content": text(turn)}));
        messages.push(json!({
            "role": "assistant", "content": text(turn), "reasoning_content": text(turn),
            "tool_calls": [{"id": id, "type": "function", "function": {
                "name": format!("tool_{}", turn % NUM_TOOLS), "arguments": arguments,
            }}],
        }));
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": text(turn)}));
    }
    let tool = |number| {
        json!({"type": "function", "function": {
            "name": format!("tool_{number}"), "description": text(number),
            "parameters": parameters(number),
        }})
    };
    let tools: Vec<Value> = (0..NUM_TOOLS).map(tool).collect();
    json!({"model": "DeepSeek-V4.1-Flash", "messages": messages, "tools": tools})
}

fn responses() -> Value {
    let mut input = Vec::new();
    for turn in 0..NUM_TURNS {
        let (id, arguments) = (format!("call_{turn}"), arguments(turn).to_string());
        input.extend([
            json!({"role": "user", "content": [{"type": "input_text", "text": text(turn)}]}),
            json!({"type": "reasoning", "content": [
                {"type": "reasoning_text", "text": text(turn)},
            ]}),
            json!({"role": "assistant", "content": text(turn)}),
            json!({
                "type": "function_call", "call_id": id, "arguments": arguments,
                "name": format!("tool_{}", turn % NUM_TOOLS),
            }),
            json!({"type": "function_call_output", "call_id": id, "output": text(turn)}),
        ]);
    }
    let tool = |number| {
        json!({
            "type": "function", "name": format!("tool_{number}"), "description": text(number),
            "parameters": parameters(number),
        })
    };
    let tools: Vec<Value> = (0..NUM_TOOLS).map(tool).collect();
    json!({"model": "DeepSeek-V4.1-Flash", "input": input, "instructions": text(0), "tools": tools})
}

fn messages() -> Value {
    let mut messages = Vec::new();
    for turn in 0..NUM_TURNS {
        let id = format!("call_{turn}");
        messages.push(json!({"role": "user", "content": [{"type": "text", "text": text(turn)}]}));
        messages.push(json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": text(turn)},
            {"type": "text", "text": text(turn)},
            {
                "type": "tool_use", "id": id, "name": format!("tool_{}", turn % NUM_TOOLS),
                "input": arguments(turn),
            },
        ]}));
        messages.push(json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": id, "content": text(turn)},
        ]}));
    }
    let tool = |number| {
        json!({
            "name": format!("tool_{number}"), "description": text(number),
            "input_schema": parameters(number),
        })
    };
    let tools: Vec<Value> = (0..NUM_TOOLS).map(tool).collect();
    json!({
        "model": "DeepSeek-V4.1-Flash", "messages": messages, "system": text(0), "tools": tools,
        "max_tokens": 1000,
    })
}
