//! Superblocks: every rule has a value that breaks it, and a message that says so.

use larder_format::features::{CompatRo, Incompat, SuperFlags};
use larder_format::superblock::{MAGIC, Superblock, Support, looks_like_btrfs};
use larder_format::{CsumType, Generation, Logical, Physical, SUPER_OFFSETS};
use proptest::prelude::*;
use zerocopy::{FromZeros, IntoBytes};

const AT: Physical = SUPER_OFFSETS[0];

/// A superblock like those of mkfs.
fn valid() -> Box<Superblock> {
    let mut sb = Box::new(Superblock::new_zeroed());
    sb.magic = MAGIC;
    sb.fsid = *b"sixteen bytes id";
    sb.dev_item.fsid = sb.fsid;
    sb.dev_item.devid.set(1);
    sb.dev_item.total_bytes.set(1 << 30);
    sb.dev_item.bytes_used.set(100 << 20);
    sb.set_total_bytes(1 << 30);
    sb.set_bytes_used(163_840);
    sb.num_devices.set(1);
    sb.sectorsize.set(4096);
    sb.stripesize.set(4096);
    sb.nodesize.set(16384);
    sb.leafsize.set(16384);
    sb.set_generation(Generation(7));
    sb.set_root(Logical(30 << 20), 1);
    sb.set_chunk_root(Logical(22 << 20), 0, Generation(6));
    sb.set_sys_chunk_bytes(&[1; 129]).unwrap();
    sb.set_incompat(Incompat::from_bits_retain(0x361));
    sb.set_compat_ro(CompatRo::from_bits_retain(0xb));
    sb.set_super_flags(SuperFlags::WRITTEN);
    sb
}

#[test]
fn sealed_copies_parse_at_their_own_address() {
    for csum in [CsumType::Crc32c, CsumType::XxHash64, CsumType::Sha256, CsumType::Blake2b] {
        let mut sb = valid();
        sb.set_csum_type(csum);
        sb.set_label("käse".as_bytes()).unwrap();
        for at in SUPER_OFFSETS {
            let bytes = sb.seal(at);
            assert!(looks_like_btrfs(&bytes));
            let parsed = Superblock::parse(&bytes, at).unwrap();
            assert_eq!(parsed.as_bytes(), &bytes[..]);
            assert_eq!(parsed.csum_type(), csum);
            assert_eq!(parsed.label(), "käse".as_bytes());
            assert_eq!(parsed.sys_chunk_bytes(), [1; 129]);
            assert_eq!(parsed.support(), Support::ReadWrite);
            let wrong = Superblock::parse(&bytes, Physical(at.0 + 4096)).unwrap_err().to_string();
            assert!(
                wrong.contains(&format!("bytenr is {at}, expected {}", at.0 + 4096)),
                "{wrong}"
            );
        }
    }
}

#[test]
fn each_broken_field_is_named() {
    type Break = fn(&mut Superblock);
    let cases: [(Break, &str); 28] = [
        (|s| s.magic = *b"_BHRfS_X", "magic is \"_BHRfS_X\", expected \"_BHRfS_M\""),
        (|s| s.magic = *b"!BHRfS_M", "mkfs did not finish"),
        (|s| s.sectorsize.set(16384), "sectorsize is 16384, expected 4096, the only sector size"),
        (|s| s.nodesize.set(2048), "nodesize is 2048, expected a power of two from 4096 to 65536"),
        (|s| s.nodesize.set(131_072), "nodesize is 131072"),
        (|s| s.nodesize.set(20480), "nodesize is 20480"),
        (|s| s.nodesize.set(0), "nodesize is 0"),
        (|s| s.leafsize.set(4096), "leafsize is 4096, expected 16384, the node size"),
        (|s| s.stripesize.set(0), "stripesize is 0, expected not 0"),
        (|s| s.sys_chunk_array_size.set(96), "sys_chunk_array_size is 96, expected 97 to 2048"),
        (|s| s.sys_chunk_array_size.set(2049), "sys_chunk_array_size is 2049"),
        (|s| s.sys_chunk_array_size.set(u32::MAX), "sys_chunk_array_size is 4294967295"),
        (|s| s.num_devices.set(0), "num_devices is 0, expected at least 1"),
        (|s| s.set_bytes_used(98_303), "bytes_used is 98303, expected at least 98304, six nodes"),
        (
            |s| s.set_total_bytes(1),
            "total_bytes is 1, expected at least 1073741824, the size of this device",
        ),
        (
            |s| s.dev_item.bytes_used.set(1 << 31),
            "dev_item.bytes_used is 2147483648, expected at most",
        ),
        (|s| s.set_root(Logical(0), 0), "root is 0, expected an address"),
        (|s| s.set_root(Logical(5), 0), "root is 5, expected a multiple of 4096"),
        (|s| s.chunk_root.set(0), "chunk_root is 0, expected an address"),
        (|s| s.set_log_root(Some((Logical(77), 0))), "log_root is 77, expected a multiple of 4096"),
        (|s| s.root_level = 8, "root_level is 8, expected less than 8"),
        (|s| s.chunk_root_level = 255, "chunk_root_level is 255"),
        (|s| s.log_root_level = 9, "log_root_level is 9"),
        (|s| s.set_generation(Generation(0)), "generation is 0, expected 1 to 2^62"),
        (|s| s.set_generation(Generation(u64::MAX)), "generation is 18446744073709551615"),
        (|s| s.chunk_root_generation.set(8), "chunk_root_generation is 8, expected at most 7"),
        (
            |s| s.dev_item.fsid = [0; 16],
            "dev_item.fsid is 00000000-0000-0000-0000-000000000000, expected",
        ),
        (
            |s| s.set_incompat(s.incompat() | Incompat::METADATA_UUID),
            "expected 00000000-0000-0000-0000-000000000000",
        ),
    ];
    for (break_it, message) in cases {
        let mut sb = valid();
        break_it(&mut sb);
        let error = Superblock::parse(&sb.seal(AT), AT).expect_err(message).to_string();
        assert!(error.starts_with("superblock at 65536: "), "{error}");
        assert!(error.contains(message), "\"{error}\" instead of \"{message}\"");
    }
    let mut bytes = valid().seal(AT);
    bytes[4000] ^= 1;
    let error = Superblock::parse(&bytes, AT).unwrap_err().to_string();
    assert!(error.contains("crc32c checksum is"), "{error}");
    bytes[0xc4] = 9;
    let error = Superblock::parse(&bytes, AT).unwrap_err().to_string();
    assert!(error.contains("unknown checksum type 9"), "{error}");
    let error = Superblock::parse(&bytes[..4095], AT).unwrap_err().to_string();
    assert!(error.contains("only 4095 bytes there, 4096 needed"), "{error}");
    assert!(!looks_like_btrfs(&[]));
}

#[test]
fn what_is_supported_and_why_not() {
    fn support(change: impl FnOnce(&mut Superblock)) -> Support {
        let mut sb = valid();
        change(&mut sb);
        Superblock::parse(&sb.seal(AT), AT).unwrap().support()
    }
    let add = |bits: Incompat| support(|s| s.set_incompat(s.incompat() | bits));
    let refused = |s: Support, word: &str| match s {
        Support::Refused { why } => assert!(why.contains(word), "\"{why}\" without \"{word}\""),
        other => panic!("{other:?} instead of a refusal over {word}"),
    };
    let read_only = |s: Support, word: &str| match s {
        Support::ReadOnly { why } => assert!(why.contains(word), "\"{why}\" without \"{word}\""),
        other => panic!("{other:?} instead of read-only over {word}"),
    };

    assert_eq!(
        add(Incompat::RAID56 | Incompat::RAID1C34 | Incompat::COMPRESS_LZO),
        Support::ReadWrite
    );
    assert_eq!(support(|s| s.compat_flags.set(u64::MAX)), Support::ReadWrite);
    assert_eq!(support(|s| s.set_compat_ro(CompatRo::empty())), Support::ReadWrite);
    assert_eq!(support(|s| s.set_compat_ro(CompatRo::FREE_SPACE_TREE)), Support::ReadWrite);
    for (bit, name) in [
        (Incompat::ZONED, "zoned"),
        (Incompat::EXTENT_TREE_V2, "extent-tree-v2"),
        (Incompat::RAID_STRIPE_TREE, "raid-stripe-tree"),
        (Incompat::SIMPLE_QUOTA, "simple-quota"),
        (Incompat::REMAP_TREE, "remap-tree"),
        (Incompat::from_bits_retain(1 << 40), "unknown incompatible feature bit 40"),
        (Incompat::MIXED_GROUPS, "mixed-bg needs nodes of 4096 bytes, but it has nodes of 16384"),
    ] {
        refused(add(bit), name);
    }
    for flag in [SuperFlags::METADUMP, SuperFlags::METADUMP_V2] {
        match support(|s| s.set_super_flags(flag)) {
            Support::MetadataOnly { why } => assert!(why.contains("metadata dump"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    for flag in [
        "CHANGING_FSID",
        "CHANGING_FSID_V2",
        "CHANGING_BG_TREE",
        "CHANGING_DATA_CSUM",
        "CHANGING_META_CSUM",
    ] {
        let bit = SuperFlags::from_name(flag).unwrap();
        refused(support(|s| s.set_super_flags(bit)), &flag.to_lowercase().replace('_', "-"));
    }
    refused(support(|s| s.flags.set(2)), "unknown superblock flag bit 1");
    for (bit, name) in [
        (CompatRo::FREE_SPACE_TREE, "free-space-tree,"),
        (CompatRo::FREE_SPACE_TREE_VALID, "free-space-tree-valid,"),
    ] {
        refused(
            support(|s| s.set_compat_ro(s.compat_ro() - bit)),
            &format!("block-group-tree needs {name}"),
        );
    }
    refused(
        support(|s| s.set_incompat(s.incompat() - Incompat::NO_HOLES)),
        "block-group-tree needs no-holes",
    );

    read_only(support(|s| s.set_compat_ro(s.compat_ro() | CompatRo::VERITY)), "verity");
    read_only(support(|s| s.compat_ro_flags.set(s.compat_ro_flags.get() | 1 << 9)), "bit 9");
    read_only(support(|s| s.set_super_flags(SuperFlags::ERROR)), "error");
    read_only(support(|s| s.set_super_flags(SuperFlags::SEEDING)), "seed");
}

#[test]
fn metadata_uuid_counts_only_with_its_feature() {
    let mut sb = valid();
    sb.metadata_uuid = [9; 16];
    assert_eq!(sb.metadata_fsid(), sb.fsid);
    sb.set_incompat(sb.incompat() | Incompat::METADATA_UUID);
    sb.dev_item.fsid = [9; 16];
    assert_eq!(Superblock::parse(&sb.seal(AT), AT).unwrap().metadata_fsid(), [9; 16]);
}

#[test]
fn labels_and_system_chunks_stay_within_their_fields() {
    let mut sb = valid();
    sb.set_label(&[b'x'; 255]).unwrap();
    assert_eq!(sb.label(), [b'x'; 255]);
    assert!(sb.set_label(&[b'x'; 256]).unwrap_err().to_string().contains("256 bytes, at most 255"));
    assert!(sb.set_label(b"two\nlines").is_err());
    sb.set_label(b"").unwrap();
    assert_eq!(sb.label, [0; 256]);
    assert!(sb.set_sys_chunk_bytes(&[0; 96]).is_err());
    assert!(sb.set_sys_chunk_bytes(&[0; 2049]).is_err());
    sb.set_sys_chunk_bytes(&[2; 2048]).unwrap();
    assert_eq!(sb.sys_chunk_bytes(), [2; 2048]);
    sb.set_log_root(Some((Logical(4096), 1)));
    assert_eq!((sb.log_root(), sb.log_root_level), (Some(Logical(4096)), 1));
    sb.set_log_root(None);
    assert_eq!((sb.log_root(), sb.log_root_level), (None, 0));
}

#[test]
fn backup_slots_go_round() {
    let mut sb = valid();
    assert_eq!((sb.current_backup_slot(), sb.next_backup_slot()), (None, 0));
    for (generation, slot) in [(8, 0), (9, 1), (10, 2), (11, 3), (12, 0)] {
        let next = sb.next_backup_slot();
        assert_eq!(next, slot);
        sb.set_generation(Generation(generation));
        sb.backup_roots[next].tree_root_gen.set(generation);
        assert_eq!(sb.current_backup_slot(), Some(slot));
    }
}

proptest! {
    /// Whatever bytes carry a right checksum: parsing and asking never panics.
    #[test]
    fn no_bytes_panic(
        start in prop::bool::ANY,
        changes in prop::collection::vec((32usize..4096, any::<u8>()), 0..8),
        garbage in prop::collection::vec(any::<u8>(), 0..5000),
    ) {
        let mut bytes = if start { valid().seal(AT) } else { [0x5a; 4096] };
        for (at, value) in changes {
            bytes[at] = value;
        }
        let sum = CsumType::Crc32c.compute(&bytes[32..]);
        bytes[..32].copy_from_slice(&sum);
        for bytes in [&bytes[..], &garbage] {
            if let Ok(mut sb) = Superblock::parse(bytes, AT) {
                let _ = (sb.support(), sb.label().len(), sb.next_backup_slot(), format!("{sb:?}"));
                prop_assert!(sb.sys_chunk_bytes().len() <= 2048);
                prop_assert_eq!(&sb.seal(AT)[..], &bytes[..4096]);
            }
        }
    }
}
