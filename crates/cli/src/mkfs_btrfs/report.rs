//! What mkfs.btrfs prints, in the shape in which programs and people know it.

use super::Refused;
use super::options::{Content, Options};
use crate::image::{Access, Image};
use crate::{devices, print, size};
use larder_format::ids::ObjectId;
use larder_fs::KindUsage;
use std::fmt::Write as _;

/// The first lines of all output.
pub(super) const TITLE: &str =
    concat!("btrfs-progs v6.14 (command line; this is larder ", env!("CARGO_PKG_VERSION"), ")\n");

pub(super) const VERSION: &str = concat!(
    "mkfs.btrfs, part of btrfs-progs v6.14 (command line; this is larder ",
    env!("CARGO_PKG_VERSION"),
    ")\n+LZO +ZSTD -ZONED"
);

pub(super) const HELP: &str = "\
usage: mkfs.btrfs [options] <dev> [<dev>...]

    Make a btrfs file system on devices or in image files, by Larder, with the
    command line of btrfs-progs 6.14

    -d|--data PROFILE         single (default), dup, raid0, raid1, raid1c3, raid1c4,
                              raid10, raid5, raid6
    -m|--metadata PROFILE     the same; default: dup, on several devices raid1
    -M|--mixed                mix metadata and data together
    --csum TYPE
    --checksum TYPE           crc32c (default), xxhash, sha256, blake2
    -n|--nodesize SIZE        size of btree nodes, 16K (default), 4K, 8K, 32K, 64K
    -s|--sectorsize SIZE      data block size: 4K
    -O|--features LIST        comma separated list of features (-O list-all lists them)
    -L|--label LABEL          label (maximum length 255)
    -U|--uuid UUID            UUID of the file system
    --device-uuid UUID        UUID of the first device
    -b|--byte-count SIZE      use SIZE bytes of each device
    -r|--rootdir DIR          copy files from DIR to the root directory
    --compress ALGO[:LEVEL]   (with --rootdir) no (default), zstd, lzo, zlib
    -u|--subvol TYPE:SUBDIR   (with --rootdir) make SUBDIR a subvolume;
                              TYPE is rw (default), ro, default or default-ro
    --inode-flags LIST:PATH   (with --rootdir) nodatacow, nodatasum for PATH and below
    --reflink                 (with --rootdir) accepted; data is copied
    --shrink                  (with --rootdir) make the file as small as it gets
    -K|--nodiscard            do not discard the whole device first
    -f|--force                overwrite an existing file system
    -q|--quiet                no messages except errors
    -v|--verbose              undo --quiet
    -V|--version              print the version
    --help                    print this
    -R|--runtime-features     as -O

    Zoned devices, quotas and other sector sizes are refused.";

/// The list of features, as `-O list-all` prints it.
pub(super) fn features() -> String {
    let about = [
        ("mixed-bg", "mixed data and metadata block groups"),
        ("extref", "increased hardlink limit per file to 65536"),
        ("skinny-metadata", "reduced-size metadata extent refs"),
        ("no-holes", "no explicit hole extents for files"),
        ("fst", "free-space-tree alias"),
        ("free-space-tree", "free space tree, improved space tracking (space_cache=v2)"),
        ("bgt", "block-group-tree alias"),
        ("block-group-tree", "block group tree, to reduce mount time"),
    ];
    let lines: Vec<_> = about.iter().map(|(name, what)| format!("{name:<20}- {what}")).collect();
    format!("Filesystem features available:\n{}", lines.join("\n"))
}

/// Says what was made. `sizes` has those of the devices, if there are several.
pub(super) fn show(options: &Options, sizes: &[u64]) -> Result<(), Refused> {
    let top = Some(ObjectId::FS_TREE.0);
    let image = Image::open(&devices::join(&options.devices), Access::Read { force: false }, top)?;
    let (info, usage) = (image.fs.info(), image.fs.space_usage());
    image.close()?;
    let mut out = String::new();
    if let Some(content) = &options.content {
        out += &of_content(content);
    }
    let label = match &options.label[..] {
        b"" => "(null)".to_owned(),
        label => print::name(label),
    };
    let total = size::human(info.total_bytes);
    let _ = writeln!(out, "Label:              {label}");
    let _ = writeln!(out, "UUID:               {}", print::uuid(info.fsid));
    let _ = writeln!(out, "Node size:          {}", info.nodesize);
    let _ = writeln!(
        out,
        "Sector size:        {}\t(CPU page size: {})",
        info.sectorsize,
        rustix::param::page_size()
    );
    let _ = writeln!(out, "Filesystem size:    {total}");
    let _ = writeln!(out, "Block group profiles:");
    if usage.mixed {
        group(&mut out, "Data+Metadata:", &usage.data);
    } else {
        group(&mut out, "Data:", &usage.data);
        group(&mut out, "Metadata:", &usage.metadata);
    }
    group(&mut out, "System:", &usage.system);
    let _ = writeln!(out, "SSD detected:       no");
    let _ = writeln!(out, "Zoned device:       no");
    let _ = writeln!(out, "Features:           {}", options.features.names().join(", "));
    let _ = writeln!(out, "Checksum:           {}", info.csum.name());
    let _ = writeln!(out, "Number of devices:  {}", options.devices.len());
    let _ = writeln!(out, "Devices:");
    let _ = writeln!(out, "   ID        SIZE  PATH");
    for (n, path) in options.devices.iter().enumerate() {
        let size = sizes.get(n).map_or_else(|| total.clone(), |bytes| size::human(*bytes));
        let _ = writeln!(out, "  {:>3}  {size:>10}  {}", n + 1, print::path(path));
    }
    Ok(print::line(&out)?)
}

fn group(out: &mut String, name: &str, usage: &KindUsage) {
    let bytes = size::human(usage.total);
    let _ = writeln!(out, "  {name:<17} {:<8} {bytes:>15}", usage.profile);
}

fn of_content(content: &Content) -> String {
    let from = content.from.canonicalize().unwrap_or_else(|_| content.from.clone());
    let mut out = format!("Rootdir from:       {}\n", print::path(&from));
    let _ = writeln!(out, "  Compress:         {}", content.compress_word);
    for subvolume in &content.subvolumes {
        let kind = match (subvolume.default, subvolume.read_only) {
            (false, false) => "(rw):",
            (false, true) => "(ro):",
            (true, false) => "(drw):",
            (true, true) => "(dro):",
        };
        let _ = writeln!(out, "  Subvolume {kind:<7} {}", print::path(&subvolume.path));
    }
    let _ = writeln!(out, "  Shrink:           {}", if content.shrink { "yes" } else { "no" });
    out
}
