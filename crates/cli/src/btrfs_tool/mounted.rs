//! A Larder mount behind a path, and what its daemon tells of the file system.

use super::{Failed, reason};
use crate::mount_table;
use larder_fuse::{control, subvolumes};
use serde_json::Value;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is mounted behind a path.
#[derive(Debug)]
pub(super) struct Mounted {
    told: Value,
    /// The image or device.
    pub(super) source: String,
}

/// Space of one kind.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) name: &'static str,
    pub(super) profile: String,
    pub(super) copies: u64,
    pub(super) total: u64,
    pub(super) used: u64,
}

impl Mounted {
    pub(super) fn at(path: &Path) -> Result<Self, Failed> {
        let meta = path.metadata().map_err(|e| {
            Failed::because(format!("cannot access '{}': {}", path.display(), reason(&e)))
        })?;
        must_be_larder(path)?;
        let text = control::df(path).map_err(|e| refusal(path, &e))?;
        let told = serde_json::from_str(&text)
            .map_err(|e| Failed::because(format!("the daemon's answer is not JSON: {e}")))?;
        let table = mount_table::all()?;
        let mount = table.into_iter().rev().find(|m| m.device == meta.dev());
        let source = mount.map_or_else(String::new, |m| m.source.to_string_lossy().into_owned());
        Ok(Self { told, source })
    }

    pub(super) fn fsid(&self) -> &str {
        self.told["file_system"]["fsid"].as_str().unwrap_or_default()
    }

    pub(super) fn label(&self) -> &str {
        self.told["file_system"]["label"].as_str().unwrap_or_default()
    }

    pub(super) fn bytes_used(&self) -> u64 {
        number(&self.told["file_system"]["bytes_used"])
    }

    pub(super) fn size(&self) -> u64 {
        number(&self.told["file_system"]["total_bytes"])
    }

    /// Bytes of the device that chunks take, with all their copies.
    pub(super) fn allocated(&self) -> u64 {
        self.spaces().iter().map(|s| s.total * s.copies).sum()
    }

    /// All others: Linux counts here also what it keeps free for the superblock.
    pub(super) fn unallocated(&self) -> u64 {
        self.size().saturating_sub(self.allocated())
    }

    /// Bytes that callers may still write, as `statfs` says.
    pub(super) fn available(&self) -> u64 {
        number(&self.told["available"])
    }

    /// What is kept for commits and deletions; Linux calls it the global reserve.
    pub(super) fn reserve(&self) -> u64 {
        number(&self.told["space"]["metadata"]["kept"])
    }

    /// Data, metadata, system; or both together, and system.
    pub(super) fn spaces(&self) -> Vec<Space> {
        let space = &self.told["space"];
        let kinds: &[(&'static str, &str)] = if space["mixed"] == true {
            &[("Data+Metadata", "data"), ("System", "system")]
        } else {
            &[("Data", "data"), ("Metadata", "metadata"), ("System", "system")]
        };
        let of = |(name, key): &(&'static str, &str)| {
            let kind = &space[*key];
            Space {
                name,
                profile: profile(kind["profile"].as_str().unwrap_or_default()),
                copies: number(&kind["copies"]),
                total: number(&kind["total"]),
                used: number(&kind["used"]),
            }
        };
        kinds.iter().map(of).collect()
    }
}

/// A profile as btrfs-progs writes it.
fn profile(name: &str) -> String {
    if name == "single" { name.to_owned() } else { name.to_uppercase() }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// Fails for a path of any other file system.
pub(super) fn must_be_larder(path: &Path) -> Result<(), Failed> {
    control::is_served(path).map_err(|e| refusal(path, &e))
}

fn refusal(path: &Path, error: &std::io::Error) -> Failed {
    /// `BTRFS_SUPER_MAGIC` of Linux.
    const BTRFS: rustix::fs::FsWord = 0x9123_683e;
    let shown = path.display();
    if error.kind() != ErrorKind::Unsupported {
        let failed = Failed::because(format!("cannot access '{shown}': {}", reason(error)));
        return match mount_table::why_denied(path) {
            Some(why) => failed.and(why),
            None => failed,
        };
    }
    let failed = Failed::because(format!("not a Larder mount: {shown}"));
    match rustix::fs::statfs(path) {
        Ok(found) if found.f_type == BTRFS => failed.and(
            "it is a btrfs of the kernel, for which there is the `btrfs` of btrfs-progs; this one \
             is Larder",
        ),
        _ => failed,
    }
}

/// Fails for anything but the root directory of a subvolume on a Larder mount.
pub(super) fn must_be_subvolume(path: &Path) -> Result<(), Failed> {
    if let Err(e) = path.metadata() {
        return Err(Failed::because(format!("Could not statfs: {}", reason(&e))));
    }
    must_be_larder(path)?;
    subvolumes::is_read_only(path)
        .map(drop)
        .map_err(|e| Failed::because(format!("Not a Btrfs subvolume: {}", reason(&e))))
}

/// All subvolumes of the file system, and the default one.
pub(super) fn subvolumes_of(path: &Path) -> Result<(Vec<Value>, u64), Failed> {
    subvolumes::list(path).map_err(|e| refusal(path, &e))
}

/// The id of the subvolume that the path lies in.
pub(super) fn id_of(path: &Path) -> Result<u64, Failed> {
    subvolumes::id_of(path).map_err(|e| refusal(path, &e))
}

/// All mounts of Larder in the mount table, one for each file system.
pub(super) fn all() -> Result<Vec<PathBuf>, Failed> {
    let mut seen = std::collections::BTreeSet::new();
    let mounts = mount_table::all()?.into_iter().filter(mount_table::Mount::is_larder);
    Ok(mounts.filter(|m| seen.insert(m.source.clone())).map(|m| m.point).collect())
}
