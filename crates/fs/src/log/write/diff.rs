//! How two versions of a tree differ within a range of keys.
//!
//! Versions share what did not change between them: a block that both have at one address and with
//! one generation has the same content, and so has everything below it. Only other blocks are
//! examined, so the cost depends on how much has changed.

use crate::error::Result;
use crate::tree::{Node, Version, child_pointer, child_slot};
use larder_format::{Generation, Key, Logical};
use std::collections::HashSet;
use std::sync::Arc;

/// A key with its data in the older and in the newer version.
pub(super) type Change = (Key, Option<Vec<u8>>, Option<Vec<u8>>);

/// Leaves that are compared at most.
const MOST_LEAVES: usize = 2000;

/// The items in `from..=to` that differ between two versions of a tree, in order; `None` if too
/// much has changed for a log.
///
/// # Errors
/// Reading or corruption.
pub(super) fn changed(
    old: &Version,
    new: &Version,
    from: &Key,
    to: &Key,
) -> Result<Option<Vec<Change>>> {
    if same(old, new) {
        return Ok(Some(Vec::new()));
    }
    // Blocks that the newer version refers to but did not make: the older one has them, too.
    let mut kept = HashSet::new();
    let made = new.root.ptr.generation;
    let mut now = Vec::new();
    leaves(
        new,
        from,
        to,
        &mut |at, generation| {
            let is_new = generation == made;
            if !is_new {
                kept.insert((at, generation));
            }
            is_new
        },
        &mut now,
    )?;
    if now.len() > MOST_LEAVES {
        return Ok(None);
    }
    let mut before = Vec::new();
    leaves(old, from, to, &mut |at, generation| !kept.contains(&(at, generation)), &mut before)?;
    if before.len() > MOST_LEAVES {
        return Ok(None);
    }
    Ok(Some(differences(items(&before, from, to), items(&now, from, to))))
}

/// What differs between the sorted items of two versions.
fn differences<'a>(
    old: impl Iterator<Item = (Key, &'a [u8])>,
    new: impl Iterator<Item = (Key, &'a [u8])>,
) -> Vec<Change> {
    let (mut old, mut new) = (old.peekable(), new.peekable());
    let mut out = Vec::new();
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return out,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some((was, _)), Some((is, _))) => was.cmp(is),
        };
        let was = if order.is_le() { old.next() } else { None };
        let is = if order.is_ge() { new.next() } else { None };
        match (was, is) {
            (Some((_, x)), Some((_, y))) if x == y => {}
            (was, is) => {
                let key = was.or(is).map_or(Key::MIN, |(k, _)| k);
                out.push((key, was.map(|(_, d)| d.to_vec()), is.map(|(_, d)| d.to_vec())));
            }
        }
    }
}

/// Have both versions the same root?
pub(super) fn same(old: &Version, new: &Version) -> bool {
    (old.root.ptr.at, old.root.ptr.generation) == (new.root.ptr.at, new.root.ptr.generation)
}

/// The leaves that may hold keys in `from..=to`, without those below blocks that `enter` refuses.
/// Not many more than [`MOST_LEAVES`].
fn leaves(
    version: &Version,
    from: &Key,
    to: &Key,
    enter: &mut dyn FnMut(Logical, Generation) -> bool,
    out: &mut Vec<Arc<Node>>,
) -> Result<()> {
    let root = version.root_node()?;
    if enter(root.address(), root.generation()) {
        below(version, &root, from, to, enter, out)?;
    }
    Ok(())
}

fn below(
    version: &Version,
    node: &Arc<Node>,
    from: &Key,
    to: &Key,
    enter: &mut dyn FnMut(Logical, Generation) -> bool,
    out: &mut Vec<Arc<Node>>,
) -> Result<()> {
    if node.level() == 0 {
        out.push(node.clone());
        return Ok(());
    }
    for slot in child_slot(node, from)..node.view().nritems() {
        let ptr = child_pointer(node, slot);
        if ptr.first_key.is_some_and(|first| first > *to) {
            break;
        }
        if out.len() > MOST_LEAVES {
            break;
        }
        if enter(ptr.at, ptr.generation) {
            let child = version.child(node, slot)?;
            below(version, &child, from, to, enter, out)?;
        }
    }
    Ok(())
}

fn items<'a>(
    leaves: &'a [Arc<Node>],
    from: &'a Key,
    to: &'a Key,
) -> impl Iterator<Item = (Key, &'a [u8])> {
    leaves.iter().flat_map(move |leaf| {
        let view = leaf.view();
        (0..view.nritems()).filter_map(move |slot| {
            let key = view.key(slot)?;
            (*from <= key && key <= *to).then_some((key, view.data(slot)?))
        })
    })
}
