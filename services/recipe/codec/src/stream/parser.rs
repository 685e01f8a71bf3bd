//! The output parser: decides bytes, emits them piece by piece (recipe.md, sections 13.2 to 13.4).

use std::collections::VecDeque;
use std::sync::Arc;

use super::markers::{Input, Progress};
use super::ops::{Op, Sink};
use super::pieces::PieceKind;
use super::stages::{Action, Stage, StageTable};
use super::write;

/// Splits model output into reasoning, content and calls while it arrives.
///
/// Two queues meet in it: pieces (as they came) and segments (runs of decided bytes with one
/// action). Bytes past the last segment are undecided: some marker may still claim them.
pub struct Parser {
    table: Arc<StageTable>,
    eager: bool,
    stage: Stage,
    is_first: bool,
    progress: Vec<Progress>,
    /// How many markers hold bytes; while it is zero, bytes that start nothing are passed over.
    num_active: usize,
    num_undecided: usize,
    segments: VecDeque<Segment>,
    pieces: VecDeque<Piece>,
    /// The text of `pieces`, of which `text[text_at..]` has not left.
    text: String,
    text_at: usize,
    name: String,
    scratch: Vec<u8>,
    stop: Option<u32>,
}

struct Segment {
    action: Action,
    num_bytes: usize,
    /// Whether its fixed label has left.
    is_labelled: bool,
}

struct Piece {
    num_bytes: usize,
    logprobs: Option<Box<[u8]>>,
    /// Eager mode gives a piece's log probabilities once for each segment: set when they have left.
    is_reported: bool,
}

impl Parser {
    /// Starts a parser. `eager` releases decided text at once instead of whole pieces.
    pub fn new(table: Arc<StageTable>, eager: bool) -> Self {
        let stage = table.start;
        let mut parser = Parser {
            table,
            eager,
            stage,
            is_first: true,
            progress: Vec::new(),
            num_active: 0,
            num_undecided: 0,
            segments: VecDeque::new(),
            pieces: VecDeque::new(),
            text: String::new(),
            text_at: 0,
            name: String::new(),
            scratch: Vec::new(),
            stop: None,
        };
        parser.enter(stage);
        parser
    }

    /// The stop sequence that ended the output, if one has.
    pub fn stop_sequence(&self) -> Option<&str> {
        self.stop.map(|index| self.table.stop_sequences[index as usize].as_str())
    }

    /// Parses one piece and emits what has become certain.
    pub fn push(
        &mut self,
        text: &str,
        kind: PieceKind,
        logprobs: Option<&[u8]>,
        sink: &mut impl Sink,
    ) {
        self.pieces.push_back(Piece {
            num_bytes: text.len(),
            logprobs: logprobs.map(Box::from),
            is_reported: false,
        });
        self.text.push_str(text);
        self.decide(text.as_bytes(), kind);
        self.emit(sink);
    }

    /// Gives held bytes to the stage's default action and emits everything.
    pub fn flush(&mut self, sink: &mut impl Sink) {
        let default = self.table.entry(self.stage).default;
        let num_bytes = std::mem::take(&mut self.num_undecided);
        self.extend_segment(default, num_bytes);
        self.enter(self.stage);
        self.emit(sink);
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.is_first = true;
        self.num_active = 0;
        self.progress.clear();
        self.progress.resize(self.table.entry(stage).markers.len(), Progress::default());
    }

    fn decide(&mut self, bytes: &[u8], kind: PieceKind) {
        let table = Arc::clone(&self.table);
        let mut at = 0;
        while at < bytes.len() {
            let entry = table.entry(self.stage);
            if self.num_active == 0 {
                let starters = &entry.starters;
                let num_passed = bytes[at..]
                    .iter()
                    .position(|&byte| starters[usize::from(byte)])
                    .unwrap_or(bytes.len() - at);
                if num_passed > 0 {
                    self.is_first = false;
                    self.num_undecided += num_passed;
                    at += num_passed;
                    continue;
                }
            }
            let input = Input::new(bytes[at], kind);
            at += 1;
            self.num_undecided += 1;
            let mut num_active = 0;
            let mut complete = None;
            for (marker, progress) in entry.markers.iter().zip(&mut self.progress) {
                let pattern = &table.patterns[marker.pattern as usize];
                if let Some(length) = progress.advance(marker.form, pattern, input, self.is_first) {
                    complete = Some((marker, length));
                    break;
                }
                num_active += usize::from(progress.held() > 0);
            }
            self.is_first = false;
            self.num_active = num_active;
            if let Some((marker, length)) = complete {
                let num_before = self.num_undecided - length;
                self.extend_segment(entry.default, num_before);
                self.extend_segment(marker.action, length);
                self.num_undecided = 0;
                self.enter(marker.next);
                if let Action::Stop(index) = marker.action {
                    self.stop = Some(index);
                    self.num_undecided = bytes.len() - at;
                    return;
                }
            }
        }
        let num_held = self.progress.iter().map(|progress| progress.held()).max().unwrap_or(0);
        let num_decided = self.num_undecided - num_held;
        self.extend_segment(table.entry(self.stage).default, num_decided);
        self.num_undecided = num_held;
    }

    fn extend_segment(&mut self, action: Action, num_bytes: usize) {
        if num_bytes == 0 {
            return;
        }
        match self.segments.back_mut() {
            Some(last) if last.action == action => last.num_bytes += num_bytes,
            _ => self.segments.push_back(Segment { action, num_bytes, is_labelled: false }),
        }
    }

    /// Emits whole pieces of the open last segment, and closed segments to their last byte.
    fn emit(&mut self, sink: &mut impl Sink) {
        loop {
            let is_closed = self.segments.len() > 1;
            let Some(segment) = self.segments.front_mut() else { break };
            let Some(piece) = self.pieces.front_mut() else {
                if !is_closed {
                    break;
                }
                self.segments.pop_front();
                continue;
            };
            let is_whole = piece.num_bytes <= segment.num_bytes;
            let may_split = is_closed || (self.eager && is_text(segment.action));
            if !is_whole && (!may_split || segment.num_bytes == 0) {
                if !is_closed {
                    break;
                }
                piece.is_reported = false;
                self.segments.pop_front();
                continue;
            }
            let num_bytes = piece.num_bytes.min(segment.num_bytes);
            let text = &self.text[self.text_at..self.text_at + num_bytes];
            let logprobs = if piece.is_reported { None } else { piece.logprobs.as_deref() };
            emit_part(segment, text, logprobs, &mut self.name, &mut self.scratch, sink);
            self.text_at += num_bytes;
            segment.num_bytes -= num_bytes;
            piece.num_bytes -= num_bytes;
            piece.is_reported = true;
            if is_whole {
                self.pieces.pop_front();
            }
        }
        self.compact();
    }

    /// Drops text that has left once it outweighs what stays, so a byte moves O(1) times.
    fn compact(&mut self) {
        if self.text_at * 2 >= self.text.len() {
            self.text.drain(..self.text_at);
            self.text_at = 0;
        }
    }
}

/// Whether eager mode may release part of a piece. Labels and the space that stands for a piece
/// keep their moment, so that the folded response and the finish reason stay those of exact mode.
fn is_text(action: Action) -> bool {
    use Action::{Arguments, Content, EscapedArguments, Reasoning};
    matches!(action, Reasoning | Content | Arguments | EscapedArguments)
}

fn emit_part(
    segment: &mut Segment,
    text: &str,
    logprobs: Option<&[u8]>,
    name: &mut String,
    scratch: &mut Vec<u8>,
    sink: &mut impl Sink,
) {
    let is_labelled = std::mem::replace(&mut segment.is_labelled, true);
    match segment.action {
        Action::Skip | Action::Stop(_) => {}
        Action::Reasoning => sink.op(Op::Reasoning { text, logprobs }),
        Action::Content => sink.op(Op::Content { text, logprobs }),
        Action::Space => sink.op(Op::Content { text: " ", logprobs }),
        Action::Arguments => sink.op(Op::CallArgs(text)),
        Action::EscapedArguments => {
            scratch.clear();
            write::escape(scratch, text);
            sink.op(Op::CallArgs(&String::from_utf8_lossy(scratch)));
        }
        Action::Name => name.push_str(text),
        _ if is_labelled => {}
        Action::Bracket(text) => sink.op(Op::Content { text, logprobs }),
        Action::CallBegin => {
            name.clear();
            sink.op(Op::CallBegin);
        }
        Action::NameComplete => sink.op(Op::CallNamed(name)),
        Action::Punctuation(punctuation) => sink.op(Op::CallArgs(punctuation.text())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Parsing, SpecialTokens};

    /// A stream holds what is pending, not what has passed.
    #[test]
    fn memory_does_not_grow_with_the_output() {
        let parsing = Parsing {
            parse_tool_calls: true,
            stop_sequences: vec!["a stop".to_owned()],
            ..Parsing::default()
        };
        let table = Arc::new(StageTable::new(&parsing, &SpecialTokens::default()));
        let mut parser = Parser::new(table, false);
        let mut num_bytes = 0;
        for index in 0..100_000 {
            let text = ["word a ", "st<", "</", "\n\n"][index % 4];
            parser.push(text, PieceKind::Text, None, &mut |op: Op<'_>| {
                if let Op::Content { text, .. } = op {
                    num_bytes += text.len();
                }
            });
            let held = parser.text.len() - parser.text_at;
            assert!(held <= 16 && parser.pieces.len() <= 4 && parser.segments.len() <= 2);
        }
        assert!(num_bytes > 300_000 && parser.text.capacity() < 256);
    }
}
