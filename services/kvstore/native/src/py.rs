//! Python binding: converts, releases the GIL, maps errors. No algorithm lives here.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::chain;

/// Keys of the complete blocks, concatenated (32 bytes each).
#[pyfunction]
#[pyo3(signature = (parent, tokens, block_tokens, extras=Vec::new()))]
fn hash_chain<'py>(
    py: Python<'py>,
    parent: &[u8],
    tokens: &[u8],
    block_tokens: usize,
    extras: Vec<(usize, Vec<u8>)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let parent: chain::Key = parent.try_into().map_err(|_| PyValueError::new_err("parent: 32 bytes"))?;
    if block_tokens == 0 || tokens.len() % 4 != 0 {
        return Err(PyValueError::new_err("tokens: whole u32 values, block_tokens: at least 1"));
    }
    let keys = py.detach(|| chain::chain(&parent, tokens, block_tokens, &extras).concat());
    Ok(PyBytes::new(py, &keys))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(hash_chain, module)?)?;
    Ok(())
}
