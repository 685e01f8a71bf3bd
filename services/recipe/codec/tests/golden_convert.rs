//! Conversion, rendering, limits and image sizes against the golden vectors.

mod golden;

use pelagos_codec::convert::{self, Options, view};
use pelagos_codec::types::{Detail, Effort, Protocol, ResponseOptions, Stage};
use pelagos_codec::{images, max_tokens, render};
use serde_json::Value;

use golden::{body_of, differences, lines, protocol_of};

fn check_render_file(name: &str, protocol: Protocol, num_expected: usize) {
    let cases = lines(name);
    assert!(cases.len() >= num_expected, "{name} holds {} lines", cases.len());
    for case in cases {
        let id = &case["id"];
        let options = Options::from_json(&case["options"]).expect("options are known");
        let request = convert::convert(protocol, &body_of(&case["request"]), &options)
            .unwrap_or_else(|error| panic!("{id}: {error}"));
        let rendered =
            render::render(&request.conversation, request.model_version, &options.special_tokens);
        let mut expected = case["expect"].clone();
        let map = expected.as_object_mut().expect("expect is an object");
        // The ids are the encoder's test.
        map.remove("n_tokens");
        map.remove("ids_sha256");
        let actual = view::rendered_request(&request, &rendered);
        assert_eq!(differences(&expected, &actual), Vec::<String>::new(), "{id}");
        for (from, to) in rendered.prompt.specials {
            assert!(rendered.prompt.text.get(from..to).is_some(), "{id}: {from}..{to}");
        }
    }
}

#[test]
fn chat_requests_convert_and_render_as_recorded() {
    check_render_file("render_chat.jsonl", Protocol::Chat, 200);
}

#[test]
fn responses_requests_convert_and_render_as_recorded() {
    check_render_file("render_responses.jsonl", Protocol::Responses, 66);
}

#[test]
fn messages_requests_convert_and_render_as_recorded() {
    check_render_file("render_messages.jsonl", Protocol::Messages, 69);
}

/// The words of a schema validator or a serializer are not contractual.
fn comparable(message: &str) -> &str {
    let is_own_sentence = message.contains("schema must be a JSON Schema of 'type: \"object\"'");
    if message.starts_with("Invalid schema for function '") && !is_own_sentence {
        return message.split_once("': ").map_or(message, |(prefix, _)| prefix);
    }
    if message.starts_with("Invalid json schema: ") {
        return "Invalid json schema: ";
    }
    if message.contains("cannot be serialized") || message.contains("cannot be reported") {
        return message.split_once(": ").map_or(message, |(prefix, _)| prefix);
    }
    message
}

#[test]
fn bad_requests_are_refused_with_the_recorded_words() {
    let cases = lines("errors.jsonl");
    assert!(cases.len() >= 444);
    for case in cases {
        let (id, expected) = (&case["id"], &case["expect"]);
        let options = Options::from_json(&case["options"]).expect("options are known");
        let protocol = protocol_of(case["protocol"].as_str().expect("protocol"));
        let error = convert::convert(protocol, &body_of(&case["request"]), &options)
            .err()
            .unwrap_or_else(|| panic!("{id} is accepted, not refused with {expected}"));
        assert_eq!(Value::from(error.status), expected["status"], "{id}");
        let message = expected["message"].as_str().expect("message");
        if expected["stage"] == "deserialize" {
            assert_eq!(error.stage, Stage::Deserialize, "{id}: {error}");
            assert_eq!(error.message.split(':').next(), message.split(':').next(), "{id}");
            continue;
        }
        assert_eq!(error.stage, Stage::Convert, "{id}: {error}");
        assert_eq!(comparable(&error.message), comparable(message), "{id}");
        if comparable(message) == message {
            assert_eq!(error.body(), expected["body"], "{id}");
        }
    }
}

#[test]
fn max_tokens_resolve_as_recorded() {
    let cases = lines("max_tokens.jsonl");
    assert!(cases.len() >= 128);
    for case in cases {
        let number = |key: &str| case[key].as_u64().map(|value| value as u32);
        let effort = match case["effort"].as_str() {
            None => None,
            Some("low") => Some(Effort::Low),
            Some("high") => Some(Effort::High),
            Some("xhigh") => Some(Effort::Xhigh),
            Some("max") => Some(Effort::Max),
            Some(other) => panic!("unknown effort {other}"),
        };
        let resolved = max_tokens::resolve_parts(
            case["thinking"].as_bool().expect("thinking"),
            effort,
            number("requested"),
            number("prompt_tokens").expect("prompt_tokens"),
            number("context_limit").expect("context_limit"),
        );
        let expected = &case["expect"];
        match resolved {
            Ok(tokens) => assert_eq!(Value::from(tokens), expected["max_tokens"], "{case}"),
            Err(error) => {
                assert_eq!(Value::from(error.status), expected["status"], "{case}");
                assert_eq!(error.body(), expected["body"], "{case}");
            }
        }
    }
}

fn side(case: &Value, key: &str) -> u32 {
    case[key].as_u64().expect("a size in pixels") as u32
}

#[test]
fn image_tokens_count_as_recorded() {
    let cases = lines("image_tokens.jsonl");
    assert!(cases.len() >= 167);
    for case in cases {
        let tokens = images::num_tokens(
            side(&case, "width"),
            side(&case, "height"),
            images::Limits::default(),
        );
        assert_eq!(tokens.map(Value::from), Ok(case["tokens"].clone()), "{case}");
    }
}

#[test]
fn images_resize_as_recorded() {
    let cases = lines("image_resize.jsonl");
    assert!(cases.len() >= 64);
    for case in cases {
        let detail = match case["detail"].as_str() {
            Some("low") => Detail::Low,
            Some("high") => Detail::High,
            Some("original") => Detail::Original,
            Some("auto") => Detail::Auto,
            other => panic!("unknown detail {other:?}"),
        };
        let size = images::target_size(
            side(&case, "width"),
            side(&case, "height"),
            detail,
            images::Limits::default(),
        );
        if case.get("error").is_some() {
            assert!(size.is_err(), "{case}");
        } else {
            assert_eq!(size, Ok((side(&case, "out_width"), side(&case, "out_height"))), "{case}");
        }
    }
}

/// Odd requests that the golden files do not hold, with the answers of the reference codec. They
/// fix the order of checks, nulls, strict schemas, echoed fields and the joining of odd blocks.
#[test]
fn odd_requests_are_answered_as_by_the_reference_codec() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/convert_cases.jsonl");
    let text = std::fs::read_to_string(path).expect("the cases are in the repository");
    let mut num_cases = 0;
    for (number, line) in text.lines().enumerate() {
        let case: Value = serde_json::from_str(line).expect("a JSON line");
        let (id, expected) = (number + 1, &case["expect"]);
        let options = Options::from_json(&case["options"]).expect("options are known");
        let protocol = protocol_of(case["protocol"].as_str().expect("protocol"));
        match convert::convert(protocol, &body_of(&case["request"]), &options) {
            Ok(request) => {
                let rendered = render::render(
                    &request.conversation,
                    request.model_version,
                    &options.special_tokens,
                );
                let mut actual = view::rendered_request(&request, &rendered);
                if let ResponseOptions::Responses { echo, .. } = request.response {
                    actual["echo"] = Value::Object(echo);
                }
                // Long prompts are not recorded.
                let map = actual.as_object_mut().expect("a view is an object");
                map.retain(|key, _| expected.get(key).is_some());
                assert_eq!(differences(expected, &actual), Vec::<String>::new(), "line {id}");
            }
            Err(error) => {
                assert_eq!(expected["ok"], false, "line {id}: {error}");
                assert_eq!(Value::from(error.status), expected["status"], "line {id}");
                let message = expected["message"].as_str().expect("message");
                let is_form = error.stage == Stage::Deserialize;
                assert_eq!(is_form, expected["stage"] == "deserialize", "line {id}: {error}");
                let actual = error.message.as_str();
                let actual =
                    if is_form { actual.split(':').next().unwrap_or(actual) } else { actual };
                assert_eq!(comparable(actual), comparable(message), "line {id}");
            }
        }
        num_cases += 1;
    }
    assert!(num_cases >= 200, "only {num_cases} cases");
}
