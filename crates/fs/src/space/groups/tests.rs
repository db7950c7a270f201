//! Allocation from block groups, and loading them.

use super::*;
use crate::space::extent_tree::{ExtentFeatures, apply};
use crate::space::free_space_tree;
use crate::space::refs::{ExtentKind, RefHead};
use crate::tree::TreeOps;
use crate::tree::ops::MapTree;
use larder_format::items::{BlockGroupItem, ExtentRef};
use larder_format::{DeviceId, FileOffset, Key, KeyType, ObjectId, Physical};
use larder_volume::{MappedChunk, Stripe};
use proptest::prelude::*;
use std::ops::Range;
use zerocopy::IntoBytes;

const MIB: u64 = 1 << 20;
const NODE: u32 = 16384;
const ANY: Generation = Generation(u64::MAX);
const UNIT: Unit = Unit::Transaction(ANY);

fn run(bytes: Range<u64>) -> Run {
    Run::between(Logical(bytes.start), Logical(bytes.end)).expect("not empty")
}
fn group(bytes: Range<u64>, flags: BlockGroupFlags, created: u64) -> BlockGroup {
    BlockGroup::empty(run(bytes), flags, Generation(created), &[])
}
fn groups(list: Vec<BlockGroup>) -> Groups {
    let groups = Groups::new(Space::new(false), NODE);
    list.into_iter().for_each(|g| drop(groups.add(g).unwrap()));
    groups
}
fn meta(g: &Groups, bytes: u64) -> Reservation {
    g.space().reserve(SpaceKind::Metadata, bytes).unwrap()
}

#[test]
fn the_last_bytes_of_a_granule_take_the_rest_along() {
    const K: u64 = 1024;
    let g = groups(vec![group(16 * MIB..16 * MIB + MIB + 32 * K, BlockGroupFlags::DATA, 1)]);
    let mut r = g.space().reserve(SpaceKind::Data, MIB).unwrap();
    let all = g.allocate_data(Lengths::exactly(MIB), ANY, &mut r).unwrap();
    assert_eq!(all.start, Logical(16 * MIB));
    let at = |part: Range<u64>| run(16 * MIB + part.start * K..16 * MIB + part.end * K);
    let free = |part: Run| {
        g.pin(part).unwrap();
        g.pin_granules(part, 64 * K)
    };
    assert_eq!(free(at(0..20)), None, "the rest of it is allocated");
    assert_eq!(free(at(40..64)), None);
    assert_eq!(free(at(20..40)), Some(at(0..64)), "with what was free before");
    g.discarded(at(0..64));
    assert_eq!(free(at(100..300)), Some(at(128..256)), "whole ones of a longer run");
    assert_eq!(g.space().figures(SpaceKind::Data).pinned, 128 * K, "the rest is free at once");
    g.discarded(at(128..256));
    // The last granule of the group is a short one.
    assert_eq!(free(at(1000..1024)), None);
    assert_eq!(free(at(960..1000)), Some(at(960..1024)));
    g.discarded(at(960..1024));
    let undiscarded = g.take_undiscarded();
    assert_eq!(undiscarded.len(), 1, "some of it was not discarded");
    assert!(g.take_undiscarded().is_empty());
    // Space that was promised stays where it can be had.
    let left = g.space().figures(SpaceKind::Data).free();
    let promise = g.space().reserve(SpaceKind::Data, left).unwrap();
    assert_eq!(free(at(64..100)), None);
    assert_eq!(
        g.pin_free(&g.find(all.start).unwrap(), all, Lengths { most: MIB, least: 1 })
            .map(|r| r.len),
        Some(36 * K),
        "not promised"
    );
    drop(promise);
    assert_eq!(g.space().figures(SpaceKind::Data).pinned, 36 * K);
}

#[test]
fn free_space_is_pinned_in_whole_sectors() {
    let g = groups(vec![group(16 * MIB..17 * MIB, BlockGroupFlags::DATA, 1)]);
    let all = g.find(Logical(16 * MIB)).unwrap();
    let odd = run(16 * MIB + 4097..16 * MIB + 12097);
    assert_eq!(g.next_free(&all, odd, 8000), Some(odd));
    assert_eq!(g.next_free(&all, odd, 8001), None);
    let pinned = g.pin_free(&all, odd, Lengths { most: MIB, least: 1 }).unwrap();
    assert_eq!(pinned, run(16 * MIB + 4096..16 * MIB + 12288));
    // The rest of a sector is not handed out meanwhile.
    let mut r = g.space().reserve(SpaceKind::Data, MIB - 8192).unwrap();
    while r.bytes() > 0 {
        let got = g.allocate_data(Lengths { most: r.bytes(), least: 4096 }, ANY, &mut r).unwrap();
        assert!(got.start.0.is_multiple_of(4096) && got.len.is_multiple_of(4096), "{got:?}");
    }
    g.discarded(pinned);
    assert_eq!(g.space().figures(SpaceKind::Data).free(), 8192);
}

#[test]
fn data_is_sequential_and_falls_back_to_the_longest_piece() {
    let g = groups(vec![
        group(16 * MIB..24 * MIB, BlockGroupFlags::DATA, 1),
        group(64 * MIB..68 * MIB, BlockGroupFlags::DATA, 1),
        group(128 * MIB..132 * MIB, BlockGroupFlags::METADATA, 1),
    ]);
    let mut r = g.space().reserve(SpaceKind::Data, 12 * MIB).unwrap();
    let mut at = 16 * MIB;
    for _ in 0..3 {
        assert_eq!(
            g.allocate_data(Lengths { most: 2 * MIB, least: 4096 }, ANY, &mut r).unwrap(),
            run(at..at + 2 * MIB)
        );
        at += 2 * MIB;
    }
    assert_eq!(
        g.allocate_data(Lengths { most: 3 * MIB, least: 4096 }, ANY, &mut r).unwrap(),
        run(64 * MIB..67 * MIB)
    );
    assert_eq!(
        g.allocate_data(Lengths { most: 3 * MIB, least: 4096 }, ANY, &mut r).unwrap(),
        run(22 * MIB..24 * MIB),
        "the longest"
    );
    assert_eq!(
        g.allocate_data(Lengths { most: 3 * MIB, least: 2 * MIB }, ANY, &mut r),
        Err(NeedChunk(SpaceKind::Data))
    );
    assert_eq!(r.bytes(), MIB);
    let figures = g.space().figures(SpaceKind::Data);
    assert_eq!((figures.used, figures.reserved, figures.free()), (11 * MIB, MIB, MIB));
    // Freed, it is pinned first.
    g.pin(run(16 * MIB..18 * MIB)).unwrap();
    assert_eq!(
        g.allocate_data(Lengths::exactly(2 * MIB), ANY, &mut r),
        Err(NeedChunk(SpaceKind::Data))
    );
    g.unpin(run(16 * MIB..18 * MIB));
    assert_eq!(
        g.allocate_data(Lengths::exactly(MIB), ANY, &mut r).unwrap().start,
        Logical(16 * MIB)
    );
    assert!(g.pin(run(16 * MIB..24 * MIB)).is_err(), "more than is allocated");
    assert!(g.pin(run(23 * MIB..25 * MIB)).is_err(), "across the border");
}

#[test]
fn blocks_rise_in_windows_of_their_own() {
    let g = groups(vec![group(64 * MIB..96 * MIB, BlockGroupFlags::METADATA, 1)]);
    let mut r = meta(&g, 16 * MIB);
    let mut last = [Logical(0); 2];
    let mut seen = std::collections::BTreeSet::new();
    for i in 0..120 {
        let user = if i % 2 == 0 { ClusterUser::Running } else { ClusterUser::Committer };
        let at = g.allocate_block((user, UNIT), ANY, &mut r).unwrap();
        let before = std::mem::replace(&mut last[user as usize], at);
        if i > 1 && i < 100 {
            assert_eq!(at, before.plus(u64::from(NODE)), "block {i}");
        }
        assert!(at.0.is_multiple_of(u64::from(NODE)) && seen.insert(at));
    }
    // All or nothing.
    let free = g.all()[0].usage().free;
    let too_many = usize::try_from(free / u64::from(NODE)).unwrap() + 1;
    let held = r.bytes();
    assert!(g.allocate_blocks((ClusterUser::Running, UNIT), too_many, ANY, &mut r).is_err());
    assert_eq!(g.all()[0].usage().free, free);
    assert!(r.bytes() >= held);
    assert_eq!(
        g.allocate_blocks((ClusterUser::Running, UNIT), too_many - 1, ANY, &mut r).unwrap().len(),
        too_many - 1
    );
}

#[test]
fn a_commit_takes_no_blocks_from_groups_that_it_does_not_have() {
    let g = groups(vec![
        group(16 * MIB..17 * MIB, BlockGroupFlags::METADATA, 9),
        group(64 * MIB..65 * MIB, BlockGroupFlags::METADATA, 8),
        group(96 * MIB..97 * MIB, BlockGroupFlags::SYSTEM, 9),
    ]);
    let mut r = meta(&g, 2 * MIB);
    for _ in 0..MIB / u64::from(NODE) {
        let at = g.allocate_block((ClusterUser::Committer, UNIT), Generation(8), &mut r).unwrap();
        assert!(at >= Logical(64 * MIB));
    }
    let none = g.allocate_block((ClusterUser::Committer, UNIT), Generation(8), &mut r);
    assert_eq!(none, Err(NeedChunk(SpaceKind::Metadata)));
    assert_eq!(
        g.allocate_block((ClusterUser::Running, UNIT), Generation(9), &mut r),
        Ok(Logical(16 * MIB))
    );
    let mut system = g.space().empty(SpaceKind::System);
    assert!(g.allocate_system_block(Generation(8), &mut system).is_err());
    assert_eq!(g.allocate_system_block(Generation(9), &mut system), Ok(Logical(96 * MIB)));
    assert_eq!(g.space().figures(SpaceKind::System).used, u64::from(NODE));
}

#[test]
fn holes_that_lie_askew_are_used_last() {
    let mut free = FreeIndex::new();
    free.insert(run(MIB + 4096..MIB + 4096 + u64::from(NODE)));
    free.insert(run(MIB + 65536..MIB + 65536 + u64::from(NODE)));
    let g = groups(vec![BlockGroup::new(
        run(MIB..2 * MIB),
        BlockGroupFlags::METADATA,
        Generation(0),
        MIB - 2 * u64::from(NODE),
        free,
        &[],
    )]);
    let mut r = g.space().empty(SpaceKind::Metadata);
    let both = g.allocate_blocks((ClusterUser::Running, UNIT), 2, ANY, &mut r).unwrap();
    assert_eq!(both, [Logical(MIB + 65536), Logical(MIB + 4096)]);
}

/// A relocation of a group that was left needs space for what it holds, and does not open it.
#[test]
fn a_group_that_was_left_is_opened_by_coming_back_only() {
    let g = groups(vec![
        group(16 * MIB..17 * MIB, BlockGroupFlags::DATA, 1),
        group(32 * MIB..33 * MIB, BlockGroupFlags::DATA, 1),
    ]);
    let (first, second) = (g.find(Logical(16 * MIB)), g.find(Logical(32 * MIB)));
    let (first, second) = (first.unwrap(), second.unwrap());
    let mut r = g.space().reserve(SpaceKind::Data, MIB + 4096).unwrap();
    let length = Lengths::exactly(512 << 10);
    assert_eq!(g.allocate_data(length, ANY, &mut r).unwrap().start, Logical(16 * MIB));
    assert!(g.try_leave(&first) && first.is_read_only());
    assert!(!g.try_leave(&second) && !second.is_read_only(), "there is a promise in it");
    assert!(!g.try_set_read_only(&first), "what it holds and what is promised do not fit");
    assert_eq!(g.allocate_data(length, ANY, &mut r).unwrap().start, Logical(32 * MIB));
    drop(r);
    assert!(g.try_set_read_only(&first), "now it does");
    g.set_read_only(&first, false);
    assert!(first.is_read_only(), "the relocation has ended, and the device is as it was");
    assert_eq!(g.space().figures(SpaceKind::Data).free(), MIB / 2);
    g.come_back(&first);
    g.come_back(&second);
    assert_eq!(g.space().figures(SpaceKind::Data).free(), MIB);
    assert!(!first.is_read_only() && g.try_set_read_only(&first));
}

#[test]
fn read_only_and_removed_groups_do_not_count() {
    let g = groups(vec![
        group(16 * MIB..17 * MIB, BlockGroupFlags::DATA, 1),
        group(32 * MIB..33 * MIB, BlockGroupFlags::DATA, 1),
    ]);
    let first = g.find(Logical(16 * MIB)).unwrap();
    let mut r = g.space().reserve(SpaceKind::Data, 8192).unwrap();
    let a = g.allocate_data(Lengths::exactly(4096), ANY, &mut r).unwrap();
    assert_eq!(a.start, Logical(16 * MIB));
    g.set_read_only(&first, true);
    assert_eq!(g.space().figures(SpaceKind::Data).free(), MIB);
    assert_eq!(
        g.allocate_data(Lengths::exactly(4096), ANY, &mut r).unwrap().start,
        Logical(32 * MIB)
    );
    assert!(!g.remove_unpromised(&first), "it holds an extent");
    g.pin(a).unwrap();
    assert!(g.empty_groups().is_empty());
    g.unpin(a);
    assert_eq!(g.empty_groups().len(), 1);
    assert!(g.remove_unpromised(&first) && !g.remove_unpromised(&first));
    assert!(g.find(Logical(16 * MIB)).is_none());
    let figures = g.space().figures(SpaceKind::Data);
    assert_eq!((figures.total, figures.used, figures.unusable), (MIB, 4096, 0));
    assert!(
        g.add(group(32 * MIB + 4096..32 * MIB + 4096 + MIB, BlockGroupFlags::DATA, 1)).is_err(),
        "overlap"
    );
    assert!(
        g.add(group(31 * MIB + 4096..31 * MIB + 4096 + MIB, BlockGroupFlags::DATA, 1)).is_err(),
        "overlap"
    );
    let both = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    assert!(
        g.add(group(64 * MIB..65 * MIB, both, 1)).is_err(),
        "data and metadata have accounts of their own"
    );
    assert!(Groups::new(Space::new(true), NODE).add(group(64 * MIB..65 * MIB, both, 1)).is_ok());
}

#[test]
fn a_group_whose_space_was_promised_never_goes_out_of_service() {
    let g = groups(vec![
        group(16 * MIB..17 * MIB, BlockGroupFlags::DATA, 1),
        group(32 * MIB..33 * MIB, BlockGroupFlags::DATA, 1),
    ]);
    let second = g.find(Logical(32 * MIB)).unwrap();
    let mut promised = g.space().reserve(SpaceKind::Data, MIB + 4096).unwrap();
    assert!(!g.remove_unpromised(&second), "a sector of it was promised");
    assert!(!second.usage().read_only);
    assert_eq!(g.space().figures(SpaceKind::Data).free(), 2 * MIB);
    drop(promised.split(4096));
    assert!(g.remove_unpromised(&second));
    assert_eq!(
        g.space().figures(SpaceKind::Data),
        Figures { total: MIB, reserved: MIB, ..Figures::default() }
    );
    let all = g.allocate_data(Lengths::exactly(MIB), ANY, &mut promised).unwrap();
    assert_eq!((all.start, promised.bytes()), (Logical(16 * MIB), 0));
}

#[test]
fn used_bytes_on_disk_must_add_up() {
    let g = group(MIB..2 * MIB, BlockGroupFlags::DATA, 1);
    assert_eq!(g.apply_used(8192).unwrap(), 8192);
    assert!(g.apply_used(-8193).is_err() && g.apply_used(1 << 30).is_err());
    assert_eq!(g.apply_used(-8192).unwrap(), 0);
    assert_eq!(g.usage().allocated, 0, "the allocator's view is another");
}

/// A chunk over the second superblock copy with two extents, and its trees.
struct Image {
    chunk: MappedChunk,
    extents: MapTree,
    groups: MapTree,
    free: MapTree,
}

fn image() -> Image {
    let stripe = Stripe { device: DeviceId(1), at: Physical(60 * MIB) };
    let chunk = MappedChunk {
        start: Logical(100 * MIB),
        length: 8 * MIB,
        kind: 1,
        stripes: [stripe].into_iter().collect(),
    };
    let all = run(100 * MIB..108 * MIB);
    let mut extents = MapTree::default();
    let features = ExtentFeatures { skinny: true, nodesize: NODE };
    let used = [
        run(100 * MIB..100 * MIB + 8192),
        run(100 * MIB + 8192..100 * MIB + 12288),
        run(101 * MIB..101 * MIB + 65536),
    ];
    for r in used {
        let mut head = RefHead::existing(r.len, ExtentKind::Data);
        head.created = true;
        head.add(ExtentRef::data(ObjectId(5), ObjectId(257), FileOffset(0), 0), 1);
        apply(&mut extents, features, r.start, &head).unwrap();
    }
    let mut groups = MapTree::default();
    let item = BlockGroupItem::new(77824, BlockGroupFlags::DATA);
    groups
        .insert(&Key::new(all.start, KeyType::BLOCK_GROUP_ITEM, all.len), item.as_bytes())
        .unwrap();
    let mut free = MapTree::default();
    free_space_tree::new_group(&mut free, all, &used).unwrap();
    Image { chunk, extents, groups, free }
}

impl Image {
    fn load(&mut self, tree: bool) -> Result<super::load::Loaded> {
        let mut source = if tree { FreeSource::Tree(&mut self.free) } else { FreeSource::Extents };
        let id = ObjectId::BLOCK_GROUP_TREE;
        load(&self.chunk, &mut self.groups, id, &mut source, &mut self.extents, NODE)
    }
}

#[test]
fn both_sources_say_the_same_and_superblock_copies_are_left_out() {
    let mut image = image();
    let a = image.load(true).unwrap();
    let b = image.load(false).unwrap();
    assert!(!a.rebuild_free_space && !b.rebuild_free_space);
    assert_eq!(a.group.free_runs(), b.group.free_runs());
    assert_eq!(a.group.usage(), b.group.usage());
    // The copy at 64 MiB lies 4 MiB into the chunk.
    let want = [
        run(100 * MIB + 12288..101 * MIB),
        run(101 * MIB + 65536..104 * MIB),
        run(104 * MIB + 65536..108 * MIB),
    ];
    assert_eq!(a.group.free_runs(), want);
    let g = groups(vec![a.group]);
    let figures = g.space().figures(SpaceKind::Data);
    assert_eq!((figures.used, figures.unusable), (77824, 65536));
}

#[test]
fn a_wrong_free_space_tree_is_not_believed_and_wrong_items_are_reported() {
    let mut i = image();
    let all = run(100 * MIB..108 * MIB);
    free_space_tree::remove(&mut i.free, all, run(102 * MIB..102 * MIB + 4096)).unwrap();
    let loaded = i.load(true).unwrap();
    assert!(loaded.rebuild_free_space);
    assert_eq!(loaded.group.free_runs(), image().load(false).unwrap().group.free_runs());
    i.free = MapTree::default();
    assert!(i.load(true).unwrap().rebuild_free_space);
    // An extent more than the group says; an extent across its end; overlapping extents; another
    // type; no item.
    let extent = |start: u64, len: u64| (Key::new(start, KeyType::EXTENT_ITEM, len), Vec::new());
    for (key, data) in [
        extent(102 * MIB, 4096),
        extent(108 * MIB - 4096, 8192),
        extent(100 * MIB + 4096, 4096),
        extent(107 * MIB, u64::MAX),
        extent(107 * MIB, 0),
    ] {
        let mut i = image();
        i.extents.0.insert(key, data);
        assert!(matches!(i.load(false), Err(Error::Corrupt { .. })), "{key}");
    }
    let mut i = image();
    i.chunk.kind = 4;
    assert!(i.load(true).is_err());
    i.groups = MapTree::default();
    i.chunk.kind = 1;
    assert!(i.load(true).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn no_byte_has_two_owners(ops in prop::collection::vec((0u8..6, any::<u32>()), 1..300)) {
        let g = Groups::new(Space::new(true), 4096);
        let flags = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
        let copy = [(Logical(MIB + 65536), 65536)];
        g.add(BlockGroup::empty(run(MIB..2 * MIB), flags, Generation(1), &copy)).unwrap();
        let second = run(2 * MIB..2 * MIB + MIB / 2);
        g.add(BlockGroup::empty(second, flags, Generation(2), &[])).unwrap();
        let mut r = g.space().empty(SpaceKind::Metadata);
        let mut data = g.space().empty(SpaceKind::Data);
        let (mut owned, mut pinned): (Vec<Run>, Vec<Run>) = (Vec::new(), Vec::new());
        for (op, n) in ops {
            let slot = n as usize % owned.len().max(1);
            match op {
                0 => {
                    let newest = Generation(1 + u64::from(n) % 2);
                    let user =
                        if n % 4 < 2 { ClusterUser::Running } else { ClusterUser::Committer };
                    if let Ok(at) = g.allocate_block((user, UNIT), newest, &mut r) {
                        prop_assert!(newest.0 == 2 || at.0 < 2 * MIB);
                        owned.push(run(at.0..at.0 + 4096));
                    }
                }
                1 | 2 => {
                    let most = u64::from(1 + n % 32) * 4096;
                    let wanted = Lengths { most, least: 4096 };
                    owned.extend(g.allocate_data(wanted, ANY, &mut data).ok());
                }
                3 if !owned.is_empty() => {
                    let run = owned.swap_remove(slot);
                    g.pin(run).unwrap();
                    pinned.push(run);
                }
                4 if !owned.is_empty() => {
                    g.give_back(owned.swap_remove(slot), n.is_multiple_of(2).then_some(&mut r));
                    r.shrink_to(0);
                }
                5 if n.is_multiple_of(4) => pinned.drain(..).for_each(|run| g.unpin(run)),
                _ => {}
            }
            let figures = g.space().figures(SpaceKind::Data);
            prop_assert_eq!(figures.used, owned.iter().map(|r| r.len).sum::<u64>());
            prop_assert_eq!(figures.pinned, pinned.iter().map(|r| r.len).sum::<u64>());
        }
        let mut all: Vec<Run> = owned.into_iter().chain(pinned).collect();
        all.extend(g.all().iter().flat_map(|g| g.free_runs()));
        all.push(Run::new(copy[0].0, copy[0].1));
        all.sort_unstable();
        prop_assert!(all.windows(2).all(|w| w[0].end() <= w[1].start));
        prop_assert_eq!(all.iter().map(|r| r.len).sum::<u64>(), MIB + MIB / 2);
        prop_assert_eq!(g.space().reserved_by_operations(SpaceKind::Data), 0);
    }
}

#[test]
fn threads_leave_nothing_behind() {
    let flags = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    let g = Groups::new(Space::new(true), 4096);
    for n in 0..4 {
        g.add(group(n * 4 * MIB..n * 4 * MIB + 4 * MIB, flags, n)).unwrap();
    }
    let all = g.all();
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            let (g, all) = (&g, &all);
            scope.spawn(move || {
                let mut mine: Vec<Run> = Vec::new();
                let mut r = g.space().empty(SpaceKind::Metadata);
                let mut data = g.space().empty(SpaceKind::Data);
                for n in 0..3000u64 {
                    let user =
                        if t % 2 == 0 { ClusterUser::Running } else { ClusterUser::Committer };
                    if n % 2 == 0 {
                        mine.extend(
                            g.allocate_data(
                                Lengths { most: 4096 * (1 + n % 7), least: 4096 },
                                ANY,
                                &mut data,
                            )
                            .ok(),
                        );
                    } else if let Ok(at) = g.allocate_block((user, UNIT), Generation(n % 4), &mut r)
                    {
                        mine.push(run(at.0..at.0 + 4096));
                    }
                    if n % 5 == 0 {
                        g.set_read_only(&all[(n % 4) as usize], n % 10 == 0);
                    }
                    if mine.len() > 40 {
                        for run in mine.drain(..20) {
                            if run.len > 4096 {
                                g.pin(run).unwrap();
                                g.unpin(run);
                            } else {
                                g.give_back(run, None);
                            }
                        }
                    }
                }
                mine.into_iter().for_each(|run| g.give_back(run, None));
            });
        }
    });
    for group in &all {
        g.set_read_only(group, true);
        assert_eq!(group.usage().free, 4 * MIB);
        assert!(g.remove_unpromised(group));
    }
    assert_eq!(g.space().figures(SpaceKind::Metadata), Figures::default());
}

/// Two groups for data and metadata with rows of three columns.
fn with_rows() -> Groups {
    let g = Groups::new(Space::new(true), 16384);
    let flags = BlockGroupFlags::DATA | BlockGroupFlags::METADATA | BlockGroupFlags::RAID5;
    let stripe = 3 * STRIPE_LEN;
    for n in 0..2 {
        let run = Run::new(Logical(MIB + n * 8 * stripe), 8 * stripe);
        let copy = [(run.start.plus(stripe), stripe)];
        let group = BlockGroup::empty(run, flags, Generation(1), &copy);
        g.add(group.with_columns(3)).unwrap();
    }
    g.space().set_data_charge(g.widest_row(SpaceKind::Data, 4));
    g
}

/// The rows that a run lies in.
fn rows(run: Run) -> impl Iterator<Item = u64> {
    let row = |at: u64| {
        let into = at - MIB;
        into / (3 * STRIPE_LEN) * 16 + into % STRIPE_LEN / 4096
    };
    (run.start.0..run.end().0).step_by(4096).map(row)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// Whatever is allocated and freed: a row has sectors of one unit only until all of it is free,
    /// what was reserved is there, and the account agrees with the groups.
    #[test]
    fn rows_are_shared_within_a_unit_only(
        ops in prop::collection::vec((0u8..9, any::<u32>()), 1..200),
    ) {
        let g = with_rows();
        prop_assert_eq!(g.space().charge(SpaceKind::Data), 3);
        let mut meta = g.space().empty(SpaceKind::Metadata);
        let (mut owned, mut pinned): (Vec<Run>, Vec<Run>) = (Vec::new(), Vec::new());
        let mut of_row: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        // Units of both users, of a log, and of data, which all have numbers of their own.
        let mut units = [1u64, 2, 3, 4];
        let mut next = 5;
        for (op, n) in ops {
            let slot = n as usize % owned.len().max(1);
            let mut took = Vec::new();
            match op {
                0..=2 => {
                    let user = if op == 1 { ClusterUser::Committer } else { ClusterUser::Running };
                    if n % 5 == 0 {
                        (units[usize::from(op)], next) = (next, next + 1);
                    }
                    let number = units[usize::from(op)];
                    let unit = match op {
                        2 => Unit::LogStep(number),
                        _ => Unit::Transaction(Generation(number)),
                    };
                    if let Ok(at) = g.allocate_block((user, unit), ANY, &mut meta) {
                        took.push((Run::new(at, 16384), number));
                    }
                }
                3 | 4 => {
                    let most = u64::from(1 + n % 60) * 4096;
                    if let Some(mut space) = g.space().try_reserve(SpaceKind::Data, most) {
                        let mut left = most;
                        while left > 0 {
                            let wanted = Lengths { most: left, least: 4096 };
                            // It was promised.
                            let run = g.allocate_data(wanted, ANY, &mut space).unwrap();
                            left -= run.len;
                            (units[3], next) = (next, next + 1);
                            took.push((run, units[3]));
                        }
                        prop_assert_eq!(space.bytes(), 0);
                        let (run, unit) = took.pop().unwrap();
                        let half = run.len / 8192 * 4096;
                        if half > 0 && n % 3 == 0 {
                            let before = g.space().figures(SpaceKind::Data);
                            let rest = Run::new(run.start.plus(half), run.len - half);
                            g.give_back(rest, Some(&mut space));
                            let now = g.space().figures(SpaceKind::Data);
                            prop_assert_eq!(now.reserved - before.reserved, space.bytes() * 3);
                            prop_assert!(now.free() >= now.reserved);
                            took.push((Run::new(run.start, half), unit));
                        } else {
                            took.push((run, unit));
                        }
                    }
                }
                5 if !owned.is_empty() => {
                    let run = owned.swap_remove(slot);
                    g.pin(run).unwrap();
                    pinned.push(run);
                }
                6 if !owned.is_empty() => {
                    let run = owned.swap_remove(slot);
                    g.give_back(run, None);
                    for row in rows(run) {
                        of_row.get_mut(&row).unwrap().1 -= 1;
                    }
                }
                7 => {
                    for run in pinned.drain(..) {
                        g.unpin(run);
                        for row in rows(run) {
                            of_row.get_mut(&row).unwrap().1 -= 1;
                        }
                    }
                }
                8 if !owned.is_empty() => {
                    // Discards take whole stripes.
                    let run = owned.swap_remove(slot);
                    g.pin(run).unwrap();
                    if let Some(found) = g.pin_granules(run, STRIPE_LEN) {
                        prop_assert!(run.contains(found));
                        prop_assert!((found.start.0 - MIB).is_multiple_of(3 * STRIPE_LEN));
                        prop_assert!(found.len.is_multiple_of(3 * STRIPE_LEN));
                        g.discarded(found);
                    }
                    for row in rows(run) {
                        of_row.get_mut(&row).unwrap().1 -= 1;
                    }
                }
                _ => {}
            }
            for (run, unit) in took {
                owned.push(run);
                for row in rows(run) {
                    let (of, count) = of_row.entry(row).or_insert((unit, 0));
                    prop_assert!(*count == 0 || *of == unit, "row {} of {} and {}", row, of, unit);
                    (*of, *count) = (unit, *count + 1);
                }
            }
            of_row.retain(|_, (_, count)| *count > 0);
            let figures = g.space().figures(SpaceKind::Data);
            prop_assert_eq!(figures.used, owned.iter().map(|r| r.len).sum::<u64>());
            prop_assert_eq!(figures.pinned, pinned.iter().map(|r| r.len).sum::<u64>());
            prop_assert_eq!(figures.reserved, 0);
            // Of 16 stripes 2 are left out.
            let in_rows = (14 * 16 - of_row.len() as u64) * 3 * 4096;
            prop_assert_eq!(figures.free(), in_rows);
        }
        for run in owned {
            g.give_back(run, None);
        }
        pinned.into_iter().for_each(|run| g.unpin(run));
        prop_assert_eq!(g.space().figures(SpaceKind::Data).free(), 14 * 3 * STRIPE_LEN);
    }
}
