//! Telling the kernel what changed behind its back.
//!
//! Names that come or go by an ioctl are not seen by the kernel, nor is what another mount of the
//! same file system changes; and it keeps entries, absent ones too, listings, attributes and
//! contents for as long as we allow, which is a day. A notification is a message that nobody asked
//! for; it goes through `/dev/fuse` whatever the transport.
//!
//! What they wait for: a name, until nobody works in its directory; contents, until pages that are
//! being read or written are not any more. Attributes wait for nothing.

use crate::proto::OutHeader;
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

/// What becomes of a name that the kernel knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It goes, and what is mounted on it.
    Dropped = 0,
    /// It is asked for when it is used next, and what is mounted on it stays if it is what it was.
    AskedAgain = 1,
}

/// The way to the kernel.
#[derive(Debug)]
pub(crate) struct Notifier {
    way: Arc<Way>,
    /// The thread that tells later what contents and attributes have become.
    teller: Workers,
    /// The same for names, which may have to wait for a directory: nothing may wait for this one.
    name_teller: Workers,
}

#[derive(Debug, Default)]
struct Way {
    fd: OnceLock<OwnedFd>,
    /// The mount is gone.
    over: AtomicBool,
    later: Mutex<Later>,
}

/// What is still to be told: of each file, by node, a range that has all that changed.
#[derive(Debug, Default)]
struct Later {
    ranges: HashMap<u64, Range<u64>>,
    /// The teller is on it.
    under_way: bool,
}

impl Later {
    /// True if the teller has to be called.
    fn add(&mut self, node: u64, range: Range<u64>) -> bool {
        let known = self.ranges.entry(node).or_insert_with(|| range.clone());
        *known = known.start.min(range.start)..known.end.max(range.end);
        !std::mem::replace(&mut self.under_way, true)
    }
    /// What to tell next; `None` ends the teller's work.
    fn next(&mut self) -> Option<(u64, Range<u64>)> {
        let node = self.ranges.keys().next().copied();
        let next = node.and_then(|node| self.ranges.remove_entry(&node));
        self.under_way = next.is_some();
        next
    }
}

impl Default for Notifier {
    fn default() -> Self {
        let thread = || Workers::new(1, usize::MAX);
        Self { way: Arc::default(), teller: thread(), name_teller: thread() }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Notifier {
    /// From now on it goes over this duplicate of the mount's descriptor; before, nothing is told.
    pub(crate) fn connect(&self, fd: OwnedFd) {
        let _ = self.way.fd.set(fd);
    }
    /// A name in a directory, given by its node, is not what it was, nor are the directory's
    /// listing and times. Must not be called for a request during which the kernel keeps that
    /// directory locked. False if the kernel does not know the directory.
    pub(crate) fn name_changed(&self, dir: u64, name: &[u8], fate: Fate) -> bool {
        let mut entry = Vec::with_capacity(17 + name.len());
        entry.extend_from_slice(&dir.to_ne_bytes());
        entry.extend_from_slice(&(name.len() as u32).to_ne_bytes());
        entry.extend_from_slice(&(fate as u32).to_ne_bytes());
        entry.extend_from_slice(name);
        entry.push(0);
        let _ = self.way.send(INVAL_ENTRY, &entry);
        // Its listing and its times, which the kernel drops by itself only where it knew the name.
        self.content_changed(dir)
    }
    /// What a file holds or a directory lists, and its attributes, are not what they were. Must not
    /// be called for a request during which the kernel keeps pages of that file locked. False if
    /// the kernel does not know it.
    pub(crate) fn content_changed(&self, node: u64) -> bool {
        self.way.invalidate(node, 0, 0)
    }
    /// A part of what a file holds is not what it was, nor are its attributes. Waits until the
    /// kernel has let go of the pages: for a thread with
    /// [`Patience::Kernel`](crate::handler::Patience::Kernel). False if the kernel does not know
    /// it.
    pub(crate) fn range_changed(&self, node: u64, range: Range<u64>) -> bool {
        self.way.range_changed(node, range)
    }
    /// The same, without waiting.
    pub(crate) fn range_changed_later(&self, node: u64, range: Range<u64>) {
        if !self.way.later.lock().add(node, range) {
            return;
        }
        let way = Arc::clone(&self.way);
        self.teller.run(move || {
            loop {
                let next = way.later.lock().next();
                let Some((node, range)) = next else { return };
                way.range_changed(node, range);
            }
        });
    }
    /// Attributes of an inode are not what they were. False if the kernel does not know it.
    pub(crate) fn attributes_changed(&self, node: u64) -> bool {
        // A place before the beginning: no contents.
        self.way.invalidate(node, u64::MAX, 0)
    }
    /// A file reaches to this byte, its last one. The kernel appends, and writes pages of mappings,
    /// up to where it believes the end to be, and does not ask before. It waits as for contents,
    /// which are to be [dropped](Self::range_changed) afterwards.
    pub(crate) fn has_grown(&self, node: u64, at: u64, byte: u8) {
        // Storing it moves the end; storing nothing would not.
        let mut store: Vec<u8> = [node, at, 1].iter().flat_map(|w| w.to_ne_bytes()).collect();
        store.push(byte);
        let _ = self.way.send(STORE, &store);
    }
    /// The mount is gone: waits for what is being told, which may hold references to the mount
    /// itself.
    pub(crate) fn finish(&self) {
        self.way.over.store(true, Ordering::Release);
        self.teller.finish();
        self.name_teller.finish();
    }
    /// Is the mount gone?
    pub(crate) fn is_over(&self) -> bool {
        self.way.over.load(Ordering::Acquire)
    }
    /// Does something on the thread that tells, after what that was given before.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.teller.run(job);
    }
    /// The same on the thread that tells of names.
    pub(crate) fn run_for_name(&self, job: impl FnOnce() + Send + 'static) {
        self.name_teller.run(job);
    }
}

impl Way {
    fn range_changed(&self, node: u64, range: Range<u64>) -> bool {
        // A length of 0 would be all the rest.
        range.is_empty() || self.invalidate(node, range.start, range.end - range.start)
    }
    fn invalidate(&self, node: u64, offset: u64, len: u64) -> bool {
        let inode: Vec<u8> = [node, offset, len].iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.send(INVAL_INODE, &inode) != Err(Errno::NOENT)
    }
    fn send(&self, code: i32, body: &[u8]) -> Result<(), Errno> {
        let Some(fd) = self.fd.get() else { return Ok(()) };
        let len = (size_of::<OutHeader>() + body.len()) as u32;
        let head = OutHeader { len, error: code, unique: 0 };
        let sent =
            rustix::io::writev(fd, &[IoSlice::new(head.as_bytes()), IoSlice::new(body)]).map(drop);
        // ENOENT: the kernel did not know it.
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
        let mut later = Later::default();
        assert!(later.add(7, 4096..8192));
        assert!(!later.add(7, 0..100) && !later.add(9, 5..6), "it is under way");
        let mut told = [later.next().unwrap(), later.next().unwrap()];
        told.sort_by_key(|(node, _)| *node);
        assert_eq!(told, [(7, 0..8192), (9, 5..6)]);
        assert!(!later.add(7, 1..2));
        assert_eq!((later.next(), later.next()), (Some((7, 1..2)), None));
        assert!(later.add(7, 1..2), "it has ended");
    }
}
