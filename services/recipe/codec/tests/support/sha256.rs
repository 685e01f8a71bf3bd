//! SHA-256, for the digests in the vectors.

use sha2::{Digest, Sha256};

pub fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
