//! Which CPUs there are, and staying on one.

use rustix::thread::{CpuSet, sched_setaffinity};

/// Number of CPUs that the kernel may ever bring up: it has one FUSE queue for each.
pub(crate) fn possible() -> usize {
    listed("possible").map_or_else(online, |ids| ids.len())
}

/// The CPUs that run now.
pub(crate) fn running() -> Vec<usize> {
    listed("online").unwrap_or_else(|| (0..possible()).collect())
}

fn listed(which: &str) -> Option<Vec<usize>> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/{which}")).ok()?;
    ids(&text).filter(|ids| !ids.is_empty())
}

/// Number of CPUs that this process may run on.
pub(crate) fn online() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// CPUs in a list such as `0-3,8`.
fn ids(list: &str) -> Option<Vec<usize>> {
    let mut out = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then(|| out.extend(first..=last))?;
    }
    Some(out)
}

/// Keeps this thread on `cpu`. If that is not allowed (absent CPU, cpuset), it runs anywhere.
pub(crate) fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        return;
    }
    set.set(cpu);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::debug!(cpu, %error, "thread is not pinned");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(ids("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(ids("0"), Some(vec![0]));
        assert_eq!(ids("0-127").map(|ids| ids.len()), Some(128));
        assert_eq!(ids("3-1"), None);
        assert_eq!(ids("x"), None);
        assert!(running().len() <= possible() && !running().is_empty());
        assert!(possible() >= 1);
    }
}
