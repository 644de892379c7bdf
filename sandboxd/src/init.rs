//! PID 1 of a cell.
