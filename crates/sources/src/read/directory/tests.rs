//! Directories of this machine: what is taken, what is not, and what changes meanwhile.

use crate::{Contents, Entry, Kind, LinkGroup, Options, SourceSpec, Sources};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

fn gather(dir: &Path) -> Sources {
    let options = Options { memory: 2048, ..Options::default() };
    Sources::gather(&[SourceSpec::parse(dir.as_os_str()).unwrap()], &options).unwrap()
}

fn entries(sources: &Sources) -> Vec<Entry> {
    sources.entries().unwrap().collect::<Result<_, _>>().unwrap()
}

fn named<'a>(entries: &'a [Entry], name: &str) -> &'a Entry {
    entries.iter().find(|entry| entry.path.as_bytes() == name.as_bytes()).unwrap()
}

fn open(sources: &Sources, name: &str) -> std::io::Result<Box<dyn Contents>> {
    let entries = entries(sources);
    let Kind::File { contents: Some(at), .. } = &named(&entries, name).kind else {
        panic!("{name} has no contents")
    };
    sources.open(at)
}

#[test]
fn two_copies_give_the_same_stream_but_for_locators() {
    let scratch = tempfile::tempdir().unwrap();
    let streams = [false, true].map(|reversed| {
        let dir = scratch.path().join(format!("{reversed}"));
        fs::create_dir_all(dir.join("sub")).unwrap();
        let mut names: Vec<_> = (0..300).map(|n| format!("sub/{:03}", n * 7 % 300)).collect();
        if reversed {
            names.reverse();
        }
        for name in &names {
            fs::write(dir.join(name), name).unwrap();
        }
        fs::hard_link(dir.join("sub/100"), dir.join("a")).unwrap();
        fs::hard_link(dir.join("sub/100"), dir.join("sub/999")).unwrap();
        for name in names.iter().map(String::as_str).chain(["sub", "."]) {
            let then = rustix::fs::Timespec { tv_sec: 7, tv_nsec: 8 };
            let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
            let flags = rustix::fs::AtFlags::empty();
            rustix::fs::utimensat(rustix::fs::CWD, dir.join(name), &times, flags).unwrap();
        }
        let mut entries = entries(&gather(&dir));
        for entry in &mut entries {
            if let Kind::File { contents: Some(at), .. } = &mut entry.kind {
                at.key.clear();
            }
        }
        entries
    });
    assert_eq!(streams[0], streams[1]);
    let group = named(&streams[0], "a").links;
    assert!(group.is_some_and(|LinkGroup(group)| group > 0));
    for name in ["sub/100", "sub/999"] {
        assert_eq!(named(&streams[0], name).links, group);
        assert_eq!(named(&streams[0], name).kind, named(&streams[0], "a").kind);
    }
    assert_eq!(named(&streams[0], "sub/101").links, None);
}

#[test]
fn holes_are_found() {
    let scratch = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = File::create(scratch.path().join("sparse")).unwrap();
    file.write_all_at(&[1; 4096], 1 << 20).unwrap();
    file.set_len(3 << 20).unwrap();
    let sources = gather(scratch.path());
    let mut contents = open(&sources, "sparse").unwrap();
    let parts = contents.data().unwrap();
    assert!(parts.iter().any(|part| part.start <= 1 << 20 && part.end >= (1 << 20) + 4096));
    assert!(parts.iter().map(|part| part.end - part.start).sum::<u64>() < 1 << 20, "{parts:?}");
    let mut buf = [9; 8192];
    contents.read_exact_at(&mut buf, (1 << 20) - 4096).unwrap();
    assert_eq!((&buf[..4096], &buf[4096..]), (&[0; 4096][..], &[1; 4096][..]));
}

#[test]
fn a_file_that_changes_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("file");
    fs::write(&path, "before").unwrap();
    let sources = gather(scratch.path());
    let mut contents = open(&sources, "file").unwrap();
    contents.read_exact_at(&mut [0; 6], 0).unwrap();
    File::options().append(true).open(&path).unwrap().write_all_at(b"after", 6).unwrap();
    let read = contents.read_exact_at(&mut [0; 6], 0).unwrap_err().to_string();
    let opened = open(&sources, "file").err().unwrap().to_string();
    fs::remove_file(&path).unwrap();
    let gone = open(&sources, "file").err().unwrap().to_string();
    fs::write(&path, "before").unwrap();
    let another = open(&sources, "file").err().unwrap().to_string();
    for (error, expected) in
        [(read, "changed"), (opened, "changed"), (gone, "No such file"), (another, "changed")]
    {
        assert!(error.contains(expected) && error.contains("/file: "), "{error}");
    }
}

#[test]
fn paths_may_be_longer_than_linux_takes_at_once() {
    let scratch = tempfile::tempdir().unwrap();
    let name = "d".repeat(200);
    let mut dir: std::os::fd::OwnedFd = File::open(scratch.path()).unwrap().into();
    use rustix::fs::{Mode, OFlags};
    for _ in 0..30 {
        rustix::fs::mkdirat(&dir, &*name, Mode::from_raw_mode(0o755)).unwrap();
        dir = rustix::fs::openat(&dir, &*name, OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    let flags = OFlags::CREATE | OFlags::WRONLY;
    let file = rustix::fs::openat(&dir, "file", flags, Mode::from_raw_mode(0o644)).unwrap();
    File::from(file).write_all_at(b"deep", 0).unwrap();
    let sources = gather(scratch.path());
    let path = format!("{}/file", vec![name; 30].join("/"));
    let mut buf = [0; 4];
    open(&sources, &path).unwrap().read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(&buf, b"deep");
}

#[test]
fn large_and_deep_trees_come_in_order_however_little_memory_there_is() {
    let scratch = tempfile::tempdir().unwrap();
    let mut expected = vec![String::new()];
    let mut make = |name: String, is_directory: bool| {
        let path = scratch.path().join(&name);
        if is_directory {
            fs::create_dir(path).unwrap()
        } else {
            fs::write(path, "").unwrap()
        }
        expected.push(name);
    };
    // More names than are looked through ahead, and more directories than are open at once.
    make("large".to_owned(), true);
    (0..5000).for_each(|n| make(format!("large/{n}"), n % 50 == 0));
    for n in 0..300 {
        make(format!("{n}"), true);
        make(format!("{n}/below"), true);
        make(format!("{n}/below/file"), false);
    }
    expected.sort_by_key(|name| crate::TreePath::new(name.as_bytes()));
    for memory in [0, 2048, 64 << 20] {
        let options = Options { memory, ..Options::default() };
        let spec = SourceSpec::parse(scratch.path().as_os_str()).unwrap();
        let sources = Sources::gather(&[spec], &options).unwrap();
        let name = |entry: &Entry| str::from_utf8(entry.path.as_bytes()).unwrap().to_owned();
        assert!(entries(&sources).iter().map(name).eq(expected.iter().cloned()), "{memory}");
    }
}

#[test]
fn what_cannot_be_read_is_named() {
    let spec = SourceSpec::parse("/nowhere/at all".as_ref()).unwrap();
    let error = Sources::gather(&[spec], &Options::default()).unwrap_err();
    assert!(error.to_string().starts_with("/nowhere/at all: No such file"), "{error}");
    assert!(error.advice().is_some());
}

#[test]
fn a_directory_is_placed_below_a_path() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(scratch.path().join("file"), "x").unwrap();
    let mut given = scratch.path().as_os_str().to_owned();
    given.push(":/srv/data");
    let spec = SourceSpec::parse(&given).unwrap();
    let sources = Sources::gather(&[spec], &Options::default()).unwrap();
    let names: Vec<_> = entries(&sources).iter().map(|e| e.path.as_bytes().to_vec()).collect();
    assert_eq!(names, ["", "srv", "srv/data", "srv/data/file"].map(|n| n.as_bytes().to_vec()));
}

#[test]
fn what_is_left_out_need_not_be_readable() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let scratch = tempfile::tempdir().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(scratch.path().join("file"), "x").unwrap();
    let secret = scratch.path().join("secret");
    fs::create_dir(&secret).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).unwrap();
    let gathered = |exclude: &[&str]| {
        let exclude = exclude.iter().map(|p| crate::Pattern::new(p).unwrap()).collect();
        let options = Options { exclude, ..Options::default() };
        let spec = SourceSpec::parse(scratch.path().as_os_str()).unwrap();
        // The user changes for this thread only.
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let nobody = rustix::process::Uid::from_raw(65534);
                rustix::thread::set_thread_uid(nobody).unwrap();
                Sources::gather(&[spec], &options)
            });
            thread.join().unwrap()
        })
    };
    let error = gathered(&[]).unwrap_err();
    assert!(error.to_string().contains("/secret: Permission denied"), "{error}");
    assert!(error.advice().unwrap().contains("--exclude"));
    for pattern in ["secret", "secret/"] {
        let names: Vec<_> = entries(&gathered(&[pattern]).unwrap());
        assert_eq!(names.len(), 2, "the root and the file");
    }
}
