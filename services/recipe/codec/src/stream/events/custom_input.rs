//! Decodes the `input` string of a custom tool's arguments on the fly (recipe.md, section 15.3).

/// Takes fragments of the arguments' JSON and gives the decoded text as far as it is certain.
#[derive(Debug)]
pub struct CustomInput {
    state: State,
    /// Text consumed while the start or an escape is incomplete.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// So many bytes of `START` have matched.
    Start(usize),
    Text,
    Escape,
    /// The string's closing quote has come; the rest is ignored.
    Closed,
    /// The start did not match: everything passes through.
    Raw,
}

/// `{`, `"input"`, `:` and `"`, each of which may have ASCII whitespace before it.
const START: &[u8] = b"{\"input\":\"";

impl Default for CustomInput {
    fn default() -> Self {
        CustomInput { state: State::Start(0), held: String::new() }
    }
}

impl CustomInput {
    /// Appends to `out` what `fragment` makes certain.
    pub fn push(&mut self, fragment: &str, out: &mut String) {
        for (at, character) in fragment.char_indices() {
            match self.state {
                State::Start(matched) => {
                    self.held.push(character);
                    if character == char::from(START[matched]) {
                        self.state = State::Start(matched + 1);
                        if matched + 1 == START.len() {
                            self.state = State::Text;
                            self.held.clear();
                        }
                    } else if !(is_space(character) && may_follow_space(matched)) {
                        out.push_str(&self.held);
                        self.held.clear();
                        self.state = State::Raw;
                    }
                }
                State::Text => self.text(character, out),
                State::Escape => self.escape(character, out),
                State::Closed => return,
                State::Raw => {
                    out.push_str(&fragment[at..]);
                    return;
                }
            }
        }
    }

    /// Appends what is still held: an unfinished start or escape, as it came.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    fn text(&mut self, character: char, out: &mut String) {
        match character {
            '"' => self.state = State::Closed,
            '\\' => {
                self.held.push('\\');
                self.state = State::Escape;
            }
            _ => out.push(character),
        }
    }

    fn escape(&mut self, character: char, out: &mut String) {
        self.held.push(character);
        match decode_escape(&self.held) {
            Escape::Incomplete => return,
            Escape::Character(decoded) => out.push(decoded),
            // Raw up to and with the character that broke it, even when that is a quote.
            Escape::Invalid => out.push_str(&self.held),
        }
        self.held.clear();
        self.state = State::Text;
    }
}

enum Escape {
    Incomplete,
    Character(char),
    Invalid,
}

fn decode_escape(held: &str) -> Escape {
    let bytes = held.as_bytes();
    let Some(&letter) = bytes.get(1) else { return Escape::Incomplete };
    let character = match letter {
        b'"' | b'\\' | b'/' => char::from(letter),
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => return decode_unicode(held),
        _ => return Escape::Invalid,
    };
    Escape::Character(character)
}

/// Decodes `\uXXXX`, or a pair of them that makes one character.
fn decode_unicode(held: &str) -> Escape {
    let bytes = held.as_bytes();
    let first = match hex(&bytes[2..]) {
        Ok(Some(unit)) => unit,
        Ok(None) => return Escape::Incomplete,
        Err(()) => return Escape::Invalid,
    };
    if let Some(character) = char::from_u32(first) {
        return Escape::Character(character);
    }
    if first >= 0xdc00 {
        return Escape::Invalid;
    }
    let rest = &bytes[6..];
    if !b"\\u".starts_with(&rest[..rest.len().min(2)]) {
        return Escape::Invalid;
    }
    match hex(rest.get(2..).unwrap_or_default()) {
        Ok(None) => Escape::Incomplete,
        Ok(Some(second @ 0xdc00..0xe000)) => {
            let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
            char::from_u32(code).map_or(Escape::Invalid, Escape::Character)
        }
        Ok(Some(_)) | Err(()) => Escape::Invalid,
    }
}

/// Returns the value of the first four hex digits, None while there are fewer.
fn hex(bytes: &[u8]) -> Result<Option<u32>, ()> {
    let mut value = 0;
    for &byte in bytes.iter().take(4) {
        value = value << 4 | char::from(byte).to_digit(16).ok_or(())?;
    }
    Ok((bytes.len() >= 4).then_some(value))
}

fn is_space(character: char) -> bool {
    matches!(character, ' ' | '\t' | '\n' | '\r' | '\u{c}')
}

/// Whether the next byte of `START` begins one of its four parts.
fn may_follow_space(matched: usize) -> bool {
    matches!(matched, 0 | 1 | 8 | 9)
}
