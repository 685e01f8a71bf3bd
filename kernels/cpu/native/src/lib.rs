//! Operations of the network whose price on a CPU is the number of calls and not their arithmetic.
//!
//! Every row is computed alone and in a fixed order: its bits depend neither on the rows beside it
//! nor on the machine's vector width. `cargo test` needs no Python; `py.rs` is the binding.

pub mod hyper;
pub mod norm;
pub mod wide;

#[cfg(feature = "python")]
mod py;
