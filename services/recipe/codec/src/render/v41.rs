//! The V4.1 template (recipe.md, section 3).

use std::collections::HashMap;

use super::out::Out;
use super::tools::{CLOSING, RESPONSE_FORMAT, V41};
use super::{Rendered, capacity, is_prefix, is_tool_prompt_on};
use crate::json::Json;
use crate::types::{
    Conversation, Effort, ImageSource, Message, ResponseFormat, Special, SpecialTokens, ToolCall,
    ToolChoice,
};

/// A message after normalisation. Adjacent users form one turn.
enum Turn<'a> {
    Users(&'a [Message]),
    Other(&'a Message),
}

pub fn render(conversation: &Conversation, tokens: &SpecialTokens) -> Rendered {
    let mut turns = normalise(&conversation.messages);
    sort_results(&mut turns);
    let mut writer = Writer {
        out: Out::new(tokens, capacity(conversation)),
        images: Vec::new(),
        conversation,
        tool_prompt: is_tool_prompt_on(conversation),
        num_written: 0,
        joins_user_turn: false,
    };
    writer.out.special(Special::Bos);
    if writer.extends_system()
        && !matches!(turns.first(), Some(Turn::Other(Message::System { .. })))
    {
        writer.start_message(true);
        writer.write_extension();
        writer.end_message(false);
    }
    for turn in &turns {
        writer.write_turn(turn);
    }
    if !is_prefix(conversation.messages.last()) {
        writer.write_suffix();
    }
    Rendered { prompt: writer.out.prompt, images: writer.images }
}

/// Gathers adjacent users and drops a reminder that directly follows another.
fn normalise(messages: &[Message]) -> Vec<Turn<'_>> {
    let is_user = |message: &Message| matches!(message, Message::User { .. });
    let mut turns = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let Some(first) = rest.first() {
        let num_users = rest.iter().take_while(|message| is_user(message)).count();
        if num_users > 0 {
            let (users, after) = rest.split_at(num_users);
            turns.push(Turn::Users(users));
            rest = after;
            continue;
        }
        let is_repeated = matches!(first, Message::LatestReminder { .. })
            && matches!(turns.last(), Some(Turn::Other(Message::LatestReminder { .. })));
        if !is_repeated {
            turns.push(Turn::Other(first));
        }
        rest = &rest[1..];
    }
    turns
}

/// Puts the results of each run of user and tool messages into the order of the latest calls.
fn sort_results(turns: &mut [Turn<'_>]) {
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut slots: Vec<usize> = Vec::new();
    for index in 0..=turns.len() {
        match turns.get(index) {
            Some(Turn::Users(_) | Turn::Other(Message::Tool { tool_call_id: None, .. })) => {
                continue;
            }
            Some(Turn::Other(Message::Tool { .. })) => {
                slots.push(index);
                continue;
            }
            _ => {}
        }
        sort_slots(turns, &slots, &positions);
        slots.clear();
        if let Some(Turn::Other(Message::Assistant { tool_calls: Some(calls), .. })) =
            turns.get(index)
            && !calls.is_empty()
        {
            positions.clear();
            for (position, call) in calls.iter().enumerate() {
                positions.entry(call.id.as_str()).or_insert(position);
            }
        }
    }
}

fn sort_slots(turns: &mut [Turn<'_>], slots: &[usize], positions: &HashMap<&str, usize>) {
    if slots.len() < 2 || positions.is_empty() {
        return;
    }
    let mut results: Vec<(usize, &Message)> = slots
        .iter()
        .filter_map(|slot| match turns[*slot] {
            Turn::Other(message @ Message::Tool { tool_call_id: Some(id), .. }) => {
                Some((positions.get(id.as_str()).copied().unwrap_or(0), message))
            }
            _ => None,
        })
        .collect();
    results.sort_by_key(|(position, _)| *position);
    for (slot, (_, message)) in slots.iter().zip(results) {
        turns[*slot] = Turn::Other(message);
    }
}

struct Writer<'a> {
    out: Out<'a>,
    images: Vec<ImageSource>,
    conversation: &'a Conversation,
    tool_prompt: bool,
    /// Messages written so far, the inserted system message included.
    num_written: usize,
    /// Whether the message before was a user or a tool message, whose turn goes on.
    joins_user_turn: bool,
}

impl Writer<'_> {
    fn write_turn(&mut self, turn: &Turn<'_>) {
        let is_system = matches!(turn, Turn::Other(Message::System { .. }));
        let index = self.num_written;
        self.start_message(is_system);
        match turn {
            Turn::Users(users) => {
                self.start_user_turn();
                for (number, user) in users.iter().enumerate() {
                    if number > 0 {
                        self.out.plain("\n\n");
                    }
                    if let Message::User { content, images } = user {
                        self.out.content(content);
                        self.images.extend_from_slice(images);
                    }
                }
                self.end_message(true);
            }
            Turn::Other(Message::User { content, images }) => {
                self.start_user_turn();
                self.out.content(content);
                self.images.extend_from_slice(images);
                self.end_message(true);
            }
            Turn::Other(Message::Tool { content, images, .. }) => {
                self.start_user_turn();
                self.out.plain("<tool_result>");
                self.out.content(content);
                self.out.plain("</tool_result>");
                self.images.extend_from_slice(images);
                self.end_message(true);
            }
            Turn::Other(Message::System { content, images, tools }) => {
                self.out.content(content);
                self.images.extend_from_slice(images);
                if index == 0 && self.extends_system() {
                    self.write_extension();
                }
                for (number, tool) in tools.iter().flatten().enumerate() {
                    let heading = "\n\n### Updated Tool Schemas\n\n";
                    self.out.plain(if number == 0 { heading } else { "\n" });
                    V41.write_schema(&mut self.out, tool);
                }
                self.end_message(false);
            }
            Turn::Other(Message::LatestReminder { content }) => {
                self.out.special(Special::LatestReminder);
                self.out.plain(content);
                self.end_message(false);
            }
            Turn::Other(Message::Assistant { content, reasoning_content, tool_calls, prefix }) => {
                let calls = tool_calls.as_deref().unwrap_or_default();
                let reasoning = reasoning_content.as_deref();
                self.write_assistant(content, reasoning, calls, *prefix, index);
                self.end_message(false);
            }
        }
    }

    /// Writes what comes before a message: the header of the first, or of a later system message.
    fn start_message(&mut self, is_system: bool) {
        let thinks = self.conversation.thinking_mode;
        if self.num_written > 0 {
            if is_system {
                self.out.special(Special::System);
            }
            return;
        }
        if thinks || is_system {
            self.out.special(Special::System);
        }
        if thinks {
            let effort = match self.conversation.reasoning_effort {
                Some(Effort::Low) => "50",
                Some(Effort::High | Effort::Xhigh) | None => "75",
                Some(Effort::Max) => "100",
            };
            self.out.plain("Reasoning Effort: ");
            self.out.plain(effort);
            self.out
                .plain(" (range 1-100, the higher the value, the more thorough the reasoning)\n\n");
        }
    }

    fn end_message(&mut self, is_user_turn: bool) {
        self.num_written += 1;
        self.joins_user_turn = is_user_turn;
    }

    fn start_user_turn(&mut self) {
        if self.joins_user_turn {
            self.out.plain("\n\n");
        } else {
            self.out.special(Special::User);
        }
    }

    fn extends_system(&self) -> bool {
        self.tool_prompt
            || matches!(
                self.conversation.response_format,
                ResponseFormat::JsonObject | ResponseFormat::JsonSchema(_)
            )
    }

    /// Appends the tool prompt and the response format to the first system message.
    fn write_extension(&mut self) {
        if self.tool_prompt {
            self.out.plain("\n\n");
            V41.write_preamble(&mut self.out);
            let shown = self.conversation.tools.iter().filter(|tool| !tool.defer_loading);
            for (number, tool) in shown.enumerate() {
                if number > 0 {
                    self.out.plain("\n");
                }
                V41.write_schema(&mut self.out, tool);
            }
            self.out.plain("\n\n");
            self.out.plain(CLOSING);
        }
        match &self.conversation.response_format {
            ResponseFormat::Text | ResponseFormat::Regex(_) => {}
            ResponseFormat::JsonObject => {
                self.out.plain("\n\n");
                self.out.plain(RESPONSE_FORMAT);
                self.out.plain("{\"type\": \"json_object\"}");
            }
            ResponseFormat::JsonSchema(schema) => {
                self.out.plain("\n\n");
                self.out.plain(RESPONSE_FORMAT);
                schema.write(&mut self.out.prompt.text, V41.style);
            }
        }
    }

    fn write_assistant(
        &mut self,
        content: &str,
        reasoning: Option<&str>,
        calls: &[ToolCall],
        prefix: bool,
        index: usize,
    ) {
        // Past reasoning is shown only where the model may call tools or goes on with it.
        let shows_reasoning =
            self.conversation.thinking_mode && index > 0 && (self.tool_prompt || prefix);
        let ends_reasoning = shows_reasoning && !(prefix && content.is_empty() && calls.is_empty());
        self.out.special(Special::Assistant);
        self.out.special(if shows_reasoning {
            Special::ThinkingStart
        } else {
            Special::ThinkingEnd
        });
        if shows_reasoning {
            self.out.grounded(reasoning.unwrap_or(""));
        }
        if ends_reasoning {
            self.out.special(Special::ThinkingEnd);
        }
        self.out.grounded(content);
        self.write_calls(calls);
        if !prefix {
            self.out.special(Special::Eos);
        }
    }

    fn write_calls(&mut self, calls: &[ToolCall]) {
        if calls.is_empty() {
            return;
        }
        let out = &mut self.out;
        V41.write_calls_start(out);
        for (number, call) in calls.iter().enumerate() {
            if number > 0 {
                out.plain("\n");
            }
            V41.open_invoke(out, &call.name);
            V41.write_parameters(out, call, "\n", "");
            out.plain("\n");
            V41.close_invoke(out);
        }
        out.plain("\n");
        V41.close_calls(out);
    }

    fn write_suffix(&mut self) {
        self.out.special(Special::Assistant);
        self.out.special(if self.conversation.thinking_mode {
            Special::ThinkingStart
        } else {
            Special::ThinkingEnd
        });
        if self.conversation.tool_choice == ToolChoice::Required && self.tool_prompt {
            V41.write_calls_start(&mut self.out);
        }
    }
}
