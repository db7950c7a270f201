//! The free-space tree against a vector of bits.

use super::*;
use crate::tree::ops::MapTree;
use proptest::prelude::*;

const BASE: u64 = 13 << 20;

fn group(len: u64) -> Run {
    Run::new(Logical(BASE), len)
}
fn sectors(first: usize, count: usize) -> Run {
    Run::new(Logical(BASE + first as u64 * SECTOR), count as u64 * SECTOR)
}
fn runs_of(bits: &[bool]) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::new();
    for (i, _) in bits.iter().enumerate().filter(|(_, free)| **free) {
        match out.last_mut() {
            Some(r) if r.end() == sectors(i, 1).start => r.len += SECTOR,
            _ => out.push(sectors(i, 1)),
        }
    }
    out
}
fn loaded(tree: &mut MapTree, group: Run) -> Result<Vec<Run>> {
    let mut out = Vec::new();
    load(tree, group, &mut |r| {
        out.push(r);
        Ok(())
    })?;
    Ok(out)
}
fn uses_bitmaps(tree: &mut MapTree, group: Run) -> bool {
    Info::read(tree, group).unwrap().bitmaps
}

#[test]
fn thresholds_are_those_of_linux() {
    assert_eq!(thresholds(8 << 20), (11, 0));
    assert_eq!(thresholds(1 << 30), (1438, 1338));
}

#[test]
fn a_new_group_is_one_extent_and_leftovers_go() {
    let g = group(8 << 20);
    let mut t = MapTree::default();
    t.insert(&Key::new(g.start, KeyType::FREE_SPACE_INFO, 4096), &[1; 8]).unwrap();
    t.insert(&Key::new(g.end(), KeyType::FREE_SPACE_INFO, 4096), &[0; 8]).unwrap();
    new_group(&mut t, g, &[]).unwrap();
    assert_eq!(t.0.len(), 3);
    assert_eq!(t.0[&info_key(g)], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(loaded(&mut t, g).unwrap(), [g]);
    delete_group(&mut t, g).unwrap();
    assert_eq!(t.0.len(), 1, "the neighbour stays");
}

#[test]
fn form_changes_at_the_thresholds_and_not_between() {
    let g = group(80 << 20); // 10 bitmaps: 112 and 12
    let (high, low) = thresholds(g.len);
    assert_eq!((high, low), (112, 12));
    let mut t = MapTree::default();
    new_group(&mut t, g, &[]).unwrap();
    let mut n = 0;
    while !uses_bitmaps(&mut t, g) {
        n += 1;
        remove(&mut t, g, sectors(n * 100, 1)).unwrap();
    }
    assert_eq!(n as u64, high); // n holes make n + 1 runs
    assert_eq!(t.0.len(), 11);
    while uses_bitmaps(&mut t, g) {
        add(&mut t, g, sectors(n * 100, 1)).unwrap();
        n -= 1;
    }
    assert_eq!(n as u64 + 1, low - 1);
    assert_eq!(loaded(&mut t, g).unwrap().len() as u64, low - 1);
}

#[test]
fn what_is_not_free_cannot_be_removed_nor_the_reverse() {
    for used in [vec![], (0..600).map(|i| sectors(i * 2 + 1, 1)).collect::<Vec<_>>()] {
        let g = group(16 << 20);
        let mut t = MapTree::default();
        new_group(&mut t, g, &used).unwrap();
        remove(&mut t, g, sectors(2000, 10)).unwrap();
        let before = t.clone();
        assert!(remove(&mut t, g, sectors(1999, 2)).is_err());
        assert!(remove(&mut t, g, sectors(2005, 1)).is_err());
        assert!(add(&mut t, g, sectors(1999, 2)).is_err());
        assert!(add(&mut t, g, sectors(2009, 2)).is_err());
        assert!(add(&mut t, g, sectors(4095, 2)).is_err(), "beyond the group");
        assert_eq!(t, before);
    }
}

#[test]
fn broken_items_are_reported() {
    let g = group(16 << 20);
    let mut good = MapTree::default();
    new_group(&mut good, g, &[sectors(5, 5)]).unwrap();
    let mut maps = MapTree::default();
    new_group(&mut maps, g, &(0..600).map(|i| sectors(i * 2, 1)).collect::<Vec<_>>()).unwrap();
    assert!(uses_bitmaps(&mut maps, g));
    let broken = |t: &MapTree, f: &dyn Fn(&mut MapTree)| {
        let mut t = t.clone();
        f(&mut t);
        let e = loaded(&mut t, g).unwrap_err();
        assert!(matches!(e, Error::Corrupt { .. }), "{e}");
        let _ = remove(&mut t, g, sectors(11, 1));
        let _ = add(&mut t, g, sectors(6, 1));
        let _ = add(&mut t, g, sectors(0, 4096));
    };
    let ext = |first, count| extent_key(sectors(first, count));
    broken(&good, &|t| t.delete(&info_key(g)).unwrap());
    broken(&good, &|t| t.update(&info_key(g), &[9, 0, 0, 0, 0, 0, 0, 0]).unwrap());
    broken(&good, &|t| t.update(&info_key(g), &[2, 0, 0, 0, 1, 0, 0, 0]).unwrap());
    broken(&good, &|t| t.update(&info_key(g), &[2, 0, 0, 0, 2, 0, 0, 0]).unwrap());
    broken(&good, &|t| t.update(&info_key(g), &[2, 0, 0]).unwrap());
    broken(&good, &|t| t.insert(&ext(2, 1), &[]).unwrap());
    broken(&good, &|t| t.insert(&ext(4000, 100), &[]).unwrap());
    broken(&good, &|t| {
        t.insert(&Key::new(g.start.plus(5 << 12), KeyType::FREE_SPACE_EXTENT, 5), &[]).unwrap()
    });
    let huge = Key::new(g.start.plus(5 << 12), KeyType::FREE_SPACE_EXTENT, u64::MAX - 5);
    broken(&good, &|t| t.insert(&huge, &[]).unwrap());
    broken(&good, &|t| {
        t.insert(&Key::new(g.start.plus(5 << 12), KeyType(201), 4096), &[]).unwrap()
    });
    let map = Key::new(g.start, KeyType::FREE_SPACE_BITMAP, BITMAP_RANGE);
    broken(&maps, &|t| t.delete(&map).unwrap());
    broken(&maps, &|t| t.update(&map, &[0; 255]).unwrap());
    broken(&maps, &|t| t.update(&map, &[0; 256]).unwrap());
    broken(&maps, &|t| t.update(&info_key(g), &[9, 0, 0, 0, 0, 0, 0, 0]).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn edits_match_a_bitmap(
        mib in 1u64..33,
        odd in 0u64..16,
        dense in any::<bool>(),
        ops in prop::collection::vec((any::<u32>(), 1usize..300, any::<bool>()), 1..200),
    ) {
        let g = group((mib << 20) + odd * 65536);
        let total = usize::try_from(g.len / SECTOR).unwrap();
        let mut bits = vec![true; total];
        if dense {
            bits.iter_mut().skip(1).step_by(3).for_each(|b| *b = false);
        }
        let used: Vec<Run> = runs_of(&bits.iter().map(|b| !b).collect::<Vec<_>>());
        let mut t = MapTree::default();
        new_group(&mut t, g, &used).unwrap();
        for (at, len, fill) in ops {
            // The range of one state around a random sector is turned over.
            let at = at as usize % total;
            let free = bits[at];
            let mut end = at;
            let len = if fill { len } else { 1 + len % 3 };
            while end < total && end - at < len && bits[end] == free {
                end += 1;
            }
            let range = sectors(at, end - at);
            if free { remove(&mut t, g, range).unwrap() } else { add(&mut t, g, range).unwrap() }
            bits[at..end].fill(!free);
            let want = runs_of(&bits);
            let info = Info::read(&mut t, g).unwrap();
            prop_assert_eq!(info.extents as usize, want.len());
            let (high, low) = thresholds(g.len);
            let runs = want.len() as u64;
            prop_assert!((info.bitmaps && runs >= low) || (!info.bitmaps && runs <= high));
            let items =
                if info.bitmaps { g.len.div_ceil(BITMAP_RANGE) as usize } else { want.len() };
            prop_assert_eq!(t.0.len(), items + 1);
        }
        prop_assert_eq!(loaded(&mut t, g).unwrap(), runs_of(&bits));
    }
}

/// A number near a border of a group: where arithmetic goes wrong.
fn near() -> impl Strategy<Value = u64> {
    let borders = [0, BASE, BASE + (8 << 20), BASE + (16 << 20), u64::MAX, BITMAP_RANGE, 16 << 20];
    (prop::sample::select(borders.to_vec()), -3i64..4, prop::bool::weighted(0.9))
        .prop_map(|(b, n, whole)| b.wrapping_add_signed(if whole { n * 4096 } else { n }))
}

proptest! {
    #[test]
    fn any_items_give_an_answer(
        items in prop::collection::vec(
            (near(), 197u8..202, near(), prop::collection::vec(any::<u8>(), 0..300),
                any::<bool>()), 0..8),
        count in 0u32..4,
        flags in 0u32..2,
        at in 0usize..4090,
        len in 1usize..6,
    ) {
        let g = group(16 << 20);
        let mut t = MapTree::default();
        t.0.insert(info_key(g), FreeSpaceInfo::new(count, flags == 1).as_bytes().to_vec());
        for (objectid, kind, offset, mut data, full) in items {
            if full {
                data.resize(256, 0x5a);
            }
            t.0.insert(Key::new(objectid, KeyType(kind), offset), data);
        }
        // Whatever the answer is, the runs that are reported lie in the group and rise.
        let mut last = g.start;
        let _ = load(&mut t, g, &mut |r| {
            assert!(g.contains(r) && r.start >= last && r.len > 0);
            last = r.end().plus(1);
            Ok(())
        });
        let _ = remove(&mut t.clone(), g, sectors(at, len));
        let _ = add(&mut t.clone(), g, sectors(at, len));
        new_group(&mut t, g, &[sectors(at, len)]).unwrap();
        let want: u64 = loaded(&mut t, g).unwrap().iter().map(|r| r.len).sum();
        prop_assert_eq!(want, g.len - len as u64 * SECTOR);
    }
}
