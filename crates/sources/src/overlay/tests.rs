//! Sources over each other, against a model that knows whole trees.
//!
//! The model applies what sources say one after the other to a tree in memory, as unpacking to a
//! directory would. The overlay has to say the same, after each layer, with a budget so small that
//! everything is sorted on disk.

use super::{Collector, Expected, Merged, Node, Patch};
use crate::change::Change;
use crate::{Attributes, Entry, Kind, LinkGroup, Options, Result, TreePath};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Said {
    Directory(String),
    File(String),
    Symlink(String, String),
    Link(String, String),
    Remove(String),
    Patch(String),
    /// A patch that may find nothing.
    Perhaps(String),
}

#[derive(Clone, Debug, Default)]
struct Layer {
    whiteouts: BTreeSet<String>,
    opaque: BTreeSet<String>,
    said: Vec<Said>,
}

fn path(text: &str) -> TreePath {
    TreePath::new(text.as_bytes()).unwrap()
}

fn node(kind: Kind, tag: u32) -> Node {
    let attributes = Attributes { uid: tag, permissions: 0o700, ..Attributes::default() };
    Node { attributes, kind, links: None }
}

fn file(tag: u32) -> Node {
    node(Kind::File { size: tag.into(), contents: None }, tag)
}

fn options() -> Options {
    Options { memory: 0, ..Options::default() }
}

/// Tells the overlay.
fn merged(layers: &[Layer], options: &Options) -> Result<Merged> {
    let mut collector = Collector::new(options);
    let mut tag = 0;
    for (number, layer) in layers.iter().enumerate() {
        collector.begin_layer(&format!("layer {number}"), &TreePath::root(), false);
        for said in &layer.said {
            tag += 1;
            match said {
                Said::Directory(at) => collector.put(&path(at), node(Kind::Directory, tag))?,
                Said::File(at) => collector.put(&path(at), file(tag))?,
                Said::Symlink(at, to) => {
                    let kind = Kind::Symlink(to.clone().into_bytes());
                    collector.put(&path(at), node(kind, tag))?;
                }
                Said::Link(at, to) => collector.link(&path(at), &path(to))?,
                Said::Remove(at) => collector.remove(&path(at))?,
                Said::Patch(at) => {
                    let changes = vec![Change::Gid(tag)];
                    collector.patch(&path(at), Patch { expected: Expected::Any, changes })?;
                }
                Said::Perhaps(at) => {
                    let changes = vec![Change::Gid(tag)];
                    collector.patch(&path(at), Patch { expected: Expected::Optional, changes })?;
                }
            }
        }
        // Their place in a layer means nothing.
        layer.whiteouts.iter().try_for_each(|at| collector.whiteout(&path(at)))?;
        layer.opaque.iter().try_for_each(|at| collector.opaque(&path(at)))?;
    }
    Ok(collector.finish()?.0)
}

fn entries(merged: &Merged, layers: usize) -> Result<Vec<Entry>> {
    merged.entries(layers)?.collect()
}

/// What a test compares: path, type, tag of the put and of the patch; and which names are one
/// inode.
type Seen = (BTreeMap<TreePath, (String, u32, u32)>, BTreeSet<BTreeSet<TreePath>>);

fn seen(entries: Vec<Entry>) -> Seen {
    let mut groups: BTreeMap<LinkGroup, BTreeSet<TreePath>> = BTreeMap::new();
    let mut tree = BTreeMap::new();
    let mut last: Option<TreePath> = None;
    for Entry { path, attributes, kind, links } in entries {
        assert!(last.as_ref().is_none_or(|last| *last < path), "{last:?} before {path:?}");
        if let Some((parent, _)) = path.split() {
            let above: &(String, u32, u32) = &tree[&parent];
            assert_eq!(above.0, "Directory", "{path:?} lies in something else");
        }
        last = Some(path.clone());
        if let Some(group) = links {
            groups.entry(group).or_default().insert(path.clone());
        }
        tree.insert(path, (format!("{kind:?}"), attributes.uid, attributes.gid));
    }
    (tree, groups.into_values().filter(|names| names.len() > 1).collect())
}

/// The model.
#[derive(Clone, Debug, Default)]
struct Model {
    tree: BTreeMap<TreePath, usize>,
    /// Names that are there by a hard link. A symbolic link among them is not followed.
    by_link: BTreeSet<TreePath>,
    inodes: Vec<(Kind, u32, u32)>,
}

impl Model {
    fn kind(&self, at: &TreePath) -> Option<&Kind> {
        self.tree.get(at).map(|inode| &self.inodes[*inode].0)
    }

    fn remove(&mut self, at: &TreePath) {
        self.tree.retain(|path, _| path != at);
        self.clear(at);
    }

    fn clear(&mut self, at: &TreePath) {
        let above = |path: &TreePath| {
            let rest = path.as_bytes().strip_prefix(at.as_bytes());
            at.is_root() && !path.is_root() || rest.is_some_and(|rest| rest.starts_with(b"/"))
        };
        self.tree.retain(|path, _| !above(path));
    }

    fn put(&mut self, at: &TreePath, kind: Kind, tag: u32) {
        if kind != Kind::Directory || self.kind(at) != Some(&Kind::Directory) {
            self.remove(at);
        }
        self.inodes.push((kind, tag, 0));
        self.tree.insert(at.clone(), self.inodes.len() - 1);
        self.by_link.remove(at);
    }

    /// The path without symbolic links above its last name. `Err`: it leads out, or in a circle.
    fn resolve(&mut self, at: &TreePath, make: bool) -> Result<TreePath, ()> {
        let mut at = at.clone();
        'again: for _ in 0..40 {
            let Some((parent, _)) = at.split() else { return Ok(at) };
            let mut way = TreePath::root();
            let names: Vec<_> = parent.components().map(<[u8]>::to_vec).collect();
            for (depth, name) in names.iter().enumerate() {
                let above = way.clone();
                way.push(name);
                if let Some(Kind::Symlink(target)) = self.kind(&way).cloned()
                    && !self.by_link.contains(&way)
                {
                    let mut to = if target.starts_with(b"/") { TreePath::root() } else { above };
                    for name in target.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
                        match name {
                            b".." => to = to.split().ok_or(())?.0,
                            _ => to.push(name),
                        }
                    }
                    at.components().skip(depth + 1).for_each(|name| to.push(name));
                    at = to;
                    continue 'again;
                }
                if make && self.kind(&way) != Some(&Kind::Directory) {
                    self.put(&way, Kind::Directory, 0);
                }
            }
            return Ok(at);
        }
        Err(())
    }

    fn apply(&mut self, layer: &Layer, first_tag: u32) -> Result<(), ()> {
        let hidden = layer.whiteouts.iter().map(|at| (at, true));
        for (at, itself) in hidden.chain(layer.opaque.iter().map(|at| (at, false))) {
            let at = self.resolve(&path(at), false)?;
            if itself { self.remove(&at) } else { self.clear(&at) }
        }
        for (tag, said) in (first_tag..).zip(&layer.said) {
            match said {
                Said::Directory(at) => {
                    let at = self.resolve(&path(at), true)?;
                    self.put(&at, Kind::Directory, tag);
                }
                Said::File(at) => {
                    let at = self.resolve(&path(at), true)?;
                    self.put(&at, Kind::File { size: tag.into(), contents: None }, tag);
                }
                Said::Symlink(at, to) => {
                    let at = self.resolve(&path(at), true)?;
                    self.put(&at, Kind::Symlink(to.clone().into_bytes()), tag);
                }
                Said::Link(at, to) if at == to => {
                    let at = self.resolve(&path(at), false)?;
                    self.tree.get(&at).ok_or(())?;
                }
                Said::Link(at, to) => {
                    let to = self.resolve(&path(to), false)?;
                    let inode = *self.tree.get(&to).ok_or(())?;
                    if self.inodes[inode].0 == Kind::Directory {
                        return Err(());
                    }
                    let at = self.resolve(&path(at), true)?;
                    self.remove(&at);
                    self.tree.insert(at.clone(), inode);
                    self.by_link.insert(at);
                }
                Said::Remove(at) => {
                    let at = self.resolve(&path(at), false)?;
                    self.remove(&at);
                }
                Said::Patch(at) => {
                    let at = self.resolve(&path(at), false)?;
                    let inode = *self.tree.get(&at).ok_or(())?;
                    self.inodes[inode].2 = tag;
                }
                Said::Perhaps(at) => {
                    let at = self.resolve(&path(at), false)?;
                    if let Some(inode) = self.tree.get(&at) {
                        self.inodes[*inode].2 = tag;
                    }
                }
            }
        }
        Ok(())
    }

    fn seen(&self) -> Seen {
        let mut groups: BTreeMap<usize, BTreeSet<TreePath>> = BTreeMap::new();
        let mut tree = BTreeMap::new();
        for (path, inode) in &self.tree {
            let (kind, uid, gid) = &self.inodes[*inode];
            groups.entry(*inode).or_default().insert(path.clone());
            tree.insert(path.clone(), (format!("{kind:?}"), *uid, *gid));
        }
        tree.entry(TreePath::root()).or_insert(("Directory".to_owned(), 0, 0));
        (tree, groups.into_values().filter(|names| names.len() > 1).collect())
    }
}

/// Compares after each layer.
fn compare(layers: &[Layer]) -> Result<(), TestCaseError> {
    let mut model = Model::default();
    let mut expected = vec![model.seen()];
    let mut tag = 1;
    let mut failed = false;
    for layer in layers {
        if model.apply(layer, tag).is_err() {
            failed = true;
            break;
        }
        tag += layer.said.len() as u32;
        expected.push(model.seen());
    }
    let merged = merged(layers, &options());
    if failed {
        let refused = match merged {
            Err(_) => true,
            Ok(merged) => entries(&merged, layers.len()).is_err(),
        };
        prop_assert!(refused, "the model refuses it");
        return Ok(());
    }
    let merged = match merged {
        Ok(merged) => merged,
        // The one thing that the model can do and the overlay refuses.
        Err(e) if e.to_string().contains("replaces a symbolic link that it leads") => return Ok(()),
        Err(e) => return Err(TestCaseError::fail(e.to_string())),
    };
    for (layers, expected) in expected.into_iter().enumerate() {
        let entries = entries(&merged, layers).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(seen(entries), expected, "the first {} layers", layers);
    }
    Ok(())
}

fn some_path() -> impl Strategy<Value = String> {
    "[ab]|[ab]/[ab!]|[ab]/[ab]/[ab]|[ab!]/[ab]/[ab]/[ab]"
}

fn some_said(symlinks: bool) -> impl Strategy<Value = Said> {
    let target = "/[ab]|[ab]|\\.\\./[ab]|/[ab]/[ab]|[ab]/[ab]";
    prop_oneof![
        4 => some_path().prop_map(Said::File),
        2 => some_path().prop_map(Said::Directory),
        if symlinks { 1 } else { 0 } =>
            (some_path(), target).prop_map(|(at, to)| Said::Symlink(at, to)),
        1 => some_path().prop_map(Said::Remove),
        1 => (some_path(), some_path()).prop_map(|(at, to)| Said::Link(at, to)),
        1 => some_path().prop_map(Said::Perhaps),
    ]
}

fn some_layer(symlinks: bool, whiteouts: bool) -> impl Strategy<Value = Layer> {
    let most = if whiteouts { 3 } else { 1 };
    let hidden = || prop::collection::btree_set(some_path(), 0..most);
    (hidden(), hidden(), prop::collection::vec(some_said(symlinks), 0..6))
        .prop_map(|(whiteouts, opaque, said)| Layer { whiteouts, opaque, said })
}

fn last_layer() -> impl Strategy<Value = Layer> {
    prop::collection::vec(some_path().prop_map(Said::Patch), 0..3)
        .prop_map(|said| Layer { said, ..Layer::default() })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn layers_with_whiteouts_are_as_the_model_says(
        mut layers in prop::collection::vec(some_layer(false, true), 1..4),
        last in last_layer(),
    ) {
        layers.push(last);
        compare(&layers)?;
    }

    #[test]
    fn layers_with_symbolic_links_are_as_the_model_says(
        layers in prop::collection::vec(some_layer(true, false), 1..4),
    ) {
        compare(&layers)?;
    }
}

/// Layers of a test that names its parts.
fn layer(whiteouts: &[&str], opaque: &[&str], said: Vec<Said>) -> Layer {
    let set = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect();
    Layer { whiteouts: set(whiteouts), opaque: set(opaque), said }
}

fn names(layers: &[Layer]) -> Vec<String> {
    let merged = merged(layers, &options()).unwrap();
    let name = |entry: Entry| String::from_utf8(entry.path.as_bytes().to_vec()).unwrap();
    entries(&merged, layers.len()).unwrap().into_iter().map(name).collect()
}

fn f(at: &str) -> Said {
    Said::File(at.to_owned())
}

fn d(at: &str) -> Said {
    Said::Directory(at.to_owned())
}

fn s(at: &str, to: &str) -> Said {
    Said::Symlink(at.to_owned(), to.to_owned())
}

/// Two layers, and what is there afterwards. Each of these was compared with what umoci unpacks.
#[test]
fn whiteouts_of_every_form_hide_what_lies_below() {
    let link = |at: &str, to: &str| Said::Link(at.to_owned(), to.to_owned());
    let dir = || vec![d("d"), f("d/a"), f("d/b")];
    for (below, over, expected) in [
        // Opaque directories: siblings of the same layer stay, wherever the mark stands.
        (dir(), layer(&[], &["d"], vec![f("d/c")]), "d d/c"),
        (dir(), layer(&["d/a"], &["d"], vec![f("d/a")]), "d d/a"),
        (vec![d("d/e"), f("d/e/a"), f("d/b")], layer(&[], &["d/e"], vec![]), "d d/b d/e"),
        (dir(), layer(&[], &[""], vec![f("c")]), "c"),
        (dir(), layer(&[], &["nothing"], vec![]), "d d/a d/b"),
        // Whiteouts of everything that has a name.
        (dir(), layer(&["d"], &[], vec![]), ""),
        (dir(), layer(&["d/a"], &[], vec![]), "d d/b"),
        (vec![f("t"), s("l", "t")], layer(&["l"], &[], vec![]), "t"),
        (vec![f("d/t"), s("l", "d")], layer(&["l"], &[], vec![]), "d d/t"),
        (vec![f("a"), link("b", "a"), link("c", "a")], layer(&["a"], &[], vec![]), "b c"),
        (dir(), layer(&["x/y"], &[], vec![]), "d d/a d/b"),
        // A whiteout and a new entry in one layer.
        (dir(), layer(&["d"], &[], vec![d("d"), f("d/n")]), "d d/n"),
        (dir(), layer(&["d"], &[], vec![f("d")]), "d"),
        (vec![f("d")], layer(&["d"], &[], vec![d("d"), f("d/a")]), "d d/a"),
        // One kind takes the place of another without a whiteout.
        (dir(), layer(&[], &[], vec![f("d")]), "d"),
        (dir(), layer(&[], &[], vec![s("d", "elsewhere")]), "d"),
        (vec![f("d")], layer(&[], &[], vec![d("d"), f("d/a")]), "d d/a"),
        (vec![f("t/a"), s("d", "t")], layer(&[], &[], vec![d("d"), f("d/b")]), "d d/b t t/a"),
    ] {
        let shown = format!("{below:?}, {over:?}");
        let names = names(&[layer(&[], &[], below), over]);
        assert_eq!(names.join(" ").trim(), expected, "{shown}");
    }
}

#[test]
fn hard_links_lead_to_what_was_there_across_layers() {
    let link = |at: &str, to: &str| Said::Link(at.to_owned(), to.to_owned());
    let base = || layer(&[], &[], vec![f("a")]);
    let linked = || layer(&[], &[], vec![link("b", "a")]);
    let groups = |layers: &[Layer]| {
        let merged = merged(layers, &options()).unwrap();
        let (tree, groups) = seen(entries(&merged, layers.len()).unwrap());
        let tags: Vec<_> = tree.values().skip(1).map(|(_, tag, _)| *tag).collect();
        (tags, groups.len())
    };
    assert_eq!(groups(&[base(), linked()]), (vec![1, 1], 1));
    // The name that was linked to goes, or becomes another file.
    assert_eq!(groups(&[base(), linked(), layer(&["a"], &[], vec![])]), (vec![1], 0));
    assert_eq!(groups(&[base(), linked(), base()]), (vec![3, 1], 0));
    // A link to what the same layer has replaced.
    assert_eq!(groups(&[base(), layer(&[], &[], vec![f("a"), link("b", "a")])]), (vec![2, 2], 1));
    let gone = layer(&["a"], &[], vec![link("b", "a")]);
    assert!(merged(&[base(), gone], &options()).is_err());
}

#[test]
fn a_path_leads_through_a_link_of_an_earlier_layer() {
    let base = layer(&[], &[], vec![f("usr/bin/a"), f("usr/bin/b"), s("bin", "usr/bin")]);
    // A file, and a whiteout.
    let over = layer(&["bin/b"], &[], vec![f("bin/c")]);
    let expected = ["", "bin", "usr", "usr/bin", "usr/bin/a", "usr/bin/c"];
    assert_eq!(names(&[base.clone(), over]), expected);
    // A directory takes the link's place, and what is hidden in it is not at the link's end.
    let over = layer(&["bin/a"], &[], vec![d("bin"), f("bin/c")]);
    let expected = ["", "bin", "bin/c", "usr", "usr/bin", "usr/bin/a", "usr/bin/b"];
    assert_eq!(names(&[base, over]), expected);
}

#[test]
fn a_link_may_name_its_target_through_a_link() {
    let base = layer(&[], &[], vec![f("usr/lib/a"), s("lib", "usr/lib")]);
    let over = layer(&[], &[], vec![Said::Link("lib/b".to_owned(), "lib/a".to_owned())]);
    let merged = merged(&[base, over], &options()).unwrap();
    let (tree, groups) = seen(entries(&merged, 2).unwrap());
    assert!(tree.contains_key(&path("usr/lib/b")));
    assert_eq!(groups, BTreeSet::from([BTreeSet::from([path("usr/lib/a"), path("usr/lib/b")])]));
}

#[test]
fn links_that_climb_out_or_go_round_are_refused() {
    for links in [
        vec![s("a", "../x"), f("a/b")],
        vec![s("a", "b"), s("b", "a"), f("a/c")],
        vec![s("a", "a"), f("a/c")],
        vec![s("a", "a/b"), f("a/c")],
    ] {
        assert!(merged(&[layer(&[], &[], links.clone())], &options()).is_err(), "{links:?}");
    }
}

#[test]
fn a_long_chain_of_hard_links_is_followed_and_a_longer_one_refused() {
    let chain = |len: usize| {
        // The later link sorts first, so each needs a scan of its own.
        let name = |n: usize| format!("{:03}", len - n);
        let mut said = vec![f(&name(0))];
        said.extend((1..len).map(|n| Said::Link(name(n), name(n - 1))));
        merged(&[layer(&[], &[], said)], &options())
    };
    let entries = entries(&chain(30).unwrap(), 1).unwrap();
    let group = entries[1].links;
    assert!(entries[1..].iter().all(|entry| entry.links == group && group.is_some()));
    let error = chain(100).unwrap_err().to_string();
    assert!(error.contains("hard link"), "{error}");
}

#[test]
fn a_change_of_one_name_is_one_of_all() {
    let said = vec![f("b"), Said::Link("a".to_owned(), "b".to_owned()), f("c")];
    let rules = vec![crate::Rule::chmod("b=0123").unwrap(), crate::Rule::chown("a=5").unwrap()];
    let options = Options { rules, ..options() };
    let merged = merged(&[layer(&[], &[], said)], &options).unwrap();
    let entries = entries(&merged, 1).unwrap();
    let of = |entry: &Entry| (entry.attributes.permissions, entry.attributes.uid);
    assert_eq!(
        entries[1..].iter().map(of).collect::<Vec<_>>(),
        [(0o123, 5), (0o123, 5), (0o700, 3)]
    );
}

#[test]
fn a_change_of_a_name_that_goes_is_one_of_the_others() {
    let link = |at: &str, to: &str| Said::Link(at.to_owned(), to.to_owned());
    let gids = |layers: &[Layer]| {
        let entries = entries(&merged(layers, &options()).unwrap(), layers.len()).unwrap();
        let names = entries.iter().filter(|entry| entry.kind != Kind::Directory);
        names.map(|entry| entry.attributes.gid).collect::<Vec<_>>()
    };
    let files = || layer(&[], &[], vec![f("d/b"), link("a", "d/b"), link("c", "d/b")]);
    let patch = |at: &str| layer(&[], &[], vec![Said::Patch(at.to_owned())]);
    // The name is replaced by another file, hidden, or gone with its directory.
    assert_eq!(gids(&[files(), patch("d/b"), layer(&[], &[], vec![f("d/b")])]), [4, 4, 0]);
    assert_eq!(gids(&[files(), patch("d/b"), layer(&["d/b"], &[], vec![])]), [4, 4]);
    assert_eq!(gids(&[files(), patch("d/b"), layer(&[], &["d"], vec![])]), [4, 4]);
    assert_eq!(gids(&[files(), patch("a"), layer(&[], &[], vec![link("a", "c")])]), [4, 4, 4]);
    // Changes of all names count in the order in which they were made.
    let both = [files(), patch("a"), patch("d/b"), layer(&["d"], &[], vec![])];
    assert_eq!(gids(&both), [5, 5]);
}

#[test]
fn what_is_excluded_goes_with_all_below() {
    let said = vec![f("a/cache/x"), f("a/cached"), f("b.o"), d("c/cache")];
    let exclude = ["cache/", "*.o"].map(|p| crate::Pattern::new(p).unwrap()).to_vec();
    let options = Options { exclude, ..options() };
    let merged = merged(&[layer(&[], &[], said)], &options).unwrap();
    let (tree, _) = seen(entries(&merged, 1).unwrap());
    assert_eq!(tree.into_keys().collect::<Vec<_>>(), ["", "a", "a/cached", "c"].map(path));
}

#[test]
fn times_are_clamped_and_owners_set() {
    let time = |seconds| crate::Time { seconds, nanoseconds: 0 };
    let options = Options { latest: Some(time(50)), owner: Some((7, 8)), ..options() };
    let mut collector = Collector::new(&options);
    collector.begin_layer("test", &path("x"), false);
    for (name, seconds) in [("old", 40), ("new", 60)] {
        let mut node = file(1);
        node.attributes.modified = time(seconds);
        node.attributes.created = Some(time(seconds));
        collector.put(&path(name), node).unwrap();
    }
    let entries = entries(&collector.finish().unwrap().0, 1).unwrap();
    let seen = |entry: &Entry| {
        let Attributes { uid, modified, created, .. } = entry.attributes;
        (uid, modified.seconds, created.map(|t| t.seconds))
    };
    let seen: Vec<_> = entries.iter().map(seen).collect();
    assert_eq!(seen, [(0, 50, None), (0, 50, None), (7, 50, Some(50)), (7, 40, Some(40))]);
}

#[test]
fn the_source_of_a_path_is_the_last_that_put_it() {
    let base = layer(&[], &[], vec![f("a"), f("b"), f("d/c"), f("gone")]);
    let over = layer(&["gone"], &[], vec![f("b"), Said::Link("e".to_owned(), "d/c".to_owned())]);
    let merged = merged(&[base, over], &options()).unwrap();
    for (at, source) in [
        ("a", Some("layer 0")),
        ("b", Some("layer 1")),
        ("d/c", Some("layer 0")),
        ("e", Some("layer 1")),
        ("gone", None),
        ("never", None),
    ] {
        assert_eq!(merged.source_of(&path(at)), source, "{at}");
    }
}

#[test]
fn a_patch_of_nothing_names_the_source_and_the_path() {
    let said = vec![f("a"), Said::Patch("b".to_owned())];
    let merged = merged(&[layer(&[], &[], said)], &options()).unwrap();
    let error = entries(&merged, 1).unwrap_err().to_string();
    assert_eq!(error, "layer 0: b: no earlier source has it");
}
