//! Hostile input: what fuzzers do, as functions on bytes, so that tests on a stable compiler do
//! exactly the same.
//!
//! Each body takes the bytes of an input and returns. It must never panic, run for ever or take
//! memory without bound. The fuzz targets (`fuzz/`) call the bodies with the inputs of a fuzzer;
//! `tests/hostile.rs` calls them with the inputs that were kept.
//!
//! - [`formats`]: bytes to types — superblock, system chunks, nodes, items, compressed streams;
//! - [`mutate`]: an input is a program that changes a small real image ([`seeds`], mapped by
//!   [`survey`]) in the format's own words, with checksums put right;
//! - [`exercise`]: what a victim does with such an image — mounts it, reads everything, changes it
//!   ([`changes`]) — under [`limits`];
//! - [`tools`]: checking such an image, and restoring what is left of it; [`printers`]: printing
//!   what it holds;
//! - [`requests`]: messages to a mount that no kernel would send;
//! - [`sources`]: what an image is built of — archives, container images, manifests;
//! - [`stream`]: send streams.

pub mod changes;
pub mod choices;
pub mod device;
pub mod exercise;
pub mod formats;
pub mod leaf;
pub mod limits;
pub mod mutate;
pub mod printers;
pub mod requests;
pub mod seeds;
pub mod sources;
pub mod stream;
pub mod survey;
pub mod tools;

/// A fuzz target: its name, which is that of its corpus, and its body.
pub type Target = (&'static str, fn(&[u8]));

/// Every target but `printers`, which needs the command besides.
pub const TARGETS: [Target; 15] = [
    ("superblock", formats::superblock),
    ("sys_chunks", formats::sys_chunks),
    ("node", formats::node),
    ("item", formats::any_item),
    ("compressed", formats::compressed),
    ("image", image),
    ("check", check),
    ("restore", restore),
    ("requests", messages),
    ("tar", sources::archive),
    ("container", sources::container),
    ("manifest", sources::manifest),
    ("source_words", sources::words),
    ("built_image", sources::image),
    ("stream", stream::stream),
];

/// Mounts, reads and writes the image that the input makes of a seed.
pub fn image(input: &[u8]) {
    let mutated = mutate::mutate(input);
    exercise::exercise(&mutated.image, mutated.script, mutated.variant);
}

/// Checks the image that the input makes of a seed.
pub fn check(input: &[u8]) {
    let mutated = mutate::mutate(input);
    let _ = tools::check(&mutated.image, mutated.script);
}

/// Restores what the input leaves of a seed.
pub fn restore(input: &[u8]) {
    let mutated = mutate::mutate(input);
    let _ = tools::salvage(&mutated.image, mutated.script);
}

/// Sends the messages that the input stands for to a mount.
pub fn messages(input: &[u8]) {
    let _ = requests::requests(input);
}
