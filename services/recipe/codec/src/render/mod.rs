//! A conversation to prompt text with the ranges of its explicit special tokens (recipe.md, 3 and 4).
//!
//! Whatever a client wrote is plain text here, however it is spelled; only the template, image
//! placeholders and the grounding tokens of assistant text become special ranges (section 1.4).

mod out;
mod tools;
mod v4;
mod v41;

use crate::types::{
    Conversation, ImageSource, Message, ModelVersion, Prompt, SpecialTokens, ToolChoice,
};

/// A prompt, and the images its placeholders stand for, in prompt order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    pub prompt: Prompt,
    pub images: Vec<ImageSource>,
}

/// Renders with the template of `version`. Never fails: a mapping with unknown spellings fails
/// when the prompt is encoded.
pub fn render(
    conversation: &Conversation,
    version: ModelVersion,
    tokens: &SpecialTokens,
) -> Rendered {
    match version {
        ModelVersion::V41 => v41::render(conversation, tokens),
        ModelVersion::V4 => v4::render(conversation, tokens),
    }
}

/// Whether the prompt explains tools and asks for calls.
fn is_tool_prompt_on(conversation: &Conversation) -> bool {
    conversation.tool_choice != ToolChoice::None && !conversation.tools.is_empty()
}

fn is_prefix(message: Option<&Message>) -> bool {
    matches!(message, Some(Message::Assistant { prefix: true, .. }))
}

/// A rough size of the prompt, so that its text is allocated once.
fn capacity(conversation: &Conversation) -> usize {
    let size = |message: &Message| match message {
        Message::System { content, .. }
        | Message::User { content, .. }
        | Message::Tool { content, .. } => content.text.len(),
        Message::LatestReminder { content } => content.len(),
        Message::Assistant { content, reasoning_content, tool_calls, .. } => {
            let calls = tool_calls.as_deref().unwrap_or_default();
            content.len()
                + reasoning_content.as_ref().map_or(0, String::len)
                + calls.iter().map(|call| 2 * call.arguments.len() + 128).sum::<usize>()
        }
    };
    let messages = conversation.messages.iter().map(|message| size(message) + 64).sum::<usize>();
    4096 + messages + 512 * conversation.tools.len()
}
