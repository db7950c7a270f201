//! POSIX ACLs from the form of the kernel to that of tars.
//!
//! The kernel has them as an extended attribute of numbers, archives as text: `user::rw-,…`. Users
//! and groups stay numbers in the text, since names mean something on one machine only.

use std::fmt::Write;

const VERSION: u32 = 2;

/// The text of an ACL. `None` if the value is no ACL.
pub(crate) fn text(value: &[u8]) -> Option<String> {
    let (version, entries) = value.split_first_chunk()?;
    if u32::from_le_bytes(*version) != VERSION || entries.is_empty() {
        return None;
    }
    let mut out = String::new();
    let (entries, rest) = entries.as_chunks::<8>();
    for &[tag, high, perm, perm_high, a, b, c, d] in entries {
        if !out.is_empty() {
            out.push(',');
        }
        let id = u32::from_le_bytes([a, b, c, d]);
        let name = match u16::from_le_bytes([tag, high]) {
            0x01 => "user:".to_owned(),
            0x02 => format!("user:{id}"),
            0x04 => "group:".to_owned(),
            0x08 => format!("group:{id}"),
            0x10 => "mask:".to_owned(),
            0x20 => "other:".to_owned(),
            _ => return None,
        };
        let perm = u16::from_le_bytes([perm, perm_high]);
        let bit = |bit: u16, letter: char| if perm & bit != 0 { letter } else { '-' };
        write!(out, "{name}:{}{}{}", bit(4, 'r'), bit(2, 'w'), bit(1, 'x')).ok()?;
    }
    rest.is_empty().then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acl_becomes_text() {
        let mut value = VERSION.to_le_bytes().to_vec();
        for (tag, perm, id) in [
            (0x01u16, 6u16, u32::MAX),
            (0x02, 5, 1000),
            (0x04, 4, u32::MAX),
            (0x08, 0, 70_000),
            (0x10, 7, u32::MAX),
            (0x20, 1, u32::MAX),
        ] {
            value.extend(tag.to_le_bytes());
            value.extend(perm.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        let expected = "user::rw-,user:1000:r-x,group::r--,group:70000:---,mask::rwx,other::--x";
        assert_eq!(text(&value).as_deref(), Some(expected));
        value.push(0);
        assert_eq!(text(&value), None);
        for bad in [&b""[..], &[2, 0, 0, 0], &[1, 0, 0, 0, 1, 0, 6, 0, 0, 0, 0, 0]] {
            assert_eq!(text(bad), None);
        }
        assert_eq!(text(&[2, 0, 0, 0, 3, 0, 6, 0, 0, 0, 0, 0]), None, "an unknown tag");
    }
}
