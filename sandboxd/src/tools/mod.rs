//! The tools a model may call: one file each.

pub mod files;
