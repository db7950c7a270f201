//! The extent at an address, and the files that use it.

use super::common::{How, devices};
use super::items;
use super::owners::{Extent, Owners, Users};
use super::paths::Paths;
use crate::failure::usage;
use crate::print;
use crate::raw::{Session, session, type_text};
use larder_format::items::{Compression, ExtentRecord};
use larder_format::{Logical, Physical, TreeId};
use larder_volume::Stripe;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Address, in bytes
    #[arg(value_parser = address)]
    address: u64,
    /// The address is one on the device
    #[arg(long)]
    physical: bool,
    /// Also files that use other parts of the same extent
    #[arg(long)]
    whole: bool,
    /// Show at most so many files
    #[arg(long, default_value_t = 1000, value_name = "N")]
    limit: usize,
    #[command(flatten)]
    how: How,
}

/// A number, decimal or with 0x in front.
fn address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    parsed.ok_or_else(|| format!("{text:?} is not an address"))
}

/// The logical address that is asked about.
fn logical(s: &Session<'_>, args: &Args) -> anyhow::Result<Logical> {
    if !args.physical {
        return Ok(Logical(args.address));
    }
    let map = s.reader.volume().map();
    let device = s.reader.superblock().device_id();
    if let Some(at) = map.logical(Stripe { device, at: Physical(args.address) }) {
        return Ok(at);
    }
    usage(format!(
        "device {device} has no data at {}: it lies in no chunk, or is parity",
        args.address
    ))
}

/// Places of an address on devices.
pub(super) fn places(s: &Session<'_>, at: Logical) -> Vec<Value> {
    let found = s.reader.volume().map().lookup(at, 1);
    found.map_or(Vec::new(), |l| {
        l.stripes.iter().map(|p| json!({ "devid": p.device.0, "offset": p.at.0 })).collect()
    })
}

fn group(s: &Session<'_>, at: Logical) -> Value {
    match s.reader.volume().map().chunk_at(at) {
        Some(c) => {
            json!({ "start": c.start.0, "length": c.length, "type": type_text(c.kind) })
        }
        None => Value::Null,
    }
}

fn facts(s: &Session<'_>, e: &Extent) -> Map<String, Value> {
    let mut out = Map::new();
    out.insert("start".into(), e.start.0.into());
    out.insert("length".into(), e.length.into());
    let kind = e.level.map_or("data".to_owned(), |l| format!("node of level {l}"));
    out.insert("kind".into(), kind.into());
    out.insert("generation".into(), e.item.generation.0.into());
    out.insert("references".into(), e.item.refs.into());
    out.insert("stripes".into(), places(s, e.start).into());
    out
}

fn place_text(places: &[Value]) -> String {
    let all: Vec<String> =
        places.iter().map(|p| format!("{}:{}", p["devid"], p["offset"])).collect();
    if all.is_empty() { "nowhere".into() } else { all.join(", ") }
}

fn head(s: &Session<'_>, at: Logical, e: Option<&Extent>) -> String {
    let g = group(s, at);
    let group = if g.is_null() {
        "in no block group".to_owned()
    } else {
        format!("in the block group at {} ({})", g["start"], g["type"].as_str().unwrap_or_default())
    };
    let place = place_text(&places(s, at));
    let mut out = format!("address {at}, on the device {place}, {group}\n");
    match e {
        Some(e) => {
            let kind = e.level.map_or("data extent".to_owned(), |l| format!("node of level {l}"));
            let refs = e.item.refs;
            out += &format!(
                "{kind} {} +{}, generation {}, {refs} references",
                e.start, e.length, e.item.generation
            );
        }
        None => out += "not allocated",
    }
    out
}

pub(super) fn extent(args: &Args) -> anyhow::Result<()> {
    session(devices(&args.image, &args.how)?, |s| {
        let at = logical(s, args)?;
        let owners = Owners::new(s);
        let extent = owners
            .extent_at(at)
            .map_err(|e| anyhow::anyhow!("the extent tree cannot be read: {e}"))?;
        if args.how.json {
            let value = extent.as_ref().map(|e| {
                let mut v = facts(s, e);
                v.insert("refs".into(), items::refs(&e.refs).into());
                v
            });
            return print::json(
                &json!({ "address": at.0, "block_group": group(s, at), "extent": value }),
            );
        }
        print::line(&head(s, at, extent.as_ref()))?;
        for (r, count) in extent.iter().flat_map(|e| &e.refs).take(args.limit) {
            let v = items::reference(r, *count);
            let parts: Vec<String> =
                v.as_object().into_iter().flatten().map(|(k, v)| format!("{k} {v}")).collect();
            print::line(&format!("  {}", parts.join(", ")))?;
        }
        Ok(())
    })
}

/// Offset in the file of an address, if the item's window covers it. Of a compressed extent every
/// byte is everywhere.
fn file_offset(at: Logical, item_offset: u64, r: &ExtentRecord) -> Option<u64> {
    if r.compression != Compression::None {
        return Some(item_offset);
    }
    let into = at.0.checked_sub(r.disk_bytenr.0)?.checked_sub(r.offset)?;
    (into < r.num_bytes).then(|| item_offset.saturating_add(into))
}

/// A place in a file that an address belongs to, or, of the whole extent, an item that uses it.
pub(crate) struct Use {
    pub(crate) subvolume: TreeId,
    pub(crate) ino: u64,
    pub(crate) offset: u64,
}

/// The files that use an address; with `whole`, any part of the extent there.
pub(crate) fn uses_of(s: &Session<'_>, at: Logical, whole: bool) -> anyhow::Result<Vec<Use>> {
    let mut owners = Owners::new(s);
    let found = owners.extent_at(at).map_err(|e| anyhow::anyhow!("extent tree: {e}"))?;
    let Some(extent) = found.filter(|e| e.level.is_none()) else { return Ok(Vec::new()) };
    let users = owners.users(&extent);
    let uses = users.iter().filter_map(|((subvolume, ino, offset), record)| {
        let exact = file_offset(at, *offset, record);
        let offset = if whole { exact.or(Some(*offset)) } else { exact }?;
        Some(Use { subvolume: *subvolume, ino: *ino, offset })
    });
    Ok(uses.collect())
}

pub(super) fn files_at(args: &Args) -> anyhow::Result<()> {
    session(devices(&args.image, &args.how)?, |s| {
        let at = logical(s, args)?;
        let mut owners = Owners::new(s);
        let (extent, users) = match owners.extent_at(at) {
            Ok(Some(e)) if e.level.is_none() => {
                let users = owners.users(&e);
                (Some(e), users)
            }
            Ok(other) => (other, Users::new()),
            Err(e) => {
                s.problems.add(format!("extent tree: {e}; every file was looked at instead"));
                (None, owners.search(at).1)
            }
        };
        let mut paths = Paths::new(s);
        let (mut files, mut left) = (Vec::new(), 0usize);
        for ((tree, ino, offset), record) in &users {
            let exact = file_offset(at, *offset, record);
            if exact.is_none() && !args.whole {
                continue;
            }
            if files.len() >= args.limit {
                left += 1;
                continue;
            }
            files.push(file(&mut paths, (*tree, *ino), *offset, exact, record));
        }
        let trees: Vec<TreeId> = match &extent {
            Some(e) if e.level.is_some() => owners.trees_of(e.start).iter().copied().collect(),
            _ => Vec::new(),
        };
        if args.how.json {
            let ids: Vec<i64> = trees.iter().map(|t| t.0.cast_signed()).collect();
            return print::json(&json!({
                "address": at.0,
                "stripes": places(s, at),
                "block_group": group(s, at),
                "extent": extent.as_ref().map(|e| facts(s, e)),
                "files": files,
                "trees": ids,
                "more": left,
                "complete": left == 0 && !owners.cut,
            }));
        }
        print::line(&head(s, at, extent.as_ref().filter(|_| true)))?;
        for f in &files {
            let offset = match &f["offset"] {
                Value::Null => format!("elsewhere in the extent, item at {}", f["item_offset"]),
                o => format!("offset {o}"),
            };
            let names: Vec<&str> =
                f["paths"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let names = if names.is_empty() { "(no name)".to_owned() } else { names.join("  ") };
            print::line(&format!(
                "  subvolume {} inode {} {offset}  {names}",
                f["subvolume"], f["inode"]
            ))?;
        }
        if !trees.is_empty() {
            let ids: Vec<String> = trees.iter().map(ToString::to_string).collect();
            print::line(&format!("  reached in trees {}", ids.join(", ")))?;
        }
        if left > 0 {
            print::line(&format!("  and {left} more: see --limit"))?;
        }
        if owners.cut {
            s.problems.add("too many nodes share this extent: the list is not complete".into());
        }
        Ok(())
    })
}

/// Names of one file that are shown.
const MOST_NAMES: usize = 16;

fn file(
    paths: &mut Paths<'_>,
    (tree, ino): (TreeId, u64),
    item_offset: u64,
    exact: Option<u64>,
    r: &ExtentRecord,
) -> Value {
    let names = paths.of(tree, ino, MOST_NAMES);
    json!({
        "subvolume": tree.0,
        "inode": ino,
        "offset": exact,
        "item_offset": item_offset,
        "length": r.num_bytes,
        "compression": r.compression.name(),
        "paths": names.iter().map(|p| print::name(p)).collect::<Vec<_>>(),
    })
}
