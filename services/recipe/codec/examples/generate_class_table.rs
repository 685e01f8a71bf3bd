//! Writes `src/encode/class_table.rs` from the Unicode tables of the regex engine.
//!
//! Run in the crate's folder: `cargo run --example generate_class_table > src/encode/class_table.rs`

use regex::Regex;

fn main() {
    // Constants of `classes.rs`; the test `class_table_equals_the_regexes` guards their meaning.
    let kinds = [
        (r"^\p{N}$", 8),
        (r"^[\r\n]$", 32),
        (r"^\s$", 16),
        (r"^\p{L}$", 1),
        (r"^\p{M}$", 2),
        (r"^[\p{P}\p{S}]$", 4),
    ]
    .map(|(pattern, class)| (Regex::new(pattern).expect("a valid pattern"), class));
    let cjk = Regex::new("^[一-龥぀-ゟ゠-ヿ]$").expect("a valid pattern");

    println!("//! Made by `examples/generate_class_table.rs`; not edited by hand.\n");
    println!("/// (first code point, class), ascending; a run ends where the next starts.");
    println!("pub static RUNS: &[(u32, u8)] = &[");
    let mut last = None;
    for code in 0..0x11_0000u32 {
        let class = char::from_u32(code).map_or(64, |c| {
            let text = c.to_string();
            let kind = kinds.iter().find(|(regex, _)| regex.is_match(&text)).map_or(64, |k| k.1);
            kind | if cjk.is_match(&text) { 128 } else { 0 }
        });
        if last != Some(class) {
            println!("    ({code:#x}, {class}),");
            last = Some(class);
        }
    }
    println!("];");
}
