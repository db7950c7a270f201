//! A send stream.
#![no_main]

use larder_simtest::hostile::{limits::CountingAllocator, stream};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

libfuzzer_sys::fuzz_target!(|input: &[u8]| stream::stream(input));
