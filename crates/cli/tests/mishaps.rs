//! Mishaps of users: a wrong path, a full disk, output that nobody reads, a file that may not be
//! read, names that a terminal would obey, Ctrl-C. Each message says what failed and where, each
//! mishap has its exit code, and nothing is left half done.

mod common;

use common::{Run, command, inside, larder};
use larder_simtest::oracle::{Need, need};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }
    fn image(&self) -> PathBuf {
        let image = self.path("a.img");
        larder(args!["mkfs", "--size", "128M", &image]).ok();
        image
    }
    fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        std::fs::write(self.path(name), content).unwrap();
        self.path(name)
    }
}

/// Bytes that do not compress.
fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    bytes
}

#[test]
fn the_hosts_file_system_is_left_alone() {
    let p = Place::new();
    // Linux's own file systems have labels, and answer to a trim.
    larder(args!["label", p.dir.path()]).fails(2, "not on a Larder mount");
    larder(args!["label", p.dir.path(), "mine"]).fails(2, "not on a Larder mount");
    larder(args!["trim", p.dir.path()]).fails(2, "not on a Larder mount");
}

#[test]
fn an_image_that_is_not_there_is_named() {
    let p = Place::new();
    let image = p.image();
    let (file, gone) = (p.write("file", b"x"), inside(&p.path("gone.img"), "/x"));
    let says = "there is no image";
    larder(args!["cp", &file, &gone]).fails(2, says);
    larder(args!["cp", &gone, p.path("copy")]).fails(2, says);
    larder(args!["cp", inside(&image, "/"), &gone]).fails(2, says);
    larder(args!["subvolume", "create", &gone]).fails(2, says);
    larder(args!["property", "get", &gone]).fails(2, says);
    larder(args!["reflink", &gone, &gone]).fails(2, says);
    larder(args!["dedupe", &gone]).fails(2, says);
    larder(args!["du", &gone]).fails(2, says);
    larder(args!["cp", &file, inside(p.dir.path(), "/x")]).fails(2, "is a directory, not an image");
    larder(args!["mkfs", "--size", "1G", p.path("no/dir/a.img")]).fails(2, "there is no directory");
    larder(args!["ls", ""]).fails(2, "is empty");
    larder(args!["cp", "", &image]).fails(2, "is empty");
}

#[test]
fn a_restore_of_nothing_leaves_no_directory() {
    let p = Place::new();
    let (image, out) = (p.image(), p.path("out"));
    larder(args!["restore", "--path", "none", &image, &out])
        .fails(2, "there is no /none in generation");
    larder(args!["restore", "--subvolid", "999", &image, &out])
        .fails(2, "there is no subvolume 999");
    assert!(!out.exists());
    std::fs::create_dir(&out).unwrap();
    larder(args!["restore", "--path", "none", &image, &out]).fails(2, "there is no /none");
    assert!(out.exists(), "it was there before");
}

#[test]
fn what_a_file_holds_instead_is_said() {
    let p = Place::new();
    let other = p.path("other.img");
    let file = std::fs::File::create(&other).unwrap();
    file.set_len(1 << 20).unwrap();
    file.write_all_at(b"\x53\xef", 1024 + 56).unwrap();
    for c in ["ls", "check", "df", "trim"] {
        larder(args![c, &other]).fails(2, "it holds an ext2 file system");
    }
    for c in [
        &["inspect", "super"][..],
        &["inspect", "tree"],
        &["restore", "--list"],
        &["rescue", "zero-log"],
    ] {
        larder(c.iter().map(OsStr::new).chain([other.as_os_str()]))
            .fails(2, "it holds an ext2 file system");
    }
    let empty = p.write("empty", b"");
    larder(args!["ls", &empty]).fails(2, "it is empty: `larder mkfs --size");
}

#[test]
fn output_that_nobody_takes_is_no_panic() {
    let p = Place::new();
    let image = p.image();
    larder(args!["mkdir", inside(&image, "/d")]).ok();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    // Errors and notes that cannot be shown.
    let run = |args: &[&OsStr]| command().args(args).stderr(full()).output().unwrap().status.code();
    assert_eq!(run(&["ls".as_ref(), p.path("gone").as_os_str()]), Some(2));
    assert_eq!(run(&["restore".as_ref(), image.as_os_str(), p.path("out").as_os_str()]), Some(0));
    assert!(p.path("out/d").is_dir());
    // Output that is wanted, and lost.
    let top = inside(&image, "/");
    let commands: [&[&OsStr]; 5] = [
        &["ls".as_ref(), top.as_os_str()],
        &["ls".as_ref(), "-lR".as_ref(), "--json".as_ref(), top.as_os_str()],
        &["inspect".as_ref(), "super".as_ref(), image.as_os_str()],
        &["restore".as_ref(), "--dry-run".as_ref(), image.as_os_str()],
        &["map".as_ref(), "-o".as_ref(), "-".as_ref(), image.as_os_str()],
    ];
    for args in commands {
        let run = Run::from(command().args(args).stdout(full()).output().unwrap());
        run.fails(1, "standard output: No space left on device");
    }
    // A pipe that was closed is how `head` says that it has enough.
    for args in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let run = Run::from(command().args(args).stdout(writer).output().unwrap()).ok();
        assert!(!run.err.contains("pipe"), "{}", run.err);
    }
}

#[test]
fn names_in_messages_cannot_talk_to_the_terminal() {
    let p = Place::new();
    let image = p.image();
    let odd = OsStr::from_bytes(b"/o\x1b[31m\ndd\xff");
    let at = |name: &OsStr| {
        let mut path = inside(&image, "").into_os_string();
        path.push(name);
        path
    };
    larder(args!["mkdir", at(odd)]).ok();
    larder(args!["label", &image, "l\x1b[31m"]).ok();
    let runs = [
        larder(args!["mkdir", at(odd)]).fails(1, "file exists"),
        larder(args!["cat", at(odd)]).fails(1, "is a directory"),
        larder(args!["ls", at(OsStr::new("/none\x1b[2J\r"))]).fails(1, "no such file"),
        larder(args!["cp", at(odd), p.dir.path()]).fails(2, "is a directory"),
        larder(args!["rm", at(odd)]).fails(1, "is a directory"),
        larder(args!["ls", p.path("none\x1b[2J\n")]).fails(2, "No such file"),
        larder(args!["du", "--depth", "2", at(odd)]).ok(),
        larder(args!["df", &image]).ok(),
        larder(args!["ls", "-lR", &image]).ok(),
    ];
    for run in runs {
        let all = [&run.out[..], run.err.as_bytes()].concat();
        assert!(!all.iter().any(|b| b.is_ascii_control() && *b != b'\n'), "{}", all.escape_ascii());
        assert!(!run.err.contains("os error"), "{}", run.err);
    }
}

#[test]
fn what_does_not_fit_is_not_left_behind_in_part() {
    let p = Place::new();
    let image = p.image();
    let big = p.write("big", &noise(130 << 20));
    larder(args!["cp", &big, inside(&image, "/big")])
        .fails(1, "hint: `larder df` says what is full");
    assert_eq!(larder(args!["ls", &image]).ok().text(), "");
    // The picture of an image, and the copy of a file, where files may have a few blocks only.
    std::fs::write(p.path("file"), noise(1 << 20)).unwrap();
    larder(args!["cp", p.path("file"), inside(&image, "/file")]).ok();
    let limited = |script: &str| {
        let script = format!("trap '' XFSZ; ulimit -f 4; exec \"$0\" {script}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).arg(env!("CARGO_BIN_EXE_larder")).current_dir(p.dir.path());
        Run::from(shell.output().unwrap())
    };
    limited("map a.img -o map.html").fails(1, "map.html: File too large");
    limited("cp a.img:/file copy").fails(1, "a.img:/file: File too large");
    assert!(!p.path("map.html").exists() && !p.path("copy").exists());
}

#[test]
fn a_file_that_may_not_be_read_is_named_and_the_others_are_copied() {
    if !need(&[Need::Root]) {
        return;
    }
    const NOBODY: u32 = 65534;
    let p = Place::new();
    let image = p.image();
    std::fs::set_permissions(p.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&image, Some(NOBODY), Some(NOBODY)).unwrap();
    std::fs::create_dir_all(p.path("tree/sub/closed")).unwrap();
    for (name, mode) in [("tree/a", 0o644), ("tree/sub/secret", 0o600), ("tree/sub/z", 0o644)] {
        std::fs::set_permissions(p.write(name, b"content"), PermissionsExt::from_mode(mode))
            .unwrap();
    }
    std::fs::set_permissions(p.path("tree/sub/closed"), PermissionsExt::from_mode(0o700)).unwrap();
    // The command itself may lie where only root can look.
    let program = p.path("larder");
    assert!(
        Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_larder"))
            .arg(&program)
            .status()
            .unwrap()
            .success()
    );
    let run = |args: &[&str]| {
        let mut c = Command::new(&program);
        c.args(args).uid(NOBODY).gid(NOBODY).current_dir(p.dir.path()).stdin(Stdio::null());
        Run::from(c.output().unwrap())
    };
    let said = run(&["cp", "-r", "tree", "a.img:/"]).fails(1, "2 entries could not be copied").err;
    assert!(said.contains("larder: tree/sub/secret: Permission denied"), "{said}");
    assert!(said.contains("larder: tree/sub/closed: Permission denied"), "{said}");
    let names = larder(args!["ls", "-R", inside(&image, "/tree")]).ok().text();
    assert!(names.contains("a\nsub\n") && names.contains(":\nz\n"), "{names}");
    // Nor an image: the message says whose it is.
    std::fs::set_permissions(&image, PermissionsExt::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&image, Some(0), Some(0)).unwrap();
    run(&["ls", "a.img"])
        .fails(2, "it belongs to user 0, group 0, and has the permissions 600; you are user 65534");
}

#[test]
fn a_copy_that_is_interrupted_ends_by_the_signal_and_leaves_whole_files() {
    const SIZE: usize = 256 << 10;
    const FILES: usize = 400;
    let p = Place::new();
    let image = p.path("a.img");
    larder(args!["mkfs", "--size", "1G", &image]).ok();
    std::fs::create_dir(p.path("tree")).unwrap();
    let content = noise(SIZE);
    for n in 0..FILES {
        std::fs::write(p.path("tree").join(format!("{n:03}")), &content).unwrap();
    }
    larder(args!["cp", "-r", p.path("tree"), inside(&image, "/")]).ok();
    // It stops by itself when the pipe with its messages is full; there is one for each file that
    // cannot replace a directory.
    let into = p.path("out/tree");
    for n in 0..FILES {
        std::fs::create_dir_all(into.join(format!("{n:03}/{}", "x".repeat(200)))).unwrap();
    }
    std::fs::remove_dir_all(into.join("000")).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    rustix::pipe::fcntl_setpipe_size(&reader, 4096).unwrap();
    let mut copy = command()
        .args(args!["cp", "-r", inside(&image, "/tree"), p.path("out")])
        .stderr(writer)
        .spawn()
        .unwrap();
    let mut first = [0];
    std::io::Read::read_exact(&mut &reader, &mut first).unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&copy),
        rustix::process::Signal::INT,
    )
    .unwrap();
    let mut said = String::from_utf8_lossy(&first).into_owned();
    std::io::Read::read_to_string(&mut &reader, &mut said).unwrap();
    assert_eq!(copy.wait().unwrap().signal(), Some(rustix::process::Signal::INT.as_raw()));
    assert!(
        said.contains("larder: interrupted\nhint: ") && said.contains("had been copied"),
        "{said}"
    );
    assert_eq!(std::fs::read(into.join("000")).unwrap(), content);
    assert!(
        said.matches("destination exists and is a directory").count() < FILES - 1,
        "it did not go on"
    );
}
