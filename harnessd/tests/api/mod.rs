//! The HTTP API of a running harnessd: what clients of the wire API rely on.

mod bodies;
mod budgets;
mod daemon;
mod description;
mod files;
mod loopback;
mod objects;
mod together;
mod turns;
