//! Telling the kernel what changed behind its back.
//!
//! Names that come or go by an ioctl are not seen by the kernel, which keeps entries, absent ones too, and listings for
//! as long as we allow, which is a day. A notification is a message that nobody asked for; it goes through `/dev/fuse`
//! whatever the transport.

use crate::proto::OutHeader;
use crate::workers::Workers;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// `FUSE_NOTIFY_INVAL_INODE` and `FUSE_NOTIFY_INVAL_ENTRY`.
const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;

/// The way to the kernel.
#[derive(Debug)]
pub(crate) struct Notifier {
    way: Arc<Way>,
    /// The thread that tells what is told later.
    teller: Workers,
}

#[derive(Debug)]
struct Way {
    fd: Option<OwnedFd>,
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

impl Drop for Notifier {
    fn drop(&mut self) {
        self.teller.finish();
    }
}

impl Notifier {
    /// Over a duplicate of the mount's descriptor; without one nothing is told.
    pub(crate) fn new(fd: Option<OwnedFd>) -> Self {
        Self { way: Arc::new(Way { fd, later: Mutex::default() }), teller: Workers::new(1, usize::MAX) }
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
        self.way.range_changed(node, offset..offset.saturating_add(len.into()));
    }
    /// The same, without waiting.
    pub(crate) fn range_changed_later(&self, node: u64, offset: u64, len: u32) {
        if !self.way.later.lock().add(node, offset..offset.saturating_add(len.into())) {
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
    /// Attributes of an inode are not what they were.
    pub(crate) fn attributes_changed(&self, node: u64) {
        // A place before the beginning: no contents.
        let inode: Vec<u8> = [node, u64::MAX, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.send(INVAL_INODE, &inode);
    }
    fn send(&self, code: i32, body: &[u8]) {
        self.way.send(code, body);
    }
}

impl Way {
    fn range_changed(&self, node: u64, range: Range<u64>) {
        // A length of 0 would be all the rest.
        if !range.is_empty() {
            let words = [node, range.start, range.end - range.start];
            let inode: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
            self.send(INVAL_INODE, &inode);
        }
    }
    fn send(&self, code: i32, body: &[u8]) {
        let Some(fd) = &self.fd else { return };
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
