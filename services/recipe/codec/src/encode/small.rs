//! Short sequences of tokens, merged rule by rule, many sequences side by side.
//!
//! Each merge waits for memory: the rules are two megabytes, looked up at random. So a sequence
//! makes one merge, asks for the rules that it needs next, and leaves the turn to the others.

use super::merges::{Merges, Pair, Token};

/// Longest sequence that is merged here; the work grows with its square.
pub const MAX_PARTS: usize = 64;

/// Sequences side by side. More would wait for each other's memory.
const MAX_SIDE_BY_SIDE: usize = 12;

/// A merge that could come next: the merged token, which is also its rank, above the place of its
/// left part. The least of them is the next merge, leftmost first at equal rank.
type Candidate = i32;

const NO_CANDIDATE: Candidate = Candidate::MAX;
const PLACE_BITS: u32 = 6;
/// Candidates are compared this many at a time.
const LANES: usize = 8;

/// Ids by the number of what they are for.
pub struct Results {
    ids: Vec<u32>,
    ranges: Vec<(usize, usize)>,
}

impl Results {
    pub fn new() -> Self {
        Results { ids: Vec::new(), ranges: Vec::new() }
    }

    /// Forgets all, and makes room for the numbers below `num`.
    pub fn clear(&mut self, num: usize) {
        self.ids.clear();
        self.ranges.clear();
        self.ranges.resize(num, (0, 0));
    }

    #[inline]
    pub fn put(&mut self, number: usize, ids: impl IntoIterator<Item = u32>) {
        let start = self.ids.len();
        self.ids.extend(ids);
        self.ranges[number] = (start, self.ids.len());
    }

    #[inline(always)]
    pub fn get(&self, number: usize) -> &[u32] {
        let (start, end) = self.ranges[number];
        &self.ids[start..end]
    }
}

/// Sequences on their way.
pub struct Group {
    sequences: Vec<Sequence>,
    num: usize,
}

impl Group {
    pub fn new() -> Self {
        Group { sequences: vec![Sequence::new(); MAX_SIDE_BY_SIDE], num: 0 }
    }

    /// Adds the bytes of a piece of at most `MAX_PARTS`; the results are for `number`.
    #[inline]
    pub fn add_bytes(
        &mut self,
        piece: &[u8],
        number: usize,
        merges: &Merges,
        results: &mut Results,
    ) {
        let sequence = &mut self.sequences[self.num];
        sequence.clear(piece.len(), number);
        for (token, byte) in sequence.tokens.iter_mut().zip(piece) {
            *token = Token::from(*byte);
        }
        for (place, bytes) in piece.windows(2).enumerate() {
            let merged = merges.merged_bytes(bytes[0], bytes[1]);
            sequence.candidates[place] = candidate(place, merged);
        }
        self.added(merges, results);
    }

    /// Adds the tokens that `fill` writes and tells the number of, at most `MAX_PARTS`; `false` if
    /// it tells none.
    #[inline]
    pub fn add_tokens(
        &mut self,
        fill: impl FnOnce(&mut [Token; MAX_PARTS]) -> Option<usize>,
        number: usize,
        merges: &Merges,
        results: &mut Results,
    ) -> bool {
        let sequence = &mut self.sequences[self.num];
        let Some(len) = fill(&mut sequence.tokens) else { return false };
        sequence.clear(len, number);
        sequence.is_fresh = true;
        for pair in sequence.tokens[..len].windows(2) {
            merges.prefetch(Pair::new(pair[0], pair[1]));
        }
        self.added(merges, results);
        true
    }

    #[inline(always)]
    fn added(&mut self, merges: &Merges, results: &mut Results) {
        self.num += 1;
        if self.num == MAX_SIDE_BY_SIDE {
            self.run(merges, results);
        }
    }

    /// Merges all that was added, and puts the ids of what is left.
    #[inline(never)]
    pub fn run(&mut self, merges: &Merges, results: &mut Results) {
        let sequences = &mut self.sequences[..self.num];
        let mut active: [u8; MAX_SIDE_BY_SIDE] = std::array::from_fn(|index| index as u8);
        let mut num_active = sequences.len();
        while num_active > 0 {
            let mut num_kept = 0;
            for turn in 0..num_active {
                let index = active[turn];
                active[num_kept] = index;
                num_kept += usize::from(sequences[usize::from(index)].step(merges));
            }
            num_active = num_kept;
        }
        for sequence in sequences {
            results.put(sequence.number, sequence.left().map(|token| merges.id(token)));
        }
        self.num = 0;
    }
}

#[derive(Clone)]
struct Sequence {
    tokens: [Token; MAX_PARTS],
    candidates: [Candidate; MAX_PARTS],
    next: [u8; MAX_PARTS],
    previous: [u8; MAX_PARTS],
    len: usize,
    /// What the results are for.
    number: usize,
    /// Where the last merge was made, whose neighbours were not looked up yet; `MAX_PARTS` if
    /// there is none.
    merged_at: usize,
    /// Whether no pair was looked up yet.
    is_fresh: bool,
}

/// 0, 1, 2, …: the places after and before each place at the start.
const PLACES: [u8; MAX_PARTS + 1] = {
    let mut places = [0; MAX_PARTS + 1];
    let mut place = 0;
    while place <= MAX_PARTS {
        places[place] = place as u8;
        place += 1;
    }
    places
};

#[inline(always)]
fn candidate(place: usize, merged: Option<Token>) -> Candidate {
    match merged {
        Some(merged) => (merged << PLACE_BITS | place as u32) as Candidate,
        None => NO_CANDIDATE,
    }
}

impl Sequence {
    fn new() -> Self {
        Sequence {
            tokens: [0; MAX_PARTS],
            candidates: [NO_CANDIDATE; MAX_PARTS],
            next: [0; MAX_PARTS],
            previous: [0; MAX_PARTS],
            len: 0,
            number: 0,
            merged_at: MAX_PARTS,
            is_fresh: false,
        }
    }

    #[inline(always)]
    fn clear(&mut self, len: usize, number: usize) {
        let used = len.next_multiple_of(LANES);
        self.len = len;
        self.number = number;
        self.merged_at = MAX_PARTS;
        self.is_fresh = false;
        self.next[..used].copy_from_slice(&PLACES[1..=used]);
        // What comes before the first place is never read.
        self.previous[1..used].copy_from_slice(&PLACES[..used - 1]);
        self.candidates[..used].fill(NO_CANDIDATE);
    }

    /// Looks up what the last step asked for, and makes the next merge; `false` if there is none.
    #[inline(always)]
    fn step(&mut self, merges: &Merges) -> bool {
        if self.is_fresh {
            self.is_fresh = false;
            for place in 1..self.len {
                let merged = merges.merged(self.tokens[place - 1], self.tokens[place]);
                self.candidates[place - 1] = candidate(place - 1, merged);
            }
        } else if self.merged_at < MAX_PARTS {
            let at = self.merged_at;
            let after = usize::from(self.next[at]);
            if after < self.len {
                let merged = merges.merged(self.tokens[at], self.tokens[after]);
                self.candidates[at] = candidate(at, merged);
            }
            if at > 0 {
                let before = usize::from(self.previous[at]);
                let merged = merges.merged(self.tokens[before], self.tokens[at]);
                self.candidates[before] = candidate(before, merged);
            }
        }
        let best = least(&self.candidates[..self.len.next_multiple_of(LANES)]);
        if best == NO_CANDIDATE {
            return false;
        }
        let at = best as usize % MAX_PARTS;
        let merged = best as u32 >> PLACE_BITS;
        let taken = usize::from(self.next[at]) % MAX_PARTS;
        let after = usize::from(self.next[taken]);
        self.tokens[at] = merged;
        self.next[at] = after as u8;
        self.candidates[taken] = NO_CANDIDATE;
        self.candidates[at] = NO_CANDIDATE;
        self.merged_at = at;
        if after < self.len {
            self.previous[after] = at as u8;
            merges.prefetch(Pair::new(merged, self.tokens[after]));
        }
        if at > 0 {
            merges.prefetch(Pair::new(self.tokens[usize::from(self.previous[at])], merged));
        }
        true
    }

    /// What is left.
    fn left(&self) -> impl Iterator<Item = Token> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let token = *self.tokens.get(at).filter(|_| at < self.len)?;
            at = usize::from(self.next[at]);
            Some(token)
        })
    }
}

#[inline(always)]
fn least(candidates: &[Candidate]) -> Candidate {
    let mut lanes = [NO_CANDIDATE; LANES];
    for chunk in candidates.chunks_exact(LANES) {
        for (lane, candidate) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).min(*candidate);
        }
    }
    lanes.into_iter().fold(NO_CANDIDATE, Candidate::min)
}
