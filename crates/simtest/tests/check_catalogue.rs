//! A catalogue of damage: each entry changes one thing of a sound image, and `larder check` has to
//! find and name it.
//!
//! Hidden here is what counts as found. An entry names the kinds of findings that must be reported;
//! there may be more, because damage has consequences. It also says whether Linux's `btrfs check`
//! complains. Where that is installed it is run, to show that every entry is real damage, and that
//! ours finds all that theirs does.

#[path = "check_catalogue/bases.rs"]
mod bases;
#[path = "check_catalogue/caches.rs"]
mod caches;
#[path = "check_catalogue/chunks.rs"]
mod chunks;
#[path = "check_catalogue/contents.rs"]
mod contents;
#[path = "check_catalogue/entry.rs"]
mod entry;
#[path = "check_catalogue/extents.rs"]
mod extents;
#[path = "check_catalogue/find.rs"]
mod find;
#[path = "check_catalogue/inodes.rs"]
mod inodes;
#[path = "check_catalogue/logs.rs"]
mod logs;
#[path = "check_catalogue/nodes.rs"]
mod nodes;
#[path = "check_catalogue/quotas.rs"]
mod quotas;
#[path = "check_catalogue/roots.rs"]
mod roots;
#[path = "check_catalogue/space.rs"]
mod space;
#[path = "check_catalogue/supers.rs"]
mod supers;

use bases::{ALL, Base};
use entry::{Entry, Progs};
use larder_check::{Kind, Options, Report, Severity};
use larder_simtest::damage::{Copies, Damage, Seal};
use larder_simtest::device::{AccessKind, Fault, SimDevice};
use larder_simtest::image::Image;
use larder_simtest::oracle::{Need, btrfs, btrfs_check, need, scratch};
use larder_volume::VolumeError;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

fn catalogue() -> Vec<&'static Entry> {
    [
        supers::ENTRIES,
        chunks::ENTRIES,
        nodes::ENTRIES,
        extents::ENTRIES,
        space::ENTRIES,
        inodes::ENTRIES,
        contents::ENTRIES,
        roots::ENTRIES,
        logs::ENTRIES,
        quotas::ENTRIES,
        caches::ENTRIES,
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Every entry on each of its images, planted; without those whose image cannot be made here.
fn planted() -> Vec<(&'static Entry, Base, Result<Image, String>)> {
    let pairs: Vec<(&Entry, Base)> =
        catalogue().into_iter().flat_map(|e| e.bases.iter().map(move |b| (e, *b))).collect();
    let plant = |(entry, base): (&'static Entry, Base)| {
        let image = base.image()?;
        let planted = Damage::on(image).and_then(|mut damage| {
            (entry.plant)(&mut damage)?;
            Ok(damage.into_image())
        });
        Some((entry, base, planted.map_err(|e| format!("{e:#}"))))
    };
    // One after the other: the first to need an image makes it.
    for base in ALL {
        let _ = base.image();
    }
    pairs.into_par_iter().filter_map(plant).collect()
}

/// Keeps the image of an entry that fails where `LARDER_KEEP_STATES` says.
fn keep(entry: &Entry, base: Base, image: &Image) {
    if let Some(dir) = std::env::var_os("LARDER_KEEP_STATES") {
        let path = std::path::Path::new(&dir).join(format!("{}-{base:?}.img", entry.name));
        image.write_sparse(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

fn report(failures: Vec<String>, of: usize) {
    assert!(
        failures.is_empty(),
        "{} of {of} entries fail:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn the_catalogue_is_large_and_its_names_are_unique() {
    let entries = catalogue();
    let names: BTreeSet<&str> = entries.iter().map(|e| e.name).collect();
    assert_eq!(names.len(), entries.len());
    assert!(entries.len() >= 60, "{} entries", entries.len());
    assert!(entries.iter().all(|e| !e.kinds.is_empty()));
}

/// What the catalogue does not plant: what is wrong with a device and not with an image, what an
/// image may be in the midst of, what a metadata dump lacks (`check_dumps.rs`), and what is said
/// about the check itself.
const NOT_PLANTED: [Kind; 8] = [
    Kind::DeviceBehind,
    Kind::NodeUnreadable,
    Kind::DataUnreadable,
    Kind::LogPresent,
    Kind::SubvolumeBeingDropped,
    Kind::SpaceCacheStale,
    Kind::DumpWithoutMirror,
    Kind::NotChecked,
];

#[test]
fn every_kind_of_finding_is_planted() {
    let planted: BTreeSet<Kind> = catalogue().iter().flat_map(|e| e.kinds).copied().collect();
    let missing: Vec<Kind> = Kind::ALL
        .iter()
        .copied()
        .filter(|k| !planted.contains(k) && !NOT_PLANTED.contains(k))
        .collect();
    assert_eq!(missing, []);
    assert!(NOT_PLANTED.iter().all(|k| !planted.contains(k)));
}

#[test]
fn btrfs_check_says_what_the_catalogue_claims() {
    if !need(&[Need::BtrfsProgs]) {
        return;
    }
    ALL.into_par_iter().for_each(|base| {
        if let Some(image) = base.image() {
            let dir = scratch();
            let path = dir.path().join("image");
            image.write_sparse(&path).expect("a scratch image");
            btrfs_check(&path, true).assert_clean(&format!("base image {base:?}"));
        }
    });
    // The same damage on the first image that it is planted on: one is enough.
    let planted: Vec<_> =
        planted().into_iter().filter(|(entry, base, _)| entry.bases[0] == *base).collect();
    let of = planted.len();
    let judge = |(entry, base, image): (&Entry, Base, Result<Image, String>)| {
        let image = match image {
            Ok(image) => image,
            Err(e) => return Some(format!("{} on {base:?}: cannot be planted: {e}", entry.name)),
        };
        let dir = scratch();
        let path = dir.path().join("image");
        image.write_sparse(&path).expect("a scratch image");
        let plain = btrfs_check(&path, false);
        let with_data = if plain.is_clean() { btrfs_check(&path, true) } else { plain.clone() };
        let progs = match (plain.is_clean(), with_data.is_clean()) {
            (false, _) if plain.code == Some(0) && entry.progs == Progs::Mentions => {
                Progs::Mentions
            }
            (false, _) => Progs::Sees,
            (true, false) => Progs::SeesWithData,
            (true, true) => Progs::Misses,
        };
        (progs != entry.progs).then(|| {
            keep(entry, base, &image);
            let said = with_data.complaints.first().map_or("", String::as_str);
            format!(
                "{} on {base:?}: {:?} is claimed, but {progs:?}: {said}",
                entry.name, entry.progs
            )
        })
    };
    let differences: Vec<String> = planted.into_par_iter().filter_map(judge).collect();
    // Other versions see a little more or less than the one that was asked.
    let asked = btrfs(&["--version"]).is_ok_and(|v| v.contains("v6.14"));
    if asked || differences.len() > of / 10 {
        report(differences, of);
    }
}

/// What the checker says to an image, data included.
fn check(device: SimDevice) -> Result<Report, larder_check::Error> {
    // Entries run in parallel already.
    let options = Options { data: true, threads: 1, ..Options::default() };
    larder_check::check(&[Arc::new(device.read_only().unrecorded())], &options, &|_| ())
}

/// What a report says, in a line.
fn summary(report: &Report) -> String {
    let count = |(kind, count): (&Kind, &larder_check::Count)| match (count.found, count.follow_ups)
    {
        (0, n) => format!("{kind} ({n} follow)"),
        (n, 0) => format!("{kind} ({n})"),
        (n, m) => format!("{kind} ({n}, {m} follow)"),
    };
    let first = report.findings.first().map_or("nothing", |f| f.what.as_str());
    format!("{}; first: {first}", report.counts.iter().map(count).collect::<Vec<_>>().join(", "))
}

/// Kinds of errors that one damage may show as, apart from what is marked as a follow-up: a report
/// is to be read.
const MOST_KINDS: usize = 8;

/// What is wrong with what the checker says to a planted damage.
fn complaint(entry: &Entry, image: &Image) -> Option<String> {
    let report = match check(SimDevice::new(image.clone())) {
        Ok(report) => report,
        Err(e) => return Some(format!("not checked: {e}")),
    };
    let missed: Vec<Kind> = entry.kinds.iter().copied().filter(|k| !report.found(*k)).collect();
    if !missed.is_empty() {
        return Some(format!("{missed:?} is not among {}", summary(&report)));
    }
    let own = report
        .counts
        .iter()
        .filter(|(k, c)| k.severity() == Severity::Error && c.found > 0)
        .count();
    if own > MOST_KINDS {
        return Some(format!("{own} kinds of findings for one damage: {}", summary(&report)));
    }
    (matches!(entry.progs, Progs::Sees | Progs::SeesWithData) && report.is_clean())
        .then(|| format!("an error for btrfs check, and none here: {}", summary(&report)))
}

#[test]
fn the_checker_finds_and_names_every_entry() {
    let planted = planted();
    let of = planted.len();
    let judge = |(entry, base, image): (&Entry, Base, Result<Image, String>)| {
        let complaint = match &image {
            Ok(image) => {
                let complaint = complaint(entry, image)?;
                keep(entry, base, image);
                complaint
            }
            Err(e) => format!("cannot be planted: {e}"),
        };
        Some(format!("{} on {base:?}: {complaint}", entry.name))
    };
    report(planted.into_par_iter().filter_map(judge).collect(), of);
}

#[test]
fn sound_images_have_no_findings() {
    for base in ALL {
        let Some(image) = base.image() else { continue };
        let report = check(SimDevice::new(image.clone())).expect("an image that can be checked");
        // What a base image is in the midst of, or what mkfs leaves behind, is no more than a note.
        let said: Vec<Kind> =
            report.counts.keys().copied().filter(|k| k.severity() != Severity::Note).collect();
        assert_eq!(said, [], "{base:?}: {:?}", report.findings);
        for kind in [Kind::LogPresent, Kind::SubvolumeBeingDropped] {
            assert!(base != Base::Pending || report.found(kind), "{}", summary(&report));
        }
        assert!(
            report.stats.inodes > 400 && report.stats.data_bytes > 1 << 16,
            "{:?}",
            report.stats
        );
    }
}

#[test]
fn what_a_checksum_leaves_of_its_field_is_nobodys() {
    let mut damage = Damage::on(Base::Larder.image().expect("an image of Larder's own")).unwrap();
    let leaf = find::fs_leaf(&damage).unwrap();
    damage.edit_node_in(leaf, Copies::Only(1), Seal::Leave, |node| node[20] ^= 1).unwrap();
    let report = check(SimDevice::new(damage.into_image())).unwrap();
    assert!(report.is_clean(), "{}", summary(&report));
}

#[test]
fn what_a_device_cannot_read_is_named() {
    let image = Base::Larder.image().expect("an image of Larder's own");
    let damage = Damage::on(image).unwrap();
    let leaf = find::fs_leaf(&damage).unwrap();
    let (_, record) = find::stored(&damage, "plant/plain").unwrap();
    let failing = |at, copies: usize| {
        let device = SimDevice::new(image.clone());
        for place in damage.places(at).unwrap().into_iter().take(copies) {
            let hit = move |a: &larder_simtest::device::Access| {
                a.kind == AccessKind::Read && a.overlaps(&(place.0..place.0 + 4096))
            };
            device.inject(Fault::nth(0, hit).forever());
        }
        check(device).unwrap()
    };
    let both = failing(leaf, 2);
    assert!(
        both.found(Kind::NodeUnreadable) && both.found(Kind::SubtreeLost),
        "{}",
        summary(&both)
    );
    let first = failing(leaf, 1);
    assert!(
        first.found(Kind::NodeUnreadable) && !first.found(Kind::SubtreeLost),
        "{}",
        summary(&first)
    );
    // Where nothing at all can be read, nothing can be said about the file system.
    let device = SimDevice::new(image.clone());
    device.inject(Fault::nth(0, |a| a.kind == AccessKind::Read).forever());
    let refused = check(device);
    assert!(
        matches!(refused, Err(larder_check::Error::Volume(VolumeError::Io { .. }))),
        "{refused:?}"
    );
    let data = failing(record.disk_bytenr, 1);
    assert!(data.found(Kind::DataUnreadable), "{}", summary(&data));
}
