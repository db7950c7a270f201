//! `larder device`: the devices of a file system, one by one: what went wrong on each, and what
//! chunks take of it.

use crate::device_figures::{COUNTERS, counters, name, number, of, reset};
use crate::failure::Advise;
use crate::{print, size};
use anyhow::anyhow;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Show the devices of an image or of what is mounted on a directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder device stats mnt
  larder device usage disk-1.img")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show how many errors each device had, over its life
    #[command(after_help = "\
Examples:
  larder device stats mnt
  larder device stats --reset disk-1.img

Counted are failed writes, reads and flushes, contents that do not match their
checksum, and tree blocks that are older than they should be. The counts are
kept with the file system; Linux shows and continues the same ones. A device is
current, behind (it was away; `larder scrub` brings it up to date), failed
(since the mount), or missing.")]
    Stats {
        /// Set all counts to 0 after they are shown
        #[arg(short = 'z', long)]
        reset: bool,
        /// Fail if a count is not 0
        #[arg(short, long)]
        check: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Show what chunks take of each device
    #[command(after_help = "Example:\n  larder device usage mnt")]
    Usage {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, clap::Args)]
struct Common {
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
    match &args.what {
        What::Stats { reset, check, common } => stats(common, *reset, *check),
        What::Usage { common } => usage(common),
    }
}

fn stats(common: &Common, zero: bool, check: bool) -> anyhow::Result<()> {
    let devices = of(&common.target, common.force)?;
    if common.json {
        let one = |d: &Value| {
            json!({
                "id": d["id"], "uuid": d["uuid"], "name": d["name"], "state": d["state"],
                "errors": d["errors"],
            })
        };
        print::json(&devices.iter().map(one).collect::<Vec<_>>())?;
    } else {
        for line in table(&devices) {
            print::line(&line)?;
        }
    }
    if zero {
        reset(&common.target)?;
    }
    let bad = devices.iter().find(|d| counters(d).iter().any(|n| *n != 0));
    match bad.filter(|_| check) {
        None => Ok(()),
        Some(device) => Err(anyhow!("device {} ({}) had errors", device["id"], name(device)))
            .hint("`larder scrub` finds and mends what is bad; --reset begins to count anew"),
    }
}

/// One line for each device.
fn table(devices: &[Value]) -> Vec<String> {
    let titles = COUNTERS.map(|(_, title)| title.trim_end_matches(" errors").to_owned());
    let row = |id: &str, numbers: &[String], state: &str, name: &str| {
        let numbers: String = numbers.iter().map(|n| format!(" {n:>10}")).collect();
        format!("{id:>6}{numbers}  {state:<8} {name}")
    };
    let mut lines = vec![row("Device", &titles, "State", "Name")];
    for device in devices {
        let numbers = counters(device).map(|n| n.to_string());
        let state = device["state"].as_str().unwrap_or_default();
        lines.push(row(&device["id"].to_string(), &numbers, state, &shown(device)));
    }
    lines
}

/// Its name, and the uuid of one that has none.
fn shown(device: &Value) -> String {
    let known = device["name"].as_str().or(device["uuid"].as_str());
    print::name(known.unwrap_or_default().as_bytes())
}

fn usage(common: &Common) -> anyhow::Result<()> {
    let devices = of(&common.target, common.force)?;
    if common.json {
        return print::json(&devices);
    }
    for (n, device) in devices.iter().enumerate() {
        if n > 0 {
            print::line("")?;
        }
        let state = device["state"].as_str().filter(|state| *state != "current");
        let state = state.map_or_else(String::new, |state| format!(" ({state})"));
        print::line(&format!("Device {}{state}: {}", device["id"], shown(device)))?;
        let line =
            |what: &str, bytes| print::line(&format!("  {what:<24}{:>10}", size::human(bytes)));
        line("Size", number(&device["size"]))?;
        for part in device["allocated"].as_array().into_iter().flatten() {
            let text = |key: &str| part[key].as_str().unwrap_or_default().to_owned();
            line(&format!("{} ({})", text("kind"), text("profile")), number(&part["bytes"]))?;
        }
        line("Unallocated", number(&device["unallocated"]))?;
    }
    Ok(())
}
