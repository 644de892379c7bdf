//! harnessd
