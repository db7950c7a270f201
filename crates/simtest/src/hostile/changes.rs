//! Changes to a hostile file system: names, files, attributes, subvolumes.
//!
//! There is one pass over the inodes that were met, with a different change for each. `script`
//! decides which inode gets which change, and when all of it is made durable; `variant` decides
//! what happens with subvolumes. Snapshots are taken before the pass, so that its changes meet
//! shared blocks, and deleted after it, so that dropping them meets changed ones.

use super::exercise::{Found, Victim};
use larder_fs::{
    Fallocate, FileKind, Filesystem, InodeId, NewInode, Received, RenameMode, SetAttr, SetTime,
    Timestamp, TrimRange, XattrMode,
};

/// Subvolumes of which snapshots are taken, and that are deleted.
const SUBVOLUMES: usize = 3;

fn new(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] }
}

impl Victim {
    /// Changes what can be changed.
    pub(super) fn change(&mut self, fs: &Filesystem, seen: &[Found]) {
        let root = fs.root();
        self.ask("create", || fs.create(root, b"made", &new(FileKind::Regular)));
        self.ask("mkdir", || fs.create(root, b"made-dir", &new(FileKind::Directory)));
        self.take_snapshots(fs);
        if self.script & 4 != 0 {
            self.ask("sync", || fs.sync());
        }
        let long_target = vec![b't'; 3000];
        let symlink = NewInode { target: &long_target, ..new(FileKind::Symlink) };
        for (i, found) in seen.iter().enumerate().take(120) {
            let id = found.attr.id;
            let turn = i + usize::from(self.script >> 3);
            match found.attr.kind {
                FileKind::Directory => {
                    self.ask("create", || fs.create(id, b"new", &new(FileKind::Regular)));
                    self.ask("symlink", || fs.create(id, b"new-symlink", &symlink));
                    self.ask("rename", || {
                        fs.rename(
                            id,
                            b"new",
                            root,
                            format!("from-{i}").as_bytes(),
                            RenameMode::Replace,
                        )
                    });
                    self.ask("rmdir", || fs.rmdir(found.dir, &found.name));
                }
                FileKind::Regular => self.change_file(fs, found, turn, i),
                _ => drop(self.ask("unlink", || fs.unlink(found.dir, &found.name))),
            }
            if turn.is_multiple_of(5) {
                self.ask("setxattr", || fs.setxattr(id, b"user.new", &[1; 200], XattrMode::Set));
                for name in
                    self.ask("listxattr", || fs.listxattr(id)).unwrap_or_default().iter().take(2)
                {
                    self.ask("removexattr", || fs.removexattr(id, name));
                }
            }
            if turn % 40 == 39 {
                self.ask("sync", || fs.sync());
            }
        }
        self.ask("sync", || fs.sync());
        self.delete_subvolumes(fs);
    }

    /// Makes a subvolume, and snapshots of those that there are.
    fn take_snapshots(&mut self, fs: &Filesystem) {
        let root = fs.root();
        let dir = new(FileKind::Directory);
        if let Some(top) =
            self.ask("create a subvolume", || fs.create_subvolume(root, b"made-sub", &dir))
        {
            self.ask("create", || fs.create(top.id, b"inside", &new(FileKind::Regular)));
        }
        let all = self.ask("subvolumes", || fs.subvolumes()).unwrap_or_default();
        let turn = usize::from(self.variant >> 3);
        for i in 0..SUBVOLUMES.min(all.len()) {
            let subvol = &all[(i + turn) % all.len()];
            let read_only = (i + turn).is_multiple_of(2);
            let name = format!("snapshot-{i}");
            let made =
                self.ask("snapshot", || fs.snapshot(subvol.id, root, name.as_bytes(), read_only));
            if let Some(made) = made {
                self.ask("facts about a subvolume", || fs.subvolume(made));
                self.ask("default", || fs.set_default_subvolume(made));
            }
        }
        if let Some(subvol) = all.get(turn % all.len().max(1)) {
            let (time, generation) = (Timestamp::default(), larder_format::Generation(1));
            let (uuid, stransid, rtransid) = ([9; 16], generation, generation);
            let received = Received { uuid, stransid, rtransid, stime: time, rtime: time };
            self.ask("received", || fs.set_subvolume_received(subvol.id, received));
            self.ask("read-only", || fs.set_subvolume_read_only(subvol.id, true, false));
            self.ask("writable", || fs.set_subvolume_read_only(subvol.id, false, true));
        }
    }

    /// Deletes subvolumes, waits until they are gone, and tells the device what is free.
    fn delete_subvolumes(&mut self, fs: &Filesystem) {
        let all = self.ask("subvolumes", || fs.subvolumes()).unwrap_or_default();
        let turn = usize::from(self.variant >> 3);
        let hanging: Vec<_> = all.into_iter().filter_map(|s| s.parent).collect();
        self.ask("default", || fs.set_default_subvolume(fs.root().subvol));
        for i in 0..SUBVOLUMES.min(hanging.len()) {
            let (subvol, ino, name) = &hanging[(i + turn) % hanging.len()];
            let dir = InodeId { subvol: *subvol, ino: *ino };
            if (i + turn) % 4 == 3 {
                let mode = RenameMode::NoReplace;
                self.ask("move a subvolume", || {
                    fs.rename(dir, name, fs.root(), b"moved-sub", mode)
                });
            } else {
                self.ask("delete a subvolume", || fs.delete_subvolume(dir, name));
            }
        }
        self.ask("wait for drops", || fs.wait_for_drops());
        if self.variant & 1 != 0 {
            self.ask("trim", || fs.trim(TrimRange::default()));
        }
    }

    fn change_file(&mut self, fs: &Filesystem, found: &Found, turn: usize, i: usize) {
        let (id, size) = (found.attr.id, found.attr.size);
        let data = vec![0xa5; 10_000];
        let resize = |size| SetAttr { size: Some(size), ..SetAttr::default() };
        match turn % 10 {
            0 => drop(self.ask("write", || fs.write(id, 0, &data))),
            1 => drop(self.ask("write at the end", || fs.write(id, size, &data))),
            2 => drop(self.ask("write in the middle", || fs.write(id, size / 2 + 3, &data[..100]))),
            3 => drop(self.ask("truncate", || fs.setattr(id, &resize(size / 2 + 1)))),
            4 => drop(self.ask("extend", || fs.setattr(id, &resize(size.saturating_add(70_000))))),
            5 => drop(self.ask("unlink", || fs.unlink(found.dir, &found.name))),
            6 => drop(self.ask("link", || fs.link(id, fs.root(), format!("link-{i}").as_bytes()))),
            7 => drop(self.ask("rename", || {
                let mode = if i.is_multiple_of(2) {
                    RenameMode::Replace
                } else {
                    RenameMode::Whiteout { uid: 0, gid: 0 }
                };
                fs.rename(found.dir, &found.name, fs.root(), format!("moved-{i}").as_bytes(), mode)
            })),
            8 => {
                let made = self.ask("lookup", || fs.lookup(fs.root(), b"made"));
                if let Some(made) = made {
                    self.ask("copy", || {
                        fs.copy_range(id.at(0), made.id.at(4096), size.min(200_000))
                    });
                    self.ask("dedupe", || {
                        fs.dedupe_range(id.at(0), made.id.at(4096), size.min(200_000))
                    });
                    let len = (size / 2).min(1 << 20) & !4095;
                    self.ask("clone", || fs.clone_range(id.at(0), made.id.at(1 << 20), len));
                    self.ask("clone within", || fs.clone_range(id.at(0), id.at(2 << 20), len));
                    self.ask("exchange", || {
                        fs.rename(found.dir, &found.name, fs.root(), b"made", RenameMode::Exchange)
                    });
                }
            }
            _ => {
                let (now, flags) = (Some(SetTime::Now), Some(found.attr.flags));
                self.ask("setattr", || fs.setattr(id, &SetAttr { mtime: now, flags, ..resize(0) }));
            }
        }
        if turn.is_multiple_of(2) {
            self.change_space(fs, found, turn / 2, &data);
        }
        if turn.is_multiple_of(3) {
            self.ask("fsync", || fs.fsync(id, false));
        }
    }

    /// Reserves, punches and zeroes ranges; what is new may be packed.
    fn change_space(&mut self, fs: &Filesystem, found: &Found, turn: usize, data: &[u8]) {
        let (id, size) = (found.attr.id, found.attr.size);
        let (how, at, len) = match turn % 7 {
            0 => (Fallocate::Allocate { keep_size: false }, 0, size.saturating_add(50_000)),
            1 => (Fallocate::Punch, 4096, size / 2),
            2 => (Fallocate::Zero { keep_size: false }, size / 3, size / 3 + 9000),
            3 => (Fallocate::Allocate { keep_size: true }, size, 100_000),
            4 => (Fallocate::Punch, 0, u64::MAX),
            5 => (Fallocate::Zero { keep_size: true }, 1, 5000),
            _ => (Fallocate::Punch, size / 2 + 1, 70),
        };
        if turn.is_multiple_of(3) {
            let method: &[u8] = [&b"zstd"[..], b"lzo", b"zlib", b"none"][turn % 4];
            self.ask("property", || fs.setxattr(id, b"btrfs.compression", method, XattrMode::Set));
        }
        self.ask("fallocate", || fs.fallocate(id.at(at), len.min(1 << 20), how));
        self.ask("write", || fs.write(id, at.min(1 << 40), &data[..3000]));
    }
}
