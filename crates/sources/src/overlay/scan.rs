//! What is visible at a path, from one moment to the next.
//!
//! The records of a path come by time. [`Scan`] keeps what is there after each of them. What lies
//! above matters in one way only: where a directory is replaced or hidden, all that was below it
//! goes. Those moments are its *clearings*. The scan keeps them for the paths above the one at
//! hand, and asks before each record whether one of them lies between it and the record before.
//!
//! A scan has a *horizon*: what is said from then on does not count. So the same records give the
//! tree of the first layers, too.

use super::collector::{Layers, implicit_time, is_below, speaker};
use super::record::{Expected, Moment, Node, Patch, Record, path_of};
use crate::change::Change;
use crate::{Error, Kind, LinkGroup, Options, Result, Time, TreePath};

/// What is at a path.
#[derive(Clone, Debug)]
pub(crate) enum State {
    Nothing,
    /// A link that was not resolved, and when it was made.
    Link {
        target: TreePath,
        at: Moment,
    },
    Found(Box<Found>),
}

/// An inode, and what was changed since.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) node: Node,
    /// When it was put here.
    pub(crate) at: Moment,
    pub(crate) patches: Vec<(Moment, Change)>,
    /// It is here by a link.
    pub(crate) by_link: bool,
}

impl Found {
    /// With what was changed.
    pub(crate) fn patched(&self) -> Node {
        let mut node = self.node.clone();
        for (_, change) in &self.patches {
            change.apply(&mut node.attributes, &node.kind);
        }
        node
    }

    /// The group of names that it is in, if another name comes.
    pub(crate) fn group(&self) -> LinkGroup {
        self.node.links.unwrap_or(LinkGroup(self.at.0))
    }
}

/// Goes through the records of all paths.
#[derive(Debug)]
pub(crate) struct Scan {
    layers: Layers,
    horizon: Moment,
    implicit_time: Time,
    /// Are patches of what is not there errors?
    strict: bool,
    above: Vec<Cleared>,
    path: Option<Vec<u8>>,
    state: State,
    /// The moment up to which `state` holds.
    since: Moment,
    clearings: Vec<Moment>,
    /// The next put has a link elsewhere.
    linked: Option<Moment>,
    /// The link of this moment is resolved.
    resolved: Option<Moment>,
}

/// A path at which something cleared all that is below.
#[derive(Debug)]
struct Cleared {
    path: Vec<u8>,
    at: Vec<Moment>,
}

impl Scan {
    pub(crate) fn new(layers: &Layers, horizon: Moment, strict: bool, options: &Options) -> Self {
        Self {
            layers: layers.clone(),
            horizon,
            implicit_time: implicit_time(options),
            strict,
            above: Vec::new(),
            path: None,
            state: State::Nothing,
            since: Moment(0),
            clearings: Vec::new(),
            linked: None,
            resolved: None,
        }
    }

    /// Goes on to `path`, which may be the one at hand. Gives back what remains at the one before.
    pub(crate) fn enter(&mut self, path: &[u8]) -> Option<(Vec<u8>, Found)> {
        if self.path.as_deref() == Some(path) {
            return None;
        }
        let left = self.leave();
        while self.above.last().is_some_and(|above| !is_below(path, &above.path)) {
            self.above.pop();
        }
        self.path = Some(path.to_vec());
        left
    }

    /// Ends the path at hand. Gives back what remains there.
    pub(crate) fn leave(&mut self) -> Option<(Vec<u8>, Found)> {
        let path = self.path.take()?;
        self.catch_up(Moment(self.horizon.0 - 1));
        if !self.clearings.is_empty() {
            let at = std::mem::take(&mut self.clearings);
            self.above.push(Cleared { path: path.clone(), at });
        }
        let state = std::mem::replace(&mut self.state, State::Nothing);
        self.since = Moment(0);
        (self.linked, self.resolved) = (None, None);
        match state {
            State::Found(found) => Some((path, *found)),
            State::Nothing | State::Link { .. } => None,
        }
    }

    /// What is there at a moment that is not before the last record's.
    pub(crate) fn state_at(&mut self, at: Moment) -> &State {
        self.catch_up(at);
        &self.state
    }

    /// The first moment behind `since`, and not behind `until`, at which something above cleared
    /// the path at hand.
    pub(crate) fn cleared_between(&self, since: Moment, until: Moment) -> Option<Moment> {
        let first = |above: &Cleared| {
            let next = above.at.partition_point(|&at| at <= since);
            above.at.get(next).copied().filter(|&at| at <= until)
        };
        self.above.iter().filter_map(first).min()
    }

    fn catch_up(&mut self, at: Moment) {
        if self.cleared_between(self.since, at).is_some() {
            self.state = State::Nothing;
        }
        self.since = self.since.max(at);
    }

    /// Takes in the next record of the path at hand.
    pub(crate) fn step(&mut self, at: Moment, record: Record) -> Result<()> {
        if at >= self.horizon {
            return Ok(());
        }
        self.catch_up(at);
        match record {
            Record::Linked => self.linked = Some(at),
            Record::Through => {}
            Record::Whiteout => {
                self.state = State::Nothing;
                self.clearings.push(at);
            }
            Record::Opaque => self.clearings.push(at),
            Record::Parent => self.be_a_parent(at),
            Record::Put(node) => self.put(*node, at, false),
            Record::Resolved(node) => {
                self.resolved = Some(at);
                self.put(*node, at, true);
            }
            Record::Link(_) if self.resolved == Some(at) => {}
            Record::Link(target) => {
                self.clearings.push(at);
                self.state = State::Link { target, at };
            }
            Record::Patch(patch) => self.patch(patch, at)?,
        }
        Ok(())
    }

    fn put(&mut self, mut node: Node, at: Moment, by_link: bool) {
        if !node.is_directory() {
            self.clearings.push(at);
        }
        if self.linked.take() == Some(at) && node.links.is_none() {
            node.links = Some(LinkGroup(at.0));
        }
        self.state = State::Found(Box::new(Found { node, at, patches: Vec::new(), by_link }));
    }

    /// A directory may have something below. So may a symbolic link that
    /// [`redirect`](super::redirect) follows. Anything else gives way to a directory.
    fn be_a_parent(&mut self, at: Moment) {
        let stays = match &self.state {
            State::Found(found) => {
                let is_link = matches!(found.node.kind, Kind::Symlink(_));
                found.node.is_directory() || is_link && !found.by_link
            }
            State::Nothing | State::Link { .. } => false,
        };
        if !stays {
            self.put(Node::implicit_directory(self.implicit_time), at, false);
        }
    }

    fn patch(&mut self, patch: Patch, at: Moment) -> Result<()> {
        if patch.expected == Expected::Directory && !self.has_directory() {
            self.put(Node::implicit_directory(self.implicit_time), at, false);
        }
        match &mut self.state {
            State::Found(found) => {
                let is_file = matches!(found.node.kind, Kind::File { .. });
                if patch.expected == Expected::File && !is_file {
                    return self.complain(at, "earlier sources have no regular file there");
                }
                found.patches.extend(patch.changes.into_iter().map(|change| (at, change)));
                Ok(())
            }
            // The patch comes again when links are resolved.
            State::Link { .. } => Ok(()),
            State::Nothing if patch.expected == Expected::Optional => Ok(()),
            State::Nothing => self.complain(at, "no earlier source has it"),
        }
    }

    fn has_directory(&self) -> bool {
        matches!(&self.state, State::Found(found) if found.node.is_directory())
    }

    fn complain(&self, at: Moment, what: &str) -> Result<()> {
        if !self.strict {
            return Ok(());
        }
        let path = path_of(self.path.as_deref().unwrap_or_default());
        Err(Error::refused(speaker(&self.layers, at), path.as_bytes(), what))
    }
}
