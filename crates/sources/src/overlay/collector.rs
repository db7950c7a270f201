//! What readers call: takes what sources say and makes records of it.
//!
//! Hidden here is how parents come to be. A source may name a file without its directories, so
//! each call also records the directories on the way: as made where they are missing, or as passed
//! through where nothing is to be made. Most sources go through a tree directory by directory.
//! Therefore only those are recorded that were not on the way of the call before.

use super::merged::Merged;
use super::record::{Ask, Moment, Node, Patch, Record, path_key};
use super::{Expected, links, redirect};
use crate::spill::Sorter;
use crate::{Error, Kind, LinkGroup, Options, Result, Time, TreePath};
use std::sync::Arc;

/// The longest name that btrfs has.
const LONGEST_NAME: usize = 255;
/// More notes than these help nobody.
const MOST_NOTES: usize = 100;

/// A source, or a layer of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// What it says comes at this moment or later.
    pub(crate) start: Moment,
}

/// All sources and their layers, from the lowest.
pub(crate) type Layers = Arc<[Layer]>;

/// The name of the source that spoke at a moment.
pub(crate) fn speaker(layers: &[Layer], at: Moment) -> &str {
    let next = layers.partition_point(|layer| layer.start <= at);
    next.checked_sub(1).map_or("", |last| &layers[last].name)
}

/// Takes what sources say.
pub(crate) struct Collector {
    options: Options,
    main: Sorter,
    asks: Sorter,
    next: Moment,
    layers: Vec<Layer>,
    /// Where the source is placed.
    below: TreePath,
    /// Do the source's own owners and times count whatever the options say?
    is_manifest: bool,
    /// Directories that certainly exist at this moment: these and all above.
    made: TreePath,
    /// A directory that this layer itself describes, like all above it.
    described: TreePath,
    /// Directories that were passed through, for links and patches.
    passed: TreePath,
    /// The same for what is hidden by the layer.
    passed_by_whiteouts: TreePath,
    facts: Facts,
    notes: Vec<String>,
}

/// What has come. A scan that would find nothing is left out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    pub(crate) symlinks: bool,
    pub(crate) implied: bool,
    pub(crate) links: bool,
    pub(crate) patches: bool,
}

impl Collector {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            main: Sorter::new(options.memory / 2, &options.temporary),
            asks: Sorter::new(options.memory / 8, &options.temporary),
            options: options.clone(),
            next: Moment(1),
            layers: Vec::new(),
            below: TreePath::root(),
            is_manifest: false,
            made: TreePath::root(),
            described: TreePath::root(),
            passed: TreePath::root(),
            passed_by_whiteouts: TreePath::root(),
            facts: Facts::default(),
            notes: Vec::new(),
        }
    }

    /// The options of the whole.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// What comes now lies over what came before, and below a path.
    pub(crate) fn begin_layer(&mut self, name: &str, below: &TreePath, is_manifest: bool) {
        let start = self.tick();
        self.layers.push(Layer { name: name.to_owned(), start });
        self.below = below.clone();
        self.is_manifest = is_manifest;
        self.made = TreePath::root();
        self.described = TreePath::root();
        self.passed = TreePath::root();
        self.passed_by_whiteouts = TreePath::root();
    }

    /// Will a path of the source be left out, with all that is below?
    pub(crate) fn leaves_out(&self, path: &TreePath, kind: &Kind) -> bool {
        let patterns = &self.options.exclude;
        !patterns.is_empty()
            && self.placed(path).is_ok_and(|path| patterns.iter().any(|p| p.matches(&path, kind)))
    }

    /// The name of the layer that is being read.
    pub(crate) fn layer(&self) -> &str {
        self.layers.last().map_or("", |layer| &layer.name)
    }

    /// Says that something of an entry was left out.
    pub(crate) fn note(&mut self, entry: &[u8], what: &str) {
        if self.notes.len() < MOST_NOTES {
            let entry = crate::error::shown(entry);
            self.notes.push(format!("{}: {entry}: {what}", self.layer()));
        }
    }

    /// A number that was not given out before. Those of later calls are larger.
    pub(crate) fn tick(&mut self) -> Moment {
        self.next.0 += 1;
        Moment(self.next.0 - 1)
    }

    /// Something is at a path.
    pub(crate) fn put(&mut self, path: &TreePath, node: Node) -> Result<()> {
        let at = self.tick();
        let path = self.placed(path)?;
        if path.is_root() && !node.is_directory() {
            let what = "only a directory can be the root of an image: place it at a path";
            return Err(Error::refused(self.layer(), b"", what));
        }
        self.make_parents(&path, at)?;
        let parent = path.split().map_or_else(TreePath::root, |(parent, _)| parent);
        let within = |path: &TreePath, of: &TreePath| shared(path, of) == path.components().count();
        if node.is_directory() && within(&parent, &self.described) {
            self.described = path.clone();
        } else if !node.is_directory() && within(&path, &self.described) {
            self.described = parent.clone();
        }
        self.made = if node.is_directory() { path.clone() } else { parent };
        if matches!(node.kind, Kind::Symlink(_)) {
            self.facts.symlinks = true;
            self.passed = TreePath::root();
        }
        self.push(&path, at, Record::Put(Box::new(node)))
    }

    /// A name of an inode that has several. It was found at moment `at`. Its directory was put
    /// before, and nothing else was said about the path since.
    pub(crate) fn put_name(
        &mut self,
        path: &TreePath,
        at: Moment,
        group: LinkGroup,
        node: Node,
    ) -> Result<()> {
        self.facts.links = true;
        self.facts.symlinks |= matches!(node.kind, Kind::Symlink(_));
        let path = self.placed(path)?;
        self.push(&path, at, Record::Put(Box::new(Node { links: Some(group), ..node })))
    }

    /// A path is one more name of what is at another path now.
    pub(crate) fn link(&mut self, path: &TreePath, target: &TreePath) -> Result<()> {
        if path == target {
            // It changes nothing, but something has to be there.
            return self.patch(path, Patch { expected: Expected::Any, changes: Vec::new() });
        }
        let (asked, at) = (self.tick(), self.tick());
        let (path, target) = (self.placed(path)?, self.placed(target)?);
        self.pass_parents(&target, asked)?;
        self.make_parents(&path, at)?;
        self.made = path.split().map_or_else(TreePath::root, |(parent, _)| parent);
        self.facts.links = true;
        let ask = Ask { link: path.clone(), at };
        self.asks.push(&Ask::key(&target, at), &ask.value())?;
        self.push(&path, at, Record::Link(target))
    }

    /// What is at a path changes.
    pub(crate) fn patch(&mut self, path: &TreePath, patch: Patch) -> Result<()> {
        let at = self.tick();
        let path = self.placed(path)?;
        if patch.expected == Expected::Directory {
            self.make_parents(&path, at)?;
            self.made = path.clone();
        } else {
            self.pass_parents(&path, at)?;
        }
        self.facts.patches = true;
        self.push(&path, at, Record::Patch(patch))
    }

    /// What is at a path now, and below it, is gone.
    pub(crate) fn remove(&mut self, path: &TreePath) -> Result<()> {
        let at = self.tick();
        let path = self.placed(path)?;
        self.pass_parents(&path, at)?;
        self.made = TreePath::root();
        self.push(&path, at, Record::Whiteout)
    }

    /// What earlier layers have at a path is gone.
    pub(crate) fn whiteout(&mut self, path: &TreePath) -> Result<()> {
        self.hide(path, Record::Whiteout)
    }

    /// What earlier layers have below a path is gone.
    pub(crate) fn opaque(&mut self, path: &TreePath) -> Result<()> {
        self.hide(path, Record::Opaque)
    }

    /// It hides only what lower layers have, whatever the order within the layer.
    fn hide(&mut self, path: &TreePath, record: Record) -> Result<()> {
        let at = self.layers.last().expect("a layer has begun").start;
        let path = self.placed(path)?;
        let mut known = std::mem::take(&mut self.passed_by_whiteouts);
        // What the layer describes as a directory is one, whatever was there before.
        if shared(&self.described, &path) > shared(&known, &path) {
            known = self.described.clone();
        }
        self.passed_by_whiteouts = self.note_parents(&path, &known, at, &Record::Through)?;
        self.push(&path, at, record)
    }

    /// No more comes.
    pub(crate) fn finish(self) -> Result<(Merged, Vec<String>)> {
        let layers: Layers = self.layers.into();
        let (mut main, mut asks) = (self.main.finish()?, self.asks.finish()?);
        if self.facts.symlinks && self.facts.implied {
            (main, asks) = redirect::follow(main, asks, &layers, &self.options)?;
        }
        let answers = links::resolve(&main, asks, &layers, &self.options)?;
        let merged = Merged::new(main, answers, layers, self.facts, self.options);
        Ok((merged, self.notes))
    }

    fn push(&mut self, path: &TreePath, at: Moment, record: Record) -> Result<()> {
        let record = self.with_options(record);
        Ok(self.main.push(&record.key(path, at), &record.value())?)
    }

    /// What the options say about all that is not from a manifest.
    fn with_options(&self, mut record: Record) -> Record {
        if let Record::Put(node) = &mut record
            && !self.is_manifest
        {
            let attributes = &mut node.attributes;
            if let Some((uid, gid)) = self.options.owner {
                (attributes.uid, attributes.gid) = (uid, gid);
            }
            if let Some(time) = self.options.modified {
                attributes.modified = time;
                (attributes.accessed, attributes.changed, attributes.created) = (None, None, None);
            }
        }
        record
    }

    /// A path of the source as one of the whole.
    fn placed(&self, path: &TreePath) -> Result<TreePath> {
        if let Some(name) = path.components().find(|name| name.len() > LONGEST_NAME) {
            let what = format!("a name of {} bytes; btrfs has at most {LONGEST_NAME}", name.len());
            return Err(Error::refused(self.layer(), path.as_bytes(), what));
        }
        let mut placed = self.below.clone();
        path.components().for_each(|name| placed.push(name));
        Ok(placed)
    }

    fn make_parents(&mut self, path: &TreePath, at: Moment) -> Result<()> {
        let known = std::mem::take(&mut self.made);
        self.note_parents(path, &known, at, &Record::Parent)?;
        Ok(())
    }

    fn pass_parents(&mut self, path: &TreePath, at: Moment) -> Result<()> {
        let known = std::mem::take(&mut self.passed);
        self.passed = self.note_parents(path, &known, at, &Record::Through)?;
        Ok(())
    }

    /// Records the directories above `path`, but for those that are `known` or above it. Returns
    /// the lowest of them.
    fn note_parents(
        &mut self,
        path: &TreePath,
        known: &TreePath,
        at: Moment,
        record: &Record,
    ) -> Result<TreePath> {
        let Some((parent, _)) = path.split() else { return Ok(TreePath::root()) };
        let mut known = known.components();
        let mut common = true;
        let mut directory = TreePath::root();
        for name in parent.components() {
            common = common && known.next() == Some(name);
            directory.push(name);
            if !common {
                self.facts.implied = true;
                self.main.push(&record.key(&directory, at), &record.value())?;
            }
        }
        Ok(parent)
    }
}

/// How many components two paths have in common, from the root down.
fn shared(a: &TreePath, b: &TreePath) -> usize {
    a.components().zip(b.components()).take_while(|(a, b)| a == b).count()
}

/// The time of directories that no source describes.
pub(crate) fn implicit_time(options: &Options) -> Time {
    options.modified.or(options.latest).unwrap_or_default()
}

/// Is `path` below `directory`? Both are keys without their ends.
pub(crate) fn is_below(path: &[u8], directory: &[u8]) -> bool {
    directory.is_empty() && !path.is_empty()
        || path.strip_prefix(directory).is_some_and(|rest| rest.first() == Some(&0))
}

/// The key of a path without its end.
pub(crate) fn bare_key(path: &TreePath) -> Vec<u8> {
    let mut key = path_key(path);
    key.truncate(key.len() - 2);
    key
}
