//! JSON written straight into a byte buffer: the events leave through here, once, with no tree.

/// Appends `text` escaped, without quotes: `"`, `\`, the short escapes and `\u00xx`; all else raw.
pub fn escape(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    let mut start = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        if ESCAPE[byte as usize] == 0 {
            continue;
        }
        out.extend_from_slice(&bytes[start..at]);
        start = at + 1;
        match ESCAPE[byte as usize] {
            b'u' => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(byte >> 4)]);
                out.push(HEX[usize::from(byte & 15)]);
            }
            short => out.extend_from_slice(&[b'\\', short]),
        }
    }
    out.extend_from_slice(&bytes[start..]);
}

/// 0: as it is; `u`: `\u00xx`; else the letter after the backslash.
static ESCAPE: [u8; 256] = {
    let mut table = [0u8; 256];
    let mut byte = 0;
    while byte < 0x20 {
        table[byte] = b'u';
        byte += 1;
    }
    table[0x08] = b'b';
    table[0x09] = b't';
    table[0x0a] = b'n';
    table[0x0c] = b'f';
    table[0x0d] = b'r';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table
};

/// Appends `text` as a JSON string.
pub fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    escape(out, text);
    out.push(b'"');
}

/// Appends `text` as a JSON string, or `null`.
pub fn string_or_null(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => string(out, text),
        None => out.extend_from_slice(b"null"),
    }
}

pub fn raw(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
}

pub fn integer(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends the shortest text that reads back as the same f32; `null` when it is not finite.
pub fn float32(out: &mut Vec<u8>, value: f32) {
    serde_json::to_writer(out, &value).expect("a number always serialises into memory");
}

/// Appends compact JSON in the value's own key order.
pub fn value(out: &mut Vec<u8>, value: &serde_json::Value) {
    serde_json::to_writer(out, value).expect("a JSON value always serialises into memory");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_like_serde_json_for_every_low_code_point() {
        for code in 0..0x300u32 {
            let text = format!("a{}b", char::from_u32(code).unwrap());
            let mut out = Vec::new();
            string(&mut out, &text);
            assert_eq!(String::from_utf8(out).unwrap(), serde_json::to_string(&text).unwrap());
        }
    }

    #[test]
    fn numbers_are_shortest() {
        let mut out = Vec::new();
        for number in [0, 9, 10, u64::MAX] {
            integer(&mut out, number);
            out.push(b' ');
        }
        for number in [0.7f32, -1.25, 1.0, f32::NAN] {
            float32(&mut out, number);
            out.push(b' ');
        }
        assert_eq!(out, b"0 9 10 18446744073709551615 0.7 -1.25 1.0 null ");
    }
}
