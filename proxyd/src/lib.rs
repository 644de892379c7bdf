//! proxyd
