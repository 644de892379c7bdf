//! (lease)
