//! `btrfs inspect-internal dump-super`: superblocks of an image, field by field.
//!
//! Copies are shown as they lie on the device, also one whose checksum is wrong: that is what the
//! command is for. So the bytes are taken as they are, without the rules of `larder-format`.

use super::{Done, Failed};
use crate::image::{Access, open_device};
use crate::print;
use larder_format::items::BlockGroupFlags;
use larder_format::superblock::{BackupRoot, MAGIC};
use larder_format::{CompatRo, CsumType, Incompat, Physical, SUPER_SIZE, SuperFlags, Superblock};
use larder_volume::Device;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use zerocopy::{FromBytes, IntoBytes};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Also the chunks and the roots of older commits
    #[arg(short = 'f', long)]
    full: bool,
    /// All copies
    #[arg(short = 'a', long)]
    all: bool,
    /// Copy 0, 1 or 2
    #[arg(short = 's', long = "super", value_name = "N")]
    copy: Option<u64>,
    /// As --super
    #[arg(short = 'i', value_name = "N")]
    index: Option<u64>,
    /// Also what does not look like a superblock
    #[arg(short = 'F', long)]
    force: bool,
    /// Address of the superblock
    #[arg(long, value_name = "ADDRESS")]
    bytenr: Option<u64>,
    #[arg(required = true, value_name = "IMAGE")]
    pub(super) devices: Vec<PathBuf>,
}

/// Places of the copies.
const COPIES: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];

impl Options {
    fn places(&self, size: u64) -> Result<Vec<u64>, Failed> {
        if self.all {
            let fits = |at: &u64| at + SUPER_SIZE as u64 <= size;
            return Ok(COPIES.into_iter().filter(fits).collect());
        }
        let copy = self.index.or(self.copy);
        match (self.bytenr, copy) {
            (Some(at), _) => Ok(vec![at]),
            (None, None) => Ok(vec![COPIES[0]]),
            (None, Some(n @ 0..=2)) => Ok(COPIES.into_iter().nth(n as usize).into_iter().collect()),
            // An older form of the option names the address.
            (None, Some(at)) if self.index.is_none() => Ok(vec![at]),
            (None, Some(n)) => {
                Err(Failed::because(format!("super mirror should be 0..2, not {n}")))
            }
        }
    }
}

pub(super) fn dump(path: &Path, options: &Options) -> Done {
    let device = open_device(path, Access::Read { force: true })?;
    for at in options.places(device.size())? {
        let mut bytes = [0; SUPER_SIZE];
        let shown = print::path(path);
        device.read_at(Physical(at), &mut bytes).map_err(|e| {
            let why = super::reason(&e);
            Failed::because(format!("failed to read the superblock on {shown} at {at}: {why}"))
        })?;
        let Ok(superblock) = Superblock::read_from_bytes(&bytes) else {
            return Err(Failed::because(format!("{shown}: no superblock at {at}")));
        };
        if superblock.magic != MAGIC && !options.force {
            let why = format!("bad magic on superblock on {shown} at {at}");
            return Err(Failed::because(format!("{why} (use --force to dump it anyway)")));
        }
        let rule = "-".repeat(57);
        let mut out = format!("superblock: bytenr={at}, device={shown}\n{rule}\n");
        out += &fields(&superblock);
        out += &device_fields(&superblock);
        if options.full {
            out += &chunks(&superblock);
            out += &backups(&superblock);
        }
        print::line(&out)?;
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

/// `[match]` or not.
fn verdict(right: bool) -> &'static str {
    if right { "[match]" } else { "[DON'T MATCH]" }
}

fn fields(sb: &Superblock) -> String {
    let kind = CsumType::from_disk(sb.csum_type.get()).ok();
    let (name, size) = kind.map_or(("UNKNOWN", 32), |kind| (kind.name(), kind.size()));
    let computed = kind.map(|kind| kind.compute(&sb.as_bytes()[32..]));
    let sound = computed.is_some_and(|sum| sum[..size] == sb.csum[..size]);
    let magic = sb.magic.map(|b| if b.is_ascii_graphic() { b as char } else { '.' });
    let magic: String = magic.iter().collect();
    let name = if name == "xxhash" { "xxhash64" } else { name };
    let mut out = String::new();
    for (name, value) in [
        ("csum_type\t\t", format!("{} ({name})", sb.csum_type.get())),
        ("csum_size\t\t", size.to_string()),
        ("csum\t\t\t", format!("{} {}", hex(&sb.csum[..size]), verdict(sound))),
        ("bytenr\t\t\t", sb.bytenr.get().to_string()),
        ("flags\t\t\t", super_flags(sb.flags.get())),
        ("magic\t\t\t", format!("{magic} {}", verdict(sb.magic == MAGIC))),
        ("fsid\t\t\t", print::uuid(sb.fsid)),
        ("metadata_uuid\t\t", print::uuid(sb.metadata_uuid)),
        ("label\t\t\t", print::name(sb.label())),
        ("generation\t\t", sb.generation.get().to_string()),
        ("root\t\t\t", sb.root.get().to_string()),
        ("sys_array_size\t\t", sb.sys_chunk_array_size.get().to_string()),
        ("chunk_root_generation\t", sb.chunk_root_generation.get().to_string()),
        ("root_level\t\t", sb.root_level.to_string()),
        ("chunk_root\t\t", sb.chunk_root.get().to_string()),
        ("chunk_root_level\t", sb.chunk_root_level.to_string()),
        ("log_root\t\t", sb.log_root.get().to_string()),
        ("log_root_transid (deprecated)\t", sb.log_root_transid.get().to_string()),
        ("log_root_level\t\t", sb.log_root_level.to_string()),
        ("total_bytes\t\t", sb.total_bytes.get().to_string()),
        ("bytes_used\t\t", sb.bytes_used.get().to_string()),
        ("sectorsize\t\t", sb.sectorsize.get().to_string()),
        ("nodesize\t\t", sb.nodesize.get().to_string()),
        ("leafsize (deprecated)\t", sb.leafsize.get().to_string()),
        ("stripesize\t\t", sb.stripesize.get().to_string()),
        ("root_dir\t\t", sb.root_dir_objectid.get().to_string()),
        ("num_devices\t\t", sb.num_devices.get().to_string()),
        ("compat_flags\t\t", format!("{:#x}", sb.compat_flags.get())),
        ("compat_ro_flags\t\t", compat_ro(sb.compat_ro_flags.get())),
        ("incompat_flags\t\t", incompat(sb.incompat_flags.get())),
        ("cache_generation\t", sb.cache_generation.get().to_string()),
        ("uuid_tree_generation\t", sb.uuid_tree_generation.get().to_string()),
    ] {
        let _ = writeln!(out, "{name}{value}");
    }
    out
}

fn device_fields(sb: &Superblock) -> String {
    let d = &sb.dev_item;
    let own =
        if sb.incompat().contains(Incompat::METADATA_UUID) { sb.metadata_uuid } else { sb.fsid };
    let mut out = String::new();
    for (name, value) in [
        ("uuid\t\t", print::uuid(d.uuid)),
        ("fsid\t\t", format!("{} {}", print::uuid(d.fsid), verdict(d.fsid == own))),
        ("type\t\t", d.kind.get().to_string()),
        ("total_bytes\t", d.total_bytes.get().to_string()),
        ("bytes_used\t", d.bytes_used.get().to_string()),
        ("io_align\t", d.io_align.get().to_string()),
        ("io_width\t", d.io_width.get().to_string()),
        ("sector_size\t", d.sector_size.get().to_string()),
        ("devid\t\t", d.devid.get().to_string()),
        ("dev_group\t", d.dev_group.get().to_string()),
        ("seek_speed\t", d.seek_speed.to_string()),
        ("bandwidth\t", d.bandwidth.to_string()),
        ("generation\t", d.generation.get().to_string()),
    ] {
        let _ = writeln!(out, "dev_item.{name}{value}");
    }
    out
}

/// A number, and below it the names of its bits.
fn named(bits: u64, names: &[String]) -> String {
    if names.is_empty() {
        return format!("{bits:#x}");
    }
    format!("{bits:#x}\n\t\t\t( {} )", names.join(" |\n\t\t\t  "))
}

/// Names of bits, and the rest as a number.
fn names<F: bitflags::Flags<Bits = u64> + Copy>(flags: F, alias: fn(&str) -> &str) -> Vec<String> {
    let known = flags.iter_names().map(|(name, _)| alias(name).to_owned());
    let rest = flags.bits() & !F::all().bits();
    known.chain((rest != 0).then(|| format!("unknown flag: {rest:#x}"))).collect()
}

fn super_flags(bits: u64) -> String {
    named(bits, &names(SuperFlags::from_bits_retain(bits), |name| name))
}

fn compat_ro(bits: u64) -> String {
    named(bits, &names(CompatRo::from_bits_retain(bits), |name| name))
}

fn incompat(bits: u64) -> String {
    named(bits, &names(Incompat::from_bits_retain(bits), |name| name))
}

/// The chunks of system space, which the superblock has in itself.
fn chunks(sb: &Superblock) -> String {
    let mut out = format!("sys_chunk_array[{}]:\n", sb.sys_chunk_array.len());
    let used = (sb.sys_chunk_array_size.get() as usize).min(sb.sys_chunk_array.len());
    let mut rest = &sb.sys_chunk_array[..used];
    let mut number = 0;
    while let Some((chunk, behind)) = Chunk::take(rest) {
        let _ = writeln!(
            out,
            "\titem {number} key (FIRST_CHUNK_TREE CHUNK_ITEM {})\n\
             \t\tlength {} owner {} stripe_len {} type {}\n\
             \t\tio_align {} io_width {} sector_size {}\n\
             \t\tnum_stripes {} sub_stripes {}",
            chunk.start,
            chunk.word(0),
            chunk.word(8),
            chunk.word(16),
            kind(chunk.word(24)),
            chunk.half(32),
            chunk.half(36),
            chunk.half(40),
            chunk.stripes(),
            chunk.quarter(46)
        );
        for stripe in 0..chunk.stripes() {
            let at = Chunk::HEAD + stripe * Chunk::STRIPE;
            let uuid = chunk.bytes[at + 16..].first_chunk().copied().unwrap_or_default();
            let _ = writeln!(
                out,
                "\t\t\tstripe {stripe} devid {} offset {}\n\t\t\tdev_uuid {}",
                chunk.word(at),
                chunk.word(at + 8),
                print::uuid(uuid)
            );
        }
        (rest, number) = (behind, number + 1);
    }
    out
}

fn kind(bits: u64) -> String {
    let flags = BlockGroupFlags::from_bits_retain(bits);
    let mut names = names(flags, |name| name);
    if names.len() == 1 {
        names.push("single".to_owned());
    }
    names.join("|")
}

/// A chunk item in the superblock: its key's offset, and its bytes.
struct Chunk<'a> {
    start: u64,
    bytes: &'a [u8],
}

impl<'a> Chunk<'a> {
    const KEY: usize = 17;
    const HEAD: usize = 48;
    const STRIPE: usize = 32;

    /// The first one, and what stands behind it.
    fn take(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let start = u64::from_le_bytes(*bytes.get(9..)?.first_chunk()?);
        let item = bytes.get(Self::KEY..)?;
        let stripes = u16::from_le_bytes(*item.get(44..)?.first_chunk()?);
        let len = Self::HEAD + usize::from(stripes) * Self::STRIPE;
        let bytes = item.get(..len)?;
        Some((Self { start, bytes }, &item[len..]))
    }

    fn stripes(&self) -> usize {
        usize::from(self.quarter(44))
    }

    fn word(&self, at: usize) -> u64 {
        self.bytes[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b))
    }

    fn half(&self, at: usize) -> u32 {
        self.bytes[at..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
    }

    fn quarter(&self, at: usize) -> u16 {
        self.bytes[at..].first_chunk().map_or(0, |b| u16::from_le_bytes(*b))
    }
}

fn backups(sb: &Superblock) -> String {
    let mut out = format!("backup_roots[{}]:\n", sb.backup_roots.len());
    for (slot, backup) in sb.backup_roots.iter().enumerate() {
        let _ = writeln!(out, "\tbackup {slot}:\n{}", backup_root(backup));
    }
    out
}

fn backup_root(b: &BackupRoot) -> String {
    let mut out = String::new();
    for (name, at, generation, level) in [
        ("backup_tree_root:\t", b.tree_root, b.tree_root_gen, b.tree_root_level),
        ("backup_chunk_root:\t", b.chunk_root, b.chunk_root_gen, b.chunk_root_level),
        ("backup_extent_root:\t", b.extent_root, b.extent_root_gen, b.extent_root_level),
        ("backup_fs_root:\t\t", b.fs_root, b.fs_root_gen, b.fs_root_level),
        ("backup_dev_root:\t", b.dev_root, b.dev_root_gen, b.dev_root_level),
        ("csum_root:\t", b.csum_root, b.csum_root_gen, b.csum_root_level),
    ] {
        let (at, generation) = (at.get(), generation.get());
        let _ = writeln!(out, "\t\t{name}{at}\tgen: {generation}\tlevel: {level}");
    }
    for (name, value) in [
        ("backup_total_bytes:\t", b.total_bytes),
        ("backup_bytes_used:\t", b.bytes_used),
        ("backup_num_devices:\t", b.num_devices),
    ] {
        let _ = writeln!(out, "\t\t{name}{}", value.get());
    }
    out
}
