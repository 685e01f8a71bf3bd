//! Chat Completions (recipe.md, section 7).

use std::collections::HashSet;
use std::vec::IntoIter;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::Value;

use super::content::Content;
use super::format::{self, Formatted};
use super::image_source::{self as image, FILE_ID_UNSUPPORTED};
use super::sampling::{self, Sampling, empty_string};
use super::schema::Checker;
use super::tools::{self, Choice, ClientTool};
use super::wire::{
    ContentKind, DetailName, EffortName, FunctionType, PlainKind, TextOr, Thinking, detail,
    tagged_by,
};
use super::{Options, bad, mentions_json, reasoning};
use crate::node::{self, FromNode, Node};
use crate::types::{
    Conversation, Detail, Error, Message, ModelVersion, Parsing, Prompt, Request as Converted,
    ResponseFormat, ResponseOptions, Special, ThinkingStage, ToolCall,
};

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub struct Request {
    model: String,
    /// Typed apart, for speed.
    #[serde(skip)]
    messages: Vec<InputMessage>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<ToolChoiceField>,
    thinking: Option<Thinking>,
    reasoning_effort: Option<EffortName>,
    response_format: Option<Format>,
    stop: Option<TextOr<String, PlainKind>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    max_tokens: Option<u32>,
    n: Option<u8>,
    seed: Option<u64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u8>,
    /// Type-checked only.
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: Option<bool>,
}

impl<'de> FromNode<'de> for Request {
    fn from_node(mut node: Node<'de>) -> Result<Self, serde_json::Error> {
        let messages = node.take("messages");
        let mut request = Request::deserialize(node)?;
        let messages = messages.ok_or_else(|| serde_json::Error::missing_field("messages"))?;
        request.messages = node::list(messages)?;
        Ok(request)
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Tool {
    #[serde(rename = "type")]
    _kind: FunctionType,
    function: Function,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Function {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

struct ToolChoiceField(Choice);

impl<'de> Deserialize<'de> for ToolChoiceField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(expecting = "an object")]
        struct Named {
            name: String,
        }
        let other = || D::Error::custom("expected one of `none`, `auto`, `required` or a tool");
        let value = Value::deserialize(deserializer)?;
        let choice = match &value {
            Value::String(word) => match word.as_str() {
                "none" => Choice::None,
                "auto" => Choice::Auto,
                "required" => Choice::Required,
                _ => return Err(other()),
            },
            Value::Object(map) => {
                let kind = map.get("type").ok_or_else(other)?;
                let function = map.get("function").ok_or_else(other)?;
                FunctionType::deserialize(kind)
                    .map_err(|error| D::Error::custom(format!("field `type`: {error}")))?;
                let named = Named::deserialize(function)
                    .map_err(|error| D::Error::custom(format!("field `function`: {error}")))?;
                Choice::Named(named.name)
            }
            _ => return Err(other()),
        };
        Ok(ToolChoiceField(choice))
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
#[serde(tag = "type", rename_all = "snake_case")]
enum Format {
    JsonObject,
    JsonSchema { json_schema: FormatSchema },
    Regex { regex: String },
    Text,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct FormatSchema {
    schema: Value,
    /// Type-checked only.
    #[serde(rename = "name")]
    _name: Option<String>,
    strict: Option<bool>,
}

type Blocks = TextOr<Block, ContentKind>;

tagged_by!("role": InputMessage);
tagged_by!("type": Block);

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum InputMessage {
    System {
        content: Blocks,
        #[serde(rename = "name")]
        _name: Option<String>,
    },
    User {
        content: Blocks,
        #[serde(rename = "name")]
        _name: Option<String>,
    },
    Assistant {
        content: Option<Blocks>,
        reasoning_content: Option<String>,
        tool_calls: Option<Vec<Call>>,
        prefix: Option<bool>,
        #[serde(rename = "name")]
        _name: Option<String>,
    },
    Tool {
        content: Blocks,
        tool_call_id: String,
    },
    LatestReminder {
        content: String,
    },
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Call {
    id: String,
    #[serde(rename = "type")]
    _kind: FunctionType,
    function: CalledFunction,
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct CalledFunction {
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Block {
    Text { text: String },
    ImageUrl { image_url: ImageUrl },
    File { file_id: Option<String>, file_data: Option<String>, filename: Option<String> },
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct ImageUrl {
    url: String,
    #[serde(default)]
    detail: Option<DetailName>,
}

pub fn convert(request: Request, options: &Options) -> Result<Converted, Error> {
    let version = options.version_of(&request.model)?;
    let tools = client_tools(request.tools.unwrap_or_default())?;
    let mode = sampling::mode(request.thinking.as_ref(), request.reasoning_effort, options);
    let declares_tools = !tools.is_empty();
    let has_tool_context = declares_tools || request.messages.iter().any(is_tool_context);

    let context = Context { version, image_spelling: options.special_tokens.get(Special::Image) };
    let mut messages = context.messages(request.messages)?;
    let field = "reasoning_content";
    reasoning::settle(&mut messages, mode.thinking, declares_tools, field, options)?;
    let is_prefix = check_prefix_position(&messages)?;
    let is_json_object = matches!(request.response_format, Some(Format::JsonObject));
    if is_json_object && !mentions_json(&messages) {
        return Err(bad("Prompt must contain the word 'json' in some form to use \
             'response_format' of type 'json_object'."));
    }
    let mut checker = Checker::default();
    let choice = request.tool_choice.map_or(Choice::Auto, |field| field.0);
    let selection =
        tools::select(tools, choice, mode.thinking, options.strict_schema_keywords, &mut checker)?;
    if is_prefix && is_json_object {
        return Err(bad("response_format json_object should not be used with prefix"));
    }
    if is_prefix && has_tool_context {
        return Err(bad("Function call should not be used with prefix"));
    }
    let stop_sequences = stop_sequences(request.stop)?;
    let stream = request.stream.unwrap_or(false);
    if request.stream_options.is_some() && !stream {
        return Err(bad("stream_options should be set along with stream = true"));
    }
    let has_format = request.response_format.is_some();
    let (response_format, format_constraint) =
        response_format(request.response_format, options, &mut checker)?;
    if selection.all_strict()? && has_format {
        return Err(bad("response_format should not be used with tools"));
    }
    let parse_tool_calls = selection.is_active();
    let mut inference = sampling::resolve(
        Sampling {
            n: request.n,
            presence_penalty: request.presence_penalty,
            frequency_penalty: request.frequency_penalty,
            temperature: request.temperature,
            top_p: request.top_p,
            logprobs: request.logprobs.unwrap_or(false),
            top_logprobs: request.top_logprobs,
            max_tokens: request.max_tokens,
            clamps_max_tokens: false,
            seed: request.seed,
        },
        version,
        mode.thinking,
        parse_tool_calls,
        options,
    )?;
    inference.output_constraint = selection.constraint().or(format_constraint);
    Ok(Converted {
        model_version: version,
        model: request.model,
        parsing: Parsing {
            parse_tool_calls,
            starts_in_tool_calls: selection.choice == crate::types::ToolChoice::Required,
            parse_json_output: is_json_object,
            thinking_initial_stage: mode.thinking.then(|| initial_stage(&messages)),
            stop_sequences,
        },
        inference,
        response: ResponseOptions::Chat {
            stream,
            include_usage: request
                .stream_options
                .and_then(|options| options.include_usage)
                .unwrap_or(false),
        },
        conversation: Conversation {
            messages,
            thinking_mode: mode.thinking,
            tools: selection.tools,
            tool_choice: selection.choice,
            reasoning_effort: mode.effort,
            response_format,
        },
    })
}

fn client_tools(declared: Vec<Tool>) -> Result<Vec<ClientTool>, Error> {
    for (index, tool) in declared.iter().enumerate() {
        tools::check_name(&tool.function.name, || format!("tools[{index}].function"))?;
    }
    let tools = declared.into_iter().map(|Tool { function, .. }| ClientTool {
        name: function.name,
        description: function.description,
        parameters: function.parameters,
        strict: function.strict,
        defer_loading: false,
    });
    Ok(tools.collect())
}

fn is_tool_context(message: &InputMessage) -> bool {
    matches!(
        message,
        InputMessage::Tool { .. } | InputMessage::Assistant { tool_calls: Some(_), .. }
    )
}

struct Context<'a> {
    version: ModelVersion,
    image_spelling: &'a str,
}

impl Context<'_> {
    fn messages(&self, input: Vec<InputMessage>) -> Result<Vec<Message>, Error> {
        if input.is_empty() {
            return Err(bad("Empty input messages"));
        }
        let mut out = Vec::with_capacity(input.len());
        let mut rest = Walk { messages: input.into_iter(), next_index: 0 };
        while let Some((index, message)) = rest.next() {
            match message {
                InputMessage::System { content, .. } => {
                    if let Some(message) = self.system(content, index)? {
                        out.push(message);
                    }
                }
                InputMessage::User { content, .. } => {
                    let Content { prompt: content, images, .. } =
                        self.checked_content(content, index)?;
                    out.push(Message::User { content, images });
                }
                InputMessage::LatestReminder { content } => {
                    out.push(Message::LatestReminder { content });
                }
                InputMessage::Tool { .. } => {
                    return Err(bad(
                        "Messages with role 'tool' must be a response to a preceding \
                         message with 'tool_calls'",
                    ));
                }
                InputMessage::Assistant {
                    content, reasoning_content, tool_calls, prefix, ..
                } => {
                    let content = self.assistant_content(content, tool_calls.is_some(), index)?;
                    let tool_calls =
                        tool_calls.map(|calls| checked_calls(calls, index)).transpose()?;
                    let results = self.results(tool_calls.as_deref(), &mut rest)?;
                    let prefix = prefix.unwrap_or(false);
                    out.push(Message::Assistant { content, reasoning_content, tool_calls, prefix });
                    out.extend(results);
                }
            }
        }
        Ok(out)
    }

    /// A system message without its billing header; nothing when that leaves it empty.
    fn system(&self, content: Blocks, index: usize) -> Result<Option<Message>, Error> {
        let mut content = self.content(content, index)?;
        strip_billing_header(&mut content.prompt);
        if content.prompt.text.is_empty() {
            return Ok(None);
        }
        image::check_data_urls(&content.images, || format!(".messages[{index}]"))?;
        let Content { prompt: content, images, .. } = content;
        Ok(Some(Message::System { content, images, tools: None }))
    }

    fn assistant_content(
        &self,
        content: Option<Blocks>,
        has_calls: bool,
        index: usize,
    ) -> Result<String, Error> {
        let Some(content) = content else {
            if has_calls {
                return Ok(String::new());
            }
            return Err(bad("Invalid assistant message: content or tool_calls must be set"));
        };
        let content = self.content(content, index)?;
        if !content.images.is_empty() {
            return Err(bad("Image in assistant message is not supported"));
        }
        Ok(content.prompt.text)
    }

    /// Takes the tool messages that answer `calls`, one for each.
    fn results(&self, calls: Option<&[ToolCall]>, rest: &mut Walk) -> Result<Vec<Message>, Error> {
        const UNANSWERED: &str = "An assistant message with 'tool_calls' must be followed by tool \
                                  messages responding to each 'tool_call_id'";
        let mut unanswered: HashSet<&str> =
            calls.unwrap_or_default().iter().map(|call| call.id.as_str()).collect();
        let known = unanswered.clone();
        let mut results = Vec::with_capacity(known.len());
        while !unanswered.is_empty() {
            let Some((index, InputMessage::Tool { content, tool_call_id })) = rest.next() else {
                return Err(bad(format!(
                    "{UNANSWERED}. (insufficient tool messages following tool_calls message)"
                )));
            };
            if !unanswered.remove(tool_call_id.as_str()) {
                return Err(if known.contains(tool_call_id.as_str()) {
                    duplicate_id(&tool_call_id, index)
                } else {
                    bad(format!(
                        "{UNANSWERED}, The following tool_call_ids did not have response \
                         messages: {tool_call_id}"
                    ))
                });
            }
            let Content { prompt: content, images, .. } = self.checked_content(content, index)?;
            results.push(Message::Tool { content, images, tool_call_id: Some(tool_call_id) });
        }
        Ok(results)
    }

    fn checked_content(&self, content: Blocks, index: usize) -> Result<Content, Error> {
        let content = self.content(content, index)?;
        image::check_data_urls(&content.images, || format!(".messages[{index}]"))?;
        Ok(content)
    }

    fn content(&self, content: Blocks, index: usize) -> Result<Content, Error> {
        let blocks = match content {
            TextOr::Text(text) => return Ok(Content::of(text)),
            TextOr::List(blocks, _) => blocks,
        };
        let mut out = Content::default();
        for (block_index, block) in blocks.into_iter().enumerate() {
            let (url, detail) = match block {
                Block::Text { text } => {
                    out.push_text(text);
                    continue;
                }
                _ if self.version == ModelVersion::V4 => {
                    out.push_text("[Unsupported Image]".to_owned());
                    continue;
                }
                Block::ImageUrl { image_url } => {
                    let location = || format!(".messages[{index}].image_url.url[{block_index}]");
                    image::check_link(&image_url.url, location, "image_url.url ")?;
                    (image_url.url, detail(image_url.detail))
                }
                Block::File { file_id, file_data, filename } => {
                    let data = file_payload(file_id, file_data, filename)
                        .map_err(|text| bad(format!(".messages[{index}]: {text}")))?;
                    (data, Detail::High)
                }
            };
            let source = image::source(url, detail, format!(".messages[{index}]"));
            out.push_image(source, self.image_spelling);
        }
        Ok(out)
    }
}

struct Walk {
    messages: IntoIter<InputMessage>,
    next_index: usize,
}

impl Iterator for Walk {
    type Item = (usize, InputMessage);

    fn next(&mut self) -> Option<Self::Item> {
        let message = self.messages.next()?;
        self.next_index += 1;
        Some((self.next_index - 1, message))
    }
}

fn checked_calls(calls: Vec<Call>, index: usize) -> Result<Vec<ToolCall>, Error> {
    if calls.is_empty() {
        return Err(bad(format!(
            "Invalid 'messages[{index}].tool_calls': empty array. Expected an array with minimum \
             length 1, but got an empty array instead."
        )));
    }
    let mut seen = HashSet::with_capacity(calls.len());
    for call in &calls {
        if !seen.insert(call.id.as_str()) {
            return Err(duplicate_id(&call.id, index));
        }
    }
    let calls = calls.into_iter().map(|Call { id, function, .. }| ToolCall {
        id,
        name: function.name,
        arguments: function.arguments,
    });
    Ok(calls.collect())
}

fn duplicate_id(id: &str, index: usize) -> Error {
    bad(format!("Duplicate value for 'tool_call_id' of {id} in message[{index}]"))
}

/// Returns the data URL of a file block.
fn file_payload(
    file_id: Option<String>,
    file_data: Option<String>,
    filename: Option<String>,
) -> Result<String, &'static str> {
    match (file_id, file_data) {
        (None, None) => Err("file must have a file_id or file_data"),
        (Some(_), Some(_)) => Err("file cannot have both file_id and file_data"),
        (Some(_), None) if filename.is_some() => {
            Err("file cannot have filename when file_id is present")
        }
        (Some(_), None) => Err(FILE_ID_UNSUPPORTED),
        (None, Some(data)) => image::check_file_data(&data).map(|()| data),
    }
}

/// Some clients put a billing line before the system text, where it would spoil prefix caching.
///
/// Keeps the text from the first newline or the first `You are`, whichever is earlier, without
/// leading white space; nothing when neither occurs.
fn strip_billing_header(content: &mut Prompt) {
    let text = &content.text;
    if !text.starts_with("x-anthropic-billing-header") {
        return;
    }
    let start = match (text.find('\n'), text.find("You are")) {
        (Some(newline), Some(words)) => newline.min(words),
        (newline, words) => newline.or(words).unwrap_or(text.len()),
    };
    let start = text.len() - text[start..].trim_start().len();
    content.specials.retain_mut(|(from, to)| {
        let is_kept = *from >= start;
        (*from, *to) = (from.saturating_sub(start), to.saturating_sub(start));
        is_kept
    });
    content.text.drain(..start);
}

/// Returns whether the request continues its last message. Refuses a prefix anywhere else.
fn check_prefix_position(messages: &[Message]) -> Result<bool, Error> {
    let is_prefix = |message: &Message| matches!(message, Message::Assistant { prefix: true, .. });
    let Some((last, earlier)) = messages.split_last() else { return Ok(false) };
    if earlier.iter().any(is_prefix) {
        return Err(bad("Invalid completion message: prefix set true with message which is not \
             final message or message role is not assistant"));
    }
    Ok(is_prefix(last))
}

fn initial_stage(messages: &[Message]) -> ThinkingStage {
    match messages.last() {
        Some(Message::Assistant { prefix: true, content, reasoning_content, .. }) => {
            if !content.is_empty() {
                ThinkingStage::ContentContinuation
            } else if reasoning_content.as_ref().is_some_and(|text| !text.is_empty()) {
                ThinkingStage::ReasoningContinuation
            } else {
                ThinkingStage::ReasoningStart
            }
        }
        _ => ThinkingStage::ReasoningStart,
    }
}

fn stop_sequences(stop: Option<TextOr<String, PlainKind>>) -> Result<Vec<String>, Error> {
    match stop {
        None => Ok(Vec::new()),
        Some(TextOr::Text(text)) if text.is_empty() => Err(empty_string("stop")),
        Some(TextOr::Text(text)) => Ok(vec![text]),
        Some(TextOr::List(stops, _)) => sampling::check_stops(&stops).map(|()| stops),
    }
}

fn response_format(
    format: Option<Format>,
    options: &Options,
    checker: &mut Checker,
) -> Result<Formatted, Error> {
    Ok(match format {
        None | Some(Format::Text) => (ResponseFormat::Text, None),
        Some(Format::JsonObject) => format::json_object(),
        Some(Format::Regex { regex }) => format::regex(regex),
        Some(Format::JsonSchema { json_schema: FormatSchema { schema, strict, .. } }) => {
            format::json_schema(schema, strict, options.strict_schema_keywords, checker)?
        }
    })
}
