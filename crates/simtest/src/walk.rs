//! Operations on the engine, and what the engine shows of a file system.
//!
//! `run_op` does with a [`Filesystem`] what [`World::apply`] does with the model. [`walk`] reads
//! a whole file system back as a [`World`], and on the way checks what must hold of any tree
//! whatever the model says: no name twice, none without its inode, look-ups agree with the listing,
//! link counts equal the names.

use crate::ops::{Bytes, Move, Op, filled};
use crate::world::{Body, Content, Ino, Node, ROOT, Refusal, Top, World, new_perm, special_kind};
use larder_format::ObjectId;
use larder_format::items::InodeFlags;
use larder_fs::{
    Completion, Deduped, Error, FileKind, Filesystem, InodeId, NewInode, RenameMode, Seek, SetAttr,
    XattrMode,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Longest stretch that is read at once, in bytes.
const CHUNK: usize = 128 << 10;
/// Files longer than this are read where `seek` says that data are.
const SPARSE: u64 = 8 << 20;

/// The handles that a workload holds on the engine's side.
pub type Handles = HashMap<String, InodeId>;

/// An engine error as the reason the model knows, or `None` if it stands for a failure.
#[must_use]
pub fn refusal(error: &Error) -> Option<Refusal> {
    Some(match error {
        Error::NotFound => Refusal::NotFound,
        Error::NoAttribute => Refusal::NoAttribute,
        Error::Exists => Refusal::Exists,
        Error::NotDirectory => Refusal::NotDirectory,
        Error::IsDirectory => Refusal::IsDirectory,
        Error::NotEmpty => Refusal::NotEmpty,
        Error::Invalid(_) => Refusal::Invalid,
        Error::NotPermitted(_) => Refusal::NotPermitted,
        Error::CrossSubvolume => Refusal::CrossSubvolume,
        Error::SubvolumeReadOnly => Refusal::ReadOnly,
        _ => return None,
    })
}

/// A number for an inode that no other subvolume has: in the top-level one as on the disk.
#[must_use]
pub fn real(id: InodeId) -> u64 {
    if id.subvol == ObjectId::FS_TREE { id.ino } else { id.ino ^ (id.subvol.0 << 40) }
}

/// Number of the empty directories that a snapshot shows in the place of its source's subvolumes.
pub const PLACEHOLDER: u64 = 2;

/// Is it the root directory of a subvolume?
fn is_top(id: InodeId) -> bool {
    id.ino == ObjectId::FIRST_FREE.0
}

/// Makes an inode durable; every other one as a mount does it, whose thread goes on meanwhile.
fn fsync(fs: &Filesystem, id: InodeId, data_only: bool) -> Result<(), Error> {
    if id.ino.is_multiple_of(2) {
        return fs.fsync(id, data_only);
    }
    let (send, synced) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome| send.send(outcome).expect("somebody waits below"));
    fs.fsync_then(id, data_only, done);
    synced.recv().expect("told once")
}

/// Follows a path. Symlinks are not followed.
///
/// # Errors
/// What the engine says.
pub fn resolve(fs: &Filesystem, handles: &Handles, path: &str) -> Result<InodeId, Error> {
    if let Some(handle) = path.strip_prefix('@') {
        return handles.get(handle).copied().ok_or(Error::NotFound);
    }
    let mut at = fs.root();
    for name in path.split('/').filter(|n| !n.is_empty()) {
        at = fs.lookup(at, name.as_bytes())?.id;
    }
    Ok(at)
}

fn parent<'p>(
    fs: &Filesystem,
    handles: &Handles,
    path: &'p str,
) -> Result<(InodeId, &'p [u8]), Error> {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    Ok((resolve(fs, handles, dir)?, name.as_bytes()))
}

/// Does an operation on the engine. Returns the number of the inode that it made, if it made one.
///
/// # Errors
/// What the engine says.
pub(crate) fn run_op(
    fs: &Filesystem,
    handles: &mut Handles,
    op: &Op,
) -> Result<Option<u64>, Error> {
    let at = |path: &str, handles: &Handles| resolve(fs, handles, path);
    match op {
        Op::Create(path) => return make(fs, handles, path, FileKind::Regular, 0, ""),
        Op::Mkdir(path) => return make(fs, handles, path, FileKind::Directory, 0, ""),
        Op::Mknod(special, path) => {
            let (kind, rdev) = special_kind(*special);
            return make(fs, handles, path, kind, rdev, "");
        }
        Op::Symlink { target, path } => {
            return make(fs, handles, path, FileKind::Symlink, 0, target);
        }
        Op::Link { from, to } => {
            let id = at(from, handles)?;
            let (dir, name) = parent(fs, handles, to)?;
            fs.link(id, dir, name)?;
        }
        Op::Unlink(path) => {
            let (dir, name) = parent(fs, handles, path)?;
            fs.unlink(dir, name)?;
        }
        Op::Rmdir(path) => {
            let (dir, name) = parent(fs, handles, path)?;
            fs.rmdir(dir, name)?;
        }
        Op::Rename { from, to, mode } => return rename(fs, handles, from, to, *mode),
        Op::Write { path, range, fill } => {
            fs.write(at(path, handles)?, range.from, &filled(*fill, *range))?;
        }
        Op::Append { path, len, fill } => append(fs, at(path, handles)?, *len, *fill)?,
        Op::Truncate { path, size } => {
            let changes = SetAttr { size: Some(*size), ..SetAttr::default() };
            fs.setattr(at(path, handles)?, &changes)?;
        }
        Op::Allocate { path, how, range } => {
            let len = range.to.saturating_sub(range.from);
            fs.fallocate(at(path, handles)?.at(range.from), len, how.engine())?;
        }
        Op::NoCow(path) => set_nocow(fs, at(path, handles)?)?,
        Op::SetXattr { path, name, value } => {
            let id = at(path, handles)?;
            fs.setxattr(id, name.as_bytes(), value.as_bytes(), XattrMode::Set)?;
        }
        Op::RemoveXattr { path, name } => fs.removexattr(at(path, handles)?, name.as_bytes())?,
        Op::Chmod { path, perm } => {
            let changes = SetAttr { perm: Some(*perm), ..SetAttr::default() };
            fs.setattr(at(path, handles)?, &changes)?;
        }
        Op::Copy { from, range, to, at: place } => {
            copy(fs, at(from, handles)?, *range, at(to, handles)?, *place)?;
        }
        Op::Dedupe { from, range, to, at: place } => {
            dedupe(fs, at(from, handles)?, *range, at(to, handles)?, *place)?;
        }
        Op::Subvolume(path) => return make_subvolume(fs, handles, path),
        Op::Snapshot { from, to, read_only } => {
            return snapshot(fs, handles, from, to, *read_only);
        }
        Op::DeleteSubvolume(path) => {
            let (dir, name) = parent(fs, handles, path)?;
            fs.delete_subvolume(dir, name)?;
        }
        Op::DefaultSubvolume(path) => {
            fs.set_default_subvolume(top_of_subvolume(fs, handles, path)?.subvol)?;
        }
        Op::Fsync(path) => fsync(fs, at(path, handles)?, false)?,
        Op::Fdatasync(path) => fsync(fs, at(path, handles)?, true)?,
        Op::Sync => fs.sync()?,
        Op::Open { path, handle } => {
            let id = at(path, handles)?;
            fs.hold(id);
            handles.insert(handle.clone(), id);
        }
        Op::Unnamed { handle } => return make_unnamed(fs, handles, handle),
        Op::Close { handle } => fs.release(handles.remove(handle).ok_or(Error::NotFound)?, 1),
    }
    Ok(None)
}

fn new_inode(kind: FileKind, rdev: u64, target: &str) -> NewInode<'_> {
    let perm = new_perm(kind);
    NewInode { kind, perm, uid: 0, gid: 0, rdev, target: target.as_bytes(), xattrs: &[] }
}

fn make(
    fs: &Filesystem,
    handles: &Handles,
    path: &str,
    kind: FileKind,
    rdev: u64,
    target: &str,
) -> Result<Option<u64>, Error> {
    let (dir, name) = parent(fs, handles, path)?;
    fs.create(dir, name, &new_inode(kind, rdev, target)).map(|attr| Some(real(attr.id)))
}

fn make_unnamed(
    fs: &Filesystem,
    handles: &mut Handles,
    handle: &str,
) -> Result<Option<u64>, Error> {
    let new = NewInode { perm: 0o644, ..new_inode(FileKind::Regular, 0, "") };
    let id = fs.create_unnamed(fs.root(), &new)?.id;
    handles.insert(handle.to_owned(), id);
    Ok(Some(real(id)))
}

fn rename(
    fs: &Filesystem,
    handles: &Handles,
    from: &str,
    to: &str,
    mode: Move,
) -> Result<Option<u64>, Error> {
    let (from_dir, from_name) = parent(fs, handles, from)?;
    let (to_dir, to_name) = parent(fs, handles, to)?;
    let engine_mode = match mode {
        Move::Replace => RenameMode::Replace,
        Move::Exchange => RenameMode::Exchange,
        Move::Whiteout => RenameMode::Whiteout { uid: 0, gid: 0 },
    };
    fs.rename(from_dir, from_name, to_dir, to_name, engine_mode)?;
    if mode == Move::Whiteout {
        return Ok(Some(real(fs.lookup(from_dir, from_name)?.id)));
    }
    Ok(None)
}

fn append(fs: &Filesystem, id: InodeId, len: u64, fill: u8) -> Result<(), Error> {
    let from = fs.getattr(id)?.size;
    fs.write(id, from, &filled(fill, Bytes { from, to: from + len }))
}

fn set_nocow(fs: &Filesystem, id: InodeId) -> Result<(), Error> {
    let attr = fs.getattr(id)?;
    match attr.kind {
        FileKind::Regular => {}
        FileKind::Directory => return Err(Error::IsDirectory),
        _ => return Err(Error::Invalid("not a file")),
    }
    let flags = Some(attr.flags | InodeFlags::NODATACOW.bits());
    fs.setattr(id, &SetAttr { flags, ..SetAttr::default() })?;
    Ok(())
}

fn copy(
    fs: &Filesystem,
    source: InodeId,
    range: Bytes,
    target: InodeId,
    at: u64,
) -> Result<(), Error> {
    // What the copy itself adds to the file is not copied again.
    let len = range.to.min(fs.getattr(source)?.size).saturating_sub(range.from);
    let mut done = 0;
    // Called even if there is nothing to copy: a copy that is not allowed is refused all the same.
    loop {
        match fs.copy_range(source.at(range.from + done), target.at(at + done), len - done)? {
            0 => return Ok(()),
            n => done += n,
        }
    }
}

fn dedupe(
    fs: &Filesystem,
    source: InodeId,
    range: Bytes,
    target: InodeId,
    at: u64,
) -> Result<(), Error> {
    let len = range.to.checked_sub(range.from).ok_or(Error::Invalid("no range"))?;
    match fs.dedupe_range(source.at(range.from), target.at(at), len)? {
        Deduped::Same { .. } => Ok(()),
        Deduped::Differs => Err(Error::Invalid("the ranges differ")),
    }
}

fn make_subvolume(fs: &Filesystem, handles: &Handles, path: &str) -> Result<Option<u64>, Error> {
    let (dir, name) = parent(fs, handles, path)?;
    let new = new_inode(FileKind::Directory, 0, "");
    fs.create_subvolume(dir, name, &new).map(|attr| Some(real(attr.id)))
}

fn snapshot(
    fs: &Filesystem,
    handles: &Handles,
    from: &str,
    to: &str,
    read_only: bool,
) -> Result<Option<u64>, Error> {
    let source = top_of_subvolume(fs, handles, from)?;
    let (dir, name) = parent(fs, handles, to)?;
    let subvol = fs.snapshot(source.subvol, dir, name, read_only)?;
    Ok(Some(real(InodeId { subvol, ino: ObjectId::FIRST_FREE.0 })))
}

/// The root directory of a subvolume that a path leads to.
fn top_of_subvolume(fs: &Filesystem, handles: &Handles, path: &str) -> Result<InodeId, Error> {
    let top = resolve(fs, handles, path)?;
    if is_top(top) { Ok(top) } else { Err(Error::Invalid("not a subvolume")) }
}

/// Reads the whole file system back. Model numbers are handed out as inodes are met.
///
/// # Errors
/// What is wrong with the tree, or what the engine says, with the path.
pub fn walk(fs: &Filesystem) -> Result<World, String> {
    let root = fs.root();
    let attr = fs.getattr(root).map_err(|e| format!("getattr of the root: {e}"))?;
    let mut world = World::empty(attr.perm, real(root));
    world.node_mut(ROOT).xattrs = xattrs(fs, root, "/")?;
    world.node_mut(ROOT).nlink = attr.nlink;
    let mut known: HashMap<InodeId, Ino> = HashMap::from([(root, ROOT)]);
    let mut names: BTreeMap<Ino, u32> = BTreeMap::new();
    let mut todo = vec![(String::new(), root, ROOT)];
    while let Some((path, dir, dir_ino)) = todo.pop() {
        for (name, id, kind) in list(fs, dir, &path)? {
            let full = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
            let attr = fs.getattr(id).map_err(|e| format!("getattr of {full}: {e}"))?;
            let found =
                fs.lookup(dir, name.as_bytes()).map_err(|e| format!("lookup of {full}: {e}"))?;
            if found.id != id {
                return Err(format!(
                    "{full}: readdir shows inode {}, lookup {}",
                    id.ino, found.id.ino
                ));
            }
            if attr.kind != kind || attr.id != id {
                return Err(format!(
                    "{full}: the entry says {kind:?} {}, the inode {:?}",
                    id.ino, attr
                ));
            }
            if world.entries(dir_ino).contains_key(&name) {
                return Err(format!("{full} is listed twice"));
            }
            let old = known.get(&id).copied();
            if old.is_some() && kind == FileKind::Directory && id.ino != PLACEHOLDER {
                return Err(format!("{full}: directory {} has two names", id.ino));
            }
            let node = match old {
                Some(_) => None,
                None => Some(Node {
                    nlink: attr.nlink,
                    xattrs: xattrs(fs, id, &full)?,
                    top: top(fs, dir, id, &full)?,
                    placeholder: id.ino == PLACEHOLDER,
                    real: real(id),
                    ..Node::new(body(fs, id, &attr, &full)?, attr.perm)
                }),
            };
            let ino = world.insert(dir_ino, &name, old, || node.expect("new inodes have a node"));
            known.insert(id, ino);
            let home = if id.subvol == dir.subvol {
                world.node(dir_ino).expect("listed").home
            } else {
                ino
            };
            world.node_mut(ino).home = home;
            *names.entry(ino).or_default() += 1;
            if kind == FileKind::Directory {
                todo.push((full, id, ino));
            }
        }
    }
    let default = fs.default_subvolume().map_err(|e| format!("default subvolume: {e}"))?;
    if default != root.subvol {
        let top = known.get(&InodeId { subvol: default, ino: ObjectId::FIRST_FREE.0 });
        world.set_default_subvolume(*top.ok_or("the default subvolume is nowhere")?);
    }
    for (ino, node) in world.nodes().filter(|(ino, _)| *ino != ROOT) {
        let names = names.get(&ino).copied().unwrap_or(0);
        if node.nlink != if node.placeholder { 1 } else { names } {
            return Err(format!(
                "inode {}: link count {}, but {names} names",
                node.real, node.nlink
            ));
        }
    }
    Ok(world)
}

/// Does a directory's entry lead to another subvolume, and may that be changed?
fn top(fs: &Filesystem, dir: InodeId, id: InodeId, path: &str) -> Result<Top, String> {
    if id.subvol == dir.subvol {
        return Ok(Top::No);
    }
    if !is_top(id) {
        return Err(format!("{path} leads into the midst of another subvolume"));
    }
    let info = fs.subvolume(id.subvol).map_err(|e| format!("subvolume {path}: {e}"))?;
    Ok(if info.read_only { Top::ReadOnly } else { Top::Writable })
}

fn list(
    fs: &Filesystem,
    dir: InodeId,
    path: &str,
) -> Result<Vec<(String, InodeId, FileKind)>, String> {
    let mut out = Vec::new();
    let mut dots = Vec::new();
    fs.readdir(dir, 0, &mut |e| {
        let name = String::from_utf8_lossy(e.name).into_owned();
        if name == "." || name == ".." {
            dots.push(name);
        } else {
            out.push((name, e.id, e.kind));
        }
        out.len() < 1 << 20
    })
    .map_err(|e| format!("readdir of /{path}: {e}"))?;
    if dots != [".", ".."] {
        return Err(format!("readdir of /{path} shows the dot entries {dots:?}"));
    }
    Ok(out)
}

fn xattrs(fs: &Filesystem, id: InodeId, path: &str) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let names = fs.listxattr(id).map_err(|e| format!("listxattr of {path}: {e}"))?;
    names
        .into_iter()
        .map(|name| {
            let value = fs.getxattr(id, &name);
            let name = String::from_utf8_lossy(&name).into_owned();
            value.map_err(|e| format!("getxattr {name} of {path}: {e}")).map(|v| (name, v))
        })
        .collect()
}

fn body(fs: &Filesystem, id: InodeId, attr: &larder_fs::Attr, path: &str) -> Result<Body, String> {
    Ok(match attr.kind {
        FileKind::Directory => Body::Dir(BTreeMap::new()),
        FileKind::Regular => Body::File(Arc::new(content(fs, id, attr.size, path)?)),
        FileKind::Symlink => {
            let target = fs.readlink(id).map_err(|e| format!("readlink of {path}: {e}"))?;
            if attr.size != target.len() as u64 {
                return Err(format!(
                    "{path}: size {} of a target of {} bytes",
                    attr.size,
                    target.len()
                ));
            }
            Body::Symlink(String::from_utf8_lossy(&target).into_owned())
        }
        kind => Body::Special(kind, attr.rdev),
    })
}

fn content(fs: &Filesystem, id: InodeId, size: u64, path: &str) -> Result<Content, String> {
    let mut content = Content::default();
    let mut buf = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        if size > SPARSE {
            let next = fs.seek(id, at, Seek::Data).map_err(|e| format!("seek in {path}: {e}"))?;
            match next {
                Some(next) if next >= at => at = next - next % 4096,
                Some(next) => return Err(format!("{path}: seek from {at} leads back to {next}")),
                None => break,
            }
        }
        let n = fs.read(id, at, &mut buf).map_err(|e| format!("read of {path} at {at}: {e}"))?;
        let expected = usize::try_from(size - at).unwrap_or(CHUNK).min(CHUNK);
        if n != expected {
            return Err(format!("{path}: read at {at} returned {n} bytes, not {expected}"));
        }
        for (i, page) in buf[..n].chunks(4096).enumerate() {
            if page.iter().any(|b| *b != 0) {
                content.write(at + i as u64 * 4096, page);
            }
        }
        at += n as u64;
    }
    content.size = size;
    Ok(content)
}
