//! What POSIX access control lists decide: access, and what a new inode inherits.
//!
//! [`larder_format::acl`] has their form and their relation to the mode. With a default ACL the
//! umask does not apply. An ACL that says nothing beyond a mode is not stored.

use crate::errno::Errno;
use larder_format::acl::{ACCESS, Acl, AclError, DEFAULT};

/// The list in an attribute's value.
///
/// # Errors
/// `EOPNOTSUPP` for another version, `EINVAL` if it is not a well-formed list.
pub(crate) fn parse(value: &[u8]) -> Result<Acl, Errno> {
    Acl::parse(value).map_err(|error| match error {
        AclError::Version => Errno::OPNOTSUPP,
        AclError::Malformed => Errno::INVAL,
    })
}

/// May a user do all of `want`? `owner` and `group` are those of the inode.
pub(crate) fn allows(
    acl: &Acl,
    uid: u32,
    is_in: &mut dyn FnMut(u32) -> bool,
    owner: u32,
    group: u32,
    want: u8,
) -> bool {
    let has = |perm: u8| perm & want == want;
    let mask = acl.mask.unwrap_or(7);
    if uid == owner {
        return has(acl.owner);
    }
    if let Some((_, perm)) = acl.users.iter().find(|(id, _)| *id == uid) {
        return has(perm & mask);
    }
    let mut in_any = false;
    for (id, perm) in std::iter::once(&(group, acl.group)).chain(&acl.groups) {
        if is_in(*id) {
            if has(perm & mask) {
                return true;
            }
            in_any = true;
        }
    }
    !in_any && has(acl.other)
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
/// As [`parse`], if the default ACL is malformed.
pub(crate) fn inherit(
    default: Option<&[u8]>,
    mode: u32,
    umask: u32,
    directory: bool,
) -> Result<Inherited, Errno> {
    let Some(default) = default else {
        return Ok(Inherited { perm: mode & 0o7777 & !(umask & 0o777), xattrs: Vec::new() });
    };
    let mut access = parse(default)?;
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

    /// What `setfacl -m u:1000:rw,g:100:r,m::rw` makes for a file of mode 0640.
    fn known() -> Acl {
        let (users, groups) = (vec![(1000, 6)], vec![(100, 4)]);
        Acl { owner: 6, users, group: 4, groups, mask: Some(6), other: 0 }
    }

    #[test]
    fn what_is_no_list_has_an_errno() {
        let mut value = known().to_bytes();
        assert_eq!(parse(&value), Ok(known()));
        assert_eq!(parse(&value[1..]), Err(Errno::OPNOTSUPP));
        value.pop();
        assert_eq!(parse(&value), Err(Errno::INVAL));
    }

    #[test]
    fn access_follows_the_first_class_that_matches() {
        let acl = known();
        let check = |uid: u32, groups: &[u32], want| {
            allows(&acl, uid, &mut |g: u32| groups.contains(&g), 500, 600, want)
        };
        assert!(check(500, &[], 6) && !check(500, &[100], 1));
        assert!(check(1000, &[], 6) && !check(1000, &[], 1));
        assert!(check(7, &[600], 4) && !check(7, &[600], 2));
        assert!(check(7, &[100], 4) && !check(7, &[100], 6));
        assert!(!check(7, &[7], 4));
    }

    #[test]
    fn defaults_are_inherited_without_the_umask() {
        let known = known().to_bytes();
        let made = inherit(Some(&known), 0o100_644 & 0o7777, 0o077, false).unwrap();
        assert_eq!(made.perm, 0o640);
        assert_eq!(made.xattrs.len(), 1);
        let access = parse(&made.xattrs[0].1).unwrap();
        assert_eq!((access.mask, access.group, access.other), (Some(4), 4, 0));
        let made = inherit(Some(&known), 0o2777, 0o077, true).unwrap();
        assert_eq!(made.perm, 0o2660);
        assert_eq!(made.xattrs[1], (DEFAULT.to_vec(), known.clone()));
        // A default list of base entries only leaves no access list behind.
        let mut plain = parse(&known).unwrap();
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
