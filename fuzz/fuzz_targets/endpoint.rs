#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| groundcrew_fuzz::endpoint(text));
