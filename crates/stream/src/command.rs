//! The commands: each with its number, its name, and its attributes in Linux's order.
//!
//! One table says all of that. From it come the enum, the parser and the encoder, so that they
//! cannot disagree. A field of type `Option` may be missing from the stream.
//!
//! A path is relative to the subvolume that `subvol` or `snapshot` has begun; the empty path is
//! its root directory. The path of these two themselves is relative to the target.

use crate::attribute::Attribute;
use crate::attributes::{Attributes, push};
use crate::error::Trouble;
use crate::value::Value;
use crate::wire::Protocol;
use larder_format::items::Timespec;
use larder_format::{Generation, ObjectId};

macro_rules! commands {
    ($(
        $(#[$doc:meta])*
        $number:literal $name:literal $since:ident $variant:ident {
            $($field:ident: $t:ty = $attribute:ident),* $(,)?
        }
    )*) => {
        /// A command of a stream.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Command<'a> {
            $($(#[$doc])* $variant { $($field: $t),* },)*
        }

        impl<'a> Command<'a> {
            /// Its number in a stream.
            #[must_use]
            pub fn number(&self) -> u16 {
                match self {
                    $(Self::$variant { .. } => $number,)*
                }
            }

            /// Its name, as `btrfs receive --dump` prints it.
            #[must_use]
            pub fn name(&self) -> &'static str {
                name_of(self.number()).expect("each command has a name")
            }

            /// The first protocol that has it.
            #[must_use]
            pub fn since(&self) -> Protocol {
                since(self.number()).expect("each command has a protocol")
            }

            pub(crate) fn parse(
                protocol: Protocol,
                number: u16,
                body: &'a [u8],
            ) -> Result<Self, Trouble> {
                if since(number).is_none_or(|since| since > protocol) {
                    return Err(Trouble::UnknownCommand(protocol));
                }
                let attributes = Attributes::parse(protocol, body)?;
                match number {
                    $($number => Ok(Self::$variant {
                        $($field: value(&attributes, Attribute::$attribute)?),*
                    }),)*
                    _ => Err(Trouble::UnknownCommand(protocol)),
                }
            }

            /// Appends its attributes.
            pub(crate) fn encode(
                &self,
                protocol: Protocol,
                body: &mut Vec<u8>,
            ) -> Result<(), Trouble> {
                match self {
                    $(Self::$variant { $($field),* } => {
                        $(if !$field.is_missing() {
                            push(protocol, body, Attribute::$attribute, |to| $field.write(to))?;
                        })*
                        let _ = (&protocol, body);
                    })*
                }
                Ok(())
            }
        }

        /// The name of the command with this number, if there is one.
        pub(crate) fn name_of(number: u16) -> Option<&'static str> {
            match number { $($number => Some($name),)* _ => None }
        }

        fn since(number: u16) -> Option<Protocol> {
            match number { $($number => Some(Protocol::$since),)* _ => None }
        }
    };
}

fn value<'a, T: Value<'a>>(from: &Attributes<'a>, attribute: Attribute) -> Result<T, Trouble> {
    match from.get(attribute) {
        Some(bytes) => T::read(bytes).ok_or(Trouble::WrongLength(attribute, bytes.len())),
        None => T::missing().ok_or(Trouble::Missing(attribute)),
    }
}

commands! {
    /// A new subvolume begins.
    1 "subvol" V1 Subvol {
        path: &'a [u8] = Path, uuid: [u8; 16] = Uuid, ctransid: Generation = Ctransid,
    }
    /// A new subvolume begins, as a snapshot of one that was received before.
    2 "snapshot" V1 Snapshot {
        path: &'a [u8] = Path, uuid: [u8; 16] = Uuid, ctransid: Generation = Ctransid,
        parent_uuid: [u8; 16] = CloneUuid, parent_ctransid: Generation = CloneCtransid,
    }
    /// An empty file.
    3 "mkfile" V1 Mkfile { path: &'a [u8] = Path, ino: Option<ObjectId> = Ino }
    /// An empty directory.
    4 "mkdir" V1 Mkdir { path: &'a [u8] = Path, ino: Option<ObjectId> = Ino }
    /// A device.
    5 "mknod" V1 Mknod {
        path: &'a [u8] = Path, ino: Option<ObjectId> = Ino, rdev: u64 = Rdev, mode: u64 = Mode,
    }
    /// A named pipe.
    6 "mkfifo" V1 Mkfifo {
        path: &'a [u8] = Path, ino: Option<ObjectId> = Ino, rdev: Option<u64> = Rdev,
        mode: Option<u64> = Mode,
    }
    /// A socket.
    7 "mksock" V1 Mksock {
        path: &'a [u8] = Path, ino: Option<ObjectId> = Ino, rdev: Option<u64> = Rdev,
        mode: Option<u64> = Mode,
    }
    /// A symbolic link.
    8 "symlink" V1 Symlink {
        path: &'a [u8] = Path, ino: Option<ObjectId> = Ino, target: &'a [u8] = PathLink,
    }
    /// Another name in place of `path`.
    9 "rename" V1 Rename { path: &'a [u8] = Path, to: &'a [u8] = PathTo }
    /// One more name, `path`, of what `target` is a name of.
    10 "link" V1 Link { path: &'a [u8] = Path, target: &'a [u8] = PathLink }
    /// A name is removed.
    11 "unlink" V1 Unlink { path: &'a [u8] = Path }
    /// An empty directory is removed.
    12 "rmdir" V1 Rmdir { path: &'a [u8] = Path }
    /// An extended attribute.
    13 "set_xattr" V1 SetXattr {
        path: &'a [u8] = Path, name: &'a [u8] = XattrName, value: &'a [u8] = XattrData,
    }
    /// An extended attribute is removed.
    14 "remove_xattr" V1 RemoveXattr { path: &'a [u8] = Path, name: &'a [u8] = XattrName }
    /// Bytes of a file.
    15 "write" V1 Write { path: &'a [u8] = Path, offset: u64 = FileOffset, data: &'a [u8] = Data }
    /// Bytes of a file, which another file of a subvolume known here has as well.
    16 "clone" V1 Clone {
        offset: u64 = FileOffset, len: u64 = CloneLen, path: &'a [u8] = Path,
        from_uuid: [u8; 16] = CloneUuid, from_ctransid: Generation = CloneCtransid,
        from_path: &'a [u8] = ClonePath, from_offset: u64 = CloneOffset,
    }
    /// Another size of a file.
    17 "truncate" V1 Truncate { path: &'a [u8] = Path, size: u64 = Size }
    /// Another mode; permissions only.
    18 "chmod" V1 Chmod { path: &'a [u8] = Path, mode: u64 = Mode }
    /// Another owner.
    19 "chown" V1 Chown { path: &'a [u8] = Path, uid: u64 = Uid, gid: u64 = Gid }
    /// Other times. Protocol 2 has the time of creation as well.
    20 "utimes" V1 Utimes {
        path: &'a [u8] = Path, atime: Timespec = Atime, mtime: Timespec = Mtime,
        ctime: Timespec = Ctime, otime: Option<Timespec> = Otime,
    }
    /// The stream ends.
    21 "end" V1 End {}
    /// Something changed here; what, a stream without data does not say.
    22 "update_extent" V1 UpdateExtent {
        path: &'a [u8] = Path, offset: u64 = FileOffset, size: u64 = Size,
    }
    /// Space reserved, or a hole made. `mode` is as `fallocate(2)` has it.
    23 "fallocate" V2 Fallocate {
        path: &'a [u8] = Path, mode: u32 = FallocateMode, offset: u64 = FileOffset,
        size: u64 = Size,
    }
    /// The flags of an inode item.
    24 "fileattr" V2 Fileattr { path: &'a [u8] = Path, attr: u64 = Fileattr }
    /// An extent as it lies on the device.
    25 "encoded_write" V2 EncodedWrite {
        path: &'a [u8] = Path, offset: u64 = FileOffset, unencoded_file_len: u64 = UnencodedFileLen,
        unencoded_len: u64 = UnencodedLen, unencoded_offset: u64 = UnencodedOffset,
        compression: Option<u32> = Compression, encryption: Option<u32> = Encryption,
        data: &'a [u8] = Data,
    }
}

impl<'a> Command<'a> {
    /// The path that it is about; `end` has none.
    #[must_use]
    pub fn path(&self) -> Option<&'a [u8]> {
        match *self {
            Self::End {} => None,
            Self::Subvol { path, .. }
            | Self::Snapshot { path, .. }
            | Self::Mkfile { path, .. }
            | Self::Mkdir { path, .. }
            | Self::Mknod { path, .. }
            | Self::Mkfifo { path, .. }
            | Self::Mksock { path, .. }
            | Self::Symlink { path, .. }
            | Self::Rename { path, .. }
            | Self::Link { path, .. }
            | Self::Unlink { path, .. }
            | Self::Rmdir { path, .. }
            | Self::SetXattr { path, .. }
            | Self::RemoveXattr { path, .. }
            | Self::Write { path, .. }
            | Self::Clone { path, .. }
            | Self::Truncate { path, .. }
            | Self::Chmod { path, .. }
            | Self::Chown { path, .. }
            | Self::Utimes { path, .. }
            | Self::UpdateExtent { path, .. }
            | Self::Fallocate { path, .. }
            | Self::Fileattr { path, .. }
            | Self::EncodedWrite { path, .. } => Some(path),
        }
    }
}
