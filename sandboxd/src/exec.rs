//! (exec)
