//! The file that becomes the image.
//!
//! A new image has no name until it is complete and durable. It is written to a file without a name
//! in the directory where it will lie, and linked there in the end. So an interrupted build leaves
//! nothing behind, however it ends. Where the host's file system has no files without a name, a
//! file with a name of its own stands in. That one is removed on an error.
//!
//! A block device, or a file whose size counts, is written in place. It is wiped first, so that an
//! interrupted build leaves no file system that looks whole.

use crate::error::{Error, Result};
use crate::options::ImageSize;
use larder_format::Physical;
use larder_fs::mkfs::{recognise, wipe};
use larder_volume::{Device, FileDevice, OpenMode};
use rustix::fs::{Advice, AtFlags, CWD, Mode, OFlags};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempPath;

/// Where an image goes.
#[derive(Clone, Debug)]
pub enum Output {
    /// A file of this name, which is made, or replaced if `force` is set. A block device is written
    /// in place.
    File {
        /// Its path.
        path: PathBuf,
        /// Replace what is there.
        force: bool,
    },
    /// An existing file or block device, written in place. It keeps its size, unless it is a file
    /// and [`ImageSize`] is `AtLeast` or `Shrink`.
    InPlace {
        /// Its path.
        path: PathBuf,
        /// Overwrite what is recognised there.
        force: bool,
    },
}

/// The file, while it is written.
#[derive(Debug)]
pub(crate) struct Sink {
    path: PathBuf,
    target: Target,
    /// Bytes so far.
    written: AtomicU64,
}

/// Bytes that are written before the kernel is asked to begin with them.
const GATHERED: u64 = 32 << 20;

#[derive(Debug)]
enum Target {
    /// Without a name, or with one that goes away.
    New {
        file: File,
        stand_in: Option<TempPath>,
        replaces: Option<FileDevice>,
    },
    Existing(FileDevice),
    /// A file that is written anew from nothing, under its name. The lock is that of the image.
    Anew {
        file: File,
        lock: FileDevice,
    },
}

impl Sink {
    /// Opens the output.
    pub(crate) fn open(output: &Output, size: ImageSize) -> Result<Self> {
        let (path, force, in_place) = match output {
            Output::File { path, force } => (path, *force, false),
            Output::InPlace { path, force } => (path, *force, true),
        };
        let there = match std::fs::metadata(path) {
            Ok(meta) => Some(meta),
            Err(e) if e.kind() == io::ErrorKind::NotFound && !in_place => None,
            Err(source) => return Err(failed("open", path, source)),
        };
        let is_device = there.as_ref().is_some_and(|meta| meta.file_type().is_block_device());
        if !is_device && there.as_ref().is_some_and(|meta| !meta.is_file()) {
            let what = format!("{} is neither a file nor a block device", path.display());
            return Err(Error::Unsupported(what));
        }
        let path = &if in_place || is_device { path.clone() } else { followed(path)? };
        let target = match there {
            None => Self::new_file(path, None)?,
            Some(meta) if in_place && meta.is_file() && size.resizes() => Self::anew(path, force)?,
            Some(_) if in_place || is_device => Self::existing(path, force)?,
            Some(_) if !force => {
                return Err(Error::Unsupported(format!(
                    "{} exists; use --force to replace it",
                    path.display()
                )));
            }
            // Its lock is held until it is replaced: it may be mounted.
            Some(_) => Self::new_file(path, Some(FileDevice::open(path, OpenMode::Write)?))?,
        };
        Ok(Self { path: path.clone(), target, written: AtomicU64::new(0) })
    }

    fn new_file(path: &Path, replaces: Option<FileDevice>) -> Result<Target> {
        let directory = directory_of(path);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(CWD, directory, flags, Mode::from_raw_mode(0o666)) {
            Ok(fd) => return Ok(Target::New { file: File::from(fd), stand_in: None, replaces }),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {}
            Err(e) => return Err(failed("make", path, e.into())),
        }
        let mut prefix = OsString::from(".");
        prefix.push(path.file_name().unwrap_or_default());
        let (file, stand_in) = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".partial")
            .tempfile_in(directory)
            .map_err(|e| failed("make", path, e))?
            .into_parts();
        Ok(Target::New { file, stand_in: Some(stand_in), replaces })
    }

    fn existing(path: &Path, force: bool) -> Result<Target> {
        let device = Self::may_be_overwritten(path, force)?;
        wipe(&device, true)?;
        Ok(Target::Existing(device))
    }

    fn anew(path: &Path, force: bool) -> Result<Target> {
        let lock = Self::may_be_overwritten(path, force)?;
        let file = File::options().read(true).write(true).truncate(true).open(path);
        Ok(Target::Anew { file: file.map_err(|e| failed("open", path, e))?, lock })
    }

    fn may_be_overwritten(path: &Path, force: bool) -> Result<FileDevice> {
        let device = FileDevice::open(path, OpenMode::Write)?;
        if !force && let Some(found) = recognise(&device) {
            return Err(Error::Unsupported(format!(
                "{} already holds {found}; use --force to overwrite it",
                path.display()
            )));
        }
        Ok(device)
    }

    /// Bytes that the image must have, where it cannot be chosen.
    pub(crate) fn size(&self) -> Option<u64> {
        match &self.target {
            Target::New { .. } | Target::Anew { .. } => None,
            Target::Existing(device) => Some(device.size()),
        }
    }

    /// Where the image will lie.
    pub(crate) fn directory(&self) -> &Path {
        directory_of(&self.path)
    }

    /// Writes `data` at `at`.
    pub(crate) fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        match &self.target {
            Target::New { file, .. } | Target::Anew { file, .. } => {
                file.write_all_at(data, at).map(|()| self.hurry(file, at..at + data.len() as u64))
            }
            Target::Existing(device) => device.write_at(Physical(at), data),
        }
        .map_err(|e| failed("write", &self.path, e))
    }

    /// Has the kernel begin to write what has gathered in the page cache, so that the end of the
    /// build does not wait for all of it. It is advice: the kernel may do otherwise.
    fn hurry(&self, file: &File, piece: Range<u64>) {
        let len = piece.end - piece.start;
        let before = self.written.fetch_add(len, Ordering::Relaxed);
        if before / GATHERED != (before + len) / GATHERED {
            let start = piece.end.saturating_sub(2 * GATHERED);
            let gathered = NonZero::new(piece.end - start);
            let _ = rustix::fs::fadvise(file, start, gathered, Advice::DontNeed);
        }
    }

    /// Writes what lies at `from` once more at `to`.
    pub(crate) fn copy(&self, from: Physical, to: Physical, len: u64) -> Result<()> {
        const PIECE: u64 = 1 << 20;
        let mut buffer = vec![0; usize::try_from(PIECE.min(len)).expect("one piece")];
        let mut done = 0;
        while done < len {
            let n = usize::try_from(PIECE.min(len - done)).expect("one piece");
            let piece = &mut buffer[..n];
            match &self.target {
                Target::New { file, .. } | Target::Anew { file, .. } => {
                    file.read_exact_at(piece, from.0 + done)
                }
                Target::Existing(device) => device.read_at(from.plus(done), piece),
            }
            .map_err(|e| failed("read back", &self.path, e))?;
            // What reads as zeros need not be written: a new file has zeros there.
            if !self.is_new() || piece.iter().any(|b| *b != 0) {
                self.write(to.0 + done, piece)?;
            }
            done += n as u64;
        }
        Ok(())
    }

    fn is_new(&self) -> bool {
        matches!(self.target, Target::New { .. } | Target::Anew { .. })
    }

    /// Makes durable what was written.
    pub(crate) fn flush(&self) -> Result<()> {
        match &self.target {
            Target::New { file, .. } | Target::Anew { file, .. } => file.sync_data(),
            Target::Existing(device) => device.flush(),
        }
        .map_err(|e| failed("flush", &self.path, e))
    }

    /// Gives the image its size and, when all of it is durable, its name.
    pub(crate) fn finish(self, size: u64) -> Result<()> {
        let path = self.path;
        match self.target {
            Target::Existing(device) => device.flush().map_err(|e| failed("flush", &path, e)),
            Target::Anew { file, lock } => {
                file.set_len(size).map_err(|e| failed("resize", &path, e))?;
                file.sync_all().map_err(|e| failed("flush", &path, e))?;
                drop(lock);
                Ok(())
            }
            Target::New { file, stand_in, replaces } => {
                file.set_len(size).map_err(|e| failed("resize", &path, e))?;
                file.sync_all().map_err(|e| failed("flush", &path, e))?;
                name(&file, stand_in, &path, replaces.is_some())
                    .map_err(|e| failed("name", &path, e))?;
                File::open(directory_of(&path))
                    .and_then(|d| d.sync_all())
                    .map_err(|e| failed("flush the directory of", &path, e))
            }
        }
    }
}

/// Gives a complete file its name.
fn name(file: &File, stand_in: Option<TempPath>, path: &Path, replace: bool) -> io::Result<()> {
    if let Some(stand_in) = stand_in {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.set_permissions(permissions)?;
        return match replace {
            true => stand_in.persist(path),
            false => stand_in.persist_noclobber(path),
        }
        .map_err(|e| e.error);
    }
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |to: &Path| {
        rustix::fs::linkat(CWD, &*own, CWD, to, AtFlags::SYMLINK_FOLLOW).map_err(io::Error::from)
    };
    if !replace {
        return link(path);
    }
    // A link does not replace. A name that nothing else has comes first, and goes at once.
    let directory = tempfile::Builder::new().prefix(".larder").tempdir_in(directory_of(path))?;
    let other = directory.path().join("image");
    link(&other)?;
    std::fs::rename(&other, path)
}

/// Where the symbolic links at `path` lead. The image lies there, as for a program that opens its
/// output.
fn followed(path: &Path) -> Result<PathBuf> {
    const MOST_LINKS: usize = 40;
    let mut at = path.to_owned();
    for _ in 0..MOST_LINKS {
        match std::fs::read_link(&at) {
            Ok(target) => at = directory_of(&at).join(target),
            Err(_) => return Ok(at),
        }
    }
    Err(failed("open", path, rustix::io::Errno::LOOP.into()))
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn failed(op: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Output { op, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn an_image_has_its_name_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new.img");
        let sink = Sink::open(&Output::File { path: path.clone(), force: false }, ImageSize::Auto)
            .unwrap();
        sink.write(100, b"jam").unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
        drop(sink);
        assert_eq!(names(dir.path()), [""; 0]);
        let sink = Sink::open(&Output::File { path: path.clone(), force: false }, ImageSize::Auto)
            .unwrap();
        sink.write(100, b"jam").unwrap();
        sink.write(4095, &[0]).unwrap();
        sink.copy(Physical(0), Physical(8192), 4096).unwrap();
        sink.finish(20_000).unwrap();
        assert_eq!(names(dir.path()), ["new.img"]);
        let got = std::fs::read(&path).unwrap();
        assert_eq!(
            (got.len(), &got[100..103], &got[8292..8295]),
            (20_000, &b"jam"[..], &b"jam"[..])
        );
    }

    #[test]
    fn what_is_there_stays_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("old.img");
        std::fs::write(&path, b"old").unwrap();
        let refused =
            Sink::open(&Output::File { path: path.clone(), force: false }, ImageSize::Auto)
                .unwrap_err();
        assert!(refused.to_string().contains("--force"), "{refused}");
        let sink =
            Sink::open(&Output::File { path: path.clone(), force: true }, ImageSize::Auto).unwrap();
        sink.write(0, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        sink.finish(3).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["old.img"]);
    }

    #[test]
    fn an_image_lies_where_links_lead() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::fs::create_dir(dir.path().join("far")).unwrap();
        symlink("far/away", &link).unwrap();
        symlink("round", dir.path().join("round")).unwrap();
        for force in [false, true] {
            let output = Output::File { path: link.clone(), force };
            let sink = Sink::open(&output, ImageSize::Auto).unwrap();
            sink.write(0, b"new").unwrap();
            sink.finish(3).unwrap();
            assert_eq!(std::fs::read(dir.path().join("far/away")).unwrap(), b"new");
            assert!(link.is_symlink());
        }
        assert_eq!(names(dir.path()), ["far", "link", "round"]);
        let round = Output::File { path: dir.path().join("round"), force: false };
        assert!(Sink::open(&round, ImageSize::Auto).is_err());
        let directory = Output::File { path: dir.path().join("far"), force: false };
        let refused = Sink::open(&directory, ImageSize::Auto).unwrap_err().to_string();
        assert!(refused.contains("neither a file nor a block device"), "{refused}");
    }

    #[test]
    fn in_place_means_in_place() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let missing =
            Sink::open(&Output::InPlace { path: path.clone(), force: true }, ImageSize::Auto);
        assert!(missing.unwrap_err().to_string().contains("disk"));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let inode = std::fs::metadata(&path).unwrap().ino();
        let sink =
            Sink::open(&Output::InPlace { path: path.clone(), force: false }, ImageSize::Auto)
                .unwrap();
        assert_eq!(sink.size(), Some(1 << 20));
        sink.write(4096, &[9; 4096]).unwrap();
        sink.finish(1 << 20).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.ino(), meta.len()), (inode, 1 << 20));
        assert_eq!(std::fs::read(&path).unwrap()[4096], 9);
    }
}
