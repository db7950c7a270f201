//! The FUSE protocol as bytes: opcodes, fixed structures, flags.
//!
//! This module hides the layout of messages. It knows version 7.45 (Linux 6.18) and talks to any
//! kernel from 7.36 on. That version is the first with the second word of INIT flags, which
//! everything here assumes; older ones are refused by name. Structures are in the machine's own
//! byte order, as the kernel's ABI is. Their sizes are asserted at compile time.
//!
//! Facts come from the kernel's public interface header (`linux/fuse.h`, which may be used under a
//! BSD licence).

pub(crate) mod init;
pub mod messages;
pub mod opcode;

pub(crate) use init::{InitFlags, InitIn};
pub use messages::*;
pub use opcode::Opcode;

/// Major version of the protocol.
pub(crate) const MAJOR: u32 = 7;
/// Newest minor version that this crate knows.
pub(crate) const MINOR: u32 = 45;
/// Oldest minor version that it talks to.
pub(crate) const OLDEST_MINOR: u32 = 36;
/// The number by which the kernel names an inode of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// Node id of the root of a mount.
pub const ROOT_NODE: NodeId = NodeId(1);

impl InHeader {
    /// The inode that the request is about.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        NodeId(self.nodeid)
    }
}

/// Rounds the length of a directory record up to where the next begins.
#[must_use]
pub const fn align_record(len: usize) -> usize {
    (len + 7) & !7
}

/// Device number as the protocol carries it (the 32-bit form of `stat`), from (major << 20) |
/// minor.
#[must_use]
pub(crate) const fn encode_rdev(dev: u64) -> u32 {
    let (major, minor) = (dev >> 20, dev & 0xf_ffff);
    ((minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xf_ff00) << 12)) as u32
}

/// The reverse of [`encode_rdev`].
#[must_use]
pub(crate) const fn decode_rdev(dev: u32) -> u64 {
    let (major, minor) = ((dev >> 8) & 0xfff, (dev & 0xff) | ((dev >> 12) & 0xf_ff00));
    ((major as u64) << 20) | minor as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_go_both_ways() {
        // /dev/null is 1:3, which stat shows as 0x103; a big minor spills over the major.
        assert_eq!(encode_rdev((1 << 20) | 3), 0x103);
        assert_eq!(encode_rdev((8 << 20) | 0x12345), 0x1230_0845);
        for dev in [0, (1 << 20) | 3, (259 << 20) | 0xf_ffff, (0xfff << 20) | 0x100] {
            assert_eq!(decode_rdev(encode_rdev(dev)), dev);
        }
    }

    #[test]
    fn records_are_eight_byte_aligned() {
        assert_eq!([0, 1, 8, 9, 25].map(align_record), [0, 8, 8, 16, 32]);
    }
}
