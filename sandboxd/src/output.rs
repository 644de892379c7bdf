//! (output)
