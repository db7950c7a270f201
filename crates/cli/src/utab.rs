//! The line by which umount(8) finds our helper.
//!
//! Given an absolute path, umount(8) asks `statfs` for the type of the file system. For every kind
//! of FUSE mount the answer is just `fuse`, so umount(8) finds no `umount.fuse.larder`, and returns
//! while the daemon is still writing. It looks for the whole type in the mount table only if
//! libmount's table of user-space options (`/run/mount/utab`) has the directory. So a mount by root
//! adds a line there, as libmount would: under the lock `utab.lock`, in a new file that replaces
//! the old one. The process that ends the mount removes the line.
//!
//! Without the table only that one thing does not work, so errors with it are logged and no more.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const DIRECTORY: &str = "/run/mount";

/// Enters the mount of `image` on `mountpoint`, both absolute. Does nothing for ordinary users.
pub(crate) fn add(image: &Path, mountpoint: &Path) {
    if rustix::process::geteuid().is_root() {
        let entry = line(image, mountpoint);
        if let Err(e) = replace(Path::new(DIRECTORY), mountpoint, Some(&entry)) {
            tracing::debug!("{DIRECTORY}/utab: {e}");
        }
    }
}

/// Takes the lines of `mountpoint` away.
pub(crate) fn remove(mountpoint: &Path) {
    if rustix::process::geteuid().is_root()
        && let Err(e) = replace(Path::new(DIRECTORY), mountpoint, None)
    {
        tracing::debug!("{DIRECTORY}/utab: {e}");
    }
}

fn line(image: &Path, mountpoint: &Path) -> Vec<u8> {
    let [image, mountpoint] = [image, mountpoint].map(|p| escape(p.as_os_str().as_bytes()));
    [b"SRC=", &image[..], b" TARGET=", &mountpoint, b" ROOT=/ OPTS=uhelper=fuse.larder\n"].concat()
}

/// As in the kernel's tables: what would end a word, as octal numbers.
fn escape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for b in path {
        match b {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' | b'"' => out.extend(format!("\\{b:03o}").bytes()),
            _ => out.push(*b),
        }
    }
    out
}

/// A table without the lines of `mountpoint`, and with `entry`; `None` if that is what it was.
fn changed(table: &[u8], mountpoint: &Path, entry: Option<&[u8]>) -> Option<Vec<u8>> {
    let target = [b"TARGET=", &escape(mountpoint.as_os_str().as_bytes())[..]].concat();
    let others = |l: &&[u8]| !l.trim_ascii_end().split(|b| *b == b' ').any(|word| word == target);
    let mut out =
        table.split_inclusive(|b| *b == b'\n').filter(others).collect::<Vec<_>>().concat();
    out.extend(entry.unwrap_or_default());
    (out != table).then_some(out)
}

fn replace(dir: &Path, mountpoint: &Path, entry: Option<&[u8]>) -> io::Result<()> {
    let table = dir.join("utab");
    if entry.is_some() {
        fs::create_dir_all(dir)?;
    } else if !table.exists() {
        return Ok(());
    }
    let lock = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW)
        .open(dir.join("utab.lock"))?;
    while let Err(e) = flock(&lock, FlockOperation::LockExclusive) {
        if e != rustix::io::Errno::INTR {
            return Err(e.into());
        }
    }
    let old = match fs::read(&table) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    let Some(new) = changed(&old, mountpoint, entry) else { return Ok(()) };
    // No other process uses this name: we hold the lock.
    let draft = dir.join("utab.larder");
    let _ = fs::remove_file(&draft);
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o644).open(&draft)?;
    file.write_all(&new)?;
    fs::rename(&draft, &table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_and_go_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("mount");
        let read = || String::from_utf8(fs::read(own.join("utab")).unwrap()).unwrap();
        let point = Path::new("/mnt/with space");
        replace(&own, point, None).unwrap();
        assert!(!own.exists(), "nothing to take away, nothing made");
        replace(&own, point, Some(&line(Path::new("/a.img"), point))).unwrap();
        let ours = "SRC=/a.img TARGET=/mnt/with\\040space ROOT=/ OPTS=uhelper=fuse.larder\n";
        assert_eq!(read(), ours);
        let theirs = "SRC=/dev/x TARGET=/mnt/with ROOT=/ OPTS=uhelper=udisks2\n";
        fs::write(own.join("utab"), [theirs, ours].concat()).unwrap();
        replace(&own, point, Some(&line(Path::new("/b.img"), point))).unwrap();
        assert_eq!(
            read(),
            [theirs, &ours.replace("a.img", "b.img")].concat(),
            "one line for each directory"
        );
        replace(&own, point, None).unwrap();
        assert_eq!(read(), theirs);
        assert_eq!(changed(theirs.as_bytes(), point, None), None);
    }
}
