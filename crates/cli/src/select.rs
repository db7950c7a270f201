//! Which parts of a tree are meant: paths in it, patterns that include, patterns that exclude.
//!
//! Patterns are those of `larder-sources`: one without a slash is for names, one with a slash for
//! paths from the start of the tree. What a pattern says of a directory holds for everything in it.
//!
//! What is excluded is never taken. What is to be taken lies at or below one of the paths, if there
//! are paths, and is included, if there are patterns that include.

use larder_sources::{Kind, Pattern, TreePath};
use std::cell::Cell;

/// A selection of entries.
#[derive(Debug, Default)]
pub(crate) struct Select {
    paths: Vec<Wanted>,
    /// `None`: everything.
    include: Option<Vec<Pattern>>,
    exclude: Vec<Pattern>,
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
            include: (!include.is_empty()).then(|| patterns(include)).transpose()?,
            exclude: patterns(exclude)?,
            one_subvolume: false,
        })
    }

    /// Is it everything, because nothing else was said?
    pub(crate) fn is_all(&self) -> bool {
        self.paths.is_empty() && self.include.is_none() && self.exclude.is_empty()
    }

    /// What is to be done with the entry at `path`. `above` is what was said of the directory that
    /// it is in; `None` for the start.
    pub(crate) fn judge(&self, path: &[u8], is_dir: bool, above: Option<Verdict>) -> Verdict {
        if matches(&self.exclude, path, is_dir) {
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
            Some(patterns) if inside && matches(patterns, path, is_dir) => Verdict::Take,
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

fn patterns(texts: &[String]) -> anyhow::Result<Vec<Pattern>> {
    Ok(texts.iter().map(|text| Pattern::new(text)).collect::<Result<_, _>>()?)
}

fn matches(patterns: &[Pattern], path: &[u8], is_dir: bool) -> bool {
    if patterns.is_empty() {
        return false;
    }
    // Of the kind, only this counts.
    let kind = if is_dir { Kind::Directory } else { Kind::Fifo };
    TreePath::new(path).is_some_and(|path| patterns.iter().any(|p| p.matches(&path, &kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_made_plain() {
        assert_eq!(plain(b"//a/./b/"), b"a/b");
        assert!(is_at_or_below(b"a/b", b"a") && !is_at_or_below(b"ab", b"a"));
    }
}
