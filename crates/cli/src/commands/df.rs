//! `larder df`: sizes and free space.

use crate::commands::sync::mounted;
use crate::image::{Access, Image};
use crate::{print, size};
use anyhow::Context;
use larder_fuse::control;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Show size and free space of an image or of what is mounted on a directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  larder df disk.img\n  larder df --json mnt")]
pub(crate) struct Args {
    /// Print JSON, in bytes
    #[arg(long)]
    json: bool,
    /// Read the image even if somebody is using it
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
    Ok(())
}

/// What people want to know of the answer.
fn lines(value: &Value, on_mount: bool) -> Vec<(&'static str, String)> {
    let fs = &value["file_system"];
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
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

/// The same answer as a daemon gives about its mount.
fn of_image(image: &Image) -> anyhow::Result<Value> {
    let (info, space) = (image.fs.info(), image.fs.statfs()?);
    Ok(json!({
        "total": space.total,
        "free": space.free,
        "available": space.available,
        "block_size": space.block_size,
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
