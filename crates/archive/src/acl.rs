//! POSIX ACLs from the form of the kernel to that of tars.
//!
//! The kernel has them as an extended attribute of numbers, archives as text: `user::rw-,…`. Users
//! and groups stay numbers in the text, since names mean something on one machine only.

use larder_format::acl::{Acl, Class};

/// The text of an ACL. `None` if the value is no ACL.
pub(crate) fn text(value: &[u8]) -> Option<String> {
    let entries: Vec<_> = Acl::parse(value).ok()?.entries().map(entry).collect();
    Some(entries.join(","))
}

fn entry((class, permissions): (Class, u8)) -> String {
    let name = match class {
        Class::Owner => "user:".to_owned(),
        Class::User(id) => format!("user:{id}"),
        Class::Group => "group:".to_owned(),
        Class::NamedGroup(id) => format!("group:{id}"),
        Class::Mask => "mask:".to_owned(),
        Class::Other => "other:".to_owned(),
    };
    let bit = |bit: u8, letter: char| if permissions & bit != 0 { letter } else { '-' };
    format!("{name}:{}{}{}", bit(4, 'r'), bit(2, 'w'), bit(1, 'x'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acl_becomes_text() {
        let (users, groups) = (vec![(1000, 5)], vec![(70_000, 0)]);
        let acl = Acl { owner: 6, users, group: 4, groups, mask: Some(7), other: 1 };
        let expected = "user::rw-,user:1000:r-x,group::r--,group:70000:---,mask::rwx,other::--x";
        assert_eq!(text(&acl.to_bytes()).as_deref(), Some(expected));
        assert_eq!(text(b""), None);
    }
}
