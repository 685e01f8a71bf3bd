//! The V4 template (recipe.md, section 4).

use super::out::Out;
use super::tools::{CLOSING, RESPONSE_FORMAT, V4};
use super::{Rendered, capacity, is_prefix, is_tool_prompt_on};
use crate::json::Json;
use crate::types::{
    Conversation, Effort, ImageSource, Message, ResponseFormat, Special, SpecialTokens, ToolCall,
    ToolChoice,
};

/// Effort prompts: model input that was fixed in training.
const EFFORT_HIGH: &str = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n\
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.\n\
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.\n\n";
const EFFORT_MAX: &str = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and \
uncompromising.\n\
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.\n\
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.\n\n";
const JSON_OBJECT: &str = "You are a helpful assistant designed to output JSON.\n\
## Response Format:\n\nReply with JSON object ONLY.";

/// A message after hoisting and merging. Adjacent users form one turn.
#[derive(Clone)]
enum Turn<'a> {
    Users(Vec<&'a Message>),
    Other(&'a Message),
}

pub fn render(conversation: &Conversation, tokens: &SpecialTokens) -> Rendered {
    let turns = sorted(merged(&conversation.messages));
    let mut writer = Writer {
        out: Out::new(tokens, capacity(conversation)),
        images: Vec::new(),
        conversation,
        tool_prompt: is_tool_prompt_on(conversation),
    };
    writer.out.special(Special::Bos);
    if conversation.thinking_mode {
        writer.out.plain(match conversation.reasoning_effort {
            Some(Effort::Low) => "",
            Some(Effort::High | Effort::Xhigh) | None => EFFORT_HIGH,
            Some(Effort::Max) => EFFORT_MAX,
        });
    }
    writer.write_systems();
    let mut previous = None;
    for (index, turn) in turns.iter().enumerate() {
        writer.write_turn(turn, previous, index + 1 == turns.len());
        previous = Some(turn);
    }
    let last = match turns.last() {
        Some(Turn::Other(message)) => Some(*message),
        _ => None,
    };
    if !is_prefix(last) {
        writer.write_suffix();
    }
    Rendered { prompt: writer.out.prompt, images: writer.images }
}

/// Takes the system messages out and gathers the users that are then adjacent.
fn merged(messages: &[Message]) -> Vec<Turn<'_>> {
    let mut turns: Vec<Turn<'_>> = Vec::with_capacity(messages.len());
    for message in messages {
        match message {
            Message::System { .. } => {}
            Message::User { .. } => {
                if let Some(Turn::Users(users)) = turns.last_mut() {
                    users.push(message);
                } else {
                    turns.push(Turn::Users(vec![message]));
                }
            }
            other => turns.push(Turn::Other(other)),
        }
    }
    turns
}

/// Sorts the messages that follow an assistant with k calls, k of them: results first, by id.
fn sorted(mut turns: Vec<Turn<'_>>) -> Vec<Turn<'_>> {
    for index in 0..turns.len() {
        let Turn::Other(Message::Assistant { tool_calls: Some(calls), .. }) = &turns[index] else {
            continue;
        };
        let num_calls = calls.len();
        if let Some(following) = turns.get_mut(index + 1..index + 1 + num_calls) {
            following.sort_by_key(|turn| match turn {
                Turn::Other(Message::Tool { tool_call_id, .. }) => (false, tool_call_id.as_deref()),
                _ => (true, None),
            });
        }
    }
    turns
}

struct Writer<'a> {
    out: Out<'a>,
    images: Vec<ImageSource>,
    conversation: &'a Conversation,
    tool_prompt: bool,
}

impl Writer<'_> {
    /// Writes all system text at the front: the messages, then tools, then the response format,
    /// each after a blank line.
    fn write_systems(&mut self) {
        let mut num_written = 0;
        for message in &self.conversation.messages {
            let Message::System { content, images, .. } = message else { continue };
            if content.text.is_empty() {
                continue;
            }
            if num_written > 0 {
                self.out.plain("\n\n");
            }
            self.out.content(content);
            self.images.extend_from_slice(images);
            num_written += 1;
        }
        if self.tool_prompt {
            self.out.plain("\n\n");
            self.write_tool_prompt();
        }
        match &self.conversation.response_format {
            ResponseFormat::Text | ResponseFormat::Regex(_) => {}
            ResponseFormat::JsonObject => {
                self.out.plain("\n\n");
                self.out.plain(JSON_OBJECT);
            }
            ResponseFormat::JsonSchema(schema) => {
                self.out.plain("\n\n");
                self.out.plain(RESPONSE_FORMAT);
                schema.write(&mut self.out.prompt.text, V4.style);
            }
        }
    }

    fn write_tool_prompt(&mut self) {
        V4.write_preamble(&mut self.out);
        for tool in self.conversation.tools.iter() {
            V4.write_schema(&mut self.out, tool);
            self.out.plain("\n");
        }
        self.out.plain("\n");
        self.out.plain(CLOSING);
    }

    fn write_turn(&mut self, turn: &Turn<'_>, previous: Option<&Turn<'_>>, is_last: bool) {
        let is_after_tool = matches!(previous, Some(Turn::Other(Message::Tool { .. })));
        let is_after_user = matches!(previous, Some(Turn::Users(_)));
        match turn {
            Turn::Users(users) => {
                if is_after_tool || is_after_user {
                    self.out.plain("\n\n");
                } else {
                    self.out.special(Special::User);
                }
                self.write_users(users);
            }
            Turn::Other(Message::Tool { content, images, .. }) => {
                if is_after_tool {
                    self.out.plain("\n\n");
                } else {
                    self.out.special(Special::User);
                }
                self.out.plain("<tool_result>");
                self.out.content(content);
                self.out.plain("</tool_result>");
                self.images.extend_from_slice(images);
            }
            Turn::Other(Message::LatestReminder { content }) => {
                self.out.special(Special::LatestReminder);
                self.out.plain(content);
            }
            Turn::Other(Message::Assistant { content, reasoning_content, tool_calls, prefix }) => {
                let reasoning = reasoning_content.as_deref();
                self.write_assistant(content, reasoning, tool_calls.as_deref(), *prefix);
                if !(is_last && *prefix) {
                    self.out.special(Special::Eos);
                }
            }
            Turn::Other(Message::System { .. } | Message::User { .. }) => {}
        }
    }

    fn write_users(&mut self, users: &[&Message]) {
        let mut num_written = 0;
        for user in users {
            let Message::User { content, images } = user else { continue };
            self.images.extend_from_slice(images);
            if content.text.is_empty() {
                continue;
            }
            if num_written > 0 {
                self.out.plain("\n\n");
            }
            self.out.content(content);
            num_written += 1;
        }
    }

    fn write_assistant(
        &mut self,
        content: &str,
        reasoning: Option<&str>,
        calls: Option<&[ToolCall]>,
        prefix: bool,
    ) {
        self.out.special(Special::Assistant);
        if let Some(reasoning) = reasoning
            && (prefix || self.tool_prompt)
        {
            self.out.special(Special::ThinkingStart);
            self.out.grounded(reasoning);
        }
        if !(self.conversation.thinking_mode && prefix && content.is_empty()) {
            self.out.special(Special::ThinkingEnd);
        }
        self.out.grounded(content);
        let Some(calls) = calls else { return };
        let mut calls: Vec<&ToolCall> = calls.iter().collect();
        calls.sort_by(|left, right| left.id.cmp(&right.id));
        let out = &mut self.out;
        V4.write_calls_start(out);
        for call in calls {
            V4.open_invoke(out, &call.name);
            V4.write_parameters(out, call, "\n", "\n");
            V4.close_invoke(out);
            out.plain("\n");
        }
        V4.close_calls(out);
    }

    fn write_suffix(&mut self) {
        self.out.special(Special::Assistant);
        self.out.special(if self.conversation.thinking_mode {
            Special::ThinkingStart
        } else {
            Special::ThinkingEnd
        });
        if self.conversation.tool_choice == ToolChoice::Required && self.tool_prompt {
            V4.write_calls_start(&mut self.out);
        }
    }
}
