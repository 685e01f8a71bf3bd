//! Resolution of the completion's token limit (recipe.md, section 12).

use crate::types::{Conversation, Effort, Error, Inference, Stage};

/// Default without a request for a limit, in tokens.
const DEFAULT_NON_THINKING: u32 = 8_192;
const DEFAULT_THINKING: u32 = 65_536;
const DEFAULT_THINKING_MAX: u32 = 131_072;

/// Returns the `max_tokens` to send to the backend: at least 1, and within the context.
///
/// `prompt_tokens` counts each image at its own token count, not as one placeholder.
/// Errors: a bad request when the prompt and the requested completion exceed `context_limit`.
pub fn resolve(
    conversation: &Conversation,
    inference: &Inference,
    prompt_tokens: u32,
    context_limit: u32,
) -> Result<u32, Error> {
    resolve_parts(
        conversation.thinking_mode,
        conversation.reasoning_effort,
        inference.max_tokens,
        prompt_tokens,
        context_limit,
    )
}

/// [`resolve`] on the three values it reads.
pub fn resolve_parts(
    thinking_mode: bool,
    effort: Option<Effort>,
    max_tokens: Option<u32>,
    prompt_tokens: u32,
    context_limit: u32,
) -> Result<u32, Error> {
    let requested = max_tokens.unwrap_or(0);
    let total = prompt_tokens.saturating_add(requested);
    if total > context_limit {
        return Err(Error::bad_request(
            Stage::Convert,
            format!(
                "This model's maximum context length is {context_limit} tokens. However, you \
                 requested {total} tokens ({prompt_tokens} in the messages, {requested} in the \
                 completion). Please reduce the length of the messages or completion."
            ),
        ));
    }
    let default = match (thinking_mode, effort) {
        (false, _) => DEFAULT_NON_THINKING,
        (true, Some(Effort::Max)) => DEFAULT_THINKING_MAX,
        (true, _) => DEFAULT_THINKING,
    };
    let wanted = max_tokens.unwrap_or(default);
    Ok(wanted.min(context_limit - prompt_tokens).max(1))
}
