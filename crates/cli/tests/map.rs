//! `larder map`: pictures are well-formed, add up, and stay small however large the device.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::scratch;
use std::path::Path;

/// Opening and closing tags must match; a stand-in for a parser that finds broken nesting and stray
/// brackets.
fn well_formed(svg: &str) {
    let mut open = Vec::new();
    for piece in svg.split('<').skip(1) {
        let (tag, _) = piece.split_once('>').expect("a tag ends");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "{tag}");
        } else if !tag.ends_with('/') && !tag.starts_with('!') {
            open.push(tag.split([' ', '\n']).next().unwrap());
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

fn map(image: &Path, out: &Path, more: &[&str]) -> String {
    larder(
        [
            &["map".as_ref(), image.as_os_str(), "-o".as_ref(), out.as_os_str()][..],
            &more.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
        ]
        .concat(),
    )
    .ok();
    std::fs::read_to_string(out).unwrap()
}

#[test]
fn pictures_are_drawn_of_small_and_huge_images() {
    let dir = scratch();
    let tree = dir.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    for i in 0..20 {
        std::fs::write(tree.join(format!("f{i}")), vec![i as u8; 300_000]).unwrap();
    }
    // Files in memory cannot be of any size; sparse ones of 10 TiB can.
    for size in ["128M", "10G", "10T"] {
        let image = dir.path().join("a.img");
        larder(args!["mkfs", "--force", "--size", size, "-L", "a <label> & \"more\"", &image]).ok();
        larder(args!["cp", "-r", &tree, inside(&image, "/tree")]).ok();
        for layout in ["hilbert", "rows"] {
            let svg = map(&image, &dir.path().join("a.svg"), &["--layout", layout]);
            well_formed(&svg);
            assert!(
                svg.starts_with("<svg ") && svg.contains("a &lt;label&gt; &amp; &quot;more&quot;")
            );
            assert!(
                !svg.contains("http://") || svg.matches("http://").count() == 1,
                "only the name space"
            );
            assert!(svg.len() < 3_000_000, "{} bytes", svg.len());
            assert!(svg.contains("Block group at ") && svg.contains("Written in transaction"));
            // 6,000,000 bytes and a rest of each file's last sector.
            assert!(svg.contains("Data: ") && svg.contains(">5.78 MiB</text>"), "the data adds up");
        }
        let html = map(&image, &dir.path().join("a.html"), &["--cells", "64"]);
        assert!(
            html.starts_with("<!doctype html>") && html.contains("<svg ") && !html.contains("src=")
        );
        std::fs::remove_file(&image).unwrap();
    }
}

#[test]
fn what_cannot_be_drawn_is_said() {
    let dir = scratch();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "128M", &image]).ok();
    larder(args!["map", &image, "-o", dir.path().join("a.png")]).fails(2, ".svg or .html");
    larder(args!["map", &image, "-o", dir.path().join("no/a.svg")]).fails(1, "No such file");
    larder(args!["map", &image, "-o", "-", "--cells", "3"]).fails(2, "16..");
    let run = larder(args!["map", &image, "-o", "-"]).ok().text();
    well_formed(&run);
    larder(args!["map", dir.path().join("nothing"), "-o", "-"]).fails(2, "No such file");
}
