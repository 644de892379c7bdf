//! Hands what the fuzzer made up to `proxyd::fuzzing::scrub`, which says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| proxyd::fuzzing::scrub(data));
