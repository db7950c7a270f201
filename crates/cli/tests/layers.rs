//! `larder extract --layers`: each layer is the difference to the one below, so that unpacking them
//! one over the other gives the subvolumes that they were made of.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{Need, need, scratch, tree_compare};
use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Three states of a directory, with every kind of change from one to the next.
fn states(dir: &Path) -> [PathBuf; 3] {
    let states = [dir.join("one"), dir.join("two"), dir.join("three")];
    let [one, two, three] = &states;
    std::fs::create_dir_all(one.join("etc/conf.d")).unwrap();
    std::fs::create_dir_all(one.join("var/cache/deep")).unwrap();
    std::fs::create_dir_all(one.join("lib")).unwrap();
    for name in ["a", "b", "c"] {
        std::fs::write(one.join("etc/conf.d").join(name), name).unwrap();
        std::fs::write(one.join("var/cache/deep").join(name), name).unwrap();
    }
    std::fs::write(one.join("large"), vec![7; 3 << 20]).unwrap();
    for name in ["one", "other", "third"] {
        std::fs::write(one.join("lib").join(name), name.repeat(5000)).unwrap();
    }
    std::fs::hard_link(one.join("lib/one"), one.join("lib/also")).unwrap();
    std::fs::hard_link(one.join("lib/third"), one.join("lib/third-2")).unwrap();
    std::fs::hard_link(one.join("lib/third"), one.join("lib/third-3")).unwrap();
    symlink("lib", one.join("lib64")).unwrap();
    copy(one, two);
    // A name of three goes; all names of a directory go; a file becomes a directory.
    std::fs::remove_file(two.join("lib/third")).unwrap();
    for name in ["a", "b", "c"] {
        std::fs::remove_file(two.join("etc/conf.d").join(name)).unwrap();
    }
    std::fs::write(two.join("etc/conf.d/new"), "new").unwrap();
    std::fs::remove_file(two.join("lib/other")).unwrap();
    std::fs::create_dir(two.join("lib/other")).unwrap();
    std::fs::write(two.join("lib/other/inside"), "inside").unwrap();
    copy(two, three);
    // A directory becomes a file, and a link; one more name; a changed byte; new modes.
    std::fs::remove_dir_all(three.join("var/cache/deep")).unwrap();
    std::fs::write(three.join("var/cache/deep"), "file").unwrap();
    std::fs::remove_dir_all(three.join("lib/other")).unwrap();
    symlink("one", three.join("lib/other")).unwrap();
    std::fs::hard_link(three.join("lib/also"), three.join("first")).unwrap();
    std::fs::remove_file(three.join("etc/conf.d/new")).unwrap();
    let file = std::fs::File::options().write(true).open(three.join("lib/third-2")).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"X", 9000).unwrap();
    // Neither size nor time tell that the contents differ.
    file.set_modified(modified).unwrap();
    states
}

/// A copy with everything kept.
fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

/// An image with a read-only subvolume for each state.
fn image(dir: &Path) -> PathBuf {
    let image = dir.join("states.img");
    larder(args!["mkfs", "--size", "256M", &image]).ok();
    for state in states(dir) {
        let name = format!("/{}", state.file_name().unwrap().to_str().unwrap());
        larder(args!["subvolume", "create", inside(&image, &name)]).ok();
        larder(args!["cp", "-r", state.join(""), inside(&image, &name)]).ok();
    }
    image
}

/// Makes a container image, and gives back what was said of it.
fn extract(image: &Path, layout: &Path, how: &[&str]) -> serde_json::Value {
    let mut all = args!["extract", "--json", image, "--oci", layout].to_vec();
    all.extend(how.iter().map(Into::into));
    larder(all).ok().json()
}

const LAYERS: [&str; 6] = ["--layer", "one", "--layer", "two", "--layer", "three"];

/// What the layers of an image in a layout hold, in their order.
fn members(layout: &Path) -> Vec<Vec<String>> {
    let json = |path: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let blob = |of: &serde_json::Value| {
        layout.join("blobs").join(of["digest"].as_str().unwrap().replace(':', "/"))
    };
    let index = json(&layout.join("index.json"));
    let manifest = json(&blob(&index["manifests"][0]));
    let layers = manifest["layers"].as_array().unwrap();
    let list = |layer: &serde_json::Value| {
        let run = Command::new("tar").arg("-tzf").arg(blob(layer)).output().unwrap();
        assert!(run.status.success());
        String::from_utf8(run.stdout).unwrap().lines().map(str::to_owned).collect()
    };
    layers.iter().map(list).collect()
}

#[test]
fn a_layer_is_the_difference_to_the_one_below() {
    let dir = scratch();
    let (image, layout) = (image(dir.path()), dir.path().join("layout"));
    let report = extract(&image, &layout, &LAYERS);
    assert_eq!(report["layers"][1]["whiteouts"], 2);
    let layers = members(&layout);
    assert_eq!(layers.len(), 3);
    assert!(layers[0].contains(&"lib/third".to_owned()) && layers[0].contains(&"./".to_owned()));
    let expected = "./ etc/ etc/conf.d/ etc/conf.d/.wh..wh..opq etc/conf.d/new lib/ \
                    lib/.wh.third lib/other/ lib/other/inside";
    assert_eq!(layers[1].join(" "), expected);
    let expected = "./ etc/ etc/conf.d/ etc/conf.d/.wh.new first lib/ lib/also lib/one lib/other \
                    lib/third-2 lib/third-3 var/ var/cache/ var/cache/deep";
    assert_eq!(layers[2].join(" "), expected);
}

/// The trees of some subvolumes, unpacked.
fn unpacked(image: &Path, names: &[&str], to: &Path) -> BTreeMap<usize, PathBuf> {
    let trees = names.iter().enumerate().map(|(n, name)| {
        let out = to.join(name);
        let from = inside(image, &format!("/{name}"));
        larder(args!["extract", "--subvolid", "5", from, &out]).ok();
        (n, out)
    });
    trees.collect()
}

#[test]
fn what_is_built_of_layers_is_what_they_were_made_of() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let image = image(dir.path());
    let extract =
        |image: &Path, layout: &Path, how: &[&str]| extract(image, layout, how)["digest"].clone();
    let first = extract(&image, &path("1"), &LAYERS);
    assert_eq!(first, extract(&image, &path("2"), &LAYERS), "the same bytes every time");
    let built = path("built.img");
    larder(args!["build", "--layers", &built, format!("oci:{}", path("1").display())]).ok();
    larder(args!["check", "--data", &built]).ok();
    for name in ["theirs", "ours"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    let theirs = unpacked(&image, &["one", "two", "three"], &path("theirs"));
    let ours = unpacked(&built, &["layer-1", "layer-2", "layer-3", "root"], &path("ours"));
    for (n, theirs) in &theirs {
        assert_eq!(tree_compare(theirs, &ours[n]).unwrap(), [], "layer {n}");
    }
    assert_eq!(tree_compare(&theirs[&2], &ours[&3]).unwrap(), []);
    // The snapshots say themselves what they are snapshots of. The last one has not changed.
    assert_eq!(first, extract(&built, &path("3"), &["--layers"]));
    // Once it has, it is a layer of its own.
    std::fs::write(path("more"), "more").unwrap();
    let writable = path("grown.img");
    larder(args![
        "build",
        "--layers",
        "--free",
        "64M",
        &writable,
        format!("oci:{}", path("1").display())
    ])
    .ok();
    larder(args!["cp", path("more"), inside(&writable, "/etc/more")]).ok();
    extract(&writable, &path("4"), &["--layers"]);
    let layers = members(&path("4"));
    assert_eq!((layers.len(), layers[3].join(" ")), (4, "./ etc/ etc/more".to_owned()));
    assert_eq!(layers[..3], members(&path("1")));
}

#[test]
fn umoci_unpacks_the_layers_to_the_last_state() {
    if !need(&[Need::Umoci, Need::Root]) {
        return;
    }
    let dir = scratch();
    let (image, layout) = (image(dir.path()), dir.path().join("layout"));
    let named = format!("{}:v1", layout.display());
    extract(&image, Path::new(&named), &LAYERS);
    let bundle = dir.path().join("bundle");
    let run = Command::new("umoci").args(["unpack", "--image", &named]).arg(&bundle).output();
    let run = run.unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let three = &unpacked(&image, &["three"], &out)[&0];
    assert_eq!(tree_compare(three, &bundle.join("rootfs")).unwrap(), []);
}

#[test]
fn what_cannot_be_a_layer_is_said() {
    let dir = scratch();
    let image = image(dir.path());
    let extract = |more: &[&str]| {
        let mut all = args!["extract", &image, "--oci", dir.path().join("layout")].to_vec();
        all.extend(more.iter().map(Into::into));
        larder(all)
    };
    extract(&["--layer", "four"]).fails(2, "four");
    extract(&["--layer", "one", "etc"]).fails(2, "name no paths");
    extract(&["--layer", "one", "--include", "*"]).fails(2, "--include");
    larder(args!["extract", &image, dir.path().join("out"), "--layers"]).fails(2, "--oci");
    let inner = inside(&image, "/one/etc");
    larder(args!["extract", inner, "--oci", dir.path().join("l"), "--layers"])
        .fails(2, "not a subvolume");
    std::fs::write(dir.path().join(".wh.x"), "").unwrap();
    larder(args!["cp", dir.path().join(".wh.x"), inside(&image, "/one/etc/.wh.x")]).ok();
    extract(&["--layer", "one"]).fails(1, "etc/.wh.x");
    larder(args!["extract", &image, "--oci", dir.path().join("single")]).fails(1, ".wh.x");
}
