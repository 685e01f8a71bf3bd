//! No body makes conversion or rendering panic, overflow the stack or take more than linear work.
//!
//! Growth is told by output size and by counts, never by the clock.

mod golden;

use std::panic::{AssertUnwindSafe, catch_unwind};

use pelagos_codec::convert::{self, Options, view};
use pelagos_codec::types::{Error, Protocol, Request, ResponseOptions, Special, SpecialTokens};
use pelagos_codec::{images, render};
use serde_json::{Map, Value, json};

use golden::{body_of, lines, protocol_of};

const PROTOCOLS: [Protocol; 3] = [Protocol::Chat, Protocol::Responses, Protocol::Messages];

/// A small, seeded generator: the same cases on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

/// Converts, renders and views a body; what must hold of any prompt is checked on the way.
fn run(protocol: Protocol, body: &[u8], options: &Options) -> Result<Request, Error> {
    let request = convert::convert(protocol, body, options)?;
    let rendered =
        render::render(&request.conversation, request.model_version, &options.special_tokens);
    let text = &rendered.prompt.text;
    let mut end = 0;
    for &(from, to) in &rendered.prompt.specials {
        assert!(end <= from && from < to && text.get(from..to).is_some(), "{from}..{to}");
        end = to;
    }
    let image = options.special_tokens.get(Special::Image);
    let is_placeholder = |&&(from, to): &&(usize, usize)| &text[from..to] == image;
    let num_placeholders = rendered.prompt.specials.iter().filter(is_placeholder).count();
    assert_eq!(num_placeholders, rendered.images.len(), "one placeholder for each image");
    view::rendered_request(&request, &rendered);
    Ok(request)
}

fn golden_requests() -> Vec<(Protocol, Options, Value)> {
    let mut requests = Vec::new();
    for (file, protocol) in [
        ("render_chat.jsonl", Some(Protocol::Chat)),
        ("render_responses.jsonl", Some(Protocol::Responses)),
        ("render_messages.jsonl", Some(Protocol::Messages)),
        ("errors.jsonl", None),
    ] {
        for case in lines(file) {
            let options = Options::from_json(&case["options"]).expect("known options");
            let protocol = protocol
                .unwrap_or_else(|| protocol_of(case["protocol"].as_str().expect("protocol")));
            requests.push((protocol, options, case["request"].clone()));
        }
    }
    requests
}

/// The node that the `at`-th visit reaches, counting in document order.
fn node<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| node(item, at)),
        Value::Object(map) => map.values_mut().find_map(|item| node(item, at)),
        _ => None,
    }
}

fn num_nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(num_nodes).sum(),
        Value::Object(map) => map.values().map(num_nodes).sum(),
        _ => 0,
    }
}

fn odd_value(random: &mut Random) -> Value {
    let odd = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("\u{0}\u{fffd}𝔘"),
        json!("x-anthropic-billing-header é\nYou are"),
        json!("data:image/png;base64,QQ"),
        json!("http"),
        json!([]),
        json!([null]),
        json!({}),
        json!({"type": "object", "$ref": "#"}),
        json!({"type": "text", "text": "<｜image｜><｜ref｜>"}),
        json!({"type": "tool_result", "tool_use_id": "a", "content": []}),
        json!({"role": "tool", "tool_call_id": "a", "content": ""}),
    ];
    odd[random.below(odd.len())].clone()
}

fn mutate(value: &mut Value, random: &mut Random) {
    let mut at = random.below(num_nodes(value));
    let Some(target) = node(value, &mut at) else { return };
    match (random.below(4), target) {
        (0, Value::Array(items)) if !items.is_empty() => {
            let copy = items[random.below(items.len())].clone();
            items.insert(random.below(items.len()), copy);
        }
        (1, Value::Array(items)) if !items.is_empty() => {
            items.remove(random.below(items.len()));
        }
        (0 | 1, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(random.below(map.len())).cloned().unwrap_or_default();
            map.shift_remove(&key);
        }
        (_, target) => *target = odd_value(random),
    }
}

#[test]
fn mutated_requests_are_answered_or_refused_never_a_panic() {
    let requests = golden_requests();
    let mut random = Random(42);
    let mut num_accepted = 0;
    for round in 0..6_000 {
        let (protocol, options, request) = &requests[random.below(requests.len())];
        let mut request = request.clone();
        for _ in 0..=random.below(3) {
            mutate(&mut request, &mut random);
        }
        let body = body_of(&request);
        // Now and then the body of another API: unknown shapes everywhere.
        let protocol = if random.below(20) == 0 { PROTOCOLS[random.below(3)] } else { *protocol };
        let outcome = catch_unwind(AssertUnwindSafe(|| run(protocol, &body, options)));
        let outcome =
            outcome.unwrap_or_else(|_| panic!("round {round} panics: {protocol:?} {request}"));
        num_accepted += usize::from(outcome.is_ok());
    }
    assert!(num_accepted > 200, "mutations must leave some requests whole, got {num_accepted}");
}

#[test]
fn mutated_bytes_are_answered_or_refused_never_a_panic() {
    let requests = golden_requests();
    let mut random = Random(7);
    for round in 0..6_000 {
        let (protocol, options, request) = &requests[random.below(requests.len())];
        let mut body = body_of(request);
        for _ in 0..=random.below(4) {
            if body.is_empty() {
                break;
            }
            let at = random.below(body.len());
            match random.below(3) {
                0 => body[at] = random.below(256) as u8,
                1 => body.truncate(at),
                _ => {
                    let piece = body[at..(at + random.below(40)).min(body.len())].to_vec();
                    body.splice(at..at, piece);
                }
            }
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| run(*protocol, &body, options)));
        assert!(outcome.is_ok(), "round {round} panics: {protocol:?} {body:?}");
    }
}

/// Bodies that once were trouble, or that look like it. One file for each; the name's first word
/// is the API. Add a file for every body that a fuzzer finds.
#[test]
fn every_body_of_the_corpus_is_answered_or_refused() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/convert");
    let mut num_files = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
        let path = entry.expect("a readable entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let protocol = protocol_of(name.split(['-', '.']).next().unwrap_or_default());
        let body = std::fs::read(&path).expect("a readable file");
        let outcome = catch_unwind(|| run(protocol, &body, &Options::default()));
        assert!(outcome.is_ok(), "{name} panics");
        num_files += 1;
    }
    assert!(num_files >= 10, "the corpus holds {num_files} files");
}

#[test]
fn nesting_without_bound_is_refused_on_a_small_stack() {
    let deep_array = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let deep_object = format!("{}1{}", "{\"a\":".repeat(200_000), "}".repeat(200_000));
    let at_limit = format!("{}{}", "[".repeat(127), "]".repeat(127));
    let thread = std::thread::Builder::new().stack_size(512 << 10).spawn(move || {
        for protocol in PROTOCOLS {
            for body in [&deep_array, &deep_object, &at_limit] {
                let error = convert::convert(protocol, body.as_bytes(), &Options::default())
                    .expect_err("no request looks like this");
                assert_eq!(error.status, 400);
            }
        }
        // Arguments are a string of the request, parsed when the prompt is written.
        let request = json!({"model": "DeepSeek-V4.1-Flash", "messages": [
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
                "function": {"name": "f", "arguments": deep_object}}]},
            {"role": "tool", "tool_call_id": "a", "content": "r"},
        ]});
        let request =
            convert::convert(Protocol::Chat, request.to_string().as_bytes(), &Options::default())
                .expect("arguments are not validated");
        let rendered =
            render::render(&request.conversation, request.model_version, &SpecialTokens::default());
        assert!(rendered.prompt.text.contains("parameter name=\"arguments\" string=\"true\">{\"a"));
    });
    thread.expect("a thread").join().expect("no overflow");
}

#[test]
fn schemas_as_deep_as_json_allows_are_judged_on_a_small_stack() {
    for (key, strict) in [("items", true), ("not", false), ("properties", false)] {
        let mut schema = json!({"type": "string"});
        while num_levels(&schema) < 110 {
            schema = match key {
                "items" => json!({"type": "array", "items": schema}),
                "not" => json!({"not": schema}),
                _ => json!({"type": "object", "properties": {"a": schema}}),
            };
        }
        let parameters = json!({"type": "object", "properties": {"a": schema}});
        let body = json!({"model": "DeepSeek-V4.1-Flash",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {
                "name": "f", "parameters": parameters, "strict": strict}}]})
        .to_string();
        let thread = std::thread::Builder::new()
            .stack_size(1 << 20)
            .spawn(move || run(Protocol::Chat, body.as_bytes(), &Options::default()).map(|_| ()));
        let outcome = thread.expect("a thread").join().expect("no overflow");
        assert_eq!(outcome, Ok(()), "{key}");
    }
}

fn num_levels(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(num_levels).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(num_levels).max().unwrap_or(0),
        _ => 0,
    }
}

/// Names of n tools from n equal namespaces: every suffix is tried once, not once for each tool.
#[test]
fn many_equal_namespaces_get_distinct_names() {
    const NUM: usize = 15_000;
    let namespace = json!({"type": "namespace", "name": "n", "tools": [
        {"type": "function", "name": "f"},
    ]});
    let body = json!({"model": "DeepSeek-V4.1-Flash", "input": "x", "tools": vec![namespace; NUM]});
    let body = body.to_string();
    let request = run(Protocol::Responses, body.as_bytes(), &Options::default()).expect("converts");
    let ResponseOptions::Responses { namespaces: Some(map), .. } = request.response else {
        panic!("a Responses request has a map");
    };
    assert_eq!(map.len(), NUM);
    assert_eq!(map[0].0, "n::f");
    assert_eq!(map[NUM - 1].0, format!("n::f_{}", NUM - 1));
}

#[test]
fn thousands_of_parallel_calls_convert_and_sort() {
    const NUM: usize = 8_000;
    let id = |number: usize| format!("call_{:05}", (number * 7_919) % NUM);
    let calls: Vec<Value> = (0..NUM)
        .map(|number| {
            json!({"id": id(number), "type": "function",
                "function": {"name": "f", "arguments": "{}"}})
        })
        .collect();
    let mut messages = vec![json!({"role": "assistant", "tool_calls": calls})];
    for number in (0..NUM).rev() {
        messages.push(json!({"role": "tool", "tool_call_id": id(number), "content": id(number)}));
    }
    for model in ["DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"] {
        let body = json!({"model": model, "messages": messages}).to_string();
        let request = run(Protocol::Chat, body.as_bytes(), &Options::default()).expect("converts");
        let rendered =
            render::render(&request.conversation, request.model_version, &SpecialTokens::default());
        let results: Vec<&str> = rendered
            .prompt
            .text
            .split("<tool_result>")
            .skip(1)
            .filter_map(|rest| rest.split("</tool_result>").next())
            .collect();
        let mut expected: Vec<String> = (0..NUM).map(id).collect();
        if model == "DeepSeek-V4-Pro" {
            expected.sort();
        }
        assert_eq!(results, expected, "{model}");
    }
}

/// The spelling of every token in every text field of every API leaves no special range but the
/// template's own; grounding in assistant text is the one exception.
#[test]
fn no_text_field_can_inject_a_control_token() {
    let tokens = SpecialTokens::default();
    let baseline = |marker: &str| -> Vec<Vec<String>> {
        injected_bodies(marker)
            .into_iter()
            .map(|(protocol, body)| special_texts(protocol, &body, &tokens))
            .collect()
    };
    let expected = baseline("plain words");
    assert!(expected.iter().all(|texts| texts.len() > 10), "the bodies render control tokens");
    for spelling in &tokens.0 {
        let is_grounding = tokens.0[Special::Ref as usize..].contains(spelling);
        for (body, (actual, expected)) in
            baseline(spelling).into_iter().zip(expected.iter().cloned()).enumerate()
        {
            let actual: Vec<String> = if is_grounding {
                actual.into_iter().filter(|text| text != spelling).collect()
            } else {
                actual
            };
            assert_eq!(actual, expected, "{spelling} in body {body}");
        }
    }
}

fn special_texts(protocol: Protocol, body: &Value, tokens: &SpecialTokens) -> Vec<String> {
    let request = convert::convert(protocol, body.to_string().as_bytes(), &Options::default())
        .unwrap_or_else(|error| panic!("{error}: {body}"));
    let rendered = render::render(&request.conversation, request.model_version, tokens);
    let text = &rendered.prompt.text;
    rendered.prompt.specials.iter().map(|&(from, to)| text[from..to].to_owned()).collect()
}

/// Bodies with `marker` in every text field that reaches the prompt, for both templates.
fn injected_bodies(marker: &str) -> Vec<(Protocol, Value)> {
    let schema = json!({"type": "object", "description": marker, "properties": {
        marker: {"type": "string", "description": marker, "enum": [marker]},
    }});
    let mut object = Map::new();
    object.insert(marker.to_owned(), json!(marker));
    object.insert("list".to_owned(), json!([marker, {marker: marker}]));
    let arguments = Value::Object(object);
    let mut bodies = Vec::new();
    for model in ["DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro"] {
        let blocks = json!([{"type": "text", "text": marker}, {"type": "text", "text": marker}]);
        bodies.push((
            Protocol::Chat,
            json!({
                "model": model,
                "messages": [
                    {"role": "system", "content": marker},
                    {"role": "user", "content": blocks},
                    {"role": "assistant", "content": marker, "reasoning_content": marker,
                        "tool_calls": [
                            {"id": marker, "type": "function",
                                "function": {"name": marker, "arguments": arguments.to_string()}},
                            {"id": "b", "type": "function",
                                "function": {"name": "g", "arguments": marker}},
                        ]},
                    {"role": "tool", "tool_call_id": marker, "content": marker},
                    {"role": "tool", "tool_call_id": "b", "content": blocks},
                    {"role": "latest_reminder", "content": marker},
                    {"role": "user", "content": marker},
                ],
                "tools": [{"type": "function", "function": {
                    "name": "f", "description": marker, "parameters": schema}}],
                "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            }),
        ));
        bodies.push((
            Protocol::Responses,
            json!({
                "model": model,
                "instructions": marker,
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": marker}]},
                    {"role": "developer", "content": marker},
                    {"type": "reasoning", "content": [{"text": marker}]},
                    {"role": "assistant", "content": [{"type": "output_text", "text": marker}]},
                    {"type": "function_call", "call_id": marker, "name": marker,
                        "namespace": marker, "arguments": arguments.to_string()},
                    {"type": "function_call_output", "call_id": marker, "output": marker},
                    {"type": "custom_tool_call", "call_id": "c", "name": marker, "input": marker},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": marker},
                    {"type": "tool_search_call", "call_id": "t", "arguments": arguments},
                    {"type": "tool_search_output", "call_id": "t", "tools": [
                        {"type": "namespace", "name": "n", "description": marker, "tools": [
                            {"type": "function", "name": "x", "description": marker,
                                "parameters": schema},
                        ]},
                    ]},
                    {"role": "user", "content": marker},
                ],
                "tools": [{"type": "function", "name": "f", "description": marker,
                    "parameters": schema}],
            }),
        ));
        bodies.push((
            Protocol::Messages,
            json!({
                "model": model,
                "system": [{"type": "text", "text": marker}],
                "messages": [
                    {"role": "user", "content": blocks},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": marker},
                        {"type": "text", "text": marker},
                        {"type": "tool_use", "id": marker, "name": marker, "input": arguments},
                    ]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": marker, "content": blocks},
                        {"type": "text", "text": marker},
                        {"type": "document", "source": {"media_type": marker}},
                    ]},
                    {"role": "system", "content": marker},
                    {"role": "user", "content": marker},
                ],
                "tools": [{"name": "f", "description": marker, "input_schema": schema}],
            }),
        ));
    }
    bodies
}

#[test]
fn image_headers_tell_the_size_without_a_panic_on_any_cut() {
    let png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x02\x80\0\0\x01\xe0\x08\x02\0\0\0";
    let gif = b"GIF89a\x80\x02\xe0\x01\xf7\0\0";
    let lossy = b"RIFF\x24\0\0\0WEBPVP8 \x18\0\0\0\x30\x01\0\x9d\x01\x2a\x80\x02\xe0\x01";
    let lossless = b"RIFF\x24\0\0\0WEBPVP8L\x18\0\0\0\x2f\x7f\xc2\x77\0";
    let extended = b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0\x7f\x02\0\xdf\x01\0";
    let jpeg = b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0\xff\xff\xdb\0\x04ab\
                 \xff\xc2\0\x11\x08\x01\xe0\x02\x80\x03";
    let files: [&[u8]; 6] = [png, gif, lossy, lossless, extended, jpeg];
    for bytes in files {
        assert_eq!(images::dimensions(bytes), Some((640, 480)), "{bytes:?}");
        for end in 0..bytes.len() {
            images::dimensions(&bytes[..end]);
        }
        let mut random = Random(bytes.len() as u64);
        for _ in 0..2_000 {
            let mut changed = bytes.to_vec();
            changed[random.below(bytes.len())] = random.below(256) as u8;
            images::dimensions(&changed);
        }
    }
    assert_eq!(images::dimensions(b"\xff\xd8\xff\xd9"), None);
    assert_eq!(images::dimensions(b"BM"), None);
}

#[test]
fn image_sizes_at_every_extreme_fit_or_are_refused() {
    for width in [0, 1, 2, 13, 14, 41, 42, 543, 8_192, 65_535, u32::MAX] {
        for height in [0, 1, 3, 15, 43, 544, 8_191, 70_000, u32::MAX] {
            if let Ok(tokens) = images::num_tokens(width, height, images::Limits::default()) {
                assert!((2..=1_024).contains(&tokens), "{width}×{height}: {tokens} tokens");
            }
            for detail in [pelagos_codec::types::Detail::Low, pelagos_codec::types::Detail::High] {
                if let Ok((wide, high)) =
                    images::target_size(width, height, detail, images::Limits::default())
                {
                    assert!(wide.max(high) <= 16_383, "{width}×{height}: {wide}×{high}");
                }
            }
        }
    }
}

#[test]
fn a_model_with_a_smaller_vision_encoder_counts_its_own_tokens() {
    let small = images::Limits { max_tokens: 64, min_pixels: 84 * 84 };
    // Two by two cells: a newline token a row, one at the start and one at the end.
    assert_eq!(images::num_tokens(84, 84, small).ok(), Some(8));
    assert_eq!(images::num_tokens(84, 84, images::Limits::default()).ok(), Some(184));
    for (width, height) in [(1, 1), (2000, 1000), (50, 4000), (8000, 8000)] {
        let num_tokens = images::num_tokens(width, height, small);
        assert!(num_tokens.is_ok_and(|num| num <= 64), "{width} x {height}");
    }
}
