//! Responses events and the response object (recipe.md, section 15.3).

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::EventBuffer;
use super::custom_input::CustomInput;
use super::failure::Failure;
use super::responses_item::{Item, Kind, Part, Status, write_part};
use crate::stream::ops::{FinishReason, Usage};
use crate::stream::write;

/// How one stream writes its events.
#[derive(Clone, Debug)]
pub struct ResponsesOptions {
    pub id: String,
    pub model: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// The request fields that the response object repeats.
    pub echo: Map<String, Value>,
    /// Function name to (namespace, local name); None splits a name at its first `::`.
    pub namespaces: Option<HashMap<String, (String, String)>>,
    pub custom_tools: Vec<String>,
    pub client_tool_search: bool,
    pub writes_events: bool,
}

#[derive(Debug)]
pub struct ResponsesWriter {
    options: ResponsesOptions,
    frame: ObjectFrame,
    sequence_number: u64,
    open: Option<Item>,
    /// Index of the open item, or of the next one.
    output_index: u64,
    /// The closed items, joined by commas.
    items: Vec<u8>,
    state: State,
}

/// What changes in the response object over its life.
#[derive(Debug)]
struct State {
    status: Status,
    completed_at: Option<u64>,
    usage: Option<Usage>,
    incomplete_reason: Option<&'static str>,
    error: Option<Failure>,
}

/// The constant stretches of the response object, written once.
#[derive(Debug)]
struct ObjectFrame {
    /// `{"id":…,"status":`
    head: Vec<u8>,
    /// `,"instructions":…,"output":[`
    before_output: Vec<u8>,
    /// `],"parallel_tool_calls":…,"usage":`
    after_output: Vec<u8>,
    /// `,"user":…}`
    tail: Vec<u8>,
}

impl ResponsesWriter {
    pub fn new(options: ResponsesOptions) -> Self {
        let frame = ObjectFrame::new(&options);
        let state = State {
            status: Status::InProgress,
            completed_at: None,
            usage: None,
            incomplete_reason: None,
            error: None,
        };
        ResponsesWriter {
            options,
            frame,
            sequence_number: 0,
            open: None,
            output_index: 0,
            items: Vec::new(),
            state,
        }
    }

    pub fn start(&mut self, out: &mut EventBuffer) {
        self.whole_response("response.created", out);
        self.whole_response("response.in_progress", out);
    }

    pub fn content(&mut self, text: &str, logprobs: Option<&[u8]>, out: &mut EventBuffer) {
        if !matches!(&self.open, Some(Item { kind: Kind::Message { .. }, .. })) {
            self.open_item("msg_", Kind::Message { is_commentary: false }, out);
        }
        let logprobs = logprobs.unwrap_or_default();
        if let Some(item) = &mut self.open {
            item.text.push_str(text);
            if !item.logprobs.is_empty() && !logprobs.is_empty() {
                item.logprobs.push(b',');
            }
            item.logprobs.extend_from_slice(logprobs);
        }
        self.event("response.output_text.delta", out, |json, writer| {
            write::raw(json, ",\"content_index\":0,\"delta\":");
            write::string(json, text);
            writer.write_item_id(json);
            write::raw(json, ",\"logprobs\":[");
            json.extend_from_slice(logprobs);
            json.push(b']');
            writer.write_output_index(json);
        });
    }

    pub fn reasoning(&mut self, text: &str, out: &mut EventBuffer) {
        if !matches!(&self.open, Some(Item { kind: Kind::Reasoning { .. }, .. })) {
            let encrypted = format!("{}-0", self.options.id);
            self.open_item("rs_", Kind::Reasoning { encrypted }, out);
        }
        if let Some(item) = &mut self.open {
            item.text.push_str(text);
        }
        self.event("response.reasoning_text.delta", out, |json, writer| {
            write::raw(json, ",\"content_index\":0,\"delta\":");
            write::string(json, text);
            writer.write_item_id(json);
            writer.write_output_index(json);
        });
    }

    pub fn call_named(&mut self, name: &str, id: &str, out: &mut EventBuffer) {
        if let Some(Item { kind: Kind::Message { is_commentary }, .. }) = &mut self.open {
            *is_commentary = true;
        }
        let call_id = id.to_owned();
        if self.options.custom_tools.iter().any(|custom| custom == name) {
            let (name, input) = (name.to_owned(), CustomInput::default());
            self.open_item("ctc_", Kind::Custom { call_id, name, input }, out);
        } else if self.options.client_tool_search && name == "tool_search" {
            self.open_item("tsc_", Kind::ToolSearch { call_id }, out);
        } else {
            let (namespace, name) = self.split_name(name);
            self.open_item("fc_", Kind::Function { call_id, name, namespace }, out);
        }
    }

    pub fn call_args(&mut self, fragment: &str, out: &mut EventBuffer) {
        let Some(item) = &mut self.open else { return };
        let (event, at) = match &mut item.kind {
            Kind::Function { .. } => {
                item.text.push_str(fragment);
                self.argument_delta("response.function_call_arguments.delta", fragment, out);
                return;
            }
            Kind::Custom { input, .. } => {
                let at = item.text.len();
                input.push(fragment, &mut item.text);
                ("response.custom_tool_call_input.delta", at)
            }
            Kind::ToolSearch { .. } => {
                item.text.push_str(fragment);
                return;
            }
            Kind::Message { .. } | Kind::Reasoning { .. } => return,
        };
        let decoded = item.text[at..].to_owned();
        if !decoded.is_empty() {
            self.argument_delta(event, &decoded, out);
        }
    }

    /// Ends the response; `now` is in seconds since the epoch.
    pub fn finish(&mut self, reason: FinishReason, usage: Usage, now: u64, out: &mut EventBuffer) {
        let incomplete_reason = match reason {
            FinishReason::Length => Some("max_output_tokens"),
            FinishReason::ContentFilter => Some("content_filter"),
            FinishReason::Stop
            | FinishReason::StopSequence
            | FinishReason::EndOfStream
            | FinishReason::ToolCalls => None,
        };
        let (status, event) = match incomplete_reason {
            None => (Status::Completed, "response.completed"),
            Some(_) => (Status::Incomplete, "response.incomplete"),
        };
        self.close_item(status, out);
        self.state = State {
            status,
            completed_at: Some(now),
            usage: Some(usage),
            incomplete_reason,
            error: None,
        };
        self.whole_response(event, out);
    }

    /// Ends a stream that has begun with `response.failed`; an open item stays incomplete.
    pub fn fail(&mut self, failure: &Failure, usage: Usage, out: &mut EventBuffer) {
        self.state.status = Status::Failed;
        self.state.usage = Some(usage);
        self.state.error = Some(failure.clone());
        self.whole_response("response.failed", out);
    }

    /// Returns the JSON of the response object, as far as it has come.
    pub fn folded(&self) -> Vec<u8> {
        let mut json = Vec::new();
        self.write_response(&mut json);
        json
    }

    fn split_name(&self, name: &str) -> (Option<String>, String) {
        let split = match &self.options.namespaces {
            Some(map) => map.get(name).map(|(space, local)| (space.as_str(), local.as_str())),
            None => name.split_once("::"),
        };
        match split {
            Some((namespace, local)) => (Some(namespace.to_owned()), local.to_owned()),
            None => (None, name.to_owned()),
        }
    }

    fn open_item(&mut self, prefix: &str, kind: Kind, out: &mut EventBuffer) {
        self.close_item(Status::Completed, out);
        let id = format!("{prefix}{}_{}", self.options.id, self.output_index);
        let part = match kind {
            Kind::Message { .. } => Some(Part::Text),
            Kind::Reasoning { .. } => Some(Part::Reasoning),
            _ => None,
        };
        self.open = Some(Item { id, kind, text: String::new(), logprobs: Vec::new() });
        self.event("response.output_item.added", out, |json, writer| {
            write::raw(json, ",\"item\":");
            writer.write_open_item(json, Status::InProgress, false);
            writer.write_output_index(json);
        });
        if let Some(part) = part {
            self.event("response.content_part.added", out, |json, writer| {
                write::raw(json, ",\"content_index\":0");
                writer.write_item_id(json);
                writer.write_output_index(json);
                write::raw(json, ",\"part\":");
                write_part(json, part, "", &[]);
            });
        }
    }

    fn close_item(&mut self, status: Status, out: &mut EventBuffer) {
        let Some(item) = &mut self.open else { return };
        let rest = match &mut item.kind {
            Kind::Custom { input, .. } => {
                let at = item.text.len();
                input.finish(&mut item.text);
                item.text[at..].to_owned()
            }
            _ => String::new(),
        };
        if !rest.is_empty() {
            self.argument_delta("response.custom_tool_call_input.delta", &rest, out);
        }
        self.write_done_events(out);
        let mut json = std::mem::take(&mut self.items);
        if self.output_index > 0 {
            json.push(b',');
        }
        let start = json.len();
        self.write_open_item(&mut json, status, true);
        self.event("response.output_item.done", out, |event, writer| {
            write::raw(event, ",\"item\":");
            event.extend_from_slice(&json[start..]);
            writer.write_output_index(event);
        });
        self.items = json;
        self.open = None;
        self.output_index += 1;
    }

    /// The events that repeat an item's accumulated value before the item itself is done.
    fn write_done_events(&mut self, out: &mut EventBuffer) {
        let Some(item) = &self.open else { return };
        match &item.kind {
            Kind::Message { .. } => {
                self.text_done("response.output_text.done", Part::Text, out);
            }
            Kind::Reasoning { .. } => {
                self.text_done("response.reasoning_text.done", Part::Reasoning, out);
            }
            Kind::Function { .. } => {
                self.argument_done("response.function_call_arguments.done", "arguments", out);
            }
            Kind::Custom { .. } => {
                self.argument_done("response.custom_tool_call_input.done", "input", out);
            }
            Kind::ToolSearch { .. } => {}
        }
    }

    fn text_done(&mut self, name: &'static str, part: Part, out: &mut EventBuffer) {
        // The one event whose last field is not the sequence number.
        self.event_with_end(
            name,
            out,
            |json, writer| {
                write::raw(json, ",\"content_index\":0");
                writer.write_item_id(json);
                if part == Part::Text {
                    write::raw(json, ",\"logprobs\":[");
                    json.extend_from_slice(writer.open_text().1);
                    json.push(b']');
                }
                writer.write_output_index(json);
            },
            |json, writer| {
                write::raw(json, ",\"text\":");
                write::string(json, writer.open_text().0);
            },
        );
        self.event("response.content_part.done", out, |json, writer| {
            write::raw(json, ",\"content_index\":0");
            writer.write_item_id(json);
            writer.write_output_index(json);
            write::raw(json, ",\"part\":");
            let (text, logprobs) = writer.open_text();
            write_part(json, part, text, logprobs);
        });
    }

    fn argument_done(&mut self, name: &'static str, key: &str, out: &mut EventBuffer) {
        self.event(name, out, |json, writer| {
            json.push(b',');
            write::string(json, key);
            json.push(b':');
            write::string(json, writer.open_text().0);
            writer.write_item_id(json);
            writer.write_output_index(json);
        });
    }

    fn argument_delta(&mut self, event: &'static str, delta: &str, out: &mut EventBuffer) {
        self.event(event, out, |json, writer| {
            write::raw(json, ",\"delta\":");
            write::string(json, delta);
            writer.write_item_id(json);
            writer.write_output_index(json);
        });
    }

    fn whole_response(&mut self, event: &'static str, out: &mut EventBuffer) {
        self.event(event, out, |json, writer| {
            write::raw(json, ",\"response\":");
            writer.write_response(json);
        });
    }

    /// Writes one event: its type, the fields that `write_fields` adds, its sequence number.
    fn event(
        &mut self,
        name: &'static str,
        out: &mut EventBuffer,
        write_fields: impl FnOnce(&mut Vec<u8>, &Self),
    ) {
        self.event_with_end(name, out, write_fields, |_, _| {});
    }

    fn event_with_end(
        &mut self,
        name: &'static str,
        out: &mut EventBuffer,
        write_fields: impl FnOnce(&mut Vec<u8>, &Self),
        write_end: impl FnOnce(&mut Vec<u8>, &Self),
    ) {
        if !self.options.writes_events {
            return;
        }
        let json = out.open(Some(name));
        write_event_head(json, name);
        write_fields(json, self);
        write::raw(json, ",\"sequence_number\":");
        write::integer(json, self.sequence_number);
        write_end(json, self);
        json.push(b'}');
        out.close();
        self.sequence_number += 1;
    }

    /// Text and log probabilities of the open item.
    fn open_text(&self) -> (&str, &[u8]) {
        self.open.as_ref().map_or(("", &[]), |item| (&item.text, &item.logprobs))
    }

    fn write_item_id(&self, json: &mut Vec<u8>) {
        write::raw(json, ",\"item_id\":");
        write::string(json, self.open.as_ref().map_or("", |item| &item.id));
    }

    fn write_output_index(&self, json: &mut Vec<u8>) {
        write::raw(json, ",\"output_index\":");
        write::integer(json, self.output_index);
    }

    fn write_open_item(&self, json: &mut Vec<u8>, status: Status, with_content: bool) {
        if let Some(item) = &self.open {
            item.write(json, status, with_content);
        }
    }

    fn write_response(&self, json: &mut Vec<u8>) {
        let state = &self.state;
        json.extend_from_slice(&self.frame.head);
        write::string(json, state.status.word());
        write::raw(json, ",\"background\":false,\"completed_at\":");
        match state.completed_at {
            Some(seconds) => write::integer(json, seconds),
            None => write::raw(json, "null"),
        }
        write::raw(json, ",\"content_filters\":null,\"error\":");
        match &state.error {
            Some(failure) => failure.write_responses(json),
            None => write::raw(json, "null"),
        }
        write::raw(json, ",\"frequency_penalty\":0.0,\"incomplete_details\":");
        match state.incomplete_reason {
            Some(reason) => {
                write::raw(json, "{\"reason\":");
                write::string(json, reason);
                json.push(b'}');
            }
            None => write::raw(json, "null"),
        }
        json.extend_from_slice(&self.frame.before_output);
        json.extend_from_slice(&self.items);
        if self.open.is_some() {
            json.extend_from_slice(if self.items.is_empty() { b"" } else { b"," });
            let status = match state.status {
                Status::Failed => Status::Incomplete,
                other => other,
            };
            self.write_open_item(json, status, true);
        }
        json.extend_from_slice(&self.frame.after_output);
        match state.usage {
            Some(usage) => write_usage(json, usage),
            None => write::raw(json, "null"),
        }
        json.extend_from_slice(&self.frame.tail);
    }
}

impl ObjectFrame {
    fn new(options: &ResponsesOptions) -> Self {
        let echo = |json: &mut Vec<u8>, key: &str, absent: &str| {
            write::raw(json, ",");
            write::string(json, key);
            write::raw(json, ":");
            match options.echo.get(key) {
                Some(Value::Number(number)) if number.is_f64() => {
                    write::float32(json, number.as_f64().unwrap_or_default() as f32);
                }
                Some(value) => write::value(json, value),
                None => write::raw(json, absent),
            }
        };
        let mut head = Vec::new();
        write::raw(&mut head, "{\"id\":");
        write::string(&mut head, &options.id);
        write::raw(&mut head, ",\"object\":\"response\",\"created_at\":");
        write::integer(&mut head, options.created);
        write::raw(&mut head, ",\"status\":");

        let mut before_output = Vec::new();
        echo(&mut before_output, "instructions", "null");
        echo(&mut before_output, "max_output_tokens", "null");
        write::raw(&mut before_output, ",\"max_tool_calls\":null,\"model\":");
        write::string(&mut before_output, &options.model);
        write::raw(&mut before_output, ",\"moderation\":null,\"output\":[");

        let mut after_output = Vec::new();
        let json = &mut after_output;
        write::raw(json, "],\"parallel_tool_calls\":true,\"presence_penalty\":0.0");
        write::raw(json, ",\"previous_response_id\":null,\"prompt_cache_key\":null");
        write::raw(json, ",\"prompt_cache_retention\":null");
        echo(json, "reasoning", "{\"effort\":null,\"summary\":null}");
        write::raw(json, ",\"safety_identifier\":null,\"service_tier\":\"default\"");
        write::raw(json, ",\"store\":false");
        echo(json, "temperature", "1.0");
        echo(json, "text", "{\"format\":{\"type\":\"text\"},\"verbosity\":null}");
        echo(json, "tool_choice", "\"auto\"");
        echo(json, "tools", "[]");
        echo(json, "top_logprobs", "0");
        echo(json, "top_p", "1.0");
        write::raw(json, ",\"truncation\":\"disabled\",\"usage\":");

        let mut tail = Vec::new();
        echo(&mut tail, "user", "null");
        write::raw(&mut tail, ",\"metadata\":{}}");
        ObjectFrame { head, before_output, after_output, tail }
    }
}

fn write_event_head(json: &mut Vec<u8>, name: &str) {
    write::raw(json, "{\"type\":\"");
    write::raw(json, name);
    json.push(b'"');
}

fn write_usage(json: &mut Vec<u8>, usage: Usage) {
    write::raw(json, "{\"input_tokens\":");
    write::integer(json, usage.prompt_tokens);
    write::raw(json, ",\"input_tokens_details\":{\"cached_tokens\":");
    write::integer(json, usage.prompt_cache_hit_tokens);
    write::raw(json, "},\"output_tokens\":");
    write::integer(json, usage.completion_tokens);
    write::raw(json, ",\"output_tokens_details\":{\"reasoning_tokens\":");
    write::integer(json, usage.reasoning_tokens.unwrap_or(0));
    write::raw(json, "},\"total_tokens\":");
    write::integer(json, usage.prompt_tokens + usage.completion_tokens);
    json.push(b'}');
}
