//! Native core of the KV cache store. `cargo test` needs no Python; `py.rs` is the binding.

pub mod chain;

#[cfg(feature = "python")]
mod py;
