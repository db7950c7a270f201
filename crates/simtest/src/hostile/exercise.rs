//! What a victim does with a hostile image: it mounts the image, reads everything, mounts it for
//! writing, changes things ([`changes`](super::changes)), and reads again.
//!
//! Some scripts pack new data; others give the changed image to the checker or to restoring. Each
//! call to the engine is one request under the [`limits`]. Answers are not judged, since a hostile
//! image may say anything, and errors are as good as data. Checked is that the engine returns, that
//! it stays within its limits, that `readdir` goes forward, and that `read` fills what it says it
//! fills.
//!
//! The number of requests is bounded here, because the image decides how much there seems to be:
//! directories may contain themselves, and files may be as long as a number can say.

use super::device::HostileDevice;
use super::limits::{self, HEAP};
use super::survey::Survey;
use super::tools;
use crate::image::Image;
use larder_codec::Packing;
use larder_fs::{Attr, Compress, Error, FileKind, Filesystem, InodeId, OpenOptions, Seek, Tuning};
use std::collections::HashSet;
use std::sync::Arc;

/// Memory that the engine may use for its caches.
const CACHE: usize = 16 << 20;
/// Inodes that one walk looks at.
const INODES: usize = 400;
/// Entries of one directory that a walk looks at.
const ENTRIES: usize = 400;
/// Bytes that one walk reads.
const BYTES: usize = 6 << 20;
/// Bytes of one read.
const PIECE: usize = 128 << 10;

/// What came of it; for tests that want to know that something happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Outcome {
    /// Could be opened for reading, for writing.
    pub opened: bool,
    pub writable: bool,
    /// Inodes seen and bytes read by the first walk.
    pub inodes: usize,
    pub bytes: usize,
    /// Requests that worked, and that failed.
    pub done: usize,
    pub failed: usize,
    /// What failed first, in each of the two mounts.
    pub first_error: [Option<String>; 2],
}

/// Attacks with an image. `script` and `variant` vary what is asked.
pub fn exercise(image: &Image, script: u8, variant: u8) -> Outcome {
    let mut victim = Victim {
        device: Arc::new(HostileDevice::new(image.clone())),
        outcome: Outcome::default(),
        mount: 0,
        base: limits::live(),
        bytes: 0,
        script,
        variant,
    };
    if let Some(fs) = victim.open(true) {
        victim.outcome.opened = true;
        let seen = victim.walk(&fs);
        victim.outcome.inodes = seen.len();
        victim.outcome.bytes = victim.bytes;
        victim.close(fs);
    }
    victim.mount = 1;
    if let Some(fs) = victim.open(false) {
        victim.outcome.writable = true;
        let seen = if script & 1 == 0 { victim.walk(&fs) } else { victim.list(&fs) };
        victim.change(&fs, &seen);
        victim.close(fs);
        // What was made of the image must be as harmless.
        if script & 2 == 0
            && let Some(fs) = victim.open(true)
        {
            victim.walk(&fs);
            victim.close(fs);
        }
        // And as harmless to the tools.
        match script & 0x30 {
            0x10 => drop(tools::check(&victim.device.image(), script)),
            0x20 => drop(tools::salvage(&victim.device.image(), script)),
            _ => {}
        }
    }
    victim.outcome
}

/// As [`exercise`], on a seed as it is.
#[must_use]
pub fn exercise_seed(seed: &Survey) -> Outcome {
    exercise(&seed.image, 0, 0)
}

pub(super) struct Victim {
    device: Arc<HostileDevice>,
    outcome: Outcome,
    mount: usize,
    /// Bytes on the heap before.
    base: usize,
    bytes: usize,
    pub(super) script: u8,
    pub(super) variant: u8,
}

impl Victim {
    /// One request: under the limits, counted, its error remembered.
    pub(super) fn ask<T>(
        &mut self,
        what: &'static str,
        request: impl FnOnce() -> Result<T, Error>,
    ) -> Option<T> {
        self.device.begin();
        limits::reset_peak();
        let answer = limits::timed(what, request);
        // What the disk was told to keep lies in this process's memory, too: twice while it is
        // being copied.
        let allowed = self.base + CACHE + HEAP + 2 * self.device.written() as usize;
        let peak = limits::peak();
        assert!(peak <= allowed, "hostile: {what} took {} MiB of memory", (peak - self.base) >> 20);
        match answer {
            Ok(value) => {
                self.outcome.done += 1;
                Some(value)
            }
            Err(e) => {
                self.outcome.failed += 1;
                self.outcome.first_error[self.mount].get_or_insert_with(|| format!("{what}: {e}"));
                None
            }
        }
    }

    fn open(&mut self, read_only: bool) -> Option<Arc<Filesystem>> {
        let pack = |text: &str, force| {
            text.parse::<Packing>().ok().map(|packing| Compress { packing, force })
        };
        let compress = match self.script >> 6 {
            _ if read_only => None,
            1 => pack("zstd", true),
            2 => pack("lzo", true),
            3 => pack("zlib", false),
            _ => None,
        };
        let variant = self.variant;
        let options = |no_log_replay| OpenOptions {
            compress,
            read_only,
            no_log_replay,
            cache_size: CACHE as u64,
            commit_interval: None,
            discard: variant & 1 != 0,
            no_data_cow: variant & 6 == 6,
            no_data_sum: variant & 6 == 2,
            max_inline: if variant & 6 == 4 { 0 } else { OpenOptions::default().max_inline },
            tuning: Tuning { fake_clock: true, ..Tuning::default() },
            ..OpenOptions::default()
        };
        let device = self.device.clone();
        let fs = self.ask("open", || Filesystem::open(device, options(false)));
        if fs.is_some() || !read_only {
            return fs;
        }
        let device = self.device.clone();
        self.ask("open without the log", || Filesystem::open(device, options(true)))
    }

    fn close(&mut self, fs: Arc<Filesystem>) {
        self.ask("close", || fs.close());
        self.ask("drop", || {
            drop(fs);
            Ok(())
        });
    }

    /// Looks at everything that can be reached, until enough was seen. Gives back what it met:
    /// attributes, and where.
    fn walk(&mut self, fs: &Filesystem) -> Vec<Found> {
        self.bytes = 0;
        let seen = self.list(fs);
        self.ask("statfs", || fs.statfs());
        let _ = (fs.info(), fs.stats(), fs.space_usage());
        for subvol in self.ask("subvolumes", || fs.subvolumes()).unwrap_or_default().iter().take(20)
        {
            self.ask("path of a subvolume", || fs.subvolume_path(subvol.id));
        }
        self.ask("default subvolume", || fs.default_subvolume());
        for found in &seen {
            self.look(fs, found);
        }
        seen
    }

    /// Finds inodes by reading directories.
    fn list(&mut self, fs: &Filesystem) -> Vec<Found> {
        let Some(root) = self.ask("getattr", || fs.getattr(fs.root())) else { return Vec::new() };
        let mut known = HashSet::from([root.id]);
        let mut seen = vec![Found { attr: root, dir: fs.root(), name: b".".to_vec() }];
        let mut next = 0;
        while let Some(dir) = seen.get(next).map(|f| f.attr.clone()) {
            next += 1;
            if dir.kind != FileKind::Directory {
                continue;
            }
            for name in self.names(fs, dir.id) {
                let Some(attr) = self.ask("lookup", || fs.lookup(dir.id, &name)) else { continue };
                if seen.len() < INODES && known.insert(attr.id) {
                    seen.push(Found { attr, dir: dir.id, name });
                }
            }
        }
        seen
    }

    fn names(&mut self, fs: &Filesystem, dir: InodeId) -> Vec<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut from = 0;
        // Some at a time, as front ends do.
        loop {
            let (before, mut position) = (names.len(), from);
            let more = self.ask("readdir", || {
                fs.readdir(dir, from, &mut |e| {
                    assert!(
                        e.next > position,
                        "hostile: readdir goes from {position} to {}",
                        e.next
                    );
                    position = e.next;
                    names.push(e.name.to_vec());
                    names.len() - before < 37
                })
            });
            if more.is_none() || names.len() == before || names.len() > ENTRIES {
                break;
            }
            from = position;
        }
        names.retain(|n| n != b"." && n != b"..");
        names
    }

    fn look(&mut self, fs: &Filesystem, found: &Found) {
        let id = found.attr.id;
        self.ask("getattr", || fs.getattr(id));
        for name in self.ask("listxattr", || fs.listxattr(id)).unwrap_or_default().iter().take(20) {
            self.ask("getxattr", || fs.getxattr(id, name));
        }
        match found.attr.kind {
            FileKind::Symlink => drop(self.ask("readlink", || fs.readlink(id))),
            FileKind::Regular => {
                self.read(fs, id, found.attr.size);
                let (mut end, mut seen) = (0, 0);
                self.ask("map of extents", || {
                    fs.map_extents(id, 0, &mut |e| {
                        assert!(e.start >= end, "hostile: the map goes from {end} to {}", e.start);
                        (end, seen) = (e.start + e.len, seen + 1);
                        seen < ENTRIES
                    })
                });
            }
            FileKind::Directory => {
                self.ask("lookup of the parent", || fs.lookup(id, b".."));
                self.ask("path of a directory", || fs.path_in_subvolume(id));
            }
            _ => {}
        }
    }

    fn read(&mut self, fs: &Filesystem, id: InodeId, size: u64) {
        let mut at = 0;
        for _ in 0..24 {
            let Some(Some(data)) = self.ask("seek to data", || fs.seek(id, at, Seek::Data)) else {
                break;
            };
            assert!(data >= at, "hostile: seek goes from {at} to {data}");
            let hole = self.ask("seek to a hole", || fs.seek(id, data, Seek::Hole)).flatten();
            assert!(hole.is_none_or(|h| h >= data), "hostile: seek goes from {data} to {hole:?}");
            let Some(end) = hole else { break };
            self.read_at(fs, (id, size), data);
            if end <= at {
                break;
            }
            at = end;
        }
        for at in
            [0, 1, size.saturating_sub(5000), size / 2 + 1, size, u64::MAX - 100, i64::MAX as u64]
        {
            self.read_at(fs, (id, size), at);
        }
    }

    /// Reads a piece of a file of this size.
    fn read_at(&mut self, fs: &Filesystem, (id, size): (InodeId, u64), at: u64) {
        if self.bytes > BYTES {
            return;
        }
        let mut buf = vec![0x5a; PIECE];
        if let Some(n) = self.ask("read", || fs.read(id, at, &mut buf)) {
            assert!(
                n <= buf.len() && n as u64 <= size.saturating_sub(at),
                "hostile: read {n} bytes at {at} of {size}"
            );
            self.bytes += n;
        }
    }
}

/// An inode that a walk met, and one of its names.
pub(super) struct Found {
    pub(super) attr: Attr,
    pub(super) dir: InodeId,
    pub(super) name: Vec<u8>,
}
