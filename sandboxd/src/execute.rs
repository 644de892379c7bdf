//! (execute)
