//! Opcodes, and the length of the fixed structure that each request begins with.

use super::messages as m;
use std::mem::size_of;

macro_rules! opcodes {
    ($($name:ident = $number:literal, $text:literal, $arg:expr;)*) => {
        /// What a request asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        #[allow(missing_docs)]
        pub enum Opcode { $($name = $number,)* }

        impl Opcode {
            /// Every opcode, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The opcode of this number, if known.
            #[must_use]
            pub const fn from_number(number: u32) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }
            /// Name as in the protocol's documentation, in lower case.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
            /// Bytes of the fixed structure before names and data.
            #[must_use]
            pub const fn arg_len(self) -> usize {
                match self { $(Self::$name => $arg,)* }
            }
        }
    };
}

opcodes! {
    Lookup = 1, "lookup", 0;
    Forget = 2, "forget", size_of::<m::ForgetIn>();
    Getattr = 3, "getattr", size_of::<m::GetattrIn>();
    Setattr = 4, "setattr", size_of::<m::SetattrIn>();
    Readlink = 5, "readlink", 0;
    Symlink = 6, "symlink", 0;
    Mknod = 8, "mknod", size_of::<m::MknodIn>();
    Mkdir = 9, "mkdir", size_of::<m::MkdirIn>();
    Unlink = 10, "unlink", 0;
    Rmdir = 11, "rmdir", 0;
    Rename = 12, "rename", size_of::<m::RenameIn>();
    Link = 13, "link", size_of::<m::LinkIn>();
    Open = 14, "open", size_of::<m::OpenIn>();
    Read = 15, "read", size_of::<m::ReadIn>();
    Write = 16, "write", size_of::<m::WriteIn>();
    Statfs = 17, "statfs", 0;
    Release = 18, "release", size_of::<m::ReleaseIn>();
    Fsync = 20, "fsync", size_of::<m::FsyncIn>();
    Setxattr = 21, "setxattr", size_of::<m::SetxattrIn>();
    Getxattr = 22, "getxattr", size_of::<m::GetxattrIn>();
    Listxattr = 23, "listxattr", size_of::<m::GetxattrIn>();
    Removexattr = 24, "removexattr", 0;
    Flush = 25, "flush", size_of::<m::FlushIn>();
    Init = 26, "init", size_of::<super::InitIn>();
    Opendir = 27, "opendir", size_of::<m::OpenIn>();
    Readdir = 28, "readdir", size_of::<m::ReadIn>();
    Releasedir = 29, "releasedir", size_of::<m::ReleaseIn>();
    Fsyncdir = 30, "fsyncdir", size_of::<m::FsyncIn>();
    Getlk = 31, "getlk", 48;
    Setlk = 32, "setlk", 48;
    Setlkw = 33, "setlkw", 48;
    Access = 34, "access", size_of::<m::AccessIn>();
    Create = 35, "create", size_of::<m::CreateIn>();
    Interrupt = 36, "interrupt", size_of::<m::InterruptIn>();
    Bmap = 37, "bmap", 16;
    Destroy = 38, "destroy", 0;
    Ioctl = 39, "ioctl", size_of::<m::IoctlIn>();
    Poll = 40, "poll", 24;
    NotifyReply = 41, "notify-reply", 40;
    BatchForget = 42, "batch-forget", size_of::<m::BatchForgetIn>();
    Fallocate = 43, "fallocate", size_of::<m::FallocateIn>();
    Readdirplus = 44, "readdirplus", size_of::<m::ReadIn>();
    Rename2 = 45, "rename2", size_of::<m::Rename2In>();
    Lseek = 46, "lseek", size_of::<m::LseekIn>();
    CopyFileRange = 47, "copy-file-range", size_of::<m::CopyFileRangeIn>();
    Syncfs = 50, "syncfs", size_of::<m::SyncfsIn>();
    Tmpfile = 51, "tmpfile", size_of::<m::CreateIn>();
    Statx = 52, "statx", size_of::<m::StatxIn>();
    CopyFileRange64 = 53, "copy-file-range-64", size_of::<m::CopyFileRangeIn>();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_distinct() {
        for (i, a) in Opcode::ALL.iter().enumerate() {
            assert_eq!(Opcode::from_number(*a as u32), Some(*a));
            assert!(
                Opcode::ALL[i + 1..]
                    .iter()
                    .all(|b| a.name() != b.name() && (*a as u32) < (*b as u32))
            );
            assert!(a.arg_len() <= 128, "fits the operation header of a ring entry");
        }
        assert_eq!(Opcode::from_number(7), None);
        assert_eq!(Opcode::from_number(4096), None);
    }
}
