//! Writing a transaction's nodes.
//!
//! Nodes are found by walking the frozen roots through the children that hang in memory: these are
//! exactly the nodes that this transaction has made. They are checked once more before they are
//! written. If an item is so bad that Linux would refuse it, it is better refused here, while the
//! last superblock still points to good ones.

use crate::error::{Error, Place, Result};
use crate::transaction::Ground;
use crate::tree::{Node, Root};
use larder_format::check::{Expect, check_unsealed};
use larder_format::node::{FLAG_WRITTEN, NodeView};
use larder_format::{Generation, Logical, TreeId};
use larder_volume::VolumeResult;
use rayon::prelude::*;
use std::io::IoSlice;
use std::sync::Arc;

/// Most bytes of one write.
const RUN: usize = 1 << 20;
/// Bytes of nodes that are written at the same time.
const BATCH: usize = 4 << 20;

/// A node to write, and its place in its tree.
struct Outgoing {
    node: Arc<Node>,
    tree: TreeId,
    is_root: bool,
}

fn collect(
    node: &Arc<Node>,
    tree: TreeId,
    is_root: bool,
    generation: Generation,
    out: &mut Vec<Outgoing>,
) {
    if node.generation() != generation {
        return;
    }
    out.push(Outgoing { node: node.clone(), tree, is_root });
    for child in node.children().iter().flatten() {
        collect(child, tree, false, generation, out);
    }
}

/// Writes all nodes of `generation` under `roots` and puts them into the cache. Returns how many.
pub(crate) fn write_nodes(
    ground: &Ground,
    generation: Generation,
    roots: &[(TreeId, Root)],
) -> Result<usize> {
    let mut nodes = Vec::new();
    for (tree, root) in roots {
        if let Some(node) = &root.node {
            collect(node, *tree, true, generation, &mut nodes);
        }
    }
    nodes.sort_by_key(|n| n.node.address());
    // A node that a snapshot of this transaction shares with its source is reached twice.
    nodes.dedup_by(|b, a| {
        let same = a.node.address() == b.node.address();
        assert!(!same || Arc::ptr_eq(&a.node, &b.node), "two images of block {}", a.node.address());
        same
    });
    for some in batches(ground, &nodes, |n| n.node.address()) {
        let images: Vec<Image> = some
            .par_iter()
            .map(|n| Ok(Image { at: n.node.address(), bytes: finished(ground, generation, n)? }))
            .collect::<Result<_>>()?;
        let written = write_images(ground, &images);
        if !fault!(ground.options.tuning, IgnoreWriteErrors) {
            written?;
        }
    }
    for node in &nodes {
        ground.store.put(node.node.clone());
    }
    Ok(nodes.len())
}

/// The bytes of a node for the device: flagged as written, checked, with checksum.
fn finished(ground: &Ground, generation: Generation, out: &Outgoing) -> Result<Vec<u8>> {
    finish(ground, generation, out.node.bytes().to_vec(), out.tree, out.is_root)
}

fn finish(
    ground: &Ground,
    generation: Generation,
    mut bytes: Vec<u8>,
    tree: TreeId,
    is_root: bool,
) -> Result<Vec<u8>> {
    let view = NodeView(&bytes);
    let (at, level, flags) = (view.bytenr(), view.level(), view.flags() | FLAG_WRITTEN);
    crate::tree::header_mut(&mut bytes).set_flags(flags);
    let format = ground.store.format();
    let expect = Expect {
        nodesize: format.nodesize,
        fsid: format.fsid,
        bytenr: at,
        level: Some(level),
        generation: Some(generation),
        owner: Some(tree),
        is_root,
        first_key: None,
        csum: None,
        super_generation: generation,
        names_hidden: false,
    };
    check_unsealed(&bytes, &expect, ground.csum).map_err(|e| {
        let place = Place { tree: Some(tree), address: Some(at), ..Place::default() };
        Error::corrupt(
            place,
            format!("refusing to write a block that Linux would refuse to read: {e}"),
        )
    })?;
    let sum = ground.csum.compute(&bytes[32..]);
    bytes[..32].copy_from_slice(&sum);
    Ok(bytes)
}

/// A node that is in no tree of the engine, but in one of a log.
#[derive(Debug)]
pub(crate) struct LooseNode {
    pub(crate) at: Logical,
    pub(crate) bytes: Vec<u8>,
    pub(crate) tree: TreeId,
    pub(crate) is_root: bool,
}

/// Writes nodes, which are given in the order of addresses, neighbours together.
///
/// # Errors
/// A node that no reader would accept; the device.
pub(crate) fn write_loose(
    ground: &Ground,
    generation: Generation,
    nodes: Vec<LooseNode>,
) -> Result<()> {
    let images: Vec<Image> = nodes
        .into_iter()
        .map(|n| {
            Ok(Image { at: n.at, bytes: finish(ground, generation, n.bytes, n.tree, n.is_root)? })
        })
        .collect::<Result<_>>()?;
    batches(ground, &images, |image| image.at)
        .into_iter()
        .try_for_each(|some| write_images(ground, some))
}

/// Cuts what is in the order of addresses into batches. What lies in one full stripe is in one
/// batch: its rows have their parity from all that is written of them.
fn batches<'a, T>(ground: &Ground, all: &'a [T], at: impl Fn(&T) -> Logical) -> Vec<&'a [T]> {
    let most = BATCH / ground.nodesize() as usize;
    let (mut rest, mut out) = (all, Vec::new());
    while !rest.is_empty() {
        let mut count = rest.len().min(most);
        if let Some(stripe) = ground.volume.map().full_stripe(at(&rest[count - 1])) {
            count += rest[count..].iter().take_while(|next| at(next) < stripe.end()).count();
        }
        let (batch, behind) = rest.split_at(count);
        out.push(batch);
        rest = behind;
    }
    out
}

/// A node as it goes to the device.
struct Image {
    at: Logical,
    bytes: Vec<u8>,
}

/// Writes nodes, which are given in the order of addresses: neighbours as one write, all writes at
/// the same time.
fn write_images(ground: &Ground, images: &[Image]) -> Result<()> {
    let slices: Vec<IoSlice<'_>> = images.iter().map(|image| IoSlice::new(&image.bytes)).collect();
    let nodesize = ground.nodesize() as usize;
    let mut writes = Vec::new();
    let mut begin = 0;
    for end in 1..=images.len() {
        let goes_on = images.get(end).is_some_and(|next| {
            let first = images[begin].at;
            next.at == images[end - 1].at.plus(nodesize as u64)
                && (end - begin) * nodesize < RUN
                && ground.space.same_group(first, next.at)
        });
        if !goes_on {
            writes.push((images[begin].at, &slices[begin..end]));
            begin = end;
        }
    }
    // All writes have ended. The first error is as good as any.
    ground.write_fresh(&writes).into_iter().collect::<VolumeResult<()>>()?;
    Ok(())
}
