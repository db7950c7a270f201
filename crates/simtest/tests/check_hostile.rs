//! `larder check` on hostile images: for any bytes it returns soon, and without a panic.
//!
//! Nodes and superblocks are changed at random and their checksums put right, so that the changes
//! are looked at. Some changes are blind. Others hit pointers, which then lead to other nodes
//! (loops, shared subtrees, wrong trees), and counts and lengths, which get the ends of their
//! range.

use larder_check::Options;
use larder_format::node::{NodeView, POINTER_SIZE};
use larder_format::{Logical, SECTOR_SIZE};
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions, Tuning};
use larder_simtest::damage::{Damage, raw};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A small image with trees of two levels and more.
fn sound() -> Image {
    let device = Arc::new(SimDevice::new(Image::zeroed(128 << 20)).unrecorded());
    mkfs(
        &*device,
        &MkfsOptions { nodesize: Some(4096), uuid: Some([7; 16]), ..MkfsOptions::default() },
    )
    .unwrap();
    let tuning = Tuning { fake_clock: true, ..Tuning::default() };
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    let fs = Filesystem::open(device.clone(), options).unwrap();
    let new =
        |kind, target| NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target, xattrs: &[] };
    for n in 0..150u64 {
        let file = fs
            .create(fs.root(), format!("file-{n}").as_bytes(), &new(FileKind::Regular, b""))
            .unwrap()
            .id;
        for piece in 0..n % 5 {
            fs.write(file, piece * 16384, &vec![b'x'; 100 + 3000 * piece as usize]).unwrap();
        }
        if n % 10 == 0 {
            fs.create(fs.root(), format!("dir-{n}").as_bytes(), &new(FileKind::Directory, b""))
                .unwrap();
            fs.link(file, fs.root(), format!("link-{n}").as_bytes()).unwrap();
        }
    }
    fs.close().unwrap();
    device.image()
}

/// Addresses of all nodes.
fn nodes(image: &Image) -> Vec<Logical> {
    let damage = Damage::on(image).unwrap();
    let mut found = Vec::new();
    for chunk in damage.chunks() {
        for at in (chunk.start.0..chunk.end().0).step_by(SECTOR_SIZE as usize).map(Logical) {
            let bytes = damage.read(at, 4096).unwrap();
            let fsid = NodeView(&bytes).header().fsid;
            if NodeView(&bytes).bytenr() == at && fsid == damage.superblock().metadata_fsid() {
                found.push(at);
            }
        }
    }
    assert!(found.len() > 30, "{} nodes", found.len());
    found
}

fn mutate(image: &Image, nodes: &[Logical], seed: u64) -> Image {
    const EXTREME: [u64; 10] =
        [0, 1, 255, 256, 4096, 1 << 31, 1 << 47, 1 << 63, u64::MAX, u64::MAX - 4095];
    let mut rng = StdRng::seed_from_u64(seed);
    let mut damage = Damage::on(image).unwrap();
    for _ in 0..rng.random_range(1..4) {
        let at = nodes[rng.random_range(0..nodes.len())];
        let other = nodes[rng.random_range(0..nodes.len())];
        let what = rng.random_range(0..10);
        let _ = damage.edit_node(at, |bytes| {
            let (level, items) = (NodeView(bytes).level(), NodeView(bytes).nritems().max(1));
            match what {
                0 | 1 => {
                    for _ in 0..rng.random_range(1..8) {
                        let place = rng.random_range(48..bytes.len());
                        bytes[place] = rng.random();
                    }
                }
                2 | 3 => {
                    let place = rng.random_range(101..bytes.len() - 8);
                    let value = EXTREME[rng.random_range(0..EXTREME.len())];
                    bytes[place..place + 8].copy_from_slice(&value.to_le_bytes());
                }
                4..=6 if level > 0 => {
                    let slot = rng.random_range(0..items).min(4000 / POINTER_SIZE - 4);
                    let pointer = raw::pointer(bytes, slot);
                    pointer.blockptr.set(other.0);
                    pointer.generation.set(rng.random_range(0..20));
                }
                _ if level == 0 => {
                    let data: Vec<(usize, usize)> = (0..items)
                        .filter_map(|slot| NodeView(bytes).items().get(slot))
                        .map(|i| (101 + i.offset.get() as usize, i.size.get() as usize))
                        .collect();
                    let Some((from, size)) = data.get(rng.random_range(0..items)).copied() else {
                        return;
                    };
                    let last = (from + size).min(bytes.len());
                    for byte in bytes.get_mut(from..last).into_iter().flatten() {
                        if rng.random_range(0..8) == 0 {
                            *byte = [0, 1, 0x7f, 0x80, 0xff, rng.random()][rng.random_range(0..6)];
                        }
                    }
                }
                _ => raw::header(bytes).nritems.set(rng.random_range(0..200)),
            }
        });
    }
    if rng.random_range(0..4) == 0 {
        let _ = damage.edit_super(|sb| match rng.random_range(0..8) {
            0 => sb.root.set(nodes[0].0),
            1 => sb.chunk_root.set(nodes[nodes.len() / 2].0),
            2 => sb.log_root.set(nodes[nodes.len() - 1].0),
            3 => sb.total_bytes.set(EXTREME[rng.random_range(0..EXTREME.len())]),
            4 => sb.generation.set(rng.random()),
            5 => sb.sys_chunk_array[rng.random_range(0..200)] = rng.random(),
            6 => sb.incompat_flags.set(sb.incompat_flags.get() ^ 1 << rng.random_range(0..12)),
            _ => sb.compat_ro_flags.set(rng.random_range(0..16)),
        });
    }
    damage.into_image()
}

#[test]
fn whatever_the_bytes_it_returns() {
    let image = sound();
    let nodes = nodes(&image);
    let begun = Instant::now();
    let found: usize = (0..400u64)
        .into_par_iter()
        .map(|seed| {
            let device =
                Arc::new(SimDevice::new(mutate(&image, &nodes, seed)).read_only().unrecorded());
            let one = Instant::now();
            let options = Options { data: true, threads: 2, keep: 10 };
            let result = larder_check::check(&[device], &options, &|_| ());
            assert!(
                one.elapsed() < Duration::from_secs(60),
                "seed {seed} took {:?}",
                one.elapsed()
            );
            usize::from(!result.is_ok_and(|report| report.is_clean()))
        })
        .sum();
    // A change can be harmless — a node of an older transaction, a byte of free space in a leaf —
    // but most are not.
    assert!(found > 200, "{found} of 400 were noticed, in {:?}", begun.elapsed());
}
