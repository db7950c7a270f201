//! Trees in memory as sources, and the judges of what is built from them.

#![allow(dead_code)]

use larder_build::{BoxError, BuildOptions, Output, Place, Report, Silent, TreeInput, build};
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::oracle::{KernelMount, Need, btrfs_check, need};
use larder_sources::TreePath;
use larder_sources::{Attributes, Contents, Entry, Kind, LinkGroup, Locator, SourceNumber, Time};
use larder_volume::{FileDevice, OpenMode};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub(crate) const TIME: i64 = 1_700_000_000;

/// The contents of one file: parts that are not holes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data(pub(crate) Vec<(u64, Vec<u8>)>);

impl Data {
    pub(crate) fn whole(bytes: Vec<u8>) -> Self {
        Self(vec![(0, bytes)])
    }
}

struct Reading {
    data: Data,
    size: u64,
}

impl Contents for Reading {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        Ok(self.data.0.iter().map(|(at, d)| *at..at + d.len() as u64).collect())
    }
    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        if end > self.size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buf.fill(0);
        for (at, d) in &self.data.0 {
            let (from, to) = (offset.max(*at), end.min(at + d.len() as u64));
            if from < to {
                buf[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&d[(from - at) as usize..(to - at) as usize]);
            }
        }
        Ok(())
    }
}

/// A tree and the contents of its files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    pub(crate) entries: BTreeMap<TreePath, Entry>,
    pub(crate) contents: BTreeMap<Vec<u8>, (u64, Data)>,
}

pub(crate) fn path(text: impl AsRef<[u8]>) -> TreePath {
    TreePath::new(text.as_ref()).unwrap()
}

pub(crate) fn attributes(permissions: u32) -> Attributes {
    let modified = Time { seconds: TIME, nanoseconds: 123_456_789 };
    Attributes { uid: 1000, gid: 100, permissions, modified, ..Attributes::default() }
}

impl Source {
    pub(crate) fn new() -> Self {
        let mut source = Self::default();
        source.add("", Kind::Directory, 0o755);
        source
    }

    pub(crate) fn add(&mut self, at: impl AsRef<[u8]>, kind: Kind, permissions: u32) -> &mut Entry {
        let path = path(at);
        let entry =
            Entry { path: path.clone(), attributes: attributes(permissions), kind, links: None };
        self.entries.insert(path.clone(), entry);
        self.entries.get_mut(&path).unwrap()
    }

    pub(crate) fn dir(&mut self, at: impl AsRef<[u8]>) -> &mut Entry {
        self.add(at, Kind::Directory, 0o755)
    }

    pub(crate) fn file(&mut self, at: impl AsRef<[u8]>, data: impl Into<Vec<u8>>) -> &mut Entry {
        let data = data.into();
        let size = data.len() as u64;
        self.sparse(at, size, Data::whole(data))
    }

    pub(crate) fn sparse(&mut self, at: impl AsRef<[u8]>, size: u64, data: Data) -> &mut Entry {
        let key = at.as_ref().to_vec();
        self.contents.insert(key.clone(), (size, data));
        let locator = Locator { source: SourceNumber(0), key };
        let contents = Some(locator).filter(|_| size > 0);
        self.add(at, Kind::File { size, contents }, 0o644)
    }

    pub(crate) fn link(&mut self, at: impl AsRef<[u8]>, to: impl AsRef<[u8]>, group: u64) {
        let first = self.entries.get_mut(&path(to)).unwrap();
        first.links = Some(LinkGroup(group));
        let mut entry = first.clone();
        entry.path = path(at);
        self.entries.insert(entry.path.clone(), entry);
    }

    pub(crate) fn open(&self, locator: &Locator) -> Result<Box<dyn Contents>, BoxError> {
        let (size, data) = self.contents.get(&locator.key).ok_or("no such contents")?;
        Ok(Box::new(Reading { data: data.clone(), size: *size }))
    }

    pub(crate) fn stream(&self) -> Box<dyn Iterator<Item = Result<Entry, BoxError>> + '_> {
        Box::new(self.entries.values().cloned().map(Ok))
    }

    pub(crate) fn top(&self) -> TreeInput<'_> {
        TreeInput {
            place: Place::Top,
            read_only: false,
            default: false,
            snapshot_of: None,
            inner: Vec::new(),
            entries: self.stream(),
        }
    }

    pub(crate) fn build(
        &self,
        image: &Path,
        options: &BuildOptions,
    ) -> larder_build::Result<Report> {
        let output = Output::File { path: image.to_owned(), force: true };
        build(&output, vec![self.top()], &|l| self.open(l), options, &Silent)
    }
}

pub(crate) fn options() -> BuildOptions {
    let time = Some(larder_fs::Timestamp { sec: TIME, nsec: 0 });
    BuildOptions { uuid: Some([0x42; 16]), time, ..BuildOptions::default() }
}

/// Noise that does not compress.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len.div_ceil(8))
        .flat_map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            s.to_le_bytes()
        })
        .take(len)
        .collect()
}

/// Text that does.
pub(crate) fn text(len: usize, seed: u64) -> Vec<u8> {
    (0..).flat_map(|n: u64| format!("line {} of {seed}\n", n / 3).into_bytes()).take(len).collect()
}

/// Both checkers.
pub(crate) fn assert_sound(image: &Path, what: &str) {
    let device = FileDevice::open(image, OpenMode::Read).unwrap();
    let options = larder_check::Options { data: true, ..larder_check::Options::default() };
    let report = larder_check::check(&[Arc::new(device)], &options, &|_| {}).unwrap();
    assert!(report.findings.is_empty(), "{what}: {:#?}", report.findings);
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean(what);
    }
}

/// The engine opens it, changes it, and it is sound after that.
pub(crate) fn assert_engine_agrees(image: &Path, what: &str) {
    let device = Arc::new(FileDevice::open(image, OpenMode::Write).unwrap());
    let fs = Filesystem::open(device, OpenOptions::default()).unwrap();
    let (kind, perm, uid, gid) = (FileKind::Regular, 0o644, 0, 0);
    let new = NewInode { kind, perm, uid, gid, rdev: 0, target: b"", xattrs: &[] };
    let file = fs.create(fs.root(), b"made by larder", &new).unwrap().id;
    fs.write(file, 0, &noise(300_000, 5)).unwrap();
    fs.snapshot(fs.root().subvol, fs.root(), b"snapshot", true).unwrap();
    fs.write(file, 5000, b"changed").unwrap();
    fs.unlink(fs.root(), b"made by larder").unwrap();
    fs.close().unwrap();
    drop(fs);
    assert_sound(image, &format!("{what}, changed by the engine"));
}

/// Linux mounts it, agrees with the source, changes it, and it is sound after that.
pub(crate) fn assert_linux_agrees(image: &Path, sources: &[(&str, &Source)], what: &str) {
    if !need(&[Need::KernelBtrfs]) {
        return;
    }
    let mount = KernelMount::image(image, "").unwrap();
    for (below, source) in sources {
        compare(&mount.join(below), source, what);
    }
    std::fs::write(mount.join("written by linux"), noise(300_000, 77)).unwrap();
    std::fs::create_dir(mount.join("made by linux")).unwrap();
    mount.sync().unwrap();
    mount.unmount_clean().unwrap();
    assert_sound(image, &format!("{what}, changed by Linux"));
}

/// Is the tree below `top` that of the source?
pub(crate) fn compare(top: &Path, source: &Source, what: &str) {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let mut inodes: BTreeMap<LinkGroup, u64> = BTreeMap::new();
    let mut seen = 0;
    for entry in source.entries.values() {
        let at = top.join(std::ffi::OsStr::from_bytes(entry.path.as_bytes()));
        let meta = std::fs::symlink_metadata(&at)
            .unwrap_or_else(|e| panic!("{what}: {}: {e}", at.display()));
        let what = format!("{what}: {}", at.display());
        let a = &entry.attributes;
        assert_eq!(meta.mode() & 0o7777, a.permissions, "{what}");
        assert_eq!((meta.uid(), meta.gid()), (a.uid, a.gid), "{what}");
        let mtime = (meta.mtime(), meta.mtime_nsec());
        assert_eq!(mtime, (a.modified.seconds, i64::from(a.modified.nanoseconds)), "{what}");
        let t = meta.file_type();
        match &entry.kind {
            Kind::Directory => {
                assert!(t.is_dir(), "{what}");
                seen += std::fs::read_dir(&at).unwrap().count();
            }
            Kind::File { size, contents } => {
                assert!(t.is_file() && meta.len() == *size, "{what}: {} bytes", meta.len());
                if let Some(locator) = contents {
                    assert_contents(&at, *size, &source.contents[&locator.key].1, &what);
                }
            }
            Kind::Symlink(target) => {
                assert_eq!(std::fs::read_link(&at).unwrap().as_os_str().as_bytes(), target);
            }
            Kind::CharDevice { major, minor } => {
                assert!(t.is_char_device(), "{what}");
                assert_eq!(meta.rdev(), rustix::fs::makedev(*major, *minor), "{what}");
            }
            Kind::BlockDevice { major, minor } => {
                assert!(t.is_block_device(), "{what}");
                assert_eq!(meta.rdev(), rustix::fs::makedev(*major, *minor), "{what}");
            }
            Kind::Fifo => assert!(t.is_fifo(), "{what}"),
            Kind::Socket => assert!(t.is_socket(), "{what}"),
        }
        if let Some(group) = entry.links {
            let names = source.entries.values().filter(|e| e.links == Some(group)).count() as u64;
            assert_eq!(meta.nlink(), names, "{what}");
            assert_eq!(*inodes.entry(group).or_insert(meta.ino()), meta.ino(), "{what}");
        }
        for (name, value) in &a.xattrs {
            let mut got = vec![0; value.len() + 1];
            let name = std::ffi::OsStr::from_bytes(name);
            let n = rustix::fs::lgetxattr(&at, name, &mut got[..]).unwrap();
            assert_eq!(&got[..n], &value[..], "{what}: {}", name.display());
        }
    }
    assert_eq!(seen + 1, source.entries.len(), "{what}: names");
}

/// Reads a file's data parts and, sparsely, its holes.
fn assert_contents(at: &Path, size: u64, data: &Data, what: &str) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(at).unwrap();
    let mut end = 0;
    let zeros = |from: u64, to: u64| {
        for at in [from, (from + to) / 2, to.saturating_sub(4096).max(from)] {
            let mut buf = vec![1; (to - at).min(4096) as usize];
            file.read_exact_at(&mut buf, at).unwrap();
            assert!(buf.iter().all(|b| *b == 0), "{what}: a hole at {at}");
        }
    };
    for (from, want) in &data.0 {
        zeros(end, *from);
        let mut buf = vec![0; want.len()];
        file.read_exact_at(&mut buf, *from).unwrap();
        assert!(buf == *want, "{what}: data at {from}");
        end = from + want.len() as u64;
    }
    zeros(end, size);
}
