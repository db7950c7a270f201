//! Inode items that are written before the seal, while operations go on.

use super::World;
use crate::engine::late::{LateItems, write_items_ahead};
use crate::{FileKind, SetAttr, Tuning};
use larder_format::items::InodeItem;
use larder_format::items::keys::inode_key;
use std::sync::atomic::{AtomicBool, Ordering};

fn world() -> World {
    let mut w = World::new();
    w.fs.close().unwrap();
    let mut options = super::options();
    options.tuning = Tuning { seal_ahead: Some(1), ..options.tuning };
    w.fs = crate::Filesystem::open(w.device.clone(), options).unwrap();
    w
}

fn dirty(w: &World) -> usize {
    w.fs.core.txns.running().gathered::<LateItems>().0.lock().len()
}

#[test]
fn the_seal_finds_little_left() {
    let w = world();
    let ids: Vec<_> = (0..300).map(|n| w.file(w.root(), format!("f{n}"))).collect();
    w.fs.sync().unwrap();
    let chmod = |perm| {
        for id in &ids {
            w.fs.setattr(*id, &SetAttr { perm: Some(perm), ..SetAttr::default() }).unwrap();
        }
    };
    chmod(0o600);
    assert_eq!(dirty(&w), ids.len());
    write_items_ahead(&w.fs.core);
    assert_eq!(dirty(&w), 0);
    let items = w.items();
    for id in &ids {
        let item = InodeItem::parse(&items[&inode_key(id.ino.into())]).unwrap();
        assert_eq!(item.mode.get() & 0o777, 0o600);
    }
    // What changes again is written again, and what is deleted stays deleted.
    w.fs.setattr(ids[7], &SetAttr { perm: Some(0o640), ..SetAttr::default() }).unwrap();
    w.fs.unlink(w.root(), b"f8").unwrap();
    assert_eq!(dirty(&w), 2 + 1, "the directory, the file, and the one that is gone");
    w.check();
    let w = w.reopen();
    assert_eq!((w.attr(ids[7]).perm, w.attr(ids[9]).perm), (0o640, 0o600));
    assert!(w.find(w.root(), "f8").is_err());
}

/// Above all sizes: data in flight must hold them back, and let them go in time.
#[test]
fn operations_go_on_meanwhile() {
    let w = world();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        // Each commit writes items ahead. Only the committer may do that: its seal would not find
        // what another thread has taken.
        let commits = s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                w.fs.sync().unwrap();
            }
        });
        let work: Vec<_> = (0..3u64)
            .map(|t| {
                let w = &w;
                s.spawn(move || {
                    let dir = w.dir(w.root(), format!("d{t}"));
                    for n in 0..120u64 {
                        let f = w.file(dir, format!("f{n}"));
                        w.fs.write(f, 0, &vec![t as u8 + 1; 100 + 97 * n as usize]).unwrap();
                        match n % 4 {
                            0 => w.fs.unlink(dir, format!("f{n}").as_bytes()).unwrap(),
                            1 => w.fs.fsync(f, false).unwrap(),
                            2 => drop(
                                w.fs.setattr(f, &SetAttr { size: Some(50), ..SetAttr::default() })
                                    .unwrap(),
                            ),
                            _ => w.fs.link(f, dir, format!("l{n}").as_bytes()).map(drop).unwrap(),
                        }
                    }
                })
            })
            .collect();
        work.into_iter().for_each(|w| w.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        commits.join().unwrap();
    });
    w.check();
    let w = w.crash();
    for t in 0..3u64 {
        let dir = w.find(w.root(), format!("d{t}")).unwrap().id;
        for n in (0..120u64).filter(|n| n % 4 != 0) {
            let f = w.find(dir, format!("f{n}")).unwrap();
            assert_eq!(
                (f.kind, f.size),
                (FileKind::Regular, if n % 4 == 2 { 50 } else { 100 + 97 * n })
            );
            let mut data = vec![0; 20_000];
            let len = w.fs.read(f.id, 0, &mut data).unwrap();
            assert!(data[..len].iter().all(|b| u64::from(*b) == t + 1), "d{t}/f{n}");
        }
    }
}
