//! Python binding: checks lengths and hands on. No arithmetic lives here.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::hyper::{self, Closing, MOST_STREAMS, Site};
use crate::norm;

/// Work below this many numbers is done sooner than the interpreter's lock is given back.
const SMALL: usize = 16_384;

fn readable<'a>(buffer: &'a PyBuffer<f32>, what: &str, length: usize) -> PyResult<&'a [f32]> {
    if !buffer.is_c_contiguous() || buffer.item_count() != length {
        let got = buffer.item_count();
        return Err(PyValueError::new_err(format!(
            "{what}: {length} contiguous floats, not {got}"
        )));
    }
    // SAFETY: contiguous, of this type, and kept alive by the PyBuffer; nobody writes it meanwhile,
    // which is the caller's side of the bargain.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), length) })
}

#[allow(clippy::mut_from_ref)]
fn writable<'a>(buffer: &'a PyBuffer<f32>, what: &str, length: usize) -> PyResult<&'a mut [f32]> {
    if buffer.readonly() {
        return Err(PyValueError::new_err(format!("{what}: a writable buffer is needed")));
    }
    let read = readable(buffer, what, length)?;
    // SAFETY: as above, and writable; the caller has just made it for this call alone.
    Ok(unsafe { std::slice::from_raw_parts_mut(read.as_ptr().cast_mut(), length) })
}

fn streams_of(streams: usize) -> PyResult<usize> {
    if (1..=MOST_STREAMS).contains(&streams) {
        return Ok(streams);
    }
    Err(PyValueError::new_err(format!("streams: 1 to {MOST_STREAMS}, not {streams}")))
}

fn run(py: Python<'_>, size: usize, work: impl FnOnce() + Send) {
    if size < SMALL { work() } else { py.detach(work) }
}

/// Norms rows of `width` floats into `out`; without a weight it stands for ones.
#[pyfunction]
fn rms_norm(
    py: Python<'_>,
    rows: PyBuffer<f32>,
    width: usize,
    weight: Option<PyBuffer<f32>>,
    eps: f32,
    out: PyBuffer<f32>,
) -> PyResult<()> {
    let length = rows.item_count();
    if width == 0 || !length.is_multiple_of(width) {
        return Err(PyValueError::new_err(format!("rows: whole rows of {width} floats")));
    }
    let (given, out) = (readable(&rows, "rows", length)?, writable(&out, "out", length)?);
    let weight = match &weight {
        Some(weight) => readable(weight, "weight", width)?,
        None => &[],
    };
    run(py, length, || norm::rms_norm(given, width, weight, eps, out));
    Ok(())
}

/// Coefficients of rows: pre and post [n, M], comb [n, M, M].
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn hc_mixes(
    py: Python<'_>,
    h: PyBuffer<f32>,
    z: PyBuffer<f32>,
    base: PyBuffer<f32>,
    scale: PyBuffer<f32>,
    streams: usize,
    iterations: usize,
    hc_eps: f32,
    norm_eps: f32,
    pre: PyBuffer<f32>,
    post: PyBuffer<f32>,
    comb: PyBuffer<f32>,
) -> PyResult<()> {
    let m = streams_of(streams)?;
    let each = m * (m + 2);
    let (rows, size) = (z.item_count() / each, h.item_count());
    if !size.is_multiple_of((rows * m).max(1)) {
        return Err(PyValueError::new_err(format!("h: {rows} rows of {m} streams")));
    }
    let by = readable(&scale, "scale", 3)?;
    let site = Site {
        streams: m,
        base: readable(&base, "base", each)?,
        scale: [by[0], by[1], by[2]],
        iterations,
        hc_eps,
        norm_eps,
    };
    let (h, z) = (readable(&h, "h", size)?, readable(&z, "z", rows * each)?);
    let pre = writable(&pre, "pre", rows * m)?;
    let post = writable(&post, "post", rows * m)?;
    let comb = writable(&comb, "comb", rows * m * m)?;
    run(py, size, || hyper::mixes(h, z, &site, pre, post, comb));
    Ok(())
}

/// Closes a site and opens the next: the new streams [n, M, D] and the normed input [n, D].
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn hc_close(
    py: Python<'_>,
    y: PyBuffer<f32>,
    h: PyBuffer<f32>,
    post: PyBuffer<f32>,
    comb: PyBuffer<f32>,
    pre: PyBuffer<f32>,
    weight: PyBuffer<f32>,
    streams: usize,
    eps: f32,
    out: PyBuffer<f32>,
    x: PyBuffer<f32>,
) -> PyResult<()> {
    let (m, width, size) = (streams_of(streams)?, weight.item_count(), y.item_count());
    if width == 0 || !size.is_multiple_of(width) {
        return Err(PyValueError::new_err(format!("y: whole rows of {width} floats")));
    }
    let rows = size / width;
    let closing = Closing {
        streams: m,
        post: readable(&post, "post", rows * m)?,
        comb: readable(&comb, "comb", rows * m * m)?,
        pre: readable(&pre, "pre", rows * m)?,
        weight: readable(&weight, "weight", width)?,
        eps,
    };
    let (y, h) = (readable(&y, "y", size)?, readable(&h, "h", m * size)?);
    let (out, x) = (writable(&out, "out", m * size)?, writable(&x, "x", size)?);
    run(py, m * size, || hyper::close(y, h, &closing, out, x));
    Ok(())
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("MOST_STREAMS", MOST_STREAMS)?;
    module.add_function(wrap_pyfunction!(rms_norm, module)?)?;
    module.add_function(wrap_pyfunction!(hc_mixes, module)?)?;
    module.add_function(wrap_pyfunction!(hc_close, module)?)?;
    Ok(())
}
