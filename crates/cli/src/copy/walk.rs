//! Walking a tree that is to be copied: what comes, in which order, and what is left out.
//!
//! A walk tells of one thing after the other. Names come sorted, so that equal trees give equal
//! walks. A directory comes before what is in it, and its end after. A directory from which only
//! some things are wanted comes with the first of them, or not at all.
//!
//! The tree may be that of a hostile image. Names that could leave their directory are refused
//! here, and so are directories without end. One entry that cannot be read is an error of its own,
//! and the walk goes on behind it.

use super::{Blame, Meta, Source, Trouble, Xattrs};
use crate::print;
use crate::select::{Select, Verdict};
use anyhow::{anyhow, bail};
use larder_fs::FileKind;
use std::collections::VecDeque;

/// Deepest nesting of directories; only an image that contains itself is deeper.
const MAX_DEPTH: usize = 4096;

/// Something in the tree.
#[derive(Debug)]
pub(crate) struct Found<N> {
    pub(crate) node: N,
    /// Names from the start of the walk on, joined by slashes. Empty for the start itself.
    pub(crate) path: Vec<u8>,
    name_at: usize,
    pub(crate) meta: Meta,
    pub(crate) xattrs: Xattrs,
    /// For messages.
    pub(crate) shown: String,
    /// Is it the root of a subvolume below the start?
    pub(crate) nested: bool,
}

impl<N> Found<N> {
    /// The last name. Empty for the start of the walk.
    pub(crate) fn name(&self) -> &[u8] {
        &self.path[self.name_at..]
    }
}

/// What comes next.
#[derive(Debug)]
pub(crate) enum Event<N> {
    /// A directory. Its entries follow, and then its end.
    Enter(Found<N>),
    /// The end of the directory that was entered last.
    Leave,
    /// Anything else.
    Other(Found<N>),
}

enum Step<N> {
    Look(Look<N>),
    Leave,
}

/// What has not been looked at.
struct Look<N> {
    node: N,
    path: Vec<u8>,
    /// Where its own name begins.
    name_at: usize,
    shown: String,
    depth: usize,
    /// What was decided about the directory that it is in, and that directory's tree.
    above: Option<(Verdict, u64)>,
}

/// A walk under way.
pub(crate) struct Walk<'a, S: Source> {
    source: &'a S,
    select: &'a Select,
    /// The last comes first.
    todo: Vec<Step<S::Node>>,
    /// Directories that are entered as soon as something in them is wanted.
    held: Vec<Found<S::Node>>,
    ready: VecDeque<Event<S::Node>>,
}

impl<'a, S: Source> Walk<'a, S> {
    /// A walk from `node` on, which messages call `shown`.
    pub(crate) fn new(source: &'a S, select: &'a Select, node: &S::Node, shown: &str) -> Self {
        let (node, shown) = (node.clone(), shown.to_owned());
        let start = Look { node, path: Vec::new(), name_at: 0, shown, depth: 0, above: None };
        let (held, ready) = (Vec::new(), VecDeque::new());
        Self { source, select, todo: vec![Step::Look(start)], held, ready }
    }

    /// What comes next; `None` at the end.
    pub(crate) fn next(&mut self) -> Option<Result<Event<S::Node>, Trouble>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(Ok(event));
            }
            match self.todo.pop()? {
                // A directory from which nothing was wanted.
                Step::Leave if self.held.pop().is_some() => {}
                Step::Leave => return Some(Ok(Event::Leave)),
                Step::Look(look) => {
                    if let Err(e) = self.look(look) {
                        return Some(Err(e));
                    }
                }
            }
        }
    }

    /// The directory that was just entered cannot be made: the walk goes on behind its end, and
    /// does not tell of that.
    pub(crate) fn skip(&mut self) {
        let entered = self.ready.drain(..).filter(|event| matches!(event, Event::Enter(_))).count();
        for _ in 0..=entered {
            while let Some(Step::Look(_)) = self.todo.pop() {}
        }
    }

    fn look(&mut self, look: Look<S::Node>) -> Result<(), Trouble> {
        if look.depth > 0 {
            check_name(&look.path[look.name_at..]).of_source(&look.shown)?;
        }
        let meta = self.source.meta(&look.node).of_source(&look.shown)?;
        let is_dir = meta.kind == FileKind::Directory;
        let above = look.above.map(|(verdict, _)| verdict);
        let verdict = self.select.judge(&look.path, is_dir, above);
        if verdict == Verdict::Leave {
            return Ok(());
        }
        match meta.kind {
            FileKind::Directory => self.directory(look, meta, verdict),
            _ if verdict == Verdict::Pass => Ok(()),
            _ => {
                let xattrs = self.source.xattrs(&look.node).of_source(&look.shown)?;
                self.ready.extend(self.held.drain(..).map(Event::Enter));
                self.ready.push_back(Event::Other(look.found(meta, xattrs)));
                Ok(())
            }
        }
    }

    fn directory(
        &mut self,
        look: Look<S::Node>,
        meta: Meta,
        verdict: Verdict,
    ) -> Result<(), Trouble> {
        if look.depth > MAX_DEPTH {
            let why = "directories are nested more than";
            return Err(Trouble::Entry(anyhow!("{}: {why} {MAX_DEPTH} deep", look.shown)));
        }
        let xattrs = self.source.xattrs(&look.node).of_source(&look.shown)?;
        let mut entries = Vec::new();
        if !(look.is_nested(&meta) && self.select.one_subvolume) {
            entries = self.source.entries(&look.node).of_source(&look.shown)?;
        }
        // The last step comes first.
        entries.sort_unstable_by(|a, b| b.0.cmp(&a.0));
        self.todo.push(Step::Leave);
        let below = entries.into_iter().map(|(name, node)| look.below(&name, node, &meta, verdict));
        self.todo.extend(below.map(Step::Look));
        self.held.push(look.found(meta, xattrs));
        if verdict == Verdict::Take {
            self.ready.extend(self.held.drain(..).map(Event::Enter));
        }
        Ok(())
    }
}

impl<N> Look<N> {
    fn is_nested(&self, meta: &Meta) -> bool {
        self.above.is_some_and(|(_, tree)| tree != meta.tree)
    }

    /// An entry of this directory.
    fn below(&self, name: &[u8], node: N, meta: &Meta, verdict: Verdict) -> Self {
        let path = match &self.path[..] {
            b"" => name.to_vec(),
            above => [above, b"/", name].concat(),
        };
        let name_at = path.len() - name.len();
        let shown = format!("{}/{}", self.shown.trim_end_matches('/'), print::name(name));
        let above = Some((verdict, meta.tree));
        Self { node, path, name_at, shown, depth: self.depth + 1, above }
    }

    fn found(self, meta: Meta, xattrs: Xattrs) -> Found<N> {
        let nested = self.is_nested(&meta);
        let Self { node, path, name_at, shown, .. } = self;
        Found { node, path, name_at, meta, xattrs, shown, nested }
    }
}

/// A name that stays within its directory.
fn check_name(name: &[u8]) -> anyhow::Result<()> {
    if matches!(name, b"" | b"." | b"..") || name.iter().any(|b| matches!(b, b'/' | 0)) {
        bail!("{:?} is not a file name", print::name(name));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::host::HostTree;
    use std::path::Path;

    /// What a walk tells: `+` for entering, `-` for leaving.
    fn told(dir: &Path, select: &Select) -> Vec<String> {
        let mut walk = Walk::new(&HostTree, select, &dir.to_owned(), "x");
        let mut out = Vec::new();
        while let Some(event) = walk.next() {
            let path = |f: &Found<_>| String::from_utf8(f.path.clone()).unwrap();
            out.push(match event.unwrap_or_else(|_| panic!("unreadable")) {
                Event::Enter(f) => format!("+{}", path(&f)),
                Event::Other(f) => path(&f),
                Event::Leave => "-".to_owned(),
            });
        }
        out
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for d in ["a/deep", "b", "empty"] {
            std::fs::create_dir_all(dir.path().join(d)).unwrap();
        }
        for f in ["a!", "a/one.txt", "a/deep/two.txt", "a/deep/two.rs", "b/three.rs"] {
            std::fs::write(dir.path().join(f), b"").unwrap();
        }
        dir
    }

    #[test]
    fn names_are_sorted_and_directories_enclose_theirs() {
        let dir = tree();
        let expected = "+ +a +a/deep a/deep/two.rs a/deep/two.txt - a/one.txt - a! +b b/three.rs \
                        - +empty - -";
        assert_eq!(told(dir.path(), &Select::all()).join(" "), expected);
    }

    #[test]
    fn directories_come_only_with_something_that_is_wanted() {
        let dir = tree();
        let select = |paths: &[&str], include: &[&str], exclude: &[&str]| {
            let words = |w: &[&str]| w.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
            let paths = paths.iter().map(|p| p.as_bytes().to_vec()).collect();
            Select::new(paths, &words(include), &words(exclude)).unwrap()
        };
        let told = |s: &Select| told(dir.path(), s).join(" ");
        assert_eq!(
            told(&select(&[], &["*.txt"], &[])),
            "+ +a +a/deep a/deep/two.txt - a/one.txt - -"
        );
        assert_eq!(told(&select(&[], &["*.txt"], &["deep"])), "+ +a a/one.txt - -");
        assert_eq!(told(&select(&["b", "empty"], &[], &[])), "+ +b b/three.rs - +empty - -");
        assert_eq!(told(&select(&["/a/"], &["/a/*.txt"], &[])), "+ +a a/one.txt - -");
        assert_eq!(told(&select(&[], &["deep"], &["*.txt"])), "+ +a +a/deep a/deep/two.rs - - -");
        assert_eq!(told(&select(&[], &["no such"], &[])), "");
        let missing = select(&["b", "c/d"], &[], &[]);
        let _ = self::told(dir.path(), &missing);
        assert_eq!(missing.unmet(), [b"c/d".to_vec()]);
    }

    #[test]
    fn what_is_skipped_is_skipped_whole() {
        let dir = tree();
        let select = Select::new(Vec::new(), &["*.txt".to_owned()], &[]).unwrap();
        // The root is entered, then `a` is refused, in which `a/deep` is entered already.
        let mut walk = Walk::new(&HostTree, &select, &dir.path().to_owned(), "x");
        assert!(matches!(walk.next(), Some(Ok(Event::Enter(f))) if f.path.is_empty()));
        assert!(matches!(walk.next(), Some(Ok(Event::Enter(f))) if f.path == b"a"));
        walk.skip();
        assert!(matches!(walk.next(), Some(Ok(Event::Leave))));
        assert!(walk.next().is_none());
    }

    #[test]
    fn names_cannot_leave_their_directory() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0"] {
            assert!(check_name(bad).is_err());
        }
        check_name(b"...").unwrap();
    }
}
