//! A converted request as JSON, in the layout of the conformance vectors.

use serde_json::{Map, Value, json};

use crate::render::Rendered;
use crate::types::{
    Detail, Effort, ImageData, ImageSource, Message, ModelVersion, Prompt, Request, ResponseFormat,
    ResponseOptions, ThinkingStage, ToolChoice, ToolDefinition,
};

/// Everything a vector expects of conversion.
pub fn request(request: &Request) -> Value {
    let conversation = &request.conversation;
    let inference = &request.inference;
    let parsing = &request.parsing;
    let (schema, regex) = match &conversation.response_format {
        ResponseFormat::JsonSchema(schema) => (schema.clone(), Value::Null),
        ResponseFormat::Regex(pattern) => (Value::Null, json!(pattern)),
        ResponseFormat::Text | ResponseFormat::JsonObject => (Value::Null, Value::Null),
    };
    let mut out = json!({
        "model_version": version_name(request.model_version),
        "stream": is_stream(&request.response),
        "conversation": {
            "messages": conversation.messages.iter().map(message).collect::<Vec<_>>(),
            "thinking_mode": conversation.thinking_mode,
            "tools": conversation.tools.iter().map(tool).collect::<Vec<_>>(),
            "tool_choice": match conversation.tool_choice {
                ToolChoice::Auto => "auto",
                ToolChoice::None => "none",
                ToolChoice::Required => "required",
            },
            "reasoning_effort": conversation.reasoning_effort.map(|effort| match effort {
                Effort::Low => "low",
                Effort::High => "high",
                Effort::Xhigh => "xhigh",
                Effort::Max => "max",
            }),
            "response_format": match conversation.response_format {
                ResponseFormat::Text => "text",
                ResponseFormat::JsonObject => "json_object",
                ResponseFormat::JsonSchema(_) => "json_schema",
                ResponseFormat::Regex(_) => "regex",
            },
            "response_schema": schema,
            "response_regex": regex,
        },
        "inference": {
            "max_tokens": inference.max_tokens,
            "temperature": inference.temperature,
            "top_p": inference.top_p,
            "logprobs": inference.logprobs,
            "top_logprobs": inference.top_logprobs,
            "seed": inference.seed,
            "output_constraint": inference.output_constraint.as_ref().map(|constraint| {
                json!({"kind": constraint.kind, "schema": constraint.schema})
            }),
        },
        "parsing": {
            "parse_tool_calls": parsing.parse_tool_calls,
            "starts_in_tool_calls": parsing.starts_in_tool_calls,
            "parse_json_output": parsing.parse_json_output,
            "thinking_initial_stage": parsing.thinking_initial_stage.map(|stage| match stage {
                ThinkingStage::ReasoningStart => "reasoning_start",
                ThinkingStage::ReasoningContinuation => "reasoning_continuation",
                ThinkingStage::ContentContinuation => "content_continuation",
            }),
            "stop_sequences": parsing.stop_sequences,
        },
        "ok": true,
    });
    if let ResponseOptions::Responses { namespaces: Some(map), .. } = &request.response {
        let map: Map<String, Value> = map
            .iter()
            .map(|(function, namespace, local)| (function.clone(), json!([namespace, local])))
            .collect();
        out["namespace_tool_map"] = Value::Object(map);
    }
    out
}

/// Everything a vector expects of conversion and rendering.
pub fn rendered_request(converted: &Request, rendered: &Rendered) -> Value {
    let mut out = request(converted);
    out["prompt"] = json!(rendered.prompt.text);
    out["special_ranges"] = json!(code_point_ranges(&rendered.prompt));
    out["image_sources"] = rendered.images.iter().map(image).collect();
    out
}

/// The special ranges as code point offsets, as Python indexes strings.
pub fn code_point_ranges(prompt: &Prompt) -> Vec<(usize, usize)> {
    let (mut num_code_points, mut at) = (0, 0);
    let mut offset = |byte: usize| {
        num_code_points += prompt.text[at..byte].chars().count();
        at = byte;
        num_code_points
    };
    prompt.specials.iter().map(|&(from, to)| (offset(from), offset(to))).collect()
}

pub fn version_name(version: ModelVersion) -> &'static str {
    match version {
        ModelVersion::V4 => "v4",
        ModelVersion::V41 => "v4.1",
    }
}

/// Whether the client asked for a streamed response.
pub fn is_stream(response: &ResponseOptions) -> bool {
    match response {
        ResponseOptions::Chat { stream, .. }
        | ResponseOptions::Messages { stream }
        | ResponseOptions::Responses { stream, .. } => *stream,
    }
}

fn message(message: &Message) -> Value {
    match message {
        Message::System { content, images, tools } => json!({
            "role": "system",
            "content": content.text,
            "image_sources": images.iter().map(image).collect::<Vec<_>>(),
            "tools": tools.as_ref().map(|tools| tools.iter().map(tool).collect::<Vec<_>>()),
        }),
        Message::User { content, images } => json!({
            "role": "user",
            "content": content.text,
            "image_sources": images.iter().map(image).collect::<Vec<_>>(),
        }),
        Message::Assistant { content, reasoning_content, tool_calls, prefix } => json!({
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning_content,
            "tool_calls": tool_calls.as_ref().map(|calls| {
                let call = |call: &crate::types::ToolCall| {
                    json!({"id": call.id, "name": call.name, "arguments": call.arguments})
                };
                calls.iter().map(call).collect::<Vec<_>>()
            }),
            "prefix": prefix,
        }),
        Message::Tool { content, images, tool_call_id } => json!({
            "role": "tool",
            "content": content.text,
            "tool_call_id": tool_call_id,
            "image_sources": images.iter().map(image).collect::<Vec<_>>(),
        }),
        Message::LatestReminder { content } => {
            json!({"role": "latest_reminder", "content": content})
        }
    }
}

fn tool(tool: &ToolDefinition) -> Value {
    json!({
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    })
}

/// An image source; the raw bytes of a `bytes` source are not shown.
pub fn image(image: &ImageSource) -> Value {
    let detail = match image.detail {
        Detail::Low => "low",
        Detail::High => "high",
        Detail::Original => "original",
        Detail::Auto => "auto",
    };
    match &image.data {
        ImageData::Url(url) => {
            json!({"kind": "url", "detail": detail, "path": image.path, "url": url})
        }
        ImageData::DataUrl(url) => {
            json!({"kind": "data_url", "detail": detail, "path": image.path, "data_url": url})
        }
        ImageData::Bytes(_) => json!({"kind": "bytes", "detail": detail, "path": image.path}),
    }
}
