//! Python binding: converts, releases the GIL, maps errors. No algorithm lives here.

mod request;
mod streams;
mod tokenizer;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::types::{Error, ModelVersion, Protocol, SpecialTokens, Stage};

pyo3::create_exception!(
    _codec,
    CodecError,
    pyo3::exceptions::PyException,
    "A refusal: (kind, stage, status, message, body as JSON)."
);

/// `kind` is `request`, `context_length` or `image`.
fn refused(kind: &'static str, error: &Error) -> PyErr {
    let stage = match error.stage {
        Stage::Deserialize => "deserialize",
        Stage::Convert => "convert",
        Stage::Render => "render",
        Stage::Encode => "encode",
        Stage::Stream => "stream",
    };
    let body = error.body().to_string();
    CodecError::new_err((kind, stage, error.status, error.message.clone(), body))
}

fn protocol(name: &str) -> PyResult<Protocol> {
    match name {
        "chat" => Ok(Protocol::Chat),
        "responses" => Ok(Protocol::Responses),
        "messages" => Ok(Protocol::Messages),
        _ => Err(PyValueError::new_err(format!("unknown protocol {name:?}"))),
    }
}

fn model_version(name: &str) -> PyResult<ModelVersion> {
    match name {
        "v4" => Ok(ModelVersion::V4),
        "v4.1" => Ok(ModelVersion::V41),
        _ => Err(PyValueError::new_err(format!("unknown model version {name:?}"))),
    }
}

/// Spellings in the order of recipe.md, section 1.2; `None` for the defaults.
fn special_tokens(spellings: Option<Vec<String>>) -> PyResult<SpecialTokens> {
    match spellings {
        None => Ok(SpecialTokens::default()),
        Some(list) => list.try_into().map(SpecialTokens).map_err(|list: Vec<String>| {
            PyValueError::new_err(format!("18 spellings are needed, got {}", list.len()))
        }),
    }
}

/// Ids travel as little-endian u32: one copy for any number of them.
fn ids_to_bytes<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyBytes>> {
    id_lists_to_bytes(py, &[ids])
}

/// `ids_to_bytes` of lists one after another.
fn id_lists_to_bytes<'py>(
    py: Python<'py>,
    lists: &[impl AsRef<[u32]>],
) -> PyResult<Bound<'py, PyBytes>> {
    let num_ids: usize = lists.iter().map(|list| list.as_ref().len()).sum();
    PyBytes::new_with(py, num_ids * 4, |mut target| {
        for list in lists {
            let (own, rest) = target.split_at_mut(list.as_ref().len() * 4);
            for (bytes, id) in own.chunks_exact_mut(4).zip(list.as_ref()) {
                bytes.copy_from_slice(&id.to_le_bytes());
            }
            target = rest;
        }
        Ok(())
    })
}

fn ids_from_bytes(bytes: &[u8]) -> PyResult<Vec<u32>> {
    let (ids, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        let text = format!("ids are 4 bytes each, got {} bytes", bytes.len());
        return Err(PyValueError::new_err(text));
    }
    Ok(ids.iter().map(|id| u32::from_le_bytes(*id)).collect())
}

#[pymodule]
fn _codec(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CodecError", module.py().get_type::<CodecError>())?;
    module.add("DEFAULT_SPELLINGS", SpecialTokens::default().0.to_vec())?;
    module.add_class::<tokenizer::Tokenizer>()?;
    module.add_class::<tokenizer::Counter>()?;
    module.add_class::<request::Options>()?;
    module.add_class::<request::Converted>()?;
    module.add_class::<request::Encoded>()?;
    module.add_class::<streams::Streams>()?;
    module.add_class::<streams::Parser>()?;
    module.add_function(wrap_pyfunction!(request::convert, module)?)?;
    module.add_function(wrap_pyfunction!(request::encode, module)?)?;
    module.add_function(wrap_pyfunction!(request::resolve_max_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(request::image_num_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(request::image_target_size, module)?)?;
    module.add_function(wrap_pyfunction!(request::image_dimensions, module)?)?;
    Ok(())
}
