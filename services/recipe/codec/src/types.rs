//! Values that pass between convert, render, encode and stream (recipe.md, section 2).

use serde_json::Value;

/// Which prompt template and which conversion rules apply (recipe.md, sections 3 and 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelVersion {
    V4,
    V41,
}

/// The eighteen named tokens of recipe.md section 1.2. `repr` indexes [`SpecialTokens`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Special {
    Bos,
    Eos,
    ThinkingStart,
    ThinkingEnd,
    System,
    User,
    Assistant,
    LatestReminder,
    Dsml,
    Image,
    Ref,
    RefEnd,
    Box,
    BoxEnd,
    Point,
    PointEnd,
    Polygon,
    PolygonEnd,
}

pub const NUM_SPECIAL: usize = 18;

/// Name to spelling; an empty spelling writes nothing and makes no range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialTokens(pub [String; NUM_SPECIAL]);

impl SpecialTokens {
    pub fn get(&self, special: Special) -> &str {
        &self.0[special as usize]
    }
}

impl Default for SpecialTokens {
    fn default() -> Self {
        SpecialTokens(
            [
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<think>",
                "</think>",
                "<｜System｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜latest_reminder｜>",
                "｜DSML｜",
                "<｜image｜>",
                "<｜ref｜>",
                "<｜/ref｜>",
                "<｜box｜>",
                "<｜/box｜>",
                "<｜point｜>",
                "<｜/point｜>",
                "<｜polygon｜>",
                "<｜/polygon｜>",
            ]
            .map(str::to_owned),
        )
    }
}

/// Text whose byte ranges in `specials` are explicit special tokens; the rest is plain.
///
/// Ranges are half-open UTF-8 byte offsets, ascending, never overlapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub text: String,
    pub specials: Vec<(usize, usize)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    Low,
    #[default]
    High,
    Original,
    Auto,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageData {
    Url(String),
    DataUrl(String),
    Bytes(Vec<u8>),
}

/// One accepted image block; `path` is its place in the request, used in later error texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSource {
    pub data: ImageData,
    pub detail: Detail,
    pub path: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ToolDefinition {
    pub name: String,
    pub description: Option<String>,
    /// Shown in the prompt: as the client wrote it, or rewritten when strict.
    pub parameters: Value,
    /// What the output is held to, where that is more than `parameters`.
    pub enforced_parameters: Option<Value>,
    pub strict: Option<bool>,
    pub defer_loading: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON text, not validated.
    pub arguments: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    System {
        content: Prompt,
        images: Vec<ImageSource>,
        tools: Option<Vec<ToolDefinition>>,
    },
    User {
        content: Prompt,
        images: Vec<ImageSource>,
    },
    Assistant {
        content: String,
        reasoning_content: Option<String>,
        tool_calls: Option<Vec<ToolCall>>,
        prefix: bool,
    },
    Tool {
        content: Prompt,
        images: Vec<ImageSource>,
        tool_call_id: Option<String>,
    },
    LatestReminder {
        content: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    #[default]
    Auto,
    None,
    Required,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    Low,
    High,
    Xhigh,
    Max,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    #[default]
    Text,
    JsonObject,
    JsonSchema(Value),
    Regex(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Message>,
    pub thinking_mode: bool,
    pub tools: Vec<ToolDefinition>,
    pub tool_choice: ToolChoice,
    pub reasoning_effort: Option<Effort>,
    pub response_format: ResponseFormat,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputConstraint {
    /// `tool_call`, `tool_call_required`, `json` or `regex`.
    pub kind: &'static str,
    pub schema: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inference {
    pub max_tokens: Option<u32>,
    pub temperature: f32,
    pub top_p: f32,
    pub logprobs: bool,
    pub top_logprobs: Option<u8>,
    pub seed: Option<u64>,
    pub output_constraint: Option<OutputConstraint>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinkingStage {
    ReasoningStart,
    ReasoningContinuation,
    ContentContinuation,
}

/// What the output parser must know of the request (recipe.md, section 13).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsing {
    pub parse_tool_calls: bool,
    pub starts_in_tool_calls: bool,
    pub parse_json_output: bool,
    pub thinking_initial_stage: Option<ThinkingStage>,
    pub stop_sequences: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    Chat,
    Responses,
    Messages,
}

/// What the event writer must know of the request (recipe.md, section 15).
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseOptions {
    Chat {
        stream: bool,
        include_usage: bool,
    },
    Messages {
        stream: bool,
    },
    /// `echo` holds the request fields shown again in the response object, already normalised:
    /// instructions, max_output_tokens, reasoning, temperature, text, tool_choice, tools,
    /// top_logprobs, top_p, user.
    Responses {
        stream: bool,
        echo: serde_json::Map<String, Value>,
        /// function name -> (namespace, local name); None when the request has no map.
        namespaces: Option<Vec<(String, String, String)>>,
        custom_tools: Vec<String>,
        client_tool_search: bool,
    },
}

/// Everything that conversion gives for an accepted request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub model_version: ModelVersion,
    pub model: String,
    pub conversation: Conversation,
    pub inference: Inference,
    pub parsing: Parsing,
    pub response: ResponseOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Deserialize,
    Convert,
    Render,
    Encode,
    Stream,
}

/// A refusal. `status` is 400 (the caller's fault) or 500 (ours).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub stage: Stage,
    pub status: u16,
    pub message: String,
}

impl Error {
    pub fn bad_request(stage: Stage, message: impl Into<String>) -> Self {
        Error { stage, status: 400, message: message.into() }
    }

    pub fn internal(stage: Stage, message: impl Into<String>) -> Self {
        Error { stage, status: 500, message: message.into() }
    }

    /// The body of recipe.md section 10, one shape for all three protocols.
    pub fn body(&self) -> Value {
        let code = if self.status == 400 { "invalid_request_error" } else { "internal_error" };
        serde_json::json!({"error": {
            "message": self.message, "type": code, "param": null, "code": code,
        }})
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
