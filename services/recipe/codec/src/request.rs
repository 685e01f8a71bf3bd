//! One request from its body to ids, by all four steps, and what its output stream must remember.

use data_url::DataUrl;
use serde_json::{Map, Value, json};

use crate::convert::{self, Options};
use crate::encode::Tokenizer;
use crate::types::{
    Detail, Error, ImageData, ImageSource, ModelVersion, Parsing, Prompt, Protocol, Request,
    ResponseOptions, Special, Stage, ThinkingStage,
};
use crate::{images, max_tokens, render};

/// Limits of recipe.md, section 11.2.
const MAX_IMAGES: usize = 600;
const MAX_IMAGE_BYTES: usize = 32 << 20;
const MAX_ALL_IMAGE_BYTES: usize = 64 << 20;
const MAX_SIDE_PX: u32 = 8192;
/// From this many images on, sides are bounded tighter.
const MANY_IMAGES: usize = 15;
const MAX_SIDE_PX_OF_MANY: u32 = 4096;

const UNSUPPORTED_IMAGE: &str = "You have uploaded an unsupported image. Please make sure your \
    image is valid and has one of the following formats: webp, png, jpeg, and gif.";

/// Everything the pipeline needs of a request.
#[derive(Debug)]
pub struct Encoded {
    pub request: Request,
    pub prompt: Prompt,
    /// Each image placeholder is widened to the image's tokens.
    pub ids: Vec<u32>,
    pub images: Vec<PromptImage>,
    /// Resolved limit of the completion.
    pub max_tokens: u32,
    pub starts_in_reasoning: bool,
}

#[derive(Debug)]
pub struct PromptImage {
    /// First position of the span in the ids.
    pub start: u32,
    /// Positions of the span; 0 while the size is unknown: the span is one placeholder then.
    pub num_tokens: u32,
    /// In pixels; 0 while unknown.
    pub width: u32,
    pub height: u32,
    /// Empty for an external URL.
    pub data: Vec<u8>,
    pub source: ImageSource,
}

/// Which rule a refused request broke; the words and status are in the error.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    Request(Error),
    ContextLength(Error),
    Image(Error),
}

impl Refusal {
    pub fn error(&self) -> &Error {
        match self {
            Refusal::Request(error) | Refusal::ContextLength(error) | Refusal::Image(error) => {
                error
            }
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::Request(error)
    }
}

/// Converts, renders and encodes a body. Pure.
///
/// `tokenizer_of` a model's name. `context_limit` in tokens. An image by URL counts as one token
/// until it is fetched.
pub fn encode<'a>(
    protocol: Protocol,
    body: &[u8],
    options: &Options,
    tokenizer_of: impl FnOnce(&str) -> &'a Tokenizer,
    context_limit: u32,
) -> Result<Encoded, Refusal> {
    let request = convert::convert(protocol, body, options)?;
    let tokenizer = tokenizer_of(&request.model);
    let conversation = &request.conversation;
    let rendered = render::render(conversation, request.model_version, &options.special_tokens);
    let narrow = tokenizer.encode_prompt(&rendered.prompt)?;
    let mut images = read_images(rendered.images, options.image_limits)?;
    let image_id = tokenizer.added_id(options.special_tokens.get(Special::Image));
    let ids = widen(narrow, image_id, &mut images);
    let num_ids = u32::try_from(ids.len()).unwrap_or(u32::MAX);
    let max_tokens = max_tokens::resolve(conversation, &request.inference, num_ids, context_limit)
        .map_err(Refusal::ContextLength)?;
    let starts_in_reasoning = matches!(
        request.parsing.thinking_initial_stage,
        Some(ThinkingStage::ReasoningStart | ThinkingStage::ReasoningContinuation)
    ) && !request.parsing.starts_in_tool_calls;
    let prompt = rendered.prompt;
    Ok(Encoded { request, prompt, ids, images, max_tokens, starts_in_reasoning })
}

/// Repeats each placeholder as often as its image has tokens, and notes where the spans start.
fn widen(narrow: Vec<u32>, image_id: Option<u32>, images: &mut [PromptImage]) -> Vec<u32> {
    let Some(image_id) = image_id.filter(|_| !images.is_empty()) else {
        return narrow;
    };
    let num_tokens: usize = images.iter().map(|image| image.num_tokens as usize).sum();
    let mut ids = Vec::with_capacity(narrow.len() + num_tokens);
    let mut rest = images.iter_mut();
    for id in narrow {
        // Plain text never encodes to an added id, so this is a placeholder.
        match if id == image_id { rest.next() } else { None } {
            Some(image) => {
                image.start = ids.len() as u32;
                ids.resize(ids.len() + image.num_tokens.max(1) as usize, id);
            }
            None => ids.push(id),
        }
    }
    ids
}

fn read_images(
    sources: Vec<ImageSource>,
    limits: images::Limits,
) -> Result<Vec<PromptImage>, Refusal> {
    let num_images = sources.len();
    if let Some(source) = sources.get(MAX_IMAGES) {
        let text =
            format!("Too many images: max {MAX_IMAGES} images per request, got {num_images}");
        return Err(image_error(prefixed(&source.path, &text)));
    }
    let max_side = if num_images < MANY_IMAGES { MAX_SIDE_PX } else { MAX_SIDE_PX_OF_MANY };
    let mut images: Vec<PromptImage> = Vec::with_capacity(num_images);
    let mut num_bytes = 0;
    for source in sources {
        let path = source.path.clone();
        let index = images.iter().filter(|image| image.source.path == path).count();
        let image = read_image(source, max_side, limits)
            .map_err(|text| image_error(format!("{path}.image[{index}]: {text}")))?;
        num_bytes += image.data.len();
        if num_bytes > MAX_ALL_IMAGE_BYTES {
            let text = format!(
                "Total image size exceeds the limit: max {} MB per request, got {} MB",
                MAX_ALL_IMAGE_BYTES >> 20,
                num_bytes >> 20
            );
            return Err(image_error(prefixed(&path, &text)));
        }
        images.push(image);
    }
    Ok(images)
}

fn image_error(text: String) -> Refusal {
    Refusal::Image(Error::bad_request(Stage::Convert, text))
}

fn prefixed(path: &str, text: &str) -> String {
    if path.is_empty() { text.to_owned() } else { format!("{path}: {text}") }
}

fn read_image(
    source: ImageSource,
    max_side: u32,
    limits: images::Limits,
) -> Result<PromptImage, String> {
    let unsupported = || UNSUPPORTED_IMAGE.to_owned();
    let data = match &source.data {
        ImageData::Url(_) => {
            let (start, num_tokens, width, height) = (0, 0, 0, 0);
            return Ok(PromptImage { start, num_tokens, width, height, data: Vec::new(), source });
        }
        ImageData::Bytes(data) => data.clone(),
        ImageData::DataUrl(url) => {
            let url = DataUrl::process(url).map_err(|_| unsupported())?;
            url.decode_to_vec().map_err(|_| unsupported())?.0
        }
    };
    if data.len() > MAX_IMAGE_BYTES {
        return Err(format!("image file size exceeds limit {} MB", MAX_IMAGE_BYTES >> 20));
    }
    let (width, height) = images::dimensions(&data).ok_or_else(unsupported)?;
    if width == 0 || height == 0 || width > max_side || height > max_side {
        return Err(unsupported());
    }
    let (target_width, target_height) =
        images::target_size(width, height, source.detail, limits).map_err(|error| error.message)?;
    let num_tokens =
        images::num_tokens(target_width, target_height, limits).map_err(|error| error.message)?;
    Ok(PromptImage { start: 0, num_tokens, width, height, data, source })
}

/// What an output stream must know of its request; travels as JSON between processes.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamState {
    pub model: String,
    pub model_version: ModelVersion,
    pub parsing: Parsing,
    pub response: ResponseOptions,
}

impl StreamState {
    pub fn of(request: &Request) -> Self {
        StreamState {
            model: request.model.clone(),
            model_version: request.model_version,
            parsing: request.parsing.clone(),
            response: request.response.clone(),
        }
    }

    pub fn to_json(&self) -> String {
        let stage = self.parsing.thinking_initial_stage.map(|stage| match stage {
            ThinkingStage::ReasoningStart => "reasoning_start",
            ThinkingStage::ReasoningContinuation => "reasoning_continuation",
            ThinkingStage::ContentContinuation => "content_continuation",
        });
        let response = match &self.response {
            ResponseOptions::Chat { stream, include_usage } => {
                json!({"protocol": "chat", "stream": stream, "include_usage": include_usage})
            }
            ResponseOptions::Messages { stream } => {
                json!({"protocol": "messages", "stream": stream})
            }
            ResponseOptions::Responses {
                stream,
                echo,
                namespaces,
                custom_tools,
                client_tool_search,
            } => json!({
                "protocol": "responses",
                "stream": stream,
                "echo": echo,
                "namespaces": namespaces,
                "custom_tools": custom_tools,
                "client_tool_search": client_tool_search,
            }),
        };
        json!({
            "model": self.model,
            "model_version": convert::view::version_name(self.model_version),
            "parsing": {
                "parse_tool_calls": self.parsing.parse_tool_calls,
                "starts_in_tool_calls": self.parsing.starts_in_tool_calls,
                "parse_json_output": self.parsing.parse_json_output,
                "thinking_initial_stage": stage,
                "stop_sequences": self.parsing.stop_sequences,
            },
            "response": response,
        })
        .to_string()
    }

    /// Errors: internal, when the text is no state of this version.
    pub fn from_json(text: &[u8]) -> Result<Self, Error> {
        let value: Value = serde_json::from_slice(text).unwrap_or_default();
        read_state(&value)
            .ok_or_else(|| Error::internal(Stage::Stream, "the stream's state cannot be read"))
    }
}

fn read_state(value: &Value) -> Option<StreamState> {
    Some(StreamState {
        model: value["model"].as_str()?.to_owned(),
        model_version: match value["model_version"].as_str()? {
            "v4" => ModelVersion::V4,
            "v4.1" => ModelVersion::V41,
            _ => return None,
        },
        parsing: parsing_from_json(&value["parsing"])?,
        response: read_response(&value["response"])?,
    })
}

/// Reads a `parsing` object as the conformance vectors have it; an absent key is off, but tool
/// calls are parsed.
pub fn parsing_from_json(value: &Value) -> Option<Parsing> {
    let flag = |key: &str, absent| match &value[key] {
        Value::Null => Some(absent),
        flag => flag.as_bool(),
    };
    Some(Parsing {
        parse_tool_calls: flag("parse_tool_calls", true)?,
        starts_in_tool_calls: flag("starts_in_tool_calls", false)?,
        parse_json_output: flag("parse_json_output", false)?,
        thinking_initial_stage: match &value["thinking_initial_stage"] {
            Value::Null => None,
            stage => Some(match stage.as_str()? {
                "reasoning_start" => ThinkingStage::ReasoningStart,
                "reasoning_continuation" => ThinkingStage::ReasoningContinuation,
                "content_continuation" => ThinkingStage::ContentContinuation,
                _ => return None,
            }),
        },
        stop_sequences: match &value["stop_sequences"] {
            Value::Null => Vec::new(),
            list => strings(list)?,
        },
    })
}

fn read_response(value: &Value) -> Option<ResponseOptions> {
    let stream = value["stream"].as_bool()?;
    Some(match value["protocol"].as_str()? {
        "chat" => {
            ResponseOptions::Chat { stream, include_usage: value["include_usage"].as_bool()? }
        }
        "messages" => ResponseOptions::Messages { stream },
        "responses" => ResponseOptions::Responses {
            stream,
            echo: Map::clone(value["echo"].as_object()?),
            namespaces: match &value["namespaces"] {
                Value::Null => None,
                list => Some(list.as_array()?.iter().map(triple).collect::<Option<_>>()?),
            },
            custom_tools: strings(&value["custom_tools"])?,
            client_tool_search: value["client_tool_search"].as_bool()?,
        },
        _ => return None,
    })
}

fn strings(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
}

fn triple(value: &Value) -> Option<(String, String, String)> {
    let [a, b, c] = strings(value)?.try_into().ok()?;
    Some((a, b, c))
}

/// The word for a detail in requests and vectors.
pub fn detail_name(detail: Detail) -> &'static str {
    match detail {
        Detail::Low => "low",
        Detail::High => "high",
        Detail::Original => "original",
        Detail::Auto => "auto",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_survives_its_json() {
        let responses = ResponseOptions::Responses {
            stream: true,
            echo: serde_json::from_str(r#"{"b":1,"a":null}"#).expect("an object"),
            namespaces: Some(vec![("n::f".into(), "n".into(), "f".into())]),
            custom_tools: vec!["apply_patch".into()],
            client_tool_search: true,
        };
        let chat = ResponseOptions::Chat { stream: false, include_usage: true };
        for response in [responses, chat, ResponseOptions::Messages { stream: true }] {
            let parsing = Parsing {
                parse_tool_calls: true,
                thinking_initial_stage: Some(ThinkingStage::ContentContinuation),
                stop_sequences: vec!["\n\"stop\"".into()],
                ..Parsing::default()
            };
            let model_version = ModelVersion::V4;
            let state = StreamState { model: "m".into(), model_version, parsing, response };
            assert_eq!(StreamState::from_json(state.to_json().as_bytes()), Ok(state));
        }
        assert!(StreamState::from_json(b"{}").is_err());
    }

    #[test]
    fn placeholders_widen_in_order_and_unknown_sizes_stay_one() {
        let image = |num_tokens| PromptImage {
            start: 0,
            num_tokens,
            width: 1,
            height: 1,
            data: Vec::new(),
            source: ImageSource {
                data: ImageData::Url(String::new()),
                detail: Detail::High,
                path: String::new(),
            },
        };
        let mut images = [image(3), image(0), image(2)];
        let ids = widen(vec![1, 9, 2, 9, 9, 3], Some(9), &mut images);
        assert_eq!(ids, [1, 9, 9, 9, 2, 9, 9, 9, 3]);
        assert_eq!(images.map(|image| image.start), [1, 5, 6]);
    }
}
