//! Telling the kernel what changed behind its back.
//!
//! Names that come or go by an ioctl are not seen by the kernel, which keeps entries, absent ones too, and listings for
//! as long as we allow, which is a day. A notification is a message that nobody asked for; it goes through `/dev/fuse`
//! whatever the transport.

use crate::proto::OutHeader;
use rustix::fd::OwnedFd;
use std::io::IoSlice;
use zerocopy::IntoBytes;

/// `FUSE_NOTIFY_INVAL_INODE` and `FUSE_NOTIFY_INVAL_ENTRY`.
const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;

/// The way to the kernel.
#[derive(Debug)]
pub(crate) struct Notifier(Option<OwnedFd>);

impl Notifier {
    /// Over a duplicate of the mount's descriptor; without one nothing is told.
    pub(crate) fn new(fd: Option<OwnedFd>) -> Self {
        Self(fd)
    }
    /// A name in a directory, given by its node, is not what it was. Must not be called for a request during which the
    /// kernel keeps that directory locked.
    pub(crate) fn name_changed(&self, dir: u64, name: &[u8]) {
        let mut entry = Vec::with_capacity(17 + name.len());
        entry.extend_from_slice(&dir.to_ne_bytes());
        entry.extend_from_slice(&(name.len() as u32).to_ne_bytes());
        entry.extend_from_slice(&0u32.to_ne_bytes());
        entry.extend_from_slice(name);
        entry.push(0);
        self.send(INVAL_ENTRY, &entry);
        // Its listing and its times, which the kernel drops by itself only where it knew the name.
        let mut inode = Vec::with_capacity(24);
        for field in [dir, 0, 0] {
            inode.extend_from_slice(&field.to_ne_bytes());
        }
        self.send(INVAL_INODE, &inode);
    }
    /// What a file holds, and its attributes, are not what they were. Must not be called for a request during which the
    /// kernel keeps pages of that file locked.
    pub(crate) fn content_changed(&self, node: u64) {
        let inode: Vec<u8> = [node, 0, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.send(INVAL_INODE, &inode);
    }
    /// A part of what a file holds is not what it was, nor are its attributes. Waits until the kernel has let go of the pages: for a
    /// thread with [`Patience::Kernel`](crate::handler::Patience::Kernel).
    pub(crate) fn range_changed(&self, node: u64, offset: u64, len: u32) {
        // A length of 0 would be all the rest.
        if len > 0 {
            let inode: Vec<u8> = [node, offset, len.into()].iter().flat_map(|w| w.to_ne_bytes()).collect();
            self.send(INVAL_INODE, &inode);
        }
    }
    /// Attributes of an inode are not what they were.
    pub(crate) fn attributes_changed(&self, node: u64) {
        // A place before the beginning: no contents.
        let inode: Vec<u8> = [node, u64::MAX, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.send(INVAL_INODE, &inode);
    }
    fn send(&self, code: i32, body: &[u8]) {
        let Some(fd) = &self.0 else { return };
        let len = (size_of::<OutHeader>() + body.len()) as u32;
        let head = OutHeader { len, error: code, unique: 0 };
        // ENOENT: the kernel did not know it.
        if let Err(e) = rustix::io::writev(fd, &[IoSlice::new(head.as_bytes()), IoSlice::new(body)])
            && e != rustix::io::Errno::NOENT
        {
            tracing::debug!("the kernel was not told of a change: {e}");
        }
    }
}
