//! The table of parser stages, their markers and actions (recipe.md, section 13.3).

use super::markers::{Form, Pattern};
use crate::types::{Parsing, Special, SpecialTokens, ThinkingStage};

/// What happens to a run of bytes. Adjacent runs of one action are one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Skip,
    Reasoning,
    Content,
    /// One space a piece, in place of text around JSON output.
    Space,
    /// The bracket that opens bare JSON output.
    Bracket(&'static str),
    CallBegin,
    Name,
    NameComplete,
    /// A fixed piece of the arguments' JSON. The two quotes are two actions: an empty string
    /// value brings them together and must keep both.
    Punctuation(Punctuation),
    /// Arguments as the model wrote them.
    Arguments,
    /// Arguments inside a JSON string.
    EscapedArguments,
    /// The stop sequence of that index has matched.
    Stop(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Punctuation {
    OpenObject,
    Comma,
    Colon,
    OpenQuote,
    CloseQuote,
    EmptyObject,
    CloseObject,
}

impl Punctuation {
    pub fn text(self) -> &'static str {
        match self {
            Punctuation::OpenObject => "{",
            Punctuation::Comma => ", ",
            Punctuation::Colon => ": ",
            Punctuation::OpenQuote | Punctuation::CloseQuote => "\"",
            Punctuation::EmptyObject => "{}",
            Punctuation::CloseObject => "}",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Stage {
    ReasoningStrip,
    Reasoning,
    ContentStrip,
    Content,
    Json,
    AfterJson,
    ToolCalls,
    ToolName,
    FirstArgument,
    Arguments,
    ArgumentName,
    ArgumentKind,
    StringValue,
    RawValue,
    Finished,
}

const NUM_STAGES: usize = 15;

#[derive(Clone, Debug)]
pub struct Marker {
    pub form: Form,
    /// Index into [`StageTable::patterns`].
    pub pattern: u32,
    pub next: Stage,
    pub action: Action,
}

#[derive(Clone, Debug)]
pub struct StageEntry {
    /// In order of priority.
    pub markers: Vec<Marker>,
    pub default: Action,
    /// Bytes that can begin a match; all others may be passed over while nothing is matched.
    pub starters: Box<[bool; 256]>,
}

/// All stages of one request. Built once, shared by every stream of the same options.
#[derive(Clone, Debug)]
pub struct StageTable {
    pub patterns: Vec<Pattern>,
    stages: Vec<StageEntry>,
    pub start: Stage,
    pub stop_sequences: Vec<String>,
}

impl StageTable {
    /// Builds the table; empty stop sequences are discarded.
    pub fn new(parsing: &Parsing, tokens: &SpecialTokens) -> Self {
        let mut builder = Builder::default();
        let dsml = tokens.get(Special::Dsml);
        let open = builder.pattern(&[("<", false), (dsml, true)]);
        let close = builder.pattern(&[("</", false), (dsml, true)]);
        let newline = builder.pattern(&[("\n", false)]);
        // A mapping without a spelling for the end of thinking has no such marker.
        let think_end = match tokens.get(Special::ThinkingEnd) {
            "" => None,
            spelling => Some(builder.pattern(&[(spelling, true)])),
        };
        let stop_sequences: Vec<String> =
            parsing.stop_sequences.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        let stops: Vec<Marker> = stop_sequences
            .iter()
            .enumerate()
            .map(|(index, stop)| {
                let pattern = builder.pattern(&[(stop, false)]);
                marker(Form::Exact, pattern, Stage::Finished, Action::Stop(index as u32))
            })
            .collect();
        let tools = parsing
            .parse_tool_calls
            .then(|| marker(Form::AfterNewlines, open, Stage::ToolCalls, Action::Skip));
        let leading =
            |strip: bool, stage| strip.then(|| marker(Form::Leading, newline, stage, Action::Skip));

        for (stage, strip) in [(Stage::ReasoningStrip, true), (Stage::Reasoning, false)] {
            let end = think_end.map(|pattern| {
                marker(Form::AfterNewlines, pattern, Stage::ContentStrip, Action::Skip)
            });
            let markers = [tools.clone(), leading(strip, stage), end];
            builder.stage(stage, Action::Reasoning, markers.into_iter().flatten());
        }

        let fences = ["```json\n", "```\n"].map(|fence| {
            marker(Form::Exact, builder.pattern(&[(fence, false)]), Stage::Json, Action::Skip)
        });
        let brackets = ["{", "["].map(|text| {
            let pattern = builder.pattern(&[(text, false)]);
            marker(Form::Exact, pattern, Stage::Json, Action::Bracket(text))
        });
        for (stage, strip) in [(Stage::ContentStrip, true), (Stage::Content, false)] {
            let end =
                think_end.map(|pattern| marker(Form::Exact, pattern, Stage::Content, Action::Skip));
            let common = [tools.clone(), leading(strip, stage), end].into_iter().flatten();
            if parsing.parse_json_output {
                let markers = fences.iter().chain(&brackets).cloned().chain(common);
                builder.stage(stage, Action::Space, markers);
            } else {
                builder.stage(stage, Action::Content, stops.iter().cloned().chain(common));
            }
        }
        let fence_end = builder.pattern(&[("\n```", false)]);
        let fence_end = marker(Form::Exact, fence_end, Stage::AfterJson, Action::Skip);
        builder.stage(Stage::Json, Action::Content, stops.into_iter().chain([fence_end]));
        builder.stage(Stage::AfterJson, Action::Space, tools);

        builder.tool_stages(dsml, close);
        builder.stage(Stage::Finished, Action::Skip, []);

        let start = match parsing.thinking_initial_stage {
            _ if parsing.starts_in_tool_calls => Stage::ToolCalls,
            Some(ThinkingStage::ReasoningStart) => Stage::ReasoningStrip,
            Some(ThinkingStage::ReasoningContinuation) => Stage::Reasoning,
            Some(ThinkingStage::ContentContinuation) => Stage::Content,
            None => Stage::ContentStrip,
        };
        builder.finish(start, stop_sequences)
    }

    pub fn entry(&self, stage: Stage) -> &StageEntry {
        &self.stages[stage as usize]
    }
}

fn marker(form: Form, pattern: u32, next: Stage, action: Action) -> Marker {
    Marker { form, pattern, next, action }
}

#[derive(Default)]
struct Builder {
    patterns: Vec<Pattern>,
    stages: Vec<(Stage, StageEntry)>,
}

impl Builder {
    fn pattern(&mut self, segments: &[(&str, bool)]) -> u32 {
        self.patterns.push(Pattern::new(segments));
        (self.patterns.len() - 1) as u32
    }

    fn stage(&mut self, stage: Stage, default: Action, markers: impl IntoIterator<Item = Marker>) {
        let markers: Vec<Marker> = markers.into_iter().collect();
        let mut starters = Box::new([false; 256]);
        for marker in &markers {
            starters[usize::from(self.patterns[marker.pattern as usize].first_byte())] = true;
            if marker.form == Form::AfterNewlines {
                starters[usize::from(b'\n')] = true;
            }
        }
        self.stages.push((stage, StageEntry { markers, default, starters }));
    }

    /// The stages inside a calls block. Tag words are matched no further than these markers.
    fn tool_stages(&mut self, dsml: &str, close: u32) {
        use Punctuation::{
            CloseObject, CloseQuote, Colon, Comma, EmptyObject, OpenObject, OpenQuote,
        };
        let punctuation = Action::Punctuation;
        let invoke = self.pattern(&[("invoke name=\"", false)]);
        // Both spellings of the closing tag: V4 and V4.1.
        let calls_end = ["tool_calls>", " calls>"].map(|word| {
            let pattern = self.pattern(&[("</", false), (dsml, true), (word, false)]);
            marker(Form::Exact, pattern, Stage::Finished, Action::Skip)
        });
        let invoke = marker(Form::Exact, invoke, Stage::ToolName, Action::CallBegin);
        self.stage(Stage::ToolCalls, Action::Skip, [invoke].into_iter().chain(calls_end));

        let quote = self.pattern(&[("\"", false)]);
        let quote = marker(Form::Exact, quote, Stage::FirstArgument, Action::NameComplete);
        self.stage(Stage::ToolName, Action::Name, [quote]);

        let parameter = self.pattern(&[("parameter name=", false)]);
        for (stage, before, end) in [
            (Stage::FirstArgument, OpenObject, EmptyObject),
            (Stage::Arguments, Comma, CloseObject),
        ] {
            let markers = [
                marker(Form::Exact, parameter, Stage::ArgumentName, punctuation(before)),
                marker(Form::Exact, close, Stage::ToolCalls, punctuation(end)),
            ];
            self.stage(stage, Action::Skip, markers);
        }

        let space = self.pattern(&[(" ", false)]);
        let space = marker(Form::Exact, space, Stage::ArgumentKind, punctuation(Colon));
        self.stage(Stage::ArgumentName, Action::Arguments, [space]);

        let string = self.pattern(&[("true\">", false)]);
        let raw = self.pattern(&[("false\">", false)]);
        let kinds = [
            marker(Form::Exact, string, Stage::StringValue, punctuation(OpenQuote)),
            marker(Form::Exact, raw, Stage::RawValue, Action::Skip),
        ];
        self.stage(Stage::ArgumentKind, Action::Skip, kinds);

        let end = marker(Form::Exact, close, Stage::Arguments, punctuation(CloseQuote));
        self.stage(Stage::StringValue, Action::EscapedArguments, [end]);
        let end = marker(Form::Exact, close, Stage::Arguments, Action::Skip);
        self.stage(Stage::RawValue, Action::Arguments, [end]);
    }

    fn finish(mut self, start: Stage, stop_sequences: Vec<String>) -> StageTable {
        self.stages.sort_by_key(|(stage, _)| *stage as usize);
        let stages: Vec<StageEntry> = self.stages.into_iter().map(|(_, entry)| entry).collect();
        assert_eq!(stages.len(), NUM_STAGES, "every stage is built exactly once");
        StageTable { patterns: self.patterns, stages, start, stop_sequences }
    }
}
