//! JSON text in the three spellings the prompts use (recipe.md, section 3.1).
//!
//! All three keep key order and leave non-ASCII unescaped. They differ in separators and in where
//! a small float switches to an exponent, because the templates were fixed in training with
//! different serializers.

use serde_json::{Number, Value};

use crate::node::Node;

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// `", "` and `": "`; exponents from 1e-5 down, padded to two digits. Python's `json.dumps`.
    Py,
    /// `", "` and `": "`; exponents from 1e-6 down, unpadded.
    Sp,
    /// No spaces; floats of [`Style::Sp`].
    Compact,
}

impl Style {
    fn item_separator(self) -> &'static str {
        if self == Style::Compact { "," } else { ", " }
    }

    fn key_separator(self) -> &'static str {
        if self == Style::Compact { ":" } else { ": " }
    }
}

/// Returns the JSON text of `value`.
pub fn to_string(value: &impl Json, style: Style) -> String {
    let mut out = String::new();
    value.write(&mut out, style);
    out
}

/// A JSON document in memory.
///
/// Recursion is bounded by the parser that made the document: 127 levels.
pub trait Json {
    /// Appends the JSON text of this document.
    fn write(&self, out: &mut String, style: Style);
}

impl Json for Value {
    fn write(&self, out: &mut String, style: Style) {
        match self {
            Value::Null => out.push_str("null"),
            Value::Bool(value) => write_bool(out, *value),
            Value::Number(number) => write_number(out, number, style),
            Value::String(text) => write_string(out, text),
            Value::Array(items) => write_array(out, items, style),
            Value::Object(map) => {
                write_object(out, map.iter().map(|(key, value)| (key.as_str(), value)), style);
            }
        }
    }
}

impl Json for Node<'_> {
    fn write(&self, out: &mut String, style: Style) {
        match self {
            Node::Null => out.push_str("null"),
            Node::Bool(value) => write_bool(out, *value),
            Node::Number(number) => write_number(out, number, style),
            Node::String(text) => write_string(out, text),
            Node::Array(items) => write_array(out, items, style),
            Node::Object(pairs) => {
                write_object(out, pairs.iter().map(|(key, value)| (key.as_ref(), value)), style);
            }
        }
    }
}

fn write_bool(out: &mut String, value: bool) {
    out.push_str(if value { "true" } else { "false" });
}

fn write_array(out: &mut String, items: &[impl Json], style: Style) {
    out.push('[');
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_str(style.item_separator());
        }
        item.write(out, style);
    }
    out.push(']');
}

fn write_object<'a, T: Json + 'a>(
    out: &mut String,
    pairs: impl Iterator<Item = (&'a str, &'a T)>,
    style: Style,
) {
    out.push('{');
    for (index, (key, value)) in pairs.enumerate() {
        if index > 0 {
            out.push_str(style.item_separator());
        }
        write_string(out, key);
        out.push_str(style.key_separator());
        value.write(out, style);
    }
    out.push('}');
}

const NEEDS_ESCAPE: [bool; 256] = {
    let mut needs = [false; 256];
    let mut byte = 0;
    while byte < 0x20 {
        needs[byte] = true;
        byte += 1;
    }
    needs[b'"' as usize] = true;
    needs[b'\\' as usize] = true;
    needs
};

/// Appends `text` quoted and escaped; `/`, U+007F and everything above stay as they are.
pub fn write_string(out: &mut String, text: &str) {
    out.push('"');
    let mut start = 0;
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(found) = bytes[at..].iter().position(|byte| NEEDS_ESCAPE[usize::from(*byte)]) {
        at += found;
        let byte = bytes[at];
        at += 1;
        let escape = match byte {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            0x08 => "\\b",
            0x0c => "\\f",
            b'\n' => "\\n",
            b'\r' => "\\r",
            b'\t' => "\\t",
            _ => "",
        };
        out.push_str(&text[start..at - 1]);
        start = at;
        if escape.is_empty() {
            const HEX: &[u8; 16] = b"0123456789abcdef";
            out.push_str("\\u00");
            out.push(HEX[usize::from(byte >> 4)] as char);
            out.push(HEX[usize::from(byte & 15)] as char);
        } else {
            out.push_str(escape);
        }
    }
    out.push_str(&text[start..]);
    out.push('"');
}

fn write_number(out: &mut String, number: &Number, style: Style) {
    use std::fmt::Write;
    let written = if let Some(integer) = number.as_u64() {
        write!(out, "{integer}")
    } else if let Some(integer) = number.as_i64() {
        write!(out, "{integer}")
    } else {
        write_float(out, number.as_f64().unwrap_or(0.0), style);
        Ok(())
    };
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
}

/// Appends the shortest digits that read back as `float`, placed as `style` wants them.
fn write_float(out: &mut String, float: f64, style: Style) {
    // `{:e}` is exact about the digits; only their layout is ours: "-1.25e-7".
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    out.push_str(sign);
    let smallest_positional = if style == Style::Py { -4 } else { -5 };
    if exponent >= 16 || exponent < smallest_positional {
        out.push_str(mantissa);
        out.push_str(if exponent < 0 { "e-" } else { "e+" });
        let magnitude = exponent.unsigned_abs().to_string();
        if style == Style::Py && magnitude.len() < 2 {
            out.push('0');
        }
        out.push_str(&magnitude);
        return;
    }
    let (first, rest) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if exponent < 0 {
        out.push_str("0.");
        for _ in 1..-exponent {
            out.push('0');
        }
        out.push_str(first);
        out.push_str(rest);
        return;
    }
    let num_integer_digits = exponent as usize;
    out.push_str(first);
    if rest.len() <= num_integer_digits {
        out.push_str(rest);
        for _ in rest.len()..num_integer_digits {
            out.push('0');
        }
        out.push_str(".0");
    } else {
        out.push_str(&rest[..num_integer_digits]);
        out.push('.');
        out.push_str(&rest[num_integer_digits..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(source: &str, style: Style) -> String {
        let value: Value = serde_json::from_str(source).expect("valid");
        let node = Node::parse(source.as_bytes()).expect("valid");
        let text = to_string(&value, style);
        assert_eq!(to_string(&node, style), text, "both documents write alike");
        text
    }

    #[test]
    fn floats_follow_the_style() {
        let cases = [
            ("1e16", "1e+16", "1e+16"),
            ("123456789012345678.0", "1.2345678901234568e+17", "1.2345678901234568e+17"),
            ("1e15", "1000000000000000.0", "1000000000000000.0"),
            ("0.0001", "0.0001", "0.0001"),
            ("0.00001", "1e-05", "0.00001"),
            ("0.0000125", "1.25e-05", "0.0000125"),
            ("0.00000999", "9.99e-06", "9.99e-6"),
            ("5e-324", "5e-324", "5e-324"),
            ("-0.0", "-0.0", "-0.0"),
            ("0.1e1", "1.0", "1.0"),
            ("12345678901234567890123", "1.2345678901234568e+22", "1.2345678901234568e+22"),
            ("18446744073709551615", "18446744073709551615", "18446744073709551615"),
            ("-9223372036854775808", "-9223372036854775808", "-9223372036854775808"),
            ("123.456", "123.456", "123.456"),
        ];
        for (source, py, sp) in cases {
            assert_eq!(written(source, Style::Py), py, "{source}");
            assert_eq!(written(source, Style::Sp), sp, "{source}");
            assert_eq!(written(source, Style::Compact), sp, "{source}");
        }
    }

    #[test]
    fn strings_escape_only_what_json_demands() {
        let mut out = String::new();
        write_string(&mut out, "a\"\\/\u{8}\u{c}\n\r\t\u{1}\u{1f}\u{7f}\u{2028}é");
        assert_eq!(out, "\"a\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\u{7f}\u{2028}é\"");
    }

    #[test]
    fn separators_follow_the_style_and_duplicate_keys_collapse() {
        let source = r#"{"b":[1,{}],"a":[],"b":null}"#;
        assert_eq!(written(source, Style::Py), r#"{"b": null, "a": []}"#);
        assert_eq!(written(source, Style::Compact), r#"{"b":null,"a":[]}"#);
    }
}
