//! (control)
