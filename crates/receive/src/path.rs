//! Paths of a stream, checked: none of them leaves the subvolume.
//!
//! A path is relative, and each part of it is the name of an entry. `..`, `.`, an empty part, and
//! bytes that no name has are refused, not skipped: Linux writes none of them. Symbolic links on
//! the way are the destination's to refuse, because only it sees them.

use crate::error::{Refused, shown};

/// Longest path that Linux would take.
const MAX_PATH: usize = 4095;
/// Longest name.
const MAX_NAME: usize = 255;

/// A path below a subvolume's root; empty for the root itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPath<'a>(&'a [u8]);

impl<'a> StreamPath<'a> {
    /// The subvolume's root.
    pub const ROOT: StreamPath<'static> = StreamPath(b"");

    /// Checks a path.
    ///
    /// # Errors
    /// It is none.
    pub fn new(path: &'a [u8]) -> Result<Self, Refused> {
        // The root may have a slash or not.
        let sound = path.is_empty() || path.len() <= MAX_PATH && path.split(is_slash).all(is_name);
        if sound { Ok(Self(path)) } else { Err(Refused::Path(shown(path))) }
    }

    /// The path of an entry that has a name of its own: not the root.
    ///
    /// # Errors
    /// It is none.
    pub fn entry(path: &'a [u8]) -> Result<Self, Refused> {
        if path.is_empty() { Err(Refused::Path(shown(path))) } else { Self::new(path) }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// The directory that it lies in, and its name there; nothing for the root.
    #[must_use]
    pub fn split(self) -> Option<(StreamPath<'a>, &'a [u8])> {
        if self.0.is_empty() {
            return None;
        }
        Some(match self.0.iter().rposition(is_slash) {
            Some(at) => (Self(&self.0[..at]), &self.0[at + 1..]),
            None => (Self(b""), self.0),
        })
    }

    /// Its names, from the root down.
    pub fn names(self) -> impl Iterator<Item = &'a [u8]> {
        self.0.split(is_slash).filter(|name| !name.is_empty())
    }

    /// Is `other` this path, or below it?
    #[must_use]
    pub fn contains(self, other: &[u8]) -> bool {
        match other.strip_prefix(self.0) {
            Some(rest) => self.0.is_empty() || rest.is_empty() || rest[0] == b'/',
            None => false,
        }
    }
}

/// Can the subvolume's own name be this?
pub(crate) fn check_name(name: &[u8]) -> Result<(), Refused> {
    let sound = is_name(name) && !name.contains(&b'/');
    if sound { Ok(()) } else { Err(Refused::Path(shown(name))) }
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_slash(byte: &u8) -> bool {
    *byte == b'/'
}

fn is_name(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && name.len() <= MAX_NAME && !name.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_leaves_the_subvolume() {
        for good in [&b""[..], b"a", b"a/b", b"...", b"a/..b", b"\xff\n"] {
            assert!(StreamPath::new(good).is_ok(), "{}", shown(good));
        }
        let long = [b'a'; 256];
        let bad: &[&[u8]] =
            &[b"/", b"/a", b"a/", b"a//b", b".", b"..", b"a/..", b"../a", b"a/./b", b"a\0", &long];
        for bad in bad {
            assert!(StreamPath::new(bad).is_err(), "{}", shown(bad));
        }
        assert!(StreamPath::entry(b"").is_err());
        assert!(check_name(b"a/b").is_err());
    }

    #[test]
    fn parts_of_a_path() {
        let path = StreamPath::new(b"a/b/c").unwrap();
        assert_eq!(path.split(), Some((StreamPath(b"a/b"), &b"c"[..])));
        assert_eq!(path.names().count(), 3);
        assert_eq!(StreamPath::ROOT.names().count(), 0);
        let ab = StreamPath(b"a/b");
        assert!(ab.contains(b"a/b") && ab.contains(b"a/b/c"));
        assert!(!ab.contains(b"a/bc") && !ab.contains(b"a") && StreamPath::ROOT.contains(b"a"));
    }
}
