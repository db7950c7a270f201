//! Every copy of the superblock on every device, field by field.

use crate::failure::Advise;
use crate::image::advise_content;
use crate::print;
use anyhow::bail;
use larder_format::superblock::BackupRoot;
use larder_format::{Superblock, Support};
use larder_volume::{Device, SuperCopy, read_all_superblocks, read_superblock};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::Arc;

/// Shows the superblocks of all devices, those of each together.
pub(super) fn run(devices: &[Arc<dyn Device>], json: bool) -> anyhow::Result<()> {
    let mut values = Vec::new();
    let (mut bad, mut all) = (0, 0);
    for device in devices {
        let copies = read_all_superblocks(&**device);
        advise_content(is_ours(&**device, &copies), &**device)?;
        let dump = copies.iter().any(is_dump);
        for copy in &copies {
            let facts = match &copy.content {
                Ok(sb) => super_value(sb),
                Err(_) if dump && is_other(copy) => {
                    json!({ "missing": "a metadata dump has the first copy only" })
                }
                Err(e) => {
                    bad += 1;
                    json!({ "error": e.to_string() })
                }
            };
            values.push(placed(&**device, copy, facts));
        }
        all += copies.len();
    }
    if json {
        print::json(&values)?;
    } else {
        for value in &values {
            print::line(&text_of(value))?;
        }
    }
    if bad > 0 {
        bail!("{bad} of {all} superblock copies cannot be used");
    }
    Ok(())
}

/// What a copy says, behind where it lies.
fn placed(device: &dyn Device, copy: &SuperCopy, facts: Value) -> Value {
    let mut all = json!({ "device": device.name(), "bytenr": copy.at.0 });
    if let (Some(all), Value::Object(facts)) = (all.as_object_mut(), facts) {
        all.extend(facts);
    }
    all
}

fn is_other(copy: &SuperCopy) -> bool {
    matches!(&copy.content, Err(e) if e.to_string().contains("not a btrfs"))
}

fn is_dump(copy: &SuperCopy) -> bool {
    matches!(&copy.content, Ok(sb) if sb.metadata_dump().is_some())
}

/// Refuses a device where nothing looks like a superblock anywhere: it is not damaged, but
/// something else.
fn is_ours(device: &dyn Device, copies: &[SuperCopy]) -> anyhow::Result<()> {
    if !copies.iter().all(is_other) {
        return Ok(());
    }
    let error =
        read_superblock(device).err().map_or_else(|| anyhow::anyhow!("no superblock"), Into::into);
    Err(error).could_not_run()
}

/// A JSON object as lines `name  value`.
fn text_of(value: &Value) -> String {
    let mut out = String::new();
    let Some(object) = value.as_object() else { return value.to_string() };
    for (name, v) in object {
        let v = match v {
            Value::String(s) => s.clone(),
            Value::Array(a) if a.iter().all(Value::is_string) => {
                a.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
            }
            Value::Array(a) => a.iter().map(|v| format!("\n  {}", in_a_line(v))).collect(),
            other => other.to_string(),
        };
        let _ = writeln!(out, "{name:<24} {v}");
    }
    out
}

/// `name value, name value`
fn in_a_line(value: &Value) -> String {
    let Some(object) = value.as_object() else { return value.to_string() };
    object.iter().map(|(name, v)| format!("{name} {v}")).collect::<Vec<_>>().join(", ")
}

/// One of the last four commits, as far as the superblock remembers it.
fn backup_value(slot: usize, b: &BackupRoot) -> Value {
    json!({
        "slot": slot,
        "generation": b.tree_root_gen.get(),
        "root": b.tree_root.get(),
        "chunk_root": b.chunk_root.get(),
        "extent_root": b.extent_root.get(),
        "fs_root": b.fs_root.get(),
        "dev_root": b.dev_root.get(),
        "csum_root": b.csum_root.get(),
        "bytes_used": b.bytes_used.get(),
    })
}

fn super_value(sb: &Superblock) -> Value {
    let support = match sb.support() {
        Support::ReadWrite => "read-write".to_owned(),
        Support::ReadOnly { why } => format!("read-only: {why}"),
        Support::MetadataOnly { why } => format!("metadata only: {why}"),
        Support::Refused { why } => format!("refused: {why}"),
    };
    let backups: Vec<Value> =
        sb.backup_roots.iter().enumerate().map(|(n, b)| backup_value(n, b)).collect();
    json!({
        "fsid": print::uuid(sb.fsid),
        "metadata_uuid": print::uuid(sb.metadata_fsid()),
        "label": print::name(sb.label()),
        "larder": support,
        "generation": sb.generation.get(),
        "root": sb.root.get(),
        "root_level": sb.root_level,
        "chunk_root": sb.chunk_root.get(),
        "chunk_root_level": sb.chunk_root_level,
        "chunk_root_generation": sb.chunk_root_generation.get(),
        "log_root": sb.log_root.get(),
        "log_root_level": sb.log_root_level,
        "total_bytes": sb.total_bytes.get(),
        "bytes_used": sb.bytes_used.get(),
        "sectorsize": sb.sectorsize.get(),
        "nodesize": sb.nodesize.get(),
        "num_devices": sb.num_devices.get(),
        "csum_type": sb.csum_type().name(),
        "flags": sb.super_flags().names(),
        "compat_ro_flags": sb.compat_ro().names(),
        "incompat_flags": sb.incompat().names(),
        "cache_generation": sb.cache_generation.get(),
        "uuid_tree_generation": sb.uuid_tree_generation.get(),
        "sys_chunk_array_size": sb.sys_chunk_array_size.get(),
        "devid": sb.dev_item.devid.get(),
        "dev_uuid": print::uuid(sb.dev_item.uuid),
        "dev_total_bytes": sb.dev_item.total_bytes.get(),
        "dev_bytes_used": sb.dev_item.bytes_used.get(),
        "current_backup_slot": sb.current_backup_slot(),
        "backup_roots": backups,
    })
}
