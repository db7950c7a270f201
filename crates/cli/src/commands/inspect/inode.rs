//! Where a file lies: every extent with its copies, whether it is shared, and how fragmented it all
//! is.

use super::owners::Owners;
use super::paths::{Paths, default_subvolume, resolve};
use super::{How, device, items};
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
    session(device(&target.image, &args.how)?, |s| {
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

fn show(s: &Session<'_>, args: &Args, tree: TreeId, ino: u64) -> anyhow::Result<()> {
    let Some(t) = s.trees.tree(tree) else { anyhow::bail!("there is no tree {tree}") };
    let mut owners = Owners::new(s);
    let (mut item, mut xattrs, mut rows, mut sum, mut left) =
        (None, Vec::new(), Vec::new(), Sum::default(), 0u64);
    let low = Key::new(ino, KeyType(0), 0);
    let gaps = t.walk(s.reader, low, Key::new(ino, KeyType(u8::MAX), u64::MAX), &mut |i| {
        match i.key.kind {
            KeyType::INODE_ITEM => item = Some(i.data.to_vec()),
            KeyType::XATTR_ITEM => {
                let entries = DirEntries::new(i.data).map_while(Result::ok);
                xattrs.extend(
                    entries.map(|e| json!({ "name": print::name(e.name), "size": e.data.len() })),
                );
            }
            KeyType::EXTENT_DATA => match FileExtent::parse(i.data) {
                Ok(extent) => {
                    match &extent {
                        FileExtent::Inline(d) => {
                            sum.extents += 1;
                            sum.inline += d.ram_bytes;
                        }
                        FileExtent::Stored(r) => sum.stored(i.key.offset, r),
                    }
                    if rows.len() < args.limit {
                        let row = row(s, &mut owners, i.key.offset, &extent, i.leaf);
                        sum.shared += u64::from(row["shared"] == true);
                        rows.push(row);
                    } else {
                        left += 1;
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
    let names: Vec<String> =
        Paths::new(s).of(tree, ino, args.limit).iter().map(|p| print::name(p)).collect();
    let key = Key::new(ino, KeyType::INODE_ITEM, 0);
    let facts = items::value(key, &item).unwrap_or_default();
    let summary = json!({
        "extents": sum.extents,
        "fragments": sum.fragments,
        "bytes_on_disk": sum.disk_bytes,
        "inline_bytes": sum.inline,
        "hole_bytes": sum.holes,
        "preallocated_bytes": sum.prealloc,
        "compressed_bytes": sum.compressed,
        "shared_extents": sum.shared,
    });
    if args.how.json {
        return print::json(&json!({
            "subvolume": tree.0,
            "inode": ino,
            "paths": names,
            "item": facts,
            "xattrs": xattrs,
            "extents": rows,
            "more": left,
            "summary": summary,
        }));
    }
    print::line(&format!("subvolume {tree} inode {ino}"))?;
    for n in &names {
        print::line(&format!("  name {n}"))?;
    }
    for (k, v) in facts.as_object().into_iter().flatten() {
        print::line(&format!("  {k} {}", v.as_str().map_or_else(|| v.to_string(), str::to_owned)))?;
    }
    for x in &xattrs {
        print::line(&format!(
            "  attribute {} ({} bytes)",
            x["name"].as_str().unwrap_or_default(),
            x["size"]
        ))?;
    }
    if !rows.is_empty() {
        print::line(&format!(
            "{:>14} {:>12} {:<9} {:>16} {:>10} {:<5} {:<6} {:>10}  on the device",
            "offset", "length", "kind", "logical", "stored", "comp", "shared", "generation"
        ))?;
    }
    for r in &rows {
        let places: Vec<String> = r["stripes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|p| format!("{}:{}", p["devid"], p["offset"]))
            .collect();
        let text = |k: &str| {
            r[k].as_str().map_or_else(|| r[k].to_string(), str::to_owned).replace("null", "-")
        };
        print::line(&format!(
            "{:>14} {:>12} {:<9} {:>16} {:>10} {:<5} {:<6} {:>10}  {}",
            text("offset"),
            text("length"),
            text("kind"),
            text("logical"),
            text("stored"),
            text("compression"),
            if r["shared"] == true { "yes" } else { "no" },
            text("generation"),
            places.join(" ")
        ))?;
    }
    if left > 0 {
        print::line(&format!("and {left} more extents: see --limit"))?;
    }
    print::line(&format!(
        "{} extents in {} fragments, {} on the device",
        sum.extents,
        sum.fragments,
        size::human(sum.disk_bytes)
    ))
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
