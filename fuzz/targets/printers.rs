//! What commands print of an image made from a sound one; standard output should be closed
//! (`-close_fd_mask=1`).
#![no_main]

use larder_simtest::hostile::{self, limits::CountingAllocator};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    hostile::printers::printers(input, &mut |argv| larder_cli::run(argv)).expect("a file in memory")
});
