//! Replies that all servers put together the same way: entries, directory records, xattr values,
//! and the answers by which the kernel learns which requests it need not send.

use crate::errno::Errno;
use crate::handler::{Failure, Outcome, Reply};
use crate::proto::{self, AttrOut, Dirent, EntryOut, GetxattrOut, NodeId, Opcode, align_record};
use larder_format::ids::Generation;
use zerocopy::IntoBytes;

/// Seconds for which the kernel may believe names and attributes. A day, because only its own
/// requests change them.
pub(crate) const TIMEOUT: u64 = 86_400;

/// An entry for LOOKUP, READDIRPLUS and everything that makes a name.
#[must_use]
pub fn entry(node: NodeId, generation: Generation, attr: proto::Attr) -> EntryOut {
    EntryOut {
        nodeid: node.0,
        generation: generation.0,
        entry_valid: TIMEOUT,
        attr_valid: TIMEOUT,
        entry_valid_nsec: 0,
        attr_valid_nsec: 0,
        attr,
    }
}

/// "There is no such name", which the kernel may remember.
#[must_use]
pub fn no_entry() -> EntryOut {
    EntryOut { entry_valid: TIMEOUT, ..EntryOut::default() }
}

/// Attributes for GETATTR and SETATTR.
#[must_use]
pub fn attributes(attr: proto::Attr) -> AttrOut {
    AttrOut { attr_valid: TIMEOUT, attr_valid_nsec: 0, dummy: 0, attr }
}

/// A value of variable length (an xattr, a list of names), or only its length if the caller has no
/// room yet.
///
/// # Errors
/// `ERANGE` if it is longer than the caller's `room`.
pub fn sized(reply: &mut Reply<'_>, room: u32, value: &[u8]) -> Outcome {
    if room == 0 {
        return reply.value(&GetxattrOut { size: value.len() as u32, padding: 0 });
    }
    if value.len() > room as usize {
        return Err(Failure::Errno(Errno::RANGE));
    }
    reply.bytes(value)
}

/// The answer to requests that every server answers alike: those that the kernel need not send
/// again (it remembers ENOSYS for the connection), and those that need no work.
#[must_use]
pub fn settled(opcode: Opcode) -> Option<Outcome> {
    match opcode {
        // No handles: files and directories are opened without asking. Files are created with
        // MKNOD.
        Opcode::Open | Opcode::Opendir | Opcode::Create | Opcode::Flush => {
            Some(Err(Failure::Errno(Errno::NOSYS)))
        }
        // The kernel handles locks by itself, as on every local file system.
        Opcode::Getlk | Opcode::Setlk | Opcode::Setlkw | Opcode::Poll | Opcode::Bmap => {
            Some(Err(Failure::Errno(Errno::NOSYS)))
        }
        // TMPFILE opens its file after all.
        Opcode::Release | Opcode::Releasedir => Some(Ok(0)),
        _ => None,
    }
}

/// A directory record.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Inode number.
    pub ino: u64,
    /// Position of the next record: where a listing goes on behind this one.
    pub next: u64,
    /// File type in the form of `S_IFMT >> 12`.
    pub kind: u32,
    /// Name.
    pub name: &'a [u8],
}

/// Directory records, written into a reply until it is full.
#[derive(Debug)]
pub struct Records<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl<'a> Records<'a> {
    /// Into `size` bytes of the reply.
    ///
    /// # Errors
    /// `EINVAL` if the reply has less room.
    pub fn new(reply: &'a mut Reply<'_>, size: u32) -> Result<Self, Failure> {
        let size = (size as usize).min(reply.capacity());
        Ok(Self { out: reply.buffer(size)?, len: 0 })
    }
    /// Is there room for a record with a name of `name_len` bytes?
    #[must_use]
    pub fn fits(&self, name_len: usize, plus: bool) -> bool {
        self.out.len() - self.len >= Self::record_len(name_len, plus)
    }
    /// Bytes of a record.
    #[must_use]
    pub(crate) fn record_len(name_len: usize, plus: bool) -> usize {
        let entry = if plus { size_of::<EntryOut>() } else { 0 };
        entry + align_record(size_of::<Dirent>() + name_len)
    }
    /// Adds a record, of READDIRPLUS with its entry; false if it does not fit.
    pub fn push(&mut self, entry: Option<&EntryOut>, record: Record<'_>) -> bool {
        let Record { ino, next, kind: typ, name } = record;
        if !self.fits(name.len(), entry.is_some()) {
            return false;
        }
        let start = self.len;
        let mut put = |bytes: &[u8]| {
            self.out[self.len..self.len + bytes.len()].copy_from_slice(bytes);
            self.len += bytes.len();
        };
        if let Some(entry) = entry {
            put(entry.as_bytes());
        }
        put(Dirent { ino, off: next, namelen: name.len() as u32, typ }.as_bytes());
        put(name);
        let end = start + Self::record_len(name.len(), entry.is_some());
        self.out[self.len..end].fill(0);
        self.len = end;
        true
    }
    /// No record was added yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Length of the reply.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(ino: u64, next: u32, name: &[u8]) -> Record<'_> {
        Record { ino, next: next.into(), kind: libc::S_IFREG >> 12, name }
    }

    #[test]
    fn records_have_the_protocols_bytes() {
        let mut buffer = [0xff; 70];
        let mut reply = Reply::new(&mut buffer);
        let mut records = Records::new(&mut reply, 64).unwrap();
        assert!(records.is_empty());
        assert!(records.push(None, record(0x102, 7, b"sub")));
        assert!(records.push(None, record(0x103, 8, b"12345678")));
        assert!(!records.push(None, record(1, 9, b"")), "full");
        assert_eq!(records.len(), 64);
        let mut expected =
            vec![2, 1, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0];
        expected.extend(b"sub\0\0\0\0\0");
        assert_eq!(&buffer[..32], expected);
        assert_eq!(&buffer[56..64], b"12345678");
        assert_eq!(buffer[64], 0xff);
    }

    #[test]
    fn a_plus_record_is_an_entry_and_a_record() {
        let mut buffer = [0; 300];
        let mut reply = Reply::new(&mut buffer);
        let mut records = Records::new(&mut reply, 300).unwrap();
        let e = entry(NodeId(9), Generation(3), proto::Attr { ino: 9, ..proto::Attr::default() });
        assert!(records.push(Some(&e), record(9, 1, b"x")));
        assert_eq!(records.len(), 128 + 32);
        assert!(!records.push(Some(&e), record(9, 1, b"x")));
        assert_eq!(buffer[0], 9);
        assert_eq!(buffer[128 + 24], b'x');
    }

    #[test]
    fn values_are_measured_first() {
        let mut buffer = [0; 64];
        assert_eq!(sized(&mut Reply::new(&mut buffer), 0, b"value"), Ok(8));
        assert_eq!(buffer[0], 5);
        assert_eq!(sized(&mut Reply::new(&mut buffer), 5, b"value"), Ok(5));
        assert_eq!(
            sized(&mut Reply::new(&mut buffer), 4, b"value"),
            Err(Failure::Errno(Errno::RANGE))
        );
    }
}
