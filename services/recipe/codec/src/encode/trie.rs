//! Which tokens start at a place: a double-array trie over the tokens' bytes.
//!
//! A child sits at `base ^ byte` of its parent. Bases are unique, so the byte alone proves whose
//! child an entry is.

use super::huge::HugeVec;
use super::merges::{Merges, NUM_BYTES, Token};

const NO_TOKEN: u32 = (1 << 24) - 1;
const NO_BASE: u32 = 0;
/// No byte: the label of a free entry.
const FREE: u64 = 0x100;

/// base: 24 bits, label: 16 bits, token: 24 bits.
#[derive(Clone, Copy)]
struct Entry(u64);

impl Entry {
    fn new(base: u32, label: u64, token: u32) -> Self {
        Entry(u64::from(base) << 40 | label << 24 | u64::from(token))
    }

    #[inline(always)]
    fn base(self) -> usize {
        (self.0 >> 40) as usize
    }

    #[inline(always)]
    fn label(self) -> u64 {
        self.0 >> 24 & 0xFFFF
    }

    #[inline(always)]
    fn token(self) -> u32 {
        (self.0 & 0xFF_FFFF) as u32
    }
}

pub struct Trie {
    entries: HugeVec<Entry>,
    /// The longest token that is a proper prefix, `u32::MAX` for a single byte.
    prefixes: Vec<Token>,
}

impl Trie {
    /// A trie of all tokens that an encoding can hold.
    pub fn new(merges: &Merges) -> Self {
        let mut words: Vec<(Vec<u8>, Token)> = Vec::with_capacity(merges.num_tokens() as usize);
        for token in (0..merges.num_tokens()).filter(|token| merges.is_reachable(*token)) {
            let mut bytes = Vec::with_capacity(merges.len(token));
            merges.write_bytes(token, &mut bytes);
            words.push((bytes, token));
        }
        words.sort_unstable();
        let built = Builder::new().build(&words);
        let mut entries = HugeVec::new(built.len(), Entry(0));
        entries.copy_from_slice(&built);
        let mut trie = Trie { entries, prefixes: vec![u32::MAX; merges.num_tokens() as usize] };
        for (bytes, token) in &words {
            if *token >= NUM_BYTES {
                trie.prefixes[*token as usize] = trie.longest(&bytes[..bytes.len() - 1]);
            }
        }
        trie
    }

    /// The longest token at the start of `text`, which must not be empty.
    #[inline(always)]
    pub fn longest(&self, text: &[u8]) -> Token {
        // The root's base is `ROOT`; each single byte is a token.
        let mut base = ROOT;
        let mut found = u32::MAX;
        for &byte in text {
            let entry = self.entries[base ^ byte as usize];
            if entry.label() != u64::from(byte) {
                break;
            }
            if entry.token() != NO_TOKEN {
                found = entry.token();
            }
            base = entry.base();
            if base == NO_BASE as usize {
                break;
            }
        }
        found
    }

    /// The longest token that is a proper prefix of `token`.
    #[inline(always)]
    pub fn shorter(&self, token: Token) -> Option<Token> {
        let prefix = self.prefixes[token as usize];
        (prefix != u32::MAX).then_some(prefix)
    }
}

/// Never a base of another node, and not `NO_BASE`.
const ROOT: usize = 0x100;
const BLOCK: usize = 256;
/// How many free entries are tried before the array grows; more packs tighter but builds slower.
const MAX_TRIES: usize = 32;

struct Builder {
    entries: Vec<Entry>,
    is_base: Vec<bool>,
    free: Vec<u32>,
}

impl Builder {
    fn new() -> Self {
        let mut builder = Builder { entries: Vec::new(), is_base: Vec::new(), free: Vec::new() };
        // Block 0 stays empty, so that `NO_BASE` needs no test of its own.
        builder.grow();
        builder.free.clear();
        builder.grow();
        builder.is_base[ROOT] = true;
        builder
    }

    fn grow(&mut self) {
        let start = self.entries.len();
        self.entries.resize(start + BLOCK, Entry::new(NO_BASE, FREE, NO_TOKEN));
        self.is_base.resize(start + BLOCK, false);
        self.free.extend((start..start + BLOCK).rev().map(|index| index as u32));
    }

    /// `words` ascending; all nodes of one depth are placed before the next, parents first.
    fn build(mut self, words: &[(Vec<u8>, Token)]) -> Vec<Entry> {
        // (range of words below the node, depth, the node's base)
        let mut nodes = vec![(0, words.len(), 0, ROOT)];
        while let Some((from, to, depth, base)) = nodes.pop() {
            let mut start = from;
            // The word that ends here, if any, comes first and belongs to the node itself.
            while start < to && words[start].0.len() == depth {
                start += 1;
            }
            while start < to {
                let label = words[start].0[depth];
                let len = words[start..to].partition_point(|word| word.0[depth] == label);
                let end = start + len;
                let token =
                    if words[start].0.len() == depth + 1 { words[start].1 } else { NO_TOKEN };
                let child_base = self.place(&words[start..end], depth + 1);
                self.entries[base ^ label as usize] =
                    Entry::new(child_base, u64::from(label), token);
                if child_base != NO_BASE {
                    nodes.push((start, end, depth + 1, child_base as usize));
                }
                start = end;
            }
        }
        self.entries
    }

    /// Finds and reserves a base for the children that `words` have at `depth`.
    fn place(&mut self, words: &[(Vec<u8>, Token)], depth: usize) -> u32 {
        let mut labels: Vec<u8> = words.iter().filter_map(|w| w.0.get(depth).copied()).collect();
        labels.dedup();
        let Some(&first) = labels.first() else {
            return NO_BASE;
        };
        let mut tried = 0;
        let mut cursor = self.free.len();
        let base = loop {
            if cursor == 0 || tried == MAX_TRIES {
                let start = self.entries.len();
                self.grow();
                break start ^ first as usize;
            }
            cursor -= 1;
            let slot = self.free[cursor] as usize;
            if !self.is_free(slot) {
                self.free.swap_remove(cursor);
                continue;
            }
            tried += 1;
            let base = slot ^ first as usize;
            let fits = |label: &u8| self.is_free(base ^ *label as usize);
            if base >= BLOCK && !self.is_base[base] && labels.iter().all(fits) {
                break base;
            }
        };
        self.is_base[base] = true;
        for label in labels {
            // Taken: any label but FREE; the parent's loop fills the entry in.
            self.entries[base ^ label as usize] = Entry::new(NO_BASE, u64::from(label), NO_TOKEN);
        }
        base as u32
    }

    fn is_free(&self, slot: usize) -> bool {
        self.entries[slot].label() == FREE && slot >= BLOCK && slot ^ ROOT >= BLOCK
    }
}
