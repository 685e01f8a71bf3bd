#![no_main]

#[path = "../../tests/fuzz/targets.rs"]
#[allow(dead_code, reason = "one target of three")]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::convert_body(data));
