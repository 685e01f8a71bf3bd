//! Messages events and the complete message folded from them (recipe.md, section 15.2).

use serde_json::Value;

use super::EventBuffer;
use super::failure::Failure;
use crate::stream::ops::{FinishReason, Usage};
use crate::stream::write;

/// How one stream writes its events.
#[derive(Clone, Debug)]
pub struct MessagesOptions {
    pub id: String,
    pub model: String,
    pub is_thinking: bool,
    /// Ends every thinking block; the response id unless configured.
    pub signature: String,
    pub writes_events: bool,
    pub keeps_response: bool,
}

#[derive(Debug)]
pub struct MessagesWriter {
    options: MessagesOptions,
    open: Option<Block>,
    /// Index of the open block, or of the next one.
    index: u64,
    usage: Usage,
    is_over: bool,
    /// The closed blocks of the complete message, joined by commas.
    blocks: Vec<u8>,
    stop: Option<(&'static str, Option<String>)>,
}

#[derive(Debug)]
struct Block {
    kind: Kind,
    /// What the block has said, kept for the complete message only.
    text: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    ToolUse { id: String, name: String },
}

impl MessagesWriter {
    pub fn new(options: MessagesOptions) -> Self {
        MessagesWriter {
            options,
            open: None,
            index: 0,
            usage: Usage::default(),
            is_over: false,
            blocks: Vec::new(),
            stop: None,
        }
    }

    pub fn start(&mut self, usage: Usage, out: &mut EventBuffer) {
        self.usage = usage;
        if self.options.writes_events {
            let json = out.open(Some("message_start"));
            write::raw(json, "{\"type\":\"message_start\",\"message\":");
            self.write_message(json, false);
            json.push(b'}');
            out.close();
        }
        if self.options.is_thinking {
            self.open_block(Kind::Thinking, out);
        }
    }

    pub fn content(&mut self, text: &str, out: &mut EventBuffer) {
        if self.is_over {
            return;
        }
        if !self.open.as_ref().is_some_and(|block| block.kind == Kind::Text) {
            self.open_block(Kind::Text, out);
        }
        self.delta("\"text_delta\",\"text\":", text, out);
    }

    pub fn reasoning(&mut self, text: &str, out: &mut EventBuffer) {
        if self.is_over {
            return;
        }
        if !self.open.as_ref().is_some_and(|block| block.kind == Kind::Thinking) {
            self.open_block(Kind::Thinking, out);
        }
        self.delta("\"thinking_delta\",\"thinking\":", text, out);
    }

    pub fn call_named(&mut self, name: &str, id: &str, out: &mut EventBuffer) {
        if !self.is_over {
            self.open_block(Kind::ToolUse { id: id.to_owned(), name: name.to_owned() }, out);
        }
    }

    pub fn call_args(&mut self, fragment: &str, out: &mut EventBuffer) {
        let is_call = matches!(&self.open, Some(Block { kind: Kind::ToolUse { .. }, .. }));
        if is_call && !self.is_over {
            self.delta("\"input_json_delta\",\"partial_json\":", fragment, out);
        }
    }

    pub fn finish(
        &mut self,
        reason: FinishReason,
        stop_sequence: Option<&str>,
        usage: Usage,
        out: &mut EventBuffer,
    ) {
        if self.is_over {
            return;
        }
        self.close_block(out);
        self.is_over = true;
        self.usage = usage;
        let word = match reason {
            FinishReason::Stop | FinishReason::EndOfStream => "end_turn",
            FinishReason::StopSequence => "stop_sequence",
            FinishReason::Length => "max_tokens",
            FinishReason::ToolCalls => "tool_use",
            FinishReason::ContentFilter => "refusal",
        };
        if self.options.writes_events {
            let json = out.open(Some("message_delta"));
            write::raw(json, "{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":");
            write::string(json, word);
            write::raw(json, ",\"stop_sequence\":");
            write::string_or_null(json, stop_sequence);
            write::raw(json, "},\"usage\":");
            write_usage(json, usage);
            json.push(b'}');
            out.close();
            write::raw(out.open(Some("message_stop")), "{\"type\":\"message_stop\"}");
            out.close();
        }
        self.stop = Some((word, stop_sequence.map(str::to_owned)));
    }

    /// Ends a stream that has begun: an `error` event, no stop reason, no `message_stop`.
    pub fn fail(&mut self, failure: &Failure, out: &mut EventBuffer) {
        self.is_over = true;
        if self.options.writes_events {
            failure.write_messages(out.open(Some("error")));
            out.close();
        }
    }

    /// Returns the JSON of the complete message, as far as it has come.
    pub fn folded(&self) -> Vec<u8> {
        let mut json = Vec::new();
        self.write_message(&mut json, true);
        json
    }

    fn write_message(&self, json: &mut Vec<u8>, with_content: bool) {
        write::raw(json, "{\"id\":");
        write::string(json, &self.options.id);
        write::raw(json, ",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
        write::string(json, &self.options.model);
        write::raw(json, ",\"content\":[");
        if with_content {
            json.extend_from_slice(&self.blocks);
            if let Some(block) = &self.open {
                json.extend_from_slice(if self.blocks.is_empty() { b"" } else { b"," });
                self.write_block(json, block, false);
            }
        }
        let (reason, sequence) = match &self.stop {
            Some((reason, sequence)) => (Some(*reason), sequence.as_deref()),
            None => (None, None),
        };
        write::raw(json, "],\"stop_reason\":");
        write::string_or_null(json, reason);
        write::raw(json, ",\"stop_sequence\":");
        write::string_or_null(json, sequence);
        write::raw(json, ",\"usage\":");
        write_usage(json, self.usage);
        json.push(b'}');
    }

    /// Writes a block of the complete message. An open one has no signature and no input yet.
    fn write_block(&self, json: &mut Vec<u8>, block: &Block, is_closed: bool) {
        match &block.kind {
            Kind::Text => {
                write::raw(json, "{\"type\":\"text\",\"text\":");
                write::string(json, &block.text);
            }
            Kind::Thinking => {
                write::raw(json, "{\"type\":\"thinking\",\"thinking\":");
                write::string(json, &block.text);
                write::raw(json, ",\"signature\":");
                write::string(json, if is_closed { &self.options.signature } else { "" });
            }
            Kind::ToolUse { id, name } => {
                write::raw(json, "{\"type\":\"tool_use\",\"id\":");
                write::string(json, id);
                write::raw(json, ",\"name\":");
                write::string(json, name);
                write::raw(json, ",\"input\":");
                match serde_json::from_str::<Value>(&block.text) {
                    Ok(input) if is_closed => write::value(json, &input),
                    _ => write::raw(json, "{}"),
                }
            }
        }
        json.push(b'}');
    }

    fn open_block(&mut self, kind: Kind, out: &mut EventBuffer) {
        self.close_block(out);
        let block = Block { kind, text: String::new() };
        if self.options.writes_events {
            let json = out.open(Some("content_block_start"));
            write::raw(json, "{\"type\":\"content_block_start\",\"index\":");
            write::integer(json, self.index);
            write::raw(json, ",\"content_block\":");
            self.write_block(json, &block, false);
            json.push(b'}');
            out.close();
            if self.index == 0 {
                write::raw(out.open(Some("ping")), "{\"type\":\"ping\"}");
                out.close();
            }
        }
        self.open = Some(block);
    }

    fn close_block(&mut self, out: &mut EventBuffer) {
        let Some(block) = self.open.take() else { return };
        if self.options.writes_events {
            if block.kind == Kind::Thinking {
                let signature = std::mem::take(&mut self.options.signature);
                self.write_delta("\"signature_delta\",\"signature\":", &signature, out);
                self.options.signature = signature;
            }
            let json = out.open(Some("content_block_stop"));
            write::raw(json, "{\"type\":\"content_block_stop\",\"index\":");
            write::integer(json, self.index);
            json.push(b'}');
            out.close();
        }
        if self.options.keeps_response {
            let mut blocks = std::mem::take(&mut self.blocks);
            if self.index > 0 {
                blocks.push(b',');
            }
            self.write_block(&mut blocks, &block, true);
            self.blocks = blocks;
        }
        self.index += 1;
    }

    fn delta(&mut self, kind_and_key: &str, text: &str, out: &mut EventBuffer) {
        if self.options.keeps_response
            && let Some(block) = &mut self.open
        {
            block.text.push_str(text);
        }
        if self.options.writes_events {
            self.write_delta(kind_and_key, text, out);
        }
    }

    fn write_delta(&self, kind_and_key: &str, text: &str, out: &mut EventBuffer) {
        let json = out.open(Some("content_block_delta"));
        write::raw(json, "{\"type\":\"content_block_delta\",\"index\":");
        write::integer(json, self.index);
        write::raw(json, ",\"delta\":{\"type\":");
        write::raw(json, kind_and_key);
        write::string(json, text);
        write::raw(json, "}}");
        out.close();
    }
}

fn write_usage(json: &mut Vec<u8>, usage: Usage) {
    let hit = usage.prompt_cache_hit_tokens;
    write::raw(json, "{\"input_tokens\":");
    write::integer(json, usage.prompt_tokens.saturating_sub(hit));
    write::raw(json, ",\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":");
    write::integer(json, hit);
    write::raw(json, ",\"output_tokens\":");
    write::integer(json, usage.completion_tokens);
    write::raw(json, ",\"service_tier\":\"standard\"}");
}
