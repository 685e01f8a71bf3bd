//! What encoding holds, counted by the allocator of this test's own process.

mod support;

use std::sync::atomic::Ordering;

use pelagos_codec::encode::{Limits, Tokenizer};
use support::counting::{Counting, HELD, PEAK};
use support::streams::Rng;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most that `work` held at once, above what was held before.
fn peak_of<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = work();
    (result, PEAK.load(Ordering::Relaxed) - before)
}

fn of_length(num_bytes: usize, mut next: impl FnMut() -> String) -> String {
    let mut text = String::new();
    while text.len() < num_bytes {
        text.push_str(&next());
    }
    text
}

#[test]
fn encoding_peaks_below_ten_times_the_text() {
    const NUM_BYTES: usize = 8_000_000;
    let mut rng = Rng(11);
    let mut letters = |num: usize| -> String {
        (0..num).map(|_| char::from(b'a' + rng.below(26) as u8)).collect()
    };
    let words: Vec<String> = (0..20_000).map(|index| letters(1 + index % 9)).collect();
    let mut rng = Rng(12);
    let texts = [
        ("words", of_length(NUM_BYTES, || format!("{} ", rng.pick(&words)))),
        ("one piece", letters(NUM_BYTES)),
        ("CJK", of_length(NUM_BYTES, || String::from("可以说明，这是一个"))),
    ];
    for num_threads in [1, 2] {
        let limits = Limits { num_threads, cache_bytes: 0 };
        let tokenizer = Tokenizer::with_limits(&support::tokenizer_file(), limits);
        let tokenizer = tokenizer.expect("the tokenizer file");
        tokenizer.encode_plain("A thread's own memory is not the text's.");
        for (name, text) in &texts {
            let (ids, peak) = peak_of(|| tokenizer.encode_plain(text));
            assert!(ids.len() > 1000);
            assert!(
                peak < 10 * text.len(),
                "{name}, {num_threads} threads: {peak} bytes for {} of text",
                text.len()
            );
        }
    }
}
