#![no_main]

#[path = "../../tests/fuzz/targets.rs"]
#[allow(dead_code, reason = "one target of three")]
mod targets;

use std::path::Path;
use std::sync::{Arc, LazyLock};

use pelagos_codec::encode::Tokenizer;

/// Named by PELAGOS_TOKENIZER; see `services/recipe/make_tokenizer.py`.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let path = std::env::var("PELAGOS_TOKENIZER").expect("PELAGOS_TOKENIZER names a file");
    Arc::new(Tokenizer::from_file(Path::new(&path)).expect("a tokenizer file"))
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::parse_output(&TOKENIZER, data));
