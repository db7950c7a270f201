//! IOCTL: inode flags (`lsattr`, `chattr`), the label, the btrfs ioctls that have an answer here,
//! and Larder's own ([`crate::control`]).

use super::Server;
use super::changes::Change;
use super::report::text;
use crate::control::{
    FITRIM, GET_LABEL, IOC_DEVICE, IOC_DF, IOC_RESET_DEVICE_ERRORS, IOC_START_SYNC, IOC_STATS,
    IOC_SYNC, LABEL_LEN, SET_LABEL, ioc,
};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Outcome, Reply, Request};
use crate::perm::{self, Caller};
use crate::proto::{IoctlIn, IoctlOut};
use larder_format::items::InodeFlags;
use larder_fs::{Attr, FileKind, InodeId, SetAttr, TrimRange};

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// `FS_IOC_GETFLAGS` and its relatives, with the sizes of 64-bit and 32-bit callers.
const GETFLAGS: [u32; 2] = [ioc(READ, b'f', 1, 8), ioc(READ, b'f', 1, 4)];
pub(super) const SETFLAGS: [u32; 2] = [ioc(WRITE, b'f', 2, 8), ioc(WRITE, b'f', 2, 4)];
const GETVERSION: [u32; 2] = [ioc(READ, b'v', 1, 8), ioc(READ, b'v', 1, 4)];
const FSGETXATTR: u32 = ioc(READ, b'X', 31, 28);
pub(super) const FSSETXATTR: u32 = ioc(WRITE, b'X', 32, 28);
const BTRFS_SYNC: u32 = ioc(NONE, 0x94, 8, 0);
const BTRFS_WAIT_SYNC: u32 = ioc(WRITE, 0x94, 22, 8);
const BTRFS_START_SYNC: u32 = ioc(READ, 0x94, 24, 8);
const BTRFS_FS_INFO: u32 = ioc(READ, 0x94, 31, 1024);

/// Inode flags of the format.
const NODATASUM: u64 = InodeFlags::NODATASUM.bits();
const NODATACOW: u64 = InodeFlags::NODATACOW.bits();
const NOCOMPRESS: u64 = InodeFlags::NOCOMPRESS.bits();
const SYNC: u64 = InodeFlags::SYNC.bits();
pub(super) const IMMUTABLE: u64 = InodeFlags::IMMUTABLE.bits();
pub(super) const APPEND: u64 = InodeFlags::APPEND.bits();
pub(super) const NODUMP: u64 = InodeFlags::NODUMP.bits();
const NOATIME: u64 = InodeFlags::NOATIME.bits();
const DIRSYNC: u64 = InodeFlags::DIRSYNC.bits();
pub(super) const COMPRESS: u64 = InodeFlags::COMPRESS.bits();

/// Inode flags, and for each its `FS_*_FL` and `FS_XFLAG_*` (0 if there is none).
const FLAGS: [(u64, u32, u32); 9] = [
    (SYNC, 0x8, 0x20),
    (IMMUTABLE, 0x10, 0x8),
    (APPEND, 0x20, 0x10),
    (NODUMP, 0x40, 0x80),
    (NOATIME, 0x80, 0x40),
    (DIRSYNC, 0x1_0000, 0),
    (NODATACOW, 0x80_0000, 0),
    (COMPRESS, 0x4, 0),
    (NOCOMPRESS, 0x400, 0),
];

fn to_fs(flags: u64) -> u32 {
    FLAGS.iter().filter(|(own, ..)| flags & own != 0).map(|(_, fs, _)| fs).sum()
}
fn to_x(flags: u64) -> u32 {
    FLAGS.iter().filter(|(own, ..)| flags & own != 0).map(|(.., x)| x).sum()
}

/// New inode flags for `chattr`.
fn from_fs(attr: &Attr, wanted: u32) -> Result<u64, Errno> {
    let known: u32 = FLAGS.iter().map(|(_, fs, _)| fs).sum();
    if wanted & !known != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let has = |own: u64| FLAGS.iter().any(|(o, fs, _)| *o == own && wanted & fs != 0);
    if has(COMPRESS) && (has(NOCOMPRESS) || has(NODATACOW)) {
        return Err(Errno::INVAL);
    }
    let all: u64 = FLAGS.iter().map(|(own, ..)| own).sum();
    let mut flags = attr.flags & !all;
    for (own, ..) in FLAGS.iter().filter(|(own, ..)| has(*own)) {
        flags |= own;
    }
    // A file cannot lose the checksums of some contents only: if it has contents, the flag stays as
    // it was.
    if attr.kind == FileKind::Regular {
        if attr.size > 0 {
            flags = flags & !NODATACOW | attr.flags & NODATACOW;
        } else if flags & NODATACOW != 0 {
            flags |= NODATASUM;
        } else {
            flags &= !NODATASUM;
        }
    }
    Ok(flags)
}

/// The same for the flags of `FSSETXATTR`; the rest of that structure must be empty.
fn from_x(attr: &Attr, arg: &[u8]) -> Result<u64, Errno> {
    let (xflags, rest) = arg.split_first_chunk::<4>().ok_or(Errno::INVAL)?;
    let wanted = u32::from_ne_bytes(*xflags);
    let known: u32 = FLAGS.iter().map(|(.., x)| x).sum();
    if wanted & !known != 0 || rest.iter().any(|b| *b != 0) {
        return Err(Errno::OPNOTSUPP);
    }
    let shown: u64 = FLAGS.iter().filter(|(.., x)| *x != 0).map(|(own, ..)| own).sum();
    let set: u64 = FLAGS.iter().filter(|(.., x)| wanted & x != 0).map(|(own, ..)| own).sum();
    Ok(attr.flags & !shown | set)
}

/// Does this ioctl sync the file system?
pub(super) fn syncs(cmd: u32) -> bool {
    matches!(cmd, IOC_SYNC | BTRFS_SYNC | BTRFS_START_SYNC)
}

/// An ioctl that is being answered.
pub(super) struct Ioctl<'a> {
    /// The inode that it was called on.
    pub(super) id: InodeId,
    pub(super) request: &'a Request<'a>,
    pub(super) command: u32,
    pub(super) arg: &'a [u8],
    pub(super) context: ExecContext,
}

/// The bytes of an answer; `None` if the command belongs to another group.
pub(super) type Answer = Result<Option<Vec<u8>>, Failure>;

impl Ioctl<'_> {
    pub(super) fn caller(&self) -> Caller {
        Caller::from(&self.request.header)
    }
    /// The 8 bytes at an offset of the argument, as a number.
    pub(super) fn word(&self, at: usize) -> Result<u64, Errno> {
        let bytes = self.arg.get(at..).and_then(|a| a.first_chunk::<8>()).ok_or(Errno::INVAL)?;
        Ok(u64::from_ne_bytes(*bytes))
    }
}

impl Server {
    pub(super) fn ioctl(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let asked: IoctlIn = request.arg()?;
        self.may_change_by(asked.cmd)?;
        let arg = request.data.get(..asked.in_size as usize).ok_or(Errno::INVAL)?;
        let call = Ioctl { id, request, command: asked.cmd, arg, context };
        let answer = match self.flags_ioctl(&call)? {
            None => self.file_system_ioctl(&call)?,
            some => some,
        };
        let answer = match answer {
            None => self.subvolume_ioctl(&call)?,
            some => some,
        };
        let answer = match answer {
            None => self.sharing_ioctl(&call)?.ok_or(Errno::NOTTY)?,
            Some(answer) => answer,
        };
        let len = answer.len().min(asked.out_size as usize);
        reply.value_and_bytes(&IoctlOut::default(), &answer[..len])
    }

    /// The answer to an ioctl about inode flags and the generation; `None` for any other.
    fn flags_ioctl(&self, call: &Ioctl<'_>) -> Answer {
        let &Ioctl { id, command, arg, .. } = call;
        let answer = match command {
            c if GETFLAGS.contains(&c) => {
                u64::from(to_fs(self.fs.getattr(id)?.flags)).to_ne_bytes().to_vec()
            }
            c if SETFLAGS.contains(&c) => {
                let wanted = arg.first_chunk::<4>().ok_or(Errno::INVAL)?;
                self.set_flags(call, |attr| from_fs(attr, u32::from_ne_bytes(*wanted)))?;
                Vec::new()
            }
            FSGETXATTR => {
                let mut out = vec![0; 28];
                out[..4].copy_from_slice(&to_x(self.fs.getattr(id)?.flags).to_ne_bytes());
                out
            }
            FSSETXATTR => {
                self.set_flags(call, |attr| from_x(attr, arg))?;
                Vec::new()
            }
            c if GETVERSION.contains(&c) => {
                self.fs.getattr(id)?.generation.0.to_ne_bytes().to_vec()
            }
            _ => return Ok(None),
        };
        Ok(Some(answer))
    }

    /// The answer to an ioctl about the whole file system; `None` for any other.
    fn file_system_ioctl(&self, call: &Ioctl<'_>) -> Answer {
        let answer = match call.command {
            IOC_SYNC | BTRFS_SYNC => {
                self.fs.sync()?;
                Vec::new()
            }
            IOC_START_SYNC => {
                self.fs.start_sync();
                Vec::new()
            }
            // It starts and finishes at once, so that nothing is left to wait for.
            BTRFS_START_SYNC => {
                self.fs.sync()?;
                self.fs.info().generation.0.to_ne_bytes().to_vec()
            }
            BTRFS_WAIT_SYNC => Vec::new(),
            BTRFS_FS_INFO => self.fs_info().to_vec(),
            GET_LABEL => self.label(),
            SET_LABEL => {
                if self.checked(call.request).is_some() {
                    return Err(Errno::PERM.into());
                }
                self.must_be_privileged(call.request)?;
                let end = call.arg.iter().position(|b| *b == 0).ok_or(Errno::INVAL)?;
                self.fs.set_label(&call.arg[..end])?;
                Vec::new()
            }
            FITRIM => self.trim(call)?,
            IOC_DEVICE => text(&self.device_json(call.word(0)?)),
            IOC_RESET_DEVICE_ERRORS => {
                self.must_be_privileged(call.request)?;
                self.fs.reset_device_errors()?;
                Vec::new()
            }
            IOC_STATS => text(&self.stats_json()),
            IOC_DF => text(&self.df_json()?),
            _ => return Ok(None),
        };
        Ok(Some(answer))
    }

    fn label(&self) -> Vec<u8> {
        let mut label = self.fs.info().label;
        label.truncate(LABEL_LEN - 1);
        label.resize(LABEL_LEN, 0);
        label
    }

    /// Discards free space: `struct fstrim_range`.
    fn trim(&self, call: &Ioctl<'_>) -> Result<Vec<u8>, Failure> {
        self.must_be_privileged(call.request)?;
        let (start, len, min_len) = (call.word(0)?, call.word(8)?, call.word(16)?);
        let done = self.fs.trim(TrimRange { start, len, min_len })?;
        Ok([start, done.bytes, done.min_len].map(u64::to_ne_bytes).concat())
    }

    /// # Errors
    /// `EPERM` for callers that are neither root nor the user that runs the daemon.
    pub(super) fn must_be_privileged(&self, request: &Request<'_>) -> Result<(), Errno> {
        if self.is_privileged(request) { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Root, or the user that runs the daemon.
    pub(super) fn is_privileged(&self, request: &Request<'_>) -> bool {
        request.header.uid == 0 || request.header.uid == rustix::process::getuid().as_raw()
    }

    fn set_flags(
        &self,
        call: &Ioctl<'_>,
        new: impl FnOnce(&Attr) -> Result<u64, Errno>,
    ) -> Result<(), Failure> {
        let id = call.id;
        let announcement = self.begin_change(call.context, id)?;
        let attr = self.fs.getattr(id)?;
        if !matches!(attr.kind, FileKind::Regular | FileKind::Directory) {
            return Err(Errno::NOTTY.into());
        }
        perm::owns(call.caller(), &attr)?;
        let flags = new(&attr)?;
        if flags != attr.flags {
            self.fs.setattr(id, &SetAttr { flags: Some(flags), ..SetAttr::default() })?;
            // The kernel does not know what an ioctl changes, and has the old change time.
            self.me.notify.attributes_changed(self.me.nodes.node(id));
            announcement.publish(|| vec![Change::Attributes(id)]);
        }
        Ok(())
    }

    /// `struct btrfs_ioctl_fs_info_args`.
    fn fs_info(&self) -> [u8; 1024] {
        let info = self.fs.info();
        let mut out = [0; 1024];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&1u64.to_ne_bytes()); // highest device id
        put(&1u64.to_ne_bytes()); // devices
        put(&info.fsid);
        put(&info.nodesize.to_ne_bytes());
        put(&info.sectorsize.to_ne_bytes());
        put(&info.sectorsize.to_ne_bytes()); // alignment of clones
        put(&info.csum.to_disk().to_ne_bytes());
        put(&(info.csum.size() as u16).to_ne_bytes());
        put(&3u64.to_ne_bytes()); // which optional fields are there: checksum, generation
        put(&info.generation.0.to_ne_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::ids::{Generation, ObjectId};
    use larder_fs::Timestamp;

    fn empty(flags: u64) -> Attr {
        let t = Timestamp::default();
        Attr {
            id: InodeId { subvol: ObjectId(5), ino: 300 },
            generation: Generation(1),
            kind: FileKind::Regular,
            perm: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            bytes: 0,
            atime: t,
            mtime: t,
            ctime: t,
            otime: t,
            flags,
        }
    }

    fn with_contents(flags: u64) -> Attr {
        Attr { size: 5, ..empty(flags) }
    }

    #[test]
    fn numbers_are_those_of_linux() {
        assert_eq!(GETFLAGS[0], 0x8008_6601);
        assert_eq!(SETFLAGS[0], 0x4008_6602);
        assert_eq!(FSGETXATTR, 0x801c_581f);
        assert_eq!(FSSETXATTR, 0x401c_5820);
        assert_eq!(BTRFS_SYNC, 0x9408);
        assert_eq!(BTRFS_FS_INFO, 0x8400_941f);
    }

    #[test]
    fn chattr_goes_both_ways() {
        for (own, fs, _) in FLAGS {
            let flags = from_fs(&empty(0), fs).unwrap();
            assert_eq!(flags & !NODATASUM, own);
            assert_eq!(to_fs(flags), fs);
        }
        assert_eq!(
            from_fs(&empty(IMMUTABLE | (1 << 31)), 0).unwrap(),
            1 << 31,
            "unknown flags stay"
        );
        assert_eq!(from_fs(&empty(0), 0x4 | 0x400), Err(Errno::INVAL));
        assert_eq!(from_fs(&empty(0), 0x1), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn nocow_needs_an_empty_file() {
        assert_eq!(from_fs(&empty(0), 0x80_0000).unwrap(), NODATACOW | NODATASUM);
        assert_eq!(from_fs(&with_contents(0), 0x80_0000).unwrap(), 0);
        assert_eq!(
            from_fs(&with_contents(NODATACOW | NODATASUM), 0).unwrap(),
            NODATACOW | NODATASUM
        );
        assert_eq!(from_fs(&empty(NODATACOW | NODATASUM), 0).unwrap(), 0);
    }

    #[test]
    fn xflags_leave_the_others_alone() {
        let mut arg = [0; 28];
        arg[..4].copy_from_slice(&0x8u32.to_ne_bytes());
        assert_eq!(from_x(&with_contents(COMPRESS | APPEND), &arg).unwrap(), COMPRESS | IMMUTABLE);
        arg[12] = 1; // a project id
        assert_eq!(from_x(&with_contents(0), &arg), Err(Errno::OPNOTSUPP));
        assert_eq!(from_x(&with_contents(0), &[]), Err(Errno::INVAL));
    }
}
