//! sandboxd
