//! Layouts and archives of container images, sound and damaged.
//!
//! What layers come to is compared with a reference that unpacks one layer after the other to a
//! directory, and removes what whiteouts name, as unpacking container images is specified.

use super::Whiteouts;
use crate::{Kind, Options, SourceSpec, Sources};
use proptest::prelude::*;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// A file or a directory (a name that ends with a slash) of a layer, or a whiteout.
type Layer = Vec<(String, String)>;

fn tar_of(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, data) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(data.len() as u64);
        if name.ends_with('/') {
            header.set_entry_type(tar::EntryType::Directory);
        }
        builder.append_data(&mut header, name, &data[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

fn layer_tar(layer: &Layer) -> Vec<u8> {
    tar_of(layer.iter().map(|(name, data)| (name.clone(), data.clone().into_bytes())))
}

fn digest(bytes: &[u8]) -> String {
    let digits: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{digits}")
}

/// Files of a layout, by path.
#[derive(Default)]
struct Layout(BTreeMap<String, Vec<u8>>);

impl Layout {
    fn blob(&mut self, bytes: &[u8], media_type: &str) -> serde_json::Value {
        let digest = digest(bytes);
        self.0.insert(format!("blobs/{}", digest.replace(':', "/")), bytes.to_vec());
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    fn manifest(&mut self, layers: &[Vec<u8>]) -> serde_json::Value {
        let layer = "application/vnd.oci.image.layer.v1.tar";
        let layers: Vec<_> = layers.iter().map(|bytes| self.blob(bytes, layer)).collect();
        let config = self.blob(b"{}", "application/vnd.oci.image.config.v1+json");
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        let bytes = serde_json::to_vec(&manifest).unwrap();
        self.blob(&bytes, "application/vnd.oci.image.manifest.v1+json")
    }

    fn index(&mut self, manifests: &[serde_json::Value]) {
        let index = json!({"schemaVersion": 2, "manifests": manifests});
        self.0.insert("index.json".to_owned(), serde_json::to_vec(&index).unwrap());
    }

    /// One image of these layers.
    fn of(layers: &[Vec<u8>]) -> Self {
        let mut layout = Self::default();
        let manifest = layout.manifest(layers);
        layout.index(&[manifest]);
        layout
    }

    fn write(&self, dir: &Path) {
        for (path, bytes) in &self.0 {
            let path = dir.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }

    fn archive(&self) -> Vec<u8> {
        tar_of(self.0.clone())
    }
}

fn gather(prefix: &str, path: &Path, reference: &str) -> crate::Result<Sources> {
    let mut given = OsString::from(prefix);
    given.push(":");
    given.push(path);
    given.push(reference);
    let options = Options { memory: 4096, ..Options::default() };
    Sources::gather(&[SourceSpec::parse(&given)?], &options)
}

/// Files with their contents, directories with a slash.
fn seen(sources: &Sources, layers: usize) -> BTreeMap<String, String> {
    let mut tree = BTreeMap::new();
    for entry in sources.first_layers(layers).unwrap() {
        let entry = entry.unwrap();
        let name = String::from_utf8(entry.path.as_bytes().to_vec()).unwrap();
        match entry.kind {
            Kind::Directory => drop(tree.insert(format!("{name}/"), String::new())),
            Kind::File { size, contents } => {
                let mut data = vec![0; size as usize];
                if let Some(at) = contents {
                    sources.open(&at).unwrap().read_exact_at(&mut data, 0).unwrap();
                }
                tree.insert(name, String::from_utf8(data).unwrap());
            }
            kind => panic!("{kind:?}"),
        }
    }
    tree
}

/// Unpacks layers to a directory, one after the other.
fn reference(layers: &[Layer]) -> BTreeMap<String, String> {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path();
    let remove = |path: &Path| match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    };
    let make = |path: &Path| {
        let below = path.strip_prefix(root).unwrap();
        let mut way = root.to_owned();
        for name in below {
            way.push(name);
            if !way.is_dir() {
                remove(&way);
                fs::create_dir(&way).unwrap();
            }
        }
    };
    for layer in layers {
        for (name, _) in layer {
            let path = root.join(name);
            let parent = path.parent().unwrap();
            let hidden = path.file_name().unwrap().to_str().unwrap().strip_prefix(".wh.");
            if hidden == Some(".wh..opq") && parent.is_dir() {
                for entry in fs::read_dir(parent).unwrap() {
                    remove(&entry.unwrap().path());
                }
            } else if let Some(hidden) = hidden
                && hidden != ".wh..opq"
            {
                remove(&parent.join(hidden));
            }
        }
        for (name, data) in layer.iter().filter(|(name, _)| !name.contains(".wh.")) {
            let path = root.join(name);
            if name.ends_with('/') {
                make(&path);
            } else {
                make(path.parent().unwrap());
                remove(&path);
                fs::write(&path, data).unwrap();
            }
        }
    }
    let mut tree = BTreeMap::from([("/".to_owned(), String::new())]);
    list(root, root, &mut tree);
    tree
}

fn list(root: &Path, dir: &Path, tree: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            tree.insert(format!("{name}/"), String::new());
            list(root, &path, tree);
        } else {
            tree.insert(name, fs::read_to_string(path).unwrap());
        }
    }
}

fn some_layer() -> impl Strategy<Value = Layer> {
    let name = "[ab]|[ab]/[ab]|[ab]/[ab]/[ab]";
    let files = prop::collection::vec((name, any::<bool>(), "[x-z]{0,3}"), 0..6);
    let hidden =
        "(\\.wh\\.[ab])|[ab]/\\.wh\\.[ab]|[ab]/\\.wh\\.\\.wh\\.\\.opq|\\.wh\\.\\.wh\\.\\.opq";
    let hidden = prop::collection::btree_set(hidden, 0..3);
    (files, hidden, any::<prop::sample::Index>()).prop_map(|(files, hidden, place)| {
        let mut layer: Layer = Vec::new();
        for (name, is_directory, data) in files {
            match is_directory {
                true => layer.push((format!("{name}/"), String::new())),
                false => layer.push((name, data)),
            }
        }
        // Names once: what one layer says twice is not specified.
        let mut known = BTreeSet::new();
        layer.retain(|(name, _)| known.insert(name.trim_end_matches('/').to_owned()));
        // Nor is a file with something below, or with a whiteout below.
        let all: Vec<_> = known.iter().cloned().chain(hidden.iter().cloned()).collect();
        layer.retain(|(name, _)| {
            name.ends_with('/') || !all.iter().any(|other| other.starts_with(&format!("{name}/")))
        });
        let place = place.index(layer.len() + 1);
        layer.splice(place..place, hidden.into_iter().map(|name| (name, String::new())));
        layer
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn layers_are_what_unpacking_them_gives(layers in prop::collection::vec(some_layer(), 1..4)) {
        let scratch = tempfile::tempdir().unwrap();
        let tars: Vec<_> = layers.iter().map(layer_tar).collect();
        Layout::of(&tars).write(scratch.path());
        let sources = gather("oci", scratch.path(), "").unwrap();
        prop_assert_eq!(sources.layers().len(), layers.len());
        for count in 0..=layers.len() {
            prop_assert_eq!(seen(&sources, count), reference(&layers[..count]), "{} layers", count);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn damaged_archives_do_no_harm(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let index = Layout::of(&three_layers()).0["index.json"].clone();
        let mut layout = Layout::of(&three_layers());
        // The index is what no digest protects.
        let mut bytes = index;
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        layout.0.insert("index.json".to_owned(), bytes);
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("layout.tar");
        fs::write(&file, layout.archive()).unwrap();
        if let Ok(sources) = gather("oci-archive", &file, "") {
            prop_assert_eq!(seen(&sources, 3), expected());
        }
    }
}

/// Three layers, packed in each way.
fn three_layers() -> [Vec<u8>; 3] {
    let layer = |files: &[(&str, &str)]| {
        tar_of(files.iter().map(|(n, d)| ((*n).to_owned(), d.as_bytes().to_vec())))
    };
    let base = layer(&[("etc/", ""), ("etc/a", "1"), ("etc/b", "2"), ("var/c", "3")]);
    let plain = layer(&[("etc/.wh.a", ""), ("etc/d", "4")]);
    let mut gzip = flate2::read::GzEncoder::new(&plain[..], Default::default());
    let mut second = Vec::new();
    std::io::Read::read_to_end(&mut gzip, &mut second).unwrap();
    let third = zstd::encode_all(&layer(&[("var/.wh..wh..opq", ""), ("var/e", "5")])[..], 1);
    [base, second, third.unwrap()]
}

fn expected() -> BTreeMap<String, String> {
    [("/", ""), ("etc/", ""), ("etc/b", "2"), ("etc/d", "4"), ("var/", ""), ("var/e", "5")]
        .map(|(name, data)| (name.to_owned(), data.to_owned()))
        .into()
}

#[test]
fn layouts_are_read_from_directories_and_archives() {
    let scratch = tempfile::tempdir().unwrap();
    let layout = Layout::of(&three_layers());
    let dir = scratch.path().join("layout");
    layout.write(&dir);
    assert_eq!(seen(&gather("oci", &dir, "").unwrap(), 3), expected());
    let file = scratch.path().join("layout.tar.zst");
    fs::write(&file, zstd::encode_all(&layout.archive()[..], 1).unwrap()).unwrap();
    let sources = gather("oci-archive", &file, ":/srv").unwrap();
    assert!(seen(&sources, 3).contains_key("srv/var/e"));
}

#[test]
fn what_docker_saves_is_read() {
    let [base, second, third] = three_layers();
    let plain = |packed: &[u8], gzip: bool| {
        let mut out = Vec::new();
        match gzip {
            true => std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(packed), &mut out)
                .map(drop),
            false => zstd::stream::copy_decode(packed, &mut out),
        }
        .unwrap();
        out
    };
    let layers = [base, plain(&second, true), plain(&third, false)];
    let ids: Vec<_> = layers.iter().map(|layer| digest(layer)).collect();
    let mut files = BTreeMap::new();
    let manifest = json!([
        {"Config": "c.json", "RepoTags": ["box:1"], "Layers": ["0/l.tar", "1/l.tar", "2/l.tar"]},
        {"Config": "c.json", "RepoTags": ["box:2"], "Layers": ["0/l.tar"]},
    ]);
    files.insert("manifest.json".to_owned(), serde_json::to_vec(&manifest).unwrap());
    let config = json!({"rootfs": {"type": "layers", "diff_ids": ids}});
    files.insert("c.json".to_owned(), serde_json::to_vec(&config).unwrap());
    for (number, layer) in layers.iter().enumerate() {
        files.insert(format!("{number}/l.tar"), layer.clone());
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("saved.tar");
    fs::write(&file, tar_of(files.clone())).unwrap();
    assert_eq!(seen(&gather("docker-archive", &file, ":box:1").unwrap(), 3), expected());
    let error = gather("docker-archive", &file, "").unwrap_err();
    assert!(error.to_string().contains("box:1, box:2"), "{error}");
    let error = gather("docker-archive", &file, ":box:2").unwrap_err().to_string();
    assert!(error.contains("1 layers, and its configuration has 3"), "{error}");
    files.insert("1/l.tar".to_owned(), layers[2].clone());
    fs::write(&file, tar_of(files)).unwrap();
    let error = gather("docker-archive", &file, ":box:1").unwrap_err().to_string();
    assert!(error.contains("its digest is"), "{error}");
}

#[test]
fn one_image_of_several_has_to_be_chosen() {
    let [base, second, _] = three_layers();
    let mut layout = Layout::default();
    let (mut first, mut other) =
        (layout.manifest(std::slice::from_ref(&base)), layout.manifest(&[base.clone(), second]));
    first["platform"] = json!({"os": "linux", "architecture": "amd64"});
    other["platform"] = json!({"os": "linux", "architecture": "arm64", "variant": "v8"});
    let about = json!({"vnd.docker.reference.type": "attestation-manifest"});
    let mut attestation = layout.manifest(&[]);
    attestation["annotations"] = about;
    let nested = json!({"schemaVersion": 2, "manifests": [first, other, attestation]});
    let bytes = serde_json::to_vec(&nested).unwrap();
    let mut nested = layout.blob(&bytes, "application/vnd.oci.image.index.v1+json");
    nested["annotations"] = json!({"org.opencontainers.image.ref.name": "latest"});
    let mut plain = first;
    plain["annotations"] = json!({"org.opencontainers.image.ref.name": "1.0"});
    layout.index(&[nested, plain]);
    let scratch = tempfile::tempdir().unwrap();
    layout.write(scratch.path());
    let layers = |reference: &str| {
        gather("oci", scratch.path(), reference).map(|sources| sources.layers().len())
    };
    assert_eq!(layers(":1.0").unwrap(), 1);
    assert_eq!(layers(":latest@linux/arm64").unwrap(), 2);
    assert_eq!(layers(":latest@linux/arm64/v8").unwrap(), 2);
    for (reference, there) in [
        ("", "latest"),
        (":2.0", "1.0"),
        (":latest", "@linux/amd64, @linux/arm64/v8"),
        (":latest@linux/riscv64", "@linux/amd64"),
    ] {
        let error = layers(reference).unwrap_err();
        assert!(error.to_string().contains(there), "{reference}: {error}");
        assert!(error.advice().is_some());
    }
}

#[test]
fn damaged_layouts_are_refused() {
    let layers = three_layers();
    let sound = Layout::of(&layers);
    let blob = |layer: &[u8]| format!("blobs/{}", digest(layer).replace(':', "/"));
    let changed = |path: &str, bytes: Option<Vec<u8>>| {
        let mut files = sound.0.clone();
        match bytes {
            Some(bytes) => drop(files.insert(path.to_owned(), bytes)),
            None => drop(files.remove(path)),
        }
        let scratch = tempfile::tempdir().unwrap();
        Layout(files).write(scratch.path());
        gather("oci", scratch.path(), "").expect_err(path).to_string()
    };
    let mut flipped = layers[1].clone();
    flipped[20] ^= 1;
    assert!(changed(&blob(&layers[1]), Some(flipped)).contains("its digest is"));
    assert!(changed(&blob(&layers[0]), Some(vec![0; 5])).contains("5 bytes, and must have"));
    assert!(changed(&blob(&layers[0]), None).contains("No such file"));
    assert!(changed("index.json", None).contains("index.json: No such file"));
    assert!(changed("index.json", Some(b"{".to_vec())).contains("not as it must be"));
    let out = json!({"manifests": [{"digest": "sha256:../../x", "size": 1}]});
    let out = serde_json::to_vec(&out).unwrap();
    assert!(changed("index.json", Some(out)).contains("the digest sha256:../../x is not known"));
}

#[test]
fn whiteouts_of_nothing_and_with_contents_are_refused() {
    for (name, expected) in [
        (".wh.", "a whiteout of nothing"),
        ("a/.wh..", "a whiteout of nothing"),
        ("a/.wh...", "a whiteout of nothing"),
        (".wh.a/b", "a whiteout, which can hold nothing"),
    ] {
        let archive = tar_of([(name.to_owned(), Vec::new())]);
        let bytes = crate::read::spool::spool(&archive[..], "layer", &Options::default()).unwrap();
        let mut collector = crate::overlay::Collector::new(&Options::default());
        collector.begin_layer("layer", &crate::TreePath::root(), false);
        let number = crate::SourceNumber(0);
        let error = super::tar::read(&mut collector, &bytes, number, Whiteouts::Hide).unwrap_err();
        assert!(error.to_string().contains(expected), "{name}: {error}");
        // As a plain archive they are names like others.
        super::tar::read(&mut collector, &bytes, number, Whiteouts::Names).unwrap();
    }
}

#[test]
fn an_image_has_no_more_layers_than_anybody_makes() {
    let dir = tempfile::tempdir().unwrap();
    let layer = layer_tar(&vec![("a".to_owned(), "x".to_owned())]);
    for (count, sound) in [(500, true), (501, false)] {
        // The same layer again and again takes no room in an archive.
        Layout::of(&vec![layer.clone(); count]).write(dir.path());
        let error = gather("oci", dir.path(), "").map(drop).map_err(|e| e.to_string());
        assert_eq!(error.is_ok(), sound, "{error:?}");
        assert!(sound || error.unwrap_err().contains("501 layers"));
    }
}
