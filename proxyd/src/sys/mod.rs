//! The only place for unsafe code and raw system calls in proxyd; one file per kernel facility.

#![allow(unsafe_code)]

pub mod accounts;
pub mod command;
pub mod interfaces;
pub mod packet;
pub mod process;
pub mod vault;
pub mod wipe;
pub mod worker;
