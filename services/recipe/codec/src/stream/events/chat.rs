//! Chat Completions chunks and the complete response folded from them (recipe.md, section 15.1).

use super::EventBuffer;
use super::failure::Failure;
use crate::stream::ops::{FinishReason, Usage};
use crate::stream::write;

/// How one stream writes its chunks.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    pub id: String,
    pub model: String,
    /// Seconds since the epoch.
    pub created: u64,
    pub is_thinking: bool,
    pub begins_in_reasoning: bool,
    /// Chunks before the last carry `"usage":null`.
    pub shows_null_usage: bool,
    /// For clients that reject a usage beside a choice: usage leaves in a chunk of its own with
    /// `"choices":[]` (UR-17).
    pub separate_usage: bool,
    pub writes_events: bool,
    pub keeps_response: bool,
}

#[derive(Debug)]
pub struct ChatWriter {
    options: ChatOptions,
    /// A chunk's JSON up to `"choices":`; the fingerprint is known from Start on.
    head: Vec<u8>,
    num_calls: u32,
    response: Folded,
}

/// The complete response so far.
#[derive(Debug, Default)]
struct Folded {
    has_started: bool,
    content: Option<String>,
    reasoning: Option<String>,
    calls: Vec<Call>,
    content_logprobs: Option<Vec<u8>>,
    reasoning_logprobs: Option<Vec<u8>>,
    finish_reason: Option<&'static str>,
    usage: Option<Usage>,
    system_fingerprint: Option<String>,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

#[derive(Clone, Copy)]
enum Logprobs<'a> {
    None,
    Content(&'a [u8]),
    Reasoning(&'a [u8]),
}

impl ChatWriter {
    pub fn new(options: ChatOptions) -> Self {
        ChatWriter { options, head: Vec::new(), num_calls: 0, response: Folded::default() }
    }

    pub fn start(&mut self, system_fingerprint: Option<&str>, out: &mut EventBuffer) {
        self.response.has_started = true;
        self.response.system_fingerprint = system_fingerprint.map(str::to_owned);
        let delta = if self.options.begins_in_reasoning {
            self.response.reasoning = Some(String::new());
            "{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"\"}"
        } else {
            self.response.content = Some(String::new());
            match self.options.is_thinking {
                true => "{\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":null}",
                false => "{\"role\":\"assistant\",\"content\":\"\"}",
            }
        };
        if self.options.writes_events {
            self.write_head();
            self.chunk(out, Logprobs::None, |json| write::raw(json, delta));
        }
    }

    pub fn content(&mut self, text: &str, logprobs: Option<&[u8]>, out: &mut EventBuffer) {
        if self.options.keeps_response {
            self.response.content.get_or_insert_default().push_str(text);
            append_logprobs(&mut self.response.content_logprobs, logprobs);
        }
        if self.options.writes_events {
            let is_thinking = self.options.is_thinking;
            let logprobs = logprobs.map_or(Logprobs::None, Logprobs::Content);
            self.chunk(out, logprobs, |json| {
                write::raw(json, "{\"content\":");
                write::string(json, text);
                write::raw(json, if is_thinking { ",\"reasoning_content\":null}" } else { "}" });
            });
        }
    }

    pub fn reasoning(&mut self, text: &str, logprobs: Option<&[u8]>, out: &mut EventBuffer) {
        if self.options.keeps_response {
            self.response.reasoning.get_or_insert_default().push_str(text);
            append_logprobs(&mut self.response.reasoning_logprobs, logprobs);
        }
        if self.options.writes_events {
            let logprobs = logprobs.map_or(Logprobs::None, Logprobs::Reasoning);
            self.chunk(out, logprobs, |json| {
                write::raw(json, "{\"content\":null,\"reasoning_content\":");
                write::string(json, text);
                json.push(b'}');
            });
        }
    }

    pub fn call_named(&mut self, name: &str, id: &str, out: &mut EventBuffer) {
        let index = self.num_calls;
        self.num_calls += 1;
        if self.options.keeps_response {
            let (id, name) = (id.to_owned(), name.to_owned());
            self.response.calls.push(Call { id, name, arguments: String::new() });
        }
        if self.options.writes_events {
            self.chunk(out, Logprobs::None, |json| {
                write::raw(json, "{\"tool_calls\":[");
                write_call(json, index, id, name, "");
                write::raw(json, "]}");
            });
        }
    }

    pub fn call_args(&mut self, fragment: &str, out: &mut EventBuffer) {
        let Some(index) = self.num_calls.checked_sub(1) else { return };
        if let Some(call) = self.response.calls.last_mut() {
            call.arguments.push_str(fragment);
        }
        if self.options.writes_events {
            self.chunk(out, Logprobs::None, |json| {
                write::raw(json, "{\"tool_calls\":[{\"index\":");
                write::integer(json, u64::from(index));
                write::raw(json, ",\"function\":{\"arguments\":");
                write::string(json, fragment);
                write::raw(json, "}}]}");
            });
        }
    }

    pub fn finish(&mut self, reason: FinishReason, usage: Usage, out: &mut EventBuffer) {
        let word = match reason {
            FinishReason::Stop | FinishReason::StopSequence | FinishReason::EndOfStream => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::ContentFilter => "content_filter",
        };
        self.response.content.get_or_insert_default();
        self.response.finish_reason = Some(word);
        self.response.usage = Some(usage);
        if !self.options.writes_events {
            return;
        }
        let json = out.open(None);
        json.extend_from_slice(&self.head);
        let delta = match self.options.is_thinking {
            true => "[{\"index\":0,\"delta\":{\"content\":\"\",\"reasoning_content\":null}",
            false => "[{\"index\":0,\"delta\":{\"content\":\"\"}",
        };
        write::raw(json, delta);
        write::raw(json, ",\"logprobs\":null,\"finish_reason\":\"");
        write::raw(json, word);
        write::raw(json, "\"}],\"usage\":");
        if self.options.separate_usage {
            write::raw(json, "null}");
            out.close();
            let json = out.open(None);
            json.extend_from_slice(&self.head);
            write::raw(json, "[],\"usage\":");
        }
        let json = out.resume();
        write_usage(json, usage);
        json.push(b'}');
        out.close();
        out.done();
    }

    /// Ends a stream that has begun: an error object, `[DONE]`, and no finish reason.
    pub fn fail(&mut self, failure: &Failure, out: &mut EventBuffer) {
        if self.options.writes_events {
            failure.write_chat(out.open(None));
            out.close();
            out.done();
        }
    }

    /// Returns the JSON of the complete response, as far as it has come.
    pub fn folded(&self) -> Vec<u8> {
        let response = &self.response;
        let json = &mut Vec::new();
        write::raw(json, "{\"id\":");
        write::string(json, &self.options.id);
        write::raw(json, ",\"object\":\"chat.completion\",\"created\":");
        write::integer(json, self.options.created);
        write::raw(json, ",\"model\":");
        write::string(json, &self.options.model);
        write::raw(json, ",\"choices\":[");
        if response.has_started {
            response.write_choice(json);
        }
        json.push(b']');
        if let Some(usage) = response.usage {
            write::raw(json, ",\"usage\":");
            write_usage(json, usage);
        }
        write::raw(json, ",\"system_fingerprint\":");
        write::string_or_null(json, response.system_fingerprint.as_deref());
        json.push(b'}');
        std::mem::take(json)
    }

    fn write_head(&mut self) {
        let head = &mut self.head;
        write::raw(head, "{\"id\":");
        write::string(head, &self.options.id);
        write::raw(head, ",\"object\":\"chat.completion.chunk\",\"created\":");
        write::integer(head, self.options.created);
        write::raw(head, ",\"model\":");
        write::string(head, &self.options.model);
        write::raw(head, ",\"system_fingerprint\":");
        write::string_or_null(head, self.response.system_fingerprint.as_deref());
        write::raw(head, ",\"choices\":");
    }

    fn chunk(
        &self,
        out: &mut EventBuffer,
        logprobs: Logprobs<'_>,
        write_delta: impl FnOnce(&mut Vec<u8>),
    ) {
        let json = out.open(None);
        json.extend_from_slice(&self.head);
        write::raw(json, "[{\"index\":0,\"delta\":");
        write_delta(json);
        match logprobs {
            Logprobs::None => write::raw(json, ",\"logprobs\":null"),
            Logprobs::Content(entries) => {
                write::raw(json, ",\"logprobs\":{\"content\":[");
                json.extend_from_slice(entries);
                write::raw(json, "]}");
            }
            Logprobs::Reasoning(entries) => {
                write::raw(json, ",\"logprobs\":{\"reasoning_content\":[");
                json.extend_from_slice(entries);
                write::raw(json, "]}");
            }
        }
        let end = match self.options.shows_null_usage {
            true => ",\"finish_reason\":null}],\"usage\":null}",
            false => ",\"finish_reason\":null}]}",
        };
        write::raw(json, end);
        out.close();
    }
}

impl Folded {
    fn write_choice(&self, json: &mut Vec<u8>) {
        write::raw(json, "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":");
        write::string_or_null(json, self.content.as_deref());
        if let Some(reasoning) = &self.reasoning {
            write::raw(json, ",\"reasoning_content\":");
            write::string(json, reasoning);
        }
        for (index, call) in self.calls.iter().enumerate() {
            write::raw(json, if index == 0 { ",\"tool_calls\":[" } else { "," });
            write_call(json, index as u32, &call.id, &call.name, &call.arguments);
        }
        if !self.calls.is_empty() {
            json.push(b']');
        }
        write::raw(json, "},\"logprobs\":");
        let lists =
            [("content", &self.content_logprobs), ("reasoning_content", &self.reasoning_logprobs)];
        let mut is_first = true;
        for (key, entries) in lists {
            let Some(entries) = entries else { continue };
            json.push(if std::mem::take(&mut is_first) { b'{' } else { b',' });
            write::string(json, key);
            write::raw(json, ":[");
            json.extend_from_slice(entries);
            json.push(b']');
        }
        write::raw(json, if is_first { "null" } else { "}" });
        write::raw(json, ",\"finish_reason\":");
        write::string_or_null(json, self.finish_reason);
        json.push(b'}');
    }
}

fn append_logprobs(list: &mut Option<Vec<u8>>, entries: Option<&[u8]>) {
    let Some(entries) = entries else { return };
    let list = list.get_or_insert_default();
    if !list.is_empty() {
        list.push(b',');
    }
    list.extend_from_slice(entries);
}

fn write_call(json: &mut Vec<u8>, index: u32, id: &str, name: &str, arguments: &str) {
    write::raw(json, "{\"index\":");
    write::integer(json, u64::from(index));
    write::raw(json, ",\"id\":");
    write::string(json, id);
    write::raw(json, ",\"type\":\"function\",\"function\":{\"name\":");
    write::string(json, name);
    write::raw(json, ",\"arguments\":");
    write::string(json, arguments);
    write::raw(json, "}}");
}

fn write_usage(json: &mut Vec<u8>, usage: Usage) {
    let hit = usage.prompt_cache_hit_tokens;
    write::raw(json, "{\"prompt_tokens\":");
    write::integer(json, usage.prompt_tokens);
    write::raw(json, ",\"completion_tokens\":");
    write::integer(json, usage.completion_tokens);
    write::raw(json, ",\"total_tokens\":");
    write::integer(json, usage.prompt_tokens + usage.completion_tokens);
    write::raw(json, ",\"prompt_tokens_details\":{\"cached_tokens\":");
    write::integer(json, hit);
    json.push(b'}');
    if let Some(reasoning_tokens) = usage.reasoning_tokens {
        write::raw(json, ",\"completion_tokens_details\":{\"reasoning_tokens\":");
        write::integer(json, reasoning_tokens);
        json.push(b'}');
    }
    write::raw(json, ",\"prompt_cache_hit_tokens\":");
    write::integer(json, hit);
    write::raw(json, ",\"prompt_cache_miss_tokens\":");
    write::integer(json, usage.prompt_tokens.saturating_sub(hit));
    json.push(b'}');
}
