//! How a failure looks once a stream has begun (reliability-and-security.md, section 4).

use crate::stream::write;

/// A failure in the words of the shared reason table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// A name of the reason table, such as `BACKEND_LOST`; an unknown one counts as `INTERNAL`.
    pub reason: String,
    pub message: String,
    pub request_id: String,
}

/// The words that one reason becomes in the three protocols.
struct Words {
    chat: &'static str,
    messages: &'static str,
    /// One of the codes that the Responses API publishes.
    responses: &'static str,
}

impl Failure {
    fn words(&self) -> Words {
        let (chat, messages) = match self.reason.as_str() {
            "INVALID_REQUEST"
            | "CONTEXT_LENGTH"
            | "NOT_FITTING"
            | "UNSUPPORTED_FEATURE"
            | "SCHEMA_UNSUPPORTED"
            | "GRAMMAR_BUDGET"
            | "IMAGE_INVALID"
            | "IMAGE_FETCH"
            | "IMAGE_BLOCKED"
            | "CONFLICT" => ("invalid_request_error", "invalid_request_error"),
            "BODY_TOO_LARGE" => ("invalid_request_error", "request_too_large"),
            "UNAUTHENTICATED" => ("authentication_error", "authentication_error"),
            "NO_BALANCE" => ("insufficient_balance", "billing_error"),
            "FORBIDDEN" => ("permission_error", "permission_error"),
            "NOT_FOUND" => ("invalid_request_error", "not_found_error"),
            "QUOTA" => ("rate_limit_error", "rate_limit_error"),
            "ENGINE_FULL" | "OVERLOADED" | "QUEUE_TIMEOUT" | "DRAINING" | "NO_INSTANCE"
            | "BACKEND_LOST" => ("server_error", "overloaded_error"),
            "DEADLINE" => ("server_error", "timeout_error"),
            _ => ("internal_error", "api_error"),
        };
        let responses = match chat {
            "invalid_request_error" => "invalid_prompt",
            "rate_limit_error" => "rate_limit_exceeded",
            _ => "server_error",
        };
        Words { chat, messages, responses }
    }

    /// Writes `{"error":{…}}`. The codec's rule: `code` equals `type`.
    pub(super) fn write_chat(&self, json: &mut Vec<u8>) {
        let word = self.words().chat;
        write::raw(json, "{\"error\":{\"message\":");
        write::string(json, &self.message);
        write::raw(json, ",\"type\":");
        write::string(json, word);
        write::raw(json, ",\"param\":null,\"code\":");
        write::string(json, word);
        write::raw(json, ",\"request_id\":");
        write::string(json, &self.request_id);
        write::raw(json, "}}");
    }

    pub(super) fn write_messages(&self, json: &mut Vec<u8>) {
        write::raw(json, "{\"type\":\"error\",\"error\":{\"type\":");
        write::string(json, self.words().messages);
        write::raw(json, ",\"message\":");
        write::string(json, &self.message);
        write::raw(json, "},\"request_id\":");
        write::string(json, &self.request_id);
        json.push(b'}');
    }

    /// Writes the `error` member of a failed response object.
    pub(super) fn write_responses(&self, json: &mut Vec<u8>) {
        write::raw(json, "{\"code\":");
        write::string(json, self.words().responses);
        write::raw(json, ",\"message\":");
        write::string(json, &self.message);
        write::raw(json, ",\"request_id\":");
        write::string(json, &self.request_id);
        json.push(b'}');
    }
}
