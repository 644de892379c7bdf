//! (probe)
