//! Events of the three protocols, written as server-sent events (recipe.md, section 15).

pub mod chat;
mod custom_input;
pub mod failure;
pub mod messages;
pub mod responses;
mod responses_item;

use super::write;

/// One event: its SSE name, if it has one, and its JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub name: Option<&'static str>,
    pub json: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    name: Option<&'static str>,
    start: usize,
    end: usize,
}

/// Collects events in one buffer, already framed for the wire, and remembers where each JSON is.
#[derive(Debug, Default)]
pub struct EventBuffer {
    bytes: Vec<u8>,
    spans: Vec<Span>,
}

impl EventBuffer {
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.spans.clear();
    }

    /// The bytes of the SSE body: name line, data line, empty line for each event, then `[DONE]`
    /// where the protocol ends with it.
    pub fn sse(&self) -> &[u8] {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.spans.len()
    }

    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Iterates over (SSE name, JSON) in order; `[DONE]` is no event.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Option<&'static str>, &[u8])> {
        self.spans.iter().map(|span| (span.name, &self.bytes[span.start..span.end]))
    }

    /// Copies the events out.
    pub fn to_events(&self) -> Vec<Event> {
        self.iter().map(|(name, json)| Event { name, json: json.to_vec() }).collect()
    }

    /// Opens a frame and returns the buffer for its JSON.
    fn open(&mut self, name: Option<&'static str>) -> &mut Vec<u8> {
        if let Some(name) = name {
            write::raw(&mut self.bytes, "event: ");
            write::raw(&mut self.bytes, name);
            self.bytes.push(b'\n');
        }
        write::raw(&mut self.bytes, "data: ");
        let start = self.bytes.len();
        self.spans.push(Span { name, start, end: start });
        &mut self.bytes
    }

    /// Returns the buffer of the frame that is open.
    fn resume(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    fn close(&mut self) {
        let end = self.bytes.len();
        self.spans.last_mut().expect("a frame is open").end = end;
        write::raw(&mut self.bytes, "\n\n");
    }

    fn done(&mut self) {
        write::raw(&mut self.bytes, "data: [DONE]\n\n");
    }
}
