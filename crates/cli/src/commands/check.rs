//! `larder check`: is the file system on an image sound?
//!
//! `larder-check` decides what is checked, and how. Here its report becomes text or JSON, its
//! progress a line on a terminal, and its verdict an exit code.

use crate::failure::Advise;
use crate::image::{Access, advise_content, as_devices, open_devices};
use crate::{devices, print};
use anyhow::bail;
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use larder_check::{Finding, Options, Progress, Report, Severity};
use larder_volume::VolumeError;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Check an image, which is only read: every structure against every other, and with --data all
/// data.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 no errors, 1 errors were found, 2 could not run.
A finding marked as a follow-up only follows from something else that is
missing.

Which files a finding is about:
  larder inspect inode --subvolid TREE --number INODE disk.img
  larder inspect files-at disk.img ADDRESS

Examples:
  larder check disk.img
  larder check --data --json disk.img")]
pub(crate) struct Args {
    /// Also read all file data, every copy of it, and compare it with its checksums
    #[arg(long)]
    data: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Threads to work with [default: as many as there are processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Findings to show of each kind; more are counted
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Read the image even if it is in use; what changes meanwhile looks like damage
    #[arg(long)]
    force: bool,
    /// Image file or block device; several if the file system spans them and they do not lie in
    /// one directory
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
}

impl Args {
    /// A check as `btrfs check` does it.
    pub(crate) fn of(image: &Path, data: bool, force: bool) -> Self {
        Self { data, json: false, threads: None, limit: 20, force, images: vec![image.to_owned()] }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let image = devices::join(&args.images);
    let opened = open_devices(&image, Access::Read { force: args.force })?;
    let options =
        Options { data: args.data, threads: args.threads.unwrap_or(0).into(), keep: args.limit };
    let bar = progress_bar();
    let result = larder_check::check(&as_devices(&opened), &options, &|p| show_progress(&bar, p));
    bar.finish_and_clear();
    let report = advise_content(advise(result), &*opened[0])?;
    let shown = if args.json { print::json(&value_of(&report)) } else { show(&report) };
    // The verdict stands even if nobody reads to the end.
    print::unless_closed(shown).could_not_run()?;
    let errors = report.errors();
    if errors > 0 {
        bail!("{}: {} found", image.display(), print::number(errors, "error"));
    }
    Ok(())
}

/// Adds a hint where nothing could be checked.
fn advise(result: Result<Report, larder_check::Error>) -> anyhow::Result<Report> {
    match result {
        Err(e @ larder_check::Error::Volume(VolumeError::Io { .. })) => Err(e)
            .hint("look at the device's health and cables (`smartctl`, kernel log)")
            .could_not_run(),
        result => result.could_not_run(),
    }
}

fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0);
    let template = "{spinner} {msg:10} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn show_progress(bar: &ProgressBar, progress: &Progress) {
    bar.set_length(progress.total);
    bar.set_position(progress.done);
    bar.set_message(progress.phase.name());
}

fn show(report: &Report) -> anyhow::Result<()> {
    if let Some(dump) = &report.dump {
        print::line("This is a metadata dump. Not judged:")?;
        for what in dump.not_judged() {
            print::line(&format!("  - {what}"))?;
        }
    }
    let mut explained = BTreeSet::new();
    for finding in &report.findings {
        print::line(&line_of(finding))?;
        if explained.insert(finding.kind)
            && !finding.follow_up
            && finding.severity() != Severity::Note
        {
            print::line(&format!("    {}.", finding.kind.meaning()))?;
            print::line(&format!("    What can be done: {}.", finding.kind.remedy()))?;
        }
    }
    for (kind, count) in &report.counts {
        let shown = report.findings.iter().filter(|f| f.kind == *kind).count() as u64;
        let all = count.found + count.follow_ups;
        if all > shown {
            print::line(&format!("{kind}: {} more", all - shown))?;
        }
    }
    let s = &report.stats;
    let verdict = match (report.errors(), report.count(Severity::Warning)) {
        (0, 0) => "no errors".to_owned(),
        (0, w) => format!("no errors, {}", print::number(w, "warning")),
        (e, w) => format!("{}, {}", print::number(e, "error"), print::number(w, "warning")),
    };
    let data = if s.data_bytes > 0 {
        format!(", {} of data", HumanBytes(s.data_bytes))
    } else {
        String::new()
    };
    print::line(&format!(
        "{verdict}: {} nodes, {} extents, {} inodes, {} names{data} in {}",
        s.nodes,
        s.extents,
        s.inodes,
        s.names,
        if s.elapsed < Duration::from_secs(10) {
            format!("{:.1} s", s.elapsed.as_secs_f64())
        } else {
            HumanDuration(s.elapsed).to_string()
        }
    ))
}

/// `error: dir-item-missing: tree 5, (256 DIR_INDEX 3): what is wrong`
fn line_of(finding: &Finding) -> String {
    let mut places = Vec::new();
    if let Some(tree) = finding.tree {
        places.push(format!("tree {tree}"));
    }
    if let Some(key) = finding.key {
        places.push(key.to_string());
    }
    if let Some(at) = finding.address {
        places.push(format!("at {at}"));
    }
    if let Some((device, at)) = finding.device {
        places.push(format!("device {device} at {at}"));
    }
    let place = if places.is_empty() { String::new() } else { format!("{}: ", places.join(", ")) };
    let follow_up = if finding.follow_up { " (follow-up)" } else { "" };
    let what = print::name(finding.what.as_bytes()).replace("\\\\", "\\");
    format!("{}{follow_up}: {}: {place}{what}", finding.severity().name(), finding.kind)
}

fn value_of(report: &Report) -> Value {
    let findings: Vec<Value> = report.findings.iter().map(finding_value).collect();
    let counts: serde_json::Map<String, Value> = report
        .counts
        .iter()
        .map(|(kind, c)| {
            (kind.name().to_owned(), json!({ "found": c.found, "follow_ups": c.follow_ups }))
        })
        .collect();
    let s = &report.stats;
    json!({
        "clean": report.is_clean(),
        "metadata_dump": report.dump.map(|d| d.form_name()),
        "not_judged": report.dump.map(|d| d.not_judged()).unwrap_or_default(),
        "errors": report.errors(),
        "warnings": report.count(Severity::Warning),
        "notes": report.count(Severity::Note),
        "counts": counts,
        "findings": findings,
        "stats": {
            "nodes": s.nodes,
            "extents": s.extents,
            "inodes": s.inodes,
            "names": s.names,
            "file_extents": s.file_extents,
            "data_bytes": s.data_bytes,
            "bytes_read": s.bytes_read,
            "seconds": s.elapsed.as_secs_f64(),
        },
    })
}

fn finding_value(f: &Finding) -> Value {
    json!({
        "kind": f.kind.name(),
        "severity": f.severity().name(),
        "follow_up": f.follow_up,
        "tree": f.tree.map(|t| t.0.cast_signed()),
        "key": f.key.map(|k| json!({
            "objectid": k.objectid.0,
            "type": k.kind.name().map_or_else(|| k.kind.0.to_string(), str::to_owned),
            "offset": k.offset,
        })),
        "address": f.address.map(|a| a.0),
        "device": f.device.map(|(id, at)| json!({ "id": id.0, "offset": at.0 })),
        "what": f.what,
        "meaning": f.kind.meaning(),
        "remedy": f.kind.remedy(),
    })
}
