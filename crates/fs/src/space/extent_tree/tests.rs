//! The extent tree against a map of counts.

use super::*;
use crate::space::refs::DelayedRefs;
use crate::tree::ops::MapTree;
use larder_format::FileOffset;
use larder_format::csum::data_ref_hash;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

type Model = BTreeMap<Logical, (ExtentKind, BTreeMap<ExtentRef, u32>)>;

const SKINNY: ExtentFeatures = ExtentFeatures { skinny: true, nodesize: 4096 };
const A: Logical = Logical(1 << 20);

fn data(root: u64, inode: ObjectId, offset: u64) -> ExtentRef {
    ExtentRef::data(ObjectId(root), inode, FileOffset(offset), 0)
}
fn tree_ref(root: u64) -> ExtentRef {
    ExtentRef::TreeBlock { root: ObjectId(root) }
}
fn shared(parent: u64) -> ExtentRef {
    ExtentRef::SharedBlock { parent: Logical(parent) }
}
fn head(kind: ExtentKind, created: bool, refs: &[(ExtentRef, i64)]) -> RefHead {
    let mut h = RefHead::existing(4096, kind);
    (h.created, h.generation) = (created, Generation(9));
    refs.iter().for_each(|(k, d)| h.add(*k, *d));
    h
}

/// Reads a whole tree back, and checks counts, order and sizes on the way.
fn decode(tree: &MapTree, features: ExtentFeatures) -> Model {
    let mut model = Model::new();
    let mut want: BTreeMap<Logical, u64> = BTreeMap::new();
    for (key, bytes) in &tree.0 {
        let at = Logical(key.objectid.0);
        if extent_of(key, features.nodesize).is_some() {
            let r = ExtentItem::parse(key.kind, bytes).unwrap();
            assert_eq!(&r.encode(), bytes, "{key}");
            assert!(bytes.len() <= inline_limit(features.nodesize), "{key}");
            let kind = match (key.kind, r.block) {
                (KeyType::METADATA_ITEM, _) => {
                    ExtentKind::TreeBlock { level: u8::try_from(key.offset).unwrap() }
                }
                (_, Some(TreeBlockInfo { level, .. })) => ExtentKind::TreeBlock { level },
                _ => ExtentKind::Data,
            };
            assert_eq!(key.kind == KeyType::METADATA_ITEM, features.skinny && !kind.is_data());
            want.insert(at, keyed_refs(&r));
            let refs: BTreeMap<_, _> = r.inline.iter().copied().collect();
            assert_eq!(refs.len(), r.inline.len(), "{key}: a reference twice");
            assert!(model.insert(at, (kind, refs)).is_none());
        } else {
            let [(found, count)] = parse_keyed_refs(key, bytes).unwrap()[..] else {
                panic!("one each")
            };
            assert_eq!(found.kind(), key.kind);
            *want.get_mut(&at).expect("item of the extent") -= u64::from(count);
            assert!(
                model.get_mut(&at).unwrap().1.insert(found, count).is_none(),
                "{found:?} twice"
            );
        }
    }
    assert!(want.values().all(|n| *n == 0), "keyed references and counts differ: {want:?}");
    model
}

#[test]
fn bytes_of_a_shared_leaf_are_those_of_linux() {
    let mut t = MapTree::default();
    let kind = ExtentKind::TreeBlock { level: 0 };
    let refs =
        [(tree_ref(256), 1), (tree_ref(258), 1), (tree_ref(257), 1), (shared(0x1234_0000), 1)];
    assert_eq!(apply(&mut t, SKINNY, A, &head(kind, true, &refs)).unwrap(), Applied::Added);
    let mut h = head(kind, false, &[(tree_ref(256), -1)]);
    h.set_full_backref = true;
    assert_eq!(apply(&mut t, SKINNY, A, &h).unwrap(), Applied::Changed);
    let mut want = Vec::new();
    for v in [3u64, 9, 0x102] {
        want.extend(v.to_le_bytes());
    }
    for (kind, v) in [(176u8, 258u64), (176, 257), (182, 0x1234_0000)] {
        want.push(kind);
        want.extend(v.to_le_bytes());
    }
    assert_eq!(t.0[&Key::new(A, KeyType::METADATA_ITEM, 0)], want);
    let info = extent_info(&mut t, A, 4096, kind, true).unwrap().unwrap();
    assert_eq!((info.refs, info.full_backref, info.is_data), (3, true, false));
    assert!(
        extent_info(&mut t, A, 4096, ExtentKind::TreeBlock { level: 1 }, true).unwrap().is_none()
    );
}

#[test]
fn full_items_of_tree_blocks_are_written_and_found() {
    let mut t = MapTree::default();
    let kind = ExtentKind::TreeBlock { level: 1 };
    let plain = ExtentFeatures { skinny: false, ..SKINNY };
    let mut h = head(kind, true, &[(tree_ref(5), 1)]);
    h.first_key = Some(Key::new(256, KeyType::INODE_ITEM, 0));
    apply(&mut t, plain, A, &h).unwrap();
    let item = &t.0[&Key::new(A, KeyType::EXTENT_ITEM, 4096)];
    assert_eq!(item.len(), 51);
    assert_eq!(item[24..42], [0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    // Old items stay where SKINNY_METADATA was turned on later.
    for skinny in [false, true] {
        assert_eq!(extent_info(&mut t, A, 4096, kind, skinny).unwrap().unwrap().refs, 1);
    }
    let other = ExtentKind::TreeBlock { level: 0 };
    assert!(extent_info(&mut t, A, 4096, other, true).is_err(), "level of the item differs");
    let freed = apply(&mut t, SKINNY, A, &head(kind, false, &[(tree_ref(5), -1)])).unwrap();
    assert_eq!((freed, t.0.len()), (Applied::Freed, 0));
}

#[test]
fn wrong_references_are_reported() {
    let kind = ExtentKind::TreeBlock { level: 0 };
    let mut t = MapTree::default();
    apply(&mut t, SKINNY, A, &head(kind, true, &[(tree_ref(5), 1)])).unwrap();
    let data_at = A.plus(4096);
    apply(
        &mut t,
        SKINNY,
        data_at,
        &head(ExtentKind::Data, true, &[(data(5, ObjectId(257), 0), 2)]),
    )
    .unwrap();
    let fails = |at: Logical, h: &RefHead| {
        let mut t = t.clone();
        let e = apply(&mut t, SKINNY, at, h).unwrap_err();
        assert!(matches!(e, Error::Corrupt { .. }), "{e}");
    };
    fails(A, &head(kind, false, &[(tree_ref(5), 1)]));
    fails(A, &head(kind, false, &[(tree_ref(6), -1)]));
    fails(A, &head(kind, false, &[(tree_ref(5), -2)]));
    fails(A, &head(kind, false, &[(shared(7), 2)]));
    fails(A, &head(kind, true, &[(tree_ref(6), 1)]));
    fails(A, &head(ExtentKind::Data, false, &[(data(5, ObjectId(257), 0), 1)]));
    fails(data_at, &head(ExtentKind::Data, false, &[(data(5, ObjectId(257), 0), -3)]));
    fails(data_at, &head(ExtentKind::Data, false, &[(data(5, ObjectId(258), 0), -1)]));
    fails(
        data_at,
        &head(ExtentKind::Data, false, &[(data(5, ObjectId(258), 0), i64::from(u32::MAX) + 1)]),
    );
    fails(data_at, &head(kind, false, &[(tree_ref(5), 1)]));
    fails(data_at.plus(4096), &head(ExtentKind::Data, false, &[(data(5, ObjectId(257), 0), 1)]));
    // New extents that overlap the first or the second.
    let mut long = head(ExtentKind::Data, true, &[(data(5, ObjectId(1), 0), 1)]);
    long.num_bytes = 8192;
    fails(Logical(A.0 - 4096), &long);
    fails(A.plus(2048), &head(ExtentKind::Data, true, &[(data(5, ObjectId(1), 0), 1)]));
    assert_eq!(
        apply(&mut t, SKINNY, data_at.plus(4096), &head(kind, true, &[])).unwrap(),
        Applied::NeverUsed
    );
}

#[test]
fn malformed_items_are_reported() {
    let mut good = MapTree::default();
    let refs: Vec<_> = (0..40).map(|i| (data(5, ObjectId(257 + i), 0), 1)).collect();
    apply(&mut good, SKINNY, A, &head(ExtentKind::Data, true, &refs)).unwrap();
    let all_gone: Vec<_> = refs.iter().map(|(k, d)| (*k, -d)).collect();
    for key in good.0.keys() {
        let len = good.0[key].len();
        for n in 0..len * 8 + 2 {
            let mut t = good.clone();
            let bytes = t.0.get_mut(key).unwrap();
            match n.checked_sub(len * 8) {
                None => bytes[n / 8] ^= 1 << (n % 8),
                Some(0) => bytes.push(0),
                Some(_) => drop(bytes.pop()),
            }
            // The generation is not compared, and a count that is too large leaks the extent. A
            // checker finds that; a look at a single extent cannot.
            let item = key.kind == KeyType::EXTENT_ITEM;
            let raised = n < 64 && good.0[key][n / 8] >> (n % 8) & 1 == 0;
            let passes = item && (raised || (64..128).contains(&n));
            let result = apply(&mut t, SKINNY, A, &head(ExtentKind::Data, false, &all_gone));
            assert!(result.is_err() != passes, "{key} bit {n}: {result:?}");
        }
    }
}

/// Two data references of one hash.
fn colliding() -> [ExtentRef; 2] {
    let mut seen: HashMap<u64, (ObjectId, u64)> = HashMap::new();
    for i in 0..4_000_000u64 {
        let inode = ObjectId(257 + (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40));
        let offset = i << 12;
        let hash = data_ref_hash(ObjectId(5), inode, FileOffset(offset));
        if let Some((other, at)) = seen.insert(hash, (inode, offset)) {
            return [data(5, other, at), data(5, inode, offset)];
        }
    }
    panic!("no collision found");
}

#[test]
fn colliding_hashes_take_the_next_offset() {
    let [a, b] = colliding();
    assert_eq!(a.sequence(), b.sequence());
    // Fill the item so that all further references are keyed.
    let mut t = MapTree::default();
    let fill: Vec<_> = (0..6).map(|i| (data(7, ObjectId(1000 + i), 0), 1)).collect();
    apply(&mut t, SKINNY, A, &head(ExtentKind::Data, true, &fill)).unwrap();
    for key in [a, b, b] {
        apply(&mut t, SKINNY, A, &head(ExtentKind::Data, false, &[(key, 1)])).unwrap();
    }
    let at = |n| Key::new(A, KeyType::EXTENT_DATA_REF, a.sequence() + n);
    assert_eq!(parse_keyed_refs(&at(0), &t.0[&at(0)]).unwrap(), [(a, 1)]);
    assert_eq!(parse_keyed_refs(&at(1), &t.0[&at(1)]).unwrap(), [(b, 2)]);
    // The first goes. The second is still found behind the gap, even after a new reference came
    // into the gap.
    apply(&mut t, SKINNY, A, &head(ExtentKind::Data, false, &[(a, -1)])).unwrap();
    let mut u = t.clone();
    apply(&mut t, SKINNY, A, &head(ExtentKind::Data, false, &[(b, -2)])).unwrap();
    assert_eq!(decode(&t, SKINNY)[&A].1.len(), 6);
    // A reference that is added to in the gap has two items. They count together.
    apply(&mut u, SKINNY, A, &head(ExtentKind::Data, false, &[(b, 1)])).unwrap();
    apply(&mut u, SKINNY, A, &head(ExtentKind::Data, false, &[(b, -3)])).unwrap();
    assert_eq!(u, t);
    // Inline, both lie side by side.
    let mut t = MapTree::default();
    apply(&mut t, SKINNY, A, &head(ExtentKind::Data, true, &[(a, 1), (b, 3)])).unwrap();
    apply(&mut t, SKINNY, A, &head(ExtentKind::Data, false, &[(a, 1), (b, -2)])).unwrap();
    assert_eq!(decode(&t, SKINNY)[&A].1, BTreeMap::from([(a, 2), (b, 1)]));
}

fn random_ref(kind: ExtentKind, n: u64) -> ExtentRef {
    match kind {
        ExtentKind::Data if n.is_multiple_of(4) => {
            ExtentRef::SharedData { parent: Logical(n << 14) }
        }
        ExtentKind::Data => data(5 + n % 3, ObjectId(257 + n), 0u64.wrapping_sub(n << 12)),
        ExtentKind::TreeBlock { .. } if n.is_multiple_of(3) => shared(n << 14),
        ExtentKind::TreeBlock { .. } => tree_ref(256 + n),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn random_changes_match_the_model(
        skinny in any::<bool>(),
        batches in prop::collection::vec(
            prop::collection::vec((0u64..6, 0u64..50, any::<bool>()), 1..60), 1..30),
    ) {
        let features = ExtentFeatures { skinny, nodesize: 4096 };
        let mut t = MapTree::default();
        let mut model = Model::new();
        for (generation, batch) in batches.into_iter().enumerate() {
            let mut delayed = DelayedRefs::new();
            for (slot, n, drop) in batch {
                let at = A.plus(slot * 4096);
                let kind =
                    match slot % 2 {
                        0 => ExtentKind::Data,
                        _ => ExtentKind::TreeBlock { level: slot as u8 },
                    };
                let entry = model.entry(at).or_insert((kind, BTreeMap::new()));
                // An extent that loses its last reference is pinned until the end of the batch.
                let gone = delayed.get(at).is_some() && entry.1.is_empty();
                if gone {
                    continue;
                }
                if entry.1.is_empty() {
                    delayed.created(at, 4096, kind, Generation(generation as u64), None).unwrap();
                }
                let existing = entry.1.keys().nth(n as usize % entry.1.len().max(1)).copied();
                if let (true, Some(key)) = (drop, existing) {
                    delayed.change(at, 4096, kind, key, -1).unwrap();
                    let count = entry.1.get_mut(&key).unwrap();
                    *count -= 1;
                    if *count == 0 {
                        entry.1.remove(&key);
                    }
                } else {
                    let key = random_ref(kind, n);
                    if kind.is_data() || !entry.1.contains_key(&key) {
                        delayed.change(at, 4096, kind, key, 1).unwrap();
                        *entry.1.entry(key).or_default() += 1;
                    }
                }
            }
            for (at, head) in delayed {
                let refs = |t: &mut MapTree| {
                    extent_info(t, at, 4096, head.kind, skinny).unwrap().map_or(0, |i| i.refs)
                };
                let before = refs(&mut t);
                let applied = apply(&mut t, features, at, &head).unwrap();
                let after = refs(&mut t);
                prop_assert_eq!(before as i64 + head.total(), after as i64);
                let want = match (before, after) {
                    (0, 0) => Applied::NeverUsed,
                    (0, _) => Applied::Added,
                    (_, 0) => Applied::Freed,
                    _ => Applied::Changed,
                };
                prop_assert_eq!(applied, want);
            }
            model.retain(|_, e| !e.1.is_empty());
            prop_assert_eq!(&decode(&t, features), &model);
        }
    }
}
