//! Images opened without a mount, and paths inside them.
//!
//! Hidden here is how an image is opened for a command: with which lock, which subvolume as root,
//! and what is said about a log. So is how a path inside it becomes an inode, symbolic links
//! included.

use crate::devices::Part;
use crate::failure::{Advise, usage};
use crate::{devices, mount_table, print, size, state};
use anyhow::{Context, anyhow};
use larder_format::ids::ObjectId;
use larder_fs::{
    Attr, Compress, FileKind, Filesystem, FsInfo, InodeId, LostChunk, OpenOptions, Packing,
    SubvolChoice,
};
use larder_volume::{Device, FileDevice, OpenMode, VolumeError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of memory that may hold data and nodes while a stream is written into an image.
const STREAM_CACHE: u64 = 128 << 20;

/// Symbolic links followed in one path before giving up.
const MAX_LINKS: u32 = 40;

/// The hint for a command that needs more than a metadata dump has.
pub(crate) const DUMP_ADVICE: &str = "`larder check`, `inspect`, `ls`, `map` and `restore --list` \
    read a dump; for the files, and for writing, take the image that it was made of";

/// Was `--degraded` given? It holds for every image that the command opens.
static DEGRADED: AtomicBool = AtomicBool::new(false);

/// From now on images are written although devices are missing.
pub(crate) fn allow_degraded() {
    DEGRADED.store(true, Ordering::Relaxed);
}

/// May images be written although devices are missing?
pub(crate) fn may_be_degraded() -> bool {
    DEGRADED.load(Ordering::Relaxed)
}

/// What a command wants to do with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Look only; with `force` even if the image is in use.
    Read { force: bool },
    /// Serve it for reading: as [`Access::Read`], but there is no --force.
    Serve,
    /// Change it.
    Write,
}

impl Access {
    /// What is wanted of a device with this part in the image. Nobody writes a seed.
    fn to(self, part: Part) -> Self {
        match (self, part) {
            (Self::Write, Part::Seed) => Self::Serve,
            _ => self,
        }
    }
}

/// Opens the one device behind an image, with the right advice when that fails. For commands that
/// look at a device by itself, or write.
pub(crate) fn open_device(path: &Path, access: Access) -> anyhow::Result<Arc<FileDevice>> {
    open_one(path, access).map(Arc::new)
}

/// Opens all devices of an image.
pub(crate) fn open_devices(image: &Path, access: Access) -> anyhow::Result<Vec<Arc<FileDevice>>> {
    devices::open(devices::names(image), |path, part| open_one(path, access.to(part)))
}

/// Opens the devices of an image that are not of its seeds, even if it is a seed itself.
pub(crate) fn open_own_devices(
    image: &Path,
    access: Access,
) -> anyhow::Result<Vec<Arc<FileDevice>>> {
    devices::open_own(devices::names(image), |path| open_one(path, access))
}

/// The devices as those see them that read them.
pub(crate) fn as_devices(devices: &[Arc<FileDevice>]) -> Vec<Arc<dyn Device>> {
    devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
}

/// Opens the file system on devices of which the first were named and the others found. If it may
/// do without some, those that were found are left out where they were written without the others.
pub(crate) fn open_filesystem(
    devices: &[Arc<FileDevice>],
    named: usize,
    options: OpenOptions,
) -> larder_fs::Result<Arc<Filesystem>> {
    let (kept, found) = devices.split_at(named.min(devices.len()));
    let opened = Filesystem::open_devices(as_devices(devices), options.clone());
    if !(is_apart(&opened) && options.degraded && !found.is_empty()) {
        return opened;
    }
    for device in found {
        print::say(&format!(
            "larder: note: {} is left out: it and what was named were written without each other",
            print::path(device.path())
        ));
    }
    Filesystem::open_devices(as_devices(kept), options)
}

fn is_apart<T>(opened: &larder_fs::Result<T>) -> bool {
    matches!(opened, Err(larder_fs::Error::Volume(VolumeError::Apart { .. })))
}

fn open_one(path: &Path, access: Access) -> anyhow::Result<FileDevice> {
    if path.as_os_str().is_empty() {
        return usage("an argument is empty where an image was expected");
    }
    let device = match access {
        Access::Read { force: true } => FileDevice::open_despite_users(path),
        Access::Read { force: false } | Access::Serve => {
            when_free(path, || FileDevice::open(path, OpenMode::Read))
        }
        Access::Write => when_free(path, || FileDevice::open(path, OpenMode::Write)),
    };
    advise_open(device, access)
}

/// Opens an image. If a daemon still has it whose mount is gone, waits for the end of that daemon.
pub(crate) fn when_free<T>(
    path: &Path,
    open: impl Fn() -> Result<T, VolumeError>,
) -> Result<T, VolumeError> {
    loop {
        match open() {
            Err(VolumeError::Busy { .. }) if state::wait_for_the_end(path) => {}
            // The daemon may have ended before it was looked for.
            Err(VolumeError::Busy { .. }) => return open(),
            result => return result,
        }
    }
}

/// Adds what helps when an image cannot be opened.
pub(crate) fn advise_open<T>(result: Result<T, VolumeError>, access: Access) -> anyhow::Result<T> {
    let hint = match &result {
        Ok(_) => None,
        Err(VolumeError::Busy { device, by }) => Some(how_to_free(Path::new(device), by, access)),
        Err(VolumeError::Io { source, device, .. }) => match source.kind() {
            ErrorKind::NotFound if access == Access::Write => {
                Some("`larder mkfs --size SIZE IMAGE` makes a new image".into())
            }
            ErrorKind::PermissionDenied => Some(why_denied(Path::new(device))),
            ErrorKind::IsADirectory => Some("give an image file or a block device".into()),
            _ if source.to_string().contains("neither a regular file nor a block device") => {
                Some("give an image file or a block device".into())
            }
            _ => None,
        },
        Err(_) => None,
    };
    match hint {
        Some(h) => result.hint(h).could_not_run(),
        None => result.could_not_run(),
    }
}

/// Says what an image lacks that is a metadata dump.
pub(crate) fn note_dump(name: &str) {
    print::say(&format!(
        "larder: note: {name} is a metadata dump: it has names, attributes and the places of \
         data, but no data"
    ));
}

/// Says which devices of a file system are missing, or behind the others.
pub(crate) fn note_devices(name: &str, info: &FsInfo) {
    for missing in &info.missing_devices {
        print::say(&format!("larder: note: {name}: {missing} is missing; going on without it"));
        if !info.read_only && missing.seed.is_none() {
            print::say(&format!(
                "hint: `larder device replace {} NEW DIR` puts another device in its place; with \
                    --size SIZE it makes the file NEW",
                missing.id
            ));
        }
    }
    for stale in &info.stale_devices {
        print::say(&format!(
            "larder: note: {name}: {stale}: it is read only where no other device has the data, \
                until `larder scrub` has brought it up to date"
        ));
    }
    if !info.lost_chunks.is_empty() {
        print::say(&format!("larder: note: {name}: {}", what_is_lost(&info.lost_chunks)));
    }
}

/// What reading has to do without.
fn what_is_lost(lost: &[LostChunk]) -> String {
    let mut devices: Vec<String> =
        lost.iter().flat_map(|chunk| &chunk.devices).map(ToString::to_string).collect();
    devices.sort_unstable();
    devices.dedup();
    let bytes: u64 = lost.iter().map(|chunk| chunk.len).sum();
    format!(
        "{} chunks of data ({}) are not complete without device {}: reading what lay there fails, \
            everything else can be read",
        lost.len(),
        size::human(bytes),
        devices.join(", ")
    )
}

/// The hint for an image that is in use.
fn how_to_free(image: &Path, by: &str, access: Access) -> String {
    let first = if by.contains("attached to") {
        "detach it first".to_owned()
    } else if let Some(point) = state::mounted_on(image) {
        let point = print::path(&point);
        format!(
            "it is mounted on {point}: use what is there, or unmount it first (`larder umount \
                {point}`)"
        )
    } else if by.contains("mounted") {
        "unmount it first".to_owned()
    } else {
        "unmount it first, or wait until that process has ended".to_owned()
    };
    match access {
        Access::Read { .. } => {
            format!("{first}; --force reads it as it is, perhaps in the middle of a change")
        }
        Access::Serve => first,
        Access::Write => format!("{first}; only one process may write to an image"),
    }
}

/// Why this user may not open a file.
fn why_denied(path: &Path) -> String {
    if let Some(why) = mount_table::why_denied(path) {
        return why;
    }
    let me = rustix::process::geteuid().as_raw();
    match path.metadata() {
        Ok(m) => format!(
            "it belongs to user {}, group {}, and has the permissions {:03o}; you are user {me}",
            m.uid(),
            m.gid(),
            m.mode() & 0o777
        ),
        // A file that is to be made, or one that cannot even be looked at.
        Err(e) if e.kind() == ErrorKind::NotFound => {
            format!("you are user {me}, which may not make files in that directory")
        }
        Err(_) => format!("you are user {me}, which may not enter a directory on the way to it"),
    }
}

/// Adds a hint where a device holds no btrfs file system: what it holds instead.
pub(crate) fn advise_content<T>(
    result: anyhow::Result<T>,
    device: &dyn Device,
) -> anyhow::Result<T> {
    let foreign =
        |e: &anyhow::Error| e.chain().any(|e| e.to_string().contains("not a btrfs file system"));
    if !result.as_ref().is_err_and(foreign) {
        return result;
    }
    const PARTITION: &str = "give the partition (`lsblk -f`; for an image `losetup -P` makes them)";
    let hint = match larder_fs::mkfs::recognise(device) {
        Some(found) if found.contains("partition table") => {
            format!("it holds {found}: {PARTITION}")
        }
        Some(found) => format!("it holds {found}; is it the right file?"),
        None if device.size() == 0 => {
            "it is empty: `larder mkfs --size SIZE` makes a file system in it".into()
        }
        None => format!("is it the right file? if it is a whole disk, {PARTITION}"),
    };
    result.hint(hint).could_not_run()
}

/// An open image.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) fs: Arc<Filesystem>,
    name: String,
}

impl Image {
    /// Opens the image at `path`, with the given subvolume (the default one if `None`) as root.
    pub(crate) fn open(path: &Path, access: Access, subvolid: Option<u64>) -> anyhow::Result<Self> {
        Self::open_compressing(path, access, subvolid, None)
    }

    /// Opens an image or a metadata dump for reading names and attributes only.
    pub(crate) fn open_metadata(
        path: &Path,
        force: bool,
        subvolid: Option<u64>,
    ) -> anyhow::Result<Self> {
        let options = OpenOptions { metadata_dump: true, ..OpenOptions::default() };
        Self::open_with(path, Access::Read { force }, subvolid, options)
    }

    /// Opens an image to write a stream into it, with the top as root. Nothing is read twice, and
    /// memory that is touched for the first time costs more than it is worth: so the cache is
    /// small. What becomes free meanwhile are nodes, whose space is soon used again. To make holes
    /// of it in the image file would take as long as writing them.
    pub(crate) fn open_for_stream(path: &Path) -> anyhow::Result<Self> {
        let options = OpenOptions { cache_size: STREAM_CACHE, ..OpenOptions::default() };
        Self::open_with(path, Access::Write, Some(ObjectId::FS_TREE.0), options)
    }

    /// As [`Image::open`], and compresses what is written.
    pub(crate) fn open_compressing(
        path: &Path,
        access: Access,
        subvolid: Option<u64>,
        compress: Option<Packing>,
    ) -> anyhow::Result<Self> {
        let compress = compress.map(|packing| Compress { packing, force: false });
        let options = OpenOptions { compress, discard: true, ..OpenOptions::default() };
        Self::open_with(path, access, subvolid, options)
    }

    fn open_with(
        path: &Path,
        access: Access,
        subvolid: Option<u64>,
        options: OpenOptions,
    ) -> anyhow::Result<Self> {
        Self::on(&open_devices(path, access)?, path, access, subvolid, options)
    }

    /// Opens an image on devices that are open already.
    pub(crate) fn on(
        devices: &[Arc<FileDevice>],
        path: &Path,
        access: Access,
        subvolid: Option<u64>,
        options: OpenOptions,
    ) -> anyhow::Result<Self> {
        let (name, device) = (path.display().to_string(), &devices[0]);
        let read_only = access != Access::Write;
        let options = OpenOptions {
            read_only,
            // Reading changes nothing, and what is read is verified.
            degraded: read_only || may_be_degraded(),
            no_log_replay: read_only,
            subvol: subvolid.map_or(SubvolChoice::Default, SubvolChoice::Id),
            // One command makes one commit, when it is done.
            commit_interval: None,
            discard: options.discard && !device.is_block_device(),
            ..options
        };
        let opened = open_filesystem(devices, devices::names(path).len(), options);
        let fs = advise_content(advise_filesystem(opened, &name), &**device)?;
        let info = fs.info();
        note_devices(&name, &info);
        if info.metadata_dump {
            note_dump(&name);
        }
        if info.has_unreplayed_log && info.metadata_dump {
            print::say(&format!(
                "larder: note: {name} has a log; showing its last commit (`larder inspect log` \
                    shows the log)"
            ));
        } else if info.has_unreplayed_log {
            print::say(&format!(
                "larder: note: {name} was not unmounted cleanly and has a log; showing its last \
                 commit (a mount, also -o ro, shows what was fsynced after it, too)"
            ));
        }
        Ok(Self { fs, name })
    }

    /// Commits what was changed and closes.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.fs.close().with_context(|| format!("{}: committing", self.name))
    }

    /// The inode at `path`; a symbolic link at its end is followed if `follow`.
    pub(crate) fn resolve(&self, path: &[u8], follow: bool) -> anyhow::Result<Attr> {
        self.walk(path, follow).map(|(_, attr)| attr).with_context(|| self.show(path))
    }

    /// The directory that `path` lies in, and its last name; the name itself need not exist.
    pub(crate) fn parent<'a>(&self, path: &'a [u8]) -> anyhow::Result<(InodeId, &'a [u8])> {
        let end = path.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        let trimmed = &path[..end];
        let split = trimmed.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
        let (dir, name) = trimmed.split_at(split);
        if matches!(name, b"" | b"." | b"..") {
            return Err(anyhow!("there is no name at the end of {}", self.show(path)));
        }
        let dir = self.resolve(dir, true)?;
        if dir.kind != FileKind::Directory {
            return Err(anyhow!("{}: the directory part is not a directory", self.show(path)));
        }
        Ok((dir.id, name))
    }

    /// Is `dir` the directory `above`, or somewhere below it?
    pub(crate) fn is_below(&self, dir: InodeId, above: InodeId) -> anyhow::Result<bool> {
        let (root, mut at) = (self.fs.root(), dir);
        loop {
            if at == above {
                return Ok(true);
            }
            let up = self.fs.lookup(at, b"..")?.id;
            if at == root || up == at {
                return Ok(false);
            }
            at = up;
        }
    }

    /// Does the last component exist? (An error of another kind counts as "no".)
    pub(crate) fn lookup(&self, path: &[u8], follow: bool) -> Option<Attr> {
        self.walk(path, follow).ok().map(|(_, attr)| attr)
    }

    /// Names and inodes of a directory in its own order, without `.` and `..`.
    pub(crate) fn entries(&self, dir: InodeId) -> anyhow::Result<Vec<(Vec<u8>, InodeId)>> {
        let mut out = Vec::new();
        self.fs.readdir(dir, 0, &mut |e| {
            if !matches!(e.name, b"." | b"..") {
                out.push((e.name.to_vec(), e.id));
            }
            true
        })?;
        Ok(out)
    }

    /// `IMAGE:/path` for messages.
    pub(crate) fn show(&self, path: &[u8]) -> String {
        let path = print::name(path);
        format!("{}:/{}", self.name, path.trim_start_matches('/'))
    }

    fn walk(&self, path: &[u8], follow: bool) -> larder_fs::Result<(Vec<InodeId>, Attr)> {
        let root = self.fs.root();
        let mut trail = vec![root];
        let mut at = self.fs.getattr(root)?;
        let mut todo: Vec<Vec<u8>> = components(path);
        let mut links = 0;
        while let Some(name) = todo.pop() {
            if name == b".." {
                if trail.len() > 1 {
                    trail.pop();
                }
                at = self.fs.getattr(trail[trail.len() - 1])?;
                continue;
            }
            if at.kind != FileKind::Directory {
                return Err(larder_fs::Error::NotDirectory);
            }
            let found = self.fs.lookup(at.id, &name)?;
            if found.kind == FileKind::Symlink && (follow || !todo.is_empty()) {
                links += 1;
                if links > MAX_LINKS {
                    return Err(larder_fs::Error::Invalid("too many symbolic links"));
                }
                let target = self.fs.readlink(found.id)?;
                if target.first() == Some(&b'/') {
                    trail.truncate(1);
                    at = self.fs.getattr(root)?;
                }
                todo.extend(components(&target));
                continue;
            }
            if found.kind == FileKind::Directory {
                trail.push(found.id);
            }
            at = found;
        }
        Ok((trail, at))
    }
}

/// Adds what helps when a file system cannot be opened.
pub(crate) fn advise_filesystem<T>(result: larder_fs::Result<T>, name: &str) -> anyhow::Result<T> {
    let hint = match &result {
        Err(larder_fs::Error::Volume(VolumeError::Corrupt { what, .. }))
            if what.contains("mirror") =>
        {
            Some("`larder restore` copies the files, starting from the mirror")
        }
        Err(larder_fs::Error::Volume(VolumeError::Missing { what, .. })) => {
            Some(if what.contains("cannot be read") {
                "name all devices, with commas between them (`A,B`); `larder restore` copies what \
                    those that are left still have"
            } else if what.contains("cannot be written") {
                "without a lost device it can still be read: mount it with -o ro,degraded, or use \
                    `larder restore`"
            } else {
                "name it, too (a mount takes several, other commands `A,B`); if it is lost, go on \
                    without it: mount with -o degraded (to look only: -o ro,degraded), other \
                    commands with --degraded"
            })
        }
        Err(larder_fs::Error::Volume(VolumeError::Apart { .. })) => Some(
            "each has changes that the other lacks; name the one whose changes are to be kept, and \
                go on without the other: mount it with -o degraded, other commands with \
                --degraded (-o ro,degraded shows what is on either)",
        ),
        Err(e) if e.to_string().contains("metadata dump") => Some(DUMP_ADVICE),
        Err(e) if e.to_string().contains("the log cannot be replayed") => Some(
            "`larder inspect log` shows it; -o ro,nologreplay and `larder restore` read the last \
             commit; as a last resort, `larder rescue zero-log` drops it",
        ),
        Err(e) if e.to_string().contains("is the image truncated") => Some(
            "get the whole image again; of this part `larder restore` copies what can still be \
                read",
        ),
        Err(larder_fs::Error::Corrupt { .. }) => Some(
            "`larder check` says what is damaged; `larder restore` copies what can still be read",
        ),
        Err(e) if e.to_string().contains("no subvolume") => {
            Some("`-o subvolid=5` (or --subvolid 5) is the top of the file system")
        }
        _ => None,
    };
    let result = result.map_err(|e| {
        let text = e.to_string();
        let e = anyhow::Error::new(e);
        if text.starts_with(name) { e } else { e.context(name.to_owned()) }
    });
    match hint {
        Some(h) => result.hint(h).could_not_run(),
        None => result.could_not_run(),
    }
}

/// Names of a path, the last first, without empty ones and dots.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|b| *b == b'/')
        .rev()
        .filter(|n| !matches!(*n, b"" | b"."))
        .map(<[u8]>::to_vec)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_fall_into_names() {
        assert_eq!(components(b"/a//b/./../c/"), [&b"c"[..], b"..", b"b", b"a"]);
        assert!(components(b"/").is_empty());
    }
}
