//! POSIX access control lists: their bytes, their relation to the mode, and inheritance.
//!
//! An ACL is stored as the value of `system.posix_acl_access` or `…_default`: version 2, then
//! entries of tag, permission and id, all little-endian. Three rules tie it to the mode:
//!
//! - The entries of the owner and of others *are* those bits of the mode.
//! - The mode's group bits are the mask if there is one, else the group's entry.
//! - An ACL that says nothing beyond a mode is not stored.
//!
//! With a default ACL the umask does not apply.

use crate::errno::Errno;

/// Name of the attribute that decides about access.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the attribute that new inodes in a directory inherit.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const NO_ID: u32 = u32::MAX;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// A list. Permissions are three bits: read 4, write 2, execute 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl {
    owner: u8,
    users: Vec<(u32, u8)>,
    group: u8,
    groups: Vec<(u32, u8)>,
    mask: Option<u8>,
    other: u8,
}

impl Acl {
    /// From the attribute's value.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for another version, `EINVAL` if it is not a well-formed list: entries in
    /// order, the three base entries once each, a mask where users or groups are named.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Errno> {
        let (version, mut rest) = bytes.split_first_chunk::<4>().ok_or(Errno::INVAL)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Errno::OPNOTSUPP);
        }
        let mut acl = Self {
            owner: 0,
            users: Vec::new(),
            group: 0,
            groups: Vec::new(),
            mask: None,
            other: 0,
        };
        let mut last: Option<(u16, u32)> = None;
        let mut base = 0;
        while let Some((entry, tail)) = rest.split_first_chunk::<8>() {
            let [t0, t1, p0, p1, id @ ..] = *entry;
            let (tag, perm, id) = (
                u16::from_le_bytes([t0, t1]),
                u16::from_le_bytes([p0, p1]),
                u32::from_le_bytes(id),
            );
            let perm = u8::try_from(perm).ok().filter(|p| *p <= 7).ok_or(Errno::INVAL)?;
            // The id counts for named entries only.
            let rank = (tag, if matches!(tag, USER | GROUP) { id } else { NO_ID });
            if last.is_some_and(|l| l >= rank) {
                return Err(Errno::INVAL);
            }
            last = Some(rank);
            match tag {
                USER_OBJ => acl.owner = perm,
                GROUP_OBJ => acl.group = perm,
                OTHER => acl.other = perm,
                MASK => acl.mask = Some(perm),
                USER if id != NO_ID => acl.users.push((id, perm)),
                GROUP if id != NO_ID => acl.groups.push((id, perm)),
                _ => return Err(Errno::INVAL),
            }
            base |= tag;
            rest = tail;
        }
        let needed = USER_OBJ | GROUP_OBJ | OTHER;
        let names = !acl.users.is_empty() || !acl.groups.is_empty();
        if !rest.is_empty() || base & needed != needed || (names && acl.mask.is_none()) {
            return Err(Errno::INVAL);
        }
        Ok(acl)
    }

    /// The attribute's value.
    #[must_use]
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        let mut put = |tag: u16, perm: u8, id: u32| {
            out.extend(tag.to_le_bytes());
            out.extend(u16::from(perm).to_le_bytes());
            out.extend(id.to_le_bytes());
        };
        put(USER_OBJ, self.owner, NO_ID);
        self.users.iter().for_each(|(id, perm)| put(USER, *perm, *id));
        put(GROUP_OBJ, self.group, NO_ID);
        self.groups.iter().for_each(|(id, perm)| put(GROUP, *perm, *id));
        if let Some(mask) = self.mask {
            put(MASK, mask, NO_ID);
        }
        put(OTHER, self.other, NO_ID);
        out
    }

    /// The nine mode bits that stand for the list.
    #[must_use]
    pub(crate) fn mode(&self) -> u32 {
        u32::from(self.owner) << 6
            | u32::from(self.mask.unwrap_or(self.group)) << 3
            | u32::from(self.other)
    }

    /// Does it say nothing beyond [`mode`](Self::mode)?
    #[must_use]
    pub(crate) fn is_mode(&self) -> bool {
        self.mask.is_none() && self.users.is_empty() && self.groups.is_empty()
    }

    /// The list after chmod.
    pub(crate) fn chmod(&mut self, mode: u32) {
        self.owner = bits(mode, 6);
        *self.mask.as_mut().unwrap_or(&mut self.group) = bits(mode, 3);
        self.other = bits(mode, 0);
    }

    /// Turns a directory's default list into the access list of a new inode of this `mode`: each
    /// class gets what both allow.
    pub(crate) fn limit(&mut self, mode: u32) {
        self.owner &= bits(mode, 6);
        *self.mask.as_mut().unwrap_or(&mut self.group) &= bits(mode, 3);
        self.other &= bits(mode, 0);
    }

    /// May a user do all of `want`? `owner` and `group` are those of the inode.
    pub(crate) fn allows(
        &self,
        uid: u32,
        is_in: &mut dyn FnMut(u32) -> bool,
        owner: u32,
        group: u32,
        want: u8,
    ) -> bool {
        let has = |perm: u8| perm & want == want;
        let mask = self.mask.unwrap_or(7);
        if uid == owner {
            return has(self.owner);
        }
        if let Some((_, perm)) = self.users.iter().find(|(id, _)| *id == uid) {
            return has(perm & mask);
        }
        let mut in_any = false;
        for (id, perm) in std::iter::once(&(group, self.group)).chain(&self.groups) {
            if is_in(*id) {
                if has(perm & mask) {
                    return true;
                }
                in_any = true;
            }
        }
        !in_any && has(self.other)
    }
}

fn bits(mode: u32, shift: u32) -> u8 {
    (mode >> shift & 7) as u8
}

/// Permission bits and ACLs of a new inode.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Inherited {
    /// Permission bits, `07777`.
    pub(crate) perm: u32,
    /// Attribute names and values.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Applies a directory's default ACL, or else the umask, to a new inode.
///
/// # Errors
/// As [`Acl::parse`], if the default ACL is malformed.
pub(crate) fn inherit(
    default: Option<&[u8]>,
    mode: u32,
    umask: u32,
    directory: bool,
) -> Result<Inherited, Errno> {
    let Some(default) = default else {
        return Ok(Inherited { perm: mode & 0o7777 & !(umask & 0o777), xattrs: Vec::new() });
    };
    let mut access = Acl::parse(default)?;
    access.limit(mode);
    let mut xattrs = Vec::new();
    if !access.is_mode() {
        xattrs.push((ACCESS.to_vec(), access.to_bytes()));
    }
    if directory {
        xattrs.push((DEFAULT.to_vec(), default.to_vec()));
    }
    Ok(Inherited { perm: mode & 0o7000 | access.mode(), xattrs })
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
    }

    #[test]
    fn malformed_lists_are_refused() {
        for len in 0..KNOWN.len() {
            assert!(Acl::parse(&KNOWN[..len]).is_err(), "cut at {len}");
        }
        let mut wrong = KNOWN.to_vec();
        wrong[0] = 1;
        assert_eq!(Acl::parse(&wrong), Err(Errno::OPNOTSUPP));
        for (at, value) in [(4, 3), (6, 8), (12, 1), (20, 2), (36, 32)] {
            let mut wrong = KNOWN.to_vec();
            wrong[at] = value;
            assert_eq!(Acl::parse(&wrong), Err(Errno::INVAL), "byte {at}");
        }
        // Names without a mask.
        let mut wrong = KNOWN.to_vec();
        wrong.drain(36..44);
        assert_eq!(Acl::parse(&wrong), Err(Errno::INVAL));
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

    #[test]
    fn access_follows_the_first_class_that_matches() {
        let acl = Acl::parse(KNOWN).unwrap();
        let check = |uid: u32, groups: &[u32], want| {
            acl.allows(uid, &mut |g: u32| groups.contains(&g), 500, 600, want)
        };
        assert!(check(500, &[], 6) && !check(500, &[100], 1));
        assert!(check(1000, &[], 6) && !check(1000, &[], 1));
        assert!(check(7, &[600], 4) && !check(7, &[600], 2));
        assert!(check(7, &[100], 4) && !check(7, &[100], 6));
        assert!(!check(7, &[7], 4));
    }

    #[test]
    fn defaults_are_inherited_without_the_umask() {
        let made = inherit(Some(KNOWN), 0o100_644 & 0o7777, 0o077, false).unwrap();
        assert_eq!(made.perm, 0o640);
        assert_eq!(made.xattrs.len(), 1);
        let access = Acl::parse(&made.xattrs[0].1).unwrap();
        assert_eq!((access.mask, access.group, access.other), (Some(4), 4, 0));
        let made = inherit(Some(KNOWN), 0o2777, 0o077, true).unwrap();
        assert_eq!(made.perm, 0o2660);
        assert_eq!(made.xattrs[1], (DEFAULT.to_vec(), KNOWN.to_vec()));
        // A default list of base entries only leaves no access list behind.
        let mut plain = Acl::parse(KNOWN).unwrap();
        (plain.mask, plain.users, plain.groups) = (None, vec![], vec![]);
        let made = inherit(Some(&plain.to_bytes()), 0o666, 0o022, false).unwrap();
        assert_eq!((made.perm, made.xattrs.len()), (0o640, 0));
        // No default list: the umask.
        assert_eq!(
            inherit(None, 0o4777, 0o027, false).unwrap(),
            Inherited { perm: 0o4750, xattrs: vec![] }
        );
    }
}
