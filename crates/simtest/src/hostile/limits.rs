//! What a request may cost at most, and how that is noticed.
//!
//! A hostile image may be refused, and every request to it may fail. But no request may end the
//! process, run for ever or take all memory. The limits are in units that do not depend on how busy
//! the machine is: accesses to the device, CPU time of the process, bytes on the heap. Accesses are
//! counted by [`super::device`], the heap by [`CountingAllocator`] if it is the program's global
//! allocator. A thread watches the CPU time and ends the process: code that does not return cannot
//! be stopped otherwise.
//!
//! Panics count wherever they happen: the engine's committer turns its own into a read-only file
//! system, which must not hide them. A fuzzer ends at the first; tests ask [`PanicLog`].

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that a request may have on the heap beyond the engine's cache.
pub const HEAP: usize = 256 << 20;
/// Reads and writes of the device that one request may cause.
pub(crate) const ACCESSES: u64 = 20_000;
/// CPU time of the process that one request may take; a debug build on an image of 128 MiB needs
/// hundredths.
const CPU: Duration = Duration::from_secs(30);
/// Looks at the clock, one a second, that may find the same request running: more is a deadlock.
/// Not a difference of two times, for a process can be stopped and go on.
const STANDSTILL: u32 = 600;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a count of the bytes that are in use.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn grew(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes);
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
}

// SAFETY: every call is handed to the system's allocator as it came; the counters do not touch
// memory.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`.
        let p = unsafe { System.alloc(layout) };
        if !p.is_null() {
            grew(layout.size());
        }
        p
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        let p = unsafe { System.alloc_zeroed(layout) };
        if !p.is_null() {
            grew(layout.size());
        }
        p
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `realloc`.
        let q = unsafe { System.realloc(p, layout, new_size) };
        if !q.is_null() {
            LIVE.fetch_sub(layout.size(), Relaxed);
            grew(new_size);
        }
        q
    }
}

/// Bytes on the heap now; 0 without the counting allocator.
#[must_use]
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// Begins to look for the most bytes on the heap.
pub fn reset_peak() {
    PEAK.store(live(), Relaxed);
}

/// Most bytes on the heap since [`reset_peak`].
#[must_use]
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

#[derive(Clone, Copy)]
struct Running {
    what: &'static str,
    number: u64,
    cpu: Duration,
}

static RUNNING: Mutex<Option<Running>> = Mutex::new(None);
static WATCHING: Once = Once::new();
static REQUESTS: AtomicU64 = AtomicU64::new(0);

fn cpu_time() -> Duration {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0))
}

fn watch() {
    let (mut last, mut looks) = (0, 0);
    loop {
        std::thread::park_timeout(Duration::from_secs(1));
        let Some(r) = *RUNNING.lock() else { continue };
        looks = if r.number == last { looks + 1 } else { 0 };
        last = r.number;
        let cpu = cpu_time().saturating_sub(r.cpu);
        if cpu > CPU || looks > STANDSTILL {
            eprintln!("hostile: {} does not end: {cpu:?} of CPU time, {looks} seconds", r.what);
            std::process::abort();
        }
    }
}

/// Runs one request under the limits on time. Requests do not nest.
pub fn timed<T>(what: &'static str, request: impl FnOnce() -> T) -> T {
    WATCHING.call_once(|| {
        std::thread::Builder::new().name("watch".into()).spawn(watch).expect("a thread");
    });
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            *RUNNING.lock() = None;
        }
    }
    let number = REQUESTS.fetch_add(1, Relaxed) + 1;
    *RUNNING.lock() = Some(Running { what, number, cpu: cpu_time() });
    let _done = Done;
    request()
}

/// Requests that were run so far.
#[must_use]
pub fn requests() -> u64 {
    REQUESTS.load(Relaxed)
}

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Collects the panics of all threads of the process, caught ones included.
#[derive(Debug)]
pub struct PanicLog(());

impl PanicLog {
    /// Begins to collect.
    #[must_use]
    pub fn start() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                PANICS.lock().push(info.to_string());
                before(info);
            }));
        });
        PANICS.lock().clear();
        Self(())
    }
    /// What was collected since the start or the last look.
    #[must_use]
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *PANICS.lock())
    }
}
