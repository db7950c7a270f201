//! What hard links lead to.
//!
//! A link names another path, and means what is there at the link's moment. That is known only
//! where the scan passes the other path. So each link asks there, and its answer is brought to the
//! link's own place by one more sort. An answer has the whole inode and the group of its names, so
//! a link stays a file of its own when the other name is replaced later.
//!
//! If there is a link at the other path, too, the question goes on to what that one names. Each
//! such step is one more scan, and an archive that needs too many of them is refused.

use super::collector::{Layers, bare_key, speaker};
use super::record::{Ask, Moment, Node, Record, parts, path_of};
use super::scan::{Scan, State};
use crate::spill::{self, Sorted, Sorter};
use crate::{Error, Options, Result};
use std::io;
use std::iter::Peekable;

/// Links to links to links are followed so many times.
const MOST_STEPS: usize = 64;

/// The answers: records [`Record::Resolved`] for links, and [`Record::Linked`] for what they lead
/// to. `None`: there are no links.
pub(crate) fn resolve(
    main: &Sorted,
    asks: Sorted,
    layers: &Layers,
    options: &Options,
) -> Result<Option<Sorted>> {
    if asks.count() == 0 {
        return Ok(None);
    }
    let mut answers = Sorter::new(options.memory / 4, &options.temporary);
    let mut open = asks;
    for _ in 0..MOST_STEPS {
        open = answer(main, &open, &mut answers, layers, options)?;
        if open.count() == 0 {
            return Ok(Some(answers.finish()?));
        }
    }
    let (_, value) = open.records()?.next().expect("a question is open")?;
    let Ask { link, at } = Ask::read(&value);
    let what = format!("a hard link to a hard link, more than {MOST_STEPS} times");
    Err(Error::refused(speaker(layers, at), link.as_bytes(), what))
}

/// Answers what can be answered in one scan. Gives back the questions that go on.
fn answer(
    main: &Sorted,
    open: &Sorted,
    answers: &mut Sorter,
    layers: &Layers,
    options: &Options,
) -> Result<Sorted> {
    let mut further = Sorter::new(options.memory / 8, &options.temporary);
    let mut scan = Scan::new(layers, Moment(u64::MAX), false, options);
    let records = Merged2::new(main.records()?, Some(open.records()?));
    for record in records {
        let ((key, value), is_ask) = record?;
        let (path, at, rank) = parts(&key);
        scan.enter(path);
        if !is_ask {
            scan.step(at, Record::read(rank, &value))?;
            continue;
        }
        let ask = Ask::read(&value);
        match scan.state_at(at) {
            State::Found(found) if !found.node.is_directory() => {
                let group = Some(found.group());
                let node = Node { links: group, ..found.patched() };
                let resolved = Record::Resolved(Box::new(node));
                answers.push(&resolved.key(&ask.link, ask.at), &resolved.value())?;
                let linked = Record::Linked;
                answers.push(&linked.key(&path_of(path), found.at), &linked.value())?;
            }
            State::Link { target, at } => further.push(&Ask::key(target, *at), &value)?,
            State::Found(_) => return Err(wrong(&ask, path, layers, "which is a directory")),
            State::Nothing => return Err(wrong(&ask, path, layers, "which is not there")),
        }
    }
    Ok(further.finish()?)
}

fn wrong(ask: &Ask, target: &[u8], layers: &Layers, what: &str) -> Error {
    let target = crate::error::shown(path_of(target).as_bytes());
    let what = format!("a hard link to {target}, {what}");
    Error::refused(speaker(layers, ask.at), ask.link.as_bytes(), what)
}

/// Two sorted streams as one. It also tells whether a record is from the second. Of equal keys,
/// that of the second comes first.
#[derive(Debug)]
pub(crate) struct Merged2 {
    first: Peekable<spill::Records>,
    second: Option<Peekable<spill::Records>>,
}

impl Merged2 {
    pub(crate) fn new(first: spill::Records, second: Option<spill::Records>) -> Self {
        Self { first: first.peekable(), second: second.map(Iterator::peekable) }
    }
}

impl Iterator for Merged2 {
    type Item = io::Result<(spill::Record, bool)>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut is_second = false;
        if let Some(second) = &mut self.second {
            is_second = match (self.first.peek(), second.peek()) {
                (_, None) => false,
                (None, Some(_)) => true,
                (Some(Ok((a, _))), Some(Ok((b, _)))) => b <= a,
                (Some(first), Some(_)) => first.is_ok(),
            };
        }
        let next = match &mut self.second {
            Some(second) if is_second => second.next(),
            _ => self.first.next(),
        };
        next.map(|record| record.map(|record| (record, is_second)))
    }
}

/// The records of sources and the answers to their links, as one stream.
pub(crate) fn with_answers(main: &Sorted, answers: Option<&Sorted>) -> io::Result<Merged2> {
    let answers = answers.map(Sorted::records).transpose()?;
    Ok(Merged2::new(main.records()?, answers))
}

/// The key by which records for an entry are found beside it.
pub(crate) fn entry_key(path: &crate::TreePath) -> Vec<u8> {
    bare_key(path)
}
