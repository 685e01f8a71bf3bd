//! Faults that users of other servers reported, as tests of the stream (user-reports.md).

mod support;

use pelagos_codec::stream::{BackendFinish, Chunk, EventBuffer, Failure, StreamConfig};
use pelagos_codec::types::{Parsing, Protocol, ThinkingStage};
use serde_json::{Value, json};
use support::OwnedChunk;
use support::streams::{
    PROTOCOLS, Rng, call, calls, config, cut_ids, cut_text, folded_calls, model_ids, open, run,
    visible,
};

const THINKING: Option<ThinkingStage> = Some(ThinkingStage::ReasoningStart);

fn tools() -> Parsing {
    Parsing { parse_tool_calls: true, ..Parsing::default() }
}

fn texts(parts: &[&str], finish: BackendFinish) -> Vec<OwnedChunk> {
    let text = |part: &&str| OwnedChunk::Text((*part).to_owned(), 1);
    parts.iter().map(text).chain([OwnedChunk::Finish(finish)]).collect()
}

/// The word for why the response ended, whichever protocol it is in.
fn reason(protocol: Protocol, folded: &Value) -> String {
    let word = match protocol {
        Protocol::Chat => &folded["choices"][0]["finish_reason"],
        Protocol::Messages => &folded["stop_reason"],
        Protocol::Responses => match &folded["incomplete_details"] {
            Value::Null => &folded["status"],
            details => &details["reason"],
        },
    };
    word.as_str().expect("a reason").to_owned()
}

#[test]
fn test_ur_01_a_call_cut_by_the_limit_is_length_streamed_or_not() {
    let text = calls(&[call("f", &[("text", true, "a long \"argument\" of words")])]);
    let ids = model_ids(&text);
    for protocol in PROTOCOLS {
        let limit = match protocol {
            Protocol::Chat => "length",
            Protocol::Messages => "max_tokens",
            Protocol::Responses => "max_output_tokens",
        };
        for num_ids in 0..=ids.len() {
            let chunks = [
                OwnedChunk::Tokens(ids[..num_ids].to_vec(), None),
                OwnedChunk::Finish(BackendFinish::Length),
            ];
            for writes_events in [true, false] {
                let config = StreamConfig { writes_events: Some(writes_events), ..config() };
                let folded = run(open(protocol, &tools(), &config), &chunks).folded;
                assert_eq!(reason(protocol, &folded), limit, "{protocol:?}, {num_ids} ids");
            }
        }
    }
}

#[test]
fn test_ur_03_parallel_calls_have_their_own_index_and_id() {
    let invokes: Vec<String> =
        ["a", "b", "c"].map(|name| call(name, &[("x", true, name), ("n", false, "1")])).to_vec();
    let ids = model_ids(&calls(&invokes));
    let mut rng = Rng(3);
    for protocol in PROTOCOLS {
        let chunks = cut_ids(&mut rng, &ids, BackendFinish::Stop);
        let outcome = run(open(protocol, &tools(), &config()), &chunks);
        let found = folded_calls(protocol, &outcome.folded);
        let wanted: Vec<(&str, Value)> =
            ["a", "b", "c"].map(|name| (name, json!({"x": name, "n": 1}))).to_vec();
        let got: Vec<(&str, Value)> =
            found.iter().map(|(_, name, input)| (name.as_str(), input.clone())).collect();
        assert_eq!(got, wanted, "{protocol:?}");
        assert!(found[0].0 != found[1].0 && found[1].0 != found[2].0 && found[0].0 != found[2].0);
    }
}

#[test]
fn test_ur_04_id_type_and_name_come_once_and_indexes_never_interleave() {
    let invokes: Vec<String> = ["a", "b"].map(|name| call(name, &[("x", true, "v w")])).to_vec();
    let ids = model_ids(&calls(&invokes));
    let mut rng = Rng(4);
    for _ in 0..20 {
        let chunks = cut_ids(&mut rng, &ids, BackendFinish::Stop);
        let outcome = run(open(Protocol::Chat, &tools(), &config()), &chunks);
        let deltas: Vec<&Value> = outcome
            .all()
            .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .collect();
        let mut num_calls = 0;
        for delta in deltas {
            if delta["id"].is_string() {
                assert_eq!(delta["index"], num_calls);
                assert_eq!(delta["type"], "function");
                assert_eq!(delta["function"]["name"], ["a", "b"][num_calls]);
                num_calls += 1;
            } else {
                assert_eq!(delta["index"], num_calls - 1);
                assert_eq!(delta.as_object().expect("an object").len(), 2);
                assert_eq!(delta["function"].as_object().expect("an object").len(), 1);
            }
        }
        assert_eq!(num_calls, 2);
    }
}

#[test]
fn test_ur_05_arguments_stream_while_they_are_generated() {
    let value = "word ".repeat(800);
    let text = calls(&[call("f", &[("text", true, &value)])]);
    let ids = model_ids(&text);
    let num_head = model_ids(&text[..text.find("word").expect("the value")]).len();
    for protocol in PROTOCOLS {
        let chunks: Vec<OwnedChunk> =
            ids.iter().map(|id| OwnedChunk::Tokens(vec![*id], None)).collect();
        let outcome = run(open(protocol, &tools(), &config()), &chunks);
        let early: usize = outcome.events[num_head..num_head + 3].iter().map(Vec::len).sum();
        assert!(early > 0, "{protocol:?}: a fragment within three steps");
        let found = &folded_calls(protocol, &outcome.folded)[0];
        assert_eq!(found.2, json!({"text": value}));
    }
}

#[test]
fn test_ur_06_arguments_are_the_same_for_every_split() {
    let parameters = [("city", true, "Oslo \"N\" <3 é"), ("days", false, "[1, {\"a\": null}]")];
    let text = format!("Calling.{}", calls(&[call("f", &parameters)]));
    let wanted = json!({"city": "Oslo \"N\" <3 é", "days": [1, {"a": null}]});
    let ids = model_ids(&text);
    for protocol in PROTOCOLS {
        let mut all = Vec::new();
        for (at, _) in text.char_indices() {
            let (head, tail) = text.split_at(at);
            all.push(texts(&[head, tail], BackendFinish::Stop));
        }
        for at in 0..=ids.len() {
            let (head, tail) = ids.split_at(at);
            let tokens = |ids: &[u32]| OwnedChunk::Tokens(ids.to_vec(), None);
            all.push(vec![tokens(head), tokens(tail), OwnedChunk::Finish(BackendFinish::Stop)]);
        }
        for chunks in all {
            let outcome = run(open(protocol, &tools(), &config()), &chunks);
            let found = folded_calls(protocol, &outcome.folded);
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].2, wanted);
            assert_eq!(visible(protocol, &outcome.folded).0, "Calling.");
            assert!(!outcome.sse.contains("DSML"), "{protocol:?}");
        }
    }
}

#[test]
fn test_ur_07_markup_spelled_by_ordinary_ids_stays_text() {
    let text = format!("Like this:{} and </think>", calls(&[call("f", &[("a", true, "b")])]));
    let ids = support::tokenizer().encode_plain(&text);
    for protocol in PROTOCOLS {
        let chunks = cut_ids(&mut Rng(7), &ids, BackendFinish::Stop);
        let outcome = run(open(protocol, &tools(), &config()), &chunks);
        assert_eq!(folded_calls(protocol, &outcome.folded), []);
        assert_eq!(visible(protocol, &outcome.folded).0, text);
    }
}

/// A malformed output, the text that stays visible, the calls as (name, arguments).
type Malformed = (String, &'static str, Vec<(&'static str, Value)>);

/// Each has one documented result.
#[test]
fn test_ur_08_malformed_markup_has_a_documented_result() {
    let d = "｜DSML｜";
    let body = format!("<{d} parameter name=\"a\" string=\"true\">b</{d} parameter></{d} invoke>");
    let cases: Vec<Malformed> = vec![
        // No wrapper: any tag opens a block, and the invoke marker is found inside it.
        (format!("x<{d} invoke name=\"f\">{body}"), "x", vec![("f", json!({"a": "b"}))]),
        // An unknown tag opens the block too; what follows is not shown.
        (format!("x<{d} nonsense>y"), "x", vec![]),
        // No close: the arguments stay as they are.
        (
            format!(
                "<{d} calls><{d} invoke name=\"f\"><{d} parameter name=\"a\" string=\"true\">b"
            ),
            "",
            vec![("f", json!("{\"a\": \"b"))],
        ),
        (format!("<{d} calls><{d} invoke name=\"f"), "", vec![]),
        // An unknown attribute is passed over.
        (
            format!(
                "<{d} calls><{d} invoke name=\"f\"><{d} parameter name=\"a\" kind=\"k\" \
                 string=\"true\">b</{d} parameter></{d} invoke></{d} calls>"
            ),
            "",
            vec![("f", json!({"a": "b"}))],
        ),
        // A parameter twice stays twice in the text; the last value wins where it is parsed.
        (
            calls(&[call("f", &[("a", true, "1"), ("a", true, "2")])]),
            "",
            vec![("f", json!({"a": "2"}))],
        ),
        // A call inside a value is part of the value up to its first closing tag.
        (
            calls(&[call("f", &[("a", true, &format!("<{d} invoke name=\"g\">"))])]),
            "",
            vec![("f", json!({"a": format!("<{d} invoke name=\"g\">")}))],
        ),
        (format!("x\n\n<{d} calls></{d} calls>y"), "x", vec![]),
        (format!("x{d}y</{d} calls>"), "x｜DSML｜y</｜DSML｜ calls>", vec![]),
        (
            format!("<{d}tool_calls><{d}invoke name=\"f\">{body}</{d}tool_calls>tail"),
            "",
            vec![("f", json!({"a": "b"}))],
        ),
    ];
    for (text, shown, wanted) in cases {
        let chunks = cut_text(&mut Rng(8), &text, BackendFinish::Stop);
        let outcome = run(open(Protocol::Chat, &tools(), &config()), &chunks);
        assert_eq!(visible(Protocol::Chat, &outcome.folded).0, shown, "{text}");
        let found = folded_calls(Protocol::Chat, &outcome.folded);
        let found: Vec<(&str, Value)> =
            found.iter().map(|(_, name, input)| (name.as_str(), input.clone())).collect();
        assert_eq!(found, wanted, "{text}");
    }
}

#[test]
fn test_ur_09_no_part_of_a_stop_string_is_shown() {
    let parsing = Parsing { stop_sequences: vec!["own fox".to_owned()], ..Parsing::default() };
    let text = "The quick brown fox";
    for size in 1..=5 {
        for (shown, text) in [("The quick br", text), ("The quick brown fo", &text[..18])] {
            let characters: Vec<char> = text.chars().collect();
            let parts: Vec<String> =
                characters.chunks(size).map(|part| part.iter().collect()).collect();
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            for protocol in PROTOCOLS {
                let chunks = texts(&parts, BackendFinish::Stop);
                let outcome = run(open(protocol, &parsing, &config()), &chunks);
                assert_eq!(visible(protocol, &outcome.folded).0, shown);
                let streamed: String = outcome
                    .all()
                    .filter_map(|event| match protocol {
                        Protocol::Chat => event["choices"][0]["delta"]["content"].as_str(),
                        Protocol::Messages => event["delta"]["text"].as_str(),
                        Protocol::Responses => event["delta"].as_str(),
                    })
                    .collect();
                assert_eq!(streamed, shown, "{protocol:?}, {size} characters a chunk");
            }
        }
    }
}

#[test]
fn test_ur_10_stop_strings_make_no_empty_deltas() {
    let stop = |index: usize| format!("{}{index}", "stop words here ".repeat(4));
    let parsing = Parsing { stop_sequences: (0..16).map(stop).collect(), ..Parsing::default() };
    let text = "stop words and others, stop words here and there ".repeat(4);
    let chunks = cut_ids(&mut Rng(10), &model_ids(&text), BackendFinish::Stop);
    let outcome = run(open(Protocol::Chat, &parsing, &config()), &chunks);
    let events: Vec<&Value> = outcome.all().collect();
    for event in &events[1..events.len() - 1] {
        assert_ne!(event["choices"][0]["delta"]["content"], "", "between the first and the last");
    }
    assert_eq!(visible(Protocol::Chat, &outcome.folded).0, text);
    // The first text is out once no stop string can begin with it.
    let first: Vec<OwnedChunk> =
        model_ids(&text[..66]).iter().map(|id| OwnedChunk::Tokens(vec![*id], None)).collect();
    let outcome = run(open(Protocol::Chat, &parsing, &config()), &first);
    let num_early: usize = outcome.events[..first.len()].iter().map(Vec::len).sum();
    assert!(num_early >= 2);
}

#[test]
fn test_ur_11_split_characters_never_become_replacements() {
    let text = "é ñ 你好 한국 🤭🌊 👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ½ €";
    let tokenizer = support::tokenizer();
    // One id a byte splits every character at every boundary.
    let mut of_byte = vec![0u32; 256];
    for id in 0..tokenizer.num_ids() {
        if let Some([byte]) = tokenizer.token_bytes(id) {
            of_byte[usize::from(*byte)] = id;
        }
    }
    let bytes: Vec<u32> = text.bytes().map(|byte| of_byte[usize::from(byte)]).collect();
    for ids in [tokenizer.encode_plain(text), bytes] {
        assert_eq!(tokenizer.decode(&ids), text);
        for first in 0..=ids.len() {
            let (head, tail) = ids.split_at(first);
            let mut chunks: Vec<OwnedChunk> =
                tail.iter().map(|id| OwnedChunk::Tokens(vec![*id], None)).collect();
            chunks.insert(0, OwnedChunk::Tokens(head.to_vec(), None));
            for protocol in PROTOCOLS {
                let outcome = run(open(protocol, &Parsing::default(), &config()), &chunks);
                assert!(!outcome.sse.contains('\u{FFFD}'));
                assert_eq!(visible(protocol, &outcome.folded).0, text);
            }
        }
    }
}

/// The obvious way: at each byte, in order of priority, has a stop string just ended?
fn cut_at_stop(text: &str, stops: &[String]) -> (String, Option<String>) {
    for end in 1..=text.len() {
        for stop in stops.iter().filter(|stop| !stop.is_empty()) {
            if text.as_bytes()[..end].ends_with(stop.as_bytes()) {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
    }
    (text.to_owned(), None)
}

#[test]
fn test_ur_12_stop_strings_work_alike_with_and_without_streaming() {
    const LETTERS: [&str; 6] = ["a", "b", "ab", "é", "🤭", "c"];
    for seed in 0..2_000 {
        let mut rng = Rng(seed ^ 0x12);
        let mut word = |most: usize| -> String {
            (0..1 + rng.below(most)).map(|_| *rng.pick(&LETTERS)).collect()
        };
        let text = word(40);
        let num_stops = 1 + seed as usize % 16;
        let stops: Vec<String> = (0..num_stops).map(|_| word(8)).collect();
        let parsing = Parsing { stop_sequences: stops.clone(), ..Parsing::default() };
        let (shown, stop) = cut_at_stop(&text, &stops);
        let protocol = PROTOCOLS[seed as usize % 3];
        let chunks = match rng.chance(50) {
            true => cut_text(&mut rng, &text, BackendFinish::Stop),
            false => cut_ids(&mut rng, &model_ids(&text), BackendFinish::Stop),
        };
        for writes_events in [true, false] {
            let config = StreamConfig { writes_events: Some(writes_events), ..config() };
            let folded = run(open(protocol, &parsing, &config), &chunks).folded;
            assert_eq!(visible(protocol, &folded).0, shown, "seed {seed}, {text:?}, {stops:?}");
            if protocol == Protocol::Messages {
                assert_eq!(folded["stop_sequence"].as_str(), stop.as_deref(), "seed {seed}");
            }
        }
    }
}

#[test]
fn test_ur_13_visible_text_never_has_the_closing_think_tag() {
    let text = "First I weigh it.\n</think>\n\nThe answer is 7.";
    for (stage, reasoning) in [(THINKING, "First I weigh it."), (None, "")] {
        let parsing = Parsing { thinking_initial_stage: stage, ..tools() };
        for protocol in PROTOCOLS {
            for seed in 0..20 {
                let ids = model_ids(text);
                let by_ids = cut_ids(&mut Rng(seed), &ids, BackendFinish::Stop);
                let by_text = cut_text(&mut Rng(seed), text, BackendFinish::Stop);
                for chunks in [by_ids, by_text] {
                    let outcome = run(open(protocol, &parsing, &config()), &chunks);
                    let (content, thought) = visible(protocol, &outcome.folded);
                    assert!(!outcome.sse.contains("</think>"));
                    assert_eq!(thought, reasoning);
                    assert!(content.ends_with("The answer is 7."));
                    assert_eq!(content.starts_with("The"), stage.is_some(), "{content:?}");
                }
            }
        }
    }
}

#[test]
fn test_ur_17_usage_comes_once_and_apart_for_strict_clients() {
    let chunks = texts(&["Hi"], BackendFinish::Stop);
    for (separate_usage, num_events) in [(false, 3), (true, 4)] {
        let config = StreamConfig { separate_usage, ..config() };
        let outcome = run(open(Protocol::Chat, &Parsing::default(), &config), &chunks);
        let events: Vec<&Value> = outcome.all().collect();
        assert_eq!(events.len(), num_events);
        let with_usage: Vec<&&Value> = events.iter().filter(|e| e["usage"].is_object()).collect();
        assert_eq!(with_usage.len(), 1);
        assert_eq!(with_usage[0]["usage"]["completion_tokens"], 1);
        assert_eq!(with_usage[0], events.last().expect("a last event"));
        assert_eq!(with_usage[0]["choices"] == json!([]), separate_usage);
        assert!(outcome.sse.ends_with("}\n\ndata: [DONE]\n\n"));
    }
}

#[test]
fn test_ur_18_messages_repeat_the_whole_usage_at_the_end() {
    let mut chunks = texts(&["Hi"], BackendFinish::Stop);
    chunks.insert(0, OwnedChunk::Ready(9, 2, None));
    let outcome = run(open(Protocol::Messages, &Parsing::default(), &config()), &chunks);
    let find = |kind: &str| outcome.all().find(|e| e["type"] == kind).expect("the event");
    assert_eq!(find("message_start")["message"]["usage"]["input_tokens"], 7);
    let usage = &find("message_delta")["usage"];
    assert_eq!((&usage["input_tokens"], &usage["output_tokens"]), (&json!(7), &json!(1)));
    assert_eq!(usage["cache_read_input_tokens"], 2);
}

#[test]
fn test_ur_20_a_failure_is_shown_and_no_success_follows() {
    let failure = Failure {
        reason: "BACKEND_LOST".to_owned(),
        message: "The request was interrupted.".to_owned(),
        request_id: "req-1".to_owned(),
    };
    for protocol in PROTOCOLS {
        let mut stream = open(protocol, &tools(), &config());
        let mut out = EventBuffer::default();
        let text = |content| Chunk::Text { content, token_count: 1 };
        stream.push(text("some words"), 1, &mut out).expect("no error");
        out.clear();
        stream.fail(&failure, &mut out);
        let sse = std::str::from_utf8(out.sse()).expect("UTF-8").to_owned();
        let (name, json) = out.iter().next().expect("one event");
        let event: Value = serde_json::from_slice(json).expect("JSON");
        match protocol {
            Protocol::Chat => {
                assert_eq!(
                    event,
                    json!({"error": {"message": "The request was interrupted.",
                        "type": "server_error", "param": null, "code": "server_error",
                        "request_id": "req-1"}})
                );
                assert!(sse.ends_with("\n\ndata: [DONE]\n\n"));
            }
            Protocol::Messages => {
                assert_eq!(name, Some("error"));
                assert_eq!(
                    event,
                    json!({"type": "error", "error": {"type": "overloaded_error",
                        "message": "The request was interrupted."}, "request_id": "req-1"})
                );
            }
            Protocol::Responses => {
                assert_eq!(name, Some("response.failed"));
                let response = &event["response"];
                assert_eq!(response["status"], "failed");
                assert_eq!(response["error"]["code"], "server_error");
                assert_eq!(response["error"]["message"], "The request was interrupted.");
                assert_eq!(response["output"][0]["status"], "incomplete");
                assert_eq!(response["usage"]["output_tokens"], 1);
                assert_eq!(event["sequence_number"], 5);
            }
        }
        out.clear();
        stream.fail(&failure, &mut out);
        stream.close(1, &mut out);
        assert!(stream.push(text("more"), 1, &mut out).is_err());
        assert!(out.is_empty() && out.sse().is_empty(), "{protocol:?}: nothing follows");
    }
}

#[test]
fn test_ur_25_every_added_item_is_done_in_order_with_its_value() {
    let invokes = [
        call("f", &[("a", true, "b")]),
        call("apply_patch", &[("input", true, "*** \"x\"\n")]),
        call("tool_search", &[("q", true, "mail")]),
    ];
    let text = format!("think</think>answer{}", calls(&invokes));
    let parsing = Parsing { thinking_initial_stage: THINKING, ..tools() };
    let chunks = cut_ids(&mut Rng(25), &model_ids(&text), BackendFinish::Stop);
    let outcome = run(open(Protocol::Responses, &parsing, &config()), &chunks);
    let mut kinds: Vec<&str> = Vec::new();
    for event in outcome.all() {
        let kind = event["type"].as_str().expect("a type").trim_start_matches("response.");
        if kinds.last() != Some(&kind) {
            kinds.push(kind);
        }
    }
    let wanted = "created in_progress \
        output_item.added content_part.added reasoning_text.delta reasoning_text.done \
        content_part.done output_item.done \
        output_item.added content_part.added output_text.delta output_text.done \
        content_part.done output_item.done \
        output_item.added function_call_arguments.delta function_call_arguments.done \
        output_item.done \
        output_item.added custom_tool_call_input.delta custom_tool_call_input.done \
        output_item.done \
        output_item.added output_item.done completed";
    assert_eq!(kinds.join(" "), wanted);
    let done = |kind: &str, key: &str| {
        let event = outcome.all().find(|event| event["type"] == format!("response.{kind}.done"));
        event.expect("the event")[key].clone()
    };
    assert_eq!(done("reasoning_text", "text"), "think");
    assert_eq!(done("output_text", "text"), "answer");
    assert_eq!(done("function_call_arguments", "arguments"), "{\"a\": \"b\"}");
    assert_eq!(done("custom_tool_call_input", "input"), "*** \"x\"\n");
    assert_eq!(outcome.folded["output"][4]["arguments"], json!({"q": "mail"}));
}

#[test]
fn test_ur_26_sequence_numbers_rise_by_one_from_zero() {
    let text = format!("a</think>b{}", calls(&[call("f", &[("a", true, "b")])]));
    let parsing = Parsing { thinking_initial_stage: THINKING, ..tools() };
    for finish in [BackendFinish::Stop, BackendFinish::Length, BackendFinish::ContentFilter] {
        let chunks = cut_ids(&mut Rng(26), &model_ids(&text), finish);
        let outcome = run(open(Protocol::Responses, &parsing, &config()), &chunks);
        for (index, event) in outcome.all().enumerate() {
            assert_eq!(event["sequence_number"], index);
        }
    }
}
