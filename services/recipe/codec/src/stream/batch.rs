//! Many streams advanced by one call, their events in one buffer.
//!
//! A gateway gets one token of each of its streams at every engine step. Crossing into Rust once
//! for all of them, with flat arrays both ways, is what makes a token cheap from Python.

use super::{Chunk, EventBuffer, Failure, Stream};
use crate::types::{Error, Stage};

/// The streams of one caller, by handle.
#[derive(Default)]
pub struct StreamTable {
    slots: Vec<Option<Stream>>,
    free: Vec<u32>,
}

/// What one call gave: the events of all its streams, cut by `ends`.
#[derive(Debug, Default)]
pub struct BatchOutput {
    pub events: EventBuffer,
    /// `ends[k]`: where the SSE bytes of the k-th stream of the call end in `events.sse()`; they
    /// begin where the ones before end.
    pub ends: Vec<usize>,
    /// (k, error) of the streams that the call ended with an error.
    pub errors: Vec<(usize, Error)>,
    /// Which of the call's streams are over now.
    pub over: Vec<usize>,
}

impl BatchOutput {
    pub fn clear(&mut self) {
        self.events.clear();
        self.ends.clear();
        self.errors.clear();
        self.over.clear();
    }

    /// The SSE bytes of the k-th stream of the call.
    pub fn sse(&self, k: usize) -> &[u8] {
        let start = if k == 0 { 0 } else { self.ends[k - 1] };
        &self.events.sse()[start..self.ends[k]]
    }
}

impl StreamTable {
    /// Adds a stream and returns its handle; handles of removed streams are used again.
    pub fn insert(&mut self, stream: Stream) -> u32 {
        match self.free.pop() {
            Some(handle) => {
                self.slots[handle as usize] = Some(stream);
                handle
            }
            None => {
                self.slots.push(Some(stream));
                (self.slots.len() - 1) as u32
            }
        }
    }

    pub fn remove(&mut self, handle: u32) -> Option<Stream> {
        let stream = self.slots.get_mut(handle as usize)?.take();
        if stream.is_some() {
            self.free.push(handle);
        }
        stream
    }

    pub fn get_mut(&mut self, handle: u32) -> Option<&mut Stream> {
        self.slots.get_mut(handle as usize)?.as_mut()
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives each stream its ids, without log probabilities; replaces what `out` held.
    ///
    /// `counts[k]` of `ids` belong to `handles[k]`, in order. An error of one stream is noted and
    /// the others go on. Errors of the call itself, before anything was done: the lengths do not
    /// agree.
    pub fn push_tokens(
        &mut self,
        handles: &[u32],
        counts: &[u32],
        ids: &[u32],
        now: u64,
        out: &mut BatchOutput,
    ) -> Result<(), Error> {
        let num_ids: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if handles.len() != counts.len() || num_ids != ids.len() as u64 {
            let text = format!(
                "a batch of {} streams has {} counts that sum to {num_ids}, and {} ids",
                handles.len(),
                counts.len(),
                ids.len()
            );
            return Err(Error::internal(Stage::Stream, text));
        }
        let mut rest = ids;
        let chunks = handles.iter().zip(counts).map(|(&handle, &count)| {
            let (ids, tail) = rest.split_at(count as usize);
            rest = tail;
            (handle, Chunk::Tokens { ids, logprobs: None })
        });
        self.push(chunks, now, out);
        Ok(())
    }

    /// Gives each stream its chunk, in order; replaces what `out` held.
    pub fn push<'a>(
        &mut self,
        chunks: impl IntoIterator<Item = (u32, Chunk<'a>)>,
        now: u64,
        out: &mut BatchOutput,
    ) {
        out.clear();
        for (k, (handle, chunk)) in chunks.into_iter().enumerate() {
            match self.get_mut(handle) {
                Some(stream) => {
                    if let Err(error) = stream.push(chunk, now, &mut out.events) {
                        out.errors.push((k, error));
                    }
                    if stream.is_over() {
                        out.over.push(k);
                    }
                }
                None => {
                    let text = format!("no stream has the handle {handle}");
                    out.errors.push((k, Error::internal(Stage::Stream, text)));
                }
            }
            out.ends.push(out.events.sse().len());
        }
    }

    /// Fails each of the streams, for a backend that went away with all of them.
    pub fn fail(&mut self, handles: &[u32], failure: &Failure, out: &mut BatchOutput) {
        out.clear();
        for (k, &handle) in handles.iter().enumerate() {
            if let Some(stream) = self.get_mut(handle) {
                stream.fail(failure, &mut out.events);
                out.over.push(k);
            }
            out.ends.push(out.events.sse().len());
        }
    }
}
