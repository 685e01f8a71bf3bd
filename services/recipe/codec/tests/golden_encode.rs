//! Ids of the golden vectors: explicit ones, every code point, and those of rendered prompts.

mod golden;
mod support;

use pelagos_codec::convert::{self, Options, view};
use pelagos_codec::render;
use pelagos_codec::types::{Prompt, Protocol};
use serde_json::Value;

use golden::{body_of, lines};
use support::{ids, tokenizer};

/// Byte ranges of code point ranges.
fn byte_ranges(text: &str, ranges: &Value) -> Vec<(usize, usize)> {
    let starts: Vec<usize> =
        text.char_indices().map(|(at, _)| at).chain(std::iter::once(text.len())).collect();
    let at = |value: &Value| starts[value.as_u64().expect("an offset") as usize];
    let ranges = ranges.as_array().expect("a list");
    ranges.iter().map(|range| (at(&range[0]), at(&range[1]))).collect()
}

#[test]
fn explicit_ids_are_as_recorded() {
    let cases = lines("encode.jsonl");
    assert!(cases.len() >= 197, "{} lines", cases.len());
    for case in cases {
        let got = match case["text"].as_str() {
            Some(text) => tokenizer().encode_plain(text),
            None => {
                let text = case["prompt"].as_str().expect("a prompt").to_owned();
                let specials = byte_ranges(&text, &case["special_ranges"]);
                tokenizer().encode_prompt(&Prompt { text, specials }).expect("known specials")
            }
        };
        assert_eq!(got, ids(&case["ids"]), "{case}");
    }
}

/// SHA-256 of ids as little-endian u32, as the vectors have it.
fn digest(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    support::sha256::hex(&bytes)
}

#[test]
fn every_code_point_is_classed_as_recorded() {
    let cases = lines("encode_unicode.jsonl");
    let mut num_code_points = 0;
    for case in cases {
        let (first, count) = (case["first"].as_u64(), case["count"].as_u64());
        let first = first.expect("first") as u32;
        let count = count.expect("count") as usize;
        let pattern = case["pattern"].as_str().expect("pattern");
        let text: String = (first..=0x10_FFFF)
            .filter_map(char::from_u32)
            .take(count)
            .map(|code_point| pattern.replace("{0}", code_point.encode_utf8(&mut [0; 4])))
            .collect();
        let ids = tokenizer().encode_plain(&text);
        assert_eq!(ids.len() as u64, case["n_tokens"].as_u64().expect("n_tokens"), "{first:#x}");
        assert_eq!(digest(&ids), case["ids_sha256"].as_str().expect("a digest"), "{first:#x}");
        num_code_points += count;
    }
    assert!(num_code_points >= 1_112_064, "{num_code_points}");
}

#[test]
fn prompts_encode_as_recorded() {
    let files = [
        ("render_chat.jsonl", Protocol::Chat),
        ("render_responses.jsonl", Protocol::Responses),
        ("render_messages.jsonl", Protocol::Messages),
    ];
    for (name, protocol) in files {
        for case in lines(name) {
            let id = &case["id"];
            let options = Options::from_json(&case["options"]).expect("options are known");
            let request = convert::convert(protocol, &body_of(&case["request"]), &options)
                .unwrap_or_else(|error| panic!("{id}: {error}"));
            let version = request.model_version;
            let rendered = render::render(&request.conversation, version, &options.special_tokens);
            let ranges = view::code_point_ranges(&rendered.prompt);
            assert_eq!(serde_json::json!(ranges), case["expect"]["special_ranges"], "{id}");
            // Twice: the second time from the cache.
            for _ in 0..2 {
                let ids = tokenizer().encode_prompt(&rendered.prompt).expect("known specials");
                assert_eq!(
                    ids.len() as u64,
                    case["expect"]["n_tokens"].as_u64().expect("n"),
                    "{id}"
                );
                assert_eq!(digest(&ids), case["expect"]["ids_sha256"], "{id}");
            }
        }
    }
}
