//! ACLs in the text form of archives, as the extended attributes that Linux keeps.
//!
//! Archives have `user::rwx,user:lisa:r-x:1001,group::r-x,mask::r-x,other::---`. The last number of
//! an entry is what star and libarchive add. GNU tar writes names only, and numbers for users that
//! have none. A name alone means what the machine at hand has in its user database, so the same
//! archive would give another image elsewhere. The entry of such a name is left out, and the caller
//! can say so. All other entries stay, the mask among them: without it the mode would give the
//! group what only the name was to have. GNU tar can store the form of Linux as well, as an
//! extended attribute, and then the text does not matter.

use larder_format::acl::{Acl, Class};

/// An ACL that was text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TextAcl {
    /// The value of its attribute. `None` if the mode alone says the same: Linux stores no
    /// attribute then. A default ACL never says the same, if it has entries.
    pub(crate) value: Option<Vec<u8>>,
    /// Names without numbers. Their entries are left out.
    pub(crate) left_out: Vec<String>,
}

/// The ACL that a text describes.
pub(crate) fn from_text(text: &[u8], is_default: bool) -> Result<TextAcl, String> {
    let text = str::from_utf8(text).map_err(|_| "an ACL that is not text".to_owned())?;
    let (mut entries, mut left_out) = (Vec::new(), Vec::new());
    for line in text.split(['\n', ',']) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            match entry(line)? {
                Entry::Known(class, permissions) => entries.push((class, permissions)),
                Entry::NameOnly(name) => left_out.push(name),
            }
        }
    }
    let named = !left_out.is_empty();
    Ok(TextAcl { value: value(text, entries, named, is_default)?, left_out })
}

/// The attribute's value of an ACL. `named`: it had entries of names besides.
fn value(
    text: &str,
    mut entries: Vec<(Class, u8)>,
    named: bool,
    is_default: bool,
) -> Result<Option<Vec<u8>>, String> {
    if entries.is_empty() && !named {
        return Ok(None);
    }
    entries.sort_unstable();
    let not_whole = || format!("an ACL that is not whole: {text:?}");
    let acl = Acl::new(entries).map_err(|_| not_whole())?;
    if named && acl.mask.is_none() {
        return Err(not_whole());
    }
    Ok((is_default || !acl.is_mode()).then(|| acl.to_bytes()))
}

/// An entry of an ACL.
enum Entry {
    /// What it is for, and its permissions.
    Known(Class, u8),
    /// Of a user or a group without a number.
    NameOnly(String),
}

fn entry(line: &str) -> Result<Entry, String> {
    let wrong = || format!("an ACL with the entry {line:?}");
    let fields: Vec<_> = line.split(':').map(str::trim).collect();
    let (tag, name, permissions, number) = match fields[..] {
        // `other:r--` is an old form, without an empty field.
        [tag @ ("other" | "o" | "mask" | "m"), permissions] => (tag, "", permissions, None),
        [tag, name, permissions] => (tag, name, permissions, None),
        [tag, name, permissions, number] => (tag, name, permissions, Some(number)),
        _ => return Err(wrong()),
    };
    let id: Option<u32> = match (name, number) {
        (_, Some(number)) if !name.is_empty() => Some(number.parse().map_err(|_| wrong())?),
        ("root", _) => Some(0),
        (name, _) => name.parse().ok(),
    };
    let class = match (tag, name.is_empty()) {
        ("user" | "u", true) => Some(Class::Owner),
        ("user" | "u", false) => id.map(Class::User),
        ("group" | "g", true) => Some(Class::Group),
        ("group" | "g", false) => id.map(Class::NamedGroup),
        ("mask" | "m", true) => Some(Class::Mask),
        ("other" | "o", true) => Some(Class::Other),
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
    Ok(match class {
        Some(class) => Entry::Known(class, bits),
        None => Entry::NameOnly(name.to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_becomes_the_form_of_linux() {
        let text = b"user::rwx,group::r-x,user:1001:r--,mask::r-x,other::---,group:wheel:-wx:10";
        let value = from_text(text, false).unwrap().value.unwrap();
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
        let value = |text: &[u8], is_default| from_text(text, is_default).unwrap().value;
        assert_eq!(value(text, false), None);
        assert_eq!(value(text, true).unwrap().len(), 4 + 3 * 8);
        assert_eq!(value(b"", true), None);
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
    }

    #[test]
    fn a_name_without_a_number_is_left_out_and_gives_nobody_more() {
        let text = b"user::rw-,user:lisa:rw-,group::---,group:7:r--,mask::rw-,other::---";
        let acl = from_text(text, false).unwrap();
        let without = b"user::rw-,group::---,group:7:r--,mask::rw-,other::---";
        assert_eq!(acl.value, from_text(without, false).unwrap().value);
        assert_eq!(acl.left_out, ["lisa"]);
        // The mask stays when no name does: the mode has its bits where those of the group were.
        let acl = from_text(b"user::rw-,user:lisa:rw-,group::---,mask::rw-,other::---", false);
        assert_eq!(acl.unwrap().value.unwrap().len(), 4 + 4 * 8);
    }
}
