//! Time, CPU and memory, of the whole machine where the work is spread over kernel threads.

use anyhow::{Context, Result};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The machine that the figures are from.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) cpus: usize,
    pub(crate) memory_mib: u64,
    /// Median milliseconds of a 4 KiB write and fdatasync on the image's disk.
    pub(crate) flush_ms: f64,
}

impl Machine {
    pub(crate) fn look(dir: &Path) -> Result<Self> {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { kernel, cpus, memory_mib: meminfo(&["MemTotal"])? >> 10, flush_ms: flush_cost(dir)? })
    }
}

fn flush_cost(dir: &Path) -> Result<f64> {
    let mut file = tempfile::tempfile_in(dir)?;
    file.set_len(1 << 20)?;
    let mut times = Vec::new();
    for _ in 0..50 {
        let start = Instant::now();
        file.write_all(&[1; 4096])?;
        file.sync_data()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(&mut times))
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

/// KiB that some lines of `/proc/meminfo` add up to.
fn meminfo(wanted: &[&str]) -> Result<u64> {
    Ok(sum_fields(&fs::read_to_string("/proc/meminfo")?, wanted))
}

fn sum_fields(text: &str, wanted: &[&str]) -> u64 {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            wanted.contains(&name).then(|| value.split_ascii_whitespace().next()?.parse::<u64>().ok())?
        })
        .sum()
}

/// Seconds that all CPUs together were busy since boot.
fn busy() -> Result<f64> {
    busy_in(&fs::read_to_string("/proc/stat")?).context("/proc/stat")
}

fn busy_in(stat: &str) -> Option<f64> {
    const TICKS: f64 = 100.0;
    let fields: Vec<u64> =
        stat.lines().next()?.split_ascii_whitespace().skip(1).map_while(|f| f.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|i| fields.get(*i)).sum();
    Some(busy as f64 / TICKS)
}

/// Whose memory to watch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// Anonymous memory of a process.
    Process(u32),
    /// Growth of the kernel's slab and of dirty pages.
    Kernel,
}

impl Memory {
    fn now(self) -> u64 {
        match self {
            Self::Process(pid) => fs::read_to_string(format!("/proc/{pid}/status"))
                .map_or(0, |text| sum_fields(&text, &["RssAnon"])),
            Self::Kernel => meminfo(&["Slab", "Dirty", "Writeback"]).unwrap_or(0),
        }
    }
}

/// A running measurement.
#[derive(Debug)]
pub(crate) struct Watch {
    start: Instant,
    busy: f64,
    base: u64,
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    sampler: Option<JoinHandle<()>>,
}

/// What it found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) memory_mib: f64,
}

impl Watch {
    pub(crate) fn start(memory: Memory) -> Result<Self> {
        let base = if matches!(memory, Memory::Kernel) { memory.now() } else { 0 };
        let (peak, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (p, s) = (Arc::clone(&peak), Arc::clone(&stop));
        let sampler = std::thread::spawn(move || {
            while !s.load(Ordering::Relaxed) {
                p.fetch_max(memory.now(), Ordering::Relaxed);
                std::thread::park_timeout(Duration::from_millis(100));
            }
        });
        Ok(Self { busy: busy()?, start: Instant::now(), base, peak, stop, sampler: Some(sampler) })
    }

    pub(crate) fn stop(mut self) -> Result<Cost> {
        let (seconds, busy) = (self.start.elapsed().as_secs_f64(), busy()? - self.busy);
        self.end_sampling();
        let peak = self.peak.load(Ordering::Relaxed).saturating_sub(self.base);
        Ok(Cost { seconds, cpu_seconds: busy, memory_mib: peak as f64 / 1024.0 })
    }

    fn end_sampling(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
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
    }

    #[test]
    fn tables_of_proc() {
        assert_eq!(sum_fields("Slab:   10 kB\nDirty: 5 kB\nX: 1\n", &["Slab", "Dirty"]), 15);
        let busy = busy_in("cpu  100 50 25 1000 77 10 15 9 0 0\ncpu0 1\n").unwrap();
        assert!((busy - 2.0).abs() < 1e-9, "idle, waiting and stolen time do not count");
    }

    #[test]
    fn a_watch_sees_memory_and_time() {
        let watch = Watch::start(Memory::Process(std::process::id())).unwrap();
        let cost = watch.stop().unwrap();
        assert!(cost.seconds >= 0.0 && cost.cpu_seconds >= 0.0);
        assert!(Memory::Process(std::process::id()).now() > 0);
    }
}
