//! A memory cgroup: less memory than the machine has, for one process.
//!
//! Hidden here is which of the two kinds of cgroups the machine has its memory controller in. What
//! the group may use includes the page cache that its processes fill; swap is not to be counted on.

use larder_proc::Mount;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A group below the one that the machine began with. Removed when dropped, which needs it to be
/// empty.
#[derive(Debug)]
pub struct MemoryCgroup {
    path: PathBuf,
    second_kind: bool,
}

impl MemoryCgroup {
    /// A new group whose processes may use `bytes` together.
    ///
    /// # Errors
    /// There is no controller, or no right to use it.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let (root, second_kind) = Self::root().ok_or(io::ErrorKind::NotFound)?;
        let path = root.join(format!("larder-test-{}-{bytes}", std::process::id()));
        match fs::create_dir(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let group = Self { path, second_kind };
        let limit = if second_kind { "memory.max" } else { "memory.limit_in_bytes" };
        fs::write(group.path.join(limit), bytes.to_string())?;
        if second_kind {
            // Absent where there is no swap.
            let _ = fs::write(group.path.join("memory.swap.max"), "0");
        }
        Ok(group)
    }
    /// Where groups are made, and whether they are of the second kind.
    fn root() -> Option<(PathBuf, bool)> {
        let mounts = larder_proc::mounts().ok()?;
        let of = |kind: &str, option: &str| {
            let fits = |m: &&Mount| m.kind == kind && m.options.iter().any(|o| o == option);
            mounts.iter().find(fits).map(|m| m.point.clone())
        };
        if let Some(root) = of("cgroup", "memory") {
            return Some((root, false));
        }
        let root = of("cgroup2", "rw")?;
        let given = fs::read_to_string(root.join("cgroup.subtree_control")).ok()?;
        given.split_whitespace().any(|c| c == "memory").then_some((root, true))
    }
    /// Can groups be made?
    #[must_use]
    pub(crate) fn is_possible() -> bool {
        Self::new(1 << 30).is_ok()
    }
    /// The file whose writers join the group: `echo $$ > FILE` in a shell that then becomes the
    /// process.
    #[must_use]
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }
    /// A command that joins the group before it begins: a shell does, and then becomes it.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.entrance()).arg(program);
        shell
    }
    /// How many processes of the group were killed because there was no memory.
    ///
    /// # Errors
    /// The group cannot be asked.
    pub fn kills(&self) -> io::Result<u64> {
        let file = if self.second_kind { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.path.join(file))?;
        let count =
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        Ok(count.unwrap_or(0))
    }
    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}
