//! Thinking mode, effort, sampling and limits (recipe.md, sections 6.3, 6.4 and 6.9).

use super::wire::{EffortName, Thinking, ThinkingType};
use super::{Options, bad};
use crate::types::{Effort, Error, Inference, ModelVersion};

/// Longest accepted list of stop sequences.
const MAX_STOPS: usize = 16;
const MAX_TOP_LOGPROBS: u8 = 20;
/// V4.1 in thinking mode never samples from less than this share of the probability.
const MIN_TOP_P_THINKING: f32 = 0.95;

/// The mode a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    pub thinking: bool,
    pub effort: Option<Effort>,
}

/// An explicit thinking type decides, then the effort, then the service's default.
pub fn mode(thinking: Option<&Thinking>, effort: Option<EffortName>, options: &Options) -> Mode {
    let is_on = match (thinking.map(|thinking| &thinking.kind), effort) {
        (Some(ThinkingType::Disabled), _) => false,
        (Some(ThinkingType::Enabled | ThinkingType::Adaptive), _) => true,
        (None, Some(effort)) => effort != EffortName::None,
        (None, None) => options.default_thinking_mode,
    };
    let effort = match effort {
        Some(EffortName::Minimal | EffortName::Low) => Effort::Low,
        Some(EffortName::Medium | EffortName::High | EffortName::None) | None => Effort::High,
        Some(EffortName::Xhigh) => Effort::Xhigh,
        Some(EffortName::Ultra | EffortName::Max) => Effort::Max,
    };
    Mode { thinking: is_on, effort: is_on.then_some(effort) }
}

/// The sampling fields of a request; what a protocol lacks stays `None`.
#[derive(Debug, Default)]
pub struct Sampling {
    pub n: Option<u8>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub logprobs: bool,
    pub top_logprobs: Option<u8>,
    pub max_tokens: Option<u32>,
    /// Lower a too large `max_tokens` to the bound instead of refusing it.
    pub clamps_max_tokens: bool,
    pub seed: Option<u64>,
}

/// Checks the fields in the contract's order and resolves temperature and top_p.
pub fn resolve(
    sampling: Sampling,
    version: ModelVersion,
    thinking: bool,
    parse_tool_calls: bool,
    options: &Options,
) -> Result<Inference, Error> {
    if sampling.n.is_some_and(|n| n != 1) {
        return Err(bad("Invalid n value (currently only n = 1 is supported)"));
    }
    for (name, value) in [
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ] {
        if value.is_some_and(|value| !(-2.0..=2.0).contains(&value)) {
            return Err(bad(format!("Invalid {name} value, the valid range of {name} is [-2, 2]")));
        }
    }
    if sampling.temperature.is_some_and(|value| !(0.0..=2.0).contains(&value)) {
        return Err(bad("Invalid temperature value, the valid range of temperature is [0, 2]"));
    }
    if sampling.top_p.is_some_and(|value| !(value > 0.0 && value <= 1.0)) {
        return Err(bad("Invalid top_p value, the valid range of top_p is (0, 1.0]"));
    }
    if sampling.top_logprobs.is_some() && !sampling.logprobs {
        return Err(bad(
            "Invalid top_logprobs and logprobs value, logprobs must be set to true if \
             top_logprobs is used.",
        ));
    }
    if sampling.top_logprobs.is_some_and(|value| value > MAX_TOP_LOGPROBS) {
        return Err(bad("Invalid top_logprobs value, the valid range of top_logprobs is [0, 20]."));
    }
    let bound = if thinking {
        options.thinking_max_tokens_upper_bound
    } else {
        options.non_thinking_max_tokens_upper_bound
    };
    let max_tokens = sampling
        .max_tokens
        .map(|value| if sampling.clamps_max_tokens { value.min(bound) } else { value });
    if max_tokens.is_some_and(|value| value < 1 || value > bound) {
        return Err(bad(format!(
            "Invalid max_tokens value, the valid range of max_tokens is [1, {bound}]"
        )));
    }
    if sampling.seed.is_some_and(|seed| seed >= 1 << 63) {
        return Err(bad("Invalid seed value, the valid range of seed is [0, 2^63)"));
    }
    let requested_top_p = sampling.top_p.unwrap_or(1.0);
    let top_p = match (version, thinking) {
        (ModelVersion::V41, true) => requested_top_p.max(MIN_TOP_P_THINKING),
        (ModelVersion::V41, false) => 1.0,
        (ModelVersion::V4, true) if parse_tool_calls => MIN_TOP_P_THINKING,
        (ModelVersion::V4, true) => 1.0,
        (ModelVersion::V4, false) => requested_top_p,
    };
    Ok(Inference {
        max_tokens,
        temperature: if thinking { 1.0 } else { sampling.temperature.unwrap_or(1.0) },
        top_p,
        logprobs: sampling.logprobs,
        top_logprobs: sampling.top_logprobs,
        seed: sampling.seed,
        output_constraint: None,
    })
}

/// Checks a list of stop sequences.
pub fn check_stops(stops: &[String]) -> Result<(), Error> {
    if stops.len() > MAX_STOPS {
        return Err(bad(format!("Stop string array too long: {}", stops.len())));
    }
    match stops.iter().position(String::is_empty) {
        Some(at) => Err(empty_string(&format!("stop[{at}]"))),
        None => Ok(()),
    }
}

/// The refusal of an empty string at `location`.
pub fn empty_string(location: &str) -> Error {
    bad(format!(
        "Invalid '{location}': empty string. Expected a string with minimum length 1, but got an \
         empty string instead."
    ))
}
