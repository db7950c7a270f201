//! Block groups, and how full they are.

use super::{Common, Session, device, session};
use crate::print;
use crate::size;
use larder_format::items::{BlockGroupFlags, BlockGroupItem};
use larder_format::{CompatRo, Key, KeyType, Logical, ObjectId};
use serde_json::{Value, json};
use std::ops::ControlFlow;

/// A block group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) start: Logical,
    pub(crate) length: u64,
    pub(crate) used: u64,
    pub(crate) flags: BlockGroupFlags,
}

/// All block groups, by address.
pub(crate) fn read_groups(s: &Session<'_>) -> Vec<Group> {
    let own = s.reader.superblock().compat_ro().contains(CompatRo::BLOCK_GROUP_TREE);
    let id = if own { ObjectId::BLOCK_GROUP_TREE } else { ObjectId::EXTENT_TREE };
    let mut groups = Vec::new();
    let Some(tree) = s.trees.tree(id) else {
        s.problems.add(format!("tree {id}, which has the block groups, is missing"));
        return groups;
    };
    if !own {
        // They stand among millions of extents; chunks say where.
        for chunk in s.reader.volume().map().chunks() {
            let low = Key::new(chunk.start, KeyType::BLOCK_GROUP_ITEM, 0);
            let gaps = tree.walk(s.reader, low, Key { offset: u64::MAX, ..low }, &mut |item| {
                add(s, &mut groups, item.key, item.data);
                ControlFlow::Continue(())
            });
            s.problems.gaps(gaps);
        }
        return groups;
    }
    let gaps = tree.walk(s.reader, Key::MIN, Key::MAX, &mut |item| {
        add(s, &mut groups, item.key, item.data);
        ControlFlow::Continue(())
    });
    s.problems.gaps(gaps);
    groups
}

fn add(s: &Session<'_>, groups: &mut Vec<Group>, key: Key, data: &[u8]) {
    if key.kind != KeyType::BLOCK_GROUP_ITEM {
        return;
    }
    match BlockGroupItem::parse(key.offset, data) {
        Ok(g) => groups.push(Group {
            start: Logical(key.objectid.0),
            length: key.offset,
            used: g.used.get(),
            flags: g.kind(),
        }),
        Err(e) => s.problems.add(format!("block group at {}: {e}", key.objectid)),
    }
}

/// How much of something is used.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

pub(super) fn run(common: &Common) -> anyhow::Result<()> {
    session(device(&common.image, &common.how)?, |s| {
        let groups = read_groups(s);
        let map = s.reader.volume().map();
        if common.how.json {
            let value = |g: &Group| {
                let stripes: Vec<Value> = map.chunk_at(g.start).map_or(Vec::new(), |c| {
                    c.stripes
                        .iter()
                        .map(|s| json!({ "devid": s.device.0, "offset": s.at.0 }))
                        .collect()
                });
                json!({
                    "start": g.start.0,
                    "length": g.length,
                    "type": super::trees::type_text(g.flags.bits()),
                    "used": g.used,
                    "stripes": stripes,
                })
            };
            return print::json(&groups.iter().map(value).collect::<Vec<_>>());
        }
        print::line(&format!("{:>16} {:>12} {:>12} {:>6}  type", "start", "length", "used", "%"))?;
        for g in &groups {
            let (length, used) = (size::human(g.length), size::human(g.used));
            let kind = super::trees::type_text(g.flags.bits());
            let full = percent(g.used, g.length);
            print::line(&format!("{:>16} {length:>12} {used:>12} {full:>6.1}  {kind}", g.start.0))?;
        }
        let (length, used): (u64, u64) = groups
            .iter()
            .fold((0, 0), |(l, u), g| (l.saturating_add(g.length), u.saturating_add(g.used)));
        print::line(&format!(
            "{} block groups, {} of {} used ({:.1} %)",
            groups.len(),
            size::human(used),
            size::human(length),
            percent(used, length)
        ))
    })
}
