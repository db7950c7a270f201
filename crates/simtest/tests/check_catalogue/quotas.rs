//! The counts of quota groups.

use crate::entry::{Entry, QUOTAS, mentioned, missed, seen};
use anyhow::Result;
use larder_check::{Kind, Severity};
use larder_format::items::quota::{QUOTA_INCONSISTENT, QUOTA_ON};
use larder_format::{Key, KeyType, ObjectId, TreeId};
use larder_simtest::damage::{Damage, ItemEdit};
use larder_simtest::device::SimDevice;

const TREE: TreeId = ObjectId::QUOTA_TREE;
/// Places in QGROUP_INFO and QGROUP_STATUS.
const REFERENCED: usize = 8;
const REFERENCED_COMPRESSED: usize = 16;
const EXCLUSIVE: usize = 24;
const FLAGS: usize = 16;

fn info(d: &mut Damage, level: u16, number: u64) -> ItemEdit<'_> {
    let group = u64::from(level) << 48 | number;
    d.item(TREE, Key::new(ObjectId(0), KeyType::QGROUP_INFO, group))
}

fn status(d: &mut Damage) -> ItemEdit<'_> {
    d.item(TREE, Key::new(ObjectId(0), KeyType::QGROUP_STATUS, 0))
}

/// A quota group: its level and number in one.
#[derive(Clone, Copy)]
struct Group(u64);

/// The group of the first subvolume.
const SUBVOLUME: Group = Group(256);
const GROUP: Group = Group(1 << 48 | 1);

fn relation(from: Group, to: Group) -> Key {
    Key::new(ObjectId(from.0), KeyType::QGROUP_RELATION, to.0)
}

/// Takes a group out of another, in both directions.
fn leave(d: &mut Damage, below: Group, above: Group) -> Result<()> {
    d.item(TREE, relation(below, above)).delete()?;
    d.item(TREE, relation(above, below)).delete()
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("quota-of-a-subvolume-referenced", QUOTAS, &[Kind::QuotaCount], |d| {
        info(d, 0, 256).add_u64(REFERENCED, 4096)
    }),
    seen("quota-of-a-subvolume-exclusive", QUOTAS, &[Kind::QuotaCount], |d| {
        info(d, 0, 257).add_u64(EXCLUSIVE, -4096)
    }),
    seen("quota-of-the-top-referenced", QUOTAS, &[Kind::QuotaCount], |d| {
        info(d, 0, 5).add_u64(REFERENCED, -4096)
    }),
    seen("quota-of-a-group-exclusive", QUOTAS, &[Kind::QuotaCount], |d| {
        info(d, 1, 1).add_u64(EXCLUSIVE, 4096)
    }),
    seen("quota-of-a-group-of-groups-referenced", QUOTAS, &[Kind::QuotaCount], |d| {
        info(d, 2, 1).add_u64(REFERENCED, 4096)
    }),
    seen("quota-member-lost", QUOTAS, &[Kind::QuotaCount], |d| leave(d, SUBVOLUME, GROUP)),
    seen("quota-member-that-says-nothing", QUOTAS, &[Kind::QuotaRelation, Kind::QuotaCount], |d| {
        d.item(TREE, relation(SUBVOLUME, GROUP)).delete()
    }),
    missed("quota-group-that-does-not-name-a-member", QUOTAS, &[Kind::QuotaRelation], |d| {
        d.item(TREE, relation(GROUP, SUBVOLUME)).delete()
    }),
    seen("quota-group-of-groups-missing", QUOTAS, &[Kind::QuotaRelation], |d| {
        info(d, 2, 1).delete()
    }),
    seen("quota-group-of-a-member-missing", QUOTAS, &[Kind::QuotaRelation], |d| {
        info(d, 0, 256).delete()
    }),
    seen("quota-item-too-short", QUOTAS, &[Kind::QuotaItemInvalid], |d| {
        status(d).edit(|data| data.truncate(31))
    }),
    mentioned("quotas-known-to-be-wrong", QUOTAS, &[Kind::QuotasOutOfDate], |d| {
        info(d, 0, 256).add_u64(REFERENCED, 4096)?;
        status(d).set_u64(FLAGS, QUOTA_ON | QUOTA_INCONSISTENT)
    }),
];

#[test]
fn what_nobody_counts_is_not_compared() {
    let Some(image) = crate::Base::Quotas.image() else { return };
    let mut d = Damage::on(image).unwrap();
    info(&mut d, 0, 256).add_u64(REFERENCED_COMPRESSED, 4096).unwrap();
    let report = crate::check(SimDevice::new(d.into_image())).unwrap();
    assert!(
        report.findings.iter().all(|f| f.kind.severity() == Severity::Note),
        "{:?}",
        report.findings
    );
}
