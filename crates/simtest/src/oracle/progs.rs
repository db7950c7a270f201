//! btrfs-progs: making images, checking them, dumping their trees.
//!
//! What is hidden here is how to read `btrfs check`. Its exit code is 0 when it has only warned,
//! its errors have no common mark, and its harmless output is a fixed set of lines: so every line
//! that is not one of those is a complaint.

use super::loop_device::output;
use super::tool;
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Makes a sparse file of `size` bytes at `path` and a file system in it with `mkfs.btrfs -q ARGS`.
///
/// # Errors
/// The file cannot be made, or mkfs fails: with what it said.
pub fn mkfs_btrfs<S: AsRef<OsStr>>(path: &Path, size: u64, args: &[S]) -> Result<()> {
    let file =
        std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    file.set_len(size)?;
    drop(file);
    let out = output(tool("mkfs.btrfs").arg("-q").args(args).arg(path).stdin(Stdio::null()))?;
    ensure!(
        out.status.success(),
        "mkfs.btrfs {:?}: {}",
        args.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(())
}

/// Runs `btrfs ARGS` and returns its standard output.
///
/// # Errors
/// It fails: with what it said.
pub fn btrfs<S: AsRef<OsStr>>(args: &[S]) -> Result<String> {
    let out = output(tool("btrfs").args(args).stdin(Stdio::null())).context("cannot run btrfs")?;
    if !out.status.success() {
        bail!(
            "btrfs {:?}: {}",
            args.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
            String::from_utf8_lossy(&out.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The subvolume that Linux makes of a stream of its own, in another directory of the file system
/// that it was sent from. That is not always what was sent. A file whose only extent is compressed
/// and inline, and that is longer than this extent, does not get its size (Linux 6.18); and what is
/// made in a directory that is compressed gets its property.
///
/// # Errors
/// It is not received.
pub fn received_again(mount: &Path, stream: &Path, name: &str) -> Result<PathBuf> {
    let again = mount.join("again");
    std::fs::create_dir_all(&again)?;
    let args = ["receive".as_ref(), "-q".as_ref(), "-f".as_ref(), stream.as_os_str()];
    btrfs(&[&args[..], &[again.as_os_str()]].concat())?;
    Ok(again.join(name))
}

/// `btrfs inspect-internal dump-tree ARGS PATH`, for example with `["-t", "extent"]`.
///
/// # Errors
/// It fails: with what it said.
pub fn dump_tree(path: &Path, args: &[&str]) -> Result<String> {
    let mut all: Vec<&OsStr> = ["inspect-internal", "dump-tree"].map(OsStr::new).to_vec();
    all.extend(args.iter().map(OsStr::new));
    all.push(path.as_os_str());
    btrfs(&all)
}

/// What `btrfs check` found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Every line that is not part of the output for a sound file system: errors and warnings
    /// alike.
    pub complaints: Vec<String>,
    /// Remarks that say nothing against the image, such as a stale v1 space cache that Linux will
    /// rebuild.
    pub notes: Vec<String>,
    /// All that it printed.
    pub output: String,
}

impl Report {
    /// Nothing to complain about and exit code 0.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.code == Some(0) && self.complaints.is_empty()
    }

    /// It did not come to an end.
    #[must_use]
    pub fn timed_out(&self) -> bool {
        matches!(self.code, Some(124 | 137))
    }

    /// # Panics
    /// The check was not clean; the message holds its complaints and `context`.
    pub fn assert_clean(&self, context: &str) {
        assert!(self.is_clean(), "btrfs check is not clean ({context}): {self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "exit code {:?}, {} complaints", self.code, self.complaints.len())?;
        self.complaints.iter().take(50).try_for_each(|c| writeln!(f, "  {c}"))
    }
}

/// `btrfs check --readonly`, with `--check-data-csum` if `data_csum`. The image must not be
/// mounted.
///
/// # Panics
/// `btrfs` cannot be started: ask [`need`](super::need) first.
#[must_use]
pub fn btrfs_check(path: &Path, data_csum: bool) -> Report {
    report_of(tool("btrfs"), path, if data_csum { &["--check-data-csum"] } else { &[] })
}

/// `btrfs check --readonly ARGS` of an image that may make it go on for ever and take all memory:
/// it is stopped after `seconds`, or at 2 GiB.
///
/// # Panics
/// `timeout` or `prlimit` cannot be started.
#[must_use]
pub fn btrfs_check_within(path: &Path, args: &[&str], seconds: u32) -> Report {
    let mut command = tool("timeout");
    command.args(["--kill-after=5", &seconds.to_string(), "prlimit", "--as=2147483648", "btrfs"]);
    report_of(command, path, args)
}

fn report_of(mut command: std::process::Command, path: &Path, args: &[&str]) -> Report {
    command.args(["check", "--readonly"]).args(args);
    let out = output(command.arg(path).stdin(Stdio::null())).expect("btrfs can be run");
    let mut report = Report { code: out.status.code(), ..Report::default() };
    for text in [&out.stdout, &out.stderr] {
        let text = String::from_utf8_lossy(text);
        for line in text.lines().map(str::trim_end).filter(|l| !l.is_empty()) {
            match judge(line) {
                Verdict::Fine => {}
                Verdict::Note => report.notes.push(line.to_owned()),
                Verdict::Complaint => report.complaints.push(line.to_owned()),
            }
        }
        report.output.push_str(&text);
    }
    report
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Fine,
    Note,
    Complaint,
}

fn judge(line: &str) -> Verdict {
    const FINE: [&str; 10] = [
        "Opening filesystem to check...",
        "Checking filesystem on ",
        "UUID: ",
        "total csum bytes: ",
        "total tree bytes: ",
        "total fs tree bytes: ",
        "total extent tree bytes: ",
        "btree space waste bytes: ",
        "file data blocks allocated: ",
        " referenced ",
    ];
    const NOTES: [&str; 2] = [
        // What an image looks like whose v1 cache was invalidated on purpose.
        "cache and super generation don't match, space cache will be invalidated",
        "free space inode generation (0) did not match free space cache generation",
    ];
    let sound_end = line.starts_with("found ") && line.ends_with(" bytes used, no error found");
    if sound_end || FINE.iter().any(|f| line.starts_with(f)) || is_step(line) {
        Verdict::Fine
    } else if NOTES.iter().any(|n| line.starts_with(n)) {
        Verdict::Note
    } else {
        Verdict::Complaint
    }
}

/// `[3/8] checking extents`
fn is_step(line: &str) -> bool {
    let Some((step, rest)) = line.strip_prefix('[').and_then(|l| l.split_once("] ")) else {
        return false;
    };
    let numbers = step
        .split_once('/')
        .is_some_and(|(a, b)| a.parse::<u8>().is_ok() && b.parse::<u8>().is_ok());
    numbers && rest.starts_with("checking ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_sound_image_are_fine_and_all_others_complaints() {
        for fine in [
            "Opening filesystem to check...",
            "[1/8] checking log skipped (none written)",
            "[8/8] checking quota groups skipped (not enabled on this FS)",
            "found 147456 bytes used, no error found",
            " referenced 0",
        ] {
            assert_eq!(judge(fine), Verdict::Fine, "{fine}");
        }
        for bad in [
            "found 147456 bytes used, error(s) found",
            "ERROR: errors found in fs roots",
            "root 5 inode 257 errors 400, nbytes wrong",
            "WARNING: tree block [1, 2) is not nodesize aligned",
            "[3/x] checking extents",
            "mirror 1 bytenr 13631488 csum 0x1 expected csum 0x2",
        ] {
            assert_eq!(judge(bad), Verdict::Complaint, "{bad}");
        }
    }
}
