//! Reading of the golden vectors. A missing folder fails: the vectors are part of the checkout's
//! surroundings, and a test that passes without them proves nothing.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::PathBuf;

use pelagos_codec::types::Protocol;
use serde_json::Value;

/// The folder named by PELAGOS_GOLDEN, or the one beside the repository.
fn folder() -> PathBuf {
    match std::env::var_os("PELAGOS_GOLDEN") {
        Some(folder) => folder.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/golden/recipe"),
    }
}

/// The cases of one file.
pub fn lines(name: &str) -> Vec<Value> {
    let path = folder().join(name);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// The bytes of a request: a string is a raw body, anything else is written as JSON.
pub fn body_of(request: &Value) -> Vec<u8> {
    match request {
        Value::String(raw) => raw.clone().into_bytes(),
        other => other.to_string().into_bytes(),
    }
}

pub fn protocol_of(name: &str) -> Protocol {
    match name {
        "chat" => Protocol::Chat,
        "responses" => Protocol::Responses,
        "messages" => Protocol::Messages,
        other => panic!("unknown protocol {other}"),
    }
}

/// Where `actual` differs from `expected`, both ways; empty when equal. Key order does not count,
/// and a number equals another of the same value.
pub fn differences(expected: &Value, actual: &Value) -> Vec<String> {
    let mut out = Vec::new();
    compare("", expected, actual, &mut out);
    out
}

fn compare(path: &str, expected: &Value, actual: &Value, out: &mut Vec<String>) {
    match (expected, actual) {
        (Value::Object(left), Value::Object(right)) => {
            for (key, value) in left {
                let path = format!("{path}.{key}");
                compare(&path, value, right.get(key).unwrap_or(&Value::Null), out);
            }
            for key in right.keys().filter(|key| !left.contains_key(*key)) {
                out.push(format!("{path}.{key}: not expected"));
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (index, (left, right)) in left.iter().zip(right).enumerate() {
                compare(&format!("{path}[{index}]"), left, right, out);
            }
        }
        (Value::Number(left), Value::Number(right)) if left.as_f64() == right.as_f64() => {}
        (left, right) if left == right => {}
        (left, right) => out.push(format!("{path}: expected {left}, got {right}")),
    }
}
