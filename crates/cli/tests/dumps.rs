//! Metadata dumps as people meet them: commands that read names and structures work. Commands that
//! need data or write are refused by name.

mod common;

use common::{Run, inside, larder};
use larder_simtest::image::Image;
use larder_simtest::oracle::{Need, flat_dump, metadata_dump, need};
use std::path::{Path, PathBuf};

/// An image by Larder with a directory, a file, a link and a snapshot.
fn image(dir: &Path) -> PathBuf {
    let (image, tree) = (dir.join("image"), dir.join("tree"));
    std::fs::create_dir_all(tree.join("dir")).unwrap();
    std::fs::write(tree.join("dir/file"), vec![b'x'; 100_000]).unwrap();
    std::fs::write(tree.join("small"), "in the leaf").unwrap();
    std::os::unix::fs::symlink("dir/file", tree.join("link")).unwrap();
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    larder(args!["subvolume", "create", inside(&image, "/sub")]).ok();
    larder(args!["cp", "-r", &tree, inside(&image, "/sub/tree")]).ok();
    larder(args!["subvolume", "snapshot", inside(&image, "/sub"), inside(&image, "/snap")]).ok();
    image
}

/// Each form of dump of an image, with its name.
fn dumps(image: &Path) -> Vec<(&'static str, PathBuf)> {
    let flat = image.with_extension("flat");
    flat_dump(&Image::from_file(image).unwrap()).unwrap().write_sparse(&flat).unwrap();
    let mut out = vec![("flat", flat)];
    if need(&[Need::BtrfsProgs]) {
        out.push(("mapped", metadata_dump(image, &["-c9"]).unwrap()));
    }
    out
}

/// Standard error says that the image is a dump.
#[track_caller]
fn told(run: Run) -> Run {
    assert!(run.err.contains("is a metadata dump"), "{}", run.err);
    run
}

#[test]
fn a_dump_is_checked_and_what_is_not_judged_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    for (form, dump) in dumps(&image(dir.path())) {
        let text = larder(args!["check", "--data", &dump]).ok().text();
        assert!(
            text.starts_with("This is a metadata dump. Not judged:\n  - file data"),
            "{form}: {text}"
        );
        assert!(
            text.contains("note: dump-without-mirror") && text.contains("no errors: "),
            "{form}: {text}"
        );
        let json = larder(args!["check", "--json", &dump]).ok().json();
        assert_eq!((&json["metadata_dump"], &json["errors"]), (&form.into(), &0.into()));
        assert!(json["not_judged"].as_array().unwrap().len() >= 3, "{json}");
    }
    let json = larder(args!["check", "--json", dir.path().join("image")]).ok().json();
    assert_eq!((&json["metadata_dump"], &json["not_judged"]), (&().into(), &serde_json::json!([])));
}

#[test]
fn names_and_structures_of_a_dump_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path());
    let of_image =
        |args: &[&str]| larder(args.iter().map(Into::into).chain([image.clone().into_os_string()]));
    for (form, dump) in dumps(&image) {
        let of_dump = |args: &[&str]| {
            told(larder(args.iter().map(Into::into).chain([dump.clone().into_os_string()])).ok())
                .text()
        };
        for args in [
            &["ls", "-R"][..],
            &["inspect", "tree", "--tree", "chunk", "--json"],
            &["inspect", "tree", "--tree", "root"],
            &["inspect", "chunks"],
            &["inspect", "block-groups", "--json"],
            &["inspect", "inode", "--subvolid", "256", "--number", "258"],
        ] {
            assert_eq!(of_dump(args), of_image(args).ok().text(), "{form}: {args:?}");
        }
        let long = told(larder(args!["ls", "-l", inside(&dump, "/sub/tree")]).ok()).text();
        assert!(long.lines().any(|l| l.starts_with("lrwx") && l.ends_with(" link")), "{long}");
        let list = told(larder(args!["restore", "--list", &dump]).ok()).text();
        assert!(list.contains("256 in 5: sub") && list.contains("in 5: snap ("), "{list}");
        let json = larder(args!["restore", "--list", "--json", &dump]).ok().json();
        assert_eq!(json["metadata_dump"], true);
        let supers = larder(args!["inspect", "super", "--json", &dump]).ok().json();
        assert!(supers[0]["larder"].as_str().unwrap().starts_with("metadata only"), "{supers}");
        told(larder(args!["map", &dump, "-o", dir.path().join("map.svg")]).ok());
        assert!(std::fs::read_to_string(dir.path().join("map.svg")).unwrap().contains("<svg"));
    }
}

#[test]
fn what_needs_data_or_writes_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let (mnt, out) = (dir.path().join("mnt"), dir.path().join("out"));
    std::fs::create_dir(&mnt).unwrap();
    for (form, dump) in dumps(&image(dir.path())) {
        let before = std::fs::read(&dump).unwrap();
        let file = inside(&dump, "/sub/tree/dir/file");
        for args in [
            &args!["cat", &file][..],
            &args!["cp", &file, &out],
            &args!["cp", &mnt, inside(&dump, "/new")],
            &args!["rm", &file],
            &args!["mkdir", inside(&dump, "/new")],
            &args!["mount", &dump, &mnt],
            &args!["mount", "-o", "ro", &dump, &mnt],
            &args!["restore", &dump, &out],
            &args!["restore", "--dry-run", &dump],
        ] {
            let run = larder(args).fails(2, "metadata dump without its data");
            assert!(
                run.err.contains("hint: `larder check`, `inspect`"),
                "{form}: {args:?}: {}",
                run.err
            );
        }
        larder(args!["rescue", "zero-log", "--force", &dump]).fails(2, "is a metadata dump");
        assert!(!out.exists());
        assert!(std::fs::read(&dump).unwrap() == before, "{form}: the dump was changed");
    }
}
