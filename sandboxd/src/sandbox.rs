//! (sandbox)
