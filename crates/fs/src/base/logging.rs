//! Is the calling thread logging an inode?
//!
//! [`super::lock`] asks when it locks a tree, and [`super::watch`] says what must not happen then.
//! Builds without debug assertions have nothing of this.

#[cfg(debug_assertions)]
mod noted {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    thread_local! {
        static LOGGING: Cell<u32> = const { Cell::new(0) };
    }
    static LOCKED: AtomicU64 = AtomicU64::new(0);

    /// Does it? This allocates nothing.
    pub(crate) fn is_logging() -> bool {
        LOGGING.try_with(|n| n.get() > 0).unwrap_or(false)
    }
    /// The thread has got the lock of a tree.
    pub(crate) fn tree_locked() {
        if is_logging() {
            LOCKED.fetch_add(1, Ordering::Relaxed);
        }
    }
    /// How often a thread that was logging has locked a tree.
    pub(crate) fn trees_locked() -> u64 {
        LOCKED.load(Ordering::Relaxed)
    }

    /// The calling thread logs an inode until this is dropped.
    #[derive(Debug)]
    pub(crate) struct Logging(());

    impl Logging {
        pub(crate) fn begin() -> Self {
            LOGGING.set(LOGGING.get() + 1);
            Self(())
        }
    }
    impl Drop for Logging {
        fn drop(&mut self) {
            let _ = LOGGING.try_with(|n| n.set(n.get() - 1));
        }
    }
}
#[cfg(debug_assertions)]
pub(crate) use noted::{Logging, is_logging, tree_locked, trees_locked};

#[cfg(not(debug_assertions))]
mod nothing {
    /// Nothing in this build.
    #[derive(Debug)]
    pub(crate) struct Logging;

    impl Logging {
        #[inline(always)]
        pub(crate) fn begin() -> Self {
            Self
        }
    }
}
#[cfg(not(debug_assertions))]
pub(crate) use nothing::Logging;
