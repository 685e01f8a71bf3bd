//! What kind of character a code point is to the pre-tokenizer.

use std::sync::LazyLock;

use super::class_table::RUNS;

/// One of the kinds below; `CJK` is a flag on top of one.
pub type Class = u8;

/// `\p{L}`
pub const LETTER: Class = 1;
/// `\p{M}`
pub const MARK: Class = 2;
/// `\p{P}` or `\p{S}`
pub const PUNCT: Class = 4;
/// `\p{N}`
pub const NUMBER: Class = 8;
/// `\s` but carriage return and line feed
pub const SPACE: Class = 16;
/// Carriage return and line feed
pub const NEWLINE: Class = 32;
/// Nothing of these: controls, formats, unassigned code points
pub const OTHER: Class = 64;
/// In the CJK ranges of rule 2
pub const CJK: Class = 128;

const NUM_CODE_POINTS: usize = 0x11_0000;

/// One byte per code point. A text touches only the lines of its own scripts.
static TABLE: LazyLock<Box<[Class]>> = LazyLock::new(|| {
    let mut table = vec![OTHER; NUM_CODE_POINTS].into_boxed_slice();
    for (index, &(start, class)) in RUNS.iter().enumerate() {
        let end = RUNS.get(index + 1).map_or(NUM_CODE_POINTS, |next| next.0 as usize);
        table[start as usize..end].fill(class);
    }
    table
});

/// The classes of the first 128 code points; other bytes are 0.
pub static ASCII: [Class; 256] = ascii();

const fn ascii() -> [Class; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 128 {
        table[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => LETTER,
            b'0'..=b'9' => NUMBER,
            b'\r' | b'\n' => NEWLINE,
            b' ' | b'\t' | 0x0B | 0x0C => SPACE,
            0x21..=0x7E => PUNCT,
            _ => OTHER,
        };
        byte += 1;
    }
    table
}

/// The class of a code point below 0x110000.
#[inline(always)]
pub fn class_of(code: u32) -> Class {
    TABLE[code as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards the generated table, and says which engine's Unicode version it has.
    #[test]
    fn class_table_equals_the_regexes() {
        let all: Vec<char> = (0..NUM_CODE_POINTS as u32).filter_map(char::from_u32).collect();
        let text: String = all.iter().collect();
        let kinds = [
            (r"\p{L}+", LETTER),
            (r"\p{M}+", MARK),
            (r"[\p{P}\p{S}]+", PUNCT),
            (r"\p{N}+", NUMBER),
            (r"[\s--[\r\n]]+", SPACE),
            (r"[\r\n]+", NEWLINE),
            ("[一-龥぀-ゟ゠-ヿ]+", CJK),
        ];
        let mut classes = vec![0; NUM_CODE_POINTS];
        for (pattern, kind) in kinds {
            let regex = regex::Regex::new(pattern).expect("a pattern");
            for char in regex.find_iter(&text).flat_map(|found| found.as_str().chars()) {
                // One kind at most: a character of two would show as their sum.
                classes[char as usize] |= kind;
            }
        }
        for char in all {
            let code = char as u32;
            let class = classes[code as usize];
            let wanted = if class & !CJK == 0 { class | OTHER } else { class };
            assert_eq!(class_of(code), wanted, "{code:#x}");
            if code < 0x80 {
                assert_eq!(ASCII[code as usize], wanted, "{code:#x}");
            }
        }
    }
}
