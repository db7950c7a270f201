//! What a manifest or an option changes of an entry.

use crate::{Attributes, Kind, Time};

/// A change of attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Change {
    Uid(u32),
    Gid(u32),
    /// Bits to clear, then bits to set, among `07777`.
    Permissions {
        clear: u32,
        set: u32,
    },
    /// `+X` of chmod: execute permission for those of these bits, if it is a directory or somebody
    /// may execute it.
    ExecuteIfAny(u32),
    Modified(Time),
    Xattr(Vec<u8>, Vec<u8>),
    NoXattr(Vec<u8>),
    InodeFlags(u64),
}

impl Change {
    /// Makes the change.
    pub(crate) fn apply(&self, attributes: &mut Attributes, kind: &Kind) {
        match self {
            Self::Uid(uid) => attributes.uid = *uid,
            Self::Gid(gid) => attributes.gid = *gid,
            // A symbolic link has no permissions of its own.
            Self::Permissions { .. } | Self::ExecuteIfAny(_)
                if matches!(kind, Kind::Symlink(_)) => {}
            Self::Permissions { clear, set } => {
                attributes.permissions = attributes.permissions & !clear | set;
            }
            Self::ExecuteIfAny(bits) => {
                if *kind == Kind::Directory || attributes.permissions & 0o111 != 0 {
                    attributes.permissions |= bits;
                }
            }
            Self::Modified(time) => attributes.modified = *time,
            Self::Xattr(name, value) => {
                match attributes.xattrs.binary_search_by(|(n, _)| n.cmp(name)) {
                    Ok(at) => attributes.xattrs[at].1.clone_from(value),
                    Err(at) => attributes.xattrs.insert(at, (name.clone(), value.clone())),
                }
            }
            Self::NoXattr(name) => attributes.xattrs.retain(|(n, _)| n != name),
            Self::InodeFlags(flags) => attributes.inode_flags = *flags,
        }
    }
}
