//! Subvolumes of an image or a mount, for the commands that work on one.

use crate::failure::Advise;
use crate::image::{Access, Image};
use crate::mounted::mounted;
use crate::streams::{self, Named};
use crate::target::{Place, Target};
use anyhow::{Context, anyhow};
use larder_format::ids::ObjectId;
use larder_fs::{FileKind, Frozen, InodeId};
use larder_fuse::subvolumes as on_mount;
use std::ffi::OsString;
use std::io::ErrorKind;

/// Opens an image with its top as root, calls `f`, and commits.
pub(crate) fn in_image<T>(
    target: &Target,
    access: Access,
    f: impl FnOnce(&Image) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let image = Image::open(&target.image, access, Some(ObjectId::FS_TREE.0))?;
    let done = f(&image);
    // What was done stays done, even if a later part failed.
    let closed = image.close();
    done.and_then(|value| closed.map(|()| value))
}

/// The subvolume whose root is at this path.
pub(crate) fn root_of(image: &Image, path: &[u8]) -> anyhow::Result<InodeId> {
    let attr = image.resolve(path, true)?;
    if attr.kind != FileKind::Directory || attr.id.ino != ObjectId::FIRST_FREE.0 {
        return Err(anyhow!("{} is not a subvolume", image.show(path)))
            .hint("`larder subvolume list` shows the subvolumes");
    }
    Ok(attr.id)
}

/// The read-only subvolume whose root is at this path, to be read as a whole.
pub(crate) fn frozen(image: &Image, path: &[u8]) -> anyhow::Result<Frozen> {
    let id = root_of(image, path)?.subvol;
    streams::frozen(&image.fs, &Named { id, shown: image.show(path) })
}

/// Makes a subvolume read-only or writable; without `wanted`, returns which it is.
pub(crate) fn read_only(
    path: &OsString,
    wanted: Option<bool>,
    forget: bool,
) -> anyhow::Result<Option<bool>> {
    match Place::parse_existing(path)? {
        Place::Image(t) => {
            let access =
                if wanted.is_some() { Access::Write } else { Access::Read { force: false } };
            in_image(&t, access, |image| {
                let id = root_of(image, &t.path)?.subvol;
                match wanted {
                    Some(on) => {
                        let set = image.fs.set_subvolume_read_only(id, on, forget);
                        set.with_context(|| t.display()).map(|()| None)
                    }
                    None => Ok(Some(image.fs.subvolume(id)?.read_only)),
                }
            })
        }
        Place::Host(path) => match wanted {
            Some(on) => {
                let set = mounted(&path, |p| on_mount::set_read_only(p, on)).map(|()| None);
                let busy = |e: &std::io::Error| e.kind() == ErrorKind::ResourceBusy;
                match set {
                    Err(e) if e.downcast_ref().is_some_and(busy) => Err(e)
                        .hint("it is being sent, or it was received: make a writable snapshot"),
                    set => set,
                }
            }
            None => mounted(&path, on_mount::is_read_only).map(Some),
        },
    }
}
