//! Both languages of manifests, over a directory.

use crate::{Entry, Kind, Options, SourceSpec, Sources, Time};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;

/// The tree of a directory with a manifest over it.
fn built(prefix: &str, text: &str) -> crate::Result<BTreeMap<String, Entry>> {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("tree");
    fs::create_dir_all(dir.join("bin")).unwrap();
    fs::write(dir.join("bin/tool"), "tool").unwrap();
    fs::write(dir.join("bin/other tool"), "other").unwrap();
    fs::write(scratch.path().join("contents"), "from beside the manifest").unwrap();
    let manifest = scratch.path().join("manifest");
    fs::write(&manifest, text).unwrap();
    let mut given = OsString::from(prefix);
    given.push(":");
    given.push(&manifest);
    let specs = [SourceSpec::parse(dir.as_os_str())?, SourceSpec::parse(&given)?];
    let owner = Some((5, 5));
    let sources = Sources::gather(&specs, &Options { owner, ..Options::default() })?;
    let mut tree = BTreeMap::new();
    for entry in sources.entries()? {
        let mut entry = entry?;
        if let Kind::File { size, contents: Some(at) } = &entry.kind {
            let mut data = vec![0; *size as usize];
            sources.open(at).unwrap().read_exact_at(&mut data, 0).unwrap();
            // What a test compares is the contents.
            entry.kind = Kind::Symlink(data);
        }
        tree.insert(String::from_utf8(entry.path.as_bytes().to_vec()).unwrap(), entry);
    }
    Ok(tree)
}

fn refusal(prefix: &str, text: &str) -> String {
    built(prefix, text).expect_err(text).to_string()
}

#[test]
fn mtree_says_what_is_there() {
    let tree = built(
        "mtree",
        "#mtree v2.0\n\
         /set uid=0 gid=0 mode=0644\n\
         . type=dir mode=0755 time=100.000000005\n\
         \x20   dev type=dir mode=755\n\
         \x20       console type=char device=native,5,1 mode=0600\n\
         \x20       sda type=block device=0x10380001\n\
         \x20   ..\n\
         \x20   bin type=dir mode=0755\n\
         # a comment\n\
         \x20       tool type=file mode=4755 gid=7 \\\n\
         \x20           size=4 sha256=abc\n\
         \x20       other\\040tool type=file optional\n\
         \x20       none type=file optional\n\
         \x20       new type=file contents=contents\n\
         \x20   ..\n\
         ..\n\
         ./a/b/link type=link link=../\\s\\\\x mode=0777\n\
         ./pipe type=fifo flags=nocow\n",
    );
    // The last `..` leads out of the root.
    assert!(tree.is_err());
    let tree = built(
        "mtree",
        "/set uid=0 gid=0 mode=0644\n\
         . type=dir mode=0755 time=100.000000005\n\
         dev type=dir mode=755\n\
         console type=char device=native,5,1 mode=0600\n\
         sda type=block device=0x10380001\n\
         ..\n\
         bin type=dir mode=0755\n\
         # a comment\n\
         tool type=file mode=4755 gid=7 \\\n  size=4 sha256=abc\n\
         other\\040tool type=file optional\n\
         none type=file optional\n\
         new type=file contents=contents\n\
         ./a/b/link type=link link=../\\s\\\\x mode=0777\n\
         ./pipe type=fifo flags=nocow\n",
    )
    .unwrap();
    let names: Vec<_> = tree.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "",
            "a",
            "a/b",
            "a/b/link",
            "bin",
            "bin/new",
            "bin/other tool",
            "bin/tool",
            "dev",
            "dev/console",
            "dev/sda",
            "pipe"
        ]
    );
    let owner_and_mode = |name: &str| {
        let attributes = &tree[name].attributes;
        (attributes.uid, attributes.gid, attributes.permissions)
    };
    assert_eq!(owner_and_mode(""), (0, 0, 0o755));
    assert_eq!(tree[""].attributes.modified, Time { seconds: 100, nanoseconds: 5 });
    assert_eq!(owner_and_mode("bin/tool"), (0, 7, 0o4755));
    assert_eq!(tree["bin/tool"].kind, Kind::Symlink(b"tool".to_vec()));
    assert_eq!(tree["bin/new"].kind, Kind::Symlink(b"from beside the manifest".to_vec()));
    assert_eq!(owner_and_mode("dev/console"), (0, 0, 0o600));
    assert_eq!(tree["dev/console"].kind, Kind::CharDevice { major: 5, minor: 1 });
    assert_eq!(tree["dev/sda"].kind, Kind::BlockDevice { major: 0x800 & 0xfff, minor: 0x10301 });
    assert_eq!(tree["a/b/link"].kind, Kind::Symlink(b"../ \\x".to_vec()));
    assert_eq!(tree["pipe"].attributes.inode_flags, 3);
    assert_eq!(owner_and_mode("a"), (0, 0, 0o755));
}

#[test]
fn our_own_language_says_what_is_there() {
    let tree = built(
        "manifest",
        "# a comment\n\
         dir /var/log mode=0750 uid=1 gid=2 mtime=5.25\n\
         file /etc/hostname contents=contents mode=u=rw,go=r\n\
         file /bin/tool mode=0700 xattr.user.a=x\\000=y\\n\n\
         symlink /sbin target=bin uid=9\n\
         hardlink /sbin/again target=/bin/tool\n\
         char /dev/null device=1:3 mode=0666\n\
         block /dev/b device=7:0\n\
         fifo /run/f\n\
         socket /run/s flags=nodump,nocompress\n\
         set /bin uid=77\n\
         set /bin/tool gid=78\n\
         remove /bin/other\\stool\n\
         set /bin/tool xattr.user.b=1 noxattr=user.b\n",
    )
    .unwrap();
    let names: Vec<_> = tree.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "",
            "bin",
            "bin/again",
            "bin/tool",
            "dev",
            "dev/b",
            "dev/null",
            "etc",
            "etc/hostname",
            "run",
            "run/f",
            "run/s",
            "sbin",
            "var",
            "var/log"
        ]
    );
    let attributes = |name: &str| tree[name].attributes.clone();
    let log = attributes("var/log");
    assert_eq!((log.uid, log.gid, log.permissions), (1, 2, 0o750));
    assert_eq!(log.modified, Time { seconds: 5, nanoseconds: 250_000_000 });
    // The owner of the options, and what the manifest changes, by either name.
    let tool = attributes("bin/tool");
    assert_eq!((tool.uid, tool.gid, tool.permissions), (5, 78, 0o700));
    assert_eq!(tool.xattrs, [(b"user.a".to_vec(), b"x\0=y\n".to_vec())]);
    assert_eq!(attributes("bin/again"), tool);
    assert_eq!(tree["bin/again"].links, tree["bin/tool"].links);
    assert_eq!(attributes("bin").uid, 77);
    assert_eq!(attributes("sbin").uid, 9);
    assert_eq!(attributes("run/s").inode_flags, (1 << 8) | (1 << 3));
    assert_eq!(tree["dev/null"].kind, Kind::CharDevice { major: 1, minor: 3 });
    assert_eq!(attributes("etc/hostname").permissions, 0o644);
}

#[test]
fn wrong_lines_are_named() {
    for (prefix, text, expected) in [
        ("mtree", "\nx type=file\n", "x: no earlier source has it"),
        ("mtree", "bin type=file\n", "bin: earlier sources have no regular file there"),
        ("mtree", "x type=door\n", "line 1: type=door is not known"),
        ("mtree", "x colour=red\n", "line 1: the keyword colour is not known"),
        ("mtree", "x type=dir uname=lisa\n", "line 1: uname=lisa without a number"),
        ("mtree", "a/../../x type=dir\n", "line 1: a/../../x leads out of the tree"),
        ("mtree", "x type=link\n", "line 1: a symbolic link without link="),
        ("mtree", "x type=char device=5\\q\n", "line 1: an escape that is not known"),
        ("mtree", "x type=dir time=1.9999999999\n", "line 1: time=1.9999999999 is no time"),
        ("manifest", "dir\n", "line 1: a line has a type and a path"),
        ("manifest", "\n\ndoor /x\n", "line 3: `door` is no type"),
        ("manifest", "dir /x mode=9\n", "line 1: not a mode"),
        ("manifest", "dir /x uid=lisa\n", "line 1: uid=lisa is no number"),
        ("manifest", "dir /x target=y\n", "line 1: `dir` has a key too many, or lacks one"),
        ("manifest", "char /x\n", "line 1: `char` has a key too many, or lacks one"),
        ("manifest", "file /x contents=nothing\n", "nothing: No such file"),
        ("manifest", "file /x contents=tree\n", "tree: not a regular file"),
        ("manifest", "set /x uid=1\n", "x: no earlier source has it"),
        ("manifest", "hardlink /x target=/y\n", "x: a hard link to y, which is not there"),
        ("manifest", "dir /x xattr.y=z\n", "line 1: an attribute's name begins with"),
    ] {
        let error = refusal(prefix, text);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_taken_or_refused(
        lines in prop::collection::vec(
            prop::collection::vec(
                "dir|file|set|remove|/set|\\.\\.|a/b|bin|type=(dir|file|link|char)|link=x\
                 |\\\\[0-9sx]{1,3}\
                 |mode=[0-9u+x,]{1,5}|uid=-?[0-9]{1,20}|device=[0-9:,x]{1,9}|time=[0-9.]{1,9}\
                 |xattr\\.user\\.a=.{0,3}|target=[a/.]{0,5}|[ -~]{1,9}",
                0..5,
            ),
            0..6,
        ),
        mtree in any::<bool>(),
    ) {
        let text: Vec<_> = lines.iter().map(|words| words.join(" ")).collect();
        drop(built(if mtree { "mtree" } else { "manifest" }, &text.join("\n")));
    }
}

#[test]
fn nobody_owns_nothing_and_devices_are_those_of_linux() {
    for (prefix, line, expected) in [
        ("manifest", "fifo /p uid=4294967295", "uid=4294967295"),
        ("manifest", "dir /d gid=4294967295", "gid=4294967295"),
        ("manifest", "char /c device=4096:0", "device=4096:0"),
        ("manifest", "block /b device=0:1048576", "device=0:1048576"),
        ("mtree", "x type=fifo uid=4294967295", "uid=4294967295"),
        ("mtree", "x type=char device=native,4096,0", "device=native,4096,0"),
    ] {
        let error = refusal(prefix, line);
        assert!(error.contains(expected), "{error}: {expected} was expected");
    }
}

#[test]
fn a_pipe_has_no_contents_and_is_not_waited_for() {
    let scratch = tempfile::tempdir().unwrap();
    let pipe = scratch.path().join("pipe");
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
    let manifest = scratch.path().join("manifest");
    fs::write(&manifest, "file /x contents=pipe").unwrap();
    let (answer, answered) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut given = OsString::from("manifest:");
        given.push(&manifest);
        let spec = SourceSpec::parse(&given).unwrap();
        answer.send(Sources::gather(&[spec], &Options::default()).map(drop)).unwrap();
    });
    let gathered = answered.recv_timeout(std::time::Duration::from_secs(60));
    // Opened for both, a pipe lets everybody go on that waits for the other end.
    let _release = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    thread.join().unwrap();
    let error = gathered.expect("an answer").expect_err("a pipe").to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn defaults_of_mtree_are_short() {
    let error = refusal("mtree", &format!("/set md5={}\na\n", "0".repeat(5000)));
    assert!(error.contains("line 1: md5= has 5000 bytes"), "{error}");
}

#[test]
fn a_change_belongs_to_the_inode_whatever_becomes_of_the_name() {
    let tree = built(
        "manifest",
        "hardlink /x target=bin/tool\n\
         set /bin/tool gid=9\n\
         set /bin/tool mode=0644\n\
         set /x mode=a+X\n\
         set /bin/tool mode=u+x\n\
         hardlink /y target=bin/tool\n\
         set /y uid=8\n\
         remove /bin/tool\n",
    )
    .unwrap();
    let of = |name: &str| tree[name].attributes.clone();
    assert_eq!((of("x").uid, of("x").gid, of("x").permissions), (8, 9, 0o744));
    assert_eq!(of("x"), of("y"));
}
