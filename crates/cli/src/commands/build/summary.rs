//! What a build made, and what took the space.

use super::progress::rate;
use crate::print;
use crate::size::{self, Share as Part};
use larder_build::Report;
use larder_build::report::Share;
use larder_sources::{Entry, Kind, Sources};
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

/// Rows of each list.
const ROWS: usize = 8;

/// The summary for people.
pub(super) fn show(image: &Path, r: &Report, time: Duration, is_full: bool) -> anyhow::Result<()> {
    let mut out = String::new();
    let inodes = &r.inodes;
    let all = inodes.files + inodes.directories + inodes.symlinks + inodes.devices + inodes.others;
    let rate = size::human(rate(r.total.size, time));
    let _ = writeln!(out, "Image:     {}", print::path(image));
    let _ = writeln!(out, "UUID:      {}", print::uuid(r.uuid));
    let _ = writeln!(out, "Size:      {}", size::human(r.size));
    if is_full {
        let _ = writeln!(
            out,
            "           It is full. To write to it, let it grow: `truncate -s +SIZE` the file, \
             mount it on\n           Linux, `btrfs filesystem resize max` the mount. --free SIZE \
             keeps room instead."
        );
    }
    let _ = writeln!(
        out,
        "Holds:     {} names, {all} inodes ({} files), {} in {:.1} s, {rate}/s",
        r.names,
        inodes.files,
        size::human(r.total.size),
        time.as_secs_f64()
    );
    let _ = writeln!(
        out,
        "Takes:     {} data, {} metadata",
        size::human(r.data),
        size::human(r.metadata)
    );
    if r.subvolumes > 1 {
        let _ = writeln!(out, "Has:       {}", print::number(r.subvolumes, "subvolume"));
    }
    if r.compressed.from > 0 {
        let percent = Part { part: r.compressed.to, whole: r.compressed.from }.percent();
        let (from, to) = (size::human(r.compressed.from), size::human(r.compressed.to));
        let _ = writeln!(out, "Packed:    {from} to {to} ({percent:.0} %)");
    }
    if r.shared > 0 {
        let _ = writeln!(out, "Shared:    {}", size::human(r.shared));
    }
    list_of(&mut out, "By directory", &r.directories, |name| match name {
        "" => "(top)".to_owned(),
        name => format!("/{name}"),
    });
    list_of(&mut out, "By extension", &r.extensions, |name| match name {
        "" => "(none)".to_owned(),
        name => format!(".{name}"),
    });
    print::line(out.trim_end())
}

/// The largest of a list, and the others together.
fn list_of(out: &mut String, title: &str, list: &[(String, Share)], name: fn(&str) -> String) {
    if list.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}:           files       size      takes");
    let (shown, others) = list.split_at(list.len().min(ROWS));
    for (key, share) in shown {
        row(out, &name(key), *share);
    }
    if !others.is_empty() {
        let mut sum = Share::default();
        for (_, share) in others {
            sum.files += share.files;
            sum.size += share.size;
            sum.stored += share.stored;
            sum.inline += share.inline;
        }
        row(out, &format!("({} others)", others.len()), sum);
    }
}

fn row(out: &mut String, name: &str, share: Share) {
    let (size, takes) = (size::human(share.size), size::human(share.stored + share.inline));
    let _ = writeln!(out, "  {name:<20}  {:>8} {size:>10} {takes:>10}", share.files);
}

/// The same for programs.
pub(super) fn json(r: &Report) -> anyhow::Result<()> {
    let mut value = serde_json::to_value(r)?;
    value["uuid"] = print::uuid(r.uuid).into();
    print::json(&value)
}

/// Lists what an image would hold.
pub(super) fn list(sources: &Sources, as_json: bool) -> anyhow::Result<()> {
    let (mut names, mut bytes) = (0u64, 0u64);
    for entry in sources.entries()? {
        let entry = entry?;
        names += 1;
        if let Kind::File { size, .. } = entry.kind {
            bytes += size;
        }
        if !as_json {
            print::line(&line(&entry))?;
        }
    }
    if as_json {
        return print::json(&json!({ "names": names, "bytes": bytes }));
    }
    print::say(&format!("larder: {} with {}", print::entries(names), size::human(bytes)));
    Ok(())
}

/// `drwxr-xr-x 0:0 - etc`.
fn line(entry: &Entry) -> String {
    let a = &entry.attributes;
    let (letter, size) = match &entry.kind {
        Kind::Directory => ('d', "-".to_owned()),
        Kind::File { size, .. } => ('-', size.to_string()),
        Kind::Symlink(_) => ('l', "-".to_owned()),
        Kind::CharDevice { major, minor } => ('c', format!("{major},{minor}")),
        Kind::BlockDevice { major, minor } => ('b', format!("{major},{minor}")),
        Kind::Fifo => ('p', "-".to_owned()),
        Kind::Socket => ('s', "-".to_owned()),
    };
    let mut path = print::name(entry.path.as_bytes());
    if path.is_empty() {
        path.push('.');
    }
    if let Kind::Symlink(target) = &entry.kind {
        path += " -> ";
        path += &print::name(target);
    }
    format!("{letter}{:04o} {}:{} {size} {path}", a.permissions, a.uid, a.gid)
}
