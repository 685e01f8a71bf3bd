//! The tokenizer for Python.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{id_lists_to_bytes, ids_from_bytes, ids_to_bytes, refused};
use crate::encode::{self, IncrementalCounter, Limits};
use crate::types::Prompt;

#[pyclass(frozen, module = "services.recipe._codec")]
pub struct Tokenizer(pub Arc<encode::Tokenizer>);

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (path, num_threads=0, cache_bytes=64 << 20))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        num_threads: usize,
        cache_bytes: usize,
    ) -> PyResult<Self> {
        let limits = Limits { num_threads, cache_bytes };
        let loaded = py.detach(|| encode::Tokenizer::with_limits(&path, limits));
        loaded
            .map(|tokenizer| Tokenizer(Arc::new(tokenizer)))
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    #[getter]
    fn num_ids(&self) -> u32 {
        self.0.num_ids()
    }

    #[getter]
    fn num_cached_bytes(&self) -> usize {
        self.0.num_cached_bytes()
    }

    fn encode_plain<'py>(&self, py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
        let parts = py.detach(|| self.0.encode_plain_parts(text));
        id_lists_to_bytes(py, &parts)
    }

    fn encode_full<'py>(&self, py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
        let ids = py.detach(|| self.0.encode_full(text));
        ids_to_bytes(py, &ids)
    }

    fn count_full(&self, py: Python<'_>, text: &str) -> u64 {
        py.detach(|| self.0.count_full(text))
    }

    /// `special_ranges` in UTF-8 byte offsets.
    fn encode_prompt<'py>(
        &self,
        py: Python<'py>,
        text: String,
        special_ranges: Vec<(usize, usize)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut end = 0;
        for &(from, to) in &special_ranges {
            if from < end || to < from || text.get(from..to).is_none() {
                let what = format!("bad special range ({from}, {to})");
                return Err(PyValueError::new_err(what));
            }
            end = to;
        }
        let prompt = Prompt { text, specials: special_ranges };
        let ids = py.detach(|| self.0.encode_prompt(&prompt));
        ids_to_bytes(py, &ids.map_err(|error| refused("request", &error))?)
    }

    fn decode(&self, py: Python<'_>, token_ids: &[u8]) -> PyResult<String> {
        let ids = ids_from_bytes(token_ids)?;
        Ok(py.detach(|| self.0.decode(&ids)))
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token_id: u32) -> Option<Bound<'py, PyBytes>> {
        self.0.token_bytes(token_id).map(|bytes| PyBytes::new(py, bytes))
    }

    fn token_text(&self, token_id: u32) -> String {
        self.0.token_text(token_id)
    }

    fn is_added(&self, token_id: u32) -> bool {
        self.0.is_added(token_id)
    }

    fn added_id(&self, spelling: &str) -> Option<u32> {
        self.0.added_id(spelling)
    }

    fn counter(&self) -> Counter {
        Counter(self.0.counter())
    }
}

#[pyclass(module = "services.recipe._codec")]
pub struct Counter(IncrementalCounter);

#[pymethods]
impl Counter {
    fn push(&mut self, text: &str) {
        self.0.push(text);
    }

    fn count(&self) -> u64 {
        self.0.count()
    }
}
