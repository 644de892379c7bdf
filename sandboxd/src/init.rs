//! (init)
