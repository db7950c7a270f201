//! Container images: OCI layouts, as a directory or in one tar file, and what `docker save` writes.
//!
//! Hidden here is the way from a name to layers. In an OCI layout `index.json` names manifests by
//! digest, maybe by way of an index for several platforms, and a manifest names layers. In an
//! archive of docker `manifest.json` names files. Each becomes a layer of the collector, from the
//! lowest. A layer that comes twice is unpacked once.
//!
//! Whatever is read by digest must have it: manifests, configurations and layers. In archives of
//! docker the digests are those of the unpacked layers. Nothing is chosen by the machine at hand:
//! where there are several images, or several platforms, the person has to say which.

#[cfg(test)]
mod tests;

use super::bytes::Bytes;
use super::spool::{ExpectedDigest, unpacked};
use super::tar::{self, Listed, TarStore, Whiteouts};
use crate::error::{Error, Result, shown};
use crate::overlay::Collector;
use crate::{Options, TreePath};
use serde::Deserialize;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes of a file in JSON.
const MOST_JSON: u64 = 16 << 20;
/// An index may name an index; so many times.
const MOST_INDEXES: usize = 4;
/// Links from file to file in an archive.
const MOST_LINKS: usize = 8;
/// The annotation that has a manifest's name.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The annotation of what is no image, but says something about one.
const ABOUT_ANOTHER: &str = "vnd.docker.reference.type";

/// The layers of an image, from the lowest: their names, and where they are. Layers that are the
/// same have the same place.
pub(crate) struct Layers {
    pub(crate) layers: Vec<(String, usize)>,
    pub(crate) stores: Vec<TarStore>,
}

impl Layers {
    /// Tells the collector what the layers hold. `numbers` are those of the stores.
    pub(crate) fn read(
        &self,
        collector: &mut Collector,
        below: &TreePath,
        number: impl Fn(usize) -> crate::SourceNumber,
    ) -> Result<()> {
        for (name, store) in &self.layers {
            collector.begin_layer(name, below, false);
            let bytes = &self.stores[*store].0;
            tar::read(collector, bytes, number(*store), Whiteouts::Hide)?;
        }
        Ok(())
    }
}

/// An OCI layout in a directory.
pub(crate) fn open_layout(dir: &Path, reference: &str, options: &Options) -> Result<Layers> {
    let files = Files::Directory(dir.to_owned());
    layers_of_layout(&files, reference, options)
}

/// An OCI layout in a tar file.
pub(crate) fn open_layout_archive(
    bytes: Bytes,
    reference: &str,
    options: &Options,
) -> Result<Layers> {
    layers_of_layout(&Files::archive(bytes, options)?, reference, options)
}

/// What `docker save` wrote.
pub(crate) fn open_docker_archive(
    bytes: Bytes,
    reference: &str,
    options: &Options,
) -> Result<Layers> {
    let files = Files::archive(bytes, options)?;
    let images: Vec<DockerImage> = files.json("manifest.json")?;
    let named = |image: &&DockerImage| {
        let tags = image.repo_tags.iter().flatten();
        reference.is_empty() || tags.clone().any(|tag| tag == reference)
    };
    let found: Vec<_> = images.iter().filter(named).collect();
    let [image] = found[..] else {
        let tags = images.iter().flat_map(|image| image.repo_tags.iter().flatten());
        return Err(choice(files.name(), reference, tags.map(String::as_str)));
    };
    let config: Config = files.json(&image.config)?;
    let digests = config.rootfs.diff_ids;
    if digests.len() != image.layers.len() {
        let (has, states) = (image.layers.len(), digests.len());
        let what = format!("it has {has} layers, and its configuration has {states}");
        return Err(Error::damaged(files.name(), what));
    }
    let mut layers = Unpacker::new(&files);
    for (path, digest) in image.layers.iter().zip(&digests) {
        let expected = parse_digest(files.name(), digest)?;
        layers.add(&expected, |name| {
            let bytes = unpacked(files.get(path)?.named(name), options)?;
            expected.verify(&bytes)?;
            Ok(bytes)
        })?;
    }
    Ok(layers.done())
}

fn layers_of_layout(files: &Files, reference: &str, options: &Options) -> Result<Layers> {
    let wanted = Wanted::parse(reference);
    let mut index: Index = files.json("index.json")?;
    let mut by_name = true;
    for _ in 0..MOST_INDEXES {
        let descriptor = wanted.choose(&index, by_name, files.name())?;
        let blob = files.blob(descriptor)?;
        let text = blob.read_all(MOST_JSON)?;
        if descriptor.is_index() {
            index = from_json(&text, blob.name())?;
            by_name = false;
            continue;
        }
        let manifest: Manifest = from_json(&text, blob.name())?;
        let mut layers = Unpacker::new(files);
        for layer in &manifest.layers {
            if !layer.media_type.contains("tar") || layer.media_type.contains("encrypted") {
                let what = format!("a layer of the type {:?}", layer.media_type);
                return Err(Error::damaged(files.name(), what));
            }
            let digest = parse_digest(files.name(), &layer.digest)?;
            layers.add(&digest, |_| unpacked(files.blob(layer)?, options))?;
        }
        return Ok(layers.done());
    }
    Err(Error::damaged(files.name(), "an index that leads to an index, again and again"))
}

/// Unpacks layers, equal ones once.
struct Unpacker<'a> {
    files: &'a Files,
    known: HashMap<ExpectedDigest, usize>,
    layers: Layers,
}

impl<'a> Unpacker<'a> {
    fn new(files: &'a Files) -> Self {
        let layers = Layers { layers: Vec::new(), stores: Vec::new() };
        Self { files, known: HashMap::new(), layers }
    }

    fn add(
        &mut self,
        digest: &ExpectedDigest,
        open: impl FnOnce(&str) -> Result<Bytes>,
    ) -> Result<()> {
        let (_, hex) = digest.parts();
        let name = format!("{}: layer {}", self.files.name(), &hex[..12]);
        let store = match self.known.get(digest) {
            Some(store) => *store,
            None => {
                self.layers.stores.push(TarStore(open(&name)?));
                self.known.insert(digest.clone(), self.layers.stores.len() - 1);
                self.layers.stores.len() - 1
            }
        };
        self.layers.layers.push((name, store));
        Ok(())
    }

    fn done(self) -> Layers {
        self.layers
    }
}

/// A box of files: a directory, or a tar file.
enum Files {
    Directory(PathBuf),
    Archive { bytes: Bytes, list: HashMap<Vec<u8>, Listed> },
}

impl Files {
    fn archive(bytes: Bytes, options: &Options) -> Result<Self> {
        let bytes = unpacked(bytes, options)?;
        let list = tar::list(&bytes)?;
        let list = list.into_iter().map(|(path, file)| (path.as_bytes().to_vec(), file)).collect();
        Ok(Self::Archive { bytes, list })
    }

    fn name(&self) -> &str {
        match self {
            Self::Directory(dir) => dir.to_str().unwrap_or("the layout"),
            Self::Archive { bytes, .. } => bytes.name(),
        }
    }

    fn get(&self, path: &str) -> Result<Bytes> {
        let name = format!("{}: {}", self.name(), shown(path.as_bytes()));
        let Some(path) = TreePath::new(path.as_bytes()) else {
            return Err(Error::damaged(&name, "the path leads out of it"));
        };
        match self {
            Self::Directory(dir) => {
                Bytes::open(&dir.join(OsStr::from_bytes(path.as_bytes())), &name)
            }
            Self::Archive { bytes, list } => {
                let mut at = path;
                for _ in 0..MOST_LINKS {
                    match list.get(at.as_bytes()) {
                        Some(Listed::File(range)) => return Ok(bytes.part(range.clone(), &name)),
                        Some(Listed::Link(target)) => at = target.clone(),
                        None => break,
                    }
                }
                Err(Error::damaged(&name, "there is no such file in it"))
            }
        }
    }

    fn json<T: for<'a> Deserialize<'a>>(&self, path: &str) -> Result<T> {
        let bytes = self.get(path)?;
        from_json(&bytes.read_all(MOST_JSON)?, bytes.name())
    }

    /// What a descriptor names, with the size and the digest that it states.
    fn blob(&self, descriptor: &Descriptor) -> Result<Bytes> {
        let digest = parse_digest(self.name(), &descriptor.digest)?;
        let (algorithm, hex) = digest.parts();
        let bytes = self.get(&format!("blobs/{algorithm}/{hex}"))?;
        if bytes.len() != descriptor.size {
            let what = format!("{} bytes, and must have {}", bytes.len(), descriptor.size);
            return Err(Error::damaged(bytes.name(), what));
        }
        digest.verify(&bytes)?;
        Ok(bytes)
    }
}

fn from_json<T: for<'a> Deserialize<'a>>(text: &[u8], name: &str) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|e| Error::damaged(name, format!("not as it must be: {e}")))
}

fn parse_digest(name: &str, digest: &str) -> Result<ExpectedDigest> {
    let what = || format!("the digest {} is not known", shown(digest.as_bytes()));
    ExpectedDigest::parse(digest).ok_or_else(|| Error::damaged(name, what()))
}

/// An error that says what there is.
fn choice<'a>(name: &str, reference: &str, there: impl Iterator<Item = &'a str>) -> Error {
    let mut there: Vec<_> = there.map(|tag| shown(tag.as_bytes())).collect();
    there.sort();
    there.dedup();
    let there = if there.is_empty() { "none with a name".to_owned() } else { there.join(", ") };
    let what = if reference.is_empty() {
        format!("more than one image, or none; it has: {there}")
    } else {
        format!("no single image {}; it has: {there}", shown(reference.as_bytes()))
    };
    let how = "say which image is meant, as in `oci:LAYOUT:TAG` or `oci:LAYOUT:TAG@linux/arm64`";
    Error::Choice { source_name: name.to_owned(), what, how: how.to_owned() }
}

/// Which image is meant: `[TAG][@DIGEST | @OS/ARCHITECTURE[/VARIANT]]`.
#[derive(Debug)]
struct Wanted<'a> {
    given: &'a str,
    tag: &'a str,
    digest: Option<&'a str>,
    platform: Option<&'a str>,
}

impl<'a> Wanted<'a> {
    fn parse(given: &'a str) -> Self {
        let (tag, behind) = match given.split_once('@') {
            Some((tag, behind)) => (tag, Some(behind)),
            None => (given, None),
        };
        let digest = behind.filter(|behind| behind.contains(':'));
        let platform = behind.filter(|behind| !behind.contains(':'));
        Self { given, tag, digest, platform }
    }

    /// The one manifest that is meant. Names are in the first index only.
    fn choose<'b>(&self, index: &'b Index, by_name: bool, name: &str) -> Result<&'b Descriptor> {
        let meant = |descriptor: &&Descriptor| {
            let named = !by_name || self.tag.is_empty() || descriptor.name() == Some(self.tag);
            let digest = !by_name || self.digest.is_none_or(|digest| descriptor.digest == digest);
            let platform = match (&descriptor.platform, self.platform) {
                (Some(has), Some(wanted)) => has.is(wanted),
                _ => true,
            };
            let is_image = !descriptor.annotations.contains_key(ABOUT_ANOTHER);
            named && digest && platform && is_image
        };
        let found: Vec<_> = index.manifests.iter().filter(meant).collect();
        if let [one] = found[..] {
            return Ok(one);
        }
        let shown: Vec<_> = index.manifests.iter().map(Descriptor::shown).collect();
        Err(choice(name, self.given, shown.iter().map(String::as_str)))
    }
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: HashMap<String, String>,
    platform: Option<Platform>,
}

impl Descriptor {
    fn name(&self) -> Option<&str> {
        self.annotations.get(REF_NAME).map(String::as_str)
    }

    fn is_index(&self) -> bool {
        self.media_type.contains("image.index") || self.media_type.contains("manifest.list")
    }

    /// How a person can name it.
    fn shown(&self) -> String {
        let name = self.name().unwrap_or_default();
        match &self.platform {
            Some(platform) => format!("{name}@{}", platform.shown()),
            None if name.is_empty() => format!("@{}", self.digest),
            None => name.to_owned(),
        }
    }
}

#[derive(Debug, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
    #[serde(default)]
    variant: String,
}

impl Platform {
    fn shown(&self) -> String {
        let mut shown = format!("{}/{}", self.os, self.architecture);
        if !self.variant.is_empty() {
            shown = format!("{shown}/{}", self.variant);
        }
        shown
    }

    fn is(&self, wanted: &str) -> bool {
        self.shown() == wanted || format!("{}/{}", self.os, self.architecture) == wanted
    }
}

#[derive(Debug, Deserialize)]
struct Manifest {
    layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Config {
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}
