//! (workspace)
