//! The `larder` program; all of it is in the library.

use std::process::ExitCode;

/// Buffers and nodes are made by one thread and freed by another all the time. glibc's heaps of
/// threads grow page by page, with a system call and a fault for each.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    larder_cli::main()
}
