//! What the fuzz targets do with bytes; the replay test runs the same on the kept corpus.

use std::sync::Arc;

use pelagos_codec::convert::{self, Options, StrictSchemaKeywords, view};
use pelagos_codec::encode::Tokenizer;
use pelagos_codec::render;
use pelagos_codec::stream::{BackendFinish, Chunk, EventBuffer, Stream, StreamConfig, Vocabulary};
use pelagos_codec::types::{Parsing, Protocol, ResponseOptions, ThinkingStage};

/// How many choices of protocol and options the first byte of a body has.
pub const NUM_CHOICES: u8 = 6;

/// The first byte chooses the protocol and the options, the rest is the body.
pub fn convert_body(data: &[u8]) {
    let Some((choice, body)) = data.split_first() else { return };
    let protocol = [Protocol::Chat, Protocol::Responses, Protocol::Messages][*choice as usize % 3];
    let strict_schema_keywords = match choice % NUM_CHOICES / 3 {
        0 => StrictSchemaKeywords::Drop,
        _ => StrictSchemaKeywords::Enforce,
    };
    let options = Options { strict_schema_keywords, ..Options::default() };
    if let Ok(request) = convert::convert(protocol, body, &options) {
        let version = request.model_version;
        let rendered = render::render(&request.conversation, version, &options.special_tokens);
        for (from, to) in &rendered.prompt.specials {
            assert!(rendered.prompt.text.get(*from..*to).is_some(), "ranges cut no character");
        }
        view::rendered_request(&request, &rendered);
    }
}

/// Any text: ids decode to it, no added id appears, and cutting it changes nothing.
pub fn encode_text(tokenizer: &Arc<Tokenizer>, data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let ids = tokenizer.encode_plain(&text);
    assert_eq!(tokenizer.decode(&ids), text);
    assert!(ids.iter().all(|id| !tokenizer.is_added(*id)));
    let full = tokenizer.encode_full(&text);
    assert_eq!(tokenizer.decode(&full), text);
    let mut counter = tokenizer.counter();
    let mut rest = &*text;
    while !rest.is_empty() {
        let mut at = rest.len().min(1 + rest.len() / 3);
        while !rest.is_char_boundary(at) {
            at += 1;
        }
        counter.push(&rest[..at]);
        rest = &rest[at..];
    }
    assert_eq!(counter.count(), full.len() as u64);
}

/// The first bytes choose how the output is parsed and cut, the rest are ids or text.
pub fn parse_output(tokenizer: &Arc<Tokenizer>, data: &[u8]) {
    let [flags, cut, data @ ..] = data else { return };
    let flag = |bit: u8| flags >> bit & 1 == 1;
    let parsing = Parsing {
        parse_tool_calls: flag(0),
        starts_in_tool_calls: flag(1),
        parse_json_output: flag(2),
        thinking_initial_stage: flag(3).then_some(ThinkingStage::ReasoningStart),
        stop_sequences: if flag(4) { vec!["end".into(), "\n\n".into()] } else { Vec::new() },
    };
    let response = ResponseOptions::Chat { stream: true, include_usage: false };
    let config = StreamConfig {
        writes_events: Some(true),
        keeps_response: Some(true),
        eager: flag(5),
        ..StreamConfig::default()
    };
    let vocabulary = Arc::clone(tokenizer) as Arc<dyn Vocabulary>;
    let mut stream = Stream::from_parts(&parsing, &response, &config, Some(vocabulary));
    let mut out = EventBuffer::default();
    let size = 1 + usize::from(*cut % 9);
    if flag(6) {
        let text = String::from_utf8_lossy(data);
        let chars: Vec<char> = text.chars().collect();
        for chunk in chars.chunks(size) {
            let content: String = chunk.iter().collect();
            push(&mut stream, Chunk::Text { content: &content, token_count: 1 }, &mut out);
        }
    } else {
        // Two bytes an id; the highest ones are moved onto the added vocabulary.
        let ids: Vec<u32> = data
            .chunks_exact(2)
            .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])))
            .map(|id| if id >= 0xF800 { 128_799 + (id - 0xF800) } else { id })
            .collect();
        for chunk in ids.chunks(size) {
            push(&mut stream, Chunk::Tokens { ids: chunk, logprobs: None }, &mut out);
        }
    }
    push(&mut stream, Chunk::Finish(BackendFinish::Stop), &mut out);
    assert!(stream.is_over());
    serde_json::from_slice::<serde_json::Value>(&stream.folded()).expect("a JSON response");
    for (_, json) in out.iter() {
        serde_json::from_slice::<serde_json::Value>(json).expect("a JSON event");
    }
}

fn push(stream: &mut Stream, chunk: Chunk<'_>, out: &mut EventBuffer) {
    if !stream.is_over() {
        stream.push(chunk, 1, out).expect("ids with a tokenizer never fail");
    }
}
