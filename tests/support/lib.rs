//! Support for the whole-daemon tests.
