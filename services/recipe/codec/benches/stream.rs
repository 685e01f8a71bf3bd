//! Nanoseconds per token of the stream path, one token a push, JSON included.
//!
//! `cargo bench --bench stream`; the budget is recipe.md, section 16: 500 ns a token.

#[path = "../tests/support/mod.rs"]
mod support;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use pelagos_codec::stream::batch::{BatchOutput, StreamTable};
use pelagos_codec::stream::{
    BackendFinish, Chunk, EventBuffer, Op, Processor, StageTable, Stream, StreamConfig,
};
use pelagos_codec::types::{Parsing, ResponseOptions, SpecialTokens, ThinkingStage};

const PROSE: &str = "The tide tables were printed on thin paper, and every morning someone pinned \
    the new sheet over the old one: 04:12 low, 10:37 high. \"Mind the step,\" she said. 潮汐表每天早上\
    都会更新，没有人记得是谁贴上去的。 fn main() { println!(\"{}\", 6 * 7); } 🌊\n";
const NUM_TOKENS: usize = 16_384;
const NUM_ROUNDS: usize = 15;

/// Returns the best time of a few rounds, in nanoseconds per token; the machine is not ours alone.
fn best(num_tokens: usize, mut round: impl FnMut()) -> f64 {
    (0..NUM_ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed().as_nanos() as f64 / num_tokens as f64
        })
        .fold(f64::INFINITY, f64::min)
}

fn report(what: &str, value: f64, unit: &str) {
    println!("{what:<44} {value:>9.1} {unit}");
}

fn prose_ids() -> Vec<u32> {
    let line = support::tokenizer().encode_plain(PROSE);
    line.iter().copied().cycle().take(NUM_TOKENS).collect()
}

fn call_ids() -> Vec<u32> {
    let tokenizer = support::tokenizer();
    let dsml = tokenizer.added_id("｜DSML｜").expect("a V4.1 vocabulary");
    let mut ids = Vec::new();
    for part in ["\n\n<", " calls>\n<", " invoke name=\"write\">\n<"] {
        ids.extend(tokenizer.encode_plain(part));
        ids.push(dsml);
    }
    ids.extend(tokenizer.encode_plain(" parameter name=\"text\" string=\"true\">"));
    ids.extend(prose_ids());
    ids
}

fn protocols() -> [(&'static str, ResponseOptions); 3] {
    [
        ("chat", ResponseOptions::Chat { stream: true, include_usage: true }),
        ("messages", ResponseOptions::Messages { stream: true }),
        (
            "responses",
            ResponseOptions::Responses {
                stream: true,
                echo: serde_json::Map::new(),
                namespaces: None,
                custom_tools: Vec::new(),
                client_tool_search: false,
            },
        ),
    ]
}

fn parsing(stage: Option<ThinkingStage>) -> Parsing {
    Parsing { parse_tool_calls: true, thinking_initial_stage: stage, ..Parsing::default() }
}

fn config() -> StreamConfig {
    StreamConfig {
        response_id: "0d6f3a52-5f0f-4f0e-9a52-7f3f1c9a6b11".to_owned(),
        model: "DeepSeek-V4.1-Flash".to_owned(),
        created: 1_700_000_000,
        ..StreamConfig::default()
    }
}

fn run_stream(mut stream: Stream, ids: &[u32], out: &mut EventBuffer) {
    for id in ids {
        out.clear();
        let chunk = Chunk::Tokens { ids: std::slice::from_ref(id), logprobs: None };
        stream.push(chunk, 0, out).expect("no error");
        black_box(out.sse());
    }
    out.clear();
    stream.push(Chunk::Finish(BackendFinish::Stop), 0, out).expect("no error");
    black_box(out.sse());
}

fn main() {
    let prose = prose_ids();
    let calls = call_ids();
    let mut out = EventBuffer::default();

    let table = Arc::new(StageTable::new(&parsing(None), &SpecialTokens::default()));
    let time = best(prose.len(), || {
        let vocabulary = Some(support::vocabulary());
        let mut processor = Processor::new(Arc::clone(&table), vocabulary, false, false, false);
        for id in &prose {
            let chunk = Chunk::Tokens { ids: std::slice::from_ref(id), logprobs: None };
            processor.push(chunk, &mut |op: Op<'_>| _ = black_box(op)).expect("no error");
        }
    });
    report("parser alone, content", time, "ns/token");

    for (name, response) in protocols() {
        let stages = [
            ("content", None, &prose),
            ("reasoning", Some(ThinkingStage::ReasoningStart), &prose),
            ("call arguments", None, &calls),
        ];
        for (what, stage, ids) in stages {
            let parsing = parsing(stage);
            let time = best(ids.len(), || {
                let vocabulary = Some(support::vocabulary());
                let stream = Stream::from_parts(&parsing, &response, &config(), vocabulary);
                run_stream(stream, ids, &mut out);
            });
            report(&format!("{name}, {what}"), time, "ns/token");
        }
    }

    for (name, response) in protocols() {
        let parsing = parsing(None);
        let num_streams = 256;
        let counts = vec![1u32; num_streams];
        let time = best(num_streams * 64, || {
            let mut streams = StreamTable::default();
            let open =
                || Stream::from_parts(&parsing, &response, &config(), Some(support::vocabulary()));
            let handles: Vec<u32> = (0..num_streams).map(|_| streams.insert(open())).collect();
            let mut output = BatchOutput::default();
            for step in 0..64 {
                let ids = &prose[step * 7..step * 7 + num_streams];
                streams.push_tokens(&handles, &counts, ids, 0, &mut output).expect("lengths agree");
                black_box(output.events.sse());
            }
        });
        report(&format!("{name}, batch of 256, opening included"), time, "ns/token");
    }

    let parsing = parsing(Some(ThinkingStage::ReasoningStart));
    for (name, response) in protocols() {
        let time = best(1, || {
            let vocabulary = Some(support::vocabulary());
            black_box(Stream::from_parts(&parsing, &response, &config(), vocabulary));
        });
        report(&format!("{name}, open a stream"), time / 1e3, "us");
    }
    let mut finish = f64::INFINITY;
    for _ in 0..NUM_ROUNDS {
        let response = ResponseOptions::Chat { stream: true, include_usage: true };
        let vocabulary = Some(support::vocabulary());
        let mut stream = Stream::from_parts(&parsing, &response, &config(), vocabulary);
        for ids in prose.iter().cycle().take(65_536).copied().collect::<Vec<u32>>().chunks(1) {
            out.clear();
            stream.push(Chunk::Tokens { ids, logprobs: None }, 0, &mut out).expect("no error");
        }
        let start = Instant::now();
        stream.push(Chunk::Finish(BackendFinish::Stop), 0, &mut out).expect("no error");
        finish = finish.min(start.elapsed().as_nanos() as f64);
    }
    report("finish after 65,536 reasoning tokens", finish / 1e3, "us");
}
