//! (pool)
