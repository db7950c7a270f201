//! `larder build`: what Linux sees in an image is what the sources have, whatever their form; the
//! same sources give the same bytes; a build that fails leaves nothing.

mod common;

use common::{Run, command, inside, larder};
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, btrfs_check, mkfs_btrfs, need, populate, scratch, tree_compare,
};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

const UUID: &str = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";

/// A small tree with links, a hole and some attributes.
fn tree(dir: &Path, reversed: bool) -> PathBuf {
    let root = dir.join(if reversed { "reversed" } else { "tree" });
    let mut names: Vec<String> = (0..40).map(|n| format!("file-{n}")).collect();
    if reversed {
        names.reverse();
    }
    std::fs::create_dir_all(root.join("home/me")).unwrap();
    std::fs::create_dir_all(root.join("var")).unwrap();
    for name in &names {
        std::fs::write(root.join("var").join(name), name.repeat(900)).unwrap();
    }
    std::fs::write(root.join("home/me/note.txt"), b"note").unwrap();
    std::fs::hard_link(root.join("var/file-3"), root.join("home/also")).unwrap();
    std::os::unix::fs::symlink("../var", root.join("home/link")).unwrap();
    File::create(root.join("sparse")).unwrap().set_len(1 << 20).unwrap();
    for path in names.iter().map(|n| root.join("var").join(n)).chain([
        root.join("home/me/note.txt"),
        root.join("sparse"),
        root.join("home/me"),
        root.join("home"),
        root.join("var"),
        root.clone(),
    ]) {
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 123);
        File::open(path).unwrap().set_modified(time).unwrap();
    }
    root
}

fn same_as(image: &Path, tree: &Path) {
    let mount = KernelMount::image(image, "ro").unwrap();
    assert_eq!(tree_compare(tree, mount.path()).unwrap(), []);
    mount.unmount_clean().unwrap();
}

fn sound(image: &Path) {
    larder(args!["check", "--data", image]).ok();
    let report = btrfs_check(image, true);
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn linux_sees_what_the_sources_have() {
    if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    mkfs_btrfs(&path("theirs.img"), 512 << 20, &["-q"]).unwrap();
    let theirs = KernelMount::image(&path("theirs.img"), "noatime").unwrap();
    let top = theirs.join("top");
    std::fs::create_dir(&top).unwrap();
    populate(&top, &Fixture::small()).unwrap();
    // From the directory, with and without compression.
    larder(args!["build", path("1.img"), &top]).ok();
    sound(&path("1.img"));
    same_as(&path("1.img"), &top);
    larder(args!["build", "--compress", "zstd", "--shrink", path("2.img"), &top]).ok();
    sound(&path("2.img"));
    same_as(&path("2.img"), &top);
    // What is built from an extract of an image is the same.
    larder(args!["extract", path("1.img"), "--tar", path("1.tar.zst")]).ok();
    let run = larder(args!["build", "--dedupe", path("3.img"), path("1.tar.zst")]).ok();
    assert!(run.text().contains("By extension"), "{}", run.text());
    sound(&path("3.img"));
    let mount = KernelMount::image(&path("3.img"), "ro").unwrap();
    let differences = tree_compare(&top, mount.path()).unwrap();
    let unexpected: Vec<_> =
        differences.iter().filter(|d| !d.path.windows(6).any(|w| w == b"socket")).collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    mount.unmount_clean().unwrap();
    theirs.unmount_clean().unwrap();
}

#[test]
fn every_form_of_a_source_gives_the_same_tree() {
    if !need(&[Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let tree = tree(dir.path(), false);
    larder(args!["build", path("dir.img"), &tree]).ok();
    same_as(&path("dir.img"), &tree);
    let packed = Command::new("tar")
        .args(["--format=pax", "-S", "-cf"])
        .arg(path("a.tar"))
        .arg("-C")
        .arg(&tree)
        .arg(".")
        .status();
    assert!(packed.unwrap().success());
    let piped: Run = command()
        .arg("build")
        .arg(path("stdin.img"))
        .arg("-")
        .stdin(File::open(path("a.tar")).unwrap())
        .output()
        .unwrap()
        .into();
    piped.ok();
    same_as(&path("stdin.img"), &tree);
    larder(args!["build", path("image.img"), path("dir.img")]).ok();
    same_as(&path("image.img"), &tree);
    larder(args!["extract", path("dir.img"), "--oci", path("layout")]).ok();
    let layout = format!("oci:{}", path("layout").display());
    larder(args!["build", path("oci.img"), &layout]).ok();
    let out = path("out");
    larder(args!["extract", path("oci.img"), &out]).ok();
    assert_eq!(tree_compare(&tree, &out).unwrap(), []);
    // Sources over each other, and at places.
    larder(args!["build", path("placed.img"), format!("{}:/a/b", tree.display())]).ok();
    let mount = KernelMount::image(&path("placed.img"), "ro").unwrap();
    assert_eq!(tree_compare(&tree, &mount.join("a/b")).unwrap(), []);
    mount.unmount_clean().unwrap();
}

#[test]
fn the_same_sources_give_the_same_bytes() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let (one, other) = (tree(dir.path(), false), tree(dir.path(), true));
    let build = |image: &Path, from: &Path, more: &[&str]| {
        let mut c = command();
        c.env("SOURCE_DATE_EPOCH", "1700000000").arg("build");
        c.args(["--uuid", UUID, "--compress", "zstd", "--subvol", "home=ro", "--mtime", "5"]);
        c.args(more).arg(image).arg(from);
        Run::from(c.output().unwrap()).ok();
        std::fs::read(image).unwrap()
    };
    let first = build(&path("1.img"), &one, &["--threads", "1"]);
    assert!(first == build(&path("2.img"), &other, &["--threads", "7", "--memory", "1M"]));
    assert!(first == build(&path("1.img"), &one, &["--force"]));
}

#[test]
fn subvolumes_and_layers_are_subvolumes() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let tree = tree(dir.path(), false);
    let subvolumes = |image: &Path| {
        let list = larder(args!["subvolume", "list", "--json", image]).ok().json();
        let text = |v: &serde_json::Value| v["path"].as_str().unwrap_or_default().to_owned();
        list.as_array().unwrap().iter().map(text).filter(|p| !p.is_empty()).collect::<Vec<_>>()
    };
    larder(args![
        "build",
        "--subvol",
        "home=ro",
        "--subvol",
        "var=default",
        "--subvol",
        "new",
        path("1.img"),
        &tree
    ])
    .ok();
    let mut found = subvolumes(&path("1.img"));
    found.retain(|p| p != "/");
    found.sort();
    assert_eq!(found, ["home", "new", "var"]);
    let shown = larder(args!["ls", path("1.img")]).ok().text();
    assert!(shown.contains("file-3"), "var is the default: {shown}");
    std::fs::create_dir(path("upper")).unwrap();
    std::fs::write(path("upper/added"), b"x").unwrap();
    larder(args!["build", "--layers", path("2.img"), &tree, path("upper")]).ok();
    let top = |p: &str| larder(args!["ls", "--subvolid", "5", inside(&path("2.img"), p)]);
    assert_eq!(top("/").ok().text().split_whitespace().count(), 3);
    assert!(!top("/layer-1").ok().text().contains("added"));
    assert!(top("/layer-2").ok().text().contains("added"));
    larder(args!["ls", inside(&path("2.img"), "/added")]).ok();
    larder(args!["check", "--data", path("2.img")]).ok();
}

#[test]
fn a_shrunk_image_is_full_until_it_grows() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let tree = tree(dir.path(), false);
    let run = larder(args!["build", "--shrink", "--subvol", "new/deep", path("full.img"), &tree]);
    let summary = run.ok().text();
    assert!(summary.contains("resize max") && summary.contains("--free SIZE"), "{summary}");
    larder(args!["ls", inside(&path("full.img"), "/new/deep")]).ok();
    let roomy = larder(args!["build", "--free", "64M", path("roomy.img"), &tree]).ok().text();
    assert!(!roomy.contains("resize"), "{roomy}");
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let write = |image: &Path, grow: bool| {
        let mount = KernelMount::image(image, "").unwrap();
        if grow {
            let mounted = mount.path().to_str().unwrap();
            larder_simtest::oracle::btrfs(&["filesystem", "resize", "max", mounted]).unwrap();
        }
        let written = std::fs::write(mount.join("written"), vec![1; 1 << 20]);
        mount.unmount_clean().unwrap();
        written.is_ok()
    };
    assert!(!write(&path("full.img"), false), "it is full");
    let file = File::options().write(true).open(path("full.img")).unwrap();
    file.set_len(file.metadata().unwrap().len() + (256 << 20)).unwrap();
    assert!(write(&path("full.img"), true) && write(&path("roomy.img"), false));
    sound(&path("full.img"));
}

#[test]
fn an_update_moves_what_differs_and_keeps_what_was_before() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let image = path("a.img");
    let (tree, before) = (tree(dir.path(), false), path("before"));
    larder(args!["build", "--free", "64M", &image, &tree]).ok();
    larder(args!["extract", &image, &before]).ok();
    std::fs::write(tree.join("var/file-7"), "changed").unwrap();
    std::fs::write(tree.join("new"), "new").unwrap();
    std::fs::remove_file(tree.join("home/link")).unwrap();
    std::fs::remove_file(tree.join("sparse")).unwrap();

    let bytes = std::fs::read(&image).unwrap();
    let listed = larder(args!["build", "--update", "--dry-run", &image, &tree]).ok();
    let text = listed.text();
    let changes: Vec<_> = text.lines().collect();
    assert_eq!(changes, ["- home/link", "+ new", "- sparse", "* var/file-7"]);
    assert!(bytes == std::fs::read(&image).unwrap(), "a dry run changes nothing");

    let done = larder(args!["build", "--update", "--json", "--snapshot", "monday", &image, &tree]);
    let done = done.ok().json();
    assert_eq!(
        (&done["added"], &done["contents"], &done["removed"]),
        (&1.into(), &1.into(), &2.into())
    );
    assert_eq!(done["snapshot"], "monday");
    sound(&image);
    let mount = KernelMount::image(&image, "ro").unwrap();
    assert_eq!(tree_compare(&before, &mount.join("monday")).unwrap(), []);
    let differences = tree_compare(&tree, mount.path()).unwrap();
    assert!(differences.iter().all(|d| d.path.starts_with(b"monday")), "{differences:?}");
    mount.unmount_clean().unwrap();

    let again = larder(args!["build", "--update", &image, &tree]).ok();
    assert!(again.err.contains("as the sources say"), "{}", again.err);
    let list = larder(args!["subvolume", "list", &image]).ok().text();
    assert!(!list.contains("before-"), "no snapshot is kept of nothing: {list}");
    larder(args!["build", "--update", "--subvol", "x", &image, &tree]).fails(2, "--subvol");
    larder(args!["build", "--update", path("none.img"), &tree]).fails(2, "none.img");
    std::fs::write(tree.join("new"), "newer").unwrap();
    larder(args!["build", "--update", "--snapshot", "monday", &image, &tree])
        .fails(1, "--snapshot NAME");
}

#[test]
fn an_update_without_room_says_what_is_left_and_what_helps() {
    let dir = scratch();
    let image = dir.path().join("a.img");
    let tree = tree(dir.path(), false);
    larder(args!["build", &image, &tree]).ok();
    std::fs::write(tree.join("large"), vec![7; 96 << 20]).unwrap();
    // Two runs in one second need two names.
    let update = || {
        let mut update = command();
        update.args(args!["build", "--update", &image, &tree]);
        update.env("SOURCE_DATE_EPOCH", "1700000000");
        Run::from(update.output().unwrap()).fails(1, "large: cannot")
    };
    let name = "before-2023-11-14-22-13-20";
    for kept in [name.to_owned(), format!("{name}-2")] {
        let said = update().err;
        assert!(said.contains(&format!("the snapshot {kept} has what was before")), "{said}");
        assert!(said.contains("--free SIZE") && said.contains("larder df"), "{said}");
    }
    larder(args!["check", "--data", &image]).ok();
}

#[test]
fn what_cannot_be_built_is_said_and_leaves_nothing() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let tree = tree(dir.path(), false);
    let image = path("a.img");
    larder(args!["build", &image, path("missing")]).fails(2, "missing");
    larder(args!["build", "--size", "1M", &image, &tree]).fails(1, "too small");
    larder(args!["build", "--size", "lots", &image, &tree]).fails(2, "--size");
    larder(args!["build", "--chmod", "x", &image, &tree]).fails(2, "x");
    larder(args!["build", "--subvol", "..", &image, &tree]).fails(2, "below the top");
    larder(args!["build", "--subvol", "home", "--layers", &image, &tree]).fails(2, "--layers");
    std::fs::write(path("cut.tar"), [b'x'; 700]).unwrap();
    larder(args!["build", &image, path("cut.tar")]).fails(1, "cut.tar");
    assert!(!image.exists());
    std::fs::write(&image, b"mine").unwrap();
    larder(args!["build", &image, &tree]).fails(2, "--force");
    assert_eq!(std::fs::read(&image).unwrap(), b"mine");
    let listed = larder(args!["build", "--dry-run", &image, &tree]).ok();
    assert!(listed.text().contains("home/link -> ../var"), "{}", listed.text());
    let report = larder(args!["build", "--force", "--json", "--uuid", UUID, &image, &tree]).ok();
    assert_eq!(report.json()["uuid"], UUID);
    larder(args!["build", "-f", "--map", path("m.svg"), &image, &tree]).ok();
    assert!(path("m.svg").exists());
}

/// A tree with flags and with times of their own, as an image.
fn with_flags_and_times(dir: &Path, tree: &Path) -> PathBuf {
    let manifest = "\
#mtree
./var/file-1 type=file flags=schg,nodump
./var/file-2 type=file flags=nocow
./var/file-3 type=file flags=nocompress,noatime
./home type=dir flags=sync,dirsync
";
    std::fs::write(dir.join("flags.mtree"), manifest).unwrap();
    let image = dir.join("with.img");
    let manifest = format!("mtree:{}", dir.join("flags.mtree").display());
    larder(args!["build", "--free", "64M", &image, tree, &manifest]).ok();
    // What is written now has a creation time of its own. libarchive tells of one that is at least
    // a second before the last modification.
    let late = dir.join("late");
    std::fs::create_dir(&late).unwrap();
    std::fs::write(late.join("file"), "late").unwrap();
    let touch = Command::new("touch").args(["-d", "2100-01-01T00:00:00.25Z"]).arg(&late).status();
    assert!(touch.unwrap().success());
    let touch = Command::new("touch").args(["-r"]).args([&late, &late.join("file")]).status();
    assert!(touch.unwrap().success());
    larder(args!["cp", "-r", late.join(""), inside(&image, "/home")]).ok();
    image
}

#[test]
fn a_tar_keeps_every_time_and_flag() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let tree = tree(dir.path(), false);
    // libarchive 3.6 writes a file that is one hole in a form that no tar reads.
    std::fs::remove_file(tree.join("sparse")).unwrap();
    let image = with_flags_and_times(dir.path(), &tree);
    let build = |name: &str, from: &Path| {
        larder(args!["build", "--uuid", UUID, path(name), from]).ok();
        let manifest = larder(args!["extract", path(name), "--tar"]).ok().out;
        (std::fs::read(path(name)).unwrap(), manifest)
    };
    larder(args!["extract", &image, "--tar", path("with.tar")]).ok();
    // Everything but the transaction that wrote it, which is the same in all built images.
    let direct = build("1.img", &image);
    let (_, tar) = build("2.img", &path("with.tar"));
    assert!(direct.1 == tar, "what comes out again is the same");
    let inode = |image: &Path, name: &str| {
        let shown = larder(args!["inspect", "inode", "--json", inside(image, name)]).ok().json();
        let mut item = shown["item"].clone();
        // What counts transactions is another one's.
        item["transid"].take();
        item["generation"].take();
        item["sequence"].take();
        item
    };
    for name in ["/var/file-1", "/var/file-2", "/var/file-3", "/home", "/home/file"] {
        assert_eq!(inode(&path("2.img"), name), inode(&path("1.img"), name), "{name}");
    }
    if need(&[Need::Bsdtar]) {
        // libarchive reads the tar, and writes what it understood.
        let mut convert = Command::new("bsdtar");
        convert.args(["--format=pax", "-cf"]).arg(path("theirs.tar"));
        let mut from = std::ffi::OsString::from("@");
        from.push(path("with.tar"));
        assert!(convert.arg(from).status().unwrap().success());
        let (_, theirs) = build("3.img", &path("theirs.tar"));
        assert!(theirs == tar, "libarchive has all of it");
    }
}

/// Errors of what an image cannot have name the source, whatever found them.
#[test]
fn an_error_names_the_source_and_what_to_do() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let image = path("a.img");
    let tree = tree(dir.path(), false);
    let upper = path("upper");
    std::fs::create_dir(&upper).unwrap();
    std::fs::write(upper.join("large"), b"").unwrap();
    let value = format!("large=user.v={}", "v".repeat(17_000));
    let run = larder(args!["build", "--xattr", value, &image, &tree, &upper]);
    run.fails(1, &format!("{}: large: its attribute user.v", upper.display()));
    assert!(!image.exists());
}

#[test]
fn an_image_in_its_own_source_is_no_part_of_it() {
    let dir = scratch();
    let tree = tree(dir.path(), false);
    let image = tree.join("var/root.img");
    let build = |more: &[&str]| {
        let mut c = command();
        c.env("SOURCE_DATE_EPOCH", "1700000000").args(["build", "--uuid", UUID, "--mtime", "5"]);
        let run = Run::from(c.args(more).arg(&image).arg(&tree).output().unwrap()).ok();
        (std::fs::read(&image).unwrap(), run.err)
    };
    let (first, _) = build(&[]);
    let (second, said) = build(&["--force"]);
    assert!(said.contains("var/root.img: it is the image itself"), "{said}");
    assert!(first == second);
}

/// The image has its name before its map is drawn.
#[test]
fn a_map_that_fails_leaves_a_complete_image() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let tree = tree(dir.path(), false);
    let run = larder(args!["build", "--map", path("no/map.svg"), path("a.img"), &tree]);
    run.fails(1, "a.img is complete, its map is not");
    larder(args!["check", "--data", path("a.img")]).ok();
    larder(args!["build", "--map", path("map.pdf"), path("b.img"), &tree])
        .fails(2, ".svg or .html");
    assert!(!path("b.img").exists());
}
