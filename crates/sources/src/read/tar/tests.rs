//! Archives of each form, sound and hostile.
//!
//! GNU tar packs a tree with all that it can, and what is read must be what the directory reader
//! finds there. Hostile archives are written byte by byte.

use super::super::spool::spool;
use crate::{Attributes, Entry, Kind, Locator, Options, Sort, SourceSpec, Sources};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

fn gather(source: &Path) -> crate::Result<Sources> {
    let spec = SourceSpec::parse(source.as_os_str())?;
    Sources::gather(&[spec], &Options { memory: 4096, ..Options::default() })
}

/// A tree as it is compared: attributes, type, contents, holes, and the first name of its inode.
#[derive(Debug, PartialEq)]
struct Seen {
    attributes: Attributes,
    kind: Kind,
    data: Vec<u8>,
    parts: Vec<std::ops::Range<u64>>,
    first_name: Option<String>,
}

fn contents(
    sources: &Sources,
    locator: &Locator,
    size: u64,
) -> (Vec<u8>, Vec<std::ops::Range<u64>>) {
    let mut contents = sources.open(locator).unwrap();
    let mut data = vec![1; size as usize];
    contents.read_exact_at(&mut data, 0).unwrap();
    assert!(contents.read_exact_at(&mut [0; 1], size).is_err());
    (data, contents.data().unwrap())
}

fn tree(sources: &Sources) -> BTreeMap<String, Seen> {
    let mut first = BTreeMap::new();
    let mut names = BTreeMap::new();
    let mut tree = BTreeMap::new();
    for entry in sources.entries().unwrap() {
        let Entry { path, mut attributes, kind, links } = entry.unwrap();
        let name = String::from_utf8_lossy(path.as_bytes()).into_owned();
        // A directory has none of these.
        (attributes.accessed, attributes.changed) = (None, None);
        let (data, parts) = match &kind {
            Kind::File { size, contents: Some(at) } => contents(sources, at, *size),
            _ => Default::default(),
        };
        let kind = match kind {
            Kind::File { size, .. } => Kind::File { size, contents: None },
            kind => kind,
        };
        let first_name = links.map(|group| first.entry(group).or_insert(name.clone()).clone());
        *names.entry(first_name.clone()).or_insert(0) += 1;
        tree.insert(name, Seen { attributes, kind, data, parts, first_name });
    }
    for seen in tree.values_mut() {
        if names[&seen.first_name] < 2 {
            seen.first_name = None;
        }
    }
    tree
}

fn setfattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// A directory with all that GNU tar can pack.
fn everything(dir: &Path) {
    let at = |name: &str| dir.join(name);
    fs::create_dir_all(at("d/e")).unwrap();
    fs::write(at("empty"), "").unwrap();
    fs::write(at("file"), "some text").unwrap();
    fs::write(at("block"), [7; 512]).unwrap();
    fs::write(at("d/large"), vec![3; 100_000]).unwrap();
    fs::set_permissions(at("file"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(at("file"), at("d/e/again")).unwrap();
    fs::hard_link(at("file"), at("a link")).unwrap();
    symlink("file", at("link")).unwrap();
    symlink("t".repeat(300), at("long link")).unwrap();
    let long = format!("d/{}", "n".repeat(200));
    fs::create_dir(at(&long)).unwrap();
    fs::write(at(&format!("{long}/{}", "m".repeat(250))), "long").unwrap();
    fs::write(at("grüße\n"), "name").unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o640),
        0,
    )
    .unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.write_all_at(b"begin", 0).unwrap();
    for n in 1..40u64 {
        sparse.write_all_at(&[n as u8; 4096], n * 65536).unwrap();
    }
    sparse.set_len(4 << 20).unwrap();
    File::create(at("hole")).unwrap().set_len(3 << 20).unwrap();
    if rustix::process::geteuid().is_root() {
        for (name, kind) in [
            ("char", rustix::fs::FileType::CharacterDevice),
            ("block device", rustix::fs::FileType::BlockDevice),
        ] {
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            let device = rustix::fs::makedev(5, 70_000);
            rustix::fs::mknodat(rustix::fs::CWD, at(name), kind, mode, device).unwrap();
        }
        std::os::unix::fs::lchown(at("d"), Some(3_000_000), Some(70_000)).unwrap();
    }
    let old = rustix::fs::Timespec { tv_sec: -5, tv_nsec: 123_456_789 };
    let times = rustix::fs::Timestamps { last_access: old, last_modification: old };
    rustix::fs::utimensat(rustix::fs::CWD, at("empty"), &times, rustix::fs::AtFlags::empty())
        .unwrap();
}

/// Runs GNU tar on a directory; returns the archive's path.
fn pack(dir: &Path, out: &Path, arguments: &[&str]) {
    let status = Command::new("tar")
        .arg("-cf")
        .arg(out)
        .args(arguments)
        .arg("-C")
        .arg(dir)
        .arg(".")
        .status()
        .expect("GNU tar is there");
    assert!(status.success());
}

#[test]
fn each_form_of_gnu_tar_is_read_as_the_directory_is() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("tree");
    everything(&dir);
    let out = scratch.path().join("out.tar");
    for (arguments, is_exact, is_sparse) in [
        (&["--format=gnu"][..], false, false),
        (&["--format=oldgnu", "--sparse"], false, true),
        (&["--format=gnu", "--sparse"], false, true),
        (&["--format=pax"], true, false),
        (&["--format=pax", "--sparse", "--sparse-version=0.0"], true, true),
        (&["--format=pax", "--sparse", "--sparse-version=0.1"], true, true),
        (&["--format=pax", "--sparse", "--sparse-version=1.0"], true, true),
        (&["--format=pax", "--pax-option=globexthdr.name=g,comment=x,gid=77"], true, false),
        (&["--format=pax", "--gzip"], true, false),
        (&["--format=pax", "--sort=name", "--numeric-owner"], true, false),
    ] {
        pack(&dir, &out, arguments);
        let packed = tree(&gather(&out).unwrap());
        let mut expected = tree(&gather(&dir).unwrap());
        let is_global = arguments.iter().any(|a| a.contains("gid=77"));
        for (name, seen) in &mut expected {
            if !is_exact {
                seen.attributes.modified.nanoseconds = 0;
            }
            if is_global {
                seen.attributes.gid = 77;
            }
            if let Some(packed) = packed.get(name)
                && !is_sparse
            {
                seen.parts.clone_from(&packed.parts);
            }
        }
        assert_eq!(packed.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, seen) in expected {
            // Which attributes came from a global header is up to GNU tar.
            assert_eq!(packed[&name], seen, "{arguments:?}: {name}");
        }
    }
}

#[test]
fn attributes_and_acls_are_read() {
    let scratch = tempfile::tempdir_in("/var/tmp").unwrap();
    let dir = scratch.path().join("tree");
    fs::create_dir_all(dir.join("d")).unwrap();
    fs::write(dir.join("file"), "x").unwrap();
    let file = dir.join("file");
    setfattr(&file, "user.text", b"a=b\nc");
    setfattr(&file, "user.bytes", &[0, 255, 10, 0]);
    setfattr(&file, "user.with=%", b"x");
    setfattr(&file, "user.empty", b"");
    let acl = crate::acl::from_text(
        b"user::rw-,user:61001:r--,group::r--,group:61050:-w-,mask::rw-,other::---",
        false,
    );
    setfattr(&file, "system.posix_acl_access", &acl.unwrap().value.unwrap());
    let acl =
        crate::acl::from_text(b"user::rwx,user:61002:rwx,group::r-x,mask::rwx,other::r-x", true);
    setfattr(&dir.join("d"), "system.posix_acl_default", &acl.unwrap().value.unwrap());
    if rustix::process::geteuid().is_root() {
        let capability = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        setfattr(&file, "security.capability", &capability);
        setfattr(&file, "trusted.x", b"y");
    }
    let out = scratch.path().join("out.tar");
    let expected = tree(&gather(&dir).unwrap());
    assert!(expected["file"].attributes.xattrs.len() >= 5);
    assert_eq!(expected["d"].attributes.xattrs.len(), 1);
    for include in ["--xattrs-include=*", "--xattrs-exclude=system.*"] {
        let all = "--xattrs-include=*";
        pack(&dir, &out, &["--format=pax", "--xattrs", all, include, "--acls"]);
        assert_eq!(tree(&gather(&out).unwrap()), expected, "{include}");
    }
}

/// One member: what it states, and its data.
fn member(name: &[u8], kind: u8, link: &[u8], stated: u64, data: &[u8]) -> Vec<u8> {
    let mut block = [0u8; 512];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000644");
    block[108..115].copy_from_slice(b"0000000");
    block[116..123].copy_from_slice(b"0000000");
    block[124..135].copy_from_slice(format!("{stated:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000000");
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    sum(&mut block);
    let mut bytes = block.to_vec();
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// Writes the checksum.
fn sum(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}

fn file(name: &str, data: &[u8]) -> Vec<u8> {
    member(name.as_bytes(), b'0', b"", data.len() as u64, data)
}

fn extended(records: &[(&str, &str)]) -> Vec<u8> {
    let mut text = String::new();
    for (keyword, value) in records {
        let rest = keyword.len() + value.len() + 3;
        let len = (rest..).find(|len| len.to_string().len() + rest == *len).unwrap();
        text.push_str(&format!("{len} {keyword}={value}\n"));
    }
    member(b"extended", b'x', b"", text.len() as u64, text.as_bytes())
}

const END: [u8; 1024] = [0; 1024];

/// Sources, and the file that they are read from.
#[derive(Debug)]
struct Read {
    sources: Sources,
    _file: tempfile::NamedTempFile,
}

impl std::ops::Deref for Read {
    type Target = Sources;

    fn deref(&self) -> &Sources {
        &self.sources
    }
}

/// Reads an archive that is given as bytes.
fn read(archive: &[u8]) -> crate::Result<Read> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), archive).unwrap();
    let spec = SourceSpec::parse(file.path().as_os_str()).unwrap();
    Ok(Read { sources: Sources::gather(&[spec], &Options::default())?, _file: file })
}

fn refusal(parts: &[Vec<u8>]) -> String {
    match read(&[&parts.concat()[..], &END].concat()) {
        Ok(sources) => panic!("it was taken: {:?}", tree(&sources)),
        Err(e) => e.to_string(),
    }
}

#[test]
fn hostile_archives_are_refused_by_name() {
    let sparse = |records: &[(&str, &str)]| vec![extended(records), file("sparse", b"data")];
    for (parts, expected) in [
        (vec![file("a/../../b", b"")], "a/../../b: a path with `..`"),
        (vec![file("x", b"1"), member(b"l", b'1', b"../x", 0, b"")], "l: a hard link to ../x, out"),
        (vec![file("/etc/x", b"")], "/etc/x: an absolute path"),
        (vec![file("x", b"1"), member(b"l", b'1', b"/x", 0, b"")], "l: a hard link to /x, out"),
        (vec![member(b"l", b'1', b"x", 0, b"")], "l: a hard link to x, which is not there"),
        (
            vec![member(b"d", b'5', b"", 0, b""), member(b"l", b'1', b"d", 0, b"")],
            "l: a hard link to d, which is a directory",
        ),
        (
            vec![member(b"s", b'2', b"../../etc", 0, b""), file("s/passwd", b"x")],
            "s: a path leads through this link to ../../etc, out of the tree",
        ),
        (vec![member(b"s", b'2', b"", 0, b"")], "s: a symbolic link whose target"),
        (vec![member(b"q", b'q', b"", 0, b"")], "q: a member of the unknown type"),
        (vec![member(b"m", b'M', b"", 0, b"")], "m: the rest of a file"),
        (vec![member(b"", b'0', b"", 0, b"")], "/: a member without a name"),
        (vec![extended(&[("path", "a\0b")]), file("x", b"")], "a name with a NUL"),
        (vec![extended(&[("path", &"a/".repeat(3000))]), file("x", b"")], "a path of 6000 bytes"),
        (vec![extended(&[("path", &"a".repeat(300))]), file("x", b"")], "a name of 300 bytes"),
        (vec![extended(&[("uid", "4294967295")]), file("x", b"")], "x: no valid uid"),
        (vec![extended(&[("uid", "-1")]), file("x", b"")], "extended header has uid=-1"),
        (vec![extended(&[("mtime", "soon")]), file("x", b"")], "extended header has mtime=soon"),
        (vec![extended(&[("size", "99999999")]), file("x", b"")], "cut off at byte"),
        (vec![extended(&[("size", "18446744073709551615")]), file("x", b"")], "cut off at byte"),
        (vec![member(b"L", b'L', b"", 1 << 32, b"")], "an extended header of 4294967296 bytes"),
        (
            vec![member(b"x", b'x', b"", 5, b"junk!")],
            "the extended header at byte 512 is not valid",
        ),
        (vec![member(b"g", b'g', b"", 9, b"9 size=1\n")], "has the size of one"),
        (
            sparse(&[("GNU.sparse.map", "0,4"), ("GNU.sparse.size", "3")]),
            "sparse: a sparse file whose pieces overlap, or are not within it",
        ),
        (
            sparse(&[("GNU.sparse.map", "4,2,0,2"), ("GNU.sparse.size", "9")]),
            "sparse: a sparse file whose pieces overlap, or are not within it",
        ),
        (
            sparse(&[("GNU.sparse.map", "0,2"), ("GNU.sparse.size", "9")]),
            "sparse: a sparse file with 4 bytes, whose map has 2",
        ),
        (
            sparse(&[("GNU.sparse.map", "18446744073709551615,4"), ("GNU.sparse.size", "9")]),
            "sparse: a sparse file whose pieces overlap, or are not within it",
        ),
        (
            sparse(&[("GNU.sparse.map", "0,4,5"), ("GNU.sparse.size", "9")]),
            "sparse: the map of a sparse file that is not valid",
        ),
        (
            sparse(&[("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9")]),
            "sparse: the map of a sparse file that is not valid",
        ),
        (
            sparse(&[("GNU.sparse.major", "2"), ("GNU.sparse.realsize", "9")]),
            "sparse: a sparse file of an unknown form",
        ),
        (
            sparse(&[("SCHILY.acl.access", "user::rwx,user:lisa:r--,group::r--,other::---")]),
            "sparse: an ACL that is not whole",
        ),
        (vec![b"this is no archive, but as long as one ".repeat(20)], "not a tar archive"),
    ] {
        let error = refusal(&parts);
        assert!(error.contains(expected), "{error}: {expected} was expected");
    }
}

#[test]
fn an_archive_that_is_cut_off_is_refused_wherever() {
    let whole = [extended(&[("mtime", "1.5")]), file("a", &[1; 700]), file("b", b""), END.to_vec()]
        .concat();
    for len in (0..whole.len() - 1024).step_by(100) {
        let error = read(&whole[..len]).expect_err("it is cut off").to_string();
        assert!(error.contains("cut off") || error.contains("empty"), "{len}: {error}");
    }
    // One block of the end mark is enough, as for GNU tar.
    assert_eq!(tree(&read(&whole[..whole.len() - 512]).unwrap()).len(), 3);
}

#[test]
fn forms_of_old_and_other_programs_are_read() {
    let mut old = file("old/", b"");
    old[257..265].fill(0);
    sum(&mut old[..512]);
    let mut prefixed = file("name", b"prefixed");
    prefixed[345..348].copy_from_slice(b"a/b");
    sum(&mut prefixed[..512]);
    let mut linked = member(b"again", b'1', b"./x", 4, b"");
    linked[124..135].copy_from_slice(b"00000000004");
    let archive = [
        old,
        prefixed,
        file("x", b"data"),
        // A link that states a size, but has no data.
        linked,
        file("x/.", b""),
        END.to_vec(),
    ]
    .concat();
    let tree = tree(&read(&archive).unwrap());
    let names: Vec<_> = tree.keys().map(String::as_str).collect();
    assert_eq!(names, ["", "a", "a/b", "a/b/name", "again", "old", "x"]);
    assert_eq!(tree["old"].kind, Kind::Directory);
    assert_eq!(tree["a/b/name"].data, b"prefixed");
    assert_eq!(tree["again"].data, b"data");
    // The later member took the path.
    assert_eq!((&tree["x"].data[..], &tree["x"].first_name), (&b""[..], &None));
}

#[test]
fn an_acl_of_names_is_noted_and_the_rest_of_it_stays() {
    let acl = "user::rwx,user:lisa:r--,group::---,mask::r--,other::---";
    let archive = [&extended(&[("SCHILY.acl.access", acl)])[..], &file("f", b""), &END].concat();
    let sources = read(&archive).unwrap();
    assert_eq!(tree(&sources)["f"].attributes.xattrs[0].1.len(), 4 + 4 * 8);
    let notes = sources.notes().join("\n");
    assert!(notes.contains("f: an ACL for \"lisa\" without a number"), "{notes}");
}

#[test]
fn what_linux_cannot_have_is_noted() {
    let header = extended(&[
        ("SCHILY.xattr.com.apple.quarantine", "x"),
        ("SCHILY.xattr.user.x", "y"),
        ("SCHILY.fflags", "hidden"),
    ]);
    let sources = read(&[&header[..], &file("f", b""), &END].concat()).unwrap();
    assert_eq!(tree(&sources)["f"].attributes.xattrs, [(b"user.x".to_vec(), b"y".to_vec())]);
    let notes = sources.notes().join("\n");
    assert!(notes.contains("com.apple.quarantine") && notes.contains("hidden"), "{notes}");
}

/// A random tree: names, what is there, mode, owner and time.
type Random = Vec<(String, u8, Vec<u8>, u32, u32, u32)>;

fn some_tree() -> impl Strategy<Value = Random> {
    let name = prop_oneof![
        8 => "[a-c]/[a-d]{1,2}|[a-c]/[a-b]/[ä-ü]{1,3}|[d-f]{1,2}",
        1 => "[g-h]/[a-z]{150}/[a-z]{90}",
    ];
    let data = prop::collection::vec(any::<u8>(), 0..1200);
    let entry = (name, 0..6u8, data, 0..0o10_000u32, any::<u32>(), any::<u32>());
    prop::collection::vec(entry, 0..12)
}

/// Packs a random tree by the crate `tar`.
fn packed_by_the_crate(random: &Random) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, what, data, mode, owner, time) in random {
        let mut header = tar::Header::new_gnu();
        header.set_mode(*mode);
        header.set_uid((*owner % 4_000_000_000).into());
        header.set_gid((*owner / 7).into());
        header.set_mtime((*time).into());
        header.set_size(0);
        match what {
            0 => {
                header.set_entry_type(tar::EntryType::Directory);
                builder.append_data(&mut header, name, &[][..]).unwrap();
            }
            1 => {
                header.set_entry_type(tar::EntryType::Symlink);
                builder.append_link(&mut header, name, format!("{owner}")).unwrap();
            }
            2 => {
                header.set_entry_type(tar::EntryType::Char);
                header.set_device_major(*mode).unwrap();
                header.set_device_minor(*owner % 100_000).unwrap();
                builder.append_data(&mut header, name, &[][..]).unwrap();
            }
            _ => {
                header.set_size(data.len() as u64);
                builder.append_data(&mut header, name, &data[..]).unwrap();
            }
        }
    }
    builder.into_inner().unwrap()
}

/// Mode, user, group, time, and what is there.
type Expected = (u32, u32, u32, i64, Kind, Vec<u8>);

/// The same tree as entries.
fn expected(random: &Random) -> BTreeMap<String, Expected> {
    let mut tree = BTreeMap::new();
    let implicit = || (0o755, 0, 0, 0, Kind::Directory, Vec::new());
    tree.insert(String::new(), implicit());
    for (name, what, data, mode, owner, time) in random {
        for (end, _) in name.match_indices('/') {
            let above = tree.entry(name[..end].to_owned()).or_insert_with(implicit);
            if above.4 != Kind::Directory {
                *above = implicit();
            }
        }
        let (kind, data) = match what {
            0 => (Kind::Directory, Vec::new()),
            1 => (Kind::Symlink(format!("{owner}").into_bytes()), Vec::new()),
            2 => (Kind::CharDevice { major: *mode, minor: owner % 100_000 }, Vec::new()),
            _ => (Kind::File { size: data.len() as u64, contents: None }, data.clone()),
        };
        if kind != Kind::Directory {
            let below = format!("{name}/");
            tree.retain(|path, _| !path.starts_with(&below));
        }
        let uid = owner % 4_000_000_000;
        tree.insert(name.clone(), (*mode, uid, owner / 7, (*time).into(), kind, data));
    }
    tree
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn random_archives_are_read_as_they_were_written(random in some_tree()) {
        // A path through a symbolic link is another subject.
        let is_above = |name: &str| random.iter().any(|(n, ..)| n.starts_with(&format!("{name}/")));
        prop_assume!(!random.iter().any(|(name, what, ..)| *what == 1 && is_above(name)));
        let archive = packed_by_the_crate(&random);
        let seen = tree(&read(&archive).unwrap()).into_iter().map(|(name, seen)| {
            let a = seen.attributes;
            (name, (a.permissions, a.uid, a.gid, a.modified.seconds, seen.kind, seen.data))
        });
        prop_assert_eq!(seen.collect::<BTreeMap<_, _>>(), expected(&random));
    }

    #[test]
    fn damaged_archives_do_no_harm(
        random in some_tree(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        fix in any::<bool>(),
    ) {
        let mut archive = packed_by_the_crate(&random);
        for (index, byte) in damage {
            let at = index.index(archive.len());
            archive[at] = byte;
            let block = &mut archive[at / 512 * 512..][..512];
            if fix && block[257..262] == *b"ustar" {
                sum(block);
            }
        }
        let bytes = spool(&archive[..], "test", &Options::default()).unwrap();
        let mut collector = crate::overlay::Collector::new(&Options::default());
        collector.begin_layer("test", &crate::TreePath::root(), false);
        let source = crate::SourceNumber(0);
        if super::read(&mut collector, &bytes, source, super::Whiteouts::Hide).is_ok()
            && let Ok((merged, _)) = collector.finish()
        {
            merged.entries(1).unwrap().for_each(drop);
        }
    }
}

#[test]
fn compressed_archives_and_pipes_are_read() {
    let archive = [file("a", b"text"), END.to_vec()].concat();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), Default::default());
    gzip.write_all(&archive).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 0);
    xz.write_all(&archive).unwrap();
    for packed in [
        gzip.finish().unwrap(),
        xz.finish().unwrap(),
        zstd::encode_all(&archive[..], 0).unwrap(),
        archive.clone(),
    ] {
        assert_eq!(tree(&read(&packed).unwrap())["a"].data, b"text");
    }
    let scratch = tempfile::tempdir().unwrap();
    let pipe = scratch.path().join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, mode, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| fs::write(&pipe, &archive).unwrap());
        assert_eq!(tree(&gather(&pipe).unwrap())["a"].data, b"text");
    });
    assert_eq!(SourceSpec::parse(OsStr::new("-")).unwrap().sort, Sort::StandardInput);
}

#[test]
fn devices_are_those_of_linux() {
    for (major, minor, sound) in
        [(4095u32, 1_048_575u32, true), (4096, 0, false), (0, 1 << 20, false)]
    {
        let mut device = member(b"dev", b'3', b"", 0, b"");
        device[329..336].copy_from_slice(format!("{major:07o}").as_bytes());
        device[337..344].copy_from_slice(format!("{minor:07o}").as_bytes());
        sum(&mut device[..512]);
        let read = read(&[&device[..], &END].concat());
        assert_eq!(read.is_ok(), sound, "{major}:{minor}");
    }
}

#[test]
fn what_is_said_of_all_members_is_bounded() {
    let header = |n: usize| {
        let records: Vec<_> = (0..200).map(|k| format!("comment.{n}.{k}")).collect();
        let mut header = Vec::new();
        for keyword in &records {
            let rest = keyword.len() + 3 + 100;
            header.extend(format!("{} {keyword}={}\n", rest + 3, "v".repeat(100)).as_bytes());
        }
        member(b"g", b'g', b"", header.len() as u64, &header)
    };
    let few = [header(1), header(1), header(2), file("x", b""), END.to_vec()].concat();
    assert_eq!(tree(&read(&few).unwrap()).len(), 2);
    let many: Vec<_> = (0..4).map(header).collect();
    let error = refusal(&many);
    assert!(error.contains("headers for all members with more than 65536 bytes"), "{error}");
}
