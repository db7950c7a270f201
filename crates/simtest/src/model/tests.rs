//! The model by itself: which worlds a history allows, in each mode.

use super::*;
use crate::ops::{Bytes, parse};

/// Runs a workload on the model alone; operation `k` begins at `10 k + 1` and returns at `10 k +
/// 5`.
pub(super) fn history(text: &str) -> History {
    let mut domain = Domain::new("", World::empty(0o755, 256));
    for (k, op) in parse(text).unwrap()[0].iter().enumerate() {
        let mut after = domain.now().clone();
        let touched = after.apply(op).unwrap();
        if let Some(made) = touched.made {
            after.set_real(made, made + 256);
        }
        let k = k as u64 * 10;
        domain.push(op, after, touched, Seq(k + 1), Some(Seq(k + 5)));
    }
    History { domains: vec![domain] }
}

/// After how many operations' worlds a cut after `n` operations may show, in each mode.
fn allowed(h: &History, n: u64, mode: Mode) -> Vec<usize> {
    let worlds = &h.domains[0].worlds;
    (0..worlds.len()).filter(|k| h.verify(&worlds[*k], Seq(n * 10), mode).is_ok()).collect()
}

#[test]
fn a_sync_is_a_floor_and_what_has_not_begun_a_ceiling() {
    let h = history("new f; new g; COMMIT; mk A; mv f A/f; rm g");
    for mode in [Mode::Strict, Mode::Weak] {
        assert_eq!(
            allowed(&h, 2, mode),
            [0, 1, 2, 3],
            "{mode:?}: before the sync (which changes nothing)"
        );
        assert_eq!(allowed(&h, 4, mode), [2, 3, 4], "{mode:?}");
    }
    assert_eq!(allowed(&h, 6, Mode::Strict), [2, 3, 4, 5, 6]);
    assert_eq!(
        allowed(&h, 6, Mode::Weak),
        [1, 2, 3, 4, 5, 6],
        "the removal alone looks like the first world"
    );
}

#[test]
fn an_fsync_covers_its_inode_its_names_and_its_way_from_the_root() {
    let h = history("mk A; new g; new A/f; F A/f; new A/k; mv A/f A/x; F A/x");
    assert_eq!(allowed(&h, 4, Mode::Strict), [3, 4]);
    // A log need not have g.
    let mut without_g = h.domains[0].worlds[3].clone();
    without_g.apply(&Op::Unlink("g".into())).unwrap();
    assert!(h.verify(&without_g, Seq(40), Mode::Weak).is_ok());
    assert!(h.verify(&without_g, Seq(40), Mode::Strict).is_err());
    // The old name must not come back after the second fsync, nor beside the new one at any time.
    assert_eq!(allowed(&h, 7, Mode::Strict), [6, 7]);
    let mut half = h.domains[0].worlds[6].clone();
    let f = half.resolve("A/x").unwrap();
    let a = half.resolve("A").unwrap();
    half.insert(a, "f", Some(f), || unreachable!());
    half.node_mut(f).nlink = 2;
    assert!(h.verify(&half, Seq(60), Mode::Weak).is_err(), "half a rename");
    assert!(h.verify(&half, Seq(60), Mode::Strict).is_err());
}

#[test]
fn a_lost_name_stays_lost_and_has_its_new_owner_where_replay_has_to_free_it() {
    // Only the log knows the old name: its owner now is not promised.
    let h = history("new f; mv f g; new f; F g");
    let mut freed = h.domains[0].worlds[3].clone();
    freed.apply(&Op::Unlink("f".into())).unwrap();
    assert!(h.verify(&freed, Seq(40), Mode::Weak).is_ok());
    assert!(h.verify(&h.domains[0].worlds[1], Seq(40), Mode::Weak).is_err(), "it comes back");
    // The last commit knows it: replay frees the name, and gives it to its owner.
    let h = history("new f; COMMIT; mv f g; new f; F g");
    let mut freed = h.domains[0].worlds[4].clone();
    freed.apply(&Op::Unlink("f".into())).unwrap();
    assert!(h.verify(&freed, Seq(50), Mode::Weak).is_err());
    assert_eq!(allowed(&h, 5, Mode::Weak), [4, 5]);
    // Nor does an fsync of the inode that has lost the name, and has not changed since it was
    // synced, know the new owner of the name.
    let later = history("new f; COMMIT; mv f g; F g; new f; F g");
    let mut freed_later = later.domains[0].worlds[5].clone();
    freed_later.apply(&Op::Unlink("f".into())).unwrap();
    assert!(later.verify(&freed_later, Seq(60), Mode::Weak).is_ok());
    assert!(
        later.verify(&later.domains[0].worlds[2], Seq(60), Mode::Weak).is_err(),
        "it comes back"
    );
    // So may an operation of several steps have, before the name was free.
    let steps = |committed: bool| {
        let mut h = history("new f; COMMIT; mv f g; new f; trunc g 9000; rm f; F g");
        let last =
            h.domains[0].done.iter_mut().find(|d| matches!(d.op, Op::Truncate { .. })).unwrap();
        last.committed = committed;
        h
    };
    let with_f = {
        let h = steps(false);
        let mut w = h.domains[0].worlds[7].clone();
        let (f, root) = (h.domains[0].worlds[4].resolve("f").unwrap(), ROOT);
        let node = Arc::clone(h.domains[0].worlds[4].node(f).unwrap());
        w.insert(root, "f", None, || (*node).clone());
        let again = w.resolve("f").unwrap();
        w.set_real(again, node.real);
        w
    };
    assert!(
        steps(false).verify(&with_f, Seq(70), Mode::Weak).is_err(),
        "the former owner of the name is in no commit"
    );
    assert!(steps(true).verify(&with_f, Seq(70), Mode::Weak).is_ok());
    // Another thread may have committed after the name was lost.
    let mut two = h;
    two.domains.push(Domain::new("other-", World::empty(0o755, 256)));
    assert!(two.verify(&freed, Seq(50), Mode::Weak).is_ok());
    assert!(two.verify(&two.domains[0].worlds[2], Seq(50), Mode::Weak).is_err(), "it comes back");
}

#[test]
fn a_link_count_is_that_of_the_names_and_comes_without_the_attributes() {
    let h = history("mk B; new x; ln x B/h; COMMIT; mode x 127; rm B/h; F B");
    let mut replayed = h.domains[0].worlds[4].clone();
    replayed.apply(&Op::Unlink("B/h".into())).unwrap();
    assert!(h.verify(&replayed, Seq(70), Mode::Weak).is_ok(), "the old mode, and one name");
    let x = replayed.resolve("x").unwrap();
    for wrong in [0, 2] {
        replayed.node_mut(x).nlink = wrong;
        assert!(h.verify(&replayed, Seq(70), Mode::Weak).is_err(), "link count {wrong}");
    }
}

#[test]
fn an_fsync_of_a_directory_covers_its_entries() {
    let h = history("mk A; new A/f; COMMIT; new A/g; rm A/f; F A; new h");
    for mode in [Mode::Strict, Mode::Weak] {
        assert_eq!(allowed(&h, 6, mode), [5, 6], "{mode:?}");
    }
}

fn file_of(h: &History, k: usize, content: Content) -> World {
    let mut world = h.domains[0].worlds[k].clone();
    let f = world.resolve("f").unwrap();
    world.node_mut(f).body = Body::File(Arc::new(content));
    world
}

#[test]
fn bytes_are_old_or_new_and_never_anything_else() {
    let h = history("new f; f[0,8K)=a; F f; f[4K,12K)=b; f+4K=c");
    let check = |build: &dyn Fn(&mut Content), at| {
        let mut c = Content::default();
        build(&mut c);
        h.verify(&file_of(&h, 1, c), Seq(at), Mode::Strict)
    };
    let fill = |c: &mut Content, from: u64, to: u64, x| {
        c.write(from, &crate::ops::filled(x, Bytes { from, to }));
    };
    assert!(check(&|c| fill(c, 0, 8192, b'a'), 50).is_ok());
    assert!(
        check(&|c| (fill(c, 0, 4096, b'a'), fill(c, 4096, 8192, b'b')).1, 50).is_ok(),
        "half of the second"
    );
    let hole = |c: &mut Content| {
        fill(c, 0, 8192, b'a');
        fill(c, 12288, 16384, b'c');
    };
    assert!(
        check(&hole, 50).is_err(),
        "the append before the write: the size covers what is not there"
    );
    assert!(
        check(&|c| fill(c, 0, 4096, b'a'), 50).unwrap_err().contains("size"),
        "an fsynced size"
    );
    assert!(
        check(&|c| (fill(c, 0, 4096, b'a'), c.truncate(8192)).1, 50).is_err(),
        "an fsynced byte"
    );
    assert!(check(&|c| fill(c, 0, 8192, b'z'), 50).is_err(), "foreign bytes");
    assert!(
        check(&|c| (fill(c, 0, 8192, b'a'), fill(c, 8192, 16384, b'c')).1, 50).is_err(),
        "misplaced bytes"
    );
    assert!(check(&|c| fill(c, 0, 4096, b'a'), 24).is_ok(), "before the fsync returned, a part");
    assert!(check(&|c| c.truncate(8192), 24).is_err(), "but no hole");
}

#[test]
fn zeros_behind_a_new_end_are_written_in_place_also_where_the_file_is_removed_later() {
    let h = |made: &str| {
        history(&format!("new f; {made} f[0,12K)=a; COMMIT; trunc f 5000; rm f; new x; F x"))
    };
    let nocow = h("nocow f;");
    let shows = |h: &History, zeros: std::ops::Range<u64>| {
        let before = h.domains[0].worlds.iter().rposition(|w| w.resolve("f").is_ok()).unwrap() - 1;
        let mut c = Content::default();
        c.write(0, &crate::ops::filled(b'a', Bytes { from: 0, to: 12288 }));
        c.clear(Bytes { from: zeros.start, to: zeros.end });
        let mut world = file_of(h, before, c);
        let root = h.domains[0].now();
        let x = root.resolve("x").unwrap();
        world.insert(ROOT, "x", None, || (**root.node(x).unwrap()).clone());
        let (at, real) = (world.resolve("x").unwrap(), root.node(x).unwrap().real);
        world.set_real(at, real);
        h.verify(&world, Seq(80), Mode::Weak)
    };
    assert_eq!(shows(&nocow, 5000..5000), Ok(()), "nothing of it");
    assert_eq!(shows(&nocow, 5000..8192), Ok(()), "the rest of the sector that was cut");
    assert!(shows(&nocow, 4999..8192).unwrap_err().contains("byte 4999"), "but nothing before it");
    assert!(shows(&nocow, 5000..8193).unwrap_err().contains("byte 8192"), "nor behind it");
    let cow = h("");
    assert_eq!(shows(&cow, 5000..5000), Ok(()));
    assert!(
        shows(&cow, 5000..8192).unwrap_err().contains("byte 5000"),
        "what is copied keeps the old block"
    );
}

#[test]
fn a_size_that_was_set_is_there_or_is_not() {
    let h = history("new f; f[0,4K)=a; F f; trunc f 40K; f[20K,24K)=b; f+8K=c");
    let shows = |size: u64, build: &dyn Fn(&mut Content)| {
        let mut c = Content::default();
        c.write(0, &crate::ops::filled(b'a', Bytes { from: 0, to: 4096 }));
        build(&mut c);
        c.truncate(size);
        h.verify(&file_of(&h, 1, c), Seq(60), Mode::Strict)
            .map_err(|e| assert!(e.contains("size"), "{e}"))
    };
    for fits in [4, 40] {
        assert!(shows(fits << 10, &|_| {}).is_ok(), "{fits} KiB");
    }
    let c = |c: &mut Content| {
        c.write(40 << 10, &crate::ops::filled(b'c', Bytes { from: 40 << 10, to: 48 << 10 }))
    };
    for fits in [41, 44, 48] {
        assert!(shows(fits << 10, &c).is_ok(), "{fits} KiB");
    }
    for between in [8, 20, 24, 39] {
        assert!(shows(between << 10, &|_| {}).is_err(), "{between} KiB");
    }
    let b = |c: &mut Content| {
        c.write(20 << 10, &crate::ops::filled(b'b', Bytes { from: 20 << 10, to: 24 << 10 }))
    };
    assert!(shows(40 << 10, &b).is_ok() && shows(24 << 10, &b).is_err());
}

#[test]
fn attributes_are_covered_by_an_fsync_of_the_inode_itself_only() {
    let h = history("mk A; new A/f; F A/f; mode A 700; mode A/f 600; FD A/f; F A/f; F A");
    assert_eq!(allowed(&h, 6, Mode::Strict), [2, 3, 4, 5, 6, 7, 8], "fdatasync");
    assert_eq!(allowed(&h, 7, Mode::Strict), [5, 6, 7, 8]);
    let h = history("mk A; new A/f; F A/f; mode A 700; F A/f; F A");
    assert_eq!(allowed(&h, 5, Mode::Strict), [2, 3, 4, 5, 6], "not the directory above");
    assert_eq!(allowed(&h, 6, Mode::Strict), [4, 5, 6]);
}

#[test]
fn domains_are_checked_each_by_itself_and_share_syncs() {
    let mut a = history("new af; COMMIT; new ag").domains.remove(0);
    a.prefix = "a".into();
    let mut b = Domain::new("b", World::empty(0o755, 256));
    let mut after = b.now().clone();
    let touched = after.apply(&Op::Create("bf".into())).unwrap();
    after.set_real(1, 999);
    b.push(&Op::Create("bf".into()), after, touched, Seq(2), Some(Seq(3)));
    let with_b = |k: usize, b: bool| {
        let mut w = a.worlds[k].clone();
        if b {
            w.apply(&Op::Create("bf".into())).unwrap();
            let ino = w.resolve("bf").unwrap();
            w.set_real(ino, 999);
        }
        w
    };
    let worlds = [with_b(2, false), with_b(2, true), with_b(3, true), with_b(0, true)];
    let h = History { domains: vec![a, b] };
    let verdicts: Vec<bool> =
        worlds.iter().map(|w| h.verify(w, Seq(30), Mode::Strict).is_ok()).collect();
    assert_eq!(verdicts, [false, true, true, false], "b's file was there before a's sync began");
    assert!(h.verify(&worlds[0], Seq(14), Mode::Strict).is_ok());
}

#[test]
fn what_returned_before_another_thread_began_is_there_with_it() {
    let domain = |name: &str, ops: &[(&str, u64, u64)], real: u64| {
        let mut d = Domain::new(name, World::empty(0o755, 256));
        for (i, (op, begin, end)) in ops.iter().enumerate() {
            let op = parse(op).unwrap()[0][0].clone();
            let mut after = d.now().clone();
            let touched = after.apply(&op).unwrap();
            after.set_real(touched.made.unwrap(), real + i as u64);
            d.push(&op, after, touched, Seq(*begin), Some(Seq(*end)));
        }
        d
    };
    let a = domain("a", &[("new a1", 1, 2), ("new a2", 10, 12)], 300);
    let b = domain("b", &[("new b1", 5, 6), ("new b2", 11, 13)], 400);
    let h = History { domains: vec![a, b] };
    let shows = |names: &[(&str, u64)]| {
        let mut w = World::empty(0o755, 256);
        for (name, real) in names {
            w.apply(&Op::Create((*name).into())).unwrap();
            let ino = w.resolve(name).unwrap();
            w.set_real(ino, *real);
        }
        h.verify(&w, Seq(20), Mode::Strict).is_ok()
    };
    let (a1, a2, b1, b2) = (("a1", 300), ("a2", 301), ("b1", 400), ("b2", 401));
    assert!(shows(&[]) && shows(&[a1]) && shows(&[a1, b1]) && shows(&[a1, a2, b1, b2]));
    assert!(shows(&[a1, b1, a2]) && shows(&[a1, b1, b2]), "these two overlapped");
    assert!(!shows(&[b1]), "a1 had returned before b1 began");
    assert!(!shows(&[a1, a2]), "b1 had returned before a2 began");
}
