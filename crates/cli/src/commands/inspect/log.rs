//! `larder inspect log`: what was fsynced after the last commit, and waits to be replayed.
//!
//! [`contents`] is the short form: which inodes, by which names, with how much data. `larder rescue
//! zero-log` tells with it what would be lost.

use super::{Common, Problems, device, trees, with_reader};
use crate::print;
use larder_format::items::{ExtRefs, FileExtent, InodeItem, InodeRefs, RootItem};
use larder_format::{Key, KeyType, ObjectId};
use larder_restore::{Reader, RootPointer, Tree};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// What a log has of one inode.
#[derive(Debug, Default)]
pub(crate) struct Logged {
    /// Names, as its references have them: only the last part of the path.
    pub(crate) names: Vec<Vec<u8>>,
    /// Size that the file would have, if the log tells.
    pub(crate) size: Option<u64>,
    /// Bytes of data.
    pub(crate) data: u64,
}

/// The log of one subvolume, by inode number.
pub(crate) type Inodes = BTreeMap<u64, Logged>;

/// The log trees, by subvolume; nothing where there is no log.
fn log_trees(reader: &Reader<'_>, problems: &Problems) -> Vec<(ObjectId, Tree)> {
    let sb = reader.superblock();
    let Some(at) = sb.log_root() else { return Vec::new() };
    let generation = Some(sb.generation().next());
    let top =
        Tree::plain(ObjectId::TREE_LOG, RootPointer { at, generation, level: sb.log_root_level });
    let mut found = Vec::new();
    let gaps = top.walk(reader, Key::MIN, Key::MAX, &mut |item| {
        if item.key.kind == KeyType::ROOT_ITEM {
            match RootItem::parse(item.data) {
                Ok(root) => {
                    let root = RootPointer { at: root.root(), generation, level: root.level };
                    found.push((ObjectId(item.key.offset), Tree::plain(ObjectId::TREE_LOG, root)));
                }
                Err(e) => problems.add(format!("log of subvolume {}: {e}", item.key.offset)),
            }
        }
        ControlFlow::Continue(())
    });
    problems.gaps(gaps);
    found
}

/// What the log holds, by subvolume.
pub(crate) fn contents(reader: &Reader<'_>, problems: &Problems) -> Vec<(ObjectId, Inodes)> {
    let one = |tree: &Tree| {
        let mut inodes = Inodes::new();
        let gaps = tree.walk(reader, Key::MIN, Key::MAX, &mut |item| {
            if item.key.kind == KeyType::EXTENT_CSUM {
                return ControlFlow::Continue(());
            }
            let logged = inodes.entry(item.key.objectid.0).or_default();
            match item.key.kind {
                KeyType::INODE_ITEM => {
                    logged.size = InodeItem::parse(item.data).ok().map(|i| i.size.get())
                }
                KeyType::INODE_REF => {
                    logged
                        .names
                        .extend(InodeRefs::new(item.data).flatten().map(|r| r.name.to_vec()));
                }
                KeyType::INODE_EXTREF => {
                    logged.names.extend(ExtRefs::new(item.data).flatten().map(|r| r.name.to_vec()));
                }
                KeyType::EXTENT_DATA => {
                    logged.data += match FileExtent::parse(item.data) {
                        Ok(FileExtent::Inline(i)) => i.ram_bytes,
                        Ok(FileExtent::Stored(r)) if !r.is_hole() => r.num_bytes,
                        _ => 0,
                    };
                }
                _ => {}
            }
            ControlFlow::Continue(())
        });
        problems.gaps(gaps);
        inodes
    };
    log_trees(reader, problems).iter().map(|(subvol, tree)| (*subvol, one(tree))).collect()
}

pub(super) fn run(common: &Common) -> anyhow::Result<()> {
    with_reader(device(&common.image, &common.how)?, |reader, problems| {
        let logs = log_trees(reader, problems);
        let mut values = Vec::new();
        if logs.is_empty() && !common.how.json {
            return print::line("there is no log: everything that was synced is committed");
        }
        for (subvol, tree) in &logs {
            let (mut nodes, mut result) = (Vec::<Value>::new(), Ok(()));
            if !common.how.json {
                print::line(&format!("log of subvolume {subvol}"))?;
            }
            let gaps = tree.nodes(reader, &mut |view| {
                if common.how.json {
                    nodes.push(trees::node_value(view));
                } else {
                    result = print::line(trees::node_text(view).trim_end());
                }
                if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            problems.gaps(gaps);
            result?;
            values.push(json!({ "subvolume": subvol.0, "nodes": nodes }));
        }
        if common.how.json { print::json(&values) } else { Ok(()) }
    })
}
