//! Which parts of a tree are meant: paths in it, patterns that include, patterns that exclude.
//!
//! A pattern is a glob. `*` and `?` stand for anything but a slash, `**` for any number of names. A
//! pattern without a slash is for names, wherever they are. One with a slash is for paths from the
//! start of the tree. What a pattern says of a directory holds for everything in it.
//!
//! What is excluded is never taken. What is to be taken lies at or below one of the paths, if there
//! are paths, and is included, if there are patterns that include.

use anyhow::Context;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A selection of entries.
#[derive(Debug, Default)]
pub(crate) struct Select {
    paths: Vec<Wanted>,
    /// `None`: everything.
    include: Option<GlobSet>,
    exclude: GlobSet,
    /// Subvolumes below the start are shown as empty directories.
    pub(crate) one_subvolume: bool,
}

/// A path that the caller named, without slashes at its ends.
#[derive(Debug)]
struct Wanted {
    path: Vec<u8>,
    met: Cell<bool>,
}

/// What is to be done with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is wanted. If it is a directory, what is in it is wanted, too, unless it is excluded.
    Take,
    /// It is not wanted. If it is a directory, something in it may be.
    Pass,
    /// Neither it nor anything in it is wanted.
    Leave,
}

impl Select {
    /// Everything.
    pub(crate) fn all() -> Self {
        Self::default()
    }

    /// # Errors
    /// A pattern is not one.
    pub(crate) fn new(
        paths: Vec<Vec<u8>>,
        include: &[String],
        exclude: &[String],
    ) -> anyhow::Result<Self> {
        let wanted = |p: &Vec<u8>| Wanted { path: plain(p), met: Cell::new(false) };
        Ok(Self {
            paths: paths.iter().map(wanted).collect(),
            include: (!include.is_empty()).then(|| globs(include)).transpose()?,
            exclude: globs(exclude)?,
            one_subvolume: false,
        })
    }

    /// Is it everything, because nothing else was said?
    pub(crate) fn is_all(&self) -> bool {
        self.paths.is_empty() && self.include.is_none() && self.exclude.is_empty()
    }

    /// What is to be done with the entry at `path`. `above` is what was said of the directory that
    /// it is in; `None` for the start.
    pub(crate) fn judge(&self, path: &[u8], above: Option<Verdict>) -> Verdict {
        let place = Path::new(OsStr::from_bytes(path));
        if above.is_some() && self.exclude.is_match(place) {
            return Verdict::Leave;
        }
        if above == Some(Verdict::Take) {
            return Verdict::Take;
        }
        let (mut inside, mut leads) = (self.paths.is_empty(), false);
        for wanted in &self.paths {
            if is_at_or_below(path, &wanted.path) {
                wanted.met.set(true);
                inside = true;
            }
            leads |= is_at_or_below(&wanted.path, path);
        }
        match &self.include {
            None if inside => Verdict::Take,
            Some(globs) if inside && above.is_some() && globs.is_match(place) => Verdict::Take,
            _ if inside || leads => Verdict::Pass,
            _ => Verdict::Leave,
        }
    }

    /// Paths that were named, and of which nothing has come.
    pub(crate) fn unmet(&self) -> Vec<Vec<u8>> {
        self.paths.iter().filter(|w| !w.met.get()).map(|w| w.path.clone()).collect()
    }
}

/// A path without empty names and dots.
fn plain(path: &[u8]) -> Vec<u8> {
    let names: Vec<&[u8]> =
        path.split(|b| *b == b'/').filter(|name| !matches!(*name, b"" | b".")).collect();
    names.join(&b'/')
}

fn is_at_or_below(path: &[u8], above: &[u8]) -> bool {
    match path.strip_prefix(above) {
        Some(rest) => above.is_empty() || rest.is_empty() || rest.starts_with(b"/"),
        None => false,
    }
}

fn globs(patterns: &[String]) -> anyhow::Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let trimmed = pattern.trim_end_matches('/');
        let of_paths = match trimmed.strip_prefix('/') {
            Some(from_the_start) => from_the_start.to_owned(),
            None if trimmed.contains('/') => trimmed.to_owned(),
            None => format!("**/{trimmed}"),
        };
        let mut glob = GlobBuilder::new(&of_paths);
        let built = glob.literal_separator(true).backslash_escape(true).build();
        set.add(built.with_context(|| format!("the pattern {pattern:?}"))?);
    }
    set.build().context("patterns")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_for_names_or_for_paths() {
        let matches =
            |pattern: &str, path: &str| globs(&[pattern.to_owned()]).unwrap().is_match(path);
        for (pattern, yes, no) in [
            ("*.o", "a/b.o", "a/b.oo"),
            ("/*.o", "b.o", "a/b.o"),
            ("a/*", "a/b", "a/b/c"),
            ("a/**", "a/b/c", "b/a/c"),
            ("**/cache/*", "x/y/cache/z", "x/cache"),
            ("{x,y}[0-9]", "d/y7", "d/z7"),
            ("\\*", "*", "x"),
        ] {
            assert!(matches(pattern, yes), "{pattern} {yes}");
            assert!(!matches(pattern, no), "{pattern} {no}");
        }
        let error = globs(&["a[".to_owned()]).unwrap_err();
        assert!(format!("{error:#}").contains("a["), "{error:#}");
    }

    #[test]
    fn paths_are_made_plain() {
        assert_eq!(plain(b"//a/./b/"), b"a/b");
        assert!(is_at_or_below(b"a/b", b"a") && !is_at_or_below(b"ab", b"a"));
    }
}
