//! How much memory a mount takes if the user does not say.
//!
//! It is an eighth of what this process may have, within bounds. That is enough for small writes at
//! random places to find neighbours before they are written, and it leaves room for several mounts
//! and everything else. What the process may have is the machine's memory, or less if a memory
//! cgroup above it allows less. It is read once, before the sandbox is entered, and later changes
//! are not followed.
//!
//! The memory comes in pages of the usual size. The thread that first touches a huge page has to
//! fill it with zeros, which takes a hundred times as long. It takes longer still if a hypervisor
//! has taken the machine's free memory back. If a thread does this with a tree locked, all others
//! wait. Memory for long transfers, which is used again and again, has huge pages nevertheless, if
//! the kernel can make that difference.

use std::path::{Path, PathBuf};

/// Least and most that is taken by default.
const LEAST: u64 = 64 << 20;
const MOST: u64 = 1 << 30;
/// What is taken if the machine does not say how much it has.
const UNKNOWN: u64 = 256 << 20;
/// One of this many parts of the memory.
const SHARE: u64 = 8;

/// Bytes for the cache of a mount for which the user gives no number: an eighth of the memory that
/// this process may use, but no less than 64 MiB and no more than 1 GiB.
#[must_use]
pub fn default_cache_size() -> u64 {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    share_of(machine(&read).into_iter().chain(cgroups(&read)).min())
}

/// A variable of the environment of a process, and its value, with which the allocator asks for no
/// huge pages.
pub const MODEST_ALLOCATOR: (&str, &str) = ("MIMALLOC_ALLOW_THP", "0");

/// `PR_THP_DISABLE_EXCEPT_ADVISED`, of Linux 6.18 and later.
const EXCEPT_ADVISED: libc::c_ulong = 2;

/// Was this process started with [`MODEST_ALLOCATOR`]?
#[must_use]
pub fn has_modest_allocator() -> bool {
    let (name, value) = MODEST_ALLOCATOR;
    std::env::var_os(name).is_some_and(|found| found == value)
}

/// Turns huge pages off for this process and those that it starts, but for the memory of long
/// transfers. That has none either where the allocator asks for them as well, since the process was
/// started without [`MODEST_ALLOCATOR`], and with older kernels. If the kernel refuses, all goes on
/// as before.
pub fn without_huge_pages() {
    let disable = |how: libc::c_ulong| {
        let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
        // SAFETY: sets a flag of this process; no memory is passed.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, on, how, none, none) == 0 }
    };
    let is_done = has_modest_allocator() && disable(EXCEPT_ADVISED) || disable(0);
    if !is_done {
        tracing::debug!(error = %std::io::Error::last_os_error(), "huge pages stay as they are");
    }
}

fn share_of(memory: Option<u64>) -> u64 {
    memory.map_or(UNKNOWN, |bytes| (bytes / SHARE).clamp(LEAST, MOST))
}

/// Bytes of memory that the machine has.
fn machine(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let text = read(Path::new("/proc/meminfo"))?;
    let total = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What the memory cgroups of this process allow: its own one and those above.
fn cgroups(read: &dyn Fn(&Path) -> Option<String>) -> Vec<u64> {
    let Some(membership) = read(Path::new("/proc/self/cgroup")) else { return Vec::new() };
    let mut limits = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            c if c.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = PathBuf::from(root).join(group.trim_start_matches('/'));
        for above in group.ancestors().take_while(|dir| dir.starts_with(root)) {
            // "max" is no limit. Nor is the huge number of version 1, which is never the least.
            limits.extend(read(&above.join(file)).and_then(|text| text.trim().parse::<u64>().ok()));
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(files: &[(&str, &str)]) -> u64 {
        let read = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| (*text).to_owned())
        };
        share_of(machine(&read).into_iter().chain(cgroups(&read)).min())
    }

    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal:        4194304 kB\nMemFree:   17 kB\n");

    #[test]
    fn an_eighth_of_the_machine_within_bounds() {
        assert_eq!(with(&[MEMINFO]), 512 << 20);
        assert_eq!(with(&[("/proc/meminfo", "MemTotal: 262144 kB\n")]), 64 << 20);
        assert_eq!(with(&[("/proc/meminfo", "MemTotal: 999999999 kB\n")]), 1 << 30);
        assert_eq!(with(&[]), 256 << 20);
        assert_eq!(with(&[("/proc/meminfo", "nonsense")]), 256 << 20);
    }

    #[test]
    fn a_cgroup_allows_less() {
        let own = ("/sys/fs/cgroup/user.slice/app/memory.max", "max\n");
        let above = ("/sys/fs/cgroup/user.slice/memory.max", "1073741824\n");
        let member = ("/proc/self/cgroup", "0::/user.slice/app\n");
        assert_eq!(with(&[MEMINFO, member, own, above]), 128 << 20);
        let old = ("/proc/self/cgroup", "5:cpu:/x\n3:hugetlb,memory:/box\n");
        let limit = ("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "2147483648\n");
        let none = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(with(&[MEMINFO, old, limit, none]), 256 << 20);
        assert_eq!(with(&[MEMINFO, ("/proc/self/cgroup", "0::/../..\nrubbish\n")]), 512 << 20);
    }

    #[test]
    fn here_it_is_within_bounds() {
        assert!((LEAST..=MOST).contains(&default_cache_size()));
    }
}
