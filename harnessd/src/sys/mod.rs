//! What harnessd asks of the kernel beyond files and sockets: locks, and its own confinement.
//!
//! The only place that names `nix` or `landlock`.

pub mod confine;
pub mod file;
pub mod lock;
