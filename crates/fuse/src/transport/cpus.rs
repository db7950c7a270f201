//! Which CPUs there are, and staying on one.

use rustix::thread::{CpuSet, sched_setaffinity};

/// Number of CPUs that the kernel may ever bring up: it has one FUSE queue for each.
pub(crate) fn possible() -> usize {
    std::fs::read_to_string("/sys/devices/system/cpu/possible")
        .ok()
        .and_then(|text| count(&text))
        .unwrap_or_else(online)
}

/// Number of CPUs that this process may run on.
pub(crate) fn online() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// CPUs in a list such as `0-3,8`.
fn count(list: &str) -> Option<usize> {
    list.trim()
        .split(',')
        .map(|part| match part.split_once('-') {
            Some((a, b)) => b.parse::<usize>().ok()?.checked_sub(a.parse().ok()?)?.checked_add(1),
            None => part.parse::<usize>().ok().map(|_| 1),
        })
        .sum()
}

/// Keeps this thread on `cpu`. Where that is not allowed (absent CPU, cpuset) it runs anywhere.
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
    fn lists_are_counted() {
        assert_eq!(count("0-3,8\n"), Some(5));
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-127"), Some(128));
        assert_eq!(count("3-1"), None);
        assert_eq!(count("x"), None);
        assert!(possible() >= 1);
    }
}
