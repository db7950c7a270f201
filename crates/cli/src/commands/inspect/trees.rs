//! Trees and blocks item by item, and the chunk map.

use super::common::{Common, How, devices};
use super::items;
use crate::failure::usage;
use crate::print;
use crate::raw::{Problems, open_trees, type_text, with_reader};
use larder_format::items::Chunk;
use larder_format::node::NodeView;
use larder_format::{Key, KeyType, Logical, ObjectId};
use larder_restore::{Reader, RootPointer, Tree};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Tree to show: a number or root, extent, chunk, dev, fs, csum, uuid, free-space, block-group,
    /// data-reloc
    #[arg(long, default_value = "root", value_parser = tree_id, allow_hyphen_values = true)]
    tree: u64,
    /// Show this one block instead of a whole tree
    #[arg(long, value_name = "ADDRESS")]
    block: Option<u64>,
    /// Show at most so many blocks
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    #[command(flatten)]
    how: How,
}

const ROOT_TREE: u64 = 1;
const CHUNK_TREE: u64 = 3;
const NAMES: [(&str, u64); 10] = [
    ("root", ROOT_TREE),
    ("extent", 2),
    ("chunk", CHUNK_TREE),
    ("dev", 4),
    ("fs", 5),
    ("csum", 7),
    ("uuid", 9),
    ("free-space", 10),
    ("block-group", 11),
    ("data-reloc", 9u64.wrapping_neg()),
];

fn tree_id(text: &str) -> Result<u64, String> {
    if let Some((_, id)) = NAMES.iter().find(|(n, _)| *n == text) {
        return Ok(*id);
    }
    let negative =
        text.strip_prefix('-').and_then(|n| n.parse::<u64>().ok()).map(u64::wrapping_neg);
    text.parse()
        .ok()
        .or(negative)
        .ok_or_else(|| format!("{text:?} is neither the name nor the number of a tree"))
}

fn chunk_tree(reader: &Reader<'_>) -> Tree {
    let sb = reader.superblock();
    let generation = Some(sb.chunk_root_generation());
    let root = RootPointer { at: sb.chunk_root(), generation, level: sb.chunk_root_level };
    Tree::plain(ObjectId(CHUNK_TREE), root)
}

/// The tree with an id.
fn open_tree(reader: &Reader<'_>, problems: &Problems, id: u64) -> anyhow::Result<Tree> {
    if id == CHUNK_TREE {
        return Ok(chunk_tree(reader));
    }
    match open_trees(reader, problems)?.trees.tree(ObjectId(id)) {
        Some(tree) => Ok(tree),
        None => usage(format!("there is no tree {}", ObjectId(id))),
    }
}

pub(super) fn tree(args: &Args) -> anyhow::Result<()> {
    with_reader(devices(&args.image, &args.how)?, |reader, problems| {
        let (mut values, mut result, mut left) =
            (Vec::new(), Ok(()), args.limit.unwrap_or(usize::MAX));
        let mut one = |view: NodeView<'_>| {
            if left == 0 {
                return ControlFlow::Break(());
            }
            left -= 1;
            if args.how.json {
                values.push(node_value(view));
            } else {
                result = print::line(node_text(view).trim_end());
            }
            if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        if let Some(at) = args.block {
            let bytes = reader.block(Logical(at))?;
            let _ = one(NodeView(&bytes));
        } else {
            let gaps = open_tree(reader, problems, args.tree)?.nodes(reader, &mut one);
            problems.gaps(gaps);
        }
        result?;
        if args.how.json {
            print::json(&values)?;
        }
        Ok(())
    })
}

pub(super) fn chunks(common: &Common) -> anyhow::Result<()> {
    with_reader(devices(&common.image, &common.how)?, |reader, problems| {
        let mut chunks: Vec<(u64, Chunk)> = Vec::new();
        let gaps = chunk_tree(reader).walk(reader, Key::MIN, Key::MAX, &mut |item| {
            if item.key.kind == KeyType::CHUNK_ITEM {
                match Chunk::parse(item.data) {
                    Ok(c) => chunks.push((item.key.offset, c)),
                    Err(e) => problems.add(format!("chunk at {}: {e}", item.key.offset)),
                }
            }
            ControlFlow::Continue(())
        });
        problems.gaps(gaps);
        if common.how.json {
            let values: Vec<Value> = chunks
                .iter()
                .map(|(at, c)| {
                    json!({
                        "logical": at,
                        "length": c.length,
                        "type": type_text(c.flags.bits()),
                        "stripes": items::stripes(c),
                    })
                })
                .collect();
            return print::json(&values);
        }
        print::line(&format!("{:>16} {:>14} {:<22} device:physical", "logical", "length", "type"))?;
        for (at, c) in &chunks {
            let places: Vec<String> =
                c.stripes.iter().map(|s| format!("{}:{}", s.devid, s.offset)).collect();
            let kind = type_text(c.flags.bits());
            print::line(&format!("{at:>16} {:>14} {kind:<22} {}", c.length, places.join(" ")))?;
        }
        Ok(())
    })
}

/// Bytes of an item that are shown before it is cut.
const SHOWN: usize = 64;

fn hex(data: &[u8]) -> String {
    data.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

pub(super) fn node_text(view: NodeView<'_>) -> String {
    let kind = if view.level() == 0 { "leaf" } else { "node" };
    let mut out = format!(
        "{kind} {} level {} items {} generation {} owner {}\n",
        view.bytenr(),
        view.level(),
        view.nritems(),
        view.generation(),
        view.owner()
    );
    for (i, item) in view.items().iter().enumerate().filter(|_| view.level() == 0) {
        let data = view.data(i).unwrap_or_default();
        let cut = if data.len() > SHOWN { "…" } else { "" };
        let shown = &data[..data.len().min(SHOWN)];
        let key = Key::from(item.key);
        let _ = writeln!(out, "  {key} {}", item.size.get());
        if let Some(text) = items::text(key, data) {
            let _ = writeln!(out, "      {text}");
            continue;
        }
        for line in shown.chunks(32) {
            let ascii: String = line
                .iter()
                .map(|b| if b.is_ascii_graphic() { char::from(*b) } else { '.' })
                .collect();
            let _ = writeln!(out, "      {:<64}  {ascii}", hex(line));
        }
        if !cut.is_empty() {
            let _ = writeln!(out, "      {cut}");
        }
    }
    for p in view.pointers().iter().filter(|_| view.level() > 0) {
        let _ = writeln!(
            out,
            "  {} block {} generation {}",
            Key::from(p.key),
            p.blockptr,
            p.generation
        );
    }
    out
}

fn key_value(key: Key) -> Value {
    json!({
        "objectid": key.objectid.0,
        "type": key.kind.0,
        "type_name": key.kind.name(),
        "offset": key.offset,
    })
}

pub(super) fn node_value(view: NodeView<'_>) -> Value {
    let items: Vec<Value> = if view.level() == 0 {
        let all = view.items().iter().enumerate();
        all.map(|(i, item)| {
            let (key, data) = (Key::from(item.key), view.data(i).unwrap_or_default());
            json!({ "key": key_value(key), "holds": items::value(key, data), "data": hex(data) })
        })
        .collect()
    } else {
        let all = view.pointers().iter();
        all.map(|p| {
            json!({
                "key": key_value(p.key.into()),
                "block": p.blockptr.get(),
                "generation": p.generation.get(),
            })
        })
        .collect()
    };
    json!({
        "bytenr": view.bytenr().0,
        "level": view.level(),
        "generation": view.generation().0,
        "owner": view.owner().0,
        "items": items,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_names_and_numbers() {
        assert_eq!(tree_id("chunk"), Ok(3));
        assert_eq!(tree_id("257"), Ok(257));
        assert_eq!(tree_id("-9"), Ok(9u64.wrapping_neg()));
        assert!(tree_id("oak").is_err());
    }
}
