//! The HTTP API of a running harnessd: what clients of the wire API rely on.

mod daemon;
mod loopback;
mod objects;
mod turns;
