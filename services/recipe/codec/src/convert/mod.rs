//! Request bodies of the three protocols to one conversation (recipe.md, sections 6 to 9).

mod chat;
mod content;
mod format;
mod image_source;
mod messages;
mod reasoning;
mod responses;
mod sampling;
mod schema;
mod strict;
mod tools;
pub mod view;
mod wire;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::images::Limits;
use crate::node::{FromNode, Node};
use crate::types::{
    Error, Message, ModelVersion, Protocol, Request, SpecialTokens, Stage, ToolDefinition,
};

/// What to do with an assistant message that lacks its reasoning in thinking mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningContentBehavior {
    FillEmpty,
    Reject,
}

/// What to do with web-search tools and blocks, which run on a server that is not here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WebSearch {
    Drop,
    Reject,
}

/// What becomes of the keywords of a strict schema that the strict grammar does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrictSchemaKeywords {
    /// They are dropped, as section 6.7 has it.
    Drop,
    /// The output constraint keeps them: the grammar service enforces each or refuses it by name.
    /// The prompt is that of `Drop`.
    Enforce,
}

/// Options of the service, not of a request (recipe.md, section 6.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub default_thinking_mode: bool,
    pub reasoning_content_behavior: ReasoningContentBehavior,
    pub responses_web_search: WebSearch,
    pub messages_web_search: WebSearch,
    pub strict_schema_keywords: StrictSchemaKeywords,
    /// Accepted model names, exact and case-sensitive.
    pub models: BTreeMap<String, ModelVersion>,
    /// In tokens.
    pub thinking_max_tokens_upper_bound: u32,
    /// In tokens.
    pub non_thinking_max_tokens_upper_bound: u32,
    /// Only the image spelling is read here.
    pub special_tokens: SpecialTokens,
    pub image_limits: Limits,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            default_thinking_mode: true,
            reasoning_content_behavior: ReasoningContentBehavior::FillEmpty,
            responses_web_search: WebSearch::Drop,
            messages_web_search: WebSearch::Reject,
            strict_schema_keywords: StrictSchemaKeywords::Drop,
            models: BTreeMap::from([
                ("DeepSeek-V4-Pro".to_owned(), ModelVersion::V4),
                ("DeepSeek-V4.1-Flash".to_owned(), ModelVersion::V41),
            ]),
            thinking_max_tokens_upper_bound: 393_216,
            non_thinking_max_tokens_upper_bound: 393_216,
            special_tokens: SpecialTokens::default(),
            image_limits: Limits::default(),
        }
    }
}

impl Options {
    /// Reads the options that conformance vectors and the service's configuration carry: a JSON
    /// object whose absent keys keep their defaults. `model_alias` adds names to the table.
    ///
    /// Errors: a sentence naming the key that is unknown or has a bad value.
    pub fn from_json(value: &Value) -> Result<Options, String> {
        let mut options = Options::default();
        let map = match value {
            Value::Null => return Ok(options),
            Value::Object(map) => map,
            _ => return Err("options: expected an object".to_owned()),
        };
        for (key, value) in map {
            let bad = || format!("options: bad value for {key}: {value}");
            let web_search = || match value.as_str() {
                Some("drop") => Ok(WebSearch::Drop),
                Some("reject") => Ok(WebSearch::Reject),
                _ => Err(bad()),
            };
            let bound = || value.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(bad);
            match key.as_str() {
                "default_thinking_mode" => {
                    options.default_thinking_mode = value.as_bool().ok_or_else(bad)?;
                }
                "reasoning_content_behavior" => {
                    options.reasoning_content_behavior = match value.as_str() {
                        Some("fill_empty") => ReasoningContentBehavior::FillEmpty,
                        Some("reject") => ReasoningContentBehavior::Reject,
                        _ => return Err(bad()),
                    };
                }
                "responses_web_search" => options.responses_web_search = web_search()?,
                "messages_web_search" => options.messages_web_search = web_search()?,
                "strict_schema_keywords" => {
                    options.strict_schema_keywords = match value.as_str() {
                        Some("drop") => StrictSchemaKeywords::Drop,
                        Some("enforce") => StrictSchemaKeywords::Enforce,
                        _ => return Err(bad()),
                    };
                }
                "thinking_max_tokens_upper_bound" => {
                    options.thinking_max_tokens_upper_bound = bound()?;
                }
                "non_thinking_max_tokens_upper_bound" => {
                    options.non_thinking_max_tokens_upper_bound = bound()?;
                }
                "image_max_tokens" => {
                    options.image_limits.max_tokens =
                        bound().ok().filter(|n| *n >= 8).ok_or_else(bad)?;
                }
                "image_min_pixels" => options.image_limits.min_pixels = bound()?,
                "model_alias" => {
                    for (name, version) in value.as_object().ok_or_else(bad)? {
                        let version = match version.as_str() {
                            Some("v4") => ModelVersion::V4,
                            Some("v4.1") => ModelVersion::V41,
                            _ => return Err(bad()),
                        };
                        options.models.insert(name.clone(), version);
                    }
                }
                _ => return Err(format!("options: unknown key {key}")),
            }
        }
        Ok(options)
    }

    fn version_of(&self, model: &str) -> Result<ModelVersion, Error> {
        self.models.get(model).copied().ok_or_else(|| {
            let names: Vec<&str> = self.models.keys().map(String::as_str).collect();
            bad(format!(
                "The supported API model names are {}, but you passed {model}.",
                names.join(", ")
            ))
        })
    }
}

/// Converts a request body of `protocol`.
///
/// Takes linear time and bounded stack on any input: the JSON parser refuses more than 127 levels.
/// Errors: always a bad request; the stage says whether the body's form or its meaning is at fault.
pub fn convert(protocol: Protocol, body: &[u8], options: &Options) -> Result<Request, Error> {
    let document = Node::parse(body).map_err(|error| {
        Error::bad_request(Stage::Deserialize, format!("invalid JSON request: {error}"))
    })?;
    match protocol {
        Protocol::Chat => chat::convert(typed(document)?, options),
        Protocol::Responses => responses::convert(typed(document)?, options),
        Protocol::Messages => messages::convert(typed(document)?, options),
    }
}

fn typed<'de, T: FromNode<'de>>(document: Node<'de>) -> Result<T, Error> {
    T::from_node(document).map_err(|error| {
        Error::bad_request(Stage::Deserialize, format!("invalid request body: {error}"))
    })
}

/// A refusal for which the client is at fault.
fn bad(message: impl Into<String>) -> Error {
    Error::bad_request(Stage::Convert, message)
}

/// Replaces the declarations that System messages carry by their chosen, normalised form and drops
/// the carriers that end up empty (sections 8.5 and 9.2).
fn settle_carried_tools(messages: &mut Vec<Message>, chosen: &[ToolDefinition]) {
    let by_name: std::collections::HashMap<&str, &ToolDefinition> =
        chosen.iter().map(|tool| (tool.name.as_str(), tool)).collect();
    messages.retain_mut(|message| {
        let Message::System { content, tools: Some(carried), .. } = message else { return true };
        let kept: Vec<ToolDefinition> = carried
            .iter()
            .filter_map(|tool| by_name.get(tool.name.as_str()).map(|tool| (*tool).clone()))
            .collect();
        let is_empty = kept.is_empty() && content.text.is_empty();
        *carried = kept;
        !is_empty
    });
}

/// Whether the word `json` stands, in any case, in the content of some message (section 6.10).
fn mentions_json(messages: &[Message]) -> bool {
    messages.iter().any(|message| {
        let text = match message {
            Message::System { content, .. }
            | Message::User { content, .. }
            | Message::Tool { content, .. } => &content.text,
            Message::Assistant { content, .. } | Message::LatestReminder { content } => content,
        };
        text.as_bytes().windows(4).any(|window| window.eq_ignore_ascii_case(b"json"))
    })
}
