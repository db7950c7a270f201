//! A catalogue of damage: each entry changes one thing of a sound image, and `larder check` has to find and name it.
//!
//! The decision hidden here is what counts as found. An entry names the kinds of findings that must be reported; more
//! may be, for damage has consequences. And it says whether Linux's `btrfs check` complains, which is asked where it is
//! installed: that every entry is real damage, and that ours finds all that theirs does.

#[path = "check_catalogue/bases.rs"]
mod bases;
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
#[path = "check_catalogue/roots.rs"]
mod roots;
#[path = "check_catalogue/space.rs"]
mod space;
#[path = "check_catalogue/supers.rs"]
mod supers;

use bases::{ALL, Base};
use entry::{Entry, Progs};
use larder_check::Kind;
use larder_simtest::damage::Damage;
use larder_simtest::image::Image;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use rayon::prelude::*;
use std::collections::BTreeSet;

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

fn report(failures: Vec<String>, of: usize) {
    assert!(failures.is_empty(), "{} of {of} entries fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn the_catalogue_is_large_and_its_names_are_unique() {
    let entries = catalogue();
    let names: BTreeSet<&str> = entries.iter().map(|e| e.name).collect();
    assert_eq!(names.len(), entries.len());
    assert!(entries.len() >= 60, "{} entries", entries.len());
    assert!(entries.iter().all(|e| !e.kinds.is_empty()));
}

/// What the catalogue does not plant: what is wrong with a device and not with an image, what an image may be in the midst
/// of, and what is said about the check itself.
const NOT_PLANTED: [Kind; 7] = [
    Kind::NodeUnreadable,
    Kind::DataUnreadable,
    Kind::LogPresent,
    Kind::SubvolumeBeingDropped,
    Kind::SpaceCacheStale,
    Kind::QuotasNotChecked,
    Kind::NotChecked,
];

#[test]
fn every_kind_of_finding_is_planted() {
    let planted: BTreeSet<Kind> = catalogue().iter().flat_map(|e| e.kinds).copied().collect();
    let missing: Vec<Kind> =
        Kind::ALL.iter().copied().filter(|k| !planted.contains(k) && !NOT_PLANTED.contains(k)).collect();
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
            bases::assert_sound(base, image);
        }
    });
    // The same damage on the first image that it is planted on: one is enough.
    let planted: Vec<_> = planted().into_iter().filter(|(entry, base, _)| entry.bases[0] == *base).collect();
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
            (false, _) => Progs::Sees,
            (true, false) => Progs::SeesWithData,
            (true, true) => Progs::Misses,
        };
        (progs != entry.progs).then(|| {
            let said = with_data.complaints.first().map_or("", String::as_str);
            format!("{} on {base:?}: {:?} is claimed, but {progs:?}: {said}", entry.name, entry.progs)
        })
    };
    report(planted.into_par_iter().filter_map(judge).collect(), of);
}
