//! Python binding: converts, releases the GIL, maps errors. No algorithm lives here.

use pyo3::prelude::*;

#[pymodule]
fn _codec(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
