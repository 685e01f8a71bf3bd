//! Text to ids and back (recipe.md, sections 1 and 5).
//!
//! | file | holds |
//! | --- | --- |
//! | `file`, `vocabulary` | reads `tokenizer.json`; id to bytes, spelling to id |
//! | `classes`, `class_table` | what kind of character a code point is |
//! | `pieces`, `ascii` | the pre-tokenizer |
//! | `merges`, `pairs`, `trie`, `words`, `small`, `cjk`, `bpe` | a piece to ids |
//! | `regions` | a region cut and spread over threads |
//! | `id_cache` | ids of text seen before |
//! | `full` | encoding with the added vocabulary, and its incremental count |

mod ascii;
mod bpe;
mod cjk;
mod class_table;
mod classes;
mod file;
mod full;
mod huge;
mod id_cache;
mod merges;
mod pairs;
mod pieces;
mod regions;
mod small;
mod trie;
mod vocabulary;
mod words;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

pub use file::LoadError;
pub use full::IncrementalCounter;

use bpe::{Bpe, Scratches};
use file::TokenizerFile;
use full::{AddedMatcher, Segment};
use id_cache::IdCache;
use vocabulary::Vocabulary;

use crate::types::{Error, Prompt, Stage};

/// Regions are cached in parts of this size, so that one that grew keeps its earlier parts.
const CACHE_PART_BYTES: usize = 8 << 10;

/// A shorter part is encoded faster than looked up.
const MIN_CACHED_BYTES: usize = 128;

/// Less text than this is not worth waking another thread.
const MIN_PARALLEL_BYTES: usize = 64 << 10;

/// What a tokenizer may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Threads of one call; 0 is one per core.
    pub num_threads: usize,
    /// Text and ids kept of earlier prompts; 0 keeps none.
    pub cache_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { num_threads: 0, cache_bytes: 64 << 20 }
    }
}

/// One tokenizer file, ready to use from any number of threads.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    added: AddedMatcher,
    bpe: Bpe,
    scratches: Scratches,
    cache: IdCache,
    /// `None` on one thread.
    pool: Option<rayon::ThreadPool>,
}

impl Tokenizer {
    pub fn from_file(path: &Path) -> Result<Self, LoadError> {
        Self::with_limits(path, Limits::default())
    }

    pub fn with_limits(path: &Path, limits: Limits) -> Result<Self, LoadError> {
        let json = std::fs::read(path)
            .map_err(|e| LoadError(format!("cannot read {}: {e}", path.display())))?;
        Self::from_json(&json, limits)
    }

    pub fn from_json(json: &[u8], limits: Limits) -> Result<Self, LoadError> {
        let file = TokenizerFile::parse(json)?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(limits.num_threads)
            .thread_name(|index| format!("encode-{index}"))
            .build()
            .map_err(|error| LoadError(format!("cannot start threads: {error}")))?;
        Ok(Tokenizer {
            vocabulary: Vocabulary::new(&file)?,
            added: AddedMatcher::new(&file)?,
            bpe: Bpe::new(&file)?,
            scratches: Scratches::default(),
            cache: IdCache::new(limits.cache_bytes),
            pool: (pool.current_num_threads() > 1).then_some(pool),
        })
    }

    /// One more than the largest id.
    pub fn num_ids(&self) -> u32 {
        self.vocabulary.num_ids()
    }

    /// Ids of one plain region: base vocabulary only, added spellings are ordinary text.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let mut parts = self.encode_plain_parts(text);
        if parts.len() == 1 { parts.pop().unwrap_or_default() } else { self.join(&parts) }
    }

    /// `encode_plain` in several lists, one after another.
    pub fn encode_plain_parts(&self, text: &str) -> Vec<Vec<u32>> {
        let text = text.as_bytes();
        if text.len() < MIN_PARALLEL_BYTES || self.pool.is_none() {
            let mut ids = Vec::with_capacity(text.len() / 3 + 8);
            self.scratches.with(|scratch| self.bpe.encode_pieces(text, scratch, &mut ids));
            return vec![ids];
        }
        let parts = regions::parts(text, regions::TASK_BYTES);
        self.encode_parts(text, &parts, |_, ids| ids)
    }

    /// Ids of parts of a text between cuts, each given to `finish` with its index; in order.
    fn encode_parts<R: Send>(
        &self,
        text: &[u8],
        parts: &[Range<usize>],
        finish: impl Fn(usize, Vec<u32>) -> R + Sync,
    ) -> Vec<R> {
        let num_bytes: usize = parts.iter().map(Range::len).sum();
        match &self.pool {
            Some(pool) if num_bytes >= MIN_PARALLEL_BYTES => pool.install(|| {
                let encode = |(index, part): (usize, &Range<usize>)| {
                    let part = &text[part.clone()];
                    finish(index, regions::encode_part(&self.bpe, part, &self.scratches))
                };
                parts.par_iter().enumerate().map(encode).collect()
            }),
            _ => self.scratches.with(|scratch| {
                let encode = |(index, part): (usize, &Range<usize>)| {
                    let part = &text[part.clone()];
                    let mut ids = Vec::with_capacity(part.len() / 3 + 8);
                    self.bpe.encode_pieces(part, scratch, &mut ids);
                    finish(index, ids)
                };
                parts.iter().enumerate().map(encode).collect()
            }),
        }
    }

    /// All lists one after another: on all threads if there is much to copy, because new memory
    /// costs more than the copy.
    fn join<L: AsRef<[u32]> + Sync>(&self, lists: &[L]) -> Vec<u32> {
        let num_ids = lists.iter().map(|list| list.as_ref().len()).sum();
        let mut ids: Vec<u32> = Vec::with_capacity(num_ids);
        match &self.pool {
            Some(pool) if num_ids >= MIN_PARALLEL_BYTES => {
                let mut rest = ids.spare_capacity_mut();
                let mut copies = Vec::with_capacity(lists.len());
                for list in lists {
                    let (target, after) = rest.split_at_mut(list.as_ref().len());
                    copies.push((target, list.as_ref()));
                    rest = after;
                }
                pool.install(|| {
                    copies.into_par_iter().with_min_len(16).for_each(|(target, list)| {
                        for (target, id) in target.iter_mut().zip(list) {
                            target.write(*id);
                        }
                    });
                });
                // SAFETY: the lists filled the first `num_ids` places, each its own.
                unsafe { ids.set_len(num_ids) };
            }
            _ => lists.iter().for_each(|list| ids.extend_from_slice(list.as_ref())),
        }
        ids
    }

    /// Ids of a rendered prompt: each special range by its spelling, the rest plain.
    ///
    /// Errors: internal, when a special range spells nothing in the added vocabulary.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, Error> {
        let text = prompt.text.as_bytes();
        // Everything known at once stays a piece of the plan; the rest is encoded together.
        let mut plan = Vec::with_capacity(2 * prompt.specials.len() + 1);
        let mut missing: Vec<(Range<usize>, Option<u64>)> = Vec::new();
        let mut start = 0;
        for &(from, to) in &prompt.specials {
            self.plan_region(text, start..from, &mut plan, &mut missing);
            plan.push(Planned::Special(self.special_id(&prompt.text[from..to])?));
            start = to;
        }
        self.plan_region(text, start..text.len(), &mut plan, &mut missing);

        // What the cache keeps is copied where the ids were made, on as many threads.
        let ranges: Vec<_> = missing.iter().map(|(range, _)| range.clone()).collect();
        let encoded = self.encode_parts(text, &ranges, |index, ids| {
            let (range, hash) = &missing[index];
            let entry = hash.and_then(|hash| self.cache.entry(hash, &text[range.clone()], &ids));
            (ids, entry)
        });
        let (encoded, entries): (Vec<_>, Vec<_>) = encoded.into_iter().unzip();
        self.cache.put(entries.into_iter().flatten());
        let lists: Vec<&[u32]> = plan
            .iter()
            .map(|planned| match planned {
                Planned::Special(id) => std::slice::from_ref(id),
                Planned::Cached(ids) => ids,
                Planned::Missing(index) => &encoded[*index],
            })
            .collect();
        Ok(self.join(&lists))
    }

    fn plan_region(
        &self,
        text: &[u8],
        region: Range<usize>,
        plan: &mut Vec<Planned>,
        missing: &mut Vec<(Range<usize>, Option<u64>)>,
    ) {
        for part in regions::parts(&text[region.clone()], CACHE_PART_BYTES) {
            let part = region.start + part.start..region.start + part.end;
            let hash =
                (part.len() >= MIN_CACHED_BYTES).then(|| self.cache.hash(&text[part.clone()]));
            let cached = hash.and_then(|hash| self.cache.get(hash, &text[part.clone()]));
            plan.push(match cached {
                Some(ids) => Planned::Cached(ids),
                None => {
                    missing.push((part, hash));
                    Planned::Missing(missing.len() - 1)
                }
            });
        }
    }

    fn special_id(&self, spelling: &str) -> Result<u32, Error> {
        self.added_id(spelling).ok_or_else(|| {
            let text = format!("special token \"{spelling}\" is not in the added vocabulary");
            Error::internal(Stage::Encode, text)
        })
    }

    /// Ids with added spellings matched in the text. For diagnostics and counts, never prompts.
    pub fn encode_full(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        for segment in self.added.split(text) {
            match segment {
                Segment::Added(id) => ids.push(id),
                Segment::Plain(text) => ids.extend(self.encode_plain(text)),
            }
        }
        ids
    }

    /// The number of ids that `encode_full` gives.
    pub fn count_full(&self, text: &str) -> u64 {
        self.encode_full(text).len() as u64
    }

    fn added_matcher(&self) -> &AddedMatcher {
        &self.added
    }

    /// Bytes of text and ids that the cache of earlier prompts holds.
    pub fn num_cached_bytes(&self) -> usize {
        self.cache.num_bytes()
    }

    /// The id of an added token by its spelling.
    pub fn added_id(&self, spelling: &str) -> Option<u32> {
        self.vocabulary.added_id(spelling)
    }

    /// Whether the id is in the added vocabulary (any of it, not only the named tokens).
    pub fn is_added(&self, id: u32) -> bool {
        self.vocabulary.is_added(id)
    }

    /// The bytes an id stands for; `None` for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.bytes(id)
    }

    /// Text of ids as one whole: specials as their spelling, U+FFFD for what is no UTF-8,
    /// nothing for an unknown id.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// Text of one id for logprobs: `\xNN` for every byte when it is no UTF-8 (section 14).
    pub fn token_text(&self, id: u32) -> String {
        let bytes = self.token_bytes(id).unwrap_or_default();
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect(),
        }
    }

    /// Counts ids of a text that arrives in parts, as `encode_full` of the whole would.
    pub fn counter(self: &Arc<Self>) -> IncrementalCounter {
        IncrementalCounter::new(Arc::clone(self))
    }
}

/// One stretch of a prompt on its way to ids.
enum Planned {
    Special(u32),
    Cached(Arc<[u32]>),
    /// The index among what has to be encoded.
    Missing(usize),
}
