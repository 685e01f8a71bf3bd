//! Cuts token ids into pieces of text that end on whole characters (recipe.md, section 13.1).

use super::ops::{TokenLogprob, Vocabulary};
use super::write;

/// Which ids a piece came from; it decides what a marker byte may match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PieceKind {
    /// The backend sent text: matches plain and special marker bytes.
    Text,
    /// Base-vocabulary ids: plain marker bytes only.
    Plain,
    /// One added-vocabulary id: special marker bytes only.
    Special,
}

const REPLACEMENT: char = '\u{FFFD}';

/// Ids that wait for the rest of a character.
///
/// Decodes as the bytes arrive, so that a long run of undecodable ids costs linear time: at any
/// moment `text`, plus one U+FFFD if `partial` holds bytes, is the lossy decoding of all of them.
#[derive(Debug, Default)]
pub struct IdBuffer {
    text: String,
    /// A valid but unfinished character, at most three bytes.
    partial: Vec<u8>,
    scratch: Vec<u8>,
    num_ids: u32,
    num_logprobs: u32,
    logprobs: Vec<u8>,
}

impl IdBuffer {
    /// Adds one id's bytes; `logprob` is written as the JSON entry that the events will carry.
    pub fn push(&mut self, bytes: &[u8], logprob: Option<(&dyn Vocabulary, u32, &TokenLogprob)>) {
        self.num_ids += 1;
        if let Some((vocabulary, id, entry)) = logprob {
            if self.num_logprobs > 0 {
                self.logprobs.push(b',');
            }
            self.num_logprobs += 1;
            write_logprob(&mut self.logprobs, vocabulary, id, entry);
        }
        if self.partial.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            self.text.push_str(text);
            return;
        }
        self.scratch.clear();
        self.scratch.append(&mut self.partial);
        self.scratch.extend_from_slice(bytes);
        let mut rest = &self.scratch[..];
        while !rest.is_empty() {
            let error = match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.text.push_str(text);
                    break;
                }
                Err(error) => error,
            };
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            self.text.push_str(&String::from_utf8_lossy(valid));
            match error.error_len() {
                Some(num_bytes) => {
                    self.text.push(REPLACEMENT);
                    rest = &invalid[num_bytes..];
                }
                None => {
                    self.partial.extend_from_slice(invalid);
                    break;
                }
            }
        }
    }

    /// Whether the ids decode to nothing (unknown ids do).
    pub fn is_blank(&self) -> bool {
        self.text.is_empty() && self.partial.is_empty()
    }

    /// Whether the text may leave at the end of a chunk: there is some, and it does not end in an
    /// unfinished or replaced character.
    pub fn is_settled(&self) -> bool {
        !self.text.is_empty() && self.partial.is_empty() && !self.text.ends_with(REPLACEMENT)
    }

    /// Hands everything to `take` as (text, number of ids, logprobs) and starts afresh.
    ///
    /// The piece has log probabilities only if every id in it had one.
    pub fn flush<R>(&mut self, take: impl FnOnce(&str, u32, Option<&[u8]>) -> R) -> R {
        if !self.partial.is_empty() {
            self.partial.clear();
            self.text.push(REPLACEMENT);
        }
        let logprobs = (self.num_logprobs == self.num_ids).then_some(&self.logprobs[..]);
        let result = take(&self.text, self.num_ids, logprobs);
        self.text.clear();
        self.logprobs.clear();
        self.num_ids = 0;
        self.num_logprobs = 0;
        result
    }
}

fn write_logprob(out: &mut Vec<u8>, vocabulary: &dyn Vocabulary, id: u32, entry: &TokenLogprob) {
    write_token(out, vocabulary.token_bytes(id), entry.logprob);
    write::raw(out, ",\"top_logprobs\":[");
    for (index, &(top_id, logprob)) in entry.top.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_token(out, vocabulary.token_bytes(top_id), logprob);
        out.push(b'}');
    }
    write::raw(out, "]}");
}

/// Writes `{"token","logprob","bytes"` without the closing brace.
fn write_token(out: &mut Vec<u8>, bytes: &[u8], logprob: f32) {
    write::raw(out, "{\"token\":\"");
    match std::str::from_utf8(bytes) {
        Ok(text) => write::escape(out, text),
        // The spelling `\xNN`; its backslash is doubled once more by JSON.
        Err(_) => {
            for &byte in bytes {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                write::raw(out, "\\\\x");
                out.push(HEX[usize::from(byte >> 4)]);
                out.push(HEX[usize::from(byte & 15)]);
            }
        }
    }
    write::raw(out, "\",\"logprob\":");
    write::float32(out, logprob);
    write::raw(out, ",\"bytes\":[");
    for (index, &byte) in bytes.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write::integer(out, u64::from(byte));
    }
    out.push(b']');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any cutting of any bytes decodes like the whole at once.
    #[test]
    fn parts_decode_like_the_whole() {
        let samples: &[&[u8]] = &[
            "a👩‍👩‍👧é你\u{FFFD}z".as_bytes(),
            b"\xf0\x9f\xa4\xff\xf0\x9f\x80abc\xc3\xed\xa0\x80\xe4\xbd",
            b"\x80\x80\xf4\x90\x80\x80\xf0\x9f\xa4",
        ];
        for bytes in samples {
            for first in 0..=bytes.len() {
                for second in first..=bytes.len() {
                    let mut buffer = IdBuffer::default();
                    for part in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                        buffer.push(part, None);
                    }
                    let whole = String::from_utf8_lossy(bytes);
                    let settled = !whole.is_empty() && !whole.ends_with(REPLACEMENT);
                    assert_eq!(buffer.is_settled(), settled);
                    buffer.flush(|text, num_ids, _| {
                        assert_eq!(text, whole);
                        assert_eq!(num_ids, 3);
                    });
                    assert!(buffer.is_blank());
                }
            }
        }
    }
}
