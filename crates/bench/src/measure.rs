//! Time, CPU and memory, of the whole machine where the work is spread over kernel threads.

use anyhow::{Context, Result};
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The machine that the figures are from.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) cpus: usize,
    pub(crate) memory_mib: u64,
    /// File system type that holds the image.
    pub(crate) disk: String,
    /// Milliseconds of a 4 KiB write and fdatasync on the image's disk: quartiles.
    pub(crate) flush_ms: [f64; 3],
    /// Share of the time in which a thread waited for a CPU before the benchmark began. A high
    /// share means other work on the machine, which makes the figures worse.
    pub(crate) waited_before: Option<f64>,
    /// FUSE over io_uring is on.
    pub(crate) uring: bool,
}

impl Machine {
    pub(crate) fn look(dir: &Path) -> Result<Self> {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // Before we keep the machine busy ourselves.
        let waited_before = waits_for_cpu();
        Ok(Self {
            kernel,
            cpus,
            memory_mib: meminfo(&["MemTotal"])? >> 10,
            disk: kind_of_disk(dir)?,
            flush_ms: flush_cost(dir)?,
            waited_before,
            uring: has_uring(),
        })
    }
    /// Reads again what the rounds may have changed: Larder turns FUSE over io_uring on.
    pub(crate) fn look_again(&mut self) {
        self.uring = has_uring();
    }
}

fn has_uring() -> bool {
    fs::read_to_string("/sys/module/fuse/parameters/enable_uring").is_ok_and(|v| v.trim() == "Y")
}

/// Share of the last ten seconds in which a thread waited for a CPU; `None` where the kernel does
/// not count that.
fn waits_for_cpu() -> Option<f64> {
    let pressure = fs::read_to_string("/proc/pressure/cpu").ok()?;
    let some = pressure.lines().find_map(|line| line.strip_prefix("some avg10="))?;
    Some(some.split(' ').next()?.parse::<f64>().ok()? / 100.0)
}

fn kind_of_disk(dir: &Path) -> Result<String> {
    let dir = fs::canonicalize(dir)?;
    let mounts = larder_proc::mounts()?;
    let around = mounts.iter().filter(|mount| dir.starts_with(&mount.point));
    let innermost = around.max_by_key(|mount| mount.point.components().count());
    Ok(innermost.map_or("unknown".into(), |mount| mount.kind.to_string_lossy().into_owned()))
}

fn flush_cost(dir: &Path) -> Result<[f64; 3]> {
    let mut file = tempfile::tempfile_in(dir)?;
    file.set_len(1 << 20)?;
    let mut times = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        file.write_all(&[1; 4096])?;
        file.sync_data()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[25], times[50], times[75]])
}

/// Median of a list that is not empty.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        return f64::NAN;
    }
    f64::midpoint(values[(n - 1) / 2], values[n / 2])
}

/// The value that this share of a list does not exceed. The list is not empty.
pub(crate) fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * share).ceil() as usize;
    values.get(at.max(1) - 1).copied().unwrap_or(f64::NAN)
}

/// KiB that some lines of `/proc/meminfo` add up to.
fn meminfo(wanted: &[&str]) -> Result<u64> {
    Ok(sum_fields(&fs::read_to_string("/proc/meminfo")?, wanted))
}

fn sum_fields(text: &str, wanted: &[&str]) -> u64 {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            wanted
                .contains(&name)
                .then(|| value.split_ascii_whitespace().next()?.parse::<u64>().ok())?
        })
        .sum()
}

/// Seconds of all CPUs together since boot.
#[derive(Clone, Copy, Debug)]
struct CpuTime {
    busy: f64,
    /// A thread could have run, but the hypervisor used the CPU elsewhere.
    stolen: f64,
}

impl CpuTime {
    fn now() -> Result<Self> {
        Self::read(&fs::read_to_string("/proc/stat")?).context("/proc/stat")
    }
    fn read(stat: &str) -> Option<Self> {
        let fields: Vec<u64> = stat
            .lines()
            .next()?
            .split_ascii_whitespace()
            .skip(1)
            .map_while(|f| f.parse().ok())
            .collect();
        // user nice system idle iowait irq softirq steal
        let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|i| fields.get(*i)).sum();
        let stolen = fields.get(7).copied().unwrap_or(0);
        Some(Self { busy: busy as f64 / TICKS, stolen: stolen as f64 / TICKS })
    }
}

/// Clock ticks per second in `/proc`, on every architecture that Linux runs on today.
const TICKS: f64 = 100.0;

/// What to watch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Watched {
    /// A process: its anonymous memory, its CPU time.
    Process(u32),
    /// The kernel: slab and pages not yet written.
    Kernel,
}

impl Watched {
    /// KiB now.
    fn memory(self) -> u64 {
        match self {
            Self::Process(pid) => {
                let status = larder_proc::Status::of(pid).ok();
                status.and_then(|status| status.bytes("RssAnon")).unwrap_or(0) >> 10
            }
            Self::Kernel => meminfo(&["Slab", "Dirty", "Writeback"]).unwrap_or(0),
        }
    }
    /// Clock ticks of CPU time so far; 0 for a process that is gone, and for the kernel.
    fn ticks(self) -> u64 {
        match self {
            Self::Process(pid) => fs::read_to_string(format!("/proc/{pid}/stat"))
                .ok()
                .and_then(|text| process_ticks(&text))
                .unwrap_or(0),
            Self::Kernel => 0,
        }
    }
}

/// User and system time in `/proc/PID/stat`, whose second field, the name, may hold anything.
fn process_ticks(stat: &str) -> Option<u64> {
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// How much the machine's page cache holds, KiB: files, also those of memory file systems, and
/// block devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageCache(u64);

impl PageCache {
    pub(crate) fn now() -> Result<Self> {
        Ok(Self(meminfo(&["Cached", "Buffers"])?))
    }
}

/// A running measurement. A daemon may end within it: then the last sample says what it used.
#[derive(Debug)]
pub(crate) struct Watch {
    watched: Watched,
    start: Instant,
    before: CpuTime,
    base: u64,
    page_cache_before: PageCache,
    base_ticks: u64,
    seen: Arc<Seen>,
    sampler: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Seen {
    memory: AtomicU64,
    page_cache: AtomicU64,
    ticks: AtomicU64,
    stop: AtomicBool,
}

impl Seen {
    fn look(&self, watched: Watched) {
        self.memory.fetch_max(watched.memory(), Ordering::Relaxed);
        self.ticks.fetch_max(watched.ticks(), Ordering::Relaxed);
        if let Ok(PageCache(kib)) = PageCache::now() {
            self.page_cache.fetch_max(kib, Ordering::Relaxed);
        }
    }
}

/// What it found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) stolen_seconds: f64,
    pub(crate) daemon_cpu_seconds: Option<f64>,
    pub(crate) memory_mib: f64,
    /// By how much the machine's page cache grew at most.
    pub(crate) page_cache_mib: f64,
}

impl Watch {
    /// Growth of the page cache is counted from `page_cache_before`, which was taken before the
    /// mount, because mounting reads, too.
    pub(crate) fn start(watched: Watched, page_cache_before: PageCache) -> Result<Self> {
        const INTERVAL: Duration = Duration::from_millis(50);
        let base = if matches!(watched, Watched::Kernel) { watched.memory() } else { 0 };
        let base_ticks = watched.ticks();
        let seen = Arc::new(Seen::default());
        let shared = Arc::clone(&seen);
        let sampler = std::thread::spawn(move || {
            while !shared.stop.load(Ordering::Relaxed) {
                shared.look(watched);
                std::thread::park_timeout(INTERVAL);
            }
        });
        Ok(Self {
            watched,
            before: CpuTime::now()?,
            start: Instant::now(),
            base,
            page_cache_before,
            base_ticks,
            seen,
            sampler: Some(sampler),
        })
    }

    pub(crate) fn stop(mut self) -> Result<Cost> {
        let (seconds, now) = (self.start.elapsed().as_secs_f64(), CpuTime::now()?);
        self.end_sampling();
        self.seen.look(self.watched);
        let peak = self.seen.memory.load(Ordering::Relaxed).saturating_sub(self.base);
        let page_cache =
            self.seen.page_cache.load(Ordering::Relaxed).saturating_sub(self.page_cache_before.0);
        let ticks = self.seen.ticks.load(Ordering::Relaxed).saturating_sub(self.base_ticks);
        Ok(Cost {
            seconds,
            cpu_seconds: now.busy - self.before.busy,
            stolen_seconds: now.stolen - self.before.stolen,
            daemon_cpu_seconds: matches!(self.watched, Watched::Process(_))
                .then_some(ticks as f64 / TICKS),
            memory_mib: peak as f64 / 1024.0,
            page_cache_mib: page_cache as f64 / 1024.0,
        })
    }

    fn end_sampling(&mut self) {
        self.seen.stop.store(true, Ordering::Relaxed);
        if let Some(sampler) = self.sampler.take() {
            sampler.thread().unpark();
            let _ = sampler.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end_sampling();
    }
}

/// Forgets every clean page, dentry and inode.
pub(crate) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("dropping caches")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&mut [4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&mut []).is_nan());
        let mut hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert!((percentile(&mut hundred, 0.99) - 99.0).abs() < 1e-9);
        assert!((percentile(&mut [7.0], 0.99) - 7.0).abs() < 1e-9);
    }

    #[test]
    fn tables_of_proc() {
        assert_eq!(sum_fields("Slab:   10 kB\nDirty: 5 kB\nX: 1\n", &["Slab", "Dirty"]), 15);
        let time = CpuTime::read("cpu  100 50 25 1000 77 10 15 9 0 0\ncpu0 1\n").unwrap();
        assert!((time.busy - 2.0).abs() < 1e-9, "idle, waiting and stolen time do not count");
        assert!((time.stolen - 0.09).abs() < 1e-9);
    }

    #[test]
    fn a_watch_sees_memory_and_time() {
        let watch =
            Watch::start(Watched::Process(std::process::id()), PageCache::now().unwrap()).unwrap();
        let held = std::hint::black_box(vec![1u8; 32 << 20]);
        let cost = watch.stop().unwrap();
        drop(held);
        assert!(cost.memory_mib >= 32.0, "{cost:?}");
        assert!(cost.daemon_cpu_seconds.is_some());
        let cost = Watch::start(Watched::Kernel, PageCache(0)).unwrap().stop().unwrap();
        assert_eq!(cost.daemon_cpu_seconds, None);
        assert!(cost.page_cache_mib > 0.0, "from nothing it has grown: {cost:?}");
    }

    #[test]
    fn names_of_processes_may_hold_brackets() {
        let stat = "42 (a) b) R 1 2 3 4 5 6 7 8 9 10 30 12 0 0\n";
        assert_eq!(process_ticks(stat), Some(42));
        assert_eq!(process_ticks("gone"), None);
    }

    #[test]
    fn the_innermost_mount_counts() {
        assert_eq!(kind_of_disk(Path::new("/proc/self")).unwrap(), "proc");
        assert_ne!(kind_of_disk(Path::new("/")).unwrap(), "proc");
    }
}
