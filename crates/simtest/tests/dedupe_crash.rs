//! Deduplication under power cuts, and on an image that lacks what it needs. Whenever it is
//! interrupted, both files have their bytes, each extent is the file's own or the other file's, and
//! what was synced is shared.

use larder_check::{Kind, Severity};
use larder_format::{KeyType, ObjectId};
use larder_fs::{
    Deduped, Error, ExtentPlace, FileKind, Filesystem, InodeId, MappedExtent, NewInode,
    OpenOptions, Tuning,
};
use larder_simtest::by_hand;
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::damage::Damage;
use larder_simtest::device::SimDevice;
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::Config;
use std::collections::BTreeSet;
use std::sync::Arc;

const SECTOR: u64 = 4096;
/// Extents of the target, of two sectors each.
const EXTENTS: u64 = 40;
const LEN: u64 = EXTENTS * 2 * SECTOR + 1234;

fn create(fs: &Filesystem, name: &str) -> InodeId {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    fs.create(fs.root(), name.as_bytes(), &new).expect("create").id
}

fn find(fs: &Filesystem, name: &str) -> InodeId {
    fs.lookup(fs.root(), name.as_bytes()).expect("it is durable").id
}

fn bytes() -> Vec<u8> {
    (0..LEN).map(|n| (n / SECTOR * 37 + n % 251) as u8).collect()
}

/// Where each sector of a file lies.
fn places(fs: &Filesystem, id: InodeId) -> Result<Vec<u64>, String> {
    let mut out = Vec::new();
    let each = &mut |e: &MappedExtent| {
        if let ExtentPlace::Device { at, offset, .. } = e.place {
            out.extend((0..e.len / SECTOR).map(|n| at.0 + offset + n * SECTOR));
        }
        true
    };
    fs.map_extents(id, 0, each).map_err(|e| format!("map: {e}"))?;
    Ok(out)
}

fn read(fs: &Filesystem, id: InodeId) -> Result<Vec<u8>, String> {
    let mut data = vec![0; LEN as usize + 1];
    let n = fs.read(id, 0, &mut data).map_err(|e| format!("read: {e}"))?;
    data.truncate(n);
    Ok(data)
}

fn complaints(device: Arc<SimDevice>) -> Result<(), String> {
    by_hand::complaints(&[device], |f| {
        f.severity() != Severity::Note && f.kind != Kind::SuperMirrorGeneration
    })
}

/// Deduplicates a file whose extents are older, newer or still in memory, and looks at every state
/// that a power cut leaves from there on: how many there were, and in how many a part was shared.
fn interrupted(committed: bool, tuning: Tuning) -> (usize, usize) {
    let config = Config::new(3).expect("a new file system");
    let options = OpenOptions {
        tuning: Tuning { fake_clock: true, commit_steps: true, ..tuning },
        ..config.options.clone()
    };
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), options).expect("open");
    let (source, target) = (create(&fs, "source"), create(&fs, "target"));
    let data = bytes();
    fs.write(source, 0, &data).expect("write");
    fs.fsync(source, false).expect("fsync");
    for (n, piece) in data.chunks(2 * SECTOR as usize).enumerate() {
        fs.write(target, n as u64 * 2 * SECTOR, piece).expect("write");
        fs.fsync(target, false).expect("fsync");
    }
    if committed {
        fs.sync().expect("sync");
    }
    let (theirs, own) = (places(&fs, source).expect("map"), places(&fs, target).expect("map"));
    assert!(theirs.iter().all(|at| !own.contains(at)));
    let begin = device.mark();
    let done = fs.dedupe_range(source.at(0), target.at(0), LEN).expect("dedupe");
    assert_eq!(done, Deduped::Same { bytes: LEN, shared: LEN.next_multiple_of(SECTOR) });
    fs.fsync(target, false).expect("fsync");
    let synced = device.mark();
    // What the target gave up is used for something else.
    let other = create(&fs, "other");
    fs.write(other, 0, &vec![0xee; 2 * LEN as usize]).expect("write");
    fs.sync().expect("sync");
    fs.close().expect("close");
    let crashes =
        Crashes::of(&device.recording(), &Limits { samples: 2, per_epoch: 8, ..Limits::default() });
    let dir = scratch();
    let path = dir.path().join("state.img");
    let can_check = need(&[Need::BtrfsProgs]);
    let (mut seen, mut parts) = (0, BTreeSet::new());
    for state in crashes.states.iter().filter(|s| s.earliest >= begin) {
        let image = crashes.image(state);
        let judged = (|| {
            let device = Arc::new(SimDevice::new(image.clone()).unrecorded());
            complaints(device.clone())?;
            let fs = Filesystem::open(device.clone(), config.options.clone())
                .map_err(|e| e.to_string())?;
            let (source, target) = (find(&fs, "source"), find(&fs, "target"));
            if read(&fs, source)? != data || read(&fs, target)? != data {
                return Err("the bytes are others".into());
            }
            let now = places(&fs, target)?;
            let shared = (0..own.len()).filter(|n| now.get(*n) == Some(&theirs[*n])).count();
            if now.len() != own.len()
                || (0..own.len()).any(|n| now[n] != own[n] && now[n] != theirs[n])
            {
                return Err(format!("the target lies at {now:x?}"));
            }
            if state.earliest >= synced && shared < own.len() {
                return Err(format!("{shared} sectors of {} are shared after a sync", own.len()));
            }
            parts.insert(shared);
            fs.close().map_err(|e| e.to_string())?;
            complaints(device.clone()).map_err(|e| format!("after it went on: {e}"))?;
            if can_check && seen % 32 == 0 {
                device.image().write_sparse(&path).map_err(|e| e.to_string())?;
                let report = btrfs_check(&path, true);
                if !report.is_clean() {
                    return Err(format!("btrfs check: {report}"));
                }
            }
            Ok(())
        })();
        judged.unwrap_or_else(|e: String| panic!("{e}\n{}", crashes.describe(state)));
        seen += 1;
    }
    (seen, parts.len())
}

#[test]
fn an_interrupted_dedupe_changes_no_byte() {
    for committed in [false, true] {
        for no_log in [false, true] {
            let (states, parts) = interrupted(committed, Tuning { no_log, ..Tuning::default() });
            println!(
                "committed {committed}, no log {no_log}: {states} states, {parts} different shares"
            );
            assert!(states > 20 && parts > 2, "{states} states, {parts} shares");
        }
    }
}

/// An image where an extent of a file has no item in the extent tree.
#[test]
fn an_extent_that_is_nowhere_recorded_is_not_cloned() {
    let config = Config::new(3).expect("a new file system");
    let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let source = create(&fs, "source");
    fs.write(source, 0, &bytes()).expect("write");
    let equal = create(&fs, "equal");
    fs.write(equal, 0, &bytes()).expect("write");
    fs.sync().expect("sync");
    let at = places(&fs, source).expect("map")[0];
    fs.close().expect("close");
    drop(fs);
    let mut damage = Damage::on(&device.image()).expect("a sound image");
    let (key, _) = damage
        .first(ObjectId::EXTENT_TREE, |key, _| {
            key.kind == KeyType::EXTENT_ITEM && key.objectid.0 == at
        })
        .expect("the extent's item");
    damage.item(ObjectId::EXTENT_TREE, key).delete().expect("delete");
    let device = Arc::new(SimDevice::new(damage.into_image()).unrecorded());
    let fs = Filesystem::open(device, config.options).expect("open");
    let (source, equal, new) = (find(&fs, "source"), find(&fs, "equal"), create(&fs, "new"));
    for outcome in [
        fs.clone_range(source.at(0), new.at(0), 0).map(drop),
        fs.clone_range(source.at(4 * SECTOR), new.at(8 * SECTOR), 4 * SECTOR).map(drop),
        fs.dedupe_range(source.at(0), equal.at(0), LEN).map(drop),
    ] {
        let error = outcome.expect_err("nobody knows that extent");
        assert!(
            matches!(&error, Error::Corrupt { what, .. } if what.contains("extent tree")),
            "{error}"
        );
    }
    // The damage is nobody else's.
    fs.sync().expect("sync");
    assert!(!fs.info().read_only);
    assert_eq!(read(&fs, source).expect("read"), bytes());
    assert!(matches!(
        fs.dedupe_range(equal.at(0), source.at(4 * SECTOR), 4 * SECTOR),
        Ok(Deduped::Differs)
    ));
    fs.clone_range(equal.at(0), new.at(0), 0).expect("a sound one");
    fs.sync().expect("sync");
}
