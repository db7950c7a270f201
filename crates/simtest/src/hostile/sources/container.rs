//! A program that makes a container image: layers, and descriptors with right sizes and digests.
//!
//! Layers are archives of [`super::tar`]. Before the digest of a text in JSON is taken, the program
//! may replace parts of it. So wrong texts are reached by way of right digests.

use super::tar;
use crate::hostile::choices::Choices;
use sha2::{Digest, Sha256};

/// What replaces parts of a text.
const TOKENS: &[&str] = &[
    "",
    "0",
    "-1",
    "1e99",
    "18446744073709551616",
    "null",
    "{}",
    "[]",
    "[[[[[[[[",
    "\"",
    "\"\"",
    ",",
    "}",
    "\\u0000",
    "\\ud800",
    "sha512:",
    "sha256:00",
    "../a",
    "a",
    "@linux/arm64",
    "tar+encrypted",
    "application/vnd.oci.image.index.v1+json",
    "vnd.docker.reference.type",
    "latest",
    "\u{1b}[2J",
];
const REFERENCES: &[&str] =
    &["", "latest", "v1", "latest@linux/amd64", "@linux/arm64/v8", "latest@sha256:00", "a:b:c"];

/// An image in a tar.
pub(super) struct Container {
    pub(super) prefix: &'static str,
    pub(super) archive: Vec<u8>,
    pub(super) reference: &'static str,
}

/// The image that a program makes.
pub(super) fn container(choices: &mut Choices<'_>) -> Container {
    let shape = choices.byte();
    let reference = REFERENCES[choices.below(REFERENCES.len())];
    let mut maker = Maker { choices, files: Vec::new() };
    let layers = maker.layers();
    let prefix = if shape & 1 == 0 {
        maker.oci(&layers, shape);
        "oci-archive"
    } else {
        maker.docker(&layers);
        "docker-archive"
    };
    let archive = tar::packed(shape >> 6, &maker.archive(), None);
    Container { prefix, archive, reference }
}

/// A layer: what is packed and what is not.
struct Layer {
    packed: Vec<u8>,
    digest: String,
}

struct Maker<'a, 'b> {
    choices: &'a mut Choices<'b>,
    files: Vec<(String, Vec<u8>)>,
}

impl Maker<'_, '_> {
    fn layers(&mut self) -> Vec<Layer> {
        let mut layers = Vec::new();
        for _ in 0..self.choices.below(4) {
            let len = 2 * usize::from(self.choices.byte());
            let archive = tar::archive(self.choices.bytes(len));
            let digest = sha256(&archive);
            layers.push(Layer { packed: tar::packed(self.choices.byte(), &archive, None), digest });
        }
        layers
    }

    fn oci(&mut self, layers: &[Layer], shape: u8) {
        let mut list = Vec::new();
        for layer in layers {
            let digest = self.blob(layer.packed.clone());
            list.push(descriptor("layer.v1.tar", &digest, layer.packed.len(), ""));
        }
        let list = self.repeated(&list);
        let manifest = self.twisted(format!(r#"{{"schemaVersion":2,"layers":[{list}]}}"#));
        let platform = r#","platform":{"os":"linux","architecture":"amd64"}"#;
        let mut named = self.descriptor_of("manifest.v1+json", manifest, platform);
        for _ in 0..shape >> 1 & 7 {
            let index = self.twisted(format!(r#"{{"manifests":[{named}]}}"#));
            named = self.descriptor_of("index.v1+json", index, "");
        }
        let name = r#""annotations":{"org.opencontainers.image.ref.name":"latest"},"digest""#;
        let named = named.replacen(r#""digest""#, name, 1);
        let index = self.twisted(format!(r#"{{"manifests":[{named}]}}"#));
        self.files.push(("index.json".to_owned(), index.into_bytes()));
    }

    fn docker(&mut self, layers: &[Layer]) {
        let mut names = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            self.files.push((format!("{number}/layer.tar"), layer.packed.clone()));
            names.push(format!(r#""{number}/layer.tar""#));
        }
        let digests: Vec<_> = layers.iter().map(|l| format!(r#""sha256:{}""#, l.digest)).collect();
        let times = 1 << self.choices.below(12);
        let (names, digests) = (vec![names.join(","); times], vec![digests.join(","); times]);
        let (names, digests) = (names.join(","), digests.join(","));
        let config = self.twisted(format!(r#"{{"rootfs":{{"diff_ids":[{digests}]}}}}"#));
        self.files.push(("c.json".to_owned(), config.into_bytes()));
        let image = format!(r#"{{"Config":"c.json","RepoTags":["latest"],"Layers":[{names}]}}"#);
        let manifest = self.twisted(format!("[{image}]"));
        self.files.push(("manifest.json".to_owned(), manifest.into_bytes()));
    }

    fn repeated(&mut self, list: &[String]) -> String {
        vec![list.join(","); 1 << self.choices.below(12)].join(",")
    }

    fn blob(&mut self, bytes: Vec<u8>) -> String {
        let digest = sha256(&bytes);
        self.files.push((format!("blobs/sha256/{digest}"), bytes));
        digest
    }

    fn descriptor_of(&mut self, kind: &str, text: String, more: &str) -> String {
        let len = text.len();
        let digest = self.blob(text.into_bytes());
        descriptor(kind, &digest, len, more)
    }

    /// A text of which the program replaces parts.
    fn twisted(&mut self, text: String) -> String {
        let mut text = text;
        for _ in 0..self.choices.below(4) {
            let at = usize::from(self.choices.word()) % (text.len() + 1);
            let end = (at + self.choices.below(40)).min(text.len());
            let token = TOKENS[self.choices.below(TOKENS.len())];
            // The texts are ASCII, and a token may have been put there before.
            if text.is_char_boundary(at) && text.is_char_boundary(end) {
                text.replace_range(at..end, token);
            }
        }
        text
    }

    /// The files, some behind links.
    fn archive(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        let links = self.choices.byte();
        for (number, (name, bytes)) in std::mem::take(&mut self.files).iter().enumerate() {
            let name = name.as_bytes();
            match (links >> (number % 8)) & 1 {
                0 => tar::member(&mut out, b'0', name, b"", bytes),
                _ => {
                    let file = format!("f{number}");
                    tar::member(&mut out, b'0', file.as_bytes(), b"", bytes);
                    let kind = if links & 0x80 == 0 { b'1' } else { b'2' };
                    let target = if kind == b'1' { file } else { format!("../../{file}") };
                    tar::member(&mut out, kind, name, target.as_bytes(), b"");
                }
            }
        }
        tar::member(&mut out, b'2', b"round", b"round", b"");
        out.extend([0; 1024]);
        out
    }
}

fn descriptor(kind: &str, digest: &str, size: usize, more: &str) -> String {
    let kind = format!("application/vnd.oci.image.{kind}");
    format!(r#"{{"mediaType":"{kind}","digest":"sha256:{digest}","size":{size}{more}}}"#)
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
