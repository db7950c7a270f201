//! `larder df`: sizes and free space, and in words what is full and what helps.
//!
//! The question behind most reports is "no space left, but df says there is". A chunk of the device
//! is for data or for metadata, so one of them may be full while the other is not. This command
//! says which one is.

use crate::image::{Access, Image};
use crate::mounted::mounted;
use crate::{print, size};
use anyhow::Context;
use larder_fuse::control;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Show size and free space of an image or of what is mounted on a directory: what is full, and
/// what helps.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  larder df disk.img\n  larder df --json mnt")]
pub(crate) struct Args {
    /// Print JSON, in bytes
    #[arg(long)]
    json: bool,
    /// Read the image even if it is in use
    #[arg(long)]
    force: bool,
    /// Image, block device, or directory of a mount
    #[arg(value_name = "IMAGE|DIR")]
    target: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let on_mount = args.target.is_dir() || larder_fuse::mount::is_dead(&args.target);
    let value = if on_mount {
        let text = mounted(&args.target, control::df)?;
        serde_json::from_str(&text).context("the daemon's answer is not JSON")?
    } else {
        let image = Image::open(&args.target, Access::Read { force: args.force }, None)?;
        let value = of_image(&image)?;
        image.close()?;
        value
    };
    if args.json {
        return print::json(&value);
    }
    for (name, text) in lines(&value, on_mount) {
        print::line(&format!("{name:<11} {text}"))?;
    }
    let space = &value["space"];
    if space.is_object() {
        print::line("")?;
        for line in table(space) {
            print::line(&line)?;
        }
        print::line("")?;
        for line in explanation(space).iter().chain(&balance(&value)) {
            print::line(line)?;
        }
    }
    Ok(())
}

fn number(v: &Value) -> u64 {
    v.as_u64().unwrap_or(0)
}

/// What people want to know of the answer.
fn lines(value: &Value, on_mount: bool) -> Vec<(&'static str, String)> {
    let fs = &value["file_system"];
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), |s| print::name(s.as_bytes()));
    let bytes = |v: &Value| v.as_u64().map_or_else(|| text(v), size::human);
    let mut out = vec![
        ("Label", text(&fs["label"])),
        ("UUID", text(&fs["fsid"])),
        ("Size", bytes(&value["total"])),
        ("Used", bytes(&fs["bytes_used"])),
        ("Free", bytes(&value["free"])),
        ("Available", bytes(&value["available"])),
        ("Generation", text(&fs["generation"])),
    ];
    // An image is opened read-only here; that says nothing about it.
    if on_mount && fs["read_only"] == true {
        out.push(("State", "read-only".into()));
    }
    out
}

/// Kinds of space with their names.
fn kinds(space: &Value) -> Vec<(&'static str, &Value)> {
    let first = if space["mixed"] == true {
        vec![("Data+Metadata", &space["data"])]
    } else {
        vec![("Data", &space["data"]), ("Metadata", &space["metadata"])]
    };
    first.into_iter().chain([("System", &space["system"])]).collect()
}

/// Where the bytes are.
fn table(space: &Value) -> Vec<String> {
    const COLUMNS: [(&str, &str); 7] = [
        ("total", "total"),
        ("used", "used"),
        ("pinned", "pinned"),
        ("reserved", "reserved"),
        ("kept", "kept"),
        ("held back", "held"),
        ("available", "available"),
    ];
    // Only parity holds anything back.
    let held = kinds(space).iter().any(|(_, kind)| number(&kind["held"]) > 0);
    let columns: Vec<_> = COLUMNS.into_iter().filter(|(_, key)| held || *key != "held").collect();
    let row = |name: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|c| format!(" {c:>10}")).collect();
        format!("{name:<21}{cells}")
    };
    let titles: Vec<String> = columns.iter().map(|(title, _)| (*title).to_owned()).collect();
    let mut out = vec![row("", &titles)];
    for (name, kind) in kinds(space) {
        let profile = kind["profile"].as_str().unwrap_or("?");
        let cells: Vec<String> =
            columns.iter().map(|(_, key)| size::human(number(&kind[*key]))).collect();
        out.push(row(&format!("{name} ({profile})"), &cells));
    }
    out.push(row("Unallocated", &[size::human(number(&space["unallocated"]))]));
    out
}

/// Less than this available counts as full: a chunk for data that cannot take a file of some size
/// is of no use.
const LITTLE: u64 = 1 << 20;

/// What is full, what that means and what helps.
fn explanation(space: &Value) -> Vec<String> {
    let told = Told::new(space);
    let mut out = told.what_is_full();
    out.extend(told.pinned());
    out.extend(told.held());
    out.extend(told.sparse_chunks());
    out.extend(told.reserved());
    out
}

/// What a balance would bring.
fn balance(value: &Value) -> Option<String> {
    let plan = &value["balance"];
    let frees = number(&plan["data"]["frees"]) + number(&plan["metadata"]["frees"]);
    let moves = number(&plan["data"]["moves"]) + number(&plan["metadata"]["moves"]);
    (frees > 0).then(|| {
        format!(
            "A balance would free {} of device space, and move {} for that: `larder balance`.",
            size::human(frees),
            size::human(moves)
        )
    })
}

/// The daemon's answer about space, and what it says is full.
struct Told<'a> {
    space: &'a Value,
    data: &'a Value,
    metadata: &'a Value,
    /// Data and metadata share their chunks.
    mixed: bool,
    data_full: bool,
    metadata_full: bool,
}

impl<'a> Told<'a> {
    fn new(space: &'a Value) -> Self {
        let (data, metadata) = (&space["data"], &space["metadata"]);
        let room = number(&data["available"]) >= LITTLE || number(&data["next_chunk"]) > 0;
        Self {
            space,
            data,
            metadata,
            mixed: space["mixed"] == true,
            data_full: !room,
            metadata_full: space["metadata_full"] == true,
        }
    }

    fn what_is_full(&self) -> Vec<String> {
        if self.mixed && (self.data_full || self.metadata_full) {
            let full = "The file system is full. Deleting always works, and gives back what is \
                        deleted.";
            vec![full.to_owned()]
        } else if self.metadata_full {
            self.metadata_is_full()
        } else if self.data_full {
            self.data_is_full()
        } else {
            vec![format!(
                "Not full: {} is available for data, and {} of device space can become new \
                 chunks for data or metadata.",
                human(&self.data["available"]),
                human(&self.space["unallocated"])
            )]
        }
    }

    fn metadata_is_full(&self) -> Vec<String> {
        vec![
            format!(
                "Metadata is full: no file or directory can be made or grow, although {} is free \
                 for data.",
                human(&self.data["available"])
            ),
            format!(
                "Its chunks have {} left beyond the {} that commits and deletions keep, and the \
                 device has no room for another chunk ({} unallocated).",
                human(&self.metadata["available"]),
                human(&self.metadata["kept"]),
                human(&self.space["unallocated"])
            ),
            "What helps: deleting files (that always works), or what is said about half-empty \
             chunks."
                .to_owned(),
        ]
    }

    fn data_is_full(&self) -> Vec<String> {
        let mut out = vec![format!(
            "Data is full: {} is left in its chunks, and the device has no room for another one \
             ({} unallocated).",
            human(&self.data["available"]),
            human(&self.space["unallocated"])
        )];
        if number(&self.metadata["available"]) > LITTLE {
            out.push(format!(
                "The {} that are free in metadata take file names, attributes and files of up to \
                 2 KiB, but no more data.",
                human(&self.metadata["available"])
            ));
        }
        out.push(
            "What helps: deleting files gives back what they take alone; what snapshots share \
             stays."
                .to_owned(),
        );
        out
    }

    fn pinned(&self) -> Option<String> {
        let of_metadata = if self.mixed { 0 } else { number(&self.metadata["pinned"]) };
        let pinned = number(&self.data["pinned"]) + of_metadata;
        (pinned > 0).then(|| {
            format!(
                "{} was deleted or replaced and is free after the next commit (`larder sync` \
                 makes one, and so does a write that finds no space).",
                size::human(pinned)
            )
        })
    }

    fn held(&self) -> Option<String> {
        let of_metadata = if self.mixed { 0 } else { number(&self.metadata["held"]) };
        let held = number(&self.data["held"]) + of_metadata;
        (held > 0).then(|| {
            format!(
                "{} is free, but held back by stripes with parity that are partly in use: nothing \
                 is written beside what is safe already. It comes back when the rest of these \
                 stripes is deleted or replaced, or moved by a balance.",
                size::human(held)
            )
        })
    }

    /// The kind that is full, and the other one with its name; `None` where nothing is, or both
    /// share their chunks.
    fn full_and_other(&self) -> Option<(&'a Value, &'a Value, &'static str)> {
        match (self.mixed, self.metadata_full, self.data_full) {
            (false, true, _) => Some((self.metadata, self.data, "data")),
            (false, false, true) => Some((self.data, self.metadata, "metadata")),
            _ => None,
        }
    }

    fn sparse_chunks(&self) -> Option<String> {
        let (_, other, name) = self.full_and_other()?;
        let chunks = number(&other["sparse_chunks"]);
        (chunks > 1).then(|| {
            format!(
                "{chunks} chunks for {name} are less than half full and hold {} free: `larder \
                 balance` gives chunks back to the device.",
                human(&other["sparse_free"]),
            )
        })
    }

    fn reserved(&self) -> Option<String> {
        let (full, ..) = self.full_and_other()?;
        (number(&full["reserved"]) > LITTLE).then(|| {
            format!(
                "{} is promised to operations under way and to the next commit, more than they \
                 will need.",
                human(&full["reserved"])
            )
        })
    }
}

fn human(v: &Value) -> String {
    size::human(number(v))
}

/// The same answer as a daemon gives about its mount.
fn of_image(image: &Image) -> anyhow::Result<Value> {
    let (info, space) = (image.fs.info(), image.fs.statfs()?);
    Ok(json!({
        "total": space.total,
        "free": space.free,
        "available": space.available,
        "block_size": space.block_size,
        "space": serde_json::to_value(image.fs.space_usage())?,
        "balance": serde_json::to_value(image.fs.balance_plan())?,
        "file_system": {
            "fsid": print::uuid(info.fsid),
            "label": String::from_utf8_lossy(&info.label),
            "generation": info.generation.0,
            "nodesize": info.nodesize,
            "sectorsize": info.sectorsize,
            "checksum": info.csum.name(),
            "total_bytes": info.total_bytes,
            "bytes_used": info.bytes_used,
            "read_only": info.read_only,
            "has_unreplayed_log": info.has_unreplayed_log,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Space of one kind.
    #[derive(Default)]
    struct Kind {
        available: u64,
        next_chunk: u64,
        sparse_chunks: u64,
    }

    impl Kind {
        fn value(&self) -> Value {
            json!({
                "profile": "single", "total": 1u64 << 30, "used": (1u64 << 30) - self.available,
                "pinned": 0, "reserved": 0, "kept": 4 << 20, "available": self.available,
                "next_chunk": self.next_chunk, "sparse_chunks": self.sparse_chunks,
                "sparse_free": self.sparse_chunks * (100 << 20),
            })
        }
    }

    fn available(available: u64) -> Value {
        Kind { available, ..Kind::default() }.value()
    }

    fn said(mixed: bool, data: Value, metadata: Value, metadata_full: bool) -> String {
        let space = json!({
            "mixed": mixed, "unallocated": 1 << 20, "metadata_full": metadata_full, "data": data,
            "metadata": metadata, "system": available(8 << 20),
        });
        assert_eq!(table(&space).len(), if mixed { 4 } else { 5 });
        explanation(&space).join("\n")
    }

    #[test]
    fn what_is_full_is_said_and_what_helps() {
        let text = said(
            false,
            Kind { available: 300 << 20, sparse_chunks: 2, ..Kind::default() }.value(),
            available(0),
            true,
        );
        for says in [
            "Metadata is full",
            "300.00MiB is free for data",
            "2 chunks for data",
            "larder balance",
        ] {
            assert!(text.contains(says), "{says:?} is not in {text}");
        }
        let text = said(
            false,
            available(0),
            Kind { available: 50 << 20, sparse_chunks: 3, ..Kind::default() }.value(),
            false,
        );
        for says in [
            "Data is full",
            "50.00MiB that are free in metadata",
            "3 chunks for metadata",
            "larder balance",
        ] {
            assert!(text.contains(says), "{says:?} is not in {text}");
        }
        let sparse = || Kind { sparse_chunks: 3, ..Kind::default() }.value();
        let text = said(true, sparse(), sparse(), true);
        assert!(text.contains("file system is full") && !text.contains("balance"), "{text}");
    }

    #[test]
    fn what_a_balance_brings_is_said_if_it_brings_anything() {
        let of = |frees: u64| {
            let (data, metadata) = (json!({ "frees": frees, "moves": 3 << 20 }), json!({}));
            balance(&json!({ "balance": { "data": data, "metadata": metadata } }))
        };
        let text = of(1 << 30).unwrap();
        assert!(text.contains("free 1.00GiB") && text.contains("move 3.00MiB"), "{text}");
        assert_eq!(of(0), None);
        // A daemon of another version says nothing about it.
        assert_eq!(balance(&json!({})), None);
    }

    #[test]
    fn room_is_not_called_full() {
        let growing = || Kind { next_chunk: 64 << 20, ..Kind::default() }.value();
        let mut data = growing();
        data["pinned"] = (5 << 20).into();
        let text = said(false, data, growing(), false);
        assert!(text.starts_with("Not full") && text.contains("5.00MiB was deleted"), "{text}");
    }
}
