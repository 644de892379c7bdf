//! Cells, from outside: what a command in one can do, cannot do, and how it ends.
//!
//! Each test starts a zygote of its own from the built daemon. They run as root (each cell under a
//! host uid of its own) and as an ordinary user (all under that user) alike.

mod confinement;
mod egress;
mod life;
mod refusal;
mod sockets;
mod support;
mod trust;
