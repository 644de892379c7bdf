//! Hands what the fuzzer made up to `proxyd::fuzzing::policy_file`, which says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| proxyd::fuzzing::policy_file(data));
