//! Output items of a Responses response and how they are written (recipe.md, section 15.3).

use serde_json::Value;

use super::custom_input::CustomInput;
use crate::stream::write;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl Status {
    pub(super) fn word(self) -> &'static str {
        match self {
            Status::InProgress => "in_progress",
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
            Status::Failed => "failed",
        }
    }
}

#[derive(Debug)]
pub(super) struct Item {
    pub(super) id: String,
    pub(super) kind: Kind,
    /// The text, the arguments' JSON or the decoded input so far.
    pub(super) text: String,
    pub(super) logprobs: Vec<u8>,
}

#[derive(Debug)]
pub(super) enum Kind {
    Message { is_commentary: bool },
    Reasoning { encrypted: String },
    Function { call_id: String, name: String, namespace: Option<String> },
    Custom { call_id: String, name: String, input: CustomInput },
    ToolSearch { call_id: String },
}

impl Item {
    pub(super) fn write(&self, json: &mut Vec<u8>, status: Status, with_content: bool) {
        let kind = match &self.kind {
            Kind::Message { .. } => "message",
            Kind::Reasoning { .. } => "reasoning",
            Kind::Function { .. } => "function_call",
            Kind::Custom { .. } => "custom_tool_call",
            Kind::ToolSearch { .. } => "tool_search_call",
        };
        let arguments = match &self.kind {
            Kind::ToolSearch { .. } if status == Status::Completed => {
                serde_json::from_str::<Value>(&self.text).ok()
            }
            _ => None,
        };
        let is_lost = matches!(self.kind, Kind::ToolSearch { .. }) && arguments.is_none();
        let status = match status {
            Status::Completed if is_lost => Status::Incomplete,
            other => other,
        };
        write::raw(json, "{\"type\":\"");
        write::raw(json, kind);
        write::raw(json, "\",\"id\":");
        write::string(json, &self.id);
        write::raw(json, ",\"status\":");
        write::string(json, status.word());
        match &self.kind {
            Kind::Message { is_commentary } => {
                let phase = if *is_commentary { "commentary" } else { "final_answer" };
                write::raw(json, ",\"role\":\"assistant\",\"phase\":");
                write::string(json, phase);
                write::raw(json, ",\"content\":[");
                if with_content {
                    write_part(json, Part::Text, &self.text, &self.logprobs);
                }
                json.push(b']');
            }
            Kind::Reasoning { encrypted } => {
                write::raw(json, ",\"content\":[");
                if with_content {
                    write_part(json, Part::Reasoning, &self.text, &[]);
                }
                write::raw(json, "],\"summary\":[],\"encrypted_content\":");
                write::string(json, encrypted);
            }
            Kind::Function { call_id, name, namespace } => {
                write_call_head(json, call_id, name);
                if let Some(namespace) = namespace {
                    write::raw(json, ",\"namespace\":");
                    write::string(json, namespace);
                }
                write::raw(json, ",\"arguments\":");
                write::string(json, &self.text);
            }
            Kind::Custom { call_id, name, .. } => {
                write_call_head(json, call_id, name);
                write::raw(json, ",\"input\":");
                write::string(json, &self.text);
            }
            Kind::ToolSearch { call_id } => {
                write::raw(json, ",\"call_id\":");
                write::string(json, call_id);
                write::raw(json, ",\"execution\":\"client\",\"arguments\":");
                match &arguments {
                    Some(arguments) => write::value(json, arguments),
                    None => write::raw(json, "{}"),
                }
            }
        }
        json.push(b'}');
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Text,
    Reasoning,
}

pub(super) fn write_part(json: &mut Vec<u8>, part: Part, text: &str, logprobs: &[u8]) {
    match part {
        Part::Text => {
            write::raw(json, "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[");
            json.extend_from_slice(logprobs);
            write::raw(json, "],\"text\":");
        }
        Part::Reasoning => write::raw(json, "{\"type\":\"reasoning_text\",\"text\":"),
    }
    write::string(json, text);
    json.push(b'}');
}

fn write_call_head(json: &mut Vec<u8>, call_id: &str, name: &str) {
    write::raw(json, ",\"call_id\":");
    write::string(json, call_id);
    write::raw(json, ",\"name\":");
    write::string(json, name);
}
