//! Uses of extents, against the references that the extent tree records.
//!
//! A walk over all trees gives *uses*: a pointer to a node, a file extent item. The extent tree
//! gives *claims*: each reference that it records. Both sides must be the same multiset. They are
//! compared through a [`Ledger`], grouped by address; only for addresses whose sums disagree a
//! second pass collects [`Record`]s, and [`explain`] says what is wrong with each. A use counts
//! with the length (or, for a node, the height) that the user believes the extent to have.

use crate::finding::{Finding, Findings, Kind};
use crate::lost::Lost;
use crate::sets::{Hashing, Ledger, Uneven};
use larder_format::items::ExtentRef;
use larder_format::{Generation, Key, Logical, TreeId};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// What an extent is, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Size {
    /// Data of so many bytes on the devices.
    Data(u64),
    /// A node of this level, written in this transaction.
    Node(u8, Generation),
}

/// A fact about an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The extent tree has an item for it.
    Item(Size),
    /// The extent tree records this reference, so many times.
    Claim(ExtentRef, u64),
    /// It is used.
    Use(Size, ExtentRef, TreeId, Option<Key>),
}

/// Records of the second pass.
#[derive(Debug)]
pub(crate) struct Collected {
    records: Mutex<Vec<(Logical, Record)>>,
    limit: usize,
}

impl Collected {
    pub(crate) fn new(limit: usize) -> Self {
        Self { records: Mutex::default(), limit }
    }
    fn push(&self, at: Logical, record: Record) {
        let mut records = self.records.lock();
        // One more than the limit tells that there were too many.
        if records.len() <= self.limit {
            records.push((at, record));
        }
    }
}

/// Where facts go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sink<'a> {
    /// Nowhere: this pass is about something else.
    None,
    /// Into sums.
    Sums(&'a Ledger),
    /// As they are, for addresses in question.
    Records(&'a Uneven, &'a Collected),
}

/// The two sides' way to report facts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refs<'a> {
    pub(crate) hashing: &'a Hashing,
    pub(crate) sink: Sink<'a>,
}

impl Refs<'_> {
    /// The extent at `at` is used.
    pub(crate) fn used(
        &self,
        at: Logical,
        size: Size,
        by: ExtentRef,
        tree: TreeId,
        key: Option<Key>,
    ) {
        match self.sink {
            Sink::None => {}
            Sink::Sums(ledger) => {
                ledger.add(at, self.hashing.of(&by).wrapping_mul(self.hashing.factor(&size)));
            }
            Sink::Records(uneven, collected) => {
                if uneven.contains(at) {
                    collected.push(at, Record::Use(size, by, tree, key));
                }
            }
        }
    }
    /// The extent tree records a reference; what it adds to the extent's sum.
    pub(crate) fn claim(&self, at: Logical, by: ExtentRef, count: u64) -> u64 {
        match self.sink {
            Sink::None => 0,
            Sink::Sums(_) => self.hashing.of(&by).wrapping_mul(count),
            Sink::Records(uneven, collected) => {
                if uneven.contains(at) {
                    collected.push(at, Record::Claim(by, count));
                }
                0
            }
        }
    }
    /// The extent tree has an item for it, with references of this sum.
    pub(crate) fn claimed(&self, at: Logical, size: Size, sum: u64) {
        match self.sink {
            Sink::None => {}
            Sink::Sums(ledger) => ledger.subtract(at, sum.wrapping_mul(self.hashing.factor(&size))),
            Sink::Records(uneven, collected) => {
                if uneven.contains(at) {
                    collected.push(at, Record::Item(size));
                }
            }
        }
    }
}

#[derive(Default)]
struct Extent {
    item: Option<Size>,
    claims: BTreeMap<ExtentRef, i64>,
    uses: BTreeMap<ExtentRef, (i64, TreeId, Option<Key>)>,
    sizes: BTreeMap<Size, (TreeId, Option<Key>)>,
}

/// Turns the records of addresses that do not add up into findings.
pub(crate) fn explain(collected: Collected, lost: &Lost, findings: &Findings) {
    let mut records = collected.records.into_inner();
    let too_many = records.len() > collected.limit;
    records.sort_by_key(|(at, _)| *at);
    if too_many {
        // Which records are missing is chance: nothing can be said of any one address.
        let what = format!(
            "uses of extents and their recorded references disagree; over {} facts are in question",
            collected.limit
        );
        findings.add(Finding::new(Kind::ExtentRefMissing, what).follow_up_if(lost.anything()));
        return;
    }
    let mut rest = &records[..];
    while let Some((at, _)) = rest.first() {
        let n = rest.partition_point(|(other, _)| other <= at);
        let mut extent = Extent::default();
        for (_, record) in &rest[..n] {
            match *record {
                Record::Item(size) => extent.item = Some(size),
                Record::Claim(by, count) => {
                    *extent.claims.entry(by).or_default() +=
                        i64::try_from(count).unwrap_or(i64::MAX / 4);
                }
                Record::Use(size, by, tree, key) => {
                    extent.uses.entry(by).or_insert((0, tree, key)).0 += 1;
                    extent.sizes.entry(size).or_insert((tree, key));
                }
            }
        }
        explain_one(*at, &extent, lost, findings);
        rest = &rest[n..];
    }
}

fn explain_one(at: Logical, extent: &Extent, lost: &Lost, findings: &Findings) {
    let unrecorded = lost.extents_at(at);
    let unused = lost.uses();
    let some_use = extent.uses.iter().next();
    let place = |kind, what: String, tree: Option<TreeId>, key: Option<Key>| {
        let mut finding = Finding::new(kind, what).address(at);
        (finding.tree, finding.key) = (tree, key);
        finding
    };
    let Some(item) = extent.item else {
        if let Some((by, (_, tree, key))) = some_use {
            let what = format!(
                "{} at {at} is used by {}, but has no extent item",
                sort(extent),
                describe(by)
            );
            let finding = place(Kind::ExtentItemMissing, what, Some(*tree), *key);
            findings.add(finding.follow_up_if(unrecorded));
        }
        return;
    };
    if extent.uses.is_empty() {
        let by = extent.claims.keys().next();
        let by =
            by.map_or_else(String::new, |by| format!(" (it should be used by {})", describe(by)));
        let what = format!("{} at {at} is allocated, and nothing uses it{by}", size_text(item));
        findings.add(place(Kind::ExtentUnused, what, None, None).follow_up_if(unused));
        return;
    }
    for (size, (tree, key)) in extent.sizes.iter().filter(|(size, _)| **size != item) {
        let kind = match (size, item) {
            (Size::Data(_), Size::Data(_)) => Kind::ExtentLength,
            (Size::Node(level, _), Size::Node(recorded, _)) if *level == recorded => {
                Kind::ExtentGeneration
            }
            (Size::Node(..), Size::Node(..)) => Kind::ExtentLevel,
            _ => Kind::ExtentType,
        };
        let what = format!("{} at {at} is recorded as {}", size_text(*size), size_text(item));
        findings.add(place(kind, what, Some(*tree), *key));
    }
    for (by, (uses, tree, key)) in &extent.uses {
        let claims = extent.claims.get(by).copied().unwrap_or(0);
        if *uses > claims {
            let what = format!("{} uses {at} {uses} times, {claims} are recorded", describe(by));
            let finding = place(Kind::ExtentRefMissing, what, Some(*tree), *key);
            findings.add(finding.follow_up_if(unrecorded));
        } else if claims > *uses {
            let what = format!("{} uses {at} {uses} times, {claims} are recorded", describe(by));
            findings
                .add(place(Kind::ExtentRefUnused, what, Some(*tree), *key).follow_up_if(unused));
        }
    }
    for (by, claims) in extent.claims.iter().filter(|(by, _)| !extent.uses.contains_key(by)) {
        let what = format!("{} should use {at} {claims} times, and does not", describe(by));
        findings.add(place(Kind::ExtentRefUnused, what, None, None).follow_up_if(unused));
    }
}

fn sort(extent: &Extent) -> String {
    extent.sizes.keys().next().map_or_else(|| "an extent".into(), |s| size_text(*s))
}

fn size_text(size: Size) -> String {
    match size {
        Size::Data(len) => format!("a data extent of {len} bytes"),
        Size::Node(level, generation) => {
            format!("a node of level {level} and generation {generation}")
        }
    }
}

fn describe(by: &ExtentRef) -> String {
    match by {
        ExtentRef::TreeBlock { root } => format!("tree {root}"),
        ExtentRef::SharedBlock { parent } => format!("node {parent}"),
        ExtentRef::Data { root, objectid, offset } => {
            format!("tree {root} inode {objectid} at offset {}", offset.0.cast_signed())
        }
        ExtentRef::SharedData { parent } => format!("leaf {parent}"),
        ExtentRef::Owner { root } => format!("owner {root}"),
    }
}
