//! The order of it all: choose a moment, read names, write files.
//!
//! Each subvolume is walked twice. The first walk collects names, the second meets every inode with
//! its extents beside it, in the order of the tree, and writes it at once: nothing but names is
//! kept in memory. Directories get their attributes at the end, when nothing is made in them any
//! more.
//!
//! What is lost is found by redundancy. A name whose inode never comes up is a file that is gone;
//! an inode's `nbytes` says how much its extents must add up to, a directory's size how long its
//! names are. These are held against what was found wherever part of the tree could not be read.

use crate::data::{Data, DataVerdict, PIECE};
use crate::dest::{Dest, Xattr};
use crate::error::{Error, Result};
use crate::names::{Collector, LOST_AND_FOUND, Names, TOP};
use crate::observer::{Entry, Loss, Step};
use crate::points::{self, Point, Trees, When};
use crate::reader::Reader;
use crate::tree::{Gap, Item, Tree};
use larder_format::items::inode::{S_IFDIR, S_IFREG};
use larder_format::items::{
    Compression, DirEntries, ExtentKind, ExtentRecord, FileExtent, FileType, InlineExtent,
    InodeFlags, InodeItem,
};
use larder_format::{Key, KeyType, MAX_COMPRESSED_EXTENT, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A directory of the host; it must be empty unless `force`, and then what is in the way is
    /// replaced.
    Directory {
        /// The directory, made if it is not there.
        path: PathBuf,
        /// Write into one that is not empty.
        force: bool,
    },
    /// Nowhere: everything is read and judged, nothing written.
    DryRun,
}

/// What to restore.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which moment.
    pub when: When,
    /// This subvolume and those below it; the top-level one if `None`.
    pub subvolume: Option<TreeId>,
    /// Only this path, from the top of that subvolume, and what is below it.
    pub path: Option<Vec<u8>>,
    /// Snapshots, too: each is written as a full copy.
    pub snapshots: bool,
    /// Leave files with damaged data out instead of writing what there is of them.
    pub skip_bad: bool,
    /// Where to.
    pub target: Target,
}

/// What was restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Report {
    /// Generation of the point.
    pub generation: u64,
    pub files: u64,
    pub directories: u64,
    pub symlinks: u64,
    pub special: u64,
    /// Further names of files.
    pub links: u64,
    pub subvolumes: u64,
    /// Bytes of file data.
    pub bytes: u64,
    /// Of these, without a checksum to hold them against.
    pub unverified_bytes: u64,
    /// Losses reported to the observer, nodes that are merely doubtful not included.
    pub losses: u64,
    /// Snapshots that were left out because that was asked for.
    pub snapshots_skipped: u64,
    /// Entries whose owner the destination did not take.
    pub owners_refused: u64,
    /// Extended attributes that the destination did not take.
    pub xattrs_refused: u64,
}

/// Restores what was asked for, as far as there is anything left of it.
///
/// # Errors
/// Nothing could be tried: the image is a metadata dump, the moment, the subvolume or the path is
/// not there, or the destination cannot be written. It could not be done to its end: the
/// destination is full, or the observer has had enough; then no part of a file is left behind.
/// Losses are no errors; they go to the reader's observer.
pub fn restore(reader: &Reader<'_>, request: &Request) -> Result<Report> {
    if reader.superblock().metadata_dump().is_some() {
        return Err(Error::MetadataDump);
    }
    let point = points::choose(reader, request.when)?;
    let newest = match request.when {
        When::Newest => reader.superblock().generation(),
        _ => point.generation,
    };
    let trees = Trees::open(reader, point, newest, true);
    let start = request.subvolume.unwrap_or(ObjectId::FS_TREE);
    if !trees.subvolumes.contains_key(&start) {
        return Err(Error::NotFound(format!(
            "there is no subvolume {start} in generation {}",
            point.generation
        )));
    }
    let dest = match &request.target {
        Target::Directory { path, force } => Some(Dest::open(path, *force)?),
        Target::DryRun => None,
    };
    if reader.superblock().log_root().is_some() && request.when == When::Newest {
        let text = "there is a log that was not replayed: what was synced after the last commit \
            is not restored (as long as the \
             image mounts, -o ro shows it)";
        reader.observer().note(text);
    }
    let mut job =
        Job { reader, request, trees: &trees, dest, report: Report::default(), matched: false };
    job.report.generation = point.generation.0;
    job.root_tree(&point);
    let mut queue = VecDeque::from([(start, Vec::new())]);
    let mut seen = BTreeSet::from([start]);
    loop {
        while let Some((id, prefix)) = queue.pop_front() {
            let below = job.subvolume(id, &prefix)?;
            queue.extend(below.into_iter().filter(|(id, _)| seen.insert(*id)));
        }
        if request.subvolume.is_some() || request.path.is_some() {
            break;
        }
        // What hangs nowhere any more.
        let stray = trees.subvolumes.keys().find(|id| !seen.contains(id));
        let Some(stray) = stray else { break };
        seen.insert(*stray);
        if job.wants_subvolume(*stray) {
            let prefix = [LOST_AND_FOUND, b"/subvolume-", stray.0.to_string().as_bytes()].concat();
            queue.push_back((*stray, prefix));
        }
    }
    if let Some(path) = request.path.as_ref().filter(|_| !job.matched) {
        if let Some(dest) = &job.dest {
            dest.take_back();
        }
        let (path, generation) = (String::from_utf8_lossy(path), point.generation);
        return Err(Error::NotFound(format!("there is no /{path} in generation {generation}")));
    }
    if let Some(dest) = &job.dest {
        job.report.owners_refused = dest.refused.owners;
        job.report.xattrs_refused = dest.refused.xattrs;
    }
    Ok(job.report)
}

struct Job<'a, 'o> {
    reader: &'a Reader<'o>,
    request: &'a Request,
    trees: &'a Trees,
    dest: Option<Dest>,
    report: Report,
    /// Something was at the path asked for.
    matched: bool,
}

impl<'a, 'o> Job<'a, 'o> {
    fn lose(&mut self, tree: TreeId, inode: Option<ObjectId>, path: Option<&[u8]>, what: String) {
        self.report.losses += 1;
        self.reader.observer().loss(&Loss { tree, inode, path: path.map(<[u8]>::to_vec), what });
    }

    /// Says what is missing of the root tree.
    fn root_tree(&mut self, point: &Point) {
        let trees = self.trees;
        for gap in &trees.gaps {
            if gap.salvaged == 0 && point.root.is_some() {
                self.lose(
                    ObjectId::ROOT_TREE,
                    None,
                    None,
                    format!("part of the root tree: {}", gap.why),
                );
            } else {
                self.reader
                    .observer()
                    .note(&format!("root tree: {}; {} nodes found instead", gap.why, gap.salvaged));
            }
        }
    }

    fn wants_subvolume(&mut self, id: TreeId) -> bool {
        let snapshot = self.trees.subvolumes.get(&id).is_some_and(|s| s.snapshot);
        if snapshot && !self.request.snapshots {
            self.report.snapshots_skipped += 1;
            return false;
        }
        true
    }

    /// Is this path asked for, or on the way to what is?
    fn wants(&self, path: &[u8], is_dir: bool) -> bool {
        let Some(only) = &self.request.path else { return true };
        let below = |a: &[u8], b: &[u8]| {
            b.is_empty()
                || a == b
                || a.strip_prefix(b).is_some_and(|rest| rest.first() == Some(&b'/'))
        };
        below(path, only) || is_dir && below(only, path)
    }

    /// Restores one subvolume; gives those that hang in it, with their paths.
    fn subvolume(&mut self, id: TreeId, prefix: &[u8]) -> Result<Vec<(TreeId, Vec<u8>)>> {
        let Some(tree) = self.trees.tree(id) else { return Ok(Vec::new()) };
        let (reader, observer) = (self.reader, self.reader.observer());
        let mut collector = Collector::default();
        let mut told = 0;
        let gaps = tree.walk(reader, Key::MIN, Key::MAX, &mut |item| {
            collector.item(&item);
            if collector.len() >= told + 1000 {
                told = collector.len();
                observer.progress(Step::Names, told as u64, None);
            }
            if observer.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if observer.is_over() {
            return Err(Error::Stopped);
        }
        let names = collector.finish();
        for gap in &gaps {
            self.tell_gap(id, gap);
        }
        if names.conflicts > 0 {
            observer
                .note(&format!("tree {id}: {} names have more than one inode", names.conflicts));
        }
        let (mut below, mut empty) = (Vec::new(), Vec::new());
        for (dir, name, to) in &names.mounts {
            let Some(path) = names.in_dir(*dir, name) else { continue };
            let path = join(prefix, &path);
            if !self.wants(&path, true) {
                continue;
            }
            match self.trees.subvolumes.get(to) {
                // A snapshot has the names of the subvolumes that hung in its source, but not the
                // subvolumes.
                Some(s) if s.parent.is_some_and(|p| p != id) => empty.push(path),
                Some(_) if self.wants_subvolume(*to) => below.push((*to, path)),
                Some(_) => {}
                None if self.trees.gaps.iter().any(|g| !g.complete) => {
                    self.lose(
                        *to,
                        None,
                        Some(&path),
                        "the subvolume: its root item is lost".into(),
                    );
                }
                None => empty.push(path),
            }
        }
        let csums = self.trees.tree(ObjectId::CSUM_TREE);
        if csums.is_none() {
            observer.note("there is no checksum tree: data cannot be verified");
        }
        let mut writer = Writer {
            data: Data::new(reader, csums),
            tree: id,
            prefix: prefix.to_vec(),
            names: &names,
            gaps: gaps.into_iter().filter(|g| !g.complete).collect(),
            directories: BTreeMap::new(),
            seen: BTreeSet::new(),
            current: None,
            done: 0,
            job: self,
        };
        let hanging = below.iter().map(|(_, p)| p).chain(&empty);
        writer.run(&tree, hanging)?;
        self.report.subvolumes += 1;
        Ok(below)
    }

    fn tell_gap(&mut self, id: TreeId, gap: &Gap) {
        if !self.reader.tell(gap.at) {
            return;
        }
        if !gap.complete && (gap.salvaged == 0 || gap.stale) {
            let (low, high) = (gap.low.objectid, gap.high.objectid);
            let of = match (low.0, high) {
                (0, ObjectId(u64::MAX)) => "all inodes".to_owned(),
                (_, ObjectId(u64::MAX)) => format!("inodes from {low} on"),
                (0, _) => format!("inodes up to {high}"),
                _ => format!("inodes {low} to {high}"),
            };
            let what = if gap.salvaged > 0 {
                format!("what changed last of {of}: {}; an older version is used", gap.why)
            } else if gap.low == Key::MIN && gap.high == Key::MAX {
                format!("everything: {}", gap.why)
            } else {
                format!("what the tree has on {of}, perhaps in part: {}", gap.why)
            };
            self.lose(id, None, None, what);
        } else {
            let all = if gap.complete { "all that there were" } else { "perhaps not all" };
            let note =
                format!("tree {id}: {}; {} nodes found instead, {all}", gap.why, gap.salvaged);
            self.reader.observer().note(&note);
        }
    }
}

fn join(prefix: &[u8], path: &[u8]) -> Vec<u8> {
    match (prefix, path) {
        (p, []) => p.to_vec(),
        ([], p) => p.to_vec(),
        (a, b) => [a, b"/", b].concat(),
    }
}

/// An inode whose items are coming in.
struct Current {
    ino: ObjectId,
    item: Option<InodeItem>,
    kind: FileType,
    /// Paths that are asked for, below the destination.
    paths: Vec<Vec<u8>>,
    xattrs: Vec<Xattr>,
    file: Option<File>,
    target: Option<Vec<u8>>,
    /// Bytes that extents account for.
    nbytes: u64,
    /// End of the last extent.
    end: u64,
    verdict: DataVerdict,
    /// What went wrong, beyond sectors.
    errors: Vec<String>,
    stale: bool,
}

/// Most errors that are spelt out for one file.
const MOST_ERRORS: usize = 3;

struct Writer<'a, 'j, 'o> {
    job: &'j mut Job<'a, 'o>,
    data: Data<'a, 'o>,
    tree: TreeId,
    prefix: Vec<u8>,
    names: &'j Names,
    gaps: Vec<Gap>,
    /// Attributes to be set at the end, by path.
    directories: BTreeMap<Vec<u8>, (InodeItem, Vec<Xattr>)>,
    /// Inodes that came up; only kept where something may be missing.
    seen: BTreeSet<ObjectId>,
    current: Option<Current>,
    done: u64,
}

impl Writer<'_, '_, '_> {
    /// Writes everything; `hanging` are paths that nested subvolumes, or empty directories in their
    /// stead, will have.
    fn run<'p>(&mut self, tree: &Tree, hanging: impl Iterator<Item = &'p Vec<u8>>) -> Result<()> {
        let reader = self.job.reader;
        let mut failed = None;
        let low = Key::new(TOP, KeyType(0), 0);
        let high = Key::new(ObjectId::LAST_FREE, KeyType(u8::MAX), u64::MAX);
        tree.walk(reader, low, high, &mut |item| match self.item(&item) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                failed = Some(e);
                ControlFlow::Break(())
            }
        });
        if let Some(e) = failed {
            self.leave();
            return Err(e);
        }
        if let Err(e) = self.finish().and_then(|()| self.missing()) {
            self.leave();
            return Err(e);
        }
        for path in hanging {
            if let Some(dest) = &mut self.job.dest
                && let Err(e) = dest.empty(path)
            {
                self.host(path, "a directory", e)?;
            }
        }
        // Deepest first: setting a directory's times must be the last thing that happens to it.
        let directories = std::mem::take(&mut self.directories);
        for (path, (item, xattrs)) in directories.iter().rev() {
            if let Some(dest) = &mut self.job.dest
                && let Err(e) = dest.attributes(path, item, xattrs)
            {
                self.host(path, "its attributes", e)?;
            }
        }
        Ok(())
    }

    /// There is no going on: half a file would look like a whole one, and directories that have
    /// been made get their attributes, as far as that still works.
    fn leave(&mut self) {
        let Some(dest) = &mut self.job.dest else { return };
        if let Some(begun) = self.current.take().filter(|c| c.file.is_some()) {
            let _ = dest.remove(&begun.paths[0]);
        }
        for (path, (item, xattrs)) in std::mem::take(&mut self.directories).iter().rev() {
            let _ = dest.attributes(path, item, xattrs);
        }
    }

    /// An error of the host: of this one entry, unless there is no going on.
    fn host(&mut self, path: &[u8], what: &str, error: io::Error) -> Result<()> {
        use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        if let (StorageFull | QuotaExceeded | ReadOnlyFilesystem, Some(dest)) =
            (error.kind(), &self.job.dest)
        {
            return Err(dest.fatal(path, error));
        }
        let ino = self.current.as_ref().map(|c| c.ino);
        self.job.lose(self.tree, ino, Some(path), format!("{what}: the destination says {error}"));
        Ok(())
    }

    fn item(&mut self, item: &Item<'_>) -> Result<()> {
        if self.job.reader.observer().is_over() {
            return Err(Error::Stopped);
        }
        let ino = item.key.objectid;
        if self.current.as_ref().is_none_or(|c| c.ino != ino) {
            self.finish()?;
            self.begin(ino, item);
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        current.stale |= item.stale;
        match item.key.kind {
            KeyType::XATTR_ITEM => {
                for e in DirEntries::new(item.data).map_while(std::result::Result::ok) {
                    current.xattrs.push((e.name.to_vec(), e.data.to_vec()));
                }
            }
            KeyType::EXTENT_DATA => match FileExtent::parse(item.data) {
                Ok(extent) => self.extent(item.key.offset, &extent)?,
                Err(e) => self.error(format!("extent at {}: {e}", item.key.offset)),
            },
            _ => {}
        }
        Ok(())
    }

    fn error(&mut self, what: String) {
        if let Some(c) = &mut self.current {
            if c.errors.len() < MOST_ERRORS {
                c.errors.push(what);
            } else if c.errors.len() == MOST_ERRORS {
                c.errors.push("and more".into());
            }
        }
    }

    /// Starts an inode, if it is one that is asked for.
    fn begin(&mut self, ino: ObjectId, first: &Item<'_>) {
        let known = self.names.inodes.get(&ino);
        let item = (first.key.kind == KeyType::INODE_ITEM)
            .then(|| InodeItem::parse(first.data).ok().copied())
            .flatten();
        if !self.gaps.is_empty() {
            self.seen.insert(ino);
        }
        // Deleted while it was open: it is not missed.
        if item.is_some_and(|i| i.nlink.get() == 0)
            || known.is_none_or(|k| !k.has_item && k.names.is_empty())
        {
            return;
        }
        let Some(kind) = item.and_then(|i| i.file_type().ok()).or(known.and_then(|k| k.kind))
        else {
            return;
        };
        let is_dir = kind == FileType::Directory;
        let all = self.names.paths(ino).into_iter().map(|p| join(&self.prefix, &p));
        let mut paths: Vec<Vec<u8>> = all.filter(|p| self.job.wants(p, is_dir)).collect();
        if is_dir {
            paths.truncate(1);
        }
        if paths.is_empty() {
            return;
        }
        self.job.matched |=
            paths.iter().any(|p| self.job.request.path.as_ref().is_none_or(|o| p.starts_with(o)));
        self.current = Some(Current {
            ino,
            item,
            kind,
            paths,
            xattrs: Vec::new(),
            file: None,
            target: None,
            nbytes: 0,
            end: 0,
            verdict: DataVerdict::default(),
            errors: Vec::new(),
            stale: false,
        });
    }

    /// The file being written, made when its first byte comes.
    fn open(&mut self) -> io::Result<Option<&File>> {
        let Some(dest) = &mut self.job.dest else { return Ok(None) };
        let Some(current) = &mut self.current else { return Ok(None) };
        if current.file.is_none() {
            current.file = Some(dest.file(&current.paths[0])?);
        }
        Ok(current.file.as_ref())
    }

    /// Writes bytes of the current file, as far as they lie within its size.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let size = self.current.as_ref().and_then(|c| c.item).map_or(u64::MAX, |i| i.size.get());
        let len = usize::try_from(size.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
        if len == 0 {
            return Ok(());
        }
        self.job.report.bytes += len as u64;
        match self.open()? {
            Some(file) => file.write_all_at(&bytes[..len], at),
            None => Ok(()),
        }
    }

    fn extent(&mut self, at: u64, extent: &FileExtent<'_>) -> Result<()> {
        let Some(current) = &mut self.current else { return Ok(()) };
        current.end = current.end.max(at.saturating_add(extent.len()));
        let hole = matches!(extent, FileExtent::Stored(r) if r.is_hole());
        if !hole {
            current.nbytes = current.nbytes.saturating_add(extent.len());
        }
        match (current.kind, extent) {
            (FileType::Symlink, FileExtent::Inline(inline)) => match unpack_inline(inline) {
                Ok(target) => current.target = Some(target),
                Err(e) => self.error(e),
            },
            (FileType::Regular, FileExtent::Inline(inline)) => match unpack_inline(inline) {
                Ok(bytes) => self.put(at, &bytes)?,
                Err(e) => self.error(e),
            },
            (FileType::Regular, FileExtent::Stored(record)) => self.stored(at, record)?,
            _ => {}
        }
        Ok(())
    }

    /// Writes, and takes an error of the host for what it is.
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        if let Err(e) = self.write(at, bytes) {
            let path = self.current.as_ref().map(|c| c.paths[0].clone()).unwrap_or_default();
            self.host(&path, "its content", e)?;
            // Once is enough.
            self.current = None;
        }
        Ok(())
    }

    fn stored(&mut self, at: u64, record: &ExtentRecord) -> Result<()> {
        if record.is_hole() || record.kind == ExtentKind::Prealloc {
            return Ok(());
        }
        let item = self.current.as_ref().and_then(|c| c.item);
        let nodatasum = item.is_some_and(|i| i.inode_flags().contains(InodeFlags::NODATASUM));
        if record.compression != Compression::None {
            match self.data.unpack(record, !nodatasum) {
                Ok((bytes, verdict)) => {
                    self.judge(verdict);
                    self.put(at, &bytes)?;
                }
                Err(e) => self.error(format!(
                    "bytes {at} to {}: {e}",
                    at.saturating_add(record.num_bytes) - 1
                )),
            }
            return Ok(());
        }
        // What lies beyond the size is of no interest, however long the extent claims to be.
        let size = item.map_or(u64::MAX, |i| i.size.get()).next_multiple_of_sector();
        let len = record.num_bytes.min(size.saturating_sub(at));
        let mut buf = Vec::new();
        let mut done = 0;
        while done < len && self.current.is_some() {
            let n = PIECE.min(len - done);
            buf.resize(usize::try_from(n).unwrap_or(0), 0);
            let from = record.disk_bytenr.plus(record.offset + done);
            if self.job.reader.volume().copies(from).is_err() {
                let why = format!(
                    "bytes {} to {}: address {from} is in no known chunk",
                    at + done,
                    at + len - 1
                );
                self.error(why);
                self.judge(DataVerdict { unreadable: len - done, ..DataVerdict::default() });
                break;
            }
            let verdict = self.data.read(from, &mut buf, !nodatasum);
            self.judge(verdict);
            if verdict.unreadable < n {
                self.put(at + done, &buf)?;
            }
            done += n;
        }
        Ok(())
    }

    fn judge(&mut self, verdict: DataVerdict) {
        self.job.report.unverified_bytes += verdict.unverified;
        if let Some(c) = &mut self.current {
            c.verdict.add(verdict);
        }
    }

    /// Ends the current inode: everything of it has come.
    fn finish(&mut self) -> Result<()> {
        let observer = self.job.reader.observer();
        self.done += 1;
        if self.done.is_multiple_of(256) {
            let all = self.names.inodes.len() as u64;
            observer.progress(Step::Files, self.done, Some(all));
        }
        if self.current.is_none() {
            return Ok(());
        }
        if self.current.as_ref().is_some_and(|c| c.kind == FileType::Regular)
            && let Err(e) = self.open().map(|_| ())
        {
            let path = self.current.as_ref().map(|c| c.paths[0].clone()).unwrap_or_default();
            self.host(&path, "the file", e)?;
            self.current = None;
        }
        let Some(mut c) = self.current.take() else { return Ok(()) };
        let path = c.paths[0].clone();
        self.complain(&mut c);
        let bad = c.verdict.is_bad() || !c.errors.is_empty();
        if !c.errors.is_empty() || c.verdict.is_bad() {
            let skipped = self.job.request.skip_bad && c.kind == FileType::Regular;
            let what = describe(&c, skipped);
            self.job.lose(self.tree, Some(c.ino), Some(&path), what);
        }
        let item = c.item.unwrap_or_else(|| InodeItem {
            mode: (if c.kind == FileType::Directory { S_IFDIR | 0o700 } else { S_IFREG | 0o600 })
                .into(),
            size: c.end.into(),
            ..InodeItem::default()
        });
        let skip = bad && self.job.request.skip_bad && c.kind == FileType::Regular;
        let made = self.make(&c, &item, skip);
        if let Err(e) = made {
            self.host(&path, "it", e)?;
            return Ok(());
        }
        if !skip {
            let (tree, inode, mode, size) = (self.tree, c.ino, item.mode.get(), item.size.get());
            observer.entry(Entry { tree, inode, path: &path, mode, size });
            self.count(&c);
        }
        Ok(())
    }

    /// Finds out what an inode lacks that did not come up as an error.
    fn complain(&mut self, c: &mut Current) {
        let Some(item) = c.item else {
            c.errors.push(
                "its inode item is lost: size, owner, permissions and times are made up".into(),
            );
            return;
        };
        if c.stale {
            c.errors.push("part of it comes from an older version of the tree".into());
        }
        let gap = || {
            let (low, high) =
                (Key::new(c.ino, KeyType(0), 0), Key::new(c.ino, KeyType(u8::MAX), u64::MAX));
            self.gaps.iter().any(|g| g.low <= high && g.high >= low)
        };
        match c.kind {
            FileType::Regular if c.nbytes != item.nbytes.get() && gap() => {
                c.errors.push(format!(
                    "extents are missing: {} bytes of {} are there",
                    c.nbytes, item.nbytes
                ));
            }
            FileType::Directory if gap() => {
                let names = self.names.inodes.get(&c.ino).map_or(0, |i| i.name_bytes);
                if names.saturating_mul(2) < item.size.get() {
                    c.errors.push("some of its entries are lost".into());
                }
            }
            FileType::Symlink if c.target.is_none() => c.errors.push("its target is lost".into()),
            _ => {}
        }
    }

    /// Makes the entry, or finishes the file, and gives it its attributes and further names.
    fn make(&mut self, c: &Current, item: &InodeItem, skip: bool) -> io::Result<()> {
        let Some(dest) = &mut self.job.dest else { return Ok(()) };
        let path = &c.paths[0];
        match c.kind {
            FileType::Directory => {
                dest.directory(path)?;
                self.directories.insert(path.clone(), (*item, c.xattrs.clone()));
                return Ok(());
            }
            FileType::Regular if skip => return dest.remove(path),
            FileType::Regular => {
                if let Some(file) = &c.file {
                    file.set_len(item.size.get())?;
                }
            }
            FileType::Symlink => match &c.target {
                Some(target) => dest.symlink(path, target)?,
                None => return Ok(()),
            },
            kind => dest.special(path, kind, item.rdev.get())?,
        }
        dest.attributes(path, item, &c.xattrs)?;
        for other in &c.paths[1..] {
            dest.link(path, other)?;
        }
        Ok(())
    }

    fn count(&mut self, c: &Current) {
        let report = &mut self.job.report;
        match c.kind {
            FileType::Directory => report.directories += 1,
            FileType::Regular => report.files += 1,
            FileType::Symlink => report.symlinks += 1,
            _ => report.special += 1,
        }
        report.links += c.paths.len() as u64 - 1;
    }

    /// Names whose inode never came up.
    fn missing(&mut self) -> Result<()> {
        if self.gaps.is_empty() {
            return Ok(());
        }
        let mut gone: Vec<ObjectId> =
            self.names.inodes.keys().copied().filter(|i| !self.seen.contains(i)).collect();
        gone.sort_unstable();
        for ino in gone {
            let inode = &self.names.inodes[&ino];
            let is_dir = inode.kind == Some(FileType::Directory);
            let Some((dir, name)) = inode.names.first() else { continue };
            let Some(path) = self.names.in_dir(*dir, name).map(|p| join(&self.prefix, &p)) else {
                continue;
            };
            if !self.job.wants(&path, is_dir) {
                continue;
            }
            self.job.matched = true;
            self.job.lose(self.tree, Some(ino), Some(&path), "all but its name".into());
        }
        Ok(())
    }
}

fn describe(c: &Current, skipped: bool) -> String {
    let mut parts = c.errors.clone();
    if c.verdict.wrong > 0 {
        parts.push(format!("{} bytes have a wrong checksum", c.verdict.wrong));
    }
    if c.verdict.unreadable > 0 {
        parts.push(format!("{} bytes cannot be read", c.verdict.unreadable));
    }
    if skipped {
        parts.push("left out".into());
    }
    parts.join("; ")
}

fn unpack_inline(inline: &InlineExtent<'_>) -> std::result::Result<Vec<u8>, String> {
    if inline.compression == Compression::None {
        return Ok(inline.data.to_vec());
    }
    let len = usize::try_from(inline.ram_bytes.min(MAX_COMPRESSED_EXTENT)).unwrap_or(0);
    let mut out = vec![0; len];
    larder_codec::decompress(inline.compression, inline.data, &mut out)
        .map_err(|e| format!("its inline data: {e}"))?;
    Ok(out)
}

trait Sectors {
    fn next_multiple_of_sector(self) -> Self;
}

impl Sectors for u64 {
    fn next_multiple_of_sector(self) -> Self {
        self.checked_next_multiple_of(4096).unwrap_or(Self::MAX)
    }
}
