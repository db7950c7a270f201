//! Every kind of rename with every kind of source and target.

use super::{World, assert_err, new};
use crate::{Error, FileKind, InodeId, RenameMode, Result};
use RenameMode::{Exchange, NoReplace, Replace};

const WHITEOUT: RenameMode = RenameMode::Whiteout { uid: 7, gid: 8 };

/// What a name may stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Thing {
    Nothing,
    File,
    /// Another name of the source's inode.
    Same,
    EmptyDir,
    FullDir,
}
use Thing::{EmptyDir, File, FullDir, Nothing, Same};

fn put(
    w: &World,
    dir: InodeId,
    name: &str,
    thing: Thing,
    source: Option<InodeId>,
) -> Option<InodeId> {
    match thing {
        Nothing => None,
        File => Some(w.file(dir, name)),
        Same => {
            let id = source.expect("a source to link");
            w.fs.link(id, dir, name.as_bytes()).unwrap();
            Some(id)
        }
        EmptyDir => Some(w.dir(dir, name)),
        FullDir => {
            let id = w.dir(dir, name);
            w.file(id, "inside");
            Some(id)
        }
    }
}

/// What POSIX and Linux say.
fn expected(
    source: Thing,
    target: Thing,
    mode: RenameMode,
) -> std::result::Result<(), &'static str> {
    let is_dir = |t| matches!(t, EmptyDir | FullDir);
    match (source, target, mode) {
        (Nothing, ..) => Err("NotFound"),
        (_, Nothing, Exchange) => Err("NotFound"),
        (_, Nothing, _) => Ok(()),
        (_, _, NoReplace) => Err("Exists"),
        (_, _, Exchange) | (_, Same, _) => Ok(()),
        (s, t, _) if is_dir(s) && !is_dir(t) => Err("NotDirectory"),
        (s, t, _) if !is_dir(s) && is_dir(t) => Err("IsDirectory"),
        (_, FullDir, _) => Err("NotEmpty"),
        _ => Ok(()),
    }
}

fn name_of(result: &Result<()>) -> std::result::Result<(), String> {
    result.as_ref().copied().map_err(|e| format!("{e:?}").split('(').next().unwrap().to_owned())
}

#[test]
fn every_source_target_and_mode() {
    for same_dir in [true, false] {
        for mode in [Replace, NoReplace, Exchange, WHITEOUT] {
            let w = World::new();
            for (n, source) in [Nothing, File, EmptyDir, FullDir].into_iter().enumerate() {
                for (m, target) in [Nothing, File, Same, EmptyDir, FullDir].into_iter().enumerate()
                {
                    if target == Same && source != File {
                        continue;
                    }
                    let case = w.dir(w.root(), format!("{n}{m}"));
                    let to = if same_dir { case } else { w.dir(w.root(), format!("to{n}{m}")) };
                    let a = put(&w, case, "a", source, None);
                    let b = put(&w, to, "b", target, a);
                    let was = (w.names(case), w.names(to));
                    let result = w.fs.rename(case, b"a", to, b"b", mode);
                    let what =
                        format!("{source:?} to {target:?}, {mode:?}, same directory: {same_dir}");
                    let want = expected(source, target, mode);
                    assert_eq!(name_of(&result), want.map_err(str::to_owned), "{what}");
                    let now_a = w.find(case, "a").map(|x| x.id).ok();
                    let now_b = w.find(to, "b").map(|x| x.id).ok();
                    if want.is_err() || target == Same {
                        assert_eq!((now_a, now_b), (a, b), "{what}");
                        assert_eq!((w.names(case), w.names(to)), was, "{what}");
                        continue;
                    }
                    assert_eq!(now_b, a, "{what}");
                    match mode {
                        Exchange => assert_eq!(now_a, b, "{what}"),
                        RenameMode::Whiteout { .. } => {
                            let white = w.find(case, "a").unwrap();
                            assert_eq!(
                                (white.kind, white.rdev, white.perm),
                                (FileKind::CharDevice, 0, 0),
                                "{what}"
                            );
                            assert_eq!((white.uid, white.gid, white.nlink), (7, 8, 1), "{what}");
                        }
                        _ => assert_eq!(now_a, None, "{what}"),
                    }
                    if let (Some(b), true) = (b, mode != Exchange) {
                        assert_err!(w.fs.getattr(b), Error::NotFound);
                    }
                    if source == FullDir {
                        let up = w.find(a.unwrap(), "..").unwrap().id;
                        assert_eq!(up, to, "{what}");
                    }
                }
            }
            w.check();
            let before = w.items();
            let w = w.reopen();
            assert_eq!(w.items(), before);
        }
    }
}

#[test]
fn directories_do_not_move_into_themselves() {
    let w = World::new();
    let a = w.dir(w.root(), "a");
    let b = w.dir(a, "b");
    let c = w.dir(b, "c");
    for mode in [Replace, NoReplace, WHITEOUT] {
        assert_err!(w.fs.rename(w.root(), b"a", a, b"x", mode), Error::Invalid(_));
        assert_err!(w.fs.rename(w.root(), b"a", c, b"x", mode), Error::Invalid(_));
    }
    assert_err!(w.fs.rename(w.root(), b"a", b, b"c", Exchange), Error::Invalid(_));
    assert_err!(w.fs.rename(b, b"c", w.root(), b"a", Exchange), Error::Invalid(_));
    // A directory above it is never empty.
    assert_err!(w.fs.rename(b, b"c", w.root(), b"a", Replace), Error::NotEmpty);
    assert_err!(w.fs.rename(a, b"b", w.root(), b"a", Replace), Error::NotEmpty);
    w.fs.rename(b, b"c", w.root(), b"c", Replace).unwrap();
    w.fs.rename(w.root(), b"a", c, b"a", Replace).unwrap();
    assert_eq!(w.find(b, "..").unwrap().id, a);
    assert_eq!(w.find(a, "..").unwrap().id, c);
    w.check();
}

#[test]
fn odd_names() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    for (from, to) in [(".", "x"), ("..", "x"), ("f", "."), ("f", "..")] {
        assert_err!(
            w.fs.rename(w.root(), from.as_bytes(), w.root(), to.as_bytes(), Replace),
            Error::Busy(_)
        );
    }
    let before = w.attr(f);
    w.fs.rename(w.root(), b"f", w.root(), b"f", Replace).unwrap();
    assert_eq!(w.attr(f), before);
    assert_err!(w.fs.rename(w.root(), b"f", w.root(), b"f", NoReplace), Error::Exists);
    assert_err!(w.fs.rename(w.root(), b"f", f, b"g", Replace), Error::NotDirectory);
    assert_err!(w.fs.rename(w.root(), b"f", w.root(), &[b'n'; 256], Replace), Error::NameTooLong);
    let long = [b'n'; 255];
    w.fs.rename(w.root(), b"f", w.root(), &long, Replace).unwrap();
    assert_eq!(w.find(w.root(), long).unwrap().id, f);
    assert!(w.attr(f).ctime > before.ctime);
    assert_eq!(w.attr(f).mtime, before.mtime);
    w.check();
}

#[test]
fn a_replaced_file_that_is_held_lives_on() {
    let w = World::new();
    w.file(w.root(), "a");
    let b = w.file(w.root(), "b");
    w.fs.hold(b);
    w.fs.rename(w.root(), b"a", w.root(), b"b", Replace).unwrap();
    assert_eq!(w.attr(b).nlink, 0);
    w.check();
    w.fs.release(b, 1);
    assert_err!(w.fs.getattr(b), Error::NotFound);
    w.check();
}

#[test]
fn opposite_moves_of_directories_make_no_loop() {
    let w = World::new();
    let a = w.dir(w.root(), "a");
    let b = w.dir(w.root(), "b");
    let root = w.root();
    for _ in 0..50 {
        let results = std::thread::scope(|s| {
            let one = s.spawn(|| w.fs.rename(root, b"a", b, b"a", Replace));
            let two = s.spawn(|| w.fs.rename(root, b"b", a, b"b", Replace));
            [one.join().unwrap(), two.join().unwrap()]
        });
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1, "{results:?}");
        if results[0].is_ok() {
            w.fs.rename(b, b"a", root, b"a", Replace).unwrap();
        } else {
            w.fs.rename(a, b"b", root, b"b", Replace).unwrap();
        }
    }
    w.check();
}

#[test]
fn many_threads_move_files_between_directories() {
    let w = World::new();
    let dirs: Vec<_> = (0..4).map(|n| w.dir(w.root(), format!("d{n}"))).collect();
    for n in 0..40 {
        w.fs.create(dirs[n % 4], format!("f{n}").as_bytes(), &new(FileKind::Regular)).unwrap();
    }
    std::thread::scope(|s| {
        for t in 0..4usize {
            let (w, dirs) = (&w, &dirs);
            s.spawn(move || {
                for i in 0..400usize {
                    let n = (i * 7 + t * 13) % 40;
                    let name = format!("f{n}");
                    let (from, to) = (dirs[(i + t) % 4], dirs[(i / 3 + 2 * t) % 4]);
                    let mode = [Replace, NoReplace, Exchange][i % 3];
                    match w.fs.rename(from, name.as_bytes(), to, name.as_bytes(), mode) {
                        Ok(()) | Err(Error::NotFound | Error::Exists) => {}
                        Err(e) => panic!("{e}"),
                    }
                    if i % 50 == 0 {
                        w.fs.sync().unwrap();
                    }
                }
            });
        }
    });
    let left: usize = dirs.iter().map(|d| w.names(*d).len()).sum();
    assert_eq!(left, 40);
    w.check();
}
