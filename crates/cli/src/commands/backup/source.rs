//! The side that is backed up: a subvolume, here of an image, and the directory of its snapshots.
//!
//! Hidden here is where snapshots lie if nobody says so: in `.snapshots` beside the subvolume, or
//! in it if it is the top-level one. And hidden is how each gets a uuid of its own. A read-only
//! snapshot of a received subvolume inherits its received uuid, under which it would be sent, so
//! two of them could not be told apart. A writable one inherits nothing. It becomes read-only at
//! once.

use super::held::{self, Entry, sent_as};
use crate::failure::Advise;
use crate::image::Image;
use crate::print;
use crate::streams::{self, Named, Wanted};
use crate::subvolumes::root_of;
use anyhow::{Context, anyhow};
use larder_format::TreeId;
use larder_fs::{FileKind, InodeId, NewInode, SubvolInfo};
use larder_receive::destination::Sent;
use larder_send::Options;
use larder_stream::{Protocol, StreamWriter};
use std::io::Write;

/// The directory of snapshots, where none is named.
pub(super) const SNAPSHOTS: &[u8] = b".snapshots";
/// Its permissions: snapshots still have what was protected later.
pub(super) const PERMISSIONS: u32 = 0o700;

/// A subvolume that is backed up.
pub(super) trait Source: Sync {
    /// What the directory of snapshots has.
    fn list(&self) -> anyhow::Result<Vec<Entry>>;
    /// Makes a snapshot, which is durable.
    fn snapshot(&self, name: &[u8]) -> anyhow::Result<Sent>;
    /// Writes a snapshot as a stream.
    fn send(&self, name: &[u8], parent: Option<&[u8]>, out: &mut dyn Write) -> anyhow::Result<()>;
    /// Deletes a snapshot.
    fn delete(&self, name: &[u8]) -> anyhow::Result<()>;
    /// Subvolumes within it, which no snapshot of it has; without snapshots of backups.
    fn nested(&self) -> anyhow::Result<Vec<String>>;
    /// Gives back the space of what was deleted.
    fn finish(&self) -> anyhow::Result<()>;
}

/// A subvolume of an image.
#[derive(Debug)]
pub(super) struct InImage<'i> {
    image: &'i Image,
    subvol: TreeId,
    /// The directory of snapshots, as a path.
    dir: Vec<u8>,
}

/// The name of a subvolume's snapshots, where none is given.
pub(super) fn own_name(image: &Image, path: &[u8]) -> anyhow::Result<Vec<u8>> {
    let id = root_of(image, path)?.subvol;
    let path = image.fs.subvolume_path(id)?;
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    Ok(if name.is_empty() { b"root".to_vec() } else { name.to_vec() })
}

impl<'i> InImage<'i> {
    pub(super) fn new(image: &'i Image, path: &[u8], dir: Option<&[u8]>) -> anyhow::Result<Self> {
        let subvol = root_of(image, path)?.subvol;
        let dir = match dir {
            Some(dir) => dir.to_vec(),
            None => {
                let own = image.fs.subvolume_path(subvol)?;
                let above = own.iter().rposition(|b| *b == b'/').map_or(&[][..], |at| &own[..at]);
                [above, b"/", SNAPSHOTS].concat()
            }
        };
        Ok(Self { image, subvol, dir })
    }

    /// The directory of snapshots, if it exists.
    fn dir(&self) -> anyhow::Result<Option<InodeId>> {
        let Some(attr) = self.image.lookup(&self.dir, true) else { return Ok(None) };
        if attr.kind != FileKind::Directory {
            let shown = self.image.show(&self.dir);
            return Err(anyhow!("{shown} is not a directory"))
                .hint("--snapshots names another directory for the snapshots")
                .could_not_run();
        }
        Ok(Some(attr.id))
    }

    fn made_dir(&self) -> anyhow::Result<InodeId> {
        if let Some(dir) = self.dir()? {
            return Ok(dir);
        }
        let (above, name) = self.image.parent(&self.dir)?;
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let kind = FileKind::Directory;
        let new = NewInode { kind, perm: PERMISSIONS, uid, gid, rdev: 0, target: b"", xattrs: &[] };
        let made = self.image.fs.create(above, name, &new);
        Ok(made.with_context(|| self.image.show(&self.dir))?.id)
    }

    fn existing_dir(&self) -> anyhow::Result<InodeId> {
        self.dir()?.with_context(|| format!("{} is gone", self.image.show(&self.dir)))
    }

    fn show(&self, name: &[u8]) -> String {
        self.image.show(&[&self.dir[..], b"/", name].concat())
    }

    fn named(&self, name: &[u8]) -> anyhow::Result<Named> {
        let shown = self.show(name);
        let found = self.image.fs.lookup(self.existing_dir()?, name);
        Ok(Named { id: found.with_context(|| shown.clone())?.id.subvol, shown })
    }
}

impl Source for InImage<'_> {
    fn list(&self) -> anyhow::Result<Vec<Entry>> {
        match self.dir()? {
            Some(dir) => held::in_image(self.image, dir),
            None => Ok(Vec::new()),
        }
    }

    fn snapshot(&self, name: &[u8]) -> anyhow::Result<Sent> {
        let fs = &self.image.fs;
        let dir = self.made_dir()?;
        let inherits = fs.subvolume(self.subvol)?.received_uuid != [0; 16];
        let made = fs.snapshot(self.subvol, dir, name, !inherits);
        let made = made.with_context(|| self.show(name))?;
        if inherits {
            fs.set_subvolume_read_only(made, true, false).with_context(|| self.show(name))?;
        }
        // The target must not know a snapshot that is lost here.
        fs.sync()?;
        Ok(sent_as(&fs.subvolume(made)?))
    }

    fn send(&self, name: &[u8], parent: Option<&[u8]>, out: &mut dyn Write) -> anyhow::Result<()> {
        let wanted = Wanted {
            subvolumes: vec![self.named(name)?],
            parent: parent.map(|parent| self.named(parent)).transpose()?,
            clones: Vec::new(),
            options: Options { compressed_data: true, no_data: false },
        };
        let mut writer = StreamWriter::new(out, Protocol::V2);
        streams::send_all(&self.image.fs, &wanted, &mut writer, &mut |_| {}).map(drop)
    }

    fn delete(&self, name: &[u8]) -> anyhow::Result<()> {
        let gone = self.image.fs.delete_subvolume(self.existing_dir()?, name);
        gone.map(drop).with_context(|| self.show(name))
    }

    fn nested(&self) -> anyhow::Result<Vec<String>> {
        let is_nested = |s: &SubvolInfo| {
            let (subvol, _, name) = s.parent.as_ref()?;
            (*subvol == self.subvol && !held::is_ours(name)).then_some(s.id)
        };
        let all = self.image.fs.subvolumes()?;
        let paths = all.iter().filter_map(is_nested).map(|id| self.image.fs.subvolume_path(id));
        paths.map(|path| Ok(print::name(&path?))).collect()
    }

    fn finish(&self) -> anyhow::Result<()> {
        self.image.fs.wait_for_drops().context("giving the space of deleted snapshots back")
    }
}
