//! What a run has to do, from the snapshots that there are on both sides.
//!
//! A snapshot is sent if the policy keeps it and the target has not got it, the oldest first. Its
//! parent is the one before it in time that both sides have, or will have by then. The newest one
//! that both have stays on both sides, whatever the policy says: without it, the next run would
//! have to send everything.

use crate::Keep;
use crate::keep::Reasons;
use std::collections::BTreeMap;

/// A snapshot on one side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// When the source was as the snapshot is, in seconds since 1970.
    pub time: i64,
    /// What it is known by on both sides: the uuid at the source, the received uuid at the target.
    pub id: [u8; 16],
}

/// A snapshot to send, and what it is a change of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    /// Which one.
    pub id: [u8; 16],
    /// One that the target has by then; `None` sends everything.
    pub parent: Option<[u8; 16]>,
}

/// A line of the table of what there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// When it was made.
    pub time: i64,
    /// Which one.
    pub id: [u8; 16],
    /// Is it at the source, and at the target?
    pub at_source: bool,
    /// See `at_source`.
    pub at_target: bool,
    /// Why it stays; if not at all, it is pruned.
    pub why: Reasons,
    /// The next increment begins with it, so it stays anyway.
    pub is_parent: bool,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// All snapshots of both sides, the oldest first.
    pub rows: Vec<Row>,
    /// What is sent.
    pub send: Vec<Send>,
    /// What is deleted when all is sent.
    pub prune_source: Vec<[u8; 16]>,
    /// See `prune_source`.
    pub prune_target: Vec<[u8; 16]>,
}

/// Works out what is to be done.
#[must_use]
pub fn plan(source: &[Snapshot], target: &[Snapshot], keep: &Keep) -> Plan {
    let mut plan = Plan { rows: rows(source, target, keep), ..Plan::default() };
    let mut parent = None;
    for row in &plan.rows {
        if row.at_source && !row.at_target && row.why.stays() {
            plan.send.push(Send { id: row.id, parent });
            parent = Some(row.id);
        } else if row.at_source && row.at_target {
            parent = Some(row.id);
        }
    }
    // What both sides have in the end, the newest: here the next run begins.
    if let Some(row) = plan.rows.iter_mut().find(|row| Some(row.id) == parent) {
        row.is_parent = true;
    }
    for row in plan.rows.iter().filter(|row| !row.why.stays() && !row.is_parent) {
        if row.at_source {
            plan.prune_source.push(row.id);
        }
        if row.at_target {
            plan.prune_target.push(row.id);
        }
    }
    plan
}

fn rows(source: &[Snapshot], target: &[Snapshot], keep: &Keep) -> Vec<Row> {
    let mut all: BTreeMap<(i64, [u8; 16]), (bool, bool)> = BTreeMap::new();
    // The target may have another time for the same snapshot: that of the source is right.
    let times: BTreeMap<[u8; 16], i64> = source.iter().map(|s| (s.id, s.time)).collect();
    for s in source {
        all.entry((s.time, s.id)).or_default().0 = true;
    }
    for s in target {
        let time = times.get(&s.id).copied().unwrap_or(s.time);
        all.entry((time, s.id)).or_default().1 = true;
    }
    let list: Vec<i64> = all.keys().map(|(time, _)| *time).collect();
    let why = keep.reasons(&list);
    all.into_iter()
        .zip(why)
        .map(|(((time, id), (at_source, at_target)), why)| Row {
            time,
            id,
            at_source,
            at_target,
            why,
            is_parent: false,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86400;

    fn snapshot(n: u8, time: i64) -> Snapshot {
        Snapshot { time, id: [n; 16] }
    }

    fn keep(text: &str) -> Keep {
        text.parse().unwrap()
    }

    /// Does the first so many steps of a plan.
    fn carry_out(
        plan: &Plan,
        steps: usize,
        source: &mut Vec<Snapshot>,
        target: &mut Vec<Snapshot>,
    ) {
        let mut left = steps;
        let mut step = || {
            let done = left > 0;
            left = left.saturating_sub(1);
            done
        };
        for send in &plan.send {
            if step() {
                let sent = source.iter().find(|s| s.id == send.id).expect("it is at the source");
                let parent = |id| target.iter().any(|s: &Snapshot| s.id == id);
                assert!(send.parent.is_none_or(parent), "the target has the parent");
                target.push(sent.clone());
            }
        }
        for id in &plan.prune_source {
            if step() {
                source.retain(|s| s.id != *id);
            }
        }
        for id in &plan.prune_target {
            if step() {
                target.retain(|s| s.id != *id);
            }
        }
    }

    #[test]
    fn the_first_is_whole_and_the_next_an_increment() {
        let (a, b) = (snapshot(1, 0), snapshot(2, DAY));
        let first = plan(std::slice::from_ref(&a), &[], &keep("daily=7"));
        assert_eq!(first.send, [Send { id: a.id, parent: None }]);
        let second = plan(&[a.clone(), b.clone()], std::slice::from_ref(&a), &keep("daily=7"));
        assert_eq!(second.send, [Send { id: b.id, parent: Some(a.id) }]);
        assert!(second.rows[1].is_parent && second.prune_source.is_empty());
        assert_eq!(plan(&[a.clone(), b.clone()], &[b, a], &keep("daily=7")).send, []);
    }

    #[test]
    fn what_the_next_increment_needs_stays() {
        let all: Vec<Snapshot> = (0..5).map(|n| snapshot(n, i64::from(n) * DAY)).collect();
        // The source has lost its newest ones.
        let plan = plan(&all[..2], &all, &keep("last=1"));
        assert!(plan.rows[1].is_parent && !plan.rows[1].why.stays());
        assert_eq!(plan.prune_source, [[0; 16]]);
        assert_eq!(plan.prune_target, [[0; 16], [2; 16], [3; 16]]);
    }

    /// A run that ends at any point and is started again ends as one that was not disturbed.
    #[test]
    fn it_can_be_started_again_at_any_point() {
        fastrand::seed(1);
        for _ in 0..2000 {
            let policy = keep(["daily=3", "hourly=2,weekly=2", "last=1"][fastrand::usize(0..3)]);
            let mut time = 0;
            let all: Vec<Snapshot> = (0..fastrand::u8(1..30))
                .map(|n| {
                    time += fastrand::i64(1..DAY);
                    snapshot(n, time)
                })
                .collect();
            let some = |share: u8| -> Vec<Snapshot> {
                all.iter().filter(|_| fastrand::u8(0..100) < share).cloned().collect()
            };
            let (mut source, mut target) = (some(80), some(40));
            let (mut whole_source, mut whole_target) = (source.clone(), target.clone());
            let undisturbed = plan(&source, &target, &policy);
            carry_out(&undisturbed, usize::MAX, &mut whole_source, &mut whole_target);
            for _ in 0..3 {
                let part = plan(&source, &target, &policy);
                carry_out(&part, fastrand::usize(0..6), &mut source, &mut target);
            }
            let rest = plan(&source, &target, &policy);
            carry_out(&rest, usize::MAX, &mut source, &mut target);
            let ids = |list: &[Snapshot]| {
                let mut ids: Vec<u8> = list.iter().map(|s| s.id[0]).collect();
                ids.sort_unstable();
                ids
            };
            assert_eq!(ids(&source), ids(&whole_source));
            assert_eq!(ids(&target), ids(&whole_target));
            let again = plan(&source, &target, &policy);
            assert_eq!((again.send.len(), again.prune_source.len()), (0, 0), "nothing is left");
            assert_eq!(again.prune_target, Vec::<[u8; 16]>::new());
        }
    }
}
