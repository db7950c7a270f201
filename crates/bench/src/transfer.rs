//! Snapshots as streams: sent into nothing, and received from a file.
//!
//! One image has a source tree, the same tree compressed, and a subvolume with many files of which
//! one in a hundred changes between two snapshots. The kernel has written all of it, and Linux has
//! written the streams that both sides receive. So nobody gains by what its own side wrote.
//!
//! The kernel sends and receives on a mount. The time of its mount does not count, and that of its
//! unmount counts where it receives, since after that everything is durable. Larder's commands work
//! on the image, and their time has all of that. Output of a sender goes nowhere. The ceiling is
//! the disk: `dd` reads as many bytes of the image past the page cache as the stream has, or writes
//! the stream into it.

use crate::interrupt;
use crate::sharing::{self, By};
use anyhow::{Context, Result, ensure};
use larder_simtest::oracle::btrfs;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A snapshot that is sent and received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// The step that sends it.
    pub(crate) send: &'static str,
    /// The step that receives it.
    pub(crate) receive: &'static str,
    pub(crate) snapshot: &'static str,
    /// Only what differs from this snapshot is sent.
    parent: Option<&'static str>,
    /// Compressed extents are sent as they are.
    packed: bool,
}

/// The source tree.
pub(crate) const TREE: Transfer = Transfer {
    send: "send a tree",
    receive: "receive a tree",
    snapshot: "tree0",
    parent: None,
    packed: false,
};
/// The source tree again, compressed.
pub(crate) const PACKED: Transfer = Transfer {
    send: "send a compressed tree",
    receive: "receive a compressed tree",
    snapshot: "packed0",
    parent: None,
    packed: true,
};
/// Many files, most of them empty.
pub(crate) const MANY: Transfer = Transfer {
    send: "send many files",
    receive: "receive many files",
    snapshot: "many0",
    parent: None,
    packed: false,
};
/// What has changed among them.
pub(crate) const CHANGED: Transfer = Transfer {
    send: "send 1 % of many files",
    receive: "receive 1 % of many files",
    snapshot: "many1",
    parent: Some("many0"),
    packed: false,
};
/// All of them. A parent stands before what is sent against it.
pub(crate) const ALL: [Transfer; 4] = [TREE, PACKED, MANY, CHANGED];

/// How many times as fast as the kernel a step has to be.
pub(crate) const WANTED: [(&str, f64); 3] =
    [(TREE.send, 1.5), (CHANGED.send, 2.0), (TREE.receive, 3.0)];

/// One file in so many changes.
const CHANGE_ONE_IN: usize = 100;

/// Makes what is sent, on a mount of the kernel's.
pub(crate) fn fill(root: &Path, files: u64, unpack: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
    for (name, snapshot) in [("tree", TREE.snapshot), ("packed", PACKED.snapshot)] {
        let subvolume = root.join(name);
        btrfs(&["subvolume".as_ref(), "create".as_ref(), subvolume.as_os_str()])?;
        if name == "packed" {
            let how = ["compression", "zstd"].map(AsRef::as_ref);
            let set = ["property".as_ref(), "set".as_ref(), subvolume.as_os_str()];
            btrfs(&[set.as_slice(), &how].concat())?;
        }
        unpack(&subvolume)?;
        freeze(&subvolume, &root.join(snapshot))?;
    }
    By::Linux.fill(root, files)?;
    let many = root.join("many");
    freeze(&many, &root.join(MANY.snapshot))?;
    for n in (0..files).step_by(CHANGE_ONE_IN) {
        interrupt::check()?;
        fs::write(sharing::file(root, n), n.to_string())?;
    }
    freeze(&many, &root.join(CHANGED.snapshot))
}

fn freeze(subvolume: &Path, snapshot: &Path) -> Result<()> {
    let how = ["subvolume", "snapshot", "-r"].map(AsRef::as_ref);
    btrfs(&[how.as_slice(), &[subvolume.as_os_str(), snapshot.as_os_str()]].concat())?;
    Ok(())
}

impl Transfer {
    /// The file of its stream.
    pub(crate) fn stream(&self, dir: &Path) -> PathBuf {
        dir.join(self.snapshot)
    }

    /// Sends it from the kernel's mount.
    pub(crate) fn send_by_linux(&self, root: &Path) -> Command {
        self.send_with(Path::new("btrfs"), &|name| root.join(name).into_os_string())
    }
    /// Sends it from the image.
    pub(crate) fn send_by_larder(&self, larder: &Path, image: &Path) -> Command {
        self.send_with(larder, &|name| in_image(image, name))
    }
    /// Both commands take the same options.
    fn send_with(&self, program: &Path, path: &dyn Fn(&str) -> OsString) -> Command {
        let mut send = Command::new(program);
        send.args(["send", "-q"]);
        if self.packed {
            send.args(["--proto", "2", "--compressed-data"]);
        }
        if let Some(parent) = self.parent {
            send.arg("-p").arg(path(parent));
        }
        send.arg(path(self.snapshot));
        send
    }

    /// The disk alone, for as many bytes as the stream has.
    pub(crate) fn read_by_disk(&self, dir: &Path, image: &Path) -> Result<Command> {
        let bytes = self.stream(dir).metadata()?.len();
        let mut dd = Command::new("dd");
        dd.arg(operand("if=", image)).args(["of=/dev/null", "bs=1M", "iflag=direct"]);
        dd.arg(format!("count={}", bytes.div_ceil(1 << 20))).arg("status=none");
        Ok(dd)
    }
    /// The stream written to the disk.
    pub(crate) fn write_by_disk(&self, dir: &Path, image: &Path) -> Command {
        let mut dd = Command::new("dd");
        dd.arg(operand("if=", &self.stream(dir))).arg(operand("of=", image));
        dd.args(["bs=1M", "conv=notrunc,fsync", "status=none"]);
        dd
    }
}

/// Receives a stream on the kernel's mount.
pub(crate) fn receive_by_linux(stream: &Path, root: &Path) -> Command {
    receive_with(Path::new("btrfs"), stream, root.as_os_str().to_owned())
}
/// Receives a stream into the image.
pub(crate) fn receive_by_larder(larder: &Path, stream: &Path, image: &Path) -> Command {
    receive_with(larder, stream, in_image(image, ""))
}
fn receive_with(program: &Path, stream: &Path, target: OsString) -> Command {
    let mut receive = Command::new(program);
    receive.args(["receive", "-q", "-f"]).arg(stream).arg(target);
    receive
}

fn in_image(image: &Path, name: &str) -> OsString {
    let mut path = image.as_os_str().to_owned();
    path.push(":/");
    path.push(name);
    path
}

fn operand(key: &str, path: &Path) -> OsString {
    let mut operand = OsString::from(key);
    operand.push(path);
    operand
}

/// Are all files there, and have only those content that should?
pub(crate) fn verify_many(transfer: &Transfer, root: &Path, files: u64) -> Result<()> {
    let mut found = 0;
    for entry in walkdir::WalkDir::new(root.join(transfer.snapshot)) {
        let entry = entry?;
        if !entry.file_type().is_file() {
            continue;
        }
        interrupt::check()?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let n: usize = name.parse().with_context(|| format!("a file named {name}"))?;
        let changed = transfer.parent.is_some() && n.is_multiple_of(CHANGE_ONE_IN);
        let wanted = if changed { name } else { String::new() };
        let path = entry.path();
        ensure!(fs::read_to_string(path)? == wanted, "{}: not as it was sent", path.display());
        found += 1;
    }
    ensure!(found == files, "{}: {found} files of {files}", transfer.snapshot);
    Ok(())
}

/// Runs a command, whose output goes into this file, or nowhere.
pub(crate) fn run(mut command: Command, into: Option<File>) -> Result<()> {
    interrupt::check()?;
    let into = into.map_or_else(Stdio::null, Stdio::from);
    let child = command.stdin(Stdio::null()).stdout(into).stderr(Stdio::piped()).spawn();
    let child = child.with_context(|| format!("running {command:?}"))?;
    let out = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{command:?}: {}: {}", out.status, said.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<&str> {
        command.get_args().map(|arg| arg.to_str().unwrap()).collect()
    }

    #[test]
    fn both_sides_get_the_same_command_lines() {
        let ours = CHANGED.send_by_larder(Path::new("larder"), Path::new("a.img"));
        assert_eq!(words(&ours), ["send", "-q", "-p", "a.img:/many0", "a.img:/many1"]);
        let theirs = CHANGED.send_by_linux(Path::new("m"));
        assert_eq!(words(&theirs), ["send", "-q", "-p", "m/many0", "m/many1"]);
        let packed = PACKED.send_by_linux(Path::new("m"));
        assert_eq!(words(&packed)[2..], ["--proto", "2", "--compressed-data", "m/packed0"]);
        let receive =
            receive_by_larder(Path::new("larder"), Path::new("d/tree0"), Path::new("a.img"));
        assert_eq!(words(&receive), ["receive", "-q", "-f", "d/tree0", "a.img:/"]);
    }

    #[test]
    fn parents_come_first() {
        for (n, transfer) in ALL.iter().enumerate() {
            let before: Vec<_> = ALL[..n].iter().map(|t| t.snapshot).collect();
            assert!(transfer.parent.is_none_or(|parent| before.contains(&parent)));
        }
    }

    #[test]
    fn the_disk_reads_whole_mebibytes() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(TREE.stream(dir.path()), vec![0; (1 << 20) + 1]).unwrap();
        let dd = TREE.read_by_disk(dir.path(), Path::new("a.img")).unwrap();
        assert!(words(&dd).contains(&"count=2"));
    }
}
