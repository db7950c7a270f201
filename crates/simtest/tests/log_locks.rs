//! While an inode is logged no tree's lock is held across an allocation or an access to a device.
//!
//! `larder_fs::watch` looks at the second in every build with debug assertions, and knows what this
//! program's allocator needs for the first. The log's workloads run under it: the scenarios, random
//! walks, and eight threads at once.
#![cfg(debug_assertions)]

use larder_fs::Fault;
use larder_fs::watch::{is_logging_under_a_tree, trees_locked_while_logging};
use larder_simtest::runner::{Config, execute, show};
use larder_simtest::workload::{Workload, random, threads};
use larder_simtest::{runner, scenarios};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// Shorter allocations are taken for bookkeeping, of waiters for a lock and of locks that are held.
const LONG: usize = 1024;

static FOUND: AtomicU64 = AtomicU64::new(0);
static LONGEST: AtomicU64 = AtomicU64::new(0);

fn look(size: usize) {
    if size >= LONG && is_logging_under_a_tree() {
        FOUND.fetch_add(1, Ordering::Relaxed);
        LONGEST.fetch_max(size as u64, Ordering::Relaxed);
    }
}

struct Watching;

// SAFETY: everything is passed on to the system's allocator as it came; looking allocates nothing.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        look(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        look(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        look(new_size);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(p, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Runs a workload up to its first power cut.
fn run(config: &Config, workload: &Workload) -> Result<(), String> {
    let world = show(&config.base, &config.options)?;
    execute(config, &config.base, &world, &workload.segments[0]).map(drop)
}

/// One test: what it counts is counted for the whole program.
#[test]
fn nothing_takes_long_under_a_trees_lock() {
    let mut config = Config::new(1).expect("a new file system");
    let mut workloads = scenarios::all(false);
    workloads.extend((1..=6).map(|seed| random(seed, 60)));
    workloads.extend((1..=3).map(|seed| threads(seed, 8, 40)));
    for w in &workloads {
        run(&config, w).unwrap_or_else(|e| panic!("{}: {e}", w.name));
    }
    let locked = trees_locked_while_logging();
    assert!(locked > 2 * workloads.len() as u64, "only {locked} trees were locked while logging");
    let found = FOUND.load(Ordering::Relaxed);
    assert_eq!(found, 0, "allocations under a tree's lock, up to {LONGEST:?} bytes");

    // Done on purpose, both are found.
    let one = Workload::script("one", "new f; f[0,64K)=a; F f").expect("a workload");
    config.options.tuning.fault = Some(Fault::LogCopiesLocked);
    run(&config, &one).expect("it only takes long");
    assert_eq!((FOUND.load(Ordering::Relaxed), LONGEST.load(Ordering::Relaxed)), (1, 16 << 10));
    config.options.tuning.fault = Some(Fault::LogWaitsLocked);
    let panicked = runner::quietly(|| run(&config, &one)).expect_err("a flush under a tree's lock");
    assert!(panicked.contains("a device is waited for while a tree"), "{panicked}");
}
