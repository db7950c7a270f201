//! ACLs in the text form of archives, as the extended attributes that Linux keeps.
//!
//! Archives have `user::rwx,user:lisa:r-x:1001,group::r-x,mask::r-x,other::---`. The last number of
//! an entry is what star and libarchive add. GNU tar writes names only, and numbers for users that
//! have none. A name alone means what the machine at hand has in its user database, so the same
//! archive would give another image elsewhere. Such an ACL is refused. GNU tar can store the form
//! of Linux as well, as an extended attribute, and then the text does not matter.

use larder_format::acl::{Acl, Class};

/// The value of an attribute for an ACL. `None` if the mode alone says the same: Linux stores no
/// attribute then. A default ACL never says the same.
pub(crate) fn from_text(text: &[u8], is_default: bool) -> Result<Option<Vec<u8>>, String> {
    let text = str::from_utf8(text).map_err(|_| "an ACL that is not text".to_owned())?;
    let mut entries = Vec::new();
    for line in text.split(['\n', ',']) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            entries.push(entry(line)?);
        }
    }
    if entries.is_empty() {
        return Ok(None);
    }
    entries.sort_unstable();
    let acl = Acl::new(entries).map_err(|_| format!("an ACL that is not whole: {text:?}"))?;
    Ok((is_default || !acl.is_mode()).then(|| acl.to_bytes()))
}

/// What an entry is for, and its permissions.
fn entry(line: &str) -> Result<(Class, u8), String> {
    let wrong = || format!("an ACL with the entry {line:?}");
    let fields: Vec<_> = line.split(':').map(str::trim).collect();
    let (tag, name, permissions, number) = match fields[..] {
        // `other:r--` is an old form, without an empty field.
        [tag @ ("other" | "o" | "mask" | "m"), permissions] => (tag, "", permissions, None),
        [tag, name, permissions] => (tag, name, permissions, None),
        [tag, name, permissions, number] => (tag, name, permissions, Some(number)),
        _ => return Err(wrong()),
    };
    let id = || match (name, number) {
        (_, Some(number)) => number.parse().map_err(|_| wrong()),
        ("root", None) => Ok(0),
        (name, None) => name.parse().map_err(|_| {
            format!(
                "an ACL for {name:?} without a number; make the archive with `tar --xattrs \
                 --xattrs-include='*'`"
            )
        }),
    };
    let class = match (tag, name.is_empty()) {
        ("user" | "u", true) => Class::Owner,
        ("user" | "u", false) => Class::User(id()?),
        ("group" | "g", true) => Class::Group,
        ("group" | "g", false) => Class::NamedGroup(id()?),
        ("mask" | "m", true) => Class::Mask,
        ("other" | "o", true) => Class::Other,
        _ => return Err(wrong()),
    };
    let mut bits = 0;
    for c in permissions.chars() {
        bits |= match c {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return Err(wrong()),
        };
    }
    Ok((class, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_becomes_the_form_of_linux() {
        let text = b"user::rwx,group::r-x,user:1001:r--,mask::r-x,other::---,group:wheel:-wx:10";
        let value = from_text(text, false).unwrap().unwrap();
        let expected = [
            (1u16, 7u16, u32::MAX),
            (2, 4, 1001),
            (4, 5, u32::MAX),
            (8, 3, 10),
            (16, 5, u32::MAX),
            (32, 0, u32::MAX),
        ];
        let mut bytes = vec![2, 0, 0, 0];
        for (tag, permissions, id) in expected {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(permissions.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        assert_eq!(value, bytes);
    }

    #[test]
    fn an_acl_that_says_no_more_than_the_mode_is_none() {
        let text = b"user::rw-\ngroup::r--\nother::r--\n";
        assert_eq!(from_text(text, false), Ok(None));
        assert_eq!(from_text(text, true).unwrap().unwrap().len(), 4 + 3 * 8);
        assert_eq!(from_text(b"", true), Ok(None));
    }

    #[test]
    fn what_is_not_whole_is_refused() {
        for text in [
            "user::rwx,group::r-x",
            "user::rwx,group::r-x,other::---,user:1:r--",
            "user::rwx,user::rwx,group::r-x,other::---",
            "user::rwx,group::r-x,other::---,mask::rwx,user:1:r--,user:1:r--",
            "user::rwz,group::r-x,other::---",
            "nobody",
        ] {
            assert!(from_text(text.as_bytes(), false).is_err(), "{text}");
        }
        let error = from_text(b"user::rwx,user:lisa:r--,group::r-x,mask::r-x,other::---", false);
        assert!(error.unwrap_err().contains("--xattrs"));
    }
}
