//! `larder inspect`: the structures of an image, as they lie on disk.
//!
//! Meant for images that may be broken: it reads blocks itself instead of opening the file system, goes on after what
//! it cannot read, says so, and ends with exit code 1 then.

use crate::failure::{Advise, usage};
use crate::image::{Access, open_device};
use crate::print;
use anyhow::{Context, anyhow, bail};
use larder_format::check::{Expect, check_node};
use larder_format::items::{BlockGroupFlags, Chunk, RootItem};
use larder_format::node::NodeView;
use larder_format::{Generation, Key, KeyType, Logical, MAX_LEVEL, ObjectId, Superblock, Support};
use larder_volume::{Device, MappedChunk, SuperCopy, Volume, read_all_superblocks, read_superblock};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

/// Show the structures of an image: its superblocks, a tree, or its chunks.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder inspect super disk.img
  larder inspect tree --tree root disk.img
  larder inspect chunks --json disk.img")]
pub(crate) struct Args {
    /// What to show
    #[arg(value_enum)]
    what: What,
    /// Image file or block device
    image: PathBuf,
    /// Tree to show: a number or root, extent, chunk, dev, fs, csum, uuid, free-space, block-group, data-reloc
    #[arg(long, default_value = "root", value_parser = tree_id, allow_hyphen_values = true)]
    tree: u64,
    /// Show this one block instead of a whole tree
    #[arg(long, value_name = "ADDRESS")]
    block: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read the image even if somebody is using it
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum What {
    /// All copies of the superblock
    Super,
    /// The blocks and items of a tree
    Tree,
    /// Where the logical address space lies on the device
    Chunks,
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
    let negative = text.strip_prefix('-').and_then(|n| n.parse::<u64>().ok()).map(u64::wrapping_neg);
    text.parse()
        .ok()
        .or(negative)
        .ok_or_else(|| format!("{text:?} is neither the name nor the number of a tree"))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let device = open_device(&args.image, Access::Read { force: args.force })?;
    match args.what {
        What::Super => supers(args, &*device),
        What::Tree => Reader::open(device)?.tree(args),
        What::Chunks => Reader::open(device)?.chunks(args),
    }
}

// ---- super ----------------------------------------------------------------------------------------------------------

fn supers(args: &Args, device: &dyn Device) -> anyhow::Result<()> {
    let copies = read_all_superblocks(device);
    // Nothing that looks like a superblock anywhere: not damaged, but something else.
    let is_other = |c: &SuperCopy| matches!(&c.content, Err(e) if e.to_string().contains("not a btrfs"));
    if copies.iter().all(is_other) {
        let error =
            read_superblock(device).err().map_or_else(|| anyhow::anyhow!("no superblock"), Into::into);
        return Err(error).could_not_run();
    }
    let mut values = Vec::new();
    let mut bad = 0;
    for copy in &copies {
        let value = match &copy.content {
            Ok(sb) => super_value(sb),
            Err(e) => {
                bad += 1;
                json!({ "bytenr": copy.at.0, "error": e.to_string() })
            }
        };
        values.push(value);
    }
    if args.json {
        print::json(&values)?;
    } else {
        for value in &values {
            print::line(&text_of(value))?;
        }
    }
    if bad > 0 {
        bail!("{bad} of {} superblock copies cannot be used", copies.len());
    }
    Ok(())
}

/// A JSON object as lines `name  value`.
fn text_of(value: &Value) -> String {
    let mut out = String::new();
    let Some(object) = value.as_object() else { return value.to_string() };
    for (name, v) in object {
        let v = match v {
            Value::String(s) => s.clone(),
            Value::Array(a) if a.iter().all(Value::is_string) => {
                a.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
            }
            other => other.to_string(),
        };
        let _ = writeln!(out, "{name:<24} {v}");
    }
    out
}

fn super_value(sb: &Superblock) -> Value {
    let support = match sb.support() {
        Support::ReadWrite => "read-write".to_owned(),
        Support::ReadOnly { why } => format!("read-only: {why}"),
        Support::Refused { why } => format!("refused: {why}"),
    };
    json!({
        "bytenr": sb.bytenr.get(),
        "fsid": print::uuid(sb.fsid),
        "metadata_uuid": print::uuid(sb.metadata_fsid()),
        "label": print::name(sb.label()),
        "larder": support,
        "generation": sb.generation.get(),
        "root": sb.root.get(),
        "root_level": sb.root_level,
        "chunk_root": sb.chunk_root.get(),
        "chunk_root_level": sb.chunk_root_level,
        "chunk_root_generation": sb.chunk_root_generation.get(),
        "log_root": sb.log_root.get(),
        "log_root_level": sb.log_root_level,
        "total_bytes": sb.total_bytes.get(),
        "bytes_used": sb.bytes_used.get(),
        "sectorsize": sb.sectorsize.get(),
        "nodesize": sb.nodesize.get(),
        "num_devices": sb.num_devices.get(),
        "csum_type": sb.csum_type().name(),
        "flags": sb.super_flags().names(),
        "compat_ro_flags": sb.compat_ro().names(),
        "incompat_flags": sb.incompat().names(),
        "cache_generation": sb.cache_generation.get(),
        "uuid_tree_generation": sb.uuid_tree_generation.get(),
        "sys_chunk_array_size": sb.sys_chunk_array_size.get(),
        "devid": sb.dev_item.devid.get(),
        "dev_uuid": print::uuid(sb.dev_item.uuid),
        "dev_total_bytes": sb.dev_item.total_bytes.get(),
        "dev_bytes_used": sb.dev_item.bytes_used.get(),
        "current_backup_slot": sb.current_backup_slot(),
    })
}

// ---- trees ----------------------------------------------------------------------------------------------------------

/// Reads blocks of an image without the engine.
struct Reader {
    volume: Volume,
    superblock: Box<Superblock>,
    /// What could not be read, in words.
    problems: Vec<String>,
}

/// A block to visit.
#[derive(Clone, Copy)]
struct Visit {
    at: Logical,
    level: Option<u8>,
    generation: Option<Generation>,
    is_root: bool,
}

impl Reader {
    fn open(device: Arc<dyn Device>) -> anyhow::Result<Self> {
        let superblock = read_superblock(&*device).could_not_run()?;
        let volume = Volume::open(device, &superblock).could_not_run()?;
        let mut reader = Self { volume, superblock, problems: Vec::new() };
        let root = reader.root_of(CHUNK_TREE)?;
        let mut chunks = Vec::new();
        reader.walk(root, &mut |_, key, data| {
            if key.kind == KeyType::CHUNK_ITEM {
                chunks.push((Logical(key.offset), data.to_vec()));
            }
        });
        for (at, data) in chunks {
            let added = Chunk::parse(&data)
                .map_err(anyhow::Error::from)
                .and_then(|c| Ok(reader.volume.add_chunk(MappedChunk::from_item(at, &c))?));
            if let Err(e) = added {
                reader.problems.push(format!("chunk at {at}: {e}"));
            }
        }
        Ok(reader)
    }

    /// Root of a tree: from the superblock, or from its item in the root tree.
    fn root_of(&mut self, tree: u64) -> anyhow::Result<Visit> {
        let sb = &self.superblock;
        let visit = |at, level, generation| Visit {
            at,
            level: Some(level),
            generation: Some(generation),
            is_root: true,
        };
        match tree {
            CHUNK_TREE => {
                return Ok(visit(sb.chunk_root(), sb.chunk_root_level, sb.chunk_root_generation()));
            }
            ROOT_TREE => return Ok(visit(sb.root(), sb.root_level, sb.generation())),
            _ => {}
        }
        let roots = self.root_of(ROOT_TREE)?;
        let mut found = None;
        self.walk(roots, &mut |_, key, data| {
            if key.objectid == ObjectId(tree) && key.kind == KeyType::ROOT_ITEM {
                found = Some(data.to_vec());
            }
        });
        let Some(data) = found else {
            return usage(format!("there is no tree {}", ObjectId(tree)));
        };
        let item = RootItem::parse(&data).with_context(|| format!("root item of tree {}", ObjectId(tree)))?;
        Ok(visit(Logical(item.bytenr.get()), item.level, Generation(item.generation.get())))
    }

    /// A verified block, from whichever copy is good. A block that breaks a rule but is what was written (its checksum
    /// is right) is better than nothing: it comes with a complaint.
    fn block(&mut self, visit: Visit) -> anyhow::Result<Vec<u8>> {
        let mut last = anyhow!("no copy");
        let mut second_best = None;
        for copy in 0..self.volume.copies(visit.at)? {
            let mut bytes = vec![0; self.superblock.nodesize() as usize];
            if let Err(e) = self.volume.read_block(visit.at, &mut bytes, copy) {
                last = e.into();
                continue;
            }
            match check_node(&bytes, &self.expect(visit)) {
                Ok(()) => return Ok(bytes),
                Err(e) => last = e.into(),
            }
            let view = NodeView(&bytes);
            let expected = visit.level.is_none_or(|l| l == view.level()) && view.level() < MAX_LEVEL;
            if expected && view.bytenr() == visit.at && view.csum_matches(self.superblock.csum_type()) {
                second_best = Some(bytes);
            }
        }
        let last = last.context(format!("block {}", visit.at));
        match second_best {
            Some(bytes) => {
                self.problems.push(format!("{last:#}"));
                Ok(bytes)
            }
            None => Err(last),
        }
    }

    fn expect(&self, visit: Visit) -> Expect {
        let sb = &self.superblock;
        Expect {
            nodesize: sb.nodesize(),
            fsid: sb.metadata_fsid(),
            bytenr: visit.at,
            level: visit.level,
            generation: visit.generation,
            owner: None,
            is_root: visit.is_root,
            first_key: None,
            csum: Some(sb.csum_type()),
            super_generation: sb.generation(),
        }
    }

    /// Calls `each` with the block's address, key and data of every item below a block, in order. What cannot be read is noted and
    /// passed over.
    fn walk(&mut self, root: Visit, each: &mut dyn FnMut(Logical, Key, &[u8])) {
        self.walk_blocks(root, &mut |view| {
            for (i, item) in view.items().iter().enumerate().filter(|_| view.level() == 0) {
                each(view.bytenr(), item.key.into(), view.data(i).unwrap_or_default());
            }
        });
    }

    fn walk_blocks(&mut self, root: Visit, each: &mut dyn FnMut(NodeView<'_>)) {
        let mut todo = vec![root];
        // A block is visited once: damaged pointers must not send us in circles.
        let mut seen = BTreeSet::new();
        while let Some(visit) = todo.pop() {
            if !seen.insert(visit.at) {
                self.problems.push(format!("block {} is reached twice", visit.at));
                continue;
            }
            let bytes = match self.block(visit) {
                Ok(b) => b,
                Err(e) => {
                    self.problems.push(format!("{e:#}"));
                    continue;
                }
            };
            let view = NodeView(&bytes);
            each(view);
            if view.level() > 0 {
                let below = view.pointers().iter().rev().map(|p| Visit {
                    at: Logical(p.blockptr.get()),
                    level: Some(view.level() - 1),
                    generation: Some(Generation(p.generation.get())),
                    is_root: false,
                });
                todo.extend(below);
            }
        }
    }

    fn tree(mut self, args: &Args) -> anyhow::Result<()> {
        let root = match args.block {
            Some(at) => Visit { at: Logical(at), level: None, generation: None, is_root: true },
            None => self.root_of(args.tree)?,
        };
        let (mut values, mut result) = (Vec::new(), Ok(()));
        let mut one = |view: NodeView<'_>| {
            if args.json {
                values.push(node_value(view));
            } else if result.is_ok() {
                result = print::line(node_text(view).trim_end());
            }
        };
        if args.block.is_some() {
            let bytes = self.block(root)?;
            one(NodeView(&bytes));
        } else {
            self.walk_blocks(root, &mut one);
        }
        result?;
        if args.json {
            print::json(&values)?;
        }
        self.finish()
    }

    fn chunks(self, args: &Args) -> anyhow::Result<()> {
        let chunks = self.volume.map().chunks();
        if args.json {
            let values: Vec<Value> = chunks
                .iter()
                .map(|c| {
                    let stripes: Vec<Value> =
                        c.stripes.iter().map(|s| json!({ "devid": s.device.0, "offset": s.at.0 })).collect();
                    json!({ "logical": c.start.0, "length": c.length, "type": type_text(c.kind), "stripes": stripes })
                })
                .collect();
            print::json(&values)?;
        } else {
            print::line(&format!("{:>16} {:>14} {:<22} device:physical", "logical", "length", "type"))?;
            for c in &chunks {
                let places: Vec<String> =
                    c.stripes.iter().map(|s| format!("{}:{}", s.device, s.at)).collect();
                let text = format!(
                    "{:>16} {:>14} {:<22} {}",
                    c.start.0,
                    c.length,
                    type_text(c.kind),
                    places.join(" ")
                );
                print::line(&text)?;
            }
        }
        self.finish()
    }

    /// Says what could not be read.
    fn finish(self) -> anyhow::Result<()> {
        for p in &self.problems {
            eprintln!("larder: {p}");
        }
        match self.problems.len() {
            0 => Ok(()),
            n => bail!("{n} problems: what is shown is not everything"),
        }
    }
}

fn type_text(kind: u64) -> String {
    let flags = BlockGroupFlags::from_bits_retain(kind);
    let profile = flags.profile().map_or("unknown profile", larder_format::items::Profile::name);
    format!("{} {profile}", flags.type_name())
}

/// Bytes of an item that are shown before it is cut.
const SHOWN: usize = 64;

fn hex(data: &[u8]) -> String {
    data.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

fn node_text(view: NodeView<'_>) -> String {
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
        let _ = writeln!(out, "  {} {}", Key::from(item.key), item.size.get());
        for line in shown.chunks(32) {
            let ascii: String =
                line.iter().map(|b| if b.is_ascii_graphic() { char::from(*b) } else { '.' }).collect();
            let _ = writeln!(out, "      {:<64}  {ascii}", hex(line));
        }
        if !cut.is_empty() {
            let _ = writeln!(out, "      {cut}");
        }
    }
    for p in view.pointers().iter().filter(|_| view.level() > 0) {
        let _ = writeln!(out, "  {} block {} generation {}", Key::from(p.key), p.blockptr, p.generation);
    }
    out
}

fn key_value(key: Key) -> Value {
    json!({ "objectid": key.objectid.0, "type": key.kind.0, "type_name": key.kind.name(), "offset": key.offset })
}

fn node_value(view: NodeView<'_>) -> Value {
    let items: Vec<Value> = if view.level() == 0 {
        let all = view.items().iter().enumerate();
        all.map(|(i, item)| {
            json!({ "key": key_value(item.key.into()), "data": hex(view.data(i).unwrap_or_default()) })
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
