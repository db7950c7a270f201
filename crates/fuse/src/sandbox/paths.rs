//! Which files may still be opened: Landlock.
//!
//! Open descriptors keep their rights, so devices and images need no rule.

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};
use std::io;
use std::path::{Path, PathBuf};

/// The newest version of the interface that this code knows. Older kernels enforce what they have.
const KNOWN: ABI = ABI::V6;

/// Restricts this thread and those that it will start. Returns the interface's version in use,
/// `None` if the kernel has no Landlock.
pub(super) fn restrict() -> io::Result<Option<i32>> {
    let status = rules().map_err(io::Error::other)?;
    Ok(match status {
        LandlockStatus::Available { effective_abi, .. } => Some(effective_abi as i32),
        _ => None,
    })
}

fn rules() -> Result<LandlockStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?
        .create()?;
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
    for path in [
        // Callers' groups, our own memory and mappings. Landlock itself denies other processes'
        // memory.
        Path::new("/proc"),
        // The number of FUSE's queues, and of threads that are worth having.
        Path::new("/sys/devices/system/cpu"),
        Path::new("/sys/fs/cgroup"),
        // Names in a backtrace.
        &program,
    ] {
        if let Ok(fd) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(fd, AccessFs::ReadFile))?;
        }
    }
    // Such a descriptor can do nothing until it is joined to a connection that we have.
    if let Ok(fd) = PathFd::new("/dev/fuse") {
        let access = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        rules = rules.add_rule(PathBeneath::new(fd, access))?;
    }
    Ok(rules.restrict_self()?.landlock)
}
