//! `larder device`: the devices of a file system, one by one: what went wrong on each, and what
//! chunks take of it; adding and removing devices, and how another one takes the place of one
//! (`replace`).

mod replace;

use crate::device_changes::{self, NewDevice};
use crate::device_figures::{COUNTERS, counters, name, number, of, reset};
use crate::device_orders::{Order, Summary, Told, Which};
use crate::failure::Advise;
use crate::image::{Access, Image, advise_filesystem, as_devices, open_devices};
use crate::on_mount::devices::{change_devices, seed_behind};
use crate::{devices, print, size};
use anyhow::{Context, anyhow};
use larder_fs::OpenOptions;
use larder_volume::Device as _;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Show, add and remove the devices of an image, or of what is mounted on a directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder device stats mnt
  larder device usage disk-1.img
  larder device add --size 1G disk-9.img mnt
  larder device remove disk-9.img mnt")]
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
    /// Let another device take the place of one
    #[command(after_help = replace::HELP)]
    Replace(replace::Args),
    /// Add a device: new chunks lie on it, and what is there stays where it is
    #[command(after_help = "\
Examples:
  larder device add --size 1G disk-9.img mnt
  larder device add /dev/sdc1 disk-1.img

A balance spreads what is there over all devices. If the image is a seed
(`larder seed on`), a file system of its own is built upon it: changes go to
the new device, and the seed stays as it is, mounted or not.")]
    Add {
        /// Overwrite what the new device holds
        #[arg(short, long)]
        force: bool,
        /// Make an image file of this size: 10G
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: Option<u64>,
        /// Print JSON, in bytes
        #[arg(long)]
        json: bool,
        /// The new device
        #[arg(value_name = "DEVICE")]
        device: PathBuf,
        /// Image, block device, or directory of a mount
        #[arg(value_name = "IMAGE|DIR")]
        target: PathBuf,
    },
    /// Remove a device, after what it holds was moved to the others
    #[command(
        visible_alias = "delete",
        after_help = "\
Examples:
  larder device remove disk-9.img mnt
  larder device remove 2 disk-1.img
  larder device remove missing disk-1.img

Ctrl-C ends it: what has moved has moved, and the device is still a member. It
is refused if the others have no room, or if a profile needs more devices.

Exit codes: 0 removed, 1 it failed, 2 refused or could not run."
    )]
    Remove {
        /// Print JSON, in bytes
        #[arg(long)]
        json: bool,
        /// Name or number of the device; `missing` for the first that is missing
        #[arg(value_name = "DEVICE")]
        device: Which,
        /// Image, block device, or directory of a mount
        #[arg(value_name = "IMAGE|DIR")]
        target: PathBuf,
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
        What::Replace(args) => replace::run(args),
        What::Usage { common } => usage(common),
        What::Add { force, size, json, device, target } => {
            let seed = seed_of(target)?;
            let new = NewDevice { path: device, size: *size, force: *force };
            let summary = match &seed {
                Some(seed) => sprout(&new, seed)?,
                None => add(&new, target)?,
            };
            tell(&summary, *json, &added(device, target, seed.as_deref(), &summary))
        }
        What::Remove { json, device, target } => {
            let summary = remove(device.clone(), target)?;
            let name = summary.name.as_deref().map_or_else(String::new, print::harmless);
            let name = if name.is_empty() { "it was missing".to_owned() } else { name };
            tell(&summary, *json, &format!("Device {} ({name}) is removed", summary.device))
        }
    }
}

fn tell(summary: &Summary, json: bool, text: &str) -> anyhow::Result<()> {
    if json { print::json(summary) } else { print::line(text) }
}

fn added(device: &Path, target: &Path, seed: Option<&Path>, summary: &Summary) -> String {
    let (shown, id) = (print::path(device), summary.device);
    let Some(seed) = seed else { return format!("{shown} is device {id} now") };
    let seed = print::path(seed);
    let built = format!("{shown} is a file system of its own now, built upon {seed}");
    if target.is_dir() {
        return format!(
            "{built}: `larder mount {shown} DIR` mounts it, and this is still the seed"
        );
    }
    format!("{built}: it is mounted by its name")
}

/// The seed that a target is, or that is mounted there. `None`: it is something else.
fn seed_of(target: &Path) -> anyhow::Result<Option<PathBuf>> {
    if target.is_dir() {
        return seed_behind(target);
    }
    let is_seed = devices::are_seeds(&devices::names(target));
    Ok(is_seed.then(|| target.to_owned()))
}

/// Builds a file system upon a seed, with a device of its own.
fn sprout(new: &NewDevice<'_>, seed: &Path) -> anyhow::Result<Summary> {
    let seeds = open_devices(seed, Access::Write)?;
    new.add(|device| {
        let (size, name) = (device.size(), device.name());
        let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
        let opened = larder_fs::sprout(as_devices(&seeds), Arc::new(device), options);
        let fs = advise_filesystem(opened, &print::path(seed))?;
        let device = fs.devices().last().map_or(0, |device| device.id);
        fs.close().with_context(|| format!("{name}: committing"))?;
        let name = Some(name);
        Ok(Summary { outcome: Told::Done, device, name, before: 0, size, smallest: None })
    })
}

/// Adds a device.
fn add(new: &NewDevice<'_>, target: &Path) -> anyhow::Result<Summary> {
    if target.is_dir() {
        return new.add(|device| change_devices(target, Order::Add, Some(device)));
    }
    let image = Image::open(target, Access::Write, None)?;
    let summary =
        new.add(|device| device_changes::here(&image.fs, &Order::Add, Some(Arc::new(device))));
    let closed = image.close();
    summary.and_then(|summary| closed.map(|()| summary))
}

/// The same device by its number, if it is named by a path and is one of the target's. The daemon
/// knows it by the name that its mount was given, which may be another.
fn by_number(which: Which, target: &Path) -> Which {
    let Which::Path(path) = &which else { return which };
    let Some(superblock) = devices::superblock_of(path) else { return which };
    let uuid = uuid::Uuid::from_bytes(superblock.dev_item.uuid).to_string();
    let all = of(target, false).unwrap_or_default();
    let found = all.iter().find(|device| device["uuid"] == uuid.as_str());
    match found.and_then(|device| device["id"].as_u64()) {
        Some(id) => Which::Id(id),
        None => which,
    }
}

/// Removes a device.
pub(crate) fn remove(which: Which, target: &Path) -> anyhow::Result<Summary> {
    let order = Order::Remove(by_number(which, target).whole());
    if target.is_dir() {
        return change_devices(target, order, None);
    }
    if matches!(order, Order::Remove(Which::Missing)) {
        crate::image::allow_degraded();
    }
    let image = Image::open(target, Access::Write, None)?;
    let summary = device_changes::here(&image.fs, &order, None);
    let closed = image.close();
    summary.and_then(|summary| closed.map(|()| summary))
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
