//! Which extents streams and scattered writes become.

use super::{Memory, World, options};
use crate::api::{OpenOptions, SetAttr};
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{Filesystem, InodeId};
use larder_format::items::FileExtent;
use larder_format::{KeyType, Logical};

const MIB: usize = 1 << 20;

/// A file system of 2 GiB whose budget for delayed data is 4 MiB.
fn tight() -> World {
    let device = Memory::new(2 << 30);
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = OpenOptions { cache_size: 16 << 20, ..options() };
    let fs = Filesystem::open(device.clone(), options).unwrap();
    World { device, fs }
}

/// Where the file is on the device: start in the file, address, length of the window, length of the
/// extent.
fn extents(w: &World, id: InodeId) -> Vec<(u64, Logical, u64, u64)> {
    let items = w.items();
    let mine =
        items.iter().filter(|(k, _)| k.objectid.0 == id.ino && k.kind == KeyType::EXTENT_DATA);
    mine.filter_map(|(k, data)| match FileExtent::parse(data).unwrap() {
        FileExtent::Stored(r) => Some((k.offset, r.disk_bytenr, r.num_bytes, r.disk_num_bytes)),
        FileExtent::Inline(_) => None,
    })
    .collect()
}

fn pattern(n: usize) -> Vec<u8> {
    (0..MIB).map(|i| ((i as u64 * 31 + n as u64 * 7) >> 3) as u8).collect()
}

#[test]
fn a_stream_becomes_extents_far_larger_than_the_budget() {
    let w = tight();
    let id = w.file(w.root(), "stream");
    for n in 0..200 {
        w.fs.write(id, (n * MIB) as u64, &pattern(n)).unwrap();
    }
    w.fs.sync().unwrap();
    let found = extents(&w, id);
    assert!(found.iter().all(|(_, _, len, whole)| len == whole && *len <= 128 << 20), "{found:?}");
    // In such a small file system a block group ends sometimes.
    assert!(found.len() <= 6, "{found:?}");
    assert!(found.iter().any(|e| e.2 >= 64 << 20), "{found:?}");
    w.check();
    let w = w.reopen();
    let mut buf = vec![0; MIB];
    for n in [0, 1, 63, 127, 128, 199] {
        assert_eq!(w.fs.read(id, (n * MIB) as u64, &mut buf).unwrap(), MIB);
        assert_eq!(buf, pattern(n), "MiB {n}");
    }
    // All of it can be freed again.
    w.fs.unlink(w.root(), b"stream").unwrap();
    w.fs.release(id, 1);
    w.fs.sync().unwrap();
    w.fs.sync().unwrap();
    assert_eq!(w.fs.stats().data_reserved, 0);
    w.check();
}

#[test]
fn what_a_transaction_has_published_does_not_grow() {
    let w = tight();
    let id = w.file(w.root(), "log");
    for n in 0..6 {
        w.fs.write(id, (n * MIB) as u64, &pattern(n)).unwrap();
        w.fs.sync().unwrap();
    }
    assert_eq!(extents(&w, id).len(), 6);
    w.check();
}

#[test]
fn overwritten_parts_do_not_grow() {
    let w = tight();
    let id = w.file(w.root(), "file");
    let data = vec![1; 8 * MIB];
    w.fs.write(id, 0, &data).unwrap();
    w.fs.fsync(id, true).unwrap();
    // Two streams that meet, and one in between that was cut.
    for (at, fill) in [(0, 2u8), (4, 3), (2, 4), (3, 5), (1, 6)] {
        w.fs.write(id, at * MIB as u64, &vec![fill; MIB]).unwrap();
        crate::file::flush_all(&w.fs.core).unwrap();
    }
    w.fs.sync().unwrap();
    let found = extents(&w, id);
    assert_eq!(found.iter().map(|e| e.2).sum::<u64>(), 8 << 20, "{found:?}");
    let mut buf = vec![0; 8 * MIB];
    w.fs.read(id, 0, &mut buf).unwrap();
    let want = [2u8, 6, 4, 5, 3, 1, 1, 1];
    assert!(buf.chunks(MIB).zip(want).all(|(c, v)| c.iter().all(|b| *b == v)));
    w.check();
}

/// The content of a scattered piece after so many rounds.
fn piece<const LEN: usize>(n: usize, round: u8) -> [u8; LEN] {
    [(n % 251) as u8 ^ round.wrapping_mul(73); LEN]
}

/// Several pieces share a sector, and some lie across two.
#[test]
fn pieces_are_written_while_their_neighbours_are_written_back() {
    scattered::<1500>();
}

#[test]
fn blocks_are_written_while_their_neighbours_are_written_back() {
    scattered::<4096>();
}

fn scattered<const PIECE: usize>() {
    const PIECES: usize = 6000;
    const ROUNDS: u8 = 3;
    let w = tight();
    let id = w.file(w.root(), "scattered");
    // Pieces of three writers in turn; 1231 has no divisor in common with their number.
    let order =
        |writer: usize| (0..PIECES).map(|n| n * 1231 % PIECES).filter(move |n| n % 3 == writer);
    std::thread::scope(|s| {
        let write = |writer: usize| {
            for round in 1..=ROUNDS {
                for n in order(writer) {
                    w.fs.write(id, (n * PIECE) as u64, &piece::<PIECE>(n, round)).unwrap();
                }
            }
        };
        let writers: Vec<_> = (0..3).map(|writer| s.spawn(move || write(writer))).collect();
        while writers.iter().any(|t| !t.is_finished()) {
            w.fs.fsync(id, true).unwrap();
        }
    });
    let compare = |w: &World| {
        let mut buf = [0; PIECE];
        for n in 0..PIECES {
            assert_eq!(w.fs.read(id, (n * PIECE) as u64, &mut buf).unwrap(), PIECE);
            assert_eq!(buf, piece::<PIECE>(n, ROUNDS), "piece {n}");
        }
    };
    compare(&w);
    w.fs.sync().unwrap();
    assert_eq!(w.fs.stats().data_reserved, 0);
    assert_eq!(w.fs.stats().delayed_bytes, 0);
    w.check();
    compare(&w.reopen());
}

/// Blocks and parts of blocks over each other, with reads and cuts in between: nothing is counted
/// twice or subtracted twice.
#[test]
fn what_is_delayed_is_counted_right() {
    const LEN: u64 = 64 * 4096;
    let w = tight();
    let id = w.file(w.root(), "f");
    let mut want = vec![0u8; LEN as usize];
    w.fs.setattr(id, &SetAttr { size: Some(LEN), ..SetAttr::default() }).unwrap();
    let mut seed = 1u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    for n in 0..4000u32 {
        let (at, len) = match random(3) {
            0 => (random(LEN - 300), 1 + random(300)),
            _ => (random(LEN / 4096) * 4096, 4096),
        };
        match random(40) {
            0 => {
                w.fs.setattr(id, &SetAttr { size: Some(at), ..SetAttr::default() }).unwrap();
                w.fs.setattr(id, &SetAttr { size: Some(LEN), ..SetAttr::default() }).unwrap();
                want[at as usize..].fill(0);
            }
            1 => w.check(),
            2..10 => {
                let mut buf = [0; 8192];
                let read = w.fs.read(id, at, &mut buf).unwrap();
                assert!(buf[..read] == want[at as usize..][..read] && read > 0, "round {n}");
            }
            _ => {
                let data = vec![n as u8 | 1; len as usize];
                w.fs.write(id, at, &data).unwrap();
                want[at as usize..(at + len) as usize].copy_from_slice(&data);
            }
        }
    }
    w.check();
    let mut buf = vec![0; LEN as usize];
    assert_eq!(w.fs.read(id, 0, &mut buf).unwrap() as u64, LEN);
    assert!(buf == want);
}

/// What was begun ends although no thread waits for it.
#[test]
fn a_sync_that_was_begun_ends() {
    let w = World::new();
    let id = w.file(w.root(), "f");
    w.fs.write(id, 0, &pattern(1)).unwrap();
    let before = w.fs.info().generation;
    w.fs.start_sync();
    let since = std::time::Instant::now();
    while w.fs.info().generation == before || w.fs.stats().delayed_bytes > 0 {
        assert!(since.elapsed().as_secs() < 60, "nothing happens");
        std::thread::yield_now();
    }
    let device = w.device.copy();
    let fs = Filesystem::open(device.clone(), options()).unwrap();
    let after = World { device, fs };
    let mut buf = vec![0; MIB];
    after.fs.read(after.find(after.root(), "f").unwrap().id, 0, &mut buf).unwrap();
    assert!(buf == pattern(1));
}
