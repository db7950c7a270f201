//! The one tree that sources make, as a stream of entries.
//!
//! The stream comes from one scan. The options are applied here: leaving entries out, changes by
//! pattern, the latest time.
//!
//! A change of one name is a change of its inode, and so of names elsewhere. Where there are hard
//! links and changes, a scan beforehand collects the changes of each group of names, and sorts them
//! to the paths of all its names.

use super::collector::{Facts, Layers, implicit_time, speaker};
use super::links::{Merged2, entry_key, with_answers};
use super::record::{Moment, Node, Record, parts, path_of, read_changes, write_changes};
use super::scan::{Found, Scan};
use crate::change::Change;
use crate::rules::{Exclusion, Rule};
use crate::spill::{self, Sorted, Sorter};
use crate::{Entry, LinkGroup, Options, Result, Time, TreePath};
use std::iter::Peekable;

/// Everything that sources say, sorted.
#[derive(Debug)]
pub(crate) struct Merged {
    main: Sorted,
    answers: Option<Sorted>,
    layers: Layers,
    facts: Facts,
    options: Options,
}

impl Merged {
    pub(crate) fn new(
        main: Sorted,
        answers: Option<Sorted>,
        layers: Layers,
        facts: Facts,
        options: Options,
    ) -> Self {
        Self { main, answers, layers, facts, options }
    }

    /// The names of the layers, from the lowest.
    pub(crate) fn layers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layers.iter().map(|layer| &*layer.name)
    }

    /// An upper bound of the number of entries.
    pub(crate) fn at_most(&self) -> u64 {
        self.main.count() + 1
    }

    /// The tree of the first `layers` layers.
    pub(crate) fn entries(&self, layers: usize) -> Result<Entries> {
        let horizon = self.layers.get(layers).map_or(Moment(u64::MAX), |layer| layer.start);
        let changes = self.changes_of_groups(horizon)?;
        Ok(Entries {
            visible: self.visible(horizon)?.peekable(),
            excluded: Exclusion::new(&self.options.exclude),
            rules: self.options.rules.clone(),
            latest: self.options.latest,
            implicit_time: implicit_time(&self.options),
            changes: match changes {
                Some(sorted) => Some(sorted.records()?.peekable()),
                None => None,
            },
            begun: false,
            failed: false,
        })
    }

    /// The name of the source that has what is at a path. It takes a scan, so it is for errors.
    pub(crate) fn source_of(&self, path: &TreePath) -> Option<&str> {
        let found = self.visible(Moment(u64::MAX)).ok()?.find_map(|found| {
            let (at, found) = found.ok()?;
            (at == *path).then_some(found)
        })?;
        Some(speaker(&self.layers, found.at))
    }

    fn visible(&self, horizon: Moment) -> Result<Visible> {
        Ok(Visible {
            records: with_answers(&self.main, self.answers.as_ref())?,
            scan: Scan::new(&self.layers, horizon, true, &self.options),
            ended: false,
        })
    }

    /// For each name of an inode that has several and is changed: the changes, by path.
    fn changes_of_groups(&self, horizon: Moment) -> Result<Option<Sorted>> {
        let changing = self.facts.patches || !self.options.rules.is_empty();
        if !self.facts.links || !changing {
            return Ok(None);
        }
        let sorter = || Sorter::new(self.options.memory / 8, &self.options.temporary);
        let mut groups = sorter();
        for found in self.visible(horizon)? {
            let (path, found) = found?;
            if let Some(group) = found.node.links {
                self.note(&mut groups, group, &path, &found)?;
            }
        }
        let mut by_path = sorter();
        let mut of_group: (Vec<u8>, Vec<Change>) = Default::default();
        for record in groups.finish()?.records()? {
            let (key, value) = record?;
            let (group, rest) = key.split_at(8);
            if of_group.0 != group {
                of_group = (group.to_vec(), Vec::new());
            }
            match rest.split_first() {
                Some((0, _)) => of_group.1.extend(read_changes(&value)),
                _ if of_group.1.is_empty() => {}
                _ => by_path.push(&value, &write_changes(&of_group.1))?,
            }
        }
        Ok(Some(by_path.finish()?))
    }

    /// Notes a name of a group, and by moment what is changed through it. Changes sort before
    /// names.
    fn note(
        &self,
        groups: &mut Sorter,
        LinkGroup(group): LinkGroup,
        path: &TreePath,
        found: &Found,
    ) -> Result<()> {
        let mut push = |tail: &[&[u8]], value: &[u8]| {
            groups.push(&[&group.to_be_bytes()[..], &tail.concat()].concat(), value)
        };
        for (at, change) in &found.patches {
            let change = write_changes(std::slice::from_ref(change));
            push(&[&[0], &at.0.to_be_bytes()], &change)?;
        }
        for (number, rule) in self.options.rules.iter().enumerate() {
            if rule.applies(path, &found.node.kind) {
                let order = (number as u64).to_be_bytes();
                push(&[&[0], &[0xff; 8], &order], &write_changes(&rule.changes))?;
            }
        }
        let path = entry_key(path);
        push(&[&[1], &path], &path)?;
        Ok(())
    }
}

/// What the scan leaves at each path.
struct Visible {
    records: Merged2,
    scan: Scan,
    ended: bool,
}

impl Iterator for Visible {
    type Item = Result<(TreePath, Found)>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let left = match self.records.next() {
                None => {
                    self.ended = true;
                    self.scan.leave()
                }
                Some(Err(e)) => {
                    self.ended = true;
                    return Some(Err(e.into()));
                }
                Some(Ok(((key, value), _))) => {
                    let (path, at, rank) = parts(&key);
                    let left = self.scan.enter(path);
                    if let Err(e) = self.scan.step(at, Record::read(rank, &value)) {
                        self.ended = true;
                        return Some(Err(e));
                    }
                    left
                }
            };
            if let Some((path, found)) = left {
                return Some(Ok((path_of(&path), found)));
            }
        }
        None
    }
}

/// Entries in the order of their paths, the root first. After an error it ends.
pub struct Entries {
    visible: Peekable<Visible>,
    excluded: Exclusion,
    rules: Vec<Rule>,
    latest: Option<Time>,
    implicit_time: Time,
    /// Changes of inodes that have several names, by the key of a name.
    changes: Option<Peekable<spill::Records>>,
    begun: bool,
    failed: bool,
}

impl std::fmt::Debug for Entries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entries").finish_non_exhaustive()
    }
}

impl Iterator for Entries {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let entry = self.step().transpose();
        self.failed = matches!(entry, Some(Err(_)));
        entry
    }
}

impl Entries {
    fn step(&mut self) -> Result<Option<Entry>> {
        if !self.begun {
            self.begun = true;
            if !matches!(self.visible.peek(), Some(Ok((path, _))) if path.is_root()) {
                let node = Node::implicit_directory(self.implicit_time);
                let found = Found { node, at: Moment(0), patches: Vec::new(), by_link: false };
                return self.entry(TreePath::root(), found).map(Some);
            }
        }
        while let Some(found) = self.visible.next() {
            let (path, found) = found?;
            if !self.excluded.leaves_out(&path, &found.node.kind) {
                return self.entry(path, found).map(Some);
            }
        }
        Ok(None)
    }

    fn entry(&mut self, path: TreePath, found: Found) -> Result<Entry> {
        let changes = match (&mut self.changes, found.node.links) {
            (Some(changes), Some(_)) => changes_at(changes, &path)?,
            _ => {
                let rules = self.rules.iter().filter(|r| r.applies(&path, &found.node.kind));
                let patches = found.patches.iter().map(|(_, change)| change.clone());
                patches.chain(rules.flat_map(|rule| rule.changes.clone())).collect()
            }
        };
        let Node { mut attributes, kind, links } = found.node;
        for change in changes {
            change.apply(&mut attributes, &kind);
        }
        if let Some(latest) = self.latest {
            let times =
                [&mut attributes.accessed, &mut attributes.changed, &mut attributes.created];
            times.into_iter().flatten().for_each(|time| *time = latest.min(*time));
            attributes.modified = latest.min(attributes.modified);
        }
        Ok(Entry { path, attributes, kind, links })
    }
}

/// The changes of the inode that is at a path.
fn changes_at(changes: &mut Peekable<spill::Records>, path: &TreePath) -> Result<Vec<Change>> {
    let key = entry_key(path);
    while let Some(record) = changes.next_if(|r| r.as_ref().map_or(true, |(k, _)| *k <= key)) {
        let (of, value) = record?;
        if of == key {
            return Ok(read_changes(&value));
        }
    }
    Ok(Vec::new())
}
