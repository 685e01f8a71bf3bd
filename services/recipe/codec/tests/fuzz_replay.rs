//! The kept corpus of the fuzz targets, and a fixed course of mutations of it.
//!
//! `make campaign-fuzz` goes on with it for minutes, from a seed of its own: cargo-fuzz is guided by
//! coverage but needs a nightly compiler; this runs wherever the tests do.

#[path = "fuzz/targets.rs"]
mod targets;

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use support::streams::Rng;
use support::tokenizer;

const NUM_MUTATIONS: usize = 40;

/// The kept inputs of one target.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{folder:?}: {e}"));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_none_or(|extension| extension != "md"));
    paths.sort();
    assert!(!paths.is_empty(), "no corpus in {folder:?}");
    paths.iter().map(|path| std::fs::read(path).expect("a readable file")).collect()
}

fn mutated(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut data = rng.pick(seeds).clone();
    for _ in 0..1 + rng.below(6) {
        let at = rng.below(data.len() + 1);
        match rng.below(5) {
            0 => data.truncate(at),
            1 => data.insert(at, rng.next() as u8),
            2 if at < data.len() => data[at] ^= 1 << rng.below(8),
            3 => {
                let other = rng.pick(seeds);
                let from = rng.below(other.len() + 1);
                let to = other.len().min(from + rng.below(40));
                data.splice(at..at, other[from..to].iter().copied());
            }
            _ => {
                let to = data.len().min(at + rng.below(20));
                data.drain(at..to);
            }
        }
    }
    data
}

fn replay(target: &str, run: impl Fn(&[u8])) {
    let seeds = corpus(target);
    for seed in &seeds {
        run(seed);
    }
    let mut rng = Rng(1);
    for _ in 0..NUM_MUTATIONS * seeds.len().min(50) {
        run(&mutated(&mut rng, &seeds));
    }
}

#[test]
fn no_kept_or_mutated_body_breaks_conversion() {
    // The kept bodies have no choice byte: each is tried with every choice.
    replay("convert", |body| {
        for choice in 0..targets::NUM_CHOICES {
            targets::convert_body(&[&[choice], body].concat());
        }
    });
}

#[test]
fn no_kept_or_mutated_text_breaks_encoding() {
    replay("encode", |data| targets::encode_text(&tokenizer(), data));
}

#[test]
fn no_kept_or_mutated_output_breaks_the_parser() {
    replay("parser", |data| targets::parse_output(&tokenizer(), data));
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}")))
}

/// The name of a target and what it does with an input.
type Target<'a> = (&'a str, &'a dyn Fn(&[u8]));

/// Mutations of mutations for PELAGOS_FUZZ_SECONDS per target. An input that breaks its target is
/// written to PELAGOS_FUZZ_FOUND, from where it belongs into the corpus.
#[test]
#[ignore = "takes minutes: make campaign-fuzz"]
fn campaign() {
    let seconds = number("PELAGOS_FUZZ_SECONDS", 60);
    let seed = number("PELAGOS_FUZZ_SEED", 1);
    let found = std::env::var_os("PELAGOS_FUZZ_FOUND").expect("PELAGOS_FUZZ_FOUND names a folder");
    let tokenizer = tokenizer();
    let run_convert = |data: &[u8]| {
        (0..targets::NUM_CHOICES).for_each(|c| targets::convert_body(&[&[c], data].concat()));
    };
    let run_encode = |data: &[u8]| targets::encode_text(&tokenizer, data);
    let run_parser = |data: &[u8]| targets::parse_output(&tokenizer, data);
    let all: [Target; 3] =
        [("convert", &run_convert), ("encode", &run_encode), ("parser", &run_parser)];
    let mut num_broken = 0;
    for (target, run) in all {
        let mut pool = corpus(target);
        let mut rng = Rng(seed);
        let (mut num_inputs, mut num_bytes, mut slowest) = (0u64, 0u64, Duration::ZERO);
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end {
            let data = mutated(&mut rng, &pool);
            let start = Instant::now();
            if catch_unwind(AssertUnwindSafe(|| run(&data))).is_err() {
                let path = Path::new(&found).join(format!("{target}-{num_inputs}.bin"));
                std::fs::write(&path, &data).unwrap_or_else(|e| panic!("{path:?}: {e}"));
                num_broken += 1;
            }
            slowest = slowest.max(start.elapsed());
            (num_inputs, num_bytes) = (num_inputs + 1, num_bytes + data.len() as u64);
            // Some go on to be mutated again, in the place of any other but the kept ones.
            if rng.below(20) == 0 && data.len() < 1 << 16 {
                pool.push(data);
                if pool.len() > 4_000 {
                    let at = pool.len() / 2 + rng.below(pool.len() / 2);
                    pool.swap_remove(at);
                }
            }
        }
        println!(
            "{target}: seed {seed}, {num_inputs} inputs, {:.1} MB, slowest {} ms",
            num_bytes as f64 / 1e6,
            slowest.as_millis()
        );
    }
    assert_eq!(num_broken, 0, "inputs that broke their target are in {found:?}");
}
