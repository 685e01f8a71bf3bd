//! Byte-exact protocol codec: convert, render, encode, stream. The contract is recipe.md.
//!
//! A plain crate: `cargo test` needs no Python. `py.rs` is the binding, behind feature `python`.

pub mod convert;
pub mod encode;
pub mod images;
pub mod json;
pub mod max_tokens;
mod node;
pub mod render;
pub mod request;
pub mod stream;
pub mod types;

#[cfg(feature = "python")]
mod py;
