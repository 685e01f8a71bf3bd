//! What an output stream holds while it runs, counted by the allocator of this test's own process:
//! the pending marker, not the text that has passed.

mod support;

use pelagos_codec::stream::{Chunk, EventBuffer, StreamConfig, TokenLogprob};
use pelagos_codec::types::{Parsing, Protocol, ThinkingStage};
use support::counting::{Counting, held};
use support::streams::{PROTOCOLS, call, model_ids, open};
use support::tokenizer;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a stream may hold more after ten times the output: the waiting text of the count of
/// reasoning, and what buffers keep of the largest piece.
const MAX_GROWTH_BYTES: usize = 4 << 10;

/// Ids of this many tokens of model output, and how it is parsed.
type Output = fn(usize) -> (Vec<u32>, Parsing);

fn long(num_tokens: usize, start: &str, unit: &str) -> Vec<u32> {
    let mut ids = model_ids(start);
    ids.extend(model_ids(&unit.repeat(num_tokens)));
    ids.truncate(num_tokens);
    ids
}

fn content(unit: &str, num_tokens: usize) -> (Vec<u32>, Parsing) {
    let stop_sequences = vec!["never said".to_owned()];
    (long(num_tokens, "", unit), Parsing { parse_tool_calls: true, stop_sequences, ..plain() })
}

fn reasoning(unit: &str, num_tokens: usize) -> (Vec<u32>, Parsing) {
    let thinking_initial_stage = Some(ThinkingStage::ReasoningStart);
    (long(num_tokens, "", unit), Parsing { thinking_initial_stage, ..plain() })
}

/// Output inside a call's one parameter.
fn argument(is_string: bool, unit: &str, num_tokens: usize) -> (Vec<u32>, Parsing) {
    let whole = call("f", &[("a", is_string, "\0")]);
    let (start, _) = whole.split_once('\0').expect("the place of the value");
    let ids = long(num_tokens, start, unit);
    (ids, Parsing { parse_tool_calls: true, starts_in_tool_calls: true, ..plain() })
}

fn plain() -> Parsing {
    Parsing::default()
}

const OUTPUTS: [(&str, Output); 12] = [
    ("content", |num| content("Some words, and then more of them. ", num)),
    ("content that often starts a marker", |num| content("a < b </ c never\n\n", num)),
    ("content in CJK", |num| content("可以说明，这是一个问题。", num)),
    ("reasoning", |num| reasoning("So it is; but 17 is more than 12. ", num)),
    ("reasoning in CJK", |num| reasoning("可以说明，这是一个问题。", num)),
    ("reasoning in numbers", |num| reasoning("12 345\n6789 ", num)),
    ("reasoning in code", |num| reasoning("{a1:[2,3]};\n\t", num)),
    ("reasoning in base64", |num| reasoning("aGVs5bG8g29ybGQ7", num)),
    ("a JSON answer", |num| {
        (long(num, "{\"a\": [", "\"b\", 1, "), Parsing { parse_json_output: true, ..plain() })
    }),
    ("a string argument", |num| argument(true, "a line \"quoted\"\nand one more ", num)),
    ("another argument", |num| argument(false, "[1, {\"b\": null}], ", num)),
    ("text behind the calls", |num| {
        let parsing = Parsing { parse_tool_calls: true, starts_in_tool_calls: true, ..plain() };
        (long(num, &(call("f", &[]) + "\n</｜DSML｜ calls>"), "swallowed "), parsing)
    }),
];

/// The bytes that a stream holds after these ids, one a push, its events dropped as they come.
fn held_after(
    ids: &[u32],
    protocol: Protocol,
    parsing: &Parsing,
    eager: bool,
    has_logprobs: bool,
) -> usize {
    let config = StreamConfig {
        response_id: "r".to_owned(),
        eager,
        writes_events: Some(true),
        keeps_response: Some(false),
        ..StreamConfig::default()
    };
    let logprobs = [TokenLogprob { logprob: -0.5, top: vec![(300, -0.5), (301, -2.0)] }];
    let logprobs = has_logprobs.then_some(&logprobs[..]);
    let mut out = EventBuffer::default();
    let before = held();
    let mut stream = open(protocol, parsing, &config);
    let mut most = 0;
    for (index, id) in ids.iter().enumerate() {
        let chunk = Chunk::Tokens { ids: std::slice::from_ref(id), logprobs };
        stream.push(chunk, 1, &mut out).expect("the stream runs");
        out.clear();
        // The most of the last hundred pushes: where a marker stands must not decide.
        if index + 100 > ids.len() {
            out = EventBuffer::default();
            most = most.max(held() - before);
        }
    }
    assert!(!stream.is_over());
    most
}

#[test]
fn a_stream_holds_the_pending_marker_and_not_the_text() {
    tokenizer().count_full("A thread's own memory is not the stream's.");
    for (name, output) in OUTPUTS {
        let (short, parsing) = output(2_000);
        let (long, _) = output(20_000);
        assert_eq!((short.len(), long.len()), (2_000, 20_000));
        for protocol in PROTOCOLS {
            for (eager, has_logprobs) in [(false, false), (true, false), (false, true)] {
                let few = held_after(&short, protocol, &parsing, eager, has_logprobs);
                let many = held_after(&long, protocol, &parsing, eager, has_logprobs);
                let case = format!("{name}, {protocol:?}, eager {eager}, logprobs {has_logprobs}");
                let num_text_bytes = tokenizer().decode(&long).len();
                // Responses repeats the text of the open item when that is done.
                let repeated = if protocol == Protocol::Responses {
                    let entry = if has_logprobs { 200 } else { 0 };
                    3 * (num_text_bytes + entry * long.len())
                } else {
                    0
                };
                assert!(
                    many <= few + MAX_GROWTH_BYTES + repeated,
                    "{case}: {few} bytes after {} tokens, {many} after {} ({num_text_bytes} of text)",
                    short.len(),
                    long.len()
                );
            }
        }
    }
}
