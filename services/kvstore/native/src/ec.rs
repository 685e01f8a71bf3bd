//! Reed-Solomon code over GF(2^8): encode, and decode of what is missing. The widest path the
//! processor has is chosen at run time; the plain one is always there and gives the same bytes.

use crate::gf;

/// How products are computed. Each path gives equal bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    Plain,
    Avx2,
    Gfni,
}

impl Path {
    /// All paths that this processor can run, the widest last.
    pub fn available() -> Vec<Path> {
        #[allow(unused_mut)]
        let mut paths = vec![Path::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                paths.push(Path::Avx2);
                if std::arch::is_x86_feature_detected!("gfni") {
                    paths.push(Path::Gfni);
                }
            }
        }
        paths
    }

    pub fn best() -> Path {
        static BEST: std::sync::OnceLock<Path> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| *Path::available().last().expect("the plain path is always there"))
    }

    pub fn name(self) -> &'static str {
        match self {
            Path::Plain => "plain",
            Path::Avx2 => "avx2",
            Path::Gfni => "gfni",
        }
    }
}

/// One profile, k data and m parity shards, with the decode matrices of every loss it survives.
pub struct Code {
    pub k: usize,
    pub m: usize,
    generator: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum EcError {
    /// Fewer than k shards are there.
    TooFew,
    /// Shards of different or zero length, or indices out of range.
    BadShape,
}

impl Code {
    /// Panics unless 1 <= k and k + m <= 255: profiles are constants of the configuration.
    pub fn new(k: usize, m: usize) -> Code {
        assert!(k >= 1 && k + m <= 255, "profile out of range");
        Code { k, m, generator: gf::cauchy(k, m) }
    }

    /// Fills the m parity shards.
    pub fn encode(
        &self,
        path: Path,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
    ) -> Result<(), EcError> {
        let len = data.first().map_or(0, |shard| shard.len());
        let even = data.iter().all(|shard| shard.len() == len)
            && parity.iter().all(|shard| shard.len() == len);
        if data.len() != self.k || parity.len() != self.m || !even {
            return Err(EcError::BadShape);
        }
        multiply(path, &self.generator[self.k * self.k..], data, parity);
        Ok(())
    }

    /// Rows that rebuild the shards `wanted` from the shards `present` (k of them, by index).
    pub fn rebuild_rows(&self, present: &[usize], wanted: &[usize]) -> Result<Vec<u8>, EcError> {
        let (k, n) = (self.k, self.k + self.m);
        if present.len() < k {
            return Err(EcError::TooFew);
        }
        if present.iter().chain(wanted).any(|index| *index >= n) {
            return Err(EcError::BadShape);
        }
        let square: Vec<u8> = present[..k]
            .iter()
            .flat_map(|row| &self.generator[row * k..(row + 1) * k])
            .copied()
            .collect();
        // A repeated index makes the square singular.
        let inverse = gf::invert(&square, k).ok_or(EcError::BadShape)?;
        let mut rows = vec![0; wanted.len() * k];
        for (at, shard) in wanted.iter().enumerate() {
            for column in 0..k {
                rows[at * k + column] = (0..k).fold(0, |sum, inner| {
                    sum ^ gf::mul(self.generator[shard * k + inner], inverse[inner * k + column])
                });
            }
        }
        Ok(rows)
    }

    /// Rebuilds the shards `wanted` into `out` from k shards given with their indices.
    pub fn decode(
        &self,
        path: Path,
        present: &[(usize, &[u8])],
        wanted: &[usize],
        out: &mut [&mut [u8]],
    ) -> Result<(), EcError> {
        let indices: Vec<usize> = present.iter().map(|(index, _)| *index).collect();
        let rows = self.rebuild_rows(&indices, wanted)?;
        let sources: Vec<&[u8]> = present[..self.k].iter().map(|(_, shard)| *shard).collect();
        let len = sources[0].len();
        let even = sources.iter().all(|shard| shard.len() == len)
            && out.iter().all(|shard| shard.len() == len);
        if out.len() != wanted.len() || !even {
            return Err(EcError::BadShape);
        }
        multiply(path, &rows, &sources, out);
        Ok(())
    }
}

/// out[r] = sum over j of rows[r][j] * sources[j]. Rows go in pairs: the sources are read once for
/// two outputs, and two accumulators a lane fit the registers of every path.
fn multiply(path: Path, rows: &[u8], sources: &[&[u8]], out: &mut [&mut [u8]]) {
    let k = sources.len();
    for (pair, outputs) in out.chunks_mut(2).enumerate() {
        let first = &rows[2 * pair * k..(2 * pair + 1) * k];
        match outputs {
            [one] => dot::<1>(path, [first], sources, [one]),
            [one, two] => {
                let second = &rows[(2 * pair + 1) * k..(2 * pair + 2) * k];
                dot::<2>(path, [first, second], sources, [one, two]);
            }
            _ => unreachable!("chunks of two"),
        }
    }
}

fn dot<const R: usize>(path: Path, rows: [&[u8]; R], sources: &[&[u8]], mut out: [&mut [u8]; R]) {
    let done = match path {
        Path::Plain => 0,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Path::available` names a path only where the processor has its instructions,
        // and the lengths were compared by the caller.
        Path::Avx2 => unsafe { x86::dot_avx2::<R>(&rows, sources, &mut out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Path::Gfni => unsafe { x86::dot_gfni::<R>(&rows, sources, &mut out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => 0,
    };
    for (row, output) in rows.iter().zip(out.iter_mut()) {
        let tail = &mut output[done..];
        tail.fill(0);
        for (coefficient, source) in row.iter().zip(sources) {
            let table = &gf::MUL[*coefficient as usize];
            for (to, from) in tail.iter_mut().zip(&source[done..]) {
                *to ^= table[*from as usize];
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::gf;
    use std::arch::x86_64::*;

    /// Products by two 16-entry look-ups a byte, one per nibble. Returns how many bytes are done.
    #[target_feature(enable = "avx2")]
    pub unsafe fn dot_avx2<const R: usize>(
        rows: &[&[u8]; R],
        sources: &[&[u8]],
        out: &mut [&mut [u8]; R],
    ) -> usize {
        const STEP: usize = 64;
        let len = sources[0].len() / STEP * STEP;
        let tables: Vec<[(__m256i, __m256i); R]> = (0..sources.len())
            .map(|j| {
                rows.each_ref().map(|row| {
                    let products = &gf::MUL[row[j] as usize];
                    let mut low = [0u8; 16];
                    let mut high = [0u8; 16];
                    for nibble in 0..16 {
                        low[nibble] = products[nibble];
                        high[nibble] = products[nibble << 4];
                    }
                    let load = |table: &[u8; 16]| {
                        // SAFETY: 16 bytes are there; the load is unaligned.
                        _mm256_broadcastsi128_si256(unsafe {
                            _mm_loadu_si128(table.as_ptr().cast())
                        })
                    };
                    (load(&low), load(&high))
                })
            })
            .collect();
        let mask = _mm256_set1_epi8(0x0f);
        for at in (0..len).step_by(STEP) {
            let mut sums = [[_mm256_setzero_si256(); R]; 2];
            for (source, table) in sources.iter().zip(&tables) {
                for (half, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: at + 64 <= len <= the length of every source.
                    let bytes =
                        unsafe { _mm256_loadu_si256(source.as_ptr().add(at + 32 * half).cast()) };
                    let low = _mm256_and_si256(bytes, mask);
                    let high = _mm256_and_si256(_mm256_srli_epi64(bytes, 4), mask);
                    for (sum, (of_low, of_high)) in sum.iter_mut().zip(table) {
                        let product = _mm256_xor_si256(
                            _mm256_shuffle_epi8(*of_low, low),
                            _mm256_shuffle_epi8(*of_high, high),
                        );
                        *sum = _mm256_xor_si256(*sum, product);
                    }
                }
            }
            for (half, sum) in sums.iter().enumerate() {
                for (output, sum) in out.iter_mut().zip(sum) {
                    // SAFETY: every output is as long as the sources.
                    unsafe {
                        _mm256_storeu_si256(output.as_mut_ptr().add(at + 32 * half).cast(), *sum)
                    };
                }
            }
        }
        len
    }

    /// Products by one bit-matrix instruction. Returns how many bytes are done.
    #[target_feature(enable = "avx2,gfni")]
    pub unsafe fn dot_gfni<const R: usize>(
        rows: &[&[u8]; R],
        sources: &[&[u8]],
        out: &mut [&mut [u8]; R],
    ) -> usize {
        const STEP: usize = 64;
        let len = sources[0].len() / STEP * STEP;
        let tables: Vec<[__m256i; R]> = (0..sources.len())
            .map(|j| rows.each_ref().map(|row| _mm256_set1_epi64x(gf::affine(row[j]) as i64)))
            .collect();
        for at in (0..len).step_by(STEP) {
            let mut sums = [[_mm256_setzero_si256(); R]; 2];
            for (source, table) in sources.iter().zip(&tables) {
                for (half, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: at + 64 <= len <= the length of every source.
                    let bytes =
                        unsafe { _mm256_loadu_si256(source.as_ptr().add(at + 32 * half).cast()) };
                    for (sum, matrix) in sum.iter_mut().zip(table) {
                        let product = _mm256_gf2p8affine_epi64_epi8(bytes, *matrix, 0);
                        *sum = _mm256_xor_si256(*sum, product);
                    }
                }
            }
            for (half, sum) in sums.iter().enumerate() {
                for (output, sum) in out.iter_mut().zip(sum) {
                    // SAFETY: every output is as long as the sources.
                    unsafe {
                        _mm256_storeu_si256(output.as_mut_ptr().add(at + 32 * half).cast(), *sum)
                    };
                }
            }
        }
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crc::crc32c;

    fn vector_data() -> Vec<Vec<u8>> {
        (0..10).map(|i| (0..11_520).map(|b| ((31 * i + 7 * b + 1) % 256) as u8).collect()).collect()
    }

    fn encode(path: Path, code: &Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let len = data[0].len();
        let sources: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut parity = vec![vec![0xee; len]; code.m];
        code.encode(
            path,
            &sources,
            &mut parity.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
        )
        .unwrap();
        parity
    }

    #[test]
    fn t_ec_vec_on_every_path() {
        let data = vector_data();
        assert_eq!((crc32c(&data[0]), crc32c(&data[9])), (0xd7e1_81dd, 0x6105_dfb8));
        for path in Path::available() {
            let parity = encode(path, &Code::new(10, 2), &data);
            assert_eq!(crc32c(&parity[0]), 0xd08e_efb7, "{path:?}");
            assert_eq!(crc32c(&parity[1]), 0x823e_6d4b, "{path:?}");
            assert_eq!(parity[0][..4], [0xd6, 0x53, 0x09, 0x42]);
            assert_eq!(parity[1][..4], [0x68, 0x0e, 0xe8, 0xea]);
        }
    }

    #[test]
    fn all_double_losses_recover_and_triple_losses_do_not() {
        let code = Code::new(10, 2);
        let data: Vec<Vec<u8>> = (0..10u32)
            .map(|i| {
                (0..203u32)
                    .map(|b| (b.wrapping_mul(2_654_435_761).wrapping_add(i * 77_777) >> 11) as u8)
                    .collect()
            })
            .collect();
        for path in Path::available() {
            let all: Vec<Vec<u8>> =
                data.iter().cloned().chain(encode(path, &code, &data)).collect();
            for lost in (0..12).flat_map(|a| (a + 1..12).map(move |b| [a, b])) {
                let present: Vec<(usize, &[u8])> =
                    (0..12).filter(|j| !lost.contains(j)).map(|j| (j, all[j].as_slice())).collect();
                let mut out = vec![vec![0; 203]; 2];
                code.decode(
                    path,
                    &present,
                    &lost,
                    &mut out.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
                )
                .unwrap();
                assert_eq!((&out[0], &out[1]), (&all[lost[0]], &all[lost[1]]), "{path:?} {lost:?}");
                let three_lost =
                    code.decode(path, &present[1..], &[present[0].0], &mut [&mut vec![0; 203]]);
                assert_eq!(three_lost, Err(EcError::TooFew));
            }
        }
    }

    #[test]
    fn every_profile_survives_its_losses() {
        for (k, m) in [(4, 2), (2, 1), (1, 2), (1, 0)] {
            let code = Code::new(k, m);
            let data: Vec<Vec<u8>> =
                (0..k).map(|i| (0..130).map(|b| (i * 50 + b * 3) as u8).collect()).collect();
            let all: Vec<Vec<u8>> =
                data.iter().cloned().chain(encode(Path::best(), &code, &data)).collect();
            let present: Vec<(usize, &[u8])> = (m..k + m).map(|j| (j, all[j].as_slice())).collect();
            let wanted: Vec<usize> = (0..m).collect();
            let mut out = vec![vec![0; 130]; m];
            code.decode(
                Path::best(),
                &present,
                &wanted,
                &mut out.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            )
            .unwrap();
            assert_eq!(out, all[..m]);
        }
    }

    #[test]
    fn a_repeated_shard_is_refused() {
        let code = Code::new(2, 1);
        let shard = [1u8; 8];
        let result =
            code.decode(Path::Plain, &[(0, &shard), (0, &shard)], &[1], &mut [&mut [0; 8]]);
        assert_eq!(result, Err(EcError::BadShape));
    }
}
