//! Metadata dumps: through `btrfs-image`, and in the form that it restores no more.
//!
//! The older form, in which nodes lie at their logical addresses, is made here byte by byte:
//! btrfs-image 6.14 still writes it (`-r -o`), but looks at the result as if it were the newer one,
//! and aborts.

use super::loop_device::output;
use super::tool;
use crate::damage::Damage;
use crate::image::{Image, PAGE};
use anyhow::{Result, ensure};
use larder_format::items::chunk::{Chunk, Stripe, encode_sys_array};
use larder_format::items::{BlockGroupFlags, RootItem};
use larder_format::{Key, KeyType, MAX_LEVEL, ObjectId, Physical, SUPER_OFFSETS, SuperFlags};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Dumps an image (or the devices of one file system, of which one is given) with `btrfs-image
/// ARGS`, and restores the dump beside it.
///
/// # Errors
/// btrfs-image fails, with what it said.
pub fn metadata_dump(image: &Path, args: &[&str]) -> Result<PathBuf> {
    let (packed, restored) = (image.with_extension("dump"), image.with_extension("restored"));
    for path in [&packed, &restored] {
        if path.exists() {
            std::fs::remove_file(path)?;
        }
    }
    let run = |args: &[&OsStr]| -> Result<()> {
        let out = output(tool("btrfs-image").args(args).stdin(Stdio::null()))?;
        ensure!(
            out.status.success(),
            "btrfs-image {args:?}: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        );
        Ok(())
    };
    let mut all: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
    all.extend([image.as_os_str(), packed.as_os_str()]);
    run(&all)?;
    run(&["-r".as_ref(), packed.as_os_str(), restored.as_os_str()])?;
    Ok(restored)
}

/// The dump of an image in the older form.
///
/// # Errors
/// The image cannot be read.
pub fn flat_dump(image: &Image) -> Result<Image> {
    let d = Damage::on(image)?;
    let mut sb = *d.superblock();
    let mut roots = vec![sb.chunk_root(), sb.root()];
    roots.extend(sb.log_root());
    for root in roots.clone() {
        for (key, data) in d.items_below(root)? {
            if key.kind == KeyType::ROOT_ITEM {
                roots.push(RootItem::parse(&data)?.root());
            }
        }
    }
    let mut nodes = Vec::new();
    for root in roots {
        for level in 0..MAX_LEVEL {
            nodes.extend(d.nodes_below(root, level)?);
        }
    }
    let end = nodes.iter().map(|at| at.0 + u64::from(sb.nodesize())).max().unwrap_or(0);
    let mut flat = Image::zeroed(end.next_multiple_of(PAGE as u64));
    for at in nodes {
        flat.write(at.0, &d.node(at)?);
    }
    // One system chunk for all addresses that there are.
    let stripe = Stripe { devid: sb.device_id(), offset: Physical(0), dev_uuid: sb.dev_item.uuid };
    let everything = Chunk::new(u64::MAX, BlockGroupFlags::SYSTEM, vec![stripe]);
    let key = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, 0);
    sb.set_sys_chunk_bytes(&encode_sys_array([(key, &everything)])?)?;
    sb.set_super_flags(sb.super_flags() | SuperFlags::METADUMP);
    flat.write(SUPER_OFFSETS[0].0, &sb.seal(SUPER_OFFSETS[0]));
    Ok(flat)
}
