//! Reasoning of past assistant messages (recipe.md, section 6.5).

use super::{Options, ReasoningContentBehavior, bad};
use crate::types::{Error, Message, ToolCall};

/// Removes reasoning outside thinking mode; in it, fills or refuses what is missing.
///
/// `field` is the protocol's name of the field, for the refusal.
pub fn settle(
    messages: &mut [Message],
    thinking: bool,
    has_tools: bool,
    field: &str,
    options: &Options,
) -> Result<(), Error> {
    let rejects = options.reasoning_content_behavior == ReasoningContentBehavior::Reject;
    let first_checked = messages
        .iter()
        .rposition(|message| matches!(message, Message::User { .. }))
        .map_or(0, |at| at + 1);
    for (index, message) in messages.iter_mut().enumerate() {
        let Message::Assistant { reasoning_content, tool_calls, .. } = message else { continue };
        if !thinking {
            *reasoning_content = None;
            continue;
        }
        if reasoning_content.is_some() {
            continue;
        }
        let calls = tool_calls.as_deref().unwrap_or_default();
        let is_needed = index >= first_checked && (!calls.is_empty() || has_tools);
        if rejects && is_needed && !calls.iter().any(has_empty_thinking_mark) {
            return Err(bad(format!(
                "The `{field}` in the thinking mode must be passed back to the API."
            )));
        }
        *reasoning_content = Some(String::new());
    }
    Ok(())
}

/// Whether we made this id for a call that followed no reasoning text (section 6.11).
fn has_empty_thinking_mark(call: &ToolCall) -> bool {
    let id = call.id.as_bytes();
    id.is_ascii() && (id.get(8..11) == Some(b"ET_") || id.get(6..8) == Some(b"ET"))
}
