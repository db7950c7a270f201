//! A manifest over an archive.
#![no_main]

use larder_simtest::hostile::{limits::CountingAllocator, sources};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

libfuzzer_sys::fuzz_target!(|input: &[u8]| sources::manifest(input));
