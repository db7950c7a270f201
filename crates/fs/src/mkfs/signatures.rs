//! What is on a device already: file systems, partition tables, volume managers and disk images,
//! found by their signatures.
//!
//! This module answers one question only: would a new file system here destroy something that a
//! person may want to keep? So it names what it finds and does not describe it. It also looks at
//! backup copies at the end of the device, and it prefers the more specific name (ext4 before "a
//! boot sector"). Where a device cannot be read, nothing is recognised.

use larder_format::{Physical, SUPER_OFFSETS};
use larder_volume::Device;

/// A signature at a fixed place.
struct Magic {
    at: u64,
    bytes: &'static [u8],
    name: &'static str,
}

const fn magic(at: u64, bytes: &'static [u8], name: &'static str) -> Magic {
    Magic { at, bytes, name }
}

/// Signatures that are long or distant enough to be sufficient by themselves. Offsets are in bytes.
const MAGICS: &[Magic] = &[
    magic(0, b"XFSB", "an xfs file system"),
    magic(0, b"hsqs", "a squashfs file system"),
    magic(0, b"LUKS\xba\xbe", "LUKS encryption"),
    magic(0, b"SKUL\xba\xbe", "LUKS encryption (second header)"),
    magic(0, b"QFI\xfb", "a qcow2 disk image"),
    magic(0, b"KDMV", "a VMDK disk image"),
    magic(0, b"vhdxfile", "a VHDX disk image"),
    magic(0x40, b"\x7f\x10\xda\xbe", "a VDI disk image"),
    magic(0, b"verity\0\0", "dm-verity hashes"),
    magic(0, b"integrt\0", "dm-integrity metadata"),
    magic(0, b"-rom1fs-", "a romfs file system"),
    magic(0, b"bluestore block device", "a Ceph BlueStore device"),
    magic(0, b"dmvdo001", "a VDO volume"),
    magic(0, b"\x45\x3d\xcd\x28", "a cramfs file system"),
    magic(516, b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis pool"),
    magic(3, b"EXFAT   ", "an exfat file system"),
    magic(3, b"NTFS    ", "an ntfs file system"),
    magic(3, b"ReFS\0\0\0\0", "a ReFS file system"),
    magic(3, b"-FVE-FS-", "BitLocker encryption"),
    magic(32, b"NXSB", "an APFS container"),
    magic(1024, b"H+\0\x04", "an hfsplus file system"),
    magic(1024, b"HX\0\x05", "an hfsx file system"),
    magic(1024, b"\x10\x20\xf5\xf2", "an f2fs file system"),
    magic(1024, b"\xe2\xe1\xf5\xe0", "an erofs file system"),
    magic(1030, b"\x34\x34", "a nilfs2 file system"),
    magic(4096 + 24, UUID_BCACHEFS, "a bcachefs file system"),
    magic(4096 + 24, UUID_BCACHE, "a bcache device"),
    magic(4096, b"\xfc\x4e\x2b\xa9", "a member of an md RAID (1.2)"),
    magic(0, b"\xfc\x4e\x2b\xa9", "a member of an md RAID (1.1)"),
    magic(32768, b"JFS1", "a jfs file system"),
    magic(32769, b"CD001", "an iso9660 file system"),
    magic(32769, b"BEA01", "a UDF file system"),
    magic(32769, b"NSR0", "a UDF file system"),
    magic(65536, b"\x01\x16\x19\x70", "a gfs2 file system"),
    magic(65536 + 52, b"ReIsEr", "a reiserfs file system"),
    magic(8192 + 52, b"ReIsEr", "a reiserfs file system"),
    magic(1024, b"OCFSV2", "an ocfs2 file system"),
    magic(2048, b"OCFSV2", "an ocfs2 file system"),
    magic(4096, b"OCFSV2", "an ocfs2 file system"),
    magic(512, b"EFI PART", "a GPT partition table"),
    magic(4096, b"EFI PART", "a GPT partition table (4 KiB sectors)"),
];

/// c68573f6-4e1a-45ca-8265-f57f48ba6d81
const UUID_BCACHEFS: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
/// c68573f6-66ce-90a9-d96a-60cf803df7ef
const UUID_BCACHE: &[u8] = b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef";

/// Names what is on the device: a file system, a partition table, … `None` when nothing is
/// recognised.
#[must_use]
pub fn recognise(device: &dyn Device) -> Option<String> {
    let look = Look { device, head: read_head(device) };
    btrfs(&look)
        .or_else(|| ext(&look).map(Into::into))
        .or_else(|| MAGICS.iter().find(|m| look.is(m.at, m.bytes)).map(|m| m.name.into()))
        .or_else(|| swap(&look).map(Into::into))
        .or_else(|| lvm(&look).map(Into::into))
        .or_else(|| zfs(&look).map(Into::into))
        .or_else(|| at_the_end(&look).map(Into::into))
        .or_else(|| boot_sector(&look).map(Into::into))
}

/// Most signatures lie in this many bytes at the start, which are read once.
const HEAD: u64 = 72 << 10;

struct Look<'a> {
    device: &'a dyn Device,
    head: Vec<u8>,
}

fn read_head(device: &dyn Device) -> Vec<u8> {
    let len = usize::try_from(device.size().min(HEAD)).unwrap_or(0);
    let mut head = vec![0; len];
    if device.read_at(Physical(0), &mut head).is_ok() { head } else { Vec::new() }
}

impl Look<'_> {
    /// `N` bytes at an address, if they exist and can be read.
    fn get<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let end = at.checked_add(N as u64)?;
        if end <= self.head.len() as u64 {
            let at = usize::try_from(at).ok()?;
            return self.head[at..at + N].try_into().ok();
        }
        let mut out = [0; N];
        (end <= self.device.size() && self.device.read_at(Physical(at), &mut out).is_ok())
            .then_some(out)
    }

    fn is(&self, at: u64, bytes: &[u8]) -> bool {
        let Some(end) = at.checked_add(bytes.len() as u64).filter(|e| *e <= self.device.size())
        else {
            return false;
        };
        if end <= self.head.len() as u64 {
            return usize::try_from(at).is_ok_and(|at| self.head[at..].starts_with(bytes));
        }
        let mut found = vec![0; bytes.len()];
        self.device.read_at(Physical(at), &mut found).is_ok() && found == bytes
    }

    fn u32(&self, at: u64) -> Option<u32> {
        self.get(at).map(u32::from_le_bytes)
    }
}

fn btrfs(look: &Look<'_>) -> Option<String> {
    let copy = SUPER_OFFSETS.iter().position(|p| look.is(p.0 + 0x40, b"_BHRfS_M"))?;
    if copy > 0 {
        return Some("the rest of a btrfs file system (a superblock mirror)".into());
    }
    let label = look.get::<256>(SUPER_OFFSETS[0].0 + 0x12b)?;
    let label: Vec<u8> = label.into_iter().take_while(|b| *b != 0).collect();
    Some(if label.is_empty() {
        "a btrfs file system".into()
    } else {
        format!("a btrfs file system labelled {:?}", String::from_utf8_lossy(&label))
    })
}

fn ext(look: &Look<'_>) -> Option<&'static str> {
    if !look.is(1024 + 56, b"\x53\xef") {
        return None;
    }
    const HAS_JOURNAL: u32 = 4;
    /// Features that ext3 does not have (extents, 64bit, flex_bg, …; huge_file, gdt_csum,
    /// metadata_csum, …).
    const EXT4_INCOMPAT: u32 = !(0x2 | 0x4 | 0x10);
    const EXT4_RO: u32 = !0x7;
    let (compat, incompat, ro) =
        (look.u32(1024 + 92)?, look.u32(1024 + 96)?, look.u32(1024 + 100)?);
    Some(if incompat & 0x8 != 0 {
        "a journal of an ext file system"
    } else if incompat & EXT4_INCOMPAT != 0 || ro & EXT4_RO != 0 {
        "an ext4 file system"
    } else if compat & HAS_JOURNAL != 0 {
        "an ext3 file system"
    } else {
        "an ext2 file system"
    })
}

fn swap(look: &Look<'_>) -> Option<&'static str> {
    [4096u64, 8192, 16384, 32768, 65536].into_iter().find_map(|page| {
        match &look.get::<10>(page - 10)? {
            b"SWAPSPACE2" | b"SWAP-SPACE" => Some("swap space"),
            b"S1SUSPEND\0" | b"S2SUSPEND\0" | b"LINHIB0001" => Some("a hibernated system"),
            _ => None,
        }
    })
}

fn lvm(look: &Look<'_>) -> Option<&'static str> {
    (0..4u64)
        .any(|s| look.is(s * 512, b"LABELONE") && look.is(s * 512 + 24, b"LVM2 001"))
        .then_some("an LVM2 physical volume")
}

fn zfs(look: &Look<'_>) -> Option<&'static str> {
    const UBERBLOCK: u64 = 0x00ba_b10c;
    let size = look.device.size() & !((256 << 10) - 1);
    // Two labels of 256 KiB at the start, two at the end; the uberblocks fill the second half of
    // each.
    let labels = [0, 256 << 10, size.saturating_sub(512 << 10), size.saturating_sub(256 << 10)];
    labels
        .into_iter()
        .flat_map(|label| (0..128u64).map(move |i| label + (128 << 10) + i * 1024))
        .filter_map(|at| look.get::<8>(at))
        .any(|m| u64::from_le_bytes(m) == UBERBLOCK || u64::from_be_bytes(m) == UBERBLOCK)
        .then_some("a member of a ZFS pool")
}

fn at_the_end(look: &Look<'_>) -> Option<&'static str> {
    const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
    let size = look.device.size();
    if size < 128 << 10 {
        return None;
    }
    let sectors = size / 512;
    if look.is(((sectors - 16) & !7) * 512, MD) {
        return Some("a member of an md RAID (1.0)");
    }
    if look.is((size & !0xffff) - 0x10000, MD) {
        return Some("a member of an md RAID (0.90)");
    }
    [512, 4096]
        .into_iter()
        .any(|sector| look.is(size - sector, b"EFI PART"))
        .then_some("a GPT partition table (the backup at the end)")
}

fn boot_sector(look: &Look<'_>) -> Option<&'static str> {
    if !look.is(510, b"\x55\xaa") {
        return None;
    }
    if look.is(82, b"FAT32   ") || look.is(54, b"FAT1") || look.is(54, b"FAT     ") {
        return Some("a vfat file system");
    }
    // A partition table: every entry's status is 0 or 0x80, and at least one has a type and a
    // length.
    let table = look.get::<64>(446)?;
    let entries = || table.chunks_exact(16);
    let plausible = entries().all(|e| e[0] & 0x7f == 0);
    let used = entries().any(|e| e[4] != 0 && e[12..16] != [0; 4]);
    (plausible && used).then_some("an MBR partition table").or(Some("a boot sector"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_volume::{FileDevice, OpenMode};
    use std::path::Path;
    use std::process::Command;

    fn blank(dir: &Path, size: u64) -> FileDevice {
        let path = dir.join("img");
        let _ = std::fs::remove_file(&path);
        FileDevice::create(&path, size).unwrap()
    }

    #[test]
    fn nothing_is_recognised_where_nothing_is() {
        let dir = tempfile::tempdir().unwrap();
        for size in [0, 1, 511, 4096, 100_000, 128 << 20] {
            assert_eq!(recognise(&blank(dir.path(), size)), None, "size {size}");
        }
        let d = blank(dir.path(), 1 << 20);
        d.write_at(Physical(0), b"just some text in the way").unwrap();
        assert_eq!(recognise(&d), None);
    }

    #[test]
    fn every_fixed_signature_is_found() {
        let dir = tempfile::tempdir().unwrap();
        for m in MAGICS {
            let d = blank(dir.path(), 1 << 20);
            d.write_at(Physical(m.at), m.bytes).unwrap();
            assert_eq!(recognise(&d).as_deref(), Some(m.name));
        }
    }

    #[test]
    fn signatures_elsewhere_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let size = 80 << 20;
        let cases: [(u64, &[u8], &str); 10] = [
            ((64 << 20) + 0x40, b"_BHRfS_M", "the rest of a btrfs"),
            (65536 + 0x40, b"_BHRfS_M", "a btrfs file system"),
            (16384 - 10, b"SWAPSPACE2", "swap space"),
            (size - 512, b"EFI PART", "GPT"),
            (size - 8192, b"\xfc\x4e\x2b\xa9", "md RAID (1.0)"),
            (size - 65536, b"\xfc\x4e\x2b\xa9", "md RAID (0.90)"),
            ((128 << 10) + 5 * 1024, b"\x0c\xb1\xba\0\0\0\0\0", "ZFS"),
            (size - (128 << 10) + 1024, b"\0\0\0\0\0\xba\xb1\x0c", "ZFS"),
            (510, b"\x55\xaa", "boot sector"),
            (1024 + 56, b"\x53\xef", "ext2"),
        ];
        for (at, bytes, want) in cases {
            let d = blank(dir.path(), size);
            d.write_at(Physical(at), bytes).unwrap();
            let got = recognise(&d).unwrap_or_default();
            assert!(got.contains(want), "{want}: {got}");
        }
        let d = blank(dir.path(), size);
        d.write_at(Physical(510), b"\x55\xaa").unwrap();
        d.write_at(Physical(446 + 4), b"\x83").unwrap();
        d.write_at(Physical(446 + 12), b"\0\x10\0\0").unwrap();
        assert_eq!(recognise(&d).as_deref(), Some("an MBR partition table"));
        let d = blank(dir.path(), size);
        d.write_at(Physical(512), b"LABELONE").unwrap();
        d.write_at(Physical(512 + 24), b"LVM2 001").unwrap();
        assert_eq!(recognise(&d).as_deref(), Some("an LVM2 physical volume"));
    }

    /// What real tools make, where they are installed.
    #[test]
    fn file_systems_made_by_their_own_tools_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let tools: [(&[&str], &str); 6] = [
            (&["mkfs.ext2", "-q", "-F"], "ext2"),
            (&["mkfs.ext3", "-q", "-F"], "ext3"),
            (&["mkfs.ext4", "-q", "-F"], "ext4"),
            (&["mkfs.xfs", "-q", "-f"], "xfs"),
            (
                &["mkfs.btrfs", "-q", "-L", "some label"],
                "btrfs file system labelled \"some label\"",
            ),
            (&["mkswap"], "swap"),
        ];
        for (tool, want) in tools {
            let path = dir.path().join("img");
            drop(blank(dir.path(), 400 << 20));
            let run = Command::new(tool[0]).args(&tool[1..]).arg(&path).output();
            if !run.is_ok_and(|o| o.status.success()) {
                assert!(std::env::var_os("LARDER_REQUIRE_ORACLES").is_none(), "needs {}", tool[0]);
                eprintln!("skipped: needs {}", tool[0]);
                continue;
            }
            let got =
                recognise(&FileDevice::open(&path, OpenMode::Read).unwrap()).unwrap_or_default();
            assert!(got.contains(want), "{want}: {got}");
        }
    }
}
