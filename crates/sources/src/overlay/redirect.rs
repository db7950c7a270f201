//! Paths that lead through symbolic links.
//!
//! A source may name `bin/tool` where an earlier one has `bin` as a link to `usr/bin`, and no
//! directory. What is meant is `usr/bin/tool`: unpacking follows the link, within the tree, and so
//! do the tools that unpack container layers. If the later source has `bin` as a directory, that
//! one takes the link's place.
//!
//! A scan finds each link that something passes through, and from when to when. Then all records
//! below it of that time move to where it leads. They may meet another link there, so both steps
//! are repeated until nothing moves. An absolute target begins at the root of the tree. A link that
//! climbs above that root is refused. So is a path that replaces a link that it leads through: what
//! a later path through that link means would depend on what has not moved yet.

use super::collector::{Layers, bare_key, is_below, speaker};
use super::record::{Ask, Moment, Record, parts, path_of};
use super::scan::{Scan, State};
use crate::spill::{Sorted, Sorter};
use crate::{Error, Kind, Options, Result, TreePath};
use std::collections::BTreeMap;
use std::ops::Range;

/// Links on the way of one path; the same number as in Linux.
const MOST_LINKS: usize = 40;
/// Links that lead somewhere. They are in memory.
const MOST_REDIRECTS: usize = 1 << 16;

/// A link that something passes through.
#[derive(Clone, Debug)]
struct Redirect {
    /// What is said below it in this time moves.
    when: Range<Moment>,
    to: TreePath,
}

/// By the link's path, as a key without its end.
type Redirects = BTreeMap<Vec<u8>, Vec<Redirect>>;

/// Moves records of paths and of questions to where their paths lead.
pub(crate) fn follow(
    mut main: Sorted,
    mut asks: Sorted,
    layers: &Layers,
    options: &Options,
) -> Result<(Sorted, Sorted)> {
    let mut all = Redirects::new();
    for _ in 0..MOST_LINKS {
        let redirects = find(&main, layers, options)?;
        if redirects.is_empty() {
            return Ok((main, asks));
        }
        for (link, found) in &redirects {
            all.entry(link.clone()).or_default().extend(found.iter().cloned());
        }
        main = Moving { redirects: &redirects, all: &all, layers }.records(&main, options)?;
        asks = move_asks(&asks, &redirects, options)?;
    }
    let redirects = find(&main, layers, options)?;
    match redirects.first_key_value() {
        None => Ok((main, asks)),
        Some((path, redirects)) => {
            let what = format!("a path leads through more than {MOST_LINKS} symbolic links");
            let path = path_of(path);
            Err(Error::refused(speaker(layers, redirects[0].when.start), path.as_bytes(), what))
        }
    }
}

/// A link that is passed through, until something else happens at its path.
struct Open {
    path: Vec<u8>,
    since: Moment,
    target: Vec<u8>,
}

fn find(main: &Sorted, layers: &Layers, options: &Options) -> Result<Redirects> {
    let mut redirects = Redirects::new();
    let mut count = 0;
    let mut open: Option<Open> = None;
    let mut scan = Scan::new(layers, Moment(u64::MAX), false, options);
    for record in main.records()? {
        let (key, value) = record?;
        let (path, at, rank) = parts(&key);
        let record = Record::read(rank, &value);
        let passes = matches!(record, Record::Through | Record::Parent);
        if let Some(link) = &open {
            // Its end is looked for while the scan is still there.
            let until = if link.path == path { at } else { Moment(u64::MAX) };
            let cleared = scan.cleared_between(link.since, until);
            if link.path != path || !passes || cleared.is_some() {
                let end = cleared.unwrap_or(until);
                let link = open.take().expect("it is open");
                note(&mut redirects, link, end, layers)?;
                count += 1;
                if count > MOST_REDIRECTS {
                    let what = "too many paths lead through symbolic links";
                    return Err(Error::damaged(speaker(layers, at), what));
                }
            }
        }
        scan.enter(path);
        if passes
            && open.is_none()
            && let State::Found(found) = scan.state_at(at)
            && !found.by_link
            && let Kind::Symlink(target) = &found.node.kind
        {
            open = Some(Open { path: path.to_vec(), since: at, target: target.clone() });
        }
        scan.step(at, record)?;
    }
    if let Some(link) = open {
        let end = scan.cleared_between(link.since, Moment(u64::MAX)).unwrap_or(Moment(u64::MAX));
        note(&mut redirects, link, end, layers)?;
    }
    Ok(redirects)
}

fn note(redirects: &mut Redirects, link: Open, end: Moment, layers: &Layers) -> Result<()> {
    let place = path_of(&link.path);
    let Some(to) = destination(&place, &link.target) else {
        let target = crate::error::shown(&link.target);
        let what = format!("a path leads through this link to {target}, out of the tree");
        return Err(Error::refused(speaker(layers, link.since), place.as_bytes(), what));
    };
    redirects.entry(link.path).or_default().push(Redirect { when: link.since..end, to });
    Ok(())
}

/// Where a link leads. `None`: above the root.
fn destination(link: &TreePath, target: &[u8]) -> Option<TreePath> {
    let (parent, _) = link.split()?;
    let mut to = if target.starts_with(b"/") { TreePath::root() } else { parent };
    for name in target.split(|&b| b == b'/') {
        match name {
            b"" | b"." => {}
            b".." => to = to.split()?.0,
            _ => to.push(name),
        }
    }
    Some(to)
}

/// Where what was said about a path at a moment belongs.
fn moved(path: &[u8], at: Moment, redirects: &Redirects) -> Option<TreePath> {
    let ends = path.iter().enumerate().filter(|&(_, &b)| b == 0).map(|(end, _)| end);
    for end in ends {
        let link = &path[..end];
        debug_assert!(is_below(path, link));
        if let Some(redirect) = redirect_at(link, at, redirects) {
            let mut to = redirect.to.clone();
            path_of(&path[end + 1..]).components().for_each(|name| to.push(name));
            return Some(to);
        }
    }
    None
}

fn redirect_at<'a>(link: &[u8], at: Moment, redirects: &'a Redirects) -> Option<&'a Redirect> {
    redirects.get(link)?.iter().find(|redirect| redirect.when.contains(&at))
}

/// Moves the records of one round.
struct Moving<'a> {
    redirects: &'a Redirects,
    /// Those of all rounds up to this one.
    all: &'a Redirects,
    layers: &'a Layers,
}

impl Moving<'_> {
    fn records(&self, main: &Sorted, options: &Options) -> Result<Sorted> {
        let mut sorter = Sorter::new(options.memory / 2, &options.temporary);
        for record in main.records()? {
            let (key, value) = record?;
            let (path, at, rank) = parts(&key);
            let record = Record::read(rank, &value);
            let passes = matches!(record, Record::Through | Record::Parent);
            if let Some(to) = moved(path, at, self.redirects) {
                self.check(&record, path, &to, at)?;
                sorter.push(&record.key(&to, at), &value)?;
            } else if passes && let Some(redirect) = redirect_at(path, at, self.redirects) {
                // The way leads through the directories of the other end instead.
                let mut way = TreePath::root();
                for name in redirect.to.components() {
                    way.push(name);
                    sorter.push(&record.key(&way, at), &value)?;
                }
            } else {
                sorter.push(&key, &value)?;
            }
        }
        Ok(sorter.finish()?)
    }

    /// Refuses what would replace a link while something leads through it.
    fn check(&self, record: &Record, path: &[u8], to: &TreePath, at: Moment) -> Result<()> {
        let to = bare_key(to);
        let itself = redirect_at(&to, at, self.all).is_some();
        let below = || {
            let mut first = to.clone();
            first.push(0);
            let links = self.all.range(first..).take_while(|(link, _)| is_below(link, &to));
            links.flat_map(|(_, redirects)| redirects).any(|r| r.when.contains(&at))
        };
        let replaces = match record {
            Record::Put(node) if node.is_directory() => itself,
            Record::Put(_) | Record::Link(_) | Record::Whiteout => itself || below(),
            Record::Opaque => below(),
            _ => false,
        };
        if !replaces {
            return Ok(());
        }
        let what = "the path replaces a symbolic link that it leads through";
        Err(Error::refused(speaker(self.layers, at), path_of(path).as_bytes(), what))
    }
}

fn move_asks(asks: &Sorted, redirects: &Redirects, options: &Options) -> Result<Sorted> {
    let mut sorter = Sorter::new(options.memory / 8, &options.temporary);
    for ask in asks.records()? {
        let (key, value) = ask?;
        let (path, at, _) = parts(&key);
        let Ask { link, at: link_at } = Ask::read(&value);
        let target = moved(path, at, redirects).unwrap_or_else(|| path_of(path));
        let link = moved(&bare_key(&link), link_at, redirects).unwrap_or(link);
        sorter.push(&Ask::key(&target, link_at), &Ask { link, at: link_at }.value())?;
    }
    Ok(sorter.finish()?)
}
