//! Messages and blocks to a conversation (recipe.md, sections 9.2 and 9.3).

use std::collections::{BTreeSet, HashSet};

use serde_json::Value;

use super::wire::{
    AddedTool, Block, DocumentSource, ImageSource as Source, InputMessage, ResultBlock, Role,
};
use crate::convert::content::Content;
use crate::convert::image_source::{self as image, FILE_ID_UNSUPPORTED};
use crate::convert::wire::{PlainKind, TextOr};
use crate::convert::{Options, WebSearch, bad};
use crate::types::{
    Detail, Error, ImageData, ImageSource, Message, ModelVersion, Special, ToolCall, ToolDefinition,
};

/// Walks the messages of a request and collects the conversation's.
pub struct Walk<'a> {
    version: ModelVersion,
    image_spelling: &'a str,
    drops_web_search: bool,
    /// Names of the client tools that the request declares.
    declared: &'a HashSet<String>,
    pub messages: Vec<Message>,
    /// Calls of the latest assistant message without a result so far.
    unanswered: BTreeSet<String>,
}

impl<'a> Walk<'a> {
    pub fn new(version: ModelVersion, options: &'a Options, declared: &'a HashSet<String>) -> Self {
        Walk {
            version,
            image_spelling: options.special_tokens.get(Special::Image),
            drops_web_search: options.messages_web_search == WebSearch::Drop,
            declared,
            messages: Vec::new(),
            unanswered: BTreeSet::new(),
        }
    }

    pub fn run(&mut self, input: Vec<InputMessage>) -> Result<(), Error> {
        if input.is_empty() {
            return Err(bad("messages: at least one message is required"));
        }
        let num_messages = input.len();
        for (index, InputMessage { role, content }) in input.into_iter().enumerate() {
            match (role, content) {
                (Role::User, TextOr::Text(text)) => {
                    self.check_answered(index)?;
                    self.messages.push(user(Content::of(text)));
                }
                (Role::User, TextOr::List(blocks, _)) => self.user_blocks(blocks, index)?,
                (Role::Assistant, content) => {
                    self.check_answered(index)?;
                    self.assistant(content, index)?;
                }
                (Role::System, content) => {
                    self.check_answered(index)?;
                    self.system(content, index)?;
                }
            }
        }
        if !self.unanswered.is_empty() {
            return Err(self.unanswered_error(&format!("messages.{}:", num_messages - 1)));
        }
        Ok(())
    }

    fn check_answered(&self, index: usize) -> Result<(), Error> {
        if self.unanswered.is_empty() {
            return Ok(());
        }
        Err(self.unanswered_error(&format!("messages.{index}: ")))
    }

    fn unanswered_error(&self, location: &str) -> Error {
        let ids: Vec<&str> = self.unanswered.iter().map(String::as_str).collect();
        bad(format!(
            "{location}`tool_use` ids were found without `tool_result` blocks immediately after: \
             {}. Each `tool_use` block must have a corresponding `tool_result` block in the next \
             message.",
            ids.join(", ")
        ))
    }

    fn user_blocks(&mut self, blocks: Vec<Block>, index: usize) -> Result<(), Error> {
        check_not_empty(&blocks, index)?;
        let mut answered = HashSet::new();
        let mut referenced = Vec::new();
        for (block_index, block) in blocks.into_iter().enumerate() {
            let mut content = Content::default();
            match block {
                Block::ToolResult { tool_use_id, content, .. } => {
                    self.check_result_id(&tool_use_id, &answered, index, block_index)?;
                    let Content { prompt, images, .. } =
                        self.result_content(content, index, block_index, &mut referenced)?;
                    self.messages.push(Message::Tool {
                        content: prompt,
                        images,
                        tool_call_id: Some(tool_use_id.clone()),
                    });
                    answered.insert(tool_use_id);
                    continue;
                }
                Block::Text { text } => {
                    self.check_answered(index)?;
                    content.push_text(text);
                }
                Block::Document { source } => {
                    self.check_answered(index)?;
                    content.push_text(unsupported_document(source));
                }
                Block::Image { source } => {
                    self.check_answered(index)?;
                    let path = || format!("messages.{index}.content[{block_index}]");
                    self.push_image(&mut content, source, path, path)?;
                }
                Block::ToolAddition { .. } => return Err(misplaced_addition(index)),
                other => return Err(assistant_only(&other, index)),
            }
            self.messages.push(user(content));
        }
        if !self.unanswered.is_empty() {
            // With calls open, the message before this one is the assistant's that made them.
            let location = format!("messages.{}:", index.saturating_sub(1));
            return Err(self.unanswered_error(&location));
        }
        if self.version == ModelVersion::V41 && !referenced.is_empty() {
            self.messages.push(system(Content::default(), Some(referenced)));
        }
        Ok(())
    }

    /// Checks that a result answers an open call, and closes the call.
    fn check_result_id(
        &mut self,
        id: &str,
        answered: &HashSet<String>,
        index: usize,
        block_index: usize,
    ) -> Result<(), Error> {
        if answered.contains(id) {
            return Err(bad(format!(
                "messages.{index}.content.{block_index}: each tool_use must have a single result. \
                 Found multiple `tool_result` blocks with id: {id}"
            )));
        }
        if !self.unanswered.remove(id) {
            return Err(bad(format!(
                "unexpected `messages.{index}.content.{block_index}: tool_use_id` found in \
                 `tool_result` blocks: {id}. Each `tool_result` block must have a corresponding \
                 `tool_use` block in the previous message."
            )));
        }
        Ok(())
    }

    fn result_content(
        &self,
        content: Option<TextOr<ResultBlock, PlainKind>>,
        index: usize,
        block_index: usize,
        referenced: &mut Vec<String>,
    ) -> Result<Content, Error> {
        let blocks = match content {
            None => return Ok(Content::default()),
            Some(TextOr::Text(text)) => return Ok(Content::of(text)),
            Some(TextOr::List(blocks, _)) => blocks,
        };
        for block in &blocks {
            let ResultBlock::ToolReference { tool_name } = block else { continue };
            if !self.declared.contains(tool_name) {
                return Err(bad(format!(
                    "messages.{index}.content.{block_index}: tool reference '{tool_name}' not \
                     found in available tools"
                )));
            }
        }
        let mut out = Content::default();
        for (part_index, block) in blocks.into_iter().enumerate() {
            match block {
                ResultBlock::Text { text } => out.push_text(text),
                ResultBlock::Document { source } => out.push_text(unsupported_document(source)),
                ResultBlock::Image { source } => {
                    let path = || format!("messages.{index}.content.{block_index}.tool_result");
                    let location = || format!("{}.content[{part_index}]", path());
                    self.push_image(&mut out, source, location, path)?;
                }
                ResultBlock::ToolReference { tool_name } => {
                    referenced.push(tool_name.clone());
                    out.push_text(tool_name);
                }
            }
        }
        Ok(out)
    }

    fn assistant(&mut self, content: TextOr<Block, PlainKind>, index: usize) -> Result<(), Error> {
        let mut content_text = String::new();
        let mut thinking: Vec<String> = Vec::new();
        let mut calls: Vec<ToolCall> = Vec::new();
        let blocks = match content {
            TextOr::Text(text) => {
                content_text = text;
                Vec::new()
            }
            TextOr::List(blocks, _) => {
                check_not_empty(&blocks, index)?;
                blocks
            }
        };
        for (block_index, block) in blocks.into_iter().enumerate() {
            match block {
                Block::Text { .. } | Block::Image { .. } | Block::Document { .. }
                    if !calls.is_empty() =>
                {
                    return Err(self.unanswered_error(&format!("messages.{index}.{block_index}: ")));
                }
                Block::Text { text } => append(&mut content_text, text),
                Block::Document { source } => {
                    append(&mut content_text, unsupported_document(source));
                }
                Block::Image { .. } if self.version == ModelVersion::V4 => {
                    append(&mut content_text, UNSUPPORTED_IMAGE.to_owned());
                }
                Block::Image { source } => {
                    let path = || format!("messages.{index}.content[{block_index}]");
                    self.push_image(&mut Content::default(), source, path, path)?;
                    return Err(bad("Image in assistant message is unsupported"));
                }
                Block::Thinking { thinking: text, .. } => {
                    thinking.push(text);
                }
                Block::ToolUse { id, name, input } => {
                    if !self.unanswered.insert(id.clone()) {
                        return Err(bad(format!(
                            "messages.{index}.content.{block_index}: `tool_use` ids must be unique"
                        )));
                    }
                    calls.push(ToolCall { id, name, arguments: input.0 });
                }
                Block::ServerToolUse { .. } | Block::WebSearchToolResult { .. } => {
                    if !self.drops_web_search {
                        return Err(bad(
                            "Unsupported content block: server tools are not supported",
                        ));
                    }
                }
                Block::ToolResult { .. } => return Err(misplaced_result(index)),
                Block::ToolAddition { .. } => return Err(misplaced_addition(index)),
            }
        }
        self.messages.push(Message::Assistant {
            content: content_text,
            reasoning_content: (!thinking.is_empty()).then(|| thinking.join("\n\n")),
            tool_calls: (!calls.is_empty()).then_some(calls),
            prefix: false,
        });
        Ok(())
    }

    fn system(&mut self, content: TextOr<Block, PlainKind>, index: usize) -> Result<(), Error> {
        let mut out = Content::default();
        let mut added = Vec::new();
        let blocks = match content {
            TextOr::Text(text) => {
                out = Content::of(text);
                Vec::new()
            }
            TextOr::List(blocks, _) => blocks,
        };
        for (block_index, block) in blocks.into_iter().enumerate() {
            match block {
                Block::Text { text } => out.push_text(text),
                Block::Document { source } => out.push_text(unsupported_document(source)),
                Block::Image { source } => {
                    let location = || format!("messages.{index}.content[{block_index}]");
                    self.push_image(&mut out, source, location, || format!("messages.{index}"))?;
                }
                Block::ToolAddition { tool: AddedTool::ToolReference { name } } => {
                    if !self.declared.contains(&name) {
                        return Err(bad(format!(
                            "messages.{index}.content.{block_index}: `tool_addition` references \
                             unknown tool '{name}'"
                        )));
                    }
                    added.push(name);
                }
                Block::ToolResult { .. } => return Err(misplaced_result(index)),
                other => return Err(assistant_only(&other, index)),
            }
        }
        match self.version {
            ModelVersion::V41 => {
                let added = (!added.is_empty()).then_some(added);
                self.messages.push(system(out, added));
            }
            ModelVersion::V4 if out.prompt.text.is_empty() => {}
            ModelVersion::V4 => {
                let text = format!("<system-reminder>\n{}\n</system-reminder>", out.prompt.text);
                self.messages.push(user(Content::of(text)));
            }
        }
        Ok(())
    }

    /// Appends an image; `location` is named by refusals, `path` is recorded on the source.
    fn push_image(
        &self,
        out: &mut Content,
        source: Source,
        location: impl Fn() -> String,
        path: impl Fn() -> String,
    ) -> Result<(), Error> {
        if self.version == ModelVersion::V4 {
            out.push_text(UNSUPPORTED_IMAGE.to_owned());
            return Ok(());
        }
        let data = match source {
            Source::Url { url } => {
                if !image::is_external(&url) {
                    return Err(bad(format!("{}: invalid url: {url:?}", location())));
                }
                image::check_link(&url, location, "")?;
                ImageData::Url(url)
            }
            Source::Base64 { media_type, data } => {
                let url = image::data_url_of_base64(media_type.as_str(), &data)
                    .ok_or_else(|| bad(format!("{}: base64 decode error", location())))?;
                ImageData::DataUrl(url)
            }
            Source::File { .. } => {
                return Err(bad(format!("{}: {FILE_ID_UNSUPPORTED}", location())));
            }
        };
        let image = ImageSource { data, detail: Detail::High, path: path() };
        out.push_image(image, self.image_spelling);
        Ok(())
    }
}

const UNSUPPORTED_IMAGE: &str = "[Unsupported Image]";

fn check_not_empty(blocks: &[Block], index: usize) -> Result<(), Error> {
    if blocks.is_empty() {
        return Err(bad(format!("messages.{index}: all messages must have non-empty content")));
    }
    Ok(())
}

/// Joins with a blank line, but only once there is some text.
fn append(text: &mut String, part: String) {
    if text.is_empty() {
        *text = part;
    } else {
        text.push_str("\n\n");
        text.push_str(&part);
    }
}

fn unsupported_document(source: DocumentSource) -> String {
    let media_type = source.media_type.as_deref().unwrap_or("unknown");
    format!("[Unsupported document type: {media_type}]")
}

/// The refusal of a block that only an assistant message may hold.
fn assistant_only(block: &Block, index: usize) -> Error {
    bad(match block {
        Block::Thinking { .. } => {
            format!("messages.{index}.content: thinking blocks may only be in `assistant` messages")
        }
        Block::WebSearchToolResult { .. } => format!(
            "messages.{index}: `web_search_tool_result` blocks can only be in `assistant` messages"
        ),
        _ => format!("messages.{index}: `tool_use` blocks can only be in `assistant` messages"),
    })
}

fn misplaced_result(index: usize) -> Error {
    bad(format!("messages.{index}: `tool_result` blocks can only be in `user` messages"))
}

fn misplaced_addition(index: usize) -> Error {
    bad(format!("messages.{index}: `tool_addition` blocks can only be in `system` messages"))
}

fn user(content: Content) -> Message {
    let Content { prompt: content, images, .. } = content;
    Message::User { content, images }
}

/// A System message; `declared` names the tools it carries, whose form is filled in once tools are
/// chosen.
fn system(content: Content, declared: Option<Vec<String>>) -> Message {
    let tools = declared.map(|names| {
        names
            .into_iter()
            .map(|name| ToolDefinition {
                name,
                description: None,
                parameters: Value::Null,
                enforced_parameters: None,
                strict: None,
                defer_loading: false,
            })
            .collect()
    });
    let Content { prompt: content, images, .. } = content;
    Message::System { content, images, tools }
}
