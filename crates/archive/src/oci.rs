//! Container images in an OCI layout: a directory of blobs that are named by their SHA-256, and an
//! index that names images among them.
//!
//! A layer is a tar, perhaps compressed. It is written to a temporary file while two digests are
//! taken: that of the tar and that of the file. At its end the file gets its name. The index is
//! exchanged as the last step. So a layout that already holds images stays as it was until the new
//! one is complete, and a write that fails leaves no half of an image.

use crate::compress::{Compression, Compressor, Method};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The annotation that holds the name of an image.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// What is wrong with a layout, or with an image for it.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// A file of the layout.
    #[error("{path}: {source}")]
    File {
        /// Where.
        path: PathBuf,
        /// What.
        source: io::Error,
    },
    /// It is a layout of another version, or none.
    #[error("{path}: {what}")]
    Foreign {
        /// Where.
        path: PathBuf,
        /// What it is not.
        what: &'static str,
    },
    /// The name is taken.
    #[error("{path} already has an image {tag:?}")]
    Exists {
        /// The layout.
        path: PathBuf,
        /// The name.
        tag: String,
    },
    /// Container images have no layers that are compressed like that.
    #[error("layers of container images are not compressed by {0}: take none, gzip or zstd")]
    Compression(Method),
}

/// The machine that an image is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`: the words of the Go language.
    pub architecture: String,
    /// `v7`, for some architectures.
    pub variant: Option<String>,
}

/// What an image says of itself besides its layers.
#[derive(Clone, Debug)]
pub struct ImageConfig {
    /// The machine that it is for.
    pub platform: Platform,
    /// When it was made, as RFC 3339 has it. `None`: it does not say.
    pub created: Option<String>,
    /// The name in the index.
    pub tag: String,
    /// An image of that name is replaced.
    pub replace: bool,
}

/// A reference to a blob.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
}

/// A layer that is in a layout.
#[derive(Clone, Debug)]
pub struct Layer {
    descriptor: Descriptor,
    /// The digest of the tar.
    diff_id: String,
}

impl Layer {
    /// Bytes of its blob.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.descriptor.size
    }
}

/// An image that is in a layout.
#[derive(Clone, Debug)]
pub struct WrittenImage {
    /// Digest of its manifest.
    pub digest: String,
}

/// An OCI layout, which may hold other images.
#[derive(Debug)]
pub struct Layout {
    path: PathBuf,
}

impl Layout {
    /// Opens the layout in a directory. If the directory is missing or empty, it becomes one.
    ///
    /// # Errors
    /// [`OciError`]: the directory holds something else, or cannot be written.
    pub fn open(path: &Path) -> Result<Self, OciError> {
        let this = Self { path: path.to_owned() };
        let marker = this.path.join("oci-layout");
        match fs::read(&marker) {
            Ok(text) => {
                let text: Value = serde_json::from_slice(&text).unwrap_or_default();
                let version = text["imageLayoutVersion"].as_str().unwrap_or_default();
                if !version.starts_with("1.") {
                    let what = "not an OCI layout of version 1";
                    return Err(OciError::Foreign { path: marker, what });
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                this.must_be_empty()?;
                at(&this.path, fs::create_dir_all(&this.path))?;
                this.replace_json("oci-layout", &json!({ "imageLayoutVersion": "1.0.0" }))?;
            }
            Err(source) => return Err(OciError::File { path: marker, source }),
        }
        let blobs = this.blobs();
        at(&blobs, fs::create_dir_all(&blobs))?;
        Ok(this)
    }

    fn must_be_empty(&self) -> Result<(), OciError> {
        let mut entries = match fs::read_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => at(&self.path, other)?,
        };
        let what = "a directory that is not empty, and no OCI layout";
        match entries.next() {
            None => Ok(()),
            Some(_) => Err(OciError::Foreign { path: self.path.clone(), what }),
        }
    }

    /// Begins a layer, to which a tar is written.
    ///
    /// # Errors
    /// [`OciError`]: of the compression, or of the file.
    pub fn layer(&self, how: Compression) -> Result<LayerWriter, OciError> {
        let media_type = match how.method {
            Method::None => LAYER.to_owned(),
            Method::Gzip | Method::Zstd => format!("{LAYER}+{}", how.method),
            Method::Xz => return Err(OciError::Compression(how.method)),
        };
        let file = self.temporary(&self.blobs())?;
        let blob = Hashing::new(BufWriter::with_capacity(1 << 20, file));
        let tar = Hashing::new(at(&self.path, Compressor::new(blob, how))?);
        Ok(LayerWriter { media_type, tar, blobs: self.blobs() })
    }

    /// Is there an image of that name?
    ///
    /// # Errors
    /// [`OciError`]: the index cannot be read.
    pub fn has(&self, tag: &str) -> Result<bool, OciError> {
        Ok(self.images()?.iter().any(|image| tag_of(image) == Some(tag)))
    }

    /// Makes an image of layers, the lowest first, and puts it into the index.
    ///
    /// # Errors
    /// [`OciError`]: the name is taken, or a file cannot be written.
    pub fn image(&self, layers: &[Layer], config: &ImageConfig) -> Result<WrittenImage, OciError> {
        let mut images = self.images()?;
        if !config.replace && images.iter().any(|image| tag_of(image) == Some(&config.tag)) {
            return Err(OciError::Exists { path: self.path.clone(), tag: config.tag.clone() });
        }
        let described = self.blob(CONFIG, &config_of(layers, config))?;
        let layers: Vec<_> = layers.iter().map(|layer| &layer.descriptor).collect();
        let manifest = self.blob(
            MANIFEST,
            &json!({
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": described,
                "layers": layers,
            }),
        )?;
        images.retain(|image| tag_of(image) != Some(&config.tag));
        let mut entry = Map::new();
        entry.insert("mediaType".into(), MANIFEST.into());
        entry.insert("digest".into(), manifest.digest.clone().into());
        entry.insert("size".into(), manifest.size.into());
        entry.insert("platform".into(), platform_of(&config.platform).into());
        entry.insert("annotations".into(), json!({ REF_NAME: config.tag }));
        images.push(entry.into());
        self.replace_json(
            "index.json",
            &json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": images }),
        )?;
        Ok(WrittenImage { digest: manifest.digest })
    }

    /// The images that the index names.
    fn images(&self) -> Result<Vec<Value>, OciError> {
        let path = self.path.join("index.json");
        let text = match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => at(&path, other)?,
        };
        let index: Value = serde_json::from_slice(&text).unwrap_or_default();
        match index["manifests"].as_array() {
            Some(images) => Ok(images.clone()),
            None => Err(OciError::Foreign { path, what: "not an index of images" }),
        }
    }

    /// Puts a JSON document among the blobs.
    fn blob(&self, media_type: &str, value: &Value) -> Result<Descriptor, OciError> {
        let text = text_of(value);
        let digest = format!("sha256:{}", hex(&Sha256::digest(&text)));
        put(&self.blobs(), &digest, self.temporary(&self.blobs())?, |file| file.write_all(&text))?;
        let (media_type, size) = (media_type.to_owned(), text.len() as u64);
        Ok(Descriptor { media_type, digest, size })
    }

    /// Exchanges a document of the layout for another one.
    fn replace_json(&self, name: &str, value: &Value) -> Result<(), OciError> {
        let path = self.path.join(name);
        let mut file = self.temporary(&self.path)?;
        at(&path, file.write_all(&text_of(value)))?;
        at(&path, file.as_file().sync_all())?;
        at(&path, file.persist(&path).map_err(|e| e.error)).map(drop)
    }

    fn blobs(&self) -> PathBuf {
        self.path.join("blobs/sha256")
    }

    /// A temporary file. It is removed unless it gets its final name.
    fn temporary(&self, dir: &Path) -> Result<NamedTempFile, OciError> {
        let readable = Permissions::from_mode(0o644);
        let made = tempfile::Builder::new().prefix(".new-").permissions(readable).tempfile_in(dir);
        at(dir, made)
    }
}

/// A layer that is being written.
#[allow(missing_debug_implementations)] // The compressors have none.
pub struct LayerWriter {
    media_type: String,
    tar: Hashing<Compressor<Hashing<BufWriter<NamedTempFile>>>>,
    blobs: PathBuf,
}

impl LayerWriter {
    /// Ends the layer. Without this call nothing of it stays.
    ///
    /// # Errors
    /// The rest cannot be written.
    pub fn finish(self) -> Result<Layer, OciError> {
        let (compressor, diff_id, _) = self.tar.finish();
        let blob = at(&self.blobs, compressor.finish())?;
        let (file, digest, size) = blob.finish();
        let file = at(&self.blobs, file.into_inner().map_err(io::IntoInnerError::into_error))?;
        put(&self.blobs, &digest, file, |_| Ok(()))?;
        let descriptor = Descriptor { media_type: self.media_type, digest, size };
        Ok(Layer { descriptor, diff_id })
    }
}

impl Write for LayerWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.tar.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tar.flush()
    }
}

/// Gives a file the name of its digest.
fn put(
    blobs: &Path,
    digest: &str,
    mut file: NamedTempFile,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), OciError> {
    let path = blobs.join(digest.trim_start_matches("sha256:"));
    at(&path, fill(file.as_file_mut()))?;
    at(&path, file.as_file().sync_all())?;
    at(&path, file.persist(&path).map_err(|e| e.error)).map(drop)
}

/// Passes bytes on, and takes their number and their digest.
struct Hashing<W> {
    out: W,
    digest: Sha256,
    bytes: u64,
}

impl<W: Write> Hashing<W> {
    fn new(out: W) -> Self {
        Self { out, digest: Sha256::new(), bytes: 0 }
    }

    fn finish(self) -> (W, String, u64) {
        (self.out, format!("sha256:{}", hex(&self.digest.finalize())), self.bytes)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let written = self.out.write(buf)?;
        self.digest.update(&buf[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn config_of(layers: &[Layer], config: &ImageConfig) -> Value {
    let mut out = Map::new();
    if let Some(created) = &config.created {
        out.insert("created".into(), created.clone().into());
    }
    out.extend(platform_of(&config.platform));
    out.insert("config".into(), json!({}));
    let diffs: Vec<_> = layers.iter().map(|layer| &layer.diff_id).collect();
    out.insert("rootfs".into(), json!({ "type": "layers", "diff_ids": diffs }));
    let step = || match &config.created {
        Some(created) => json!({ "created": created, "created_by": "larder extract" }),
        None => json!({ "created_by": "larder extract" }),
    };
    out.insert("history".into(), layers.iter().map(|_| step()).collect::<Vec<_>>().into());
    out.into()
}

fn platform_of(platform: &Platform) -> Map<String, Value> {
    let mut out = Map::new();
    out.insert("architecture".into(), platform.architecture.clone().into());
    out.insert("os".into(), platform.os.clone().into());
    if let Some(variant) = &platform.variant {
        out.insert("variant".into(), variant.clone().into());
    }
    out
}

fn tag_of(image: &Value) -> Option<&str> {
    image["annotations"][REF_NAME].as_str()
}

fn text_of(value: &Value) -> Vec<u8> {
    serde_json::to_vec(value).expect("JSON without maps of other keys")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Says which file an error is about.
fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, OciError> {
    result.map_err(|source| OciError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(tag: &str, replace: bool) -> ImageConfig {
        let platform = Platform { os: "linux".into(), architecture: "amd64".into(), variant: None };
        ImageConfig { platform, created: None, tag: tag.into(), replace }
    }

    fn layer(layout: &Layout, how: &str, bytes: &[u8]) -> Layer {
        let mut writer = layout.layer(how.parse().unwrap()).unwrap();
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap()
    }

    fn json_of(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    fn blob(dir: &Path, digest: &Value) -> PathBuf {
        dir.join("blobs").join(digest.as_str().unwrap().replace(':', "/"))
    }

    #[test]
    fn an_image_can_be_followed_from_the_index_to_its_layers() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("layout");
        let layout = Layout::open(&dir).unwrap();
        let layers = [layer(&layout, "none", b"abc"), layer(&layout, "gzip", &[7; 5000])];
        let written = layout.image(&layers, &config("v1", false)).unwrap();
        let index = json_of(&dir.join("index.json"));
        let image = &index["manifests"][0];
        assert_eq!(image["digest"], written.digest);
        assert_eq!(image["annotations"][REF_NAME], "v1");
        let manifest = json_of(&blob(&dir, &image["digest"]));
        assert_eq!(manifest["layers"][1]["mediaType"], format!("{LAYER}+gzip"));
        assert_eq!(fs::read(blob(&dir, &manifest["layers"][0]["digest"])).unwrap(), b"abc");
        let config = json_of(&blob(&dir, &manifest["config"]["digest"]));
        let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(config["rootfs"]["diff_ids"][0], abc);
        assert_eq!(manifest["layers"][0]["digest"], abc);
        assert_ne!(config["rootfs"]["diff_ids"][1], manifest["layers"][1]["digest"]);
        let named = |name: &str| fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((named("index.json"), named("oci-layout")), (0o644, 0o644));
    }

    #[test]
    fn further_images_join_and_the_same_name_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(dir.path()).unwrap();
        let first = layout.image(&[layer(&layout, "none", b"1")], &config("a", false)).unwrap();
        let layout = Layout::open(dir.path()).unwrap();
        layout.image(&[layer(&layout, "none", b"2")], &config("b", false)).unwrap();
        let taken = layout.image(&[layer(&layout, "none", b"3")], &config("a", false));
        assert!(matches!(taken, Err(OciError::Exists { .. })));
        assert!(layout.has("b").unwrap() && !layout.has("c").unwrap());
        let again = layout.image(&[layer(&layout, "none", b"1")], &config("a", true)).unwrap();
        assert_eq!(again.digest, first.digest, "the same layers give the same image");
        assert_eq!(layout.images().unwrap().len(), 2);
    }

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::open(dir.path()).unwrap();
        let mut writer = layout.layer(Compression::default()).unwrap();
        writer.write_all(b"half").unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(layout.blobs()).unwrap().count(), 0);
        assert!(matches!(layout.layer("xz".parse().unwrap()), Err(OciError::Compression(_))));
    }

    #[test]
    fn other_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("something"), b"").unwrap();
        let refused = Layout::open(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("no OCI layout"), "{refused}");
        fs::write(dir.path().join("oci-layout"), b"{}").unwrap();
        assert!(Layout::open(dir.path()).is_err());
    }
}
