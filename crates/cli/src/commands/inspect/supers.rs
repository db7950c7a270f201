//! Every copy of the superblock, field by field.

use crate::failure::Advise;
use crate::print;
use anyhow::bail;
use larder_format::superblock::BackupRoot;
use larder_format::{Superblock, Support};
use larder_volume::{Device, SuperCopy, read_all_superblocks, read_superblock};
use serde_json::{Value, json};
use std::fmt::Write as _;

pub(super) fn run(device: &dyn Device, json: bool) -> anyhow::Result<()> {
    let copies = read_all_superblocks(device);
    // Nothing that looks like a superblock anywhere: not damaged, but something else.
    let is_other =
        |c: &SuperCopy| matches!(&c.content, Err(e) if e.to_string().contains("not a btrfs"));
    if copies.iter().all(is_other) {
        let error = read_superblock(device)
            .err()
            .map_or_else(|| anyhow::anyhow!("no superblock"), Into::into);
        return Err(error).could_not_run();
    }
    let is_dump = |c: &SuperCopy| matches!(&c.content, Ok(sb) if sb.metadata_dump().is_some());
    let dump = copies.iter().any(is_dump);
    let mut values = Vec::new();
    let mut bad = 0;
    for copy in &copies {
        let value = match &copy.content {
            Ok(sb) => super_value(sb),
            Err(_) if dump && is_other(copy) => {
                json!({ "bytenr": copy.at.0, "missing": "a metadata dump has the first copy only" })
            }
            Err(e) => {
                bad += 1;
                json!({ "bytenr": copy.at.0, "error": e.to_string() })
            }
        };
        values.push(value);
    }
    if json {
        print::json(&values)?;
    } else {
        for value in &values {
            print::line(&text_of(value))?;
        }
    }
    if bad > 0 {
        bail!("{bad} of {} superblock copies cannot be used", copies.len());
    }
    Ok(())
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
        "bytenr": sb.bytenr.get(),
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
