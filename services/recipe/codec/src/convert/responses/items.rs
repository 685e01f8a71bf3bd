//! Input items to messages: call groups, reasoning, resize notices (recipe.md, 8.2 and 8.3).

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::Value;

use super::tools::{Registry, TOOL_SEARCH, reported_flat};
use super::wire::{
    Block, InputImage, InputMessage, Item, OutputBlock, ReasoningText, Role, Tool, TypedItem,
};
use crate::convert::bad;
use crate::convert::content::{Content, plain};
use crate::convert::image_source::{self as image, FILE_ID_UNSUPPORTED};
use crate::convert::sampling::empty_string;
use crate::convert::wire::{BlocksKind, OutputKind, TextOr, detail};
use crate::json::{Style, to_string, write_string};
use crate::types::{Error, Message, ModelVersion, ToolCall, ToolDefinition};

/// Walks the items of a request and collects its messages.
pub struct Walk<'a, 'b> {
    pub version: ModelVersion,
    pub image_spelling: &'a str,
    pub registry: &'a mut Registry<'b>,
    /// Names that each tool search output declares, by its item index.
    pub discovered: HashMap<usize, Vec<String>>,
    pub messages: Vec<Message>,
    group: Group,
    answered: HashSet<String>,
}

/// Calls that belong to one assistant message, and what answers them.
#[derive(Default)]
struct Group {
    calls: Vec<ToolCall>,
    unanswered: BTreeSet<String>,
    outputs: HashMap<String, Output>,
    /// The call whose output was the previous item: a resize notice may follow.
    last_output: Option<String>,
}

struct Output {
    message: Message,
    notice: Option<Message>,
    declarations: Option<Vec<String>>,
}

impl<'a, 'b> Walk<'a, 'b> {
    pub fn new(
        version: ModelVersion,
        image_spelling: &'a str,
        registry: &'a mut Registry<'b>,
        discovered: HashMap<usize, Vec<String>>,
    ) -> Self {
        Walk {
            version,
            image_spelling,
            registry,
            discovered,
            messages: Vec::new(),
            group: Group::default(),
            answered: HashSet::new(),
        }
    }

    pub fn item(&mut self, item: Item, index: usize) -> Result<(), Error> {
        let last_output = self.group.last_output.take();
        match item {
            Item::Message(message) => match last_output {
                Some(call_id) if self.is_resize_notice(&message) => {
                    self.attach_notice(&call_id, message, index)
                }
                _ => self.message(message, index),
            },
            Item::Typed(TypedItem::Reasoning { content, .. }) => {
                self.barrier()?;
                self.reasoning(content.unwrap_or_default());
                Ok(())
            }
            Item::Typed(TypedItem::FunctionCall { call_id, name, arguments, namespace }) => {
                self.check_call_id(&call_id, index)?;
                let name = match namespace {
                    Some(namespace) => self.registry.called_name(namespace, name),
                    None => name,
                };
                self.call(ToolCall { id: call_id, name, arguments });
                Ok(())
            }
            Item::Typed(TypedItem::CustomToolCall { call_id, name, input }) => {
                self.check_call_id(&call_id, index)?;
                let mut arguments = String::with_capacity(input.len() + 16);
                arguments.push_str("{\"input\":");
                write_string(&mut arguments, &input);
                arguments.push('}');
                self.call(ToolCall { id: call_id, name, arguments });
                Ok(())
            }
            Item::Typed(TypedItem::FunctionCallOutput { call_id, output }) => {
                let content = self.output_content(output, index)?;
                match call_id {
                    None => {
                        self.barrier()?;
                        self.messages.push(tool_message(content, None));
                        Ok(())
                    }
                    Some(call_id) => {
                        self.check_answers(&call_id, index)?;
                        self.answer(call_id, content, None);
                        Ok(())
                    }
                }
            }
            Item::Typed(TypedItem::CustomToolCallOutput { call_id, output }) => {
                self.check_answers(&call_id, index)?;
                let content = match output {
                    Some(output) => self.output_content(output, index)?,
                    None => Content::default(),
                };
                self.answer(call_id, content, None);
                Ok(())
            }
            Item::Typed(TypedItem::ToolSearchCall { call_id, arguments, .. }) => {
                if self.version == ModelVersion::V4 {
                    return Ok(());
                }
                self.check_call_id(&call_id, index)?;
                let arguments = to_string(&Value::Object(arguments), Style::Compact);
                self.call(ToolCall { id: call_id, name: TOOL_SEARCH.to_owned(), arguments });
                Ok(())
            }
            Item::Typed(TypedItem::ToolSearchOutput { call_id, tools, .. }) => {
                if self.version == ModelVersion::V4 {
                    return Ok(());
                }
                self.search_output(call_id, &tools, index)
            }
            Item::Typed(TypedItem::WebSearchCall) => self.barrier(),
            Item::Typed(TypedItem::Unknown) => Ok(()),
        }
    }

    /// Closes what is open at the end of the input.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.barrier()
    }

    fn search_output(
        &mut self,
        call_id: String,
        tools: &[Tool],
        index: usize,
    ) -> Result<(), Error> {
        self.check_answers(&call_id, index)?;
        let found = reported_flat(tools).map_err(|()| {
            bad(format!("input[{index}]: a tool of an unsupported type cannot be reported"))
        })?;
        let content = Content::of(to_string(&found, Style::Compact));
        let declarations = self.discovered.remove(&index).unwrap_or_default();
        self.answer(call_id, content, Some(declarations));
        Ok(())
    }

    fn check_call_id(&self, call_id: &str, index: usize) -> Result<(), Error> {
        if call_id.is_empty() {
            return Err(empty_string(&format!("input[{index}].call_id")));
        }
        if self.group.unanswered.contains(call_id) || self.answered.contains(call_id) {
            return Err(bad(format!("Duplicate 'call_id': {call_id}.")));
        }
        Ok(())
    }

    fn check_answers(&self, call_id: &str, index: usize) -> Result<(), Error> {
        if call_id.is_empty() {
            return Err(empty_string(&format!("input[{index}].call_id")));
        }
        if self.answered.contains(call_id) {
            return Err(bad(format!("Duplicate tool output for call_id: {call_id}.")));
        }
        if !self.group.unanswered.contains(call_id) {
            return Err(bad(format!("No tool call found for tool output with call_id {call_id}.")));
        }
        Ok(())
    }

    fn call(&mut self, call: ToolCall) {
        if self.group.unanswered.is_empty() {
            self.close_group();
        }
        self.group.unanswered.insert(call.id.clone());
        self.group.calls.push(call);
    }

    fn answer(&mut self, call_id: String, content: Content, declarations: Option<Vec<String>>) {
        self.group.unanswered.remove(&call_id);
        self.answered.insert(call_id.clone());
        // A resize notice speaks of an output's images; a tool search has none.
        self.group.last_output = declarations.is_none().then(|| call_id.clone());
        let message = tool_message(content, Some(call_id.clone()));
        self.group.outputs.insert(call_id, Output { message, notice: None, declarations });
    }

    fn barrier(&mut self) -> Result<(), Error> {
        if let Some(call_id) = self.group.unanswered.first() {
            return Err(bad(format!("No tool output found for tool call {call_id}.")));
        }
        self.close_group();
        Ok(())
    }

    /// Writes a fully answered group: its calls by id, then the outputs in the same order, then
    /// what its tool searches declared.
    fn close_group(&mut self) {
        let Group { mut calls, mut outputs, .. } = std::mem::take(&mut self.group);
        if calls.is_empty() {
            return;
        }
        calls.sort_by(|left, right| left.id.cmp(&right.id));
        let ids: Vec<String> = calls.iter().map(|call| call.id.clone()).collect();
        match self.messages.last_mut() {
            Some(Message::Assistant { tool_calls, .. }) => {
                tool_calls.get_or_insert_default().append(&mut calls);
            }
            _ => self.messages.push(assistant(String::new(), None, Some(calls))),
        }
        let mut declared = Vec::new();
        for output in ids.iter().filter_map(|id| outputs.remove(id)) {
            self.messages.push(output.message);
            self.messages.extend(output.notice);
            declared.extend(output.declarations);
        }
        self.messages.extend(declared.into_iter().map(carrier));
    }

    fn is_resize_notice(&self, message: &InputMessage) -> bool {
        let TextOr::List(blocks, _) = &message.content else { return false };
        let [Block::InputText { text }] = blocks.as_slice() else { return false };
        self.version == ModelVersion::V41
            && message.role == Role::Developer
            && text.starts_with("<image_resize_notice>")
            && text.ends_with("</image_resize_notice>")
    }

    fn attach_notice(
        &mut self,
        call_id: &str,
        message: InputMessage,
        index: usize,
    ) -> Result<(), Error> {
        let notice = system(self.message_content(message.content, index)?);
        if let Some(output) = self.group.outputs.get_mut(call_id) {
            output.notice = Some(notice);
        }
        Ok(())
    }

    fn message(&mut self, message: InputMessage, index: usize) -> Result<(), Error> {
        self.barrier()?;
        let content = self.message_content(message.content, index)?;
        if message.role == Role::Assistant {
            if !content.images.is_empty() {
                return Err(bad(format!(
                    "input[{index}]: Image in assistant message is unsupported"
                )));
            }
            self.assistant_text(content.prompt.text);
            return Ok(());
        }
        image::check_data_urls(&content.images, || format!("input[{index}]"))?;
        let is_user = message.role == Role::User
            || (message.role == Role::Developer && self.version == ModelVersion::V4);
        self.messages.push(if is_user { user(content) } else { system(content) });
        Ok(())
    }

    fn assistant_text(&mut self, text: String) {
        match self.messages.last_mut() {
            Some(Message::Assistant { content, tool_calls, .. })
                if tool_calls.as_ref().is_none_or(Vec::is_empty) =>
            {
                if content.is_empty() {
                    *content = text;
                } else if !text.is_empty() {
                    content.push_str("\n\n");
                    content.push_str(&text);
                }
            }
            _ => self.messages.push(assistant(text, None, None)),
        }
    }

    fn reasoning(&mut self, texts: Vec<ReasoningText>) {
        let texts: Vec<String> = texts.into_iter().map(|part| part.text).collect();
        let text = texts.join("\n");
        if text.is_empty() {
            return;
        }
        match self.messages.last_mut() {
            Some(Message::Assistant { content, reasoning_content, .. }) if content.is_empty() => {
                match reasoning_content {
                    Some(reasoning) => {
                        reasoning.push('\n');
                        reasoning.push_str(&text);
                    }
                    None => *reasoning_content = Some(text),
                }
            }
            _ => self.messages.push(assistant(String::new(), Some(text), None)),
        }
    }

    fn message_content(
        &self,
        content: TextOr<Block, BlocksKind>,
        index: usize,
    ) -> Result<Content, Error> {
        let blocks = match content {
            TextOr::Text(text) => return Ok(Content::of(text)),
            TextOr::List(blocks, _) => blocks,
        };
        let mut out = Content::default();
        for (block_index, block) in blocks.into_iter().enumerate() {
            match block {
                Block::InputText { text } | Block::OutputText { text } => out.push_text(text),
                Block::InputFile {} => out.push_text(UNSUPPORTED_DOCUMENT.to_owned()),
                Block::InputImage(input) => {
                    let location = || format!("input[{index}].content[{block_index}]");
                    self.push_image(&mut out, input, location, index)?;
                }
            }
        }
        Ok(out)
    }

    fn output_content(
        &self,
        output: TextOr<OutputBlock, OutputKind>,
        index: usize,
    ) -> Result<Content, Error> {
        let blocks = match output {
            TextOr::Text(text) => return Ok(Content::of(text)),
            TextOr::List(blocks, _) => blocks,
        };
        let mut out = Content::default();
        for (block_index, block) in blocks.into_iter().enumerate() {
            match block {
                OutputBlock::Text { text } => out.push_text(text),
                OutputBlock::File {} => out.push_text(UNSUPPORTED_DOCUMENT.to_owned()),
                OutputBlock::Image(input) => {
                    let location = || format!("input[{index}].output[{block_index}]");
                    self.push_image(&mut out, input, location, index)?;
                }
            }
        }
        image::check_data_urls(&out.images, || format!("input[{index}]"))?;
        Ok(out)
    }

    fn push_image(
        &self,
        out: &mut Content,
        input: InputImage,
        location: impl Fn() -> String,
        index: usize,
    ) -> Result<(), Error> {
        if self.version == ModelVersion::V4 {
            out.push_text("[Unsupported Image]".to_owned());
            return Ok(());
        }
        let refuse = |text: &str| Err(bad(format!("{}: {text}", location())));
        let url = match (input.image_url.filter(|url| !url.is_empty()), input.file_id) {
            (None, None) => return refuse("input_image must have image_url or file_id"),
            (Some(_), Some(_)) => {
                return refuse("input_image cannot have both image_url and file_id");
            }
            (None, Some(_)) => return refuse(FILE_ID_UNSUPPORTED),
            (Some(url), None) => url,
        };
        image::check_link(&url, &location, "image_url ")?;
        let source = image::source(url, detail(input.detail), format!("input[{index}]"));
        out.push_image(source, self.image_spelling);
        Ok(())
    }
}

const UNSUPPORTED_DOCUMENT: &str = "[Unsupported Document]";

fn user(content: Content) -> Message {
    let Content { prompt: content, images, .. } = content;
    Message::User { content, images }
}

fn system(content: Content) -> Message {
    let Content { prompt: content, images, .. } = content;
    Message::System { content, images, tools: None }
}

fn assistant(
    content: String,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
) -> Message {
    Message::Assistant { content, reasoning_content, tool_calls, prefix: false }
}

fn tool_message(content: Content, tool_call_id: Option<String>) -> Message {
    let Content { prompt: content, images, .. } = content;
    Message::Tool { content, images, tool_call_id }
}

/// A System message that carries declarations by name; their form is filled in once tools are
/// chosen.
fn carrier(names: Vec<String>) -> Message {
    let tools = names.into_iter().map(|name| ToolDefinition {
        name,
        description: None,
        parameters: Value::Null,
        enforced_parameters: None,
        strict: None,
        defer_loading: true,
    });
    Message::System {
        content: plain(String::new()),
        images: Vec::new(),
        tools: Some(tools.collect()),
    }
}
