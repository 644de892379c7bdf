//! (cell)
