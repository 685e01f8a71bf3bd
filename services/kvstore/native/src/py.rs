//! Python binding: converts, releases the GIL, maps errors. No algorithm lives here.

use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::RwLock;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::ec::{Code, EcError, Path};
use crate::object::{self, OBJECT_HEADER_BYTES};
use crate::segment;
use crate::shard::{SHARD_HEADER_BYTES, ShardId};
use crate::slots::StoreError;
use crate::table::{self, Key16, Record, Table};
use crate::{chain, crc, stripe};

/// Readable bytes of any contiguous buffer. The caller must not change them during the call.
fn readable(buffer: &PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("a contiguous buffer is needed"));
    }
    // SAFETY: contiguous, and kept alive by the PyBuffer.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) })
}

/// Bytes that somebody else owns. A `bytes` object needs no buffer to be asked for.
#[derive(FromPyObject)]
enum Piece<'py> {
    Bytes(Bound<'py, PyBytes>),
    Buffer(PyBuffer<u8>),
}

impl Piece<'_> {
    fn bytes(&self) -> PyResult<&[u8]> {
        match self {
            Piece::Bytes(bytes) => Ok(bytes.as_bytes()),
            Piece::Buffer(buffer) => readable(buffer),
        }
    }
}

#[allow(clippy::mut_from_ref)]
fn writable(buffer: &PyBuffer<u8>) -> PyResult<&mut [u8]> {
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("a writable, contiguous buffer is needed"));
    }
    // SAFETY: contiguous and writable, and kept alive by the PyBuffer; nobody else touches it
    // during the call, which is the caller's side of the bargain.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast(), buffer.len_bytes()) })
}

fn array<const N: usize>(bytes: &[u8], what: &str) -> PyResult<[u8; N]> {
    bytes.try_into().map_err(|_| PyValueError::new_err(format!("{what}: {N} bytes")))
}

fn whole(len: usize, size: usize, what: &str) -> PyResult<()> {
    if size > 0 && len.is_multiple_of(size) {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{what}: whole items of {size} bytes")))
}

/// Keys of the complete blocks, concatenated (32 bytes each).
#[pyfunction]
#[pyo3(signature = (parent, tokens, block_tokens, extras=Vec::new()))]
fn hash_chain<'py>(
    py: Python<'py>,
    parent: &[u8],
    tokens: PyBuffer<u8>,
    block_tokens: usize,
    extras: Vec<(usize, Vec<u8>)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let parent: chain::Key = array(parent, "parent")?;
    let tokens = readable(&tokens)?;
    if block_tokens == 0 || !tokens.len().is_multiple_of(4) {
        return Err(PyValueError::new_err("tokens: whole u32 values, block_tokens: at least 1"));
    }
    PyBytes::new_with(py, 32 * chain::num_blocks(tokens, block_tokens), |keys| {
        py.detach(|| {
            let (keys, _) = keys.as_chunks_mut();
            chain::chain_into(&parent, tokens, block_tokens, &extras, keys);
        });
        Ok(())
    })
}

/// CRC-32C of what `seed` was computed over, followed by `data`.
#[pyfunction]
#[pyo3(signature = (data, seed=0))]
fn crc32c(py: Python<'_>, data: PyBuffer<u8>, seed: u32) -> PyResult<u32> {
    let data = readable(&data)?;
    Ok(if data.len() < 4096 {
        crc::extend(seed, data)
    } else {
        py.detach(|| crc::extend(seed, data))
    })
}

/// xxh3-128, canonical form, 16 bytes.
#[pyfunction]
#[pyo3(signature = (data, seed=0))]
fn xxh3_128<'py>(py: Python<'py>, data: PyBuffer<u8>, seed: u64) -> PyResult<Bound<'py, PyBytes>> {
    let data = readable(&data)?;
    let digest = py.detach(|| object::seeded_digest(data, seed));
    Ok(PyBytes::new(py, &digest))
}

/// 0 when the object may be used, else the number of the check that failed.
#[pyfunction]
fn verify_object(
    py: Python<'_>,
    header: PyBuffer<u8>,
    payload: PyBuffer<u8>,
    key: &[u8],
    layout: &[u8],
) -> PyResult<u8> {
    let (header, payload) = (readable(&header)?, readable(&payload)?);
    let (key, layout) = (array(key, "key")?, array(layout, "layout")?);
    let result = py.detach(|| object::verify(header, payload, &key, &layout));
    Ok(result.err().map_or(0, |reject| reject as u8))
}

/// Ways of computing products that this machine can run, the widest last.
#[pyfunction]
fn ec_paths() -> Vec<&'static str> {
    Path::available().into_iter().map(Path::name).collect()
}

fn path_named(name: Option<&str>) -> PyResult<Path> {
    let Some(name) = name else { return Ok(Path::best()) };
    let found = Path::available().into_iter().find(|path| path.name() == name);
    found.ok_or_else(|| PyValueError::new_err(format!("no path {name} on this machine")))
}

fn ec_error(error: EcError) -> PyErr {
    PyValueError::new_err(match error {
        EcError::TooFew => "fewer shards than k",
        EcError::BadShape => "shards: equal lengths, distinct indices below k + m",
    })
}

#[pyclass(frozen)]
struct ErasureCode(Code);

#[pymethods]
impl ErasureCode {
    #[new]
    fn new(k: usize, m: usize) -> PyResult<ErasureCode> {
        if k == 0 || k + m > 255 {
            return Err(PyValueError::new_err("profile: k at least 1, k + m at most 255"));
        }
        Ok(ErasureCode(Code::new(k, m)))
    }

    /// The m parity shards, concatenated; `data` is the k data shards, concatenated.
    #[pyo3(signature = (data, path=None))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        data: PyBuffer<u8>,
        path: Option<&str>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (data, path) = (readable(&data)?, path_named(path)?);
        whole(data.len(), self.0.k, "data")?;
        let len = data.len() / self.0.k;
        if len == 0 || self.0.m == 0 {
            return Ok(PyBytes::new(py, &[]));
        }
        PyBytes::new_with(py, len * self.0.m, |parity| {
            py.detach(|| {
                let sources: Vec<&[u8]> = data.chunks_exact(len).collect();
                let mut outputs: Vec<&mut [u8]> = parity.chunks_exact_mut(len).collect();
                self.0.encode(path, &sources, &mut outputs)
            })
            .map_err(ec_error)
        })
    }

    /// All k + m shards of an object given in pieces, header and data. `template` is the header of
    /// any of them; number and checksums are filled in.
    fn cut<'py>(
        &self,
        py: Python<'py>,
        template: &[u8],
        pieces: Vec<PyBuffer<u8>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let template = array(template, "template")?;
        let pieces = pieces.iter().map(readable).collect::<PyResult<Vec<_>>>()?;
        let len = SHARD_HEADER_BYTES + stripe::data_len(&template);
        let (objects, mut shards): (Vec<_>, Vec<_>) = (0..self.0.k + self.0.m)
            .map(|_| blank_bytes(py, len))
            .collect::<PyResult<Vec<_>>>()?
            .into_iter()
            .unzip();
        py.detach(|| stripe::cut(&self.0, Path::best(), &template, &pieces, &mut shards))
            .map_err(ec_error)?;
        Ok(objects)
    }

    /// The shards `wanted`, concatenated, from at least k shards given as (index, bytes).
    #[pyo3(signature = (present, wanted, path=None))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        present: Vec<(usize, PyBuffer<u8>)>,
        wanted: Vec<usize>,
        path: Option<&str>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let path = path_named(path)?;
        let shards = present
            .iter()
            .map(|(index, buffer)| Ok((*index, readable(buffer)?)))
            .collect::<PyResult<Vec<(usize, &[u8])>>>()?;
        if shards.len() < self.0.k {
            return Err(ec_error(EcError::TooFew));
        }
        let len = shards[0].1.len();
        if len == 0 || wanted.is_empty() {
            return Err(ec_error(EcError::BadShape));
        }
        PyBytes::new_with(py, len * wanted.len(), |out| {
            py.detach(|| {
                let mut outputs: Vec<&mut [u8]> = out.chunks_exact_mut(len).collect();
                self.0.decode(path, &shards, &wanted, &mut outputs)
            })
            .map_err(ec_error)
        })
    }
}

/// A bytes object to be filled, all of it, before anybody else sees it.
fn blank_bytes(
    py: Python<'_>,
    len: usize,
) -> PyResult<(Bound<'_, PyBytes>, &mut [MaybeUninit<u8>])> {
    let len_c = len.try_into().map_err(|_| PyValueError::new_err("too long"))?;
    // SAFETY: a new object of which we hold the only reference may be written until it is given
    // away; its buffer lives as long as it does, which the caller keeps for as long as the slice.
    unsafe {
        let object = pyo3::ffi::PyBytes_FromStringAndSize(std::ptr::null(), len_c);
        let object = Bound::from_owned_ptr_or_err(py, object)?.cast_into_unchecked::<PyBytes>();
        let data = pyo3::ffi::PyBytes_AsString(object.as_ptr()).cast();
        Ok((object, std::slice::from_raw_parts_mut(data, len)))
    }
}

type RecordTuple = (u64, u32, u32, u32, u16, u8, u8, u8);

/// Index table. Safe for threads: readers share, a writer is alone.
#[pyclass(frozen)]
struct IndexTable {
    table: RwLock<Table>,
    n_pg: u16,
}

impl IndexTable {
    fn read<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Table) -> T + Send) -> T {
        py.detach(|| look(&self.table.read().unwrap_or_else(|poisoned| poisoned.into_inner())))
    }

    fn write<T: Send>(&self, py: Python<'_>, edit: impl FnOnce(&mut Table) -> T + Send) -> T {
        py.detach(|| edit(&mut self.table.write().unwrap_or_else(|poisoned| poisoned.into_inner())))
    }
}

#[pymethods]
impl IndexTable {
    #[new]
    #[pyo3(signature = (n_pg=1024))]
    fn new(n_pg: u16) -> IndexTable {
        IndexTable { table: RwLock::new(Table::new()), n_pg: n_pg.max(1) }
    }

    fn __len__(&self) -> usize {
        self.table.read().map_or(0, |table| table.len())
    }

    fn memory_bytes(&self, py: Python<'_>) -> usize {
        self.read(py, Table::memory_bytes)
    }

    /// (put_id, index, created_s, access_epoch, shards, state, class, flags), or None.
    fn get(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<RecordTuple>> {
        let key: Key16 = array(key, "key")?;
        let record = self.read(py, |table| table.get(&key));
        Ok(record.map(|r| {
            (
                r.put_id,
                r.index,
                r.created_s,
                r.access_epoch,
                r.shards,
                r.state(),
                r.class(),
                r.flags,
            )
        }))
    }

    fn set(&self, py: Python<'_>, key: &[u8], record: RecordTuple) -> PyResult<()> {
        let key: Key16 = array(key, "key")?;
        let (put_id, index, created_s, epoch, shards, state, class, flags) = record;
        if !(1..=4).contains(&state) || class > 15 {
            return Err(PyValueError::new_err("state: 1 to 4, class: at most 15"));
        }
        let record = Record::new(put_id, index, created_s, epoch, shards, state, class, flags);
        self.write(py, |table| table.set(&key, record));
        Ok(())
    }

    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let key: Key16 = array(key, "key")?;
        Ok(self.write(py, |table| table.remove(&key)).is_some())
    }

    /// (stored and alive leading keys, why the next is not: 0 all, 1 absent, 2 evicted).
    fn match_prefix(
        &self,
        py: Python<'_>,
        keys: PyBuffer<u8>,
        stride: usize,
        now_s: u64,
        ttl_s: Vec<u64>,
    ) -> PyResult<(usize, u8)> {
        let keys = readable(&keys)?;
        whole(keys.len(), stride.max(16), "keys")?;
        let (count, stop) = self.read(py, |table| table.match_prefix(keys, stride, now_s, &ttl_s));
        Ok((count, stop as u8))
    }

    /// Log entries of the records that the touch changed, numbered from `first_seq`.
    fn touch<'py>(
        &self,
        py: Python<'py>,
        keys: PyBuffer<u8>,
        stride: usize,
        epoch: u32,
        class: u8,
        first_seq: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = readable(&keys)?;
        whole(keys.len(), stride.max(16), "keys")?;
        if class > 15 {
            return Err(PyValueError::new_err("class: at most 15"));
        }
        let n_pg = self.n_pg;
        let log = self.write(py, |table| table.touch(keys, stride, epoch, class, n_pg, first_seq));
        Ok(PyBytes::new(py, &log))
    }

    /// (key, is expired), the first to evict first.
    #[pyo3(signature = (now_s, ttl_s, limit, only_expired=false))]
    fn eviction_order<'py>(
        &self,
        py: Python<'py>,
        now_s: u64,
        ttl_s: Vec<u64>,
        limit: usize,
        only_expired: bool,
    ) -> Vec<(Bound<'py, PyBytes>, bool)> {
        let order = self.read(py, |table| table.eviction_order(now_s, &ttl_s, limit, only_expired));
        order.into_iter().map(|(key, expired)| (PyBytes::new(py, &key), expired)).collect()
    }

    /// Keys in `state` whose access epoch is before `epoch`.
    fn stale<'py>(&self, py: Python<'py>, state: u8, epoch: u32) -> Vec<Bound<'py, PyBytes>> {
        let keys = self.read(py, |table| table.stale(state, epoch));
        keys.iter().map(|key| PyBytes::new(py, key)).collect()
    }

    /// (bytes consumed, number of the last entry applied or 0).
    fn apply_log(&self, py: Python<'_>, log: PyBuffer<u8>) -> PyResult<(usize, u64)> {
        let log = readable(&log)?;
        Ok(self.write(py, |table| table.apply_log(log)))
    }

    /// (entries of our own log, numbered from `first_seq`, keys that the other log removes).
    fn merge<'py>(
        &self,
        py: Python<'py>,
        log: PyBuffer<u8>,
        first_seq: u64,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<Bound<'py, PyBytes>>)> {
        let log = readable(&log)?;
        let n_pg = self.n_pg;
        let (entries, removed) = self.write(py, |table| table.merge(log, n_pg, first_seq));
        let removed = removed.iter().map(|key| PyBytes::new(py, key)).collect();
        Ok((PyBytes::new(py, &entries), removed))
    }

    /// (log entries, next cursor or None).
    fn snapshot<'py>(
        &self,
        py: Python<'py>,
        cursor: u64,
        limit: usize,
        seq: u64,
    ) -> (Bound<'py, PyBytes>, Option<u64>) {
        let n_pg = self.n_pg;
        let (log, next) = self.read(py, |table| table.snapshot(cursor, limit, seq, n_pg));
        (PyBytes::new(py, &log), next)
    }

    /// (state, class, records) of each pair that occurs.
    fn census(&self, py: Python<'_>) -> Vec<(u8, u8, usize)> {
        self.read(py, Table::census)
    }
}

/// One log entry of 80 bytes.
#[pyfunction]
#[pyo3(signature = (seq, op, key, record, parent, n_pg))]
fn encode_log_entry<'py>(
    py: Python<'py>,
    seq: u64,
    op: u8,
    key: &[u8],
    record: RecordTuple,
    parent: &[u8],
    n_pg: u16,
) -> PyResult<Bound<'py, PyBytes>> {
    let (put_id, index, created_s, epoch, shards, state, class, flags) = record;
    if state > 15 || class > 15 {
        return Err(PyValueError::new_err("state, class: at most 15"));
    }
    let record = Record::new(put_id, index, created_s, epoch, shards, state, class, flags);
    let entry =
        table::encode_entry(seq, op, &array(key, "key")?, &record, &array(parent, "parent")?, n_pg);
    Ok(PyBytes::new(py, &entry))
}

fn store_error(error: StoreError) -> PyErr {
    match error {
        StoreError::Full => PyOSError::new_err((libc::ENOSPC, "no free slot")),
        StoreError::BadShard(what) => PyValueError::new_err(what),
        StoreError::Io(error) => {
            PyOSError::new_err((error.raw_os_error().unwrap_or(0), error.to_string()))
        }
    }
}

type IdTuple = (Vec<u8>, u8, u64);

fn shard_id(key: &[u8], shard: u8, put_id: u64) -> PyResult<ShardId> {
    Ok(ShardId { key: array(key, "key")?, shard, put_id })
}

#[pyclass(frozen)]
struct SegmentStore(segment::Store);

#[pymethods]
impl SegmentStore {
    #[new]
    fn new(
        py: Python<'_>,
        dir: PathBuf,
        slot_bytes: u64,
        segment_bytes: u64,
        max_segments: u32,
    ) -> PyResult<SegmentStore> {
        let store =
            py.detach(|| segment::Store::open(&dir, slot_bytes, segment_bytes, max_segments));
        store.map(SegmentStore).map_err(store_error)
    }

    /// (shards found, torn ones freed, whether the log was rebuilt from headers).
    fn recovery(&self) -> (u64, u64, bool) {
        let found = self.0.recovery;
        (found.num_shards, found.num_torn, found.was_rebuilt)
    }

    /// Number of the log record: durable once `sync` has returned a larger one.
    fn put(&self, py: Python<'_>, pieces: Vec<Piece<'_>>) -> PyResult<u64> {
        let pieces = pieces.iter().map(Piece::bytes).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.0.put(&pieces)).map_err(store_error)
    }

    /// A whole shard, or the number of the reason why not.
    fn get_shard<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        shard: u8,
        put_id: u64,
    ) -> PyResult<(Option<Bound<'py, PyBytes>>, u8)> {
        let id = shard_id(key, shard, put_id)?;
        Ok(match py.detach(|| self.0.get_shard(&id)) {
            Ok(bytes) => (Some(PyBytes::new(py, &bytes)), 0),
            Err(miss) => (None, miss as u8),
        })
    }

    /// Reads an object stored whole: its payload goes into `out`, its checked header comes back.
    /// The number is 0, or says why the bytes in `out` must not be used.
    #[allow(clippy::too_many_arguments)]
    fn get_object<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        shard: u8,
        put_id: u64,
        layout: &[u8],
        out: PyBuffer<u8>,
    ) -> PyResult<(Option<Bound<'py, PyBytes>>, u8)> {
        let full: [u8; 32] = array(key, "key")?;
        let layout: [u8; 32] = array(layout, "layout")?;
        let id = shard_id(&full[..16], shard, put_id)?;
        let payload = writable(&out)?;
        let mut header = [0; OBJECT_HEADER_BYTES];
        let failed = py.detach(|| match self.0.get(&id, &mut header, payload, false) {
            Err(miss) => miss as u8,
            Ok(()) => object::verify(&header, payload, &full, &layout)
                .err()
                .map_or(0, |reject| reject as u8),
        });
        Ok(if failed == 0 { (Some(PyBytes::new(py, &header)), 0) } else { (None, failed) })
    }

    /// Length of a shard's data, or None.
    fn len_of(&self, key: &[u8], shard: u8, put_id: u64) -> PyResult<Option<u32>> {
        Ok(self.0.len_of(&shard_id(key, shard, put_id)?))
    }

    /// How many of the shards (key, shard, put_id) were there and are freed; overwritten on demand.
    #[pyo3(signature = (ids, erase = false))]
    fn delete(&self, py: Python<'_>, ids: Vec<IdTuple>, erase: bool) -> PyResult<usize> {
        let ids = ids
            .iter()
            .map(|(key, shard, put_id)| shard_id(key, *shard, *put_id))
            .collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.0.delete(&ids, erase)).map_err(store_error)
    }

    /// Group commit; the number below which every record is on the disk.
    fn sync(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.0.sync()).map_err(store_error)
    }

    /// How many shards were taken up from slots that the log did not name.
    fn rescan(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.0.rescan()).map_err(store_error)
    }

    /// (headers of shards, concatenated, next slot or None).
    fn headers<'py>(
        &self,
        py: Python<'py>,
        from_slot: u32,
        limit: usize,
    ) -> (Bound<'py, PyBytes>, Option<u32>) {
        let (headers, next) = py.detach(|| self.0.headers(from_slot, limit));
        (PyBytes::new(py, &headers), next)
    }

    /// ([(key, shard, put_id, reason)] that were bad and are freed, shards read, next slot or None).
    #[allow(clippy::type_complexity)]
    fn scrub(
        &self,
        py: Python<'_>,
        from_slot: u32,
        num_slots: u32,
    ) -> PyResult<(Vec<(Py<PyBytes>, u8, u64, u8)>, u64, Option<u32>)> {
        let (bad, checked, next) =
            py.detach(|| self.0.scrub(from_slot, num_slots)).map_err(store_error)?;
        let bad = bad
            .into_iter()
            .map(|(id, miss)| (PyBytes::new(py, &id.key).unbind(), id.shard, id.put_id, miss as u8))
            .collect();
        Ok((bad, checked, next))
    }

    /// Lets another process open the directory; nothing may be written after it.
    fn unlock(&self) {
        self.0.unlock();
    }

    /// (slots at most, slots used, slot bytes, bytes on disk, bytes not yet durable).
    fn stat(&self) -> (u64, u64, u64, u64, u64) {
        let stat = self.0.stat();
        (stat.num_slots, stat.num_used, stat.slot_bytes, stat.disk_bytes, stat.unsynced_bytes)
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(hash_chain, module)?)?;
    module.add_function(wrap_pyfunction!(crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(xxh3_128, module)?)?;
    module.add_function(wrap_pyfunction!(verify_object, module)?)?;
    module.add_function(wrap_pyfunction!(ec_paths, module)?)?;
    module.add_function(wrap_pyfunction!(encode_log_entry, module)?)?;
    module.add_class::<ErasureCode>()?;
    module.add_class::<IndexTable>()?;
    module.add_class::<SegmentStore>()?;
    Ok(())
}
