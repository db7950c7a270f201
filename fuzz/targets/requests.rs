//! Messages to a mount.
#![no_main]

use larder_simtest::hostile::{self, limits::CountingAllocator};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

libfuzzer_sys::fuzz_target!(|input: &[u8]| hostile::messages(input));
