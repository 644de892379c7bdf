//! The CA: makes one, and issues leaf certificates from it. Runs in the vault child only.
