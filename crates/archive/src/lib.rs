//! Writing what an image holds as a tar, or as a container image in an OCI layout.
//!
//! The caller brings entries in the order of their paths, and the contents of files. This crate
//! hides the formats: which header says what (`tar`), how an ACL is written in a header (`acl`),
//! how a stream is compressed (`compress`), which files make a container image (`oci`), what a
//! layer of it has to say of the one below (`layer`).
//!
//! The same entries give the same bytes. Nothing of the host gets into them: no names of users, no
//! clock, no process.

mod acl;
mod compress;
mod layer;
mod oci;
mod tar;

pub use compress::{Compression, CompressionError, Compressor, Method};
pub use layer::{Difference, LayerCounts, LayerError, Surroundings};
pub use oci::{ImageConfig, Layer, LayerWriter, Layout, OciError, Platform, WrittenImage};
pub use tar::{Style, TarError, TarWriter};
