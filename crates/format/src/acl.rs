//! POSIX access control lists, as Linux keeps them in extended attributes of an inode.
//!
//! btrfs stores the value of `system.posix_acl_access` or `…_default` as it is: version 2, then
//! entries of tag, permission and id, all little-endian, in the order of tag and id. This module
//! hides those bytes. A list is well-formed if it has the three base entries once each, and a mask
//! if it names users or groups. Every [`Acl`] is.
//!
//! Two rules tie a list to the mode. The entries of the owner and of others *are* those bits of the
//! mode. The mode's group bits are the mask if there is one, else the group's entry.

/// Name of the attribute that decides about access.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the attribute that new inodes in a directory inherit.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

/// The version that a value begins with.
const VERSION: u32 = 2;
/// The id of entries that have none.
const NO_ID: u32 = u32::MAX;

/// What an entry is for, in the order of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The inode's owner.
    Owner,
    /// The user with this id.
    User(u32),
    /// The inode's group.
    Group,
    /// The group with this id.
    NamedGroup(u32),
    /// The most that users, the group and named groups get.
    Mask,
    /// All others.
    Other,
}

impl Class {
    fn tag_and_id(self) -> (u16, u32) {
        match self {
            Self::Owner => (0x01, NO_ID),
            Self::User(id) => (0x02, id),
            Self::Group => (0x04, NO_ID),
            Self::NamedGroup(id) => (0x08, id),
            Self::Mask => (0x10, NO_ID),
            Self::Other => (0x20, NO_ID),
        }
    }

    fn of(tag: u16, id: u32) -> Option<Self> {
        // The id counts for named entries only.
        Some(match tag {
            0x01 => Self::Owner,
            0x02 => Self::User(id),
            0x04 => Self::Group,
            0x08 => Self::NamedGroup(id),
            0x10 => Self::Mask,
            0x20 => Self::Other,
            _ => return None,
        })
    }
}

/// Why something is no access control list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AclError {
    /// It has another version.
    #[error("an ACL of an unknown version")]
    Version,
    /// It is not well-formed.
    #[error("an ACL that is not well-formed")]
    Malformed,
}

/// A well-formed list. Permissions are three bits: read 4, write 2, execute 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    /// Permissions of the owner.
    pub owner: u8,
    /// Permissions of users, by rising id.
    pub users: Vec<(u32, u8)>,
    /// Permissions of the inode's group.
    pub group: u8,
    /// Permissions of other groups, by rising id.
    pub groups: Vec<(u32, u8)>,
    /// The most that users and groups get.
    pub mask: Option<u8>,
    /// Permissions of all others.
    pub other: u8,
}

impl Acl {
    /// The list with these entries, which are in order.
    ///
    /// # Errors
    /// [`AclError::Malformed`] if they are not in order, or not well-formed.
    pub fn new(entries: impl IntoIterator<Item = (Class, u8)>) -> Result<Self, AclError> {
        let (mut owner, mut group, mut mask, mut other) = (None, None, None, None);
        let (mut users, mut groups) = (Vec::new(), Vec::new());
        let mut last = None;
        for (class, permissions) in entries {
            if last >= Some(class) || permissions > 7 {
                return Err(AclError::Malformed);
            }
            last = Some(class);
            match class {
                Class::User(NO_ID) | Class::NamedGroup(NO_ID) => return Err(AclError::Malformed),
                Class::Owner => owner = Some(permissions),
                Class::User(id) => users.push((id, permissions)),
                Class::Group => group = Some(permissions),
                Class::NamedGroup(id) => groups.push((id, permissions)),
                Class::Mask => mask = Some(permissions),
                Class::Other => other = Some(permissions),
            }
        }
        let is_named = !users.is_empty() || !groups.is_empty();
        match (owner, group, other) {
            (Some(owner), Some(group), Some(other)) if mask.is_some() || !is_named => {
                Ok(Self { owner, users, group, groups, mask, other })
            }
            _ => Err(AclError::Malformed),
        }
    }

    /// From the attribute's value.
    ///
    /// # Errors
    /// See [`AclError`].
    pub fn parse(value: &[u8]) -> Result<Self, AclError> {
        let (version, entries) = value.split_first_chunk::<4>().ok_or(AclError::Malformed)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(AclError::Version);
        }
        let (entries, []) = entries.as_chunks::<8>() else { return Err(AclError::Malformed) };
        let entries: Option<Vec<_>> = entries
            .iter()
            .map(|&[t0, t1, p0, p1, id @ ..]| {
                let class = Class::of(u16::from_le_bytes([t0, t1]), u32::from_le_bytes(id))?;
                Some((class, u8::try_from(u16::from_le_bytes([p0, p1])).ok()?))
            })
            .collect();
        Self::new(entries.ok_or(AclError::Malformed)?)
    }

    /// The entries, in order.
    pub fn entries(&self) -> impl Iterator<Item = (Class, u8)> {
        let users = self.users.iter().map(|(id, permissions)| (Class::User(*id), *permissions));
        let groups =
            self.groups.iter().map(|(id, permissions)| (Class::NamedGroup(*id), *permissions));
        std::iter::once((Class::Owner, self.owner))
            .chain(users)
            .chain([(Class::Group, self.group)])
            .chain(groups)
            .chain(self.mask.map(|mask| (Class::Mask, mask)))
            .chain([(Class::Other, self.other)])
    }

    /// The attribute's value.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        for (class, permissions) in self.entries() {
            let (tag, id) = class.tag_and_id();
            out.extend(tag.to_le_bytes());
            out.extend(u16::from(permissions).to_le_bytes());
            out.extend(id.to_le_bytes());
        }
        out
    }

    /// The nine mode bits that stand for the list.
    #[must_use]
    pub fn mode(&self) -> u32 {
        u32::from(self.owner) << 6
            | u32::from(self.mask.unwrap_or(self.group)) << 3
            | u32::from(self.other)
    }

    /// Does it say nothing beyond [`mode`](Self::mode)? Linux does not store such a list for
    /// access.
    #[must_use]
    pub fn is_mode(&self) -> bool {
        self.mask.is_none() && self.users.is_empty() && self.groups.is_empty()
    }

    /// The list after chmod.
    pub fn chmod(&mut self, mode: u32) {
        self.owner = bits(mode, 6);
        *self.mask.as_mut().unwrap_or(&mut self.group) = bits(mode, 3);
        self.other = bits(mode, 0);
    }

    /// Turns a directory's default list into the access list of a new inode of this `mode`: each
    /// class gets what both allow.
    pub fn limit(&mut self, mode: u32) {
        self.owner &= bits(mode, 6);
        *self.mask.as_mut().unwrap_or(&mut self.group) &= bits(mode, 3);
        self.other &= bits(mode, 0);
    }
}

fn bits(mode: u32, shift: u32) -> u8 {
    (mode >> shift & 7) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `setfacl -m u:1000:rw,g:100:r,m::rw` stores for a file of mode 0640.
    const KNOWN: &[u8] = &[
        2, 0, 0, 0, // version
        1, 0, 6, 0, 255, 255, 255, 255, // owner rw-
        2, 0, 6, 0, 232, 3, 0, 0, // user 1000 rw-
        4, 0, 4, 0, 255, 255, 255, 255, // group r--
        8, 0, 4, 0, 100, 0, 0, 0, // group 100 r--
        16, 0, 6, 0, 255, 255, 255, 255, // mask rw-
        32, 0, 0, 0, 255, 255, 255, 255, // other ---
    ];

    #[test]
    fn known_bytes_go_both_ways() {
        let acl = Acl::parse(KNOWN).unwrap();
        assert_eq!(acl.users, [(1000, 6)]);
        assert_eq!(acl.groups, [(100, 4)]);
        assert_eq!(acl.mode(), 0o660, "the mask shows as the group's bits");
        assert!(!acl.is_mode());
        assert_eq!(acl.to_bytes(), KNOWN);
        assert_eq!(Acl::new(acl.entries()), Ok(acl));
    }

    #[test]
    fn malformed_lists_are_refused() {
        for len in 0..KNOWN.len() {
            assert!(Acl::parse(&KNOWN[..len]).is_err(), "cut at {len}");
        }
        let mut wrong = KNOWN.to_vec();
        wrong[0] = 1;
        assert_eq!(Acl::parse(&wrong), Err(AclError::Version));
        for (at, value) in [(4, 3), (6, 8), (7, 1), (12, 1), (20, 2), (36, 32)] {
            let mut wrong = KNOWN.to_vec();
            wrong[at] = value;
            assert_eq!(Acl::parse(&wrong), Err(AclError::Malformed), "byte {at}");
        }
        // A named entry without an id.
        let mut wrong = KNOWN.to_vec();
        wrong[16..20].fill(255);
        assert_eq!(Acl::parse(&wrong), Err(AclError::Malformed));
        // Names without a mask.
        let mut wrong = KNOWN.to_vec();
        wrong.drain(36..44);
        assert_eq!(Acl::parse(&wrong), Err(AclError::Malformed));
    }

    #[test]
    fn chmod_changes_the_mask_and_not_the_group() {
        let mut acl = Acl::parse(KNOWN).unwrap();
        acl.chmod(0o705);
        assert_eq!((acl.owner, acl.group, acl.mask, acl.other), (7, 4, Some(0), 5));
        assert_eq!(acl.mode(), 0o705);
        acl.mask = None;
        acl.users.clear();
        acl.groups.clear();
        acl.chmod(0o751);
        assert_eq!((acl.group, acl.mode(), acl.is_mode()), (5, 0o751, true));
    }
}
