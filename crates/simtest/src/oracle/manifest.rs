//! When are two trees the same?
//!
//! A [`Manifest`] is everything a program can see of a tree, in one map sorted by path. What must
//! agree depends on how the trees are related, and that is the decision held here, in [`Aspects`]:
//! a *copy* has the same names, types, modes, owners, mtimes, sizes, contents, attributes and link
//! structure; two readers of the *same image* must agree on all the rest too: inode numbers, all
//! times, allocated bytes, and where the holes are.
//!
//! Contents are digested by non-zero 4 KiB blocks with their offsets. So a hole, a preallocated
//! range and written zeros are equal (they read equal), and a file of nearly 2^63 bytes costs no
//! more than its data.

use super::std_tree::StdTree;
use super::tree::{Facts, Kind, Time, TreeSource};
use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

const BLOCK: u64 = 4096;
/// Refuses to read more data than this from one file: a source without holes would be read for
/// years.
const MOST_DATA: u64 = 1 << 40;

/// What an entry holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Directory or special file: nothing.
    None,
    /// Target of a symlink.
    Target(Vec<u8>),
    /// Digest of a regular file's data.
    Data([u8; 32]),
}

/// One entry of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What `stat` says.
    pub facts: Facts,
    /// For a file with several names: the first path, in sorted order, that leads to it.
    pub same_as: Option<Vec<u8>>,
    /// Target or digest.
    pub content: Content,
    /// Runs of data as (start, end), as SEEK_DATA and SEEK_HOLE show them.
    pub data_map: Vec<(u64, u64)>,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Every entry of a tree by its path from the top; the top itself is the empty path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The entries.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

/// What has to agree beyond names, types, modes, owners, mtimes, sizes, contents, xattrs, device
/// numbers, targets and link structure, which always have to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Aspects {
    pub atime: bool,
    pub ctime: bool,
    pub btime: bool,
    pub inode_numbers: bool,
    pub allocated: bool,
    pub data_map: bool,
    /// Size and link count of directories, which each file system chooses for itself.
    pub directory_size: bool,
    /// Do not compare the mtime of the top directory, which making or mounting a copy may touch.
    pub ignore_top_mtime: bool,
    /// Both sides have replayed a log, since this moment: what lost or won a name by that has a
    /// time of its own on each, and so have all directories.
    pub replayed_since: Option<Time>,
}

impl Aspects {
    /// One tree is a faithful copy of the other (`cp -a`, `tar`).
    #[must_use]
    pub fn copy() -> Self {
        Self::default()
    }

    /// Both are the same image seen by two readers. `atime` is left out unless both read without
    /// touching it.
    #[must_use]
    pub fn same_image() -> Self {
        Self {
            atime: false,
            ctime: true,
            btime: true,
            inode_numbers: true,
            allocated: true,
            data_map: true,
            directory_size: true,
            ignore_top_mtime: false,
            replayed_since: None,
        }
    }

    /// Both are replays of one log, by two readers. Replay itself removes names at times of its own
    /// ([`Manifest::without_times_of_directories`]); all other times are the log's.
    #[must_use]
    pub fn replayed() -> Self {
        Self { ctime: false, ignore_top_mtime: true, ..Self::same_image() }
    }
}

/// One way in which two trees differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Path from the top.
    pub path: Vec<u8>,
    /// What differs, with both values.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}: {}", self.path.escape_ascii(), self.what)
    }
}

/// Reads the whole tree.
///
/// # Errors
/// Anything in it cannot be read; the error names the path.
pub fn manifest<S: TreeSource>(source: &S) -> Result<Manifest> {
    Ok(collect(source)?.0)
}

/// Compares two trees of any origin. Empty where they agree.
///
/// # Errors
/// Anything in either cannot be read.
pub fn compare_sources<A: TreeSource, B: TreeSource>(
    a: &A,
    b: &B,
    aspects: Aspects,
) -> Result<Vec<Difference>> {
    let (left, left_ids) = collect(a).context("the first tree")?;
    let (right, right_ids) = collect(b).context("the second tree")?;
    let mut found = left.differences(&right, aspects);
    for difference in found.iter_mut().filter(|d| d.what == CONTENTS_DIFFER) {
        let ids = (left_ids.get(&difference.path), right_ids.get(&difference.path));
        if let (Some(ia), Some(ib)) = ids
            && let Some(offset) = first_difference(a, ia, b, ib)?
        {
            difference.what = format!("{CONTENTS_DIFFER} from byte {offset} on");
        }
    }
    Ok(found)
}

/// Compares two directories as copies of each other: names, types, modes, owners, mtimes to the
/// nanosecond, link structure, sizes, contents, xattrs, device numbers, symlink targets. The mtime
/// of the two tops is not compared.
///
/// # Errors
/// Anything in either cannot be read.
pub fn tree_compare(a: &Path, b: &Path) -> Result<Vec<Difference>> {
    let aspects = Aspects { ignore_top_mtime: true, ..Aspects::copy() };
    compare_sources(&StdTree::new(a), &StdTree::new(b), aspects)
}

const PLACEHOLDER: u64 = 2;
const CONTENTS_DIFFER: &str = "contents differ";

type Collected<S> = (Manifest, BTreeMap<Vec<u8>, <S as TreeSource>::Id>);

fn collect<S: TreeSource>(source: &S) -> Result<Collected<S>> {
    let mut entries = BTreeMap::new();
    let mut ids = BTreeMap::new();
    let mut pending = vec![(Vec::new(), source.root()?)];
    while let Some((path, id)) = pending.pop() {
        let entry = read_entry(source, &id).with_context(|| format!("/{}", path.escape_ascii()))?;
        if entry.facts.kind == Kind::Directory {
            let children =
                source.children(&id).with_context(|| format!("/{}", path.escape_ascii()))?;
            for (name, child) in children {
                let mut below = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(&name);
                pending.push((below, child));
            }
        }
        ids.insert(path.clone(), id);
        let shown_before = entries.insert(path.clone(), entry).is_some();
        ensure!(!shown_before, "/{} is shown twice", path.escape_ascii());
    }
    // In path order, so that the first name of a file is the same in both trees.
    let mut first_name = BTreeMap::new();
    for (path, entry) in &mut entries {
        if entry.facts.kind != Kind::Directory && entry.facts.nlink > 1 {
            let first = first_name.entry(entry.facts.identity).or_insert_with(|| path.clone());
            entry.same_as = Some(first.clone());
        }
    }
    Ok((Manifest { entries }, ids))
}

fn read_entry<S: TreeSource>(source: &S, id: &S::Id) -> Result<Entry> {
    let facts = source.facts(id)?;
    let mut data_map = Vec::new();
    let content = match facts.kind {
        Kind::Symlink => Content::Target(source.readlink(id)?),
        Kind::Regular => {
            let file = source.open(id)?;
            data_map = read_data_map(source, &file, facts.size)?;
            Content::Data(digest(source, &file, facts.size, &data_map)?)
        }
        _ => Content::None,
    };
    Ok(Entry { facts, same_as: None, content, data_map, xattrs: source.xattrs(id)? })
}

fn read_data_map<S: TreeSource>(source: &S, file: &S::File, size: u64) -> Result<Vec<(u64, u64)>> {
    let mut map = Vec::new();
    let mut at = 0;
    while at < size {
        let Some((start, end)) = source.next_data(file, at)? else { break };
        ensure!(
            start >= at && end > start,
            "SEEK_DATA({at}) = {start}, SEEK_HOLE({start}) = {end}"
        );
        ensure!(start < size, "SEEK_DATA found data at {start}, past the end at {size}");
        map.push((start, end.min(size)));
        at = end;
    }
    let data: u64 = map.iter().map(|(s, e)| e - s).sum();
    ensure!(data <= MOST_DATA, "{data} bytes of data in one file");
    Ok(map)
}

/// Reads exactly `buf`, or less at the end of the file.
fn read_full<S: TreeSource>(
    source: &S,
    file: &S::File,
    offset: u64,
    buf: &mut [u8],
) -> Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match source.read(file, offset + done as u64, &mut buf[done..])? {
            0 => break,
            n => done += n,
        }
    }
    Ok(done)
}

/// Calls `each` with every block that may hold data, padded with zeros, and its offset. Stops when
/// it returns false.
fn blocks<S: TreeSource>(
    source: &S,
    file: &S::File,
    size: u64,
    map: &[(u64, u64)],
    mut each: impl FnMut(u64, &[u8]) -> bool,
) -> Result<()> {
    const PORTION: u64 = 1 << 20;
    let mut buf = Vec::new();
    let mut read_to = 0;
    for &(start, end) in map {
        let mut at = (start & !(BLOCK - 1)).max(read_to);
        while at < end {
            let want = (end - at).next_multiple_of(BLOCK).min(PORTION).min(size - at);
            buf.clear();
            buf.resize(usize::try_from(want)?, 0);
            let got = read_full(source, file, at, &mut buf)?;
            ensure!(got as u64 == want, "read {got} of {want} bytes at {at} of a file of {size}");
            buf.resize(buf.len().next_multiple_of(BLOCK as usize), 0);
            for (block, offset) in buf.chunks(BLOCK as usize).zip((at..).step_by(BLOCK as usize)) {
                if !each(offset, block) {
                    return Ok(());
                }
            }
            // The end of the file need not be a multiple of a block: that was its last piece.
            at = at.saturating_add(buf.len() as u64);
        }
        read_to = at;
    }
    Ok(())
}

fn digest<S: TreeSource>(
    source: &S,
    file: &S::File,
    size: u64,
    map: &[(u64, u64)],
) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    blocks(source, file, size, map, |offset, block| {
        if block.iter().any(|b| *b != 0) {
            hash.update(offset.to_le_bytes());
            hash.update(block);
        }
        true
    })?;
    Ok(hash.finalize().into())
}

/// Offset of the first byte in which two files differ.
fn first_difference<A: TreeSource, B: TreeSource>(
    a: &A,
    ia: &A::Id,
    b: &B,
    ib: &B::Id,
) -> Result<Option<u64>> {
    let (fa, fb) = (a.open(ia)?, b.open(ib)?);
    let (sa, sb) = (a.facts(ia)?.size, b.facts(ib)?.size);
    // Data on either side: what only one of them has is compared with what the other reads there.
    let mut map = read_data_map(a, &fa, sa)?;
    map.extend(read_data_map(b, &fb, sb)?);
    map.sort_unstable();
    let size = sa.min(sb);
    map.retain(|(start, _)| *start < size);
    map.iter_mut().for_each(|(_, end)| *end = (*end).min(size));
    let mut found = None;
    let mut failed = Ok(());
    let mut other = [0u8; BLOCK as usize];
    blocks(a, &fa, size, &map, |offset, block| {
        other.fill(0);
        let want = usize::try_from((size - offset).min(BLOCK)).unwrap_or(BLOCK as usize);
        match read_full(b, &fb, offset, &mut other[..want]) {
            Ok(_) => {
                found =
                    block.iter().zip(&other).position(|(x, y)| x != y).map(|p| offset + p as u64)
            }
            Err(e) => failed = Err(e),
        }
        found.is_none() && failed.is_ok()
    })?;
    failed.map(|()| found)
}

impl Manifest {
    /// Forgets when directories changed.
    #[must_use]
    pub fn without_times_of_directories(mut self) -> Self {
        for entry in self.entries.values_mut().filter(|e| e.facts.kind == Kind::Directory) {
            entry.facts.mtime = (0, 0);
        }
        self
    }

    /// Do two replays of one log show the same?
    ///
    /// # Errors
    /// All differences, behind `what`.
    pub fn ensure_replayed_alike(&self, other: &Self, what: &str) -> Result<()> {
        let found = self.differences(other, Aspects::replayed());
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        ensure!(lines.is_empty(), "{what}:\n  {}", lines.join("\n  "));
        Ok(())
    }

    /// Every difference in the aspects asked for; empty where the trees agree.
    #[must_use]
    pub fn differences(&self, other: &Self, aspects: Aspects) -> Vec<Difference> {
        let mut found = Vec::new();
        for (path, a) in &self.entries {
            match other.entries.get(path) {
                None => found
                    .push(Difference { path: path.clone(), what: "only in the first tree".into() }),
                Some(b) => a.differences(b, path, aspects, &mut found),
            }
        }
        for path in other.entries.keys().filter(|p| !self.entries.contains_key(*p)) {
            found.push(Difference { path: path.clone(), what: "only in the second tree".into() });
        }
        found
    }
}

impl Entry {
    fn differences(
        &self,
        other: &Self,
        path: &[u8],
        aspects: Aspects,
        found: &mut Vec<Difference>,
    ) {
        let mut differ = |what: String| found.push(Difference { path: path.to_vec(), what });
        let (a, b) = (&self.facts, &other.facts);
        if a.kind != b.kind {
            return differ(format!("type {:?} and {:?}", a.kind, b.kind));
        }
        let directory = a.kind == Kind::Directory;
        let mut check = |name: &str, x: &dyn fmt::Debug, y: &dyn fmt::Debug| {
            let (x, y) = (format!("{x:?}"), format!("{y:?}"));
            if x != y {
                differ(format!("{name} {x} and {y}"));
            }
        };
        if a.perm != b.perm {
            check("mode", &format_args!("{:o}", a.perm), &format_args!("{:o}", b.perm));
        }
        check("owner", &a.uid, &b.uid);
        check("group", &a.gid, &b.gid);
        check("device number", &a.rdev, &b.rdev);
        // Inode 2: the empty directory shown where a snapshot's source had a nested subvolume. It
        // is not on disk, and Linux gives it the time at which it was first looked at.
        let placeholder = directory && (a.identity.1 == PLACEHOLDER || b.identity.1 == PLACEHOLDER);
        let ignored = aspects.ignore_top_mtime && path.is_empty();
        let own = |x: &Time, y: &Time| {
            aspects.replayed_since.is_some_and(|since| directory || (*x >= since && *y >= since))
        };
        if !placeholder && !ignored && !own(&a.mtime, &b.mtime) {
            check("mtime", &a.mtime, &b.mtime);
        }
        if !directory || aspects.directory_size {
            check("size", &a.size, &b.size);
            check("link count", &a.nlink, &b.nlink);
        }
        let name = |n: &Option<Vec<u8>>| n.as_ref().map(|n| n.escape_ascii().to_string());
        check("link to", &name(&self.same_as), &name(&other.same_as));
        if aspects.atime && !placeholder {
            check("atime", &a.atime, &b.atime);
        }
        if aspects.ctime && !placeholder && !own(&a.ctime, &b.ctime) {
            check("ctime", &a.ctime, &b.ctime);
        }
        if aspects.btime && !placeholder && a.btime.is_some() && b.btime.is_some() {
            check("creation time", &a.btime, &b.btime);
        }
        if aspects.inode_numbers {
            check("inode number", &a.identity.1, &b.identity.1);
        }
        if aspects.allocated {
            check("allocated bytes", &a.allocated, &b.allocated);
        }
        if aspects.data_map {
            check("data ranges", &self.data_map, &other.data_map);
        }
        for (xattr, value) in &self.xattrs {
            match other.xattrs.get(xattr) {
                None => differ(format!("xattr {} only in the first tree", xattr.escape_ascii())),
                Some(v) if v != value => {
                    differ(format!("xattr {} has two values", xattr.escape_ascii()))
                }
                Some(_) => {}
            }
        }
        for xattr in other.xattrs.keys().filter(|x| !self.xattrs.contains_key(*x)) {
            differ(format!("xattr {} only in the second tree", xattr.escape_ascii()));
        }
        match (&self.content, &other.content) {
            (Content::Target(x), Content::Target(y)) if x != y => {
                differ(format!("target {} and {}", x.escape_ascii(), y.escape_ascii()));
            }
            (x, y) if x != y => differ(CONTENTS_DIFFER.into()),
            _ => {}
        }
    }
}

/// One line per entry, for storing and for reading by people.
impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |t: Time| format!("{}.{:09}", t.0, t.1);
        for (path, e) in &self.entries {
            let s = &e.facts;
            write!(
                f,
                "/{} {:?} {:o} {}:{} links={} size={} mtime={}",
                path.escape_ascii(),
                s.kind,
                s.perm,
                s.uid,
                s.gid,
                s.nlink,
                s.size,
                time(s.mtime)
            )?;
            if s.rdev != 0 {
                write!(f, " rdev={}:{}", s.rdev >> 20, s.rdev & 0xf_ffff)?;
            }
            if let Some(first) = &e.same_as {
                write!(f, " same-as=/{}", first.escape_ascii())?;
            }
            match &e.content {
                Content::None => {}
                Content::Target(t) => write!(f, " target={}", t.escape_ascii())?,
                Content::Data(d) => {
                    f.write_str(" data=")?;
                    d[..8].iter().try_for_each(|b| write!(f, "{b:02x}"))?;
                }
            }
            for (name, value) in &e.xattrs {
                write!(f, " {}={}", name.escape_ascii(), value.escape_ascii())?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
