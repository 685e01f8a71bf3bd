//! Conversion, rendering, encoding and sizes for Python.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;

use super::tokenizer::Tokenizer;
use super::{ids_to_bytes, model_version, protocol, refused, special_tokens};
use crate::convert as conversion;
use crate::convert::view;
use crate::images::Limits;
use crate::render::{self, Rendered};
use crate::request::{self as whole, Refusal, StreamState};
use crate::types::{Detail, Effort, Error, ImageData, Request};
use crate::{images, max_tokens};

/// Options of the service.
#[pyclass(frozen, module = "services.recipe._codec")]
pub struct Options(Arc<conversion::Options>);

#[pymethods]
impl Options {
    /// `json` as conformance vectors carry it; `models` replaces the table of models.
    #[new]
    #[pyo3(signature = (json="{}", models=None, spellings=None))]
    fn new(
        json: &str,
        models: Option<Vec<(String, String)>>,
        spellings: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let value: Value =
            serde_json::from_str(json).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let mut options = conversion::Options::from_json(&value).map_err(PyValueError::new_err)?;
        if let Some(models) = models {
            let read = |(name, version): (String, String)| Ok((name, model_version(&version)?));
            options.models = models.into_iter().map(read).collect::<PyResult<_>>()?;
        }
        options.special_tokens = special_tokens(spellings)?;
        Ok(Options(Arc::new(options)))
    }
}

/// A request after conversion and rendering.
#[pyclass(frozen, module = "services.recipe._codec")]
pub struct Converted {
    request: Request,
    rendered: Rendered,
}

#[pymethods]
impl Converted {
    /// Everything, in the layout of the conformance vectors, as JSON.
    fn view(&self) -> String {
        view::rendered_request(&self.request, &self.rendered).to_string()
    }

    fn parse_state(&self) -> String {
        StreamState::of(&self.request).to_json()
    }

    #[getter]
    fn prompt(&self) -> &str {
        &self.rendered.prompt.text
    }

    /// In UTF-8 byte offsets.
    #[getter]
    fn special_ranges(&self) -> Vec<(usize, usize)> {
        self.rendered.prompt.specials.clone()
    }

    /// In code points, as Python indexes strings.
    #[getter]
    fn special_ranges_in_code_points(&self) -> Vec<(usize, usize)> {
        view::code_point_ranges(&self.rendered.prompt)
    }

    fn token_ids<'py>(
        &self,
        py: Python<'py>,
        tokenizer: &Tokenizer,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let ids = py.detach(|| tokenizer.0.encode_prompt(&self.rendered.prompt));
        ids_to_bytes(py, &ids.map_err(|error| refused("request", &error))?)
    }
}

#[pyfunction]
pub fn convert(
    py: Python<'_>,
    protocol_name: &str,
    body: &[u8],
    options: &Options,
) -> PyResult<Converted> {
    let protocol = protocol(protocol_name)?;
    py.detach(|| {
        let options = &options.0;
        let request = conversion::convert(protocol, body, options)?;
        let version = request.model_version;
        let rendered = render::render(&request.conversation, version, &options.special_tokens);
        Ok(Converted { request, rendered })
    })
    .map_err(|error: Error| refused("request", &error))
}

/// A request after all steps; see `request::Encoded`.
#[pyclass(frozen, module = "services.recipe._codec")]
pub struct Encoded(whole::Encoded);

/// Start, number of tokens, width, height, URL, data, detail, path.
type ImageTuple<'py> = (u32, u32, u32, u32, String, Bound<'py, PyBytes>, &'static str, String);

#[pymethods]
impl Encoded {
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        ids_to_bytes(py, &self.0.ids)
    }

    #[getter]
    fn num_token_ids(&self) -> usize {
        self.0.ids.len()
    }

    #[getter]
    fn num_image_tokens(&self) -> u32 {
        self.0.images.iter().map(|image| image.num_tokens.max(1)).sum()
    }

    fn images<'py>(&self, py: Python<'py>) -> Vec<ImageTuple<'py>> {
        let tuple = |image: &whole::PromptImage| {
            let url = match &image.source.data {
                ImageData::Url(url) => url.clone(),
                ImageData::DataUrl(_) | ImageData::Bytes(_) => String::new(),
            };
            (
                image.start,
                image.num_tokens,
                image.width,
                image.height,
                url,
                PyBytes::new(py, &image.data),
                whole::detail_name(image.source.detail),
                image.source.path.clone(),
            )
        };
        self.0.images.iter().map(tuple).collect()
    }

    #[getter]
    fn model(&self) -> &str {
        &self.0.request.model
    }

    #[getter]
    fn model_version(&self) -> &'static str {
        view::version_name(self.0.request.model_version)
    }

    #[getter]
    fn stream(&self) -> bool {
        view::is_stream(&self.0.request.response)
    }

    #[getter]
    fn thinking(&self) -> bool {
        self.0.request.conversation.thinking_mode
    }

    #[getter]
    fn has_tools(&self) -> bool {
        !self.0.request.conversation.tools.is_empty()
    }

    #[getter]
    fn max_tokens(&self) -> u32 {
        self.0.max_tokens
    }

    #[getter]
    fn temperature(&self) -> f32 {
        self.0.request.inference.temperature
    }

    #[getter]
    fn top_p(&self) -> f32 {
        self.0.request.inference.top_p
    }

    #[getter]
    fn seed(&self) -> Option<u64> {
        self.0.request.inference.seed
    }

    #[getter]
    fn logprobs(&self) -> bool {
        self.0.request.inference.logprobs
    }

    #[getter]
    fn top_logprobs(&self) -> u8 {
        self.0.request.inference.top_logprobs.unwrap_or(0)
    }

    /// Kind and schema of the output constraint.
    #[getter]
    fn constraint(&self) -> Option<(&'static str, &str)> {
        let constraint = self.0.request.inference.output_constraint.as_ref()?;
        Some((constraint.kind, &constraint.schema))
    }

    #[getter]
    fn starts_in_reasoning(&self) -> bool {
        self.0.starts_in_reasoning
    }

    #[getter]
    fn prompt(&self) -> &str {
        &self.0.prompt.text
    }

    fn parse_state(&self) -> String {
        StreamState::of(&self.0.request).to_json()
    }
}

/// `by_model` names the tokenizer of a model where it is another one.
#[pyfunction]
#[pyo3(signature = (protocol_name, body, options, tokenizer, context_limit, by_model=None))]
pub fn encode(
    py: Python<'_>,
    protocol_name: &str,
    body: &[u8],
    options: &Options,
    tokenizer: &Tokenizer,
    context_limit: u32,
    by_model: Option<HashMap<String, Py<Tokenizer>>>,
) -> PyResult<Encoded> {
    let protocol = protocol(protocol_name)?;
    let by_model = by_model.unwrap_or_default();
    let tokenizer_of = |model: &str| by_model.get(model).map_or(tokenizer, |found| found.get());
    let encoded = py.detach(|| {
        let tokenizer_of = |model: &str| &*tokenizer_of(model).0;
        whole::encode(protocol, body, &options.0, tokenizer_of, context_limit)
    });
    encoded.map(Encoded).map_err(|refusal| {
        let kind = match &refusal {
            Refusal::Request(_) => "request",
            Refusal::ContextLength(_) => "context_length",
            Refusal::Image(_) => "image",
        };
        refused(kind, refusal.error())
    })
}

#[pyfunction]
#[pyo3(signature = (thinking, effort, requested, prompt_tokens, context_limit))]
pub fn resolve_max_tokens(
    thinking: bool,
    effort: Option<&str>,
    requested: Option<u32>,
    prompt_tokens: u32,
    context_limit: u32,
) -> PyResult<u32> {
    let effort = match effort {
        None => None,
        Some("low") => Some(Effort::Low),
        Some("high") => Some(Effort::High),
        Some("xhigh") => Some(Effort::Xhigh),
        Some("max") => Some(Effort::Max),
        Some(other) => return Err(PyValueError::new_err(format!("unknown effort {other:?}"))),
    };
    max_tokens::resolve_parts(thinking, effort, requested, prompt_tokens, context_limit)
        .map_err(|error| refused("context_length", &error))
}

#[pyfunction]
pub fn image_num_tokens(width: u32, height: u32) -> PyResult<u32> {
    images::num_tokens(width, height, Limits::default()).map_err(|error| refused("image", &error))
}

#[pyfunction]
pub fn image_target_size(width: u32, height: u32, detail: &str) -> PyResult<(u32, u32)> {
    let detail = match detail {
        "low" => Detail::Low,
        "high" => Detail::High,
        "original" => Detail::Original,
        "auto" => Detail::Auto,
        _ => return Err(PyValueError::new_err(format!("unknown detail {detail:?}"))),
    };
    images::target_size(width, height, detail, Limits::default())
        .map_err(|error| refused("image", &error))
}

#[pyfunction]
pub fn image_dimensions(data: &[u8]) -> Option<(u32, u32)> {
    images::dimensions(data)
}
