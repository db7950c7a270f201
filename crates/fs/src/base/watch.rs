//! What must never happen under a lock. It is watched where debug assertions are on, so in all
//! tests.
//!
//! - No thread waits for a device while it holds a lock whose row in the table of ranks does not
//!   allow that (`crate::lock`): an inode's state, a tree, and most others. The devices of a file
//!   system are wrapped (`device`): each access looks at what its thread holds, and panics. Waits
//!   for other threads are looked at where they are made (`crate::lock::Condvar`).
//! - While an inode is logged, no thread that holds a tree allocates memory. Other file systems
//!   copied leaves under the lock of their tree, and that held up all other threads. Only an
//!   allocator sees every allocation, and a library has none. An allocator that asks
//!   [`is_logging_under_a_tree`] is in `crates/simtest/tests/log_locks.rs`.
//!
//! Doing both on purpose (`log::fsync`) shows that they are noticed. Other builds contain nothing
//! of this.

use larder_volume::Device;
use std::sync::Arc;

/// Is the calling thread logging an inode while it holds the lock of a tree? This is for
/// allocators, so it allocates nothing. It is always false without debug assertions.
#[doc(hidden)]
#[must_use]
pub fn is_logging_under_a_tree() -> bool {
    #[cfg(debug_assertions)]
    return super::logging::is_logging() && super::lock::holds_tree();
    #[cfg(not(debug_assertions))]
    false
}

/// How often a thread that was logging locked a tree. 0 without debug assertions.
#[doc(hidden)]
#[must_use]
pub fn trees_locked_while_logging() -> u64 {
    #[cfg(debug_assertions)]
    return super::logging::trees_locked();
    #[cfg(not(debug_assertions))]
    0
}

#[cfg(debug_assertions)]
mod checks {
    use crate::base::lock::{Wait, before_waiting};
    use larder_format::Physical;
    use larder_volume::Device;
    use larder_volume::device::Write;
    use std::io;
    use std::sync::Arc;

    fn check() {
        before_waiting(Wait::Device);
    }

    /// A device that looks at the locks of the threads that wait for it.
    #[derive(Debug)]
    pub(super) struct Watched(pub(super) Arc<dyn Device>);

    impl Device for Watched {
        fn name(&self) -> String {
            self.0.name()
        }
        fn size(&self) -> u64 {
            self.0.size()
        }
        fn measure(&self) -> io::Result<u64> {
            self.0.measure()
        }
        fn is_read_only(&self) -> bool {
            self.0.is_read_only()
        }
        fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
            check();
            self.0.read_at(at, buf)
        }
        fn read_medium(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
            check();
            self.0.read_medium(at, buf)
        }
        fn read_at_once(&self, at: Physical, buf: &mut [u8]) -> bool {
            self.0.read_at_once(at, buf)
        }
        fn passed(&self, at: Physical, len: u64) {
            self.0.passed(at, len);
        }
        fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
            check();
            self.0.write_at(at, data)
        }
        fn write_vectored_at(&self, at: Physical, data: &[io::IoSlice<'_>]) -> io::Result<()> {
            check();
            self.0.write_vectored_at(at, data)
        }
        fn is_direct(&self) -> bool {
            self.0.is_direct()
        }
        fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
            check();
            self.0.write_batch(writes)
        }
        fn flush(&self) -> io::Result<()> {
            check();
            self.0.flush()
        }
        fn write_fua(&self, at: Physical, data: &[u8]) -> Option<io::Result<()>> {
            check();
            self.0.write_fua(at, data)
        }
        fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
            check();
            self.0.discard(at, len)
        }
        fn can_discard(&self) -> bool {
            self.0.can_discard()
        }
        fn data_from(&self, at: Physical) -> Physical {
            self.0.data_from(at)
        }
        fn start_writeback(&self, at: Physical, len: u64) {
            self.0.start_writeback(at, len);
        }
    }
}

pub(crate) use super::logging::Logging;

/// The device as a file system uses it.
pub(crate) fn device(device: Arc<dyn Device>) -> Arc<dyn Device> {
    #[cfg(debug_assertions)]
    return Arc::new(checks::Watched(device));
    #[cfg(not(debug_assertions))]
    device
}
