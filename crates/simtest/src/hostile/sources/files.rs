//! Where the bytes of a source are while it is read: in memory, under a path that can be opened.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use tempfile::TempDir;

/// A file without a name.
#[derive(Debug)]
pub(super) struct Held {
    _file: File,
    path: String,
}

impl Held {
    pub(super) fn new(bytes: &[u8]) -> Self {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("source", flags).expect("a file in memory");
        let mut file = File::from(fd);
        file.write_all(bytes).expect("memory");
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Self { _file: file, path }
    }

    /// The path, for as long as this is held.
    pub(super) fn path(&self) -> &str {
        &self.path
    }
}

/// A manifest in a directory of its own, beside files that it can name.
#[derive(Debug)]
pub(super) struct Beside {
    _directory: TempDir,
    path: PathBuf,
}

impl Beside {
    pub(super) fn new(text: &[u8]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("f"), b"some text").expect("a file");
        std::fs::write(at("e"), b"").expect("a file");
        std::fs::create_dir(at("d")).expect("a directory");
        std::fs::write(at("d/f"), [7; 5000]).expect("a file");
        std::os::unix::fs::symlink("d/f", at("l")).expect("a link");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, at("p"), kind, mode, 0).expect("a pipe");
        let path = at("manifest");
        std::fs::write(&path, text).expect("a manifest");
        Self { _directory: directory, path }
    }

    pub(super) fn path(&self) -> &str {
        self.path.to_str().expect("the path of a temporary directory is text")
    }
}
