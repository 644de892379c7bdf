//! The only place for unsafe code and raw system calls in proxyd; one file per kernel facility.

#![allow(unsafe_code)]

pub mod accounts;
mod calls;
pub mod command;
mod filter;
pub mod interfaces;
pub mod keys;
pub mod packet;
pub mod process;
mod programs;
pub mod vault;
pub mod wipe;
pub mod worker;
