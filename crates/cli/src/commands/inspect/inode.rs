//! `larder inspect inode`: where a file lies. Shows every extent with its copies, whether it is
//! shared, and how fragmented the file is.

use super::common::{How, devices};
use super::items;
use super::owners::Owners;
use super::paths::{Paths, default_subvolume, resolve};
use crate::failure::usage;
use crate::mount_options;
use crate::print;
use crate::raw::{Session, session};
use crate::size;
use crate::target::Target;
use larder_format::items::{Compression, DirEntries, ExtentRecord, FileExtent};
use larder_format::{Key, KeyType, Logical, ObjectId, TreeId};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::ops::ControlFlow;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Image and path
    #[arg(value_name = "IMAGE:PATH")]
    target: OsString,
    /// Number of the subvolume that PATH starts in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Show the inode of this number instead of a path's
    #[arg(long, value_name = "N")]
    number: Option<u64>,
    /// Show at most so many extents
    #[arg(long, default_value_t = 1000, value_name = "N")]
    limit: usize,
    #[command(flatten)]
    how: How,
}

/// What adds up while extents go by.
#[derive(Default)]
struct Sum {
    extents: u64,
    shared: u64,
    /// Runs that lie one behind the other.
    fragments: u64,
    disk_bytes: u64,
    holes: u64,
    inline: u64,
    prealloc: u64,
    compressed: u64,
    next: Option<(u64, u64)>,
    last_disk: Option<Logical>,
}

impl Sum {
    /// Adds the extent at a file offset.
    fn add(&mut self, at: u64, extent: &FileExtent<'_>) {
        match extent {
            FileExtent::Inline(d) => {
                self.extents += 1;
                self.inline += d.ram_bytes;
            }
            FileExtent::Stored(r) => self.stored(at, r),
        }
    }

    fn stored(&mut self, at: u64, r: &ExtentRecord) {
        if r.is_hole() {
            self.holes += r.num_bytes;
            return;
        }
        self.extents += 1;
        if r.kind == larder_format::items::ExtentKind::Prealloc {
            self.prealloc += r.num_bytes;
        }
        let compressed = r.compression != Compression::None;
        self.compressed += if compressed { r.num_bytes } else { 0 };
        let begins = r.disk_bytenr.0.saturating_add(if compressed { 0 } else { r.offset });
        if self.next != Some((at, begins)) {
            self.fragments += 1;
        }
        let on_disk = if compressed { r.disk_num_bytes } else { r.num_bytes };
        self.next = Some((at.saturating_add(r.num_bytes), begins.saturating_add(on_disk)));
        if self.last_disk != Some(r.disk_bytenr) {
            self.disk_bytes = self.disk_bytes.saturating_add(on_disk);
        }
        self.last_disk = Some(r.disk_bytenr);
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let target = Target::parse(&args.target);
    session(devices(&target.image, &args.how)?, |s| {
        let start = args.subvolid.map_or_else(|| default_subvolume(s), ObjectId);
        if s.trees.tree(start).is_none() {
            return usage(format!("there is no subvolume {start}"));
        }
        let (tree, ino) = match args.number {
            Some(n) => (start, n),
            None => resolve(s, start, &target.path)?,
        };
        show(s, args, tree, ino)
    })
}

/// What is known of an inode.
struct Found {
    tree: TreeId,
    ino: u64,
    names: Vec<String>,
    item: Value,
    xattrs: Vec<Value>,
    extents: Vec<Value>,
    /// Extents beyond the limit.
    more: u64,
    sum: Sum,
}

fn show(s: &Session<'_>, args: &Args, tree: TreeId, ino: u64) -> anyhow::Result<()> {
    let found = Found::read(s, args.limit, tree, ino)?;
    if args.how.json { print::json(&found.value()) } else { found.print() }
}

impl Found {
    fn read(s: &Session<'_>, limit: usize, tree: TreeId, ino: u64) -> anyhow::Result<Self> {
        let Some(t) = s.trees.tree(tree) else { anyhow::bail!("there is no tree {tree}") };
        let mut owners = Owners::new(s);
        let (mut item, mut xattrs, mut extents) = (None, Vec::new(), Vec::new());
        let (mut sum, mut more) = (Sum::default(), 0u64);
        let low = Key::new(ino, KeyType(0), 0);
        let gaps = t.walk(s.reader, low, Key::new(ino, KeyType(u8::MAX), u64::MAX), &mut |i| {
            match i.key.kind {
                KeyType::INODE_ITEM => item = Some(i.data.to_vec()),
                KeyType::XATTR_ITEM => xattrs.extend(xattr_values(i.data)),
                KeyType::EXTENT_DATA => match FileExtent::parse(i.data) {
                    Ok(extent) => {
                        sum.add(i.key.offset, &extent);
                        if extents.len() < limit {
                            let row = row(s, &mut owners, i.key.offset, &extent, i.leaf);
                            sum.shared += u64::from(row["shared"] == true);
                            extents.push(row);
                        } else {
                            more += 1;
                        }
                    }
                    Err(e) => s.problems.add(format!("extent at {}: {e}", i.key.offset)),
                },
                _ => {}
            }
            ControlFlow::Continue(())
        });
        s.problems.gaps(gaps);
        let Some(item) = item else { anyhow::bail!("subvolume {tree} has no inode {ino}") };
        let names = Paths::new(s).of(tree, ino, limit).iter().map(|p| print::name(p)).collect();
        let key = Key::new(ino, KeyType::INODE_ITEM, 0);
        let item = items::value(key, &item).unwrap_or_default();
        Ok(Self { tree, ino, names, item, xattrs, extents, more, sum })
    }

    fn value(&self) -> Value {
        json!({
            "subvolume": self.tree.0,
            "inode": self.ino,
            "paths": self.names,
            "item": self.item,
            "xattrs": self.xattrs,
            "extents": self.extents,
            "more": self.more,
            "summary": {
                "extents": self.sum.extents,
                "fragments": self.sum.fragments,
                "bytes_on_disk": self.sum.disk_bytes,
                "inline_bytes": self.sum.inline,
                "hole_bytes": self.sum.holes,
                "preallocated_bytes": self.sum.prealloc,
                "compressed_bytes": self.sum.compressed,
                "shared_extents": self.sum.shared,
            },
        })
    }

    fn print(&self) -> anyhow::Result<()> {
        print::line(&format!("subvolume {} inode {}", self.tree, self.ino))?;
        for n in &self.names {
            print::line(&format!("  name {n}"))?;
        }
        for (k, v) in self.item.as_object().into_iter().flatten() {
            print::line(&format!("  {k} {}", text(v)))?;
        }
        for x in &self.xattrs {
            print::line(&format!("  attribute {} ({} bytes)", text(&x["name"]), x["size"]))?;
        }
        if !self.extents.is_empty() {
            print::line(&format!(
                "{:>14} {:>12} {:<9} {:>16} {:>10} {:<5} {:<6} {:>10}  on the device",
                "offset", "length", "kind", "logical", "stored", "comp", "shared", "generation"
            ))?;
        }
        for row in &self.extents {
            print::line(&line_of(row))?;
        }
        if self.more > 0 {
            print::line(&format!("and {} more extents: see --limit", self.more))?;
        }
        print::line(&format!(
            "{} extents in {} fragments, {} on the device",
            self.sum.extents,
            self.sum.fragments,
            size::human(self.sum.disk_bytes)
        ))
    }
}

fn xattr_values(data: &[u8]) -> impl Iterator<Item = Value> {
    let entries = DirEntries::new(data).map_while(Result::ok);
    entries.map(|e| json!({ "name": print::name(e.name), "size": e.data.len() }))
}

fn text(v: &Value) -> String {
    v.as_str().map_or_else(|| v.to_string(), str::to_owned)
}

/// The line of an extent in the table.
fn line_of(row: &Value) -> String {
    let stripes = row["stripes"].as_array().into_iter().flatten();
    let places: Vec<String> = stripes.map(|p| format!("{}:{}", p["devid"], p["offset"])).collect();
    let cell = |k: &str| text(&row[k]).replace("null", "-");
    format!(
        "{:>14} {:>12} {:<9} {:>16} {:>10} {:<5} {:<6} {:>10}  {}",
        cell("offset"),
        cell("length"),
        cell("kind"),
        cell("logical"),
        cell("stored"),
        cell("compression"),
        if row["shared"] == true { "yes" } else { "no" },
        cell("generation"),
        places.join(" ")
    )
}

fn row(
    s: &Session<'_>,
    owners: &mut Owners<'_>,
    at: u64,
    extent: &FileExtent<'_>,
    leaf: Logical,
) -> Value {
    let mut row = items::file_extent(extent);
    let mut set = |k: &str, v: Value| {
        if let Some(o) = row.as_object_mut() {
            o.insert(k.into(), v);
        }
    };
    set("offset", at.into());
    if let FileExtent::Stored(r) = extent
        && !r.is_hole()
    {
        // Of a compressed extent the bytes of a window cannot be told apart.
        let begins = if r.compression == Compression::None {
            r.disk_bytenr.plus(r.offset)
        } else {
            r.disk_bytenr
        };
        let found = owners.extent_at(r.disk_bytenr).ok().flatten();
        let shared = found.is_some_and(|e| e.item.refs > 1) || owners.trees_of(leaf).len() > 1;
        set("logical", begins.0.into());
        set("stored", r.disk_num_bytes.into());
        set("extent_offset", r.offset.into());
        set("stripes", super::extent::places(s, begins).into());
        set("shared", shared.into());
    }
    row
}
