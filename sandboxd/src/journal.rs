//! (journal)
