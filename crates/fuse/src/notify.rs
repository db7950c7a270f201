//! Telling the kernel what changed behind its back.
//!
//! The kernel does not see names that come or go by an ioctl, nor what another mount of the same
//! file system changes. It keeps entries, absent ones too, listings, attributes and contents for as
//! long as the server allows, which is a day. A notification is a message that is no reply. With
//! both transports it goes through `/dev/fuse`.
//!
//! A notification about a name waits until no request works in its directory. One about contents
//! waits until no request reads or writes these pages. One about attributes waits for nothing.

use crate::proto::{NodeId, OutHeader};
use crate::workers::Workers;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::HashMap;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use zerocopy::IntoBytes;

/// `FUSE_NOTIFY_INVAL_INODE`, `FUSE_NOTIFY_INVAL_ENTRY` and `FUSE_NOTIFY_STORE`.
const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;
const STORE: i32 = 4;

/// Offset and length, as `FUSE_NOTIFY_INVAL_INODE` takes them: all contents.
const WHOLE: [u64; 2] = [0, 0];
/// A place before the beginning: attributes only.
const NO_CONTENTS: [u64; 2] = [u64::MAX, 0];

/// What the kernel does with a name that it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameInvalidation {
    /// It drops the name, and what is mounted on it.
    Drop = 0,
    /// It looks the name up at its next use. What is mounted on it stays if the name leads to the
    /// same inode.
    Revalidate = 1,
}

/// Sends notifications to the kernel of one mount.
#[derive(Debug)]
pub(crate) struct Notifier {
    channel: Arc<KernelChannel>,
    /// The thread that sends notifications about contents and attributes in the background.
    thread: Workers,
    /// The same for names. It may have to wait for a directory, so nothing may wait for this
    /// thread.
    name_thread: Workers,
}

#[derive(Debug, Default)]
struct KernelChannel {
    fd: OnceLock<OwnedFd>,
    /// The mount is gone.
    over: AtomicBool,
    pending: Mutex<PendingRanges>,
}

/// Notifications still to be sent: for each file one range that covers all of its changes.
#[derive(Debug, Default)]
struct PendingRanges {
    ranges: HashMap<NodeId, Range<u64>>,
    /// The thread is sending them.
    under_way: bool,
}

impl PendingRanges {
    /// Adds a range. True if the thread has to be started.
    fn add(&mut self, node: NodeId, range: Range<u64>) -> bool {
        let known = self.ranges.entry(node).or_insert_with(|| range.clone());
        *known = known.start.min(range.start)..known.end.max(range.end);
        !std::mem::replace(&mut self.under_way, true)
    }
    /// The next one to send; `None` ends the thread's work.
    fn next(&mut self) -> Option<(NodeId, Range<u64>)> {
        let node = self.ranges.keys().next().copied();
        let next = node.and_then(|node| self.ranges.remove_entry(&node));
        self.under_way = next.is_some();
        next
    }
}

impl Default for Notifier {
    fn default() -> Self {
        let thread = |name| Workers::new(name, 1, usize::MAX);
        Self {
            channel: Arc::default(),
            thread: thread("larder-notify"),
            name_thread: thread("larder-names"),
        }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Notifier {
    /// From now on notifications go over this duplicate of the mount's descriptor. Before, none is
    /// sent.
    pub(crate) fn connect(&self, fd: OwnedFd) {
        let _ = self.channel.fd.set(fd);
    }
    /// A name in a directory has changed, and with it the directory's listing and times. Must not
    /// be called in a request during which the kernel keeps that directory locked. False if the
    /// kernel does not know the directory.
    pub(crate) fn name_changed(&self, dir: NodeId, name: &[u8], how: NameInvalidation) -> bool {
        let mut entry = Vec::with_capacity(17 + name.len());
        entry.extend_from_slice(&dir.0.to_ne_bytes());
        entry.extend_from_slice(&(name.len() as u32).to_ne_bytes());
        entry.extend_from_slice(&(how as u32).to_ne_bytes());
        entry.extend_from_slice(name);
        entry.push(0);
        let _ = self.channel.send(INVAL_ENTRY, &entry);
        // The listing and the times. The kernel drops these by itself only if it knew the name.
        self.content_changed(dir)
    }
    /// The contents of a file or the listing of a directory have changed, and its attributes. Must
    /// not be called in a request during which the kernel keeps pages of that file locked. False if
    /// the kernel does not know the inode.
    pub(crate) fn content_changed(&self, node: NodeId) -> bool {
        self.channel.invalidate(node, WHOLE)
    }
    /// A part of a file's contents has changed, and its attributes. Waits until the kernel has let
    /// go of the pages: for a thread with
    /// [`ExecContext::MayWaitForKernel`](crate::handler::ExecContext::MayWaitForKernel). False if
    /// the kernel does not know it.
    pub(crate) fn range_changed(&self, node: NodeId, range: Range<u64>) -> bool {
        self.channel.range_changed(node, range)
    }
    /// The same, without waiting.
    pub(crate) fn range_changed_later(&self, node: NodeId, range: Range<u64>) {
        if !self.channel.pending.lock().add(node, range) {
            return;
        }
        let channel = Arc::clone(&self.channel);
        self.thread.run(move || {
            loop {
                let next = channel.pending.lock().next();
                let Some((node, range)) = next else { return };
                channel.range_changed(node, range);
            }
        });
    }
    /// Attributes of an inode have changed. False if the kernel does not know it.
    pub(crate) fn attributes_changed(&self, node: NodeId) -> bool {
        self.channel.invalidate(node, NO_CONTENTS)
    }
    /// A file has grown: this byte is its last one. The kernel appends at the end that it knows,
    /// and writes pages of mappings up to there, without asking before. This waits as for contents,
    /// which are to be [dropped](Self::range_changed) afterwards.
    pub(crate) fn has_grown(&self, node: NodeId, at: u64, byte: u8) {
        // To store one byte moves the end; to store nothing would not.
        let mut store: Vec<u8> = [node.0, at, 1].iter().flat_map(|w| w.to_ne_bytes()).collect();
        store.push(byte);
        let _ = self.channel.send(STORE, &store);
    }
    /// The mount is gone: waits for notifications that are being sent, since they may hold
    /// references to the mount.
    pub(crate) fn finish(&self) {
        self.channel.over.store(true, Ordering::Release);
        self.thread.finish();
        self.name_thread.finish();
    }
    /// Is the mount gone?
    pub(crate) fn is_over(&self) -> bool {
        self.channel.over.load(Ordering::Acquire)
    }
    /// Runs a job on the notification thread, after those that it was given before.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.thread.run(job);
    }
    /// The same on the thread for names.
    pub(crate) fn run_for_name(&self, job: impl FnOnce() + Send + 'static) {
        self.name_thread.run(job);
    }
}

impl KernelChannel {
    fn range_changed(&self, node: NodeId, range: Range<u64>) -> bool {
        // A length of 0 would mean all the rest.
        range.is_empty() || self.invalidate(node, [range.start, range.end - range.start])
    }
    fn invalidate(&self, node: NodeId, [offset, len]: [u64; 2]) -> bool {
        let inode: Vec<u8> = [node.0, offset, len].iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.send(INVAL_INODE, &inode) != Err(Errno::NOENT)
    }
    fn send(&self, code: i32, body: &[u8]) -> Result<(), Errno> {
        let Some(fd) = self.fd.get() else { return Ok(()) };
        let len = (size_of::<OutHeader>() + body.len()) as u32;
        let head = OutHeader { len, error: code, unique: 0 };
        let sent =
            rustix::io::writev(fd, &[IoSlice::new(head.as_bytes()), IoSlice::new(body)]).map(drop);
        // ENOENT: the kernel does not know the inode.
        if let Err(e) = sent
            && e != Errno::NOENT
        {
            tracing::debug!("the kernel was not told of a change: {e}");
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_later_is_told_once_and_whole() {
        let mut pending = PendingRanges::default();
        assert!(pending.add(NodeId(7), 4096..8192));
        assert!(
            !pending.add(NodeId(7), 0..100) && !pending.add(NodeId(9), 5..6),
            "it is under way"
        );
        let mut told = [pending.next().unwrap(), pending.next().unwrap()];
        told.sort_by_key(|(node, _)| *node);
        assert_eq!(told, [(NodeId(7), 0..8192), (NodeId(9), 5..6)]);
        assert!(!pending.add(NodeId(7), 1..2));
        assert_eq!((pending.next(), pending.next()), (Some((NodeId(7), 1..2)), None));
        assert!(pending.add(NodeId(7), 1..2), "it has ended");
    }
}
