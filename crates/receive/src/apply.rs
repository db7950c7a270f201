//! What each command does to the subvolume.
//!
//! Values are checked here before a destination sees them: paths, modes, owners, times, kinds of
//! compression. Data that a destination cannot store packed is unpacked here. Its length is bounded
//! before memory is taken for it.

use crate::destination::{BoxResult, Destination, Encoded, Node, Reserve, Shared, Times};
use crate::error::Refused;
use crate::path::StreamPath;
use crate::record::ATTRIBUTE;
use larder_format::MAX_COMPRESSED_EXTENT;
use larder_format::items::{Compression, Timespec};
use larder_stream::Command;

/// Permission bits of a mode.
const PERMISSIONS: u64 = 0o7777;
/// The type in a mode, and those of devices.
const TYPE: u64 = 0o170_000;
const CHAR_DEVICE: u64 = 0o020_000;
const BLOCK_DEVICE: u64 = 0o060_000;

/// Bits of `fallocate(2)`.
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

/// How commands are applied.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct How {
    /// Unpack what is packed, also where it could be stored so.
    pub(crate) force_decompress: bool,
}

/// Applies a command that changes a subvolume. `source` is the subvolume that a clone takes from.
pub(crate) fn apply<D: Destination>(
    to: &mut D,
    command: &Command<'_>,
    source: Option<&D::Subvol>,
    how: How,
) -> BoxResult<()> {
    let at = StreamPath::new;
    let entry = StreamPath::entry;
    match *command {
        Command::Mkfile { path, .. }
        | Command::Mkdir { path, .. }
        | Command::Mkfifo { path, .. }
        | Command::Mksock { path, .. }
        | Command::Mknod { path, .. }
        | Command::Symlink { path, .. } => {
            let node = node(command)?.ok_or(Refused::Value("it makes nothing"))?;
            to.make(entry(path)?, &node)
        }
        Command::Rename { path, to: new } => to.rename(entry(path)?, entry(new)?),
        Command::Link { path, target } => to.link(entry(path)?, entry(target)?),
        Command::Unlink { path } => to.unlink(entry(path)?),
        Command::Rmdir { path } => to.rmdir(entry(path)?),
        // The record of the subvolume that was sent; this one has its own.
        Command::SetXattr { path: b"", name: ATTRIBUTE, .. }
        | Command::RemoveXattr { path: b"", name: ATTRIBUTE } => Ok(()),
        Command::SetXattr { path, name, value } => to.set_xattr(at(path)?, name, value),
        Command::RemoveXattr { path, name } => to.remove_xattr(at(path)?, name),
        Command::Write { path, offset, data } => to.write(entry(path)?, offset, data),
        Command::Truncate { path, size } => to.truncate(entry(path)?, size),
        Command::Chmod { path, mode } => to.chmod(at(path)?, Mode(mode).permissions()),
        Command::Chown { path, uid, gid } => to.chown(at(path)?, owner(uid)?, owner(gid)?),
        Command::Utimes { path, atime, mtime, ctime, otime } => {
            to.set_times(at(path)?, &times(atime, mtime, ctime, otime)?)
        }
        Command::Fallocate { path, mode, offset, size } => {
            let end = offset.checked_add(size).ok_or(Refused::Value("the range is too long"))?;
            to.reserve(entry(path)?, offset..end, reserve(mode)?)
        }
        Command::Clone { path, offset, len, from_path, from_offset, .. } => {
            let subvol = source.ok_or(Refused::Value("a clone without a source"))?;
            let from = Shared { subvol, path: entry(from_path)?, offset: from_offset, len };
            to.share(&from, entry(path)?, offset)
        }
        Command::EncodedWrite { path, .. } => encoded_write(to, entry(path)?, command, how),
        // What a stream without data says in place of data.
        Command::UpdateExtent { path, .. } => entry(path).map(drop).map_err(Into::into),
        // Linux does not apply these either: they would forbid the commands that follow.
        Command::Fileattr { path, .. } => at(path).map(drop).map_err(Into::into),
        Command::Subvol { .. } | Command::Snapshot { .. } | Command::End {} => Ok(()),
    }
}

/// Does a command make an inode?
pub(crate) fn makes(command: &Command<'_>) -> bool {
    !matches!(node(command), Ok(None))
}

/// The inode that a command makes; nothing if it makes none.
fn node<'c>(command: &Command<'c>) -> Result<Option<Node<'c>>, Refused> {
    Ok(Some(match *command {
        Command::Mkfile { .. } => Node::File,
        Command::Mkdir { .. } => Node::Directory,
        Command::Mkfifo { .. } => Node::Fifo,
        Command::Mksock { .. } => Node::Socket,
        Command::Mknod { rdev, mode, .. } => device(rdev, Mode(mode))?,
        Command::Symlink { target, .. } => Node::Symlink { target },
        _ => return Ok(None),
    }))
}

/// Applies a command that makes an inode, and the next one, which renames it. `false`: nothing was
/// done. They have to be applied one by one then, also to find out what is wrong with them.
pub(crate) fn apply_both<D: Destination>(
    to: &mut D,
    make: &Command<'_>,
    rename: &Command<'_>,
) -> bool {
    let Command::Rename { path, to: name } = *rename else { return false };
    let (Ok(Some(node)), true) = (node(make), make.path() == Some(path)) else { return false };
    let (Ok(path), Ok(name)) = (StreamPath::entry(path), StreamPath::entry(name)) else {
        return false;
    };
    to.make_as(path, &node, name).unwrap_or(false)
}

/// A mode as a stream has it.
#[derive(Clone, Copy)]
struct Mode(u64);

impl Mode {
    #[allow(clippy::cast_possible_truncation)]
    fn permissions(self) -> u32 {
        (self.0 & PERMISSIONS) as u32
    }
}

fn owner(id: u64) -> Result<u32, Refused> {
    // The largest number means "leave it" to system calls.
    let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
    id.ok_or(Refused::Value("no user or group has this number"))
}

/// A device's numbers, which lie in a stream as Linux gives them to user space.
#[allow(clippy::cast_possible_truncation)]
fn device<'n>(rdev: u64, mode: Mode) -> Result<Node<'n>, Refused> {
    if rdev > u64::from(u32::MAX) {
        return Err(Refused::Value("no device has this number"));
    }
    let major = (rdev >> 8 & 0xfff) as u32;
    let minor = (rdev & 0xff | rdev >> 12 & 0xfff00) as u32;
    match mode.0 & TYPE {
        CHAR_DEVICE => Ok(Node::CharDevice { major, minor }),
        BLOCK_DEVICE => Ok(Node::BlockDevice { major, minor }),
        _ => Err(Refused::Value("its mode is not that of a device")),
    }
}

fn times(
    accessed: Timespec,
    modified: Timespec,
    changed: Timespec,
    created: Option<Timespec>,
) -> Result<Times, Refused> {
    let all = [Some(accessed), Some(modified), Some(changed), created];
    if all.into_iter().flatten().any(|t| t.nsec.get() >= 1_000_000_000) {
        return Err(Refused::Value("a time has a second or more in nanoseconds"));
    }
    Ok(Times { accessed, modified, changed, created })
}

fn reserve(mode: u32) -> Result<Reserve, Refused> {
    let keep_size = mode & KEEP_SIZE != 0;
    match mode & !KEEP_SIZE {
        0 => Ok(Reserve::Allocate { keep_size }),
        PUNCH_HOLE if keep_size => Ok(Reserve::Punch),
        ZERO_RANGE => Ok(Reserve::Zero { keep_size }),
        _ => Err(Refused::NotSupported(format!("fallocate with the mode {mode}"))),
    }
}

fn encoded_write<D: Destination>(
    to: &mut D,
    path: StreamPath<'_>,
    command: &Command<'_>,
    how: How,
) -> BoxResult<()> {
    let Command::EncodedWrite {
        offset,
        unencoded_file_len,
        unencoded_len,
        unencoded_offset,
        compression,
        encryption,
        data,
        ..
    } = *command
    else {
        return Ok(());
    };
    if let Some(number) = encryption.filter(|e| *e != 0) {
        return Err(Refused::NotSupported(format!("encryption of type {number}")).into());
    }
    let encoded = Encoded {
        offset,
        file_len: unencoded_file_len,
        unpacked_len: unencoded_len,
        unpacked_offset: unencoded_offset,
        compression: method(compression.unwrap_or(0))?,
        data,
    };
    let end = unencoded_offset.checked_add(unencoded_file_len);
    if end.is_none_or(|end| end > unencoded_len) || unencoded_len > MAX_UNPACKED {
        return Err(Refused::Value("the lengths of the packed data do not fit together").into());
    }
    if !how.force_decompress && to.write_encoded(path, &encoded)? {
        return Ok(());
    }
    let unpacked = unpack(&encoded)?;
    to.write(path, offset, &unpacked)
}

/// Longest data that one extent has unpacked.
const MAX_UNPACKED: u64 = MAX_COMPRESSED_EXTENT;

/// The method, as the ioctl numbers them. Each sector size has a number of its own for lzo; with
/// others than 4 KiB the pages in the packed data have other borders.
fn method(number: u32) -> Result<Compression, Refused> {
    match number {
        0 => Ok(Compression::None),
        1 => Ok(Compression::Zlib),
        2 => Ok(Compression::Zstd),
        3 => Ok(Compression::Lzo),
        4..=7 => Err(Refused::NotSupported("lzo with sectors that have not 4 KiB".to_owned())),
        other => Err(Refused::NotSupported(format!("compression of type {other}"))),
    }
}

/// The bytes of the file that packed data holds.
fn unpack(data: &Encoded<'_>) -> BoxResult<Vec<u8>> {
    let index = |n: u64| usize::try_from(n).expect("bounded above");
    let mut unpacked = vec![0; index(data.unpacked_len)];
    larder_codec::decompress(data.compression, data.data, &mut unpacked)?;
    unpacked.truncate(index(data.unpacked_offset + data.file_len));
    unpacked.drain(..index(data.unpacked_offset));
    Ok(unpacked)
}
