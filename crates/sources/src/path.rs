//! Paths below the root of what is built.

use std::cmp::Ordering;

/// A path below the root of what is built. Its components are joined by `/`. It begins and ends
/// with a component, none of which is empty, `.` or `..`. The root itself is the empty path. Names
/// are bytes, and need not be UTF-8.
///
/// The order is that of the components, so that a directory is followed by all that it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TreePath(Vec<u8>);

impl TreePath {
    /// The root.
    #[must_use]
    pub fn root() -> Self {
        Self::default()
    }

    /// `bytes` as a path below the root: leading, trailing and double slashes and components `.`
    /// are left out. `None` if a component is `..` or has a NUL.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut path = Self::root();
        for name in bytes.split(|&b| b == b'/') {
            match name {
                b"" | b"." => {}
                b".." => return None,
                _ if name.contains(&0) => return None,
                _ => path.push(name),
            }
        }
        Some(path)
    }

    /// Goes down to `name`, which is one component.
    pub fn push(&mut self, name: &[u8]) {
        if !self.0.is_empty() {
            self.0.push(b'/');
        }
        self.0.extend_from_slice(name);
    }

    /// The bytes, without a leading slash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Is it the root?
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The components from the root down.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|&b| b == b'/').filter(|name| !name.is_empty())
    }

    /// The directory that has it, and its name there. `None` for the root.
    #[must_use]
    pub fn split(&self) -> Option<(Self, &[u8])> {
        if self.is_root() {
            return None;
        }
        Some(match self.0.iter().rposition(|&b| b == b'/') {
            Some(at) => (Self(self.0[..at].to_vec()), &self.0[at + 1..]),
            None => (Self::root(), &self.0),
        })
    }
}

impl Ord for TreePath {
    fn cmp(&self, other: &Self) -> Ordering {
        self.components().cmp(other.components())
    }
}

impl PartialOrd for TreePath {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_followed_by_what_it_holds() {
        let mut paths: Vec<_> = ["a!", "a/b", "", "a", "a/b/c", "b", "a/b!"]
            .map(|p| TreePath::new(p.as_bytes()).unwrap())
            .into();
        paths.sort();
        let sorted: Vec<_> = paths.iter().map(|p| str::from_utf8(p.as_bytes()).unwrap()).collect();
        assert_eq!(sorted, ["", "a", "a/b", "a/b/c", "a/b!", "a!", "b"]);
    }

    #[test]
    fn a_path_stays_below_the_root() {
        assert_eq!(TreePath::new(b"/./a//b/").unwrap().as_bytes(), b"a/b");
        assert_eq!(TreePath::new(b"a/../b"), None);
        assert_eq!(TreePath::new(b"a\0b"), None);
        let path = TreePath::new(b"a/b/c").unwrap();
        let (directory, name) = path.split().unwrap();
        assert_eq!((directory.as_bytes(), name), (&b"a/b"[..], &b"c"[..]));
    }
}
