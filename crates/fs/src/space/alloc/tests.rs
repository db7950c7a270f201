//! Chunks that several threads want at once, and empty chunks. No request is refused because of
//! either.
#![allow(clippy::disallowed_types, reason = "locks of tests have no place in the order")]

use super::*;
use crate::api::{FileKind, InodeId, NewInode};
use crate::engine::Core;
use crate::mkfs::{MkfsOptions, Profile, mkfs};
use crate::{Filesystem, SpaceUsage};
use larder_format::Physical;
use larder_volume::{Device, FileDevice};
use parking_lot::{Condvar, Mutex};
use std::thread;

const MIB: u64 = 1 << 20;

/// A device whose flushes can be held up.
#[derive(Debug)]
struct Held {
    below: FileDevice,
    /// Are they held up, and how many threads wait?
    state: Mutex<(bool, u64)>,
    changed: Condvar,
}

impl Held {
    fn hold(&self, held: bool) {
        self.state.lock().0 = held;
        self.changed.notify_all();
    }
    fn until_somebody_waits(&self) {
        let mut state = self.state.lock();
        while state.1 == 0 {
            self.changed.wait(&mut state);
        }
    }
}

impl Device for Held {
    fn name(&self) -> String {
        self.below.name()
    }
    fn size(&self) -> u64 {
        self.below.size()
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> std::io::Result<()> {
        self.below.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> std::io::Result<()> {
        self.below.write_at(at, data)
    }
    fn flush(&self) -> std::io::Result<()> {
        let mut state = self.state.lock();
        while state.0 {
            state.1 += 1;
            self.changed.notify_all();
            self.changed.wait(&mut state);
            state.1 -= 1;
        }
        Ok(())
    }
}

struct World {
    fs: Arc<Filesystem>,
    device: Arc<Held>,
    _dir: tempfile::TempDir,
}

impl World {
    fn new(size: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let below = FileDevice::create(dir.path().join("disk"), size).unwrap();
        let single = Some(Profile::Single);
        mkfs(&below, &MkfsOptions { metadata: single, data: single, ..MkfsOptions::default() })
            .unwrap();
        let device = Arc::new(Held { below, state: Mutex::default(), changed: Condvar::new() });
        let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
        let fs = Filesystem::open(device.clone(), options).unwrap();
        Self { fs, device, _dir: dir }
    }
    fn core(&self) -> &Core {
        &self.fs.core
    }
    fn usage(&self) -> SpaceUsage {
        self.fs.space_usage()
    }
    /// Makes chunks for `kind` until the device has room for none.
    fn fill_with_chunks(&self, kind: SpaceKind) {
        let space = &self.core().space;
        while space.chunk_in_running(&self.core().txns, kind, space.seen(kind)).unwrap()
            == ChunkOutcome::Granted
        {}
        assert_eq!(self.usage().unallocated / MIB, 0);
    }
    fn file(&self, name: &str) -> InodeId {
        let kind = FileKind::Regular;
        let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
        self.fs.create(self.fs.root(), name.as_bytes(), &new).unwrap().id
    }
    fn close(&self) {
        self.fs.sync().unwrap();
        let stats = self.fs.stats();
        assert_eq!((stats.data_reserved, stats.metadata_reserved, stats.space_refusals), (0, 0, 0));
        self.fs.close().unwrap();
    }
}

fn until(f: impl Fn() -> bool) {
    while !f() {
        thread::yield_now();
    }
}

#[test]
fn those_who_find_no_space_at_the_same_time_get_one_chunk() {
    const THREADS: u64 = 8;
    let w = World::new(2048 * MIB);
    let space = &w.core().space;
    let before = w.usage().metadata;
    assert_eq!((before.chunks, before.total), (1, 8 * MIB));
    thread::scope(|s| {
        // All of them have looked, and wait for the lock, before the first gets it.
        let door = space.device.lock();
        for _ in 0..THREADS {
            s.spawn(|| {
                let mut mine = space.accounts.reserve(SpaceKind::Metadata, 8 * MIB).unwrap();
                let blocks =
                    space.allocate_blocks(&w.core().txns, Generation(1), 512, &mut mine).unwrap();
                let nodesize = u64::from(w.core().nodesize());
                blocks.into_iter().for_each(|at| space.give_back(Run::new(at, nodesize), None));
            });
        }
        until(|| space.at_the_door.load(Ordering::Acquire) == THREADS);
        drop(door);
    });
    let after = w.usage().metadata;
    assert_eq!((after.chunks, after.total), (2, 8 * MIB + before.next_chunk));
    // A caller that has seen it may want another.
    let seen = space.seen(SpaceKind::Metadata);
    assert_eq!(
        space.chunk_in_running(&w.core().txns, SpaceKind::Metadata, seen).unwrap(),
        ChunkOutcome::Granted
    );
    assert_eq!(
        space.chunk_in_running(&w.core().txns, SpaceKind::Metadata, seen).unwrap(),
        ChunkOutcome::Granted
    );
    assert_eq!(w.usage().metadata.chunks, 3);
    w.close();
}

/// Data can be written although the device is full of empty chunks for metadata. In the first round
/// no commit has those chunks yet, in the second one has.
#[test]
fn empty_chunks_for_metadata_are_room_for_data() {
    for published in [false, true] {
        let w = World::new(512 * MIB);
        w.fill_with_chunks(SpaceKind::Metadata);
        if published {
            w.fs.sync().unwrap();
        }
        let file = w.file("file");
        for n in 0..24 {
            w.fs.write(file, n * MIB, &vec![1; 1 << 20]).unwrap_or_else(|e| panic!("MiB {n}: {e}"));
        }
        w.close();
    }
}

#[test]
fn empty_chunks_for_data_are_room_for_metadata() {
    for published in [false, true] {
        let w = World::new(512 * MIB);
        w.fill_with_chunks(SpaceKind::Data);
        if published {
            w.fs.sync().unwrap();
        }
        let much = w.core().space.accounts.reserve(SpaceKind::Metadata, 24 * MIB).unwrap();
        assert_eq!(much.bytes(), 24 * MIB);
        drop(much);
        w.close();
    }
}

/// Chunks are on their way back: their space is in no account, and it is not free. A request that
/// needs it waits for the commit.
#[test]
fn chunks_that_a_commit_is_giving_back_are_waited_for() {
    let w = World::new(512 * MIB);
    w.fill_with_chunks(SpaceKind::Metadata);
    w.fs.sync().unwrap();
    let accounts = &w.core().space.accounts;
    let before = w.usage().metadata.chunks;
    thread::scope(|s| {
        w.device.hold(true);
        let commit = s.spawn(|| w.core().commit_now());
        w.device.until_somebody_waits();
        assert!(w.usage().metadata.chunks < before, "gone from the accounts");
        assert_eq!(w.usage().unallocated / MIB, 0, "not back yet");
        let waiting = s.spawn(|| accounts.reserve(SpaceKind::Data, 24 * MIB).map(|r| r.bytes()));
        until(|| accounts.stats(SpaceKind::Data).reclaims > 0);
        w.device.hold(false);
        commit.join().unwrap().unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), 24 * MIB);
    });
    w.close();
}

/// There is metadata for one writer at a time, and many come. Each gets all that it needs at once,
/// or waits and has nothing.
#[test]
fn who_waits_for_metadata_holds_none_that_others_wait_for() {
    let w = World::new(64 * MIB);
    w.fill_with_chunks(SpaceKind::Metadata);
    let files: Vec<InodeId> = (0..6).map(|n| w.file(&format!("file{n}"))).collect();
    w.fs.sync().unwrap();
    let accounts = &w.core().space.accounts;
    let one = w.core().item_cost(2) + w.core().item_cost(1);
    let figures = accounts.figures(SpaceKind::Metadata);
    // Beside that there is room for what becomes used and what is noted for the commit, but not for
    // a second writer.
    let rest = figures.free() - figures.reserved - one - 8 * u64::from(w.core().nodesize());
    let held = accounts.reserve(SpaceKind::Metadata, rest).unwrap();
    thread::scope(|s| {
        for file in &files {
            s.spawn(|| {
                for n in 0..4 {
                    w.fs.write(*file, n * 8192, &[7; 4096]).unwrap_or_else(|e| {
                        panic!("{e}: {:?} {:?}", w.usage().metadata, w.fs.stats().reclaim)
                    });
                }
            });
        }
    });
    drop(held);
    w.close();
}

/// A commit finds room for the chunk tree, whatever is closed. No chunk can be made for it here.
#[test]
fn the_last_space_of_the_chunk_tree_is_not_closed() {
    let world = World::new(300 * MIB);
    let core = world.core();
    let (space, kind) = (&core.space, SpaceKind::System);
    let made = space.chunk_in_running(&core.txns, kind, space.seen(kind)).unwrap();
    assert_eq!(made, ChunkOutcome::Granted);
    world.fill_with_chunks(SpaceKind::Data);
    let all = space.groups.all();
    let system: Vec<_> = all.iter().filter(|group| group.kind() == kind).collect();
    let close = |group: &&Arc<crate::space::groups::BlockGroup>| {
        crate::relocate::try_close(core, group).unwrap()
    };
    assert_eq!(system.iter().map(close).collect::<Vec<_>>(), [true, false]);
    core.commit_now().unwrap();
    world.close();
}
