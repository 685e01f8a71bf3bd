//! Properties of streams that hold for any cut of any output: recipe.md, sections 13 to 15.

mod support;

use std::time::Duration;

use pelagos_codec::stream::batch::{BatchOutput, StreamTable};
use pelagos_codec::stream::{
    BackendFinish, Chunk, EventBuffer, Failure, StreamConfig, TokenLogprob,
};
use pelagos_codec::types::{Parsing, Protocol, ThinkingStage};
use serde_json::{Value, json};
use support::OwnedChunk;
use support::streams::{
    self, Outcome, PROTOCOLS, Rng, call, calls, config, cut_ids, cut_text, model_ids, open, run,
};

const STAGES: [Option<ThinkingStage>; 4] = [
    None,
    Some(ThinkingStage::ReasoningStart),
    Some(ThinkingStage::ReasoningContinuation),
    Some(ThinkingStage::ContentContinuation),
];

const FRAGMENTS: &[&str] = &[
    "plain words ",
    "\n",
    "\n\n",
    "<",
    "</",
    "</th",
    "你好",
    "🤭",
    "👩‍👩‍👧",
    "é",
    "{",
    "}",
    "[",
    "\"",
    "\\",
    "\\u00e9",
    "aab",
    "ab",
    "STOP",
    "ST",
    "OP",
    "```",
    "```json\n",
    "\n```",
    "true\">",
    " ",
    "invoke name=\"",
    "parameter name=",
    "</think>",
    "<think>",
    "｜DSML｜",
    "<｜DSML｜",
    "</｜DSML｜",
    " calls>",
    "tool_calls>",
    "<｜end▁of▁sentence｜>",
];

fn soup(rng: &mut Rng, fragments: &[&str], most: usize) -> String {
    (0..rng.below(most + 1)).map(|_| *rng.pick(fragments)).collect()
}

/// Output as a model makes it: reasoning, an answer, complete calls, in any number.
fn orderly(rng: &mut Rng) -> String {
    const WORDS: &[&str] =
        &["sea ", "tide", "\n", "é", "潮汐", "🌊", "< ", "\"q\"", "\\", "STOP", "ab"];
    let mut text = String::new();
    if rng.chance(70) {
        text += &soup(rng, WORDS, 8);
        text += "</think>\n\n";
    }
    text += &soup(rng, WORDS, 8);
    if rng.chance(60) {
        let invokes: Vec<String> = (0..1 + rng.below(3))
            .map(|_| {
                let value = soup(rng, WORDS, 6);
                let name = *rng.pick(&["f", "apply_patch", "tool_search", "ns::one"]);
                let parameters = [("input", true, value.as_str()), ("n", false, "[1, {\"a\": 2}]")];
                call(name, &parameters[..rng.below(3)])
            })
            .collect();
        text += &calls(&invokes);
    }
    text
}

fn stop_list(rng: &mut Rng) -> Vec<String> {
    let lists: [&[&str]; 4] = [&[], &[], &["STOP"], &["aab", "b", "tide潮"]];
    rng.pick(&lists).iter().map(|stop| (*stop).to_owned()).collect()
}

fn any_parsing(rng: &mut Rng) -> Parsing {
    Parsing {
        parse_tool_calls: rng.chance(75),
        starts_in_tool_calls: rng.chance(5),
        parse_json_output: rng.chance(20),
        thinking_initial_stage: *rng.pick(&STAGES),
        stop_sequences: stop_list(rng),
    }
}

/// Removes the counts: where a stop sequence matches inside a chunk, they depend on the cut.
fn without_usage(mut folded: Value) -> Value {
    folded.as_object_mut().expect("an object").remove("usage");
    folded
}

#[test]
fn any_cut_of_the_same_output_folds_to_the_same_response() {
    for seed in 0..1_200 {
        let mut rng = Rng(seed);
        let protocol = *rng.pick(&PROTOCOLS);
        let parsing = Parsing { parse_json_output: false, ..any_parsing(&mut rng) };
        let text = if rng.chance(60) { orderly(&mut rng) } else { soup(&mut rng, FRAGMENTS, 20) };
        // Cut off by the limit, whether a call was named does not decide the reason.
        let finish = BackendFinish::Length;
        let ids = model_ids(&text);
        let fold = |chunks: Vec<OwnedChunk>| {
            without_usage(run(open(protocol, &parsing, &config()), &chunks).folded)
        };
        let whole = [OwnedChunk::Text(text.clone(), 100), OwnedChunk::Finish(finish)];
        let wanted = fold(whole.to_vec());
        let wanted_ids =
            fold(vec![OwnedChunk::Tokens(ids.clone(), None), OwnedChunk::Finish(finish)]);
        for _ in 0..3 {
            let context = format!("seed {seed}, {protocol:?}, {parsing:?}, {text:?}");
            let mut chunks = cut_text(&mut rng, &text, finish);
            // An empty chunk is an empty event of its own, so the whole has it no more than this.
            chunks.remove(0);
            assert_eq!(fold(chunks), wanted, "text, {context}");
            assert_eq!(fold(cut_ids(&mut rng, &ids, finish)), wanted_ids, "ids, {context}");
        }
    }
}

#[test]
fn events_fold_to_the_response_that_is_given_without_a_stream() {
    for seed in 0..900 {
        let mut rng = Rng(seed ^ 0xf01d);
        let protocol = *rng.pick(&PROTOCOLS);
        let parsing = any_parsing(&mut rng);
        let text = if rng.chance(70) { orderly(&mut rng) } else { soup(&mut rng, FRAGMENTS, 20) };
        let finish = *rng.pick(&[BackendFinish::Stop, BackendFinish::Length]);
        let chunks = if rng.chance(50) {
            cut_text(&mut rng, &text, finish)
        } else {
            cut_ids(&mut rng, &model_ids(&text), finish)
        };
        let streamed = run(open(protocol, &parsing, &config()), &chunks);
        let unstreamed = StreamConfig { writes_events: Some(false), ..config() };
        let unstreamed = run(open(protocol, &parsing, &unstreamed), &chunks);
        let context = format!("seed {seed}, {protocol:?}, {parsing:?}, {text:?}");
        assert_eq!(unstreamed.all().count(), 0, "{context}");
        assert_eq!(streamed.folded, unstreamed.folded, "{context}");
        assert_eq!(client_fold(protocol, &streamed), unstreamed.folded, "{context}");
    }
}

/// Folds events the way the vendors' clients do, with nothing of ours.
fn client_fold(protocol: Protocol, outcome: &Outcome) -> Value {
    match protocol {
        Protocol::Chat => chat_client_fold(outcome),
        Protocol::Messages => messages_client_fold(outcome),
        Protocol::Responses => responses_client_fold(outcome),
    }
}

fn append(target: &mut Value, text: &Value) {
    if let Some(text) = text.as_str() {
        *target = json!(target.as_str().unwrap_or_default().to_owned() + text);
    }
}

fn chat_client_fold(outcome: &Outcome) -> Value {
    let mut folded = json!({
        "id": "r1", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": null},
            "logprobs": null, "finish_reason": null}],
        "system_fingerprint": null,
    });
    for event in outcome.all() {
        let delta = &event["choices"][0]["delta"];
        let choice = &mut folded["choices"][0];
        for key in ["content", "reasoning_content"] {
            if delta[key].is_string() {
                append(&mut choice["message"][key], &delta[key]);
            }
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().expect("an index") as usize;
            if choice["message"]["tool_calls"].is_null() {
                choice["message"]["tool_calls"] = json!([]);
            }
            let list = choice["message"]["tool_calls"].as_array_mut().expect("a list");
            if index == list.len() {
                list.push(part.clone());
            } else {
                append(&mut list[index]["function"]["arguments"], &part["function"]["arguments"]);
            }
        }
        if event["choices"][0]["finish_reason"].is_string() {
            choice["finish_reason"] = event["choices"][0]["finish_reason"].clone();
            folded["usage"] = event["usage"].clone();
        }
    }
    folded
}

fn messages_client_fold(outcome: &Outcome) -> Value {
    let mut folded = Value::Null;
    let mut inputs: Vec<String> = Vec::new();
    for event in outcome.all() {
        let index = event["index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str() {
            Some("message_start") => folded = event["message"].clone(),
            Some("content_block_start") => {
                let content = folded["content"].as_array_mut().expect("a list");
                assert_eq!(content.len(), index, "blocks come in order");
                content.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            Some("content_block_delta") => {
                let block = &mut folded["content"][index];
                let delta = &event["delta"];
                match delta["type"].as_str() {
                    Some("text_delta") => append(&mut block["text"], &delta["text"]),
                    Some("thinking_delta") => append(&mut block["thinking"], &delta["thinking"]),
                    Some("signature_delta") => block["signature"] = delta["signature"].clone(),
                    _ => inputs[index] += delta["partial_json"].as_str().expect("a fragment"),
                }
            }
            Some("content_block_stop") if folded["content"][index]["type"] == "tool_use" => {
                let input = serde_json::from_str(&inputs[index]).unwrap_or_else(|_| json!({}));
                folded["content"][index]["input"] = input;
            }
            Some("message_delta") => {
                folded["stop_reason"] = event["delta"]["stop_reason"].clone();
                folded["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                folded["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    folded
}

/// Takes the last event's response, after checking that the items before it add up to the same.
fn responses_client_fold(outcome: &Outcome) -> Value {
    let mut items: Vec<Value> = Vec::new();
    for event in outcome.all() {
        let index = event["output_index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str() {
            Some("response.output_item.added") => items.push(event["item"].clone()),
            Some("response.content_part.added") => {
                items[index]["content"] = json!([event["part"]]);
            }
            Some("response.output_text.delta" | "response.reasoning_text.delta") => {
                append(&mut items[index]["content"][0]["text"], &event["delta"]);
            }
            Some("response.function_call_arguments.delta") => {
                append(&mut items[index]["arguments"], &event["delta"]);
            }
            Some("response.custom_tool_call_input.delta") => {
                append(&mut items[index]["input"], &event["delta"]);
            }
            Some("response.output_item.done") => {
                let item = &event["item"];
                for key in ["content", "arguments", "input"] {
                    if item["type"] != "tool_search_call" {
                        assert_eq!(items[index][key], item[key], "deltas add up to the item");
                    }
                }
                items[index] = item.clone();
            }
            _ => {}
        }
    }
    let last = outcome.all().last().expect("a last event");
    assert_eq!(last["response"]["output"], json!(items));
    last["response"].clone()
}

#[test]
fn eager_mode_folds_to_the_exact_response() {
    for seed in 0..1_500 {
        let mut rng = Rng(seed ^ 0xea6e);
        let protocol = *rng.pick(&PROTOCOLS);
        let parsing = any_parsing(&mut rng);
        let text = if rng.chance(50) { orderly(&mut rng) } else { soup(&mut rng, FRAGMENTS, 24) };
        let finish = *rng.pick(&[BackendFinish::Stop, BackendFinish::Length]);
        let chunks = if rng.chance(50) {
            cut_text(&mut rng, &text, finish)
        } else {
            with_logprobs(cut_ids(&mut rng, &model_ids(&text), finish))
        };
        let exact = run(open(protocol, &parsing, &config()), &chunks);
        let eager = StreamConfig { eager: true, ..config() };
        let eager = run(open(protocol, &parsing, &eager), &chunks);
        let context = format!("seed {seed}, {protocol:?}, {parsing:?}, {text:?}");
        assert_eq!(eager.folded, exact.folded, "{context}");
    }
}

fn with_logprobs(chunks: Vec<OwnedChunk>) -> Vec<OwnedChunk> {
    let entries = |ids: &[u32]| {
        ids.iter().map(|&id| TokenLogprob { logprob: -0.5, top: vec![(id, -0.25)] }).collect()
    };
    chunks
        .into_iter()
        .map(|chunk| match chunk {
            OwnedChunk::Tokens(ids, None) => {
                let logprobs = entries(&ids);
                OwnedChunk::Tokens(ids, Some(logprobs))
            }
            other => other,
        })
        .collect()
}

#[test]
fn eager_mode_gives_text_that_exact_mode_still_holds() {
    let parsing = Parsing { parse_tool_calls: true, ..Parsing::default() };
    let chunks = [OwnedChunk::Text("hello\n".to_owned(), 1)];
    let content = |eager: bool| {
        let config = StreamConfig { eager, ..config() };
        let outcome = run(open(Protocol::Chat, &parsing, &config), &chunks);
        outcome.events[0]
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
            .collect::<String>()
    };
    assert_eq!(content(false), "");
    assert_eq!(content(true), "hello");
}

/// Anything may come from a backend. Each event must be JSON, and nothing may follow the end.
#[test]
fn no_input_panics_or_writes_after_the_end() {
    for seed in 0..2_500 {
        let mut rng = Rng(seed ^ 0xbad);
        let protocol = *rng.pick(&PROTOCOLS);
        let parsing = any_parsing(&mut rng);
        let config = StreamConfig { eager: rng.chance(30), ..config() };
        let mut stream = open(protocol, &parsing, &config);
        let mut out = EventBuffer::default();
        for _ in 0..rng.below(40) {
            let chunk = any_chunk(&mut rng);
            let was_over = stream.is_over();
            let result = stream.push(chunk.as_chunk(), 1, &mut out);
            assert!(!was_over || out.is_empty(), "seed {seed}: events after the end");
            assert!(result.is_ok() || stream.is_over(), "seed {seed}: an error ends the stream");
            read_all(&mut out);
            if rng.chance(2) {
                stream.fail(&failure(), &mut out);
                assert!(stream.is_over());
                read_all(&mut out);
            }
        }
        stream.close(1, &mut out);
        read_all(&mut out);
        stream.close(1, &mut out);
        assert!(out.is_empty(), "seed {seed}: closing twice writes once");
        serde_json::from_slice::<Value>(&stream.folded()).expect("the response is JSON");
    }
}

fn failure() -> Failure {
    Failure {
        reason: "BACKEND_LOST".to_owned(),
        message: "the instance went away".to_owned(),
        request_id: "req-1".to_owned(),
    }
}

fn read_all(out: &mut EventBuffer) {
    for (_, json) in out.iter() {
        serde_json::from_slice::<Value>(json).expect("an event is JSON");
    }
    out.clear();
}

fn any_chunk(rng: &mut Rng) -> OwnedChunk {
    match rng.below(20) {
        0 => OwnedChunk::Ready(rng.below(9) as u32, u32::MAX, Some("fp".to_owned())),
        1 if rng.chance(30) => OwnedChunk::Finish(BackendFinish::Stop),
        2..=8 => OwnedChunk::Text(soup(rng, FRAGMENTS, 4), u32::MAX),
        _ => {
            let any_id = |rng: &mut Rng| match rng.below(6) {
                0 => rng.next() as u32,
                1 => 128_700 + rng.below(600) as u32,
                2 => 3 + rng.below(256) as u32,
                _ => rng.below(130_000) as u32,
            };
            let mut ids: Vec<u32> = (0..rng.below(12)).map(|_| any_id(rng)).collect();
            if rng.chance(60) {
                ids.extend(model_ids(&soup(rng, FRAGMENTS, 6)));
            }
            let entry = |rng: &mut Rng| TokenLogprob {
                logprob: f32::from_bits(rng.next() as u32),
                top: (0..rng.below(3)).map(|_| (rng.next() as u32, -1.0)).collect(),
            };
            let num_entries = ids.len() + usize::from(rng.chance(3));
            let logprobs = rng.chance(30).then(|| (0..num_entries).map(|_| entry(rng)).collect());
            OwnedChunk::Tokens(ids, logprobs)
        }
    }
}

#[test]
fn a_batch_gives_what_each_stream_gives_alone() {
    let mut rng = Rng(77);
    let mut table = StreamTable::default();
    let mut alone = Vec::new();
    let mut handles = Vec::new();
    for index in 0..30 {
        let protocol = PROTOCOLS[index % 3];
        let parsing =
            Parsing { thinking_initial_stage: STAGES[index % 4], ..any_parsing(&mut rng) };
        alone.push((open(protocol, &parsing, &config()), model_ids(&orderly(&mut rng))));
        handles.push(table.insert(open(protocol, &parsing, &config())));
    }
    let mut output = BatchOutput::default();
    let mut buffer = EventBuffer::default();
    for step in 0..12 {
        let parts: Vec<&[u32]> = alone
            .iter()
            .map(|(_, ids)| {
                let size = ids.len().div_ceil(12).max(1);
                &ids[(step * size).min(ids.len())..((step + 1) * size).min(ids.len())]
            })
            .collect();
        let counts: Vec<u32> = parts.iter().map(|part| part.len() as u32).collect();
        let ids = parts.concat();
        table.push_tokens(&handles, &counts, &ids, 1, &mut output).expect("lengths agree");
        let parts: Vec<Vec<u32>> = parts.into_iter().map(<[u32]>::to_vec).collect();
        for (k, part) in parts.iter().enumerate() {
            buffer.clear();
            let stream = &mut alone[k].0;
            stream.push(Chunk::Tokens { ids: part, logprobs: None }, 1, &mut buffer).expect("fine");
            assert_eq!(output.sse(k), buffer.sse(), "step {step}, stream {k}");
            assert_eq!(output.over.contains(&k), stream.is_over());
        }
        assert!(output.errors.is_empty());
    }
    table.fail(&handles, &failure(), &mut output);
    assert_eq!(output.over.len(), handles.len());
    for handle in handles {
        assert!(table.remove(handle).is_some());
        assert!(table.remove(handle).is_none());
    }
    assert!(table.is_empty());
    assert!(table.push_tokens(&[0], &[1], &[1], 1, &mut output).is_ok());
    assert_eq!(output.errors.len(), 1, "no such stream");
    assert!(table.push_tokens(&[0], &[2], &[1], 1, &mut output).is_err(), "lengths disagree");
}

/// Returns the processor time that this thread has used; a busy machine does not add to it.
fn thread_time() -> Duration {
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanoseconds: i64,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut Timespec) -> i32;
    }
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: the C library's own function, given a place of the shape it writes on 64-bit Linux.
    let status = unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "Linux has a clock for each thread");
    Duration::new(time.seconds as u64, time.nanoseconds as u32)
}

/// Returns the shortest of three runs.
fn shortest(mut run: impl FnMut()) -> Duration {
    let mut time = || {
        let start = thread_time();
        run();
        thread_time() - start
    };
    (0..3).map(|_| time()).min().expect("three runs")
}

/// Eight times the input may take about eight times as long; quadratic would be sixty-four.
fn assert_linear(what: &str, mut run: impl FnMut(usize)) {
    let small = shortest(|| run(30_000)).max(Duration::from_millis(1));
    let large = shortest(|| run(240_000));
    assert!(large < small * 32, "{what}: {small:?} for 30 kB, {large:?} for 240 kB");
}

#[test]
fn test_ur_81_adversarial_output_takes_linear_time() {
    let dsml = "｜DSML｜";
    let opened = format!("<{dsml} calls><{dsml} invoke name=\"apply_patch\">");
    let string = format!("{opened}<{dsml} parameter name=\"input\" string=\"true\">");
    let raw = format!("{opened}<{dsml} parameter name=\"input\" string=\"false\">\"");
    let long_stop = "a".repeat(100_000);
    let stops: Vec<String> = (0..16).map(|index| format!("{long_stop}{index}")).collect();
    let tools = Parsing { parse_tool_calls: true, ..Parsing::default() };
    let thinking =
        Parsing { thinking_initial_stage: Some(ThinkingStage::ReasoningStart), ..tools.clone() };
    let json_output = Parsing { parse_json_output: true, ..tools.clone() };
    let stopping = Parsing { stop_sequences: stops, ..Parsing::default() };
    let cases: [(&str, &Parsing, &str, String); 11] = [
        ("newlines", &tools, "", "\n".to_owned()),
        ("newlines in reasoning", &thinking, "x", "\n".to_owned()),
        ("half tags", &tools, "", format!("\n\n<{}", &dsml[..6])),
        ("open brackets", &thinking, "", "<</think".to_owned()),
        ("open invokes", &tools, &opened, format!("<{dsml} invoke name=\"")),
        ("open parameters", &tools, &opened, format!("<{dsml} parameter name=")),
        ("half closers in a value", &tools, &string, "</</｜".to_owned()),
        ("escapes in a custom input", &tools, &raw, "\\ud83e\\\\".to_owned()),
        ("a name without an end", &tools, &opened[..opened.len() - 13], "n".to_owned()),
        ("fences", &json_output, "", "``` ```json ".to_owned()),
        ("sixteen long stop sequences", &stopping, "", "aaaaaaab".to_owned()),
    ];
    for (what, parsing, head, repeated) in &cases {
        for protocol in PROTOCOLS {
            assert_linear(what, |size| {
                let text = repeated.repeat(size / repeated.len());
                let mut stream = open(protocol, parsing, &config());
                let mut out = EventBuffer::default();
                let mut push = |content: &str, out: &mut EventBuffer| {
                    out.clear();
                    let chunk = Chunk::Text { content, token_count: 1 };
                    stream.push(chunk, 1, out).expect("no error");
                };
                push(head, &mut out);
                let mut rest = text.as_str();
                while !rest.is_empty() {
                    let (part, tail) = rest.split_at(rest.ceil_char_boundary(16.min(rest.len())));
                    push(part, &mut out);
                    rest = tail;
                }
                out.clear();
                stream.close(1, &mut out);
            });
        }
    }
}

#[test]
fn runs_of_undecodable_ids_take_linear_time() {
    // 62377 ends inside a character; unknown ids decode to nothing at all.
    for (what, id) in [("half characters", 62_377), ("unknown ids", 999_999), ("lone bytes", 200)] {
        assert_linear(what, |size| {
            let mut stream = open(Protocol::Chat, &Parsing::default(), &config());
            let mut out = EventBuffer::default();
            for _ in 0..size / 4 {
                stream.push(Chunk::Tokens { ids: &[id], logprobs: None }, 1, &mut out).expect("ok");
            }
            stream.close(1, &mut out);
        });
    }
}

#[test]
fn unstreamed_text_is_kept_only_where_it_is_asked_for() {
    let parsing = Parsing { parse_tool_calls: true, ..Parsing::default() };
    for protocol in [Protocol::Chat, Protocol::Messages] {
        let config = StreamConfig { keeps_response: None, ..config() };
        let chunks = [OwnedChunk::Text("word ".repeat(1000), 1)];
        let outcome = run(open(protocol, &parsing, &config), &chunks);
        assert!(outcome.sse.len() > 5_000);
        assert!(outcome.folded.to_string().len() < 1_000, "a stream holds no text");
        assert_eq!(streams::visible(protocol, &outcome.folded).0, "");
    }
}
