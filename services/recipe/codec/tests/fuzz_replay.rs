//! The kept corpus of the fuzz targets, and a fixed course of mutations of it.

#[path = "fuzz/targets.rs"]
mod targets;

mod support;

use std::path::Path;

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
    // The kept bodies have no choice byte: each is tried on every protocol.
    replay("convert", |body| {
        for choice in 0..3 {
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
