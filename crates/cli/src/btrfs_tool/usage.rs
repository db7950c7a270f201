//! Space as `btrfs filesystem usage` and `btrfs device usage` print it: sums, then each kind with
//! what it takes of the device, as lines or as a table.

use super::Done;
use super::mounted::{Mounted, Space};
use super::units::Units;
use crate::device_figures::{name, number};
use crate::print;
use serde_json::Value;
use std::fmt::Write as _;

/// Sums over all kinds, in bytes of the device.
struct Sums {
    size: u64,
    unallocated: u64,
    used: u64,
    free: u64,
    /// What is free if all new chunks were of the kind with the most copies.
    free_at_least: u64,
}

impl Sums {
    fn of(mounted: &Mounted, spaces: &[Space]) -> Self {
        let (size, unallocated) = (mounted.size(), mounted.unallocated());
        let data = &spaces[0];
        let most = spaces.iter().map(|s| s.copies).max().unwrap_or(1).max(1);
        let left = data.total.saturating_sub(data.used);
        Self {
            size,
            unallocated,
            used: spaces.iter().map(|s| s.used * s.copies).sum(),
            free: left + unallocated / data.copies.max(1),
            free_at_least: left + unallocated / most,
        }
    }
}

pub(super) fn file_system(mounted: &Mounted, units: Units, table: bool) -> Done {
    let spaces = mounted.spaces();
    let mut out = overall(mounted, &spaces, units);
    out.push('\n');
    if table {
        out += &tabular(mounted, &spaces, units);
    } else {
        out += &linear(mounted, &spaces, units);
    }
    Ok(print::line(out.trim_end_matches('\n'))?)
}

fn overall(mounted: &Mounted, spaces: &[Space], units: Units) -> String {
    let sums = Sums::of(mounted, spaces);
    // Other units than those for people may need the width of bytes.
    let width = if units.are_default() { 10 } else { 18 };
    let size = |bytes| format!("{:>width$}", units.text(bytes));
    #[allow(clippy::cast_precision_loss)]
    let ratio = |copies: u64| format!("{:>width$.2}", copies as f64);
    let metadata = spaces.iter().rfind(|s| s.name.contains("Metadata")).unwrap_or(&spaces[0]);
    let mut out = String::from("Overall:\n");
    for (name, value) in [
        ("Device size:\t\t", size(sums.size)),
        ("Device allocated:\t\t", size(sums.size.saturating_sub(sums.unallocated))),
        ("Device unallocated:\t\t", size(sums.unallocated)),
        ("Device missing:\t\t", size(0)),
        ("Device slack:\t\t", size(0)),
        ("Used:\t\t\t", size(sums.used)),
        (
            "Free (estimated):\t\t",
            format!("{}\t(min: {})", size(sums.free), units.text(sums.free_at_least)),
        ),
        ("Free (statfs, df):\t\t", size(mounted.available())),
        ("Data ratio:\t\t\t", ratio(spaces[0].copies)),
        ("Metadata ratio:\t\t", ratio(metadata.copies)),
        ("Global reserve:\t\t", format!("{}\t(used: {})", size(mounted.reserve()), units.text(0))),
        ("Multiple profiles:\t\t", format!("{:>width$}", "no")),
    ] {
        let _ = writeln!(out, "    {name}{value}");
    }
    out
}

#[allow(clippy::cast_precision_loss)]
fn linear(mounted: &Mounted, spaces: &[Space], units: Units) -> String {
    let mut out = String::new();
    let source = print::harmless(&mounted.source);
    for s in spaces {
        let percent = if s.total == 0 { 0.0 } else { 100.0 * s.used as f64 / s.total as f64 };
        let _ = writeln!(
            out,
            "{},{}: Size:{}, Used:{} ({percent:.2}%)\n   {source}\t{:>10}\n",
            s.name,
            s.profile,
            units.text(s.total),
            units.text(s.used),
            units.text(s.total * s.copies)
        );
    }
    let _ = writeln!(out, "Unallocated:\n   {source}\t{:>10}", units.text(mounted.unallocated()));
    out
}

fn tabular(mounted: &Mounted, spaces: &[Space], units: Units) -> String {
    let kinds = |of: &dyn Fn(&Space) -> String| spaces.iter().map(of).collect::<Vec<_>>();
    let row = |first: [&str; 2], kinds: Vec<String>, last: [String; 3]| -> Vec<String> {
        first.map(str::to_owned).into_iter().chain(kinds).chain(last).collect()
    };
    let blank = || [String::new(), String::new(), String::new()];
    let titles = ["Unallocated", "Total", "Slack"].map(str::to_owned);
    let (left, size) = (units.text(mounted.unallocated()), units.text(mounted.size()));
    let source = print::harmless(&mounted.source);
    let heads = [
        row(["", ""], kinds(&|s| s.name.to_owned()), blank()),
        row(["Id", "Path"], kinds(&|s| s.profile.clone()), titles),
    ];
    let device = row(
        ["1", &source],
        kinds(&|s| units.text(s.total * s.copies)),
        [left.clone(), size.clone(), "-".to_owned()],
    );
    let sums = [
        row(["", "Total"], kinds(&|s| units.text(s.total)), [left, size, units.text(0)]),
        row(["", "Used"], kinds(&|s| units.text(s.used)), blank()),
    ];
    let rows: Vec<&Vec<String>> = heads.iter().chain([&device]).chain(&sums).collect();
    let widths: Vec<usize> = (0..device.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let line = |row: &[String], numbers: bool| {
        let cells = row.iter().zip(&widths).enumerate().map(|(n, (cell, &width))| {
            if numbers && n != 1 { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join(" ") + "\n"
    };
    let rule = widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().join(" ") + "\n";
    [
        line(&heads[0], false),
        line(&heads[1], false),
        rule.clone(),
        line(&device, true),
        rule,
        line(&sums[0], true),
        line(&sums[1], true),
    ]
    .concat()
}

pub(super) fn device(mounted: &Mounted, devices: &[Value], units: Units) -> Done {
    let mut out = String::new();
    for device in devices {
        // The mount table knows the name that was mounted.
        let shown = match devices.len() {
            1 => mounted.source.clone(),
            _ => name(device),
        };
        let _ = writeln!(out, "{}, ID: {}", print::harmless(&shown), device["id"]);
        for (name, bytes) in parts(device) {
            let width = 32usize.saturating_sub(name.len());
            let _ = writeln!(out, "   {name}{:>width$}", units.text(bytes));
        }
        out.push('\n');
    }
    out.pop();
    Ok(print::line(&out)?)
}

/// What is on a device, in the order of btrfs-progs.
fn parts(device: &Value) -> Vec<(String, u64)> {
    let size = number(&device["size"]);
    let text = |part: &Value, key: &str| part[key].as_str().unwrap_or_default().to_owned();
    let profile = |part: &Value| match text(part, "profile").as_str() {
        "single" => "single".to_owned(),
        other => other.to_uppercase(),
    };
    let mut chunks: Vec<(String, u64)> = device["allocated"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|p| (format!("{},{}:", text(p, "kind"), profile(p)), number(&p["bytes"])))
        .collect();
    // Data, metadata, system.
    chunks.sort();
    let taken: u64 = chunks.iter().map(|(_, bytes)| bytes).sum();
    let mut parts = vec![("Device size:".to_owned(), size), ("Device slack:".to_owned(), 0)];
    parts.append(&mut chunks);
    // Linux counts here also what it keeps free for the superblock.
    parts.push(("Unallocated:".to_owned(), size.saturating_sub(taken)));
    parts
}
