//! Native core of the KV cache store. `cargo test` needs no Python; `py.rs` is the binding.

pub mod chain;
pub mod crc;
pub mod ec;
pub mod gf;
pub mod index_log;
pub mod object;
pub mod pages;
pub mod segment;
mod segment_state;
pub mod shard;
pub mod slots;
pub mod stripe;
pub mod table;

#[cfg(feature = "python")]
mod py;
