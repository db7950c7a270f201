//! Hostile sources: archives, container images, manifests and words of the command line, which a
//! stranger made.
//!
//! An input is a program that makes a source in the words of its own format: `tar` makes members
//! with right checksums, `container` descriptors with right digests. Otherwise a fuzzer would
//! spend its time on the checksum. A manifest is text, so the input is the manifest itself.
//!
//! `stream` judges what comes of a source, and `again` writes it as a tar and reads that. An
//! image is made of it by `built`, and has to satisfy `larder check`. `words` has what comes
//! from the command line.

mod again;
mod built;
mod container;
mod files;
mod stream;
mod tar;
mod words;

pub use words::words;

use super::choices::Choices;
use files::{Beside, Held};
use larder_sources::{Options, Pattern, Rule, Time};

/// Bytes that an archive may unpack to.
const MOST_UNPACKED: u64 = 4 << 20;

/// Options that the streams are made with.
fn options(choice: u8) -> Options {
    let bit = |n: u8| choice & 1 << n != 0;
    let pattern = |text| Pattern::new(text).expect("a pattern");
    let mut options = Options { most_unpacked: MOST_UNPACKED, ..Options::default() };
    if bit(0) {
        options.exclude = vec![pattern("b/c"), pattern("*.o"), pattern("d/")];
    }
    if bit(1) {
        options.rules = vec![
            Rule::chmod("a*=u+s,go=rX").expect("a rule"),
            Rule::chown("**/c=7:8").expect("a rule"),
            Rule::xattr("b=user.b=0x00").expect("a rule"),
        ];
    }
    options.owner = bit(2).then_some((1000, 100));
    options.modified = bit(3).then_some(Time { seconds: -1, nanoseconds: 5 });
    options.latest = bit(4).then_some(Time { seconds: 1_000_000_000, nanoseconds: 0 });
    options
}

/// An archive, alone or over another one, and written again as a tar.
pub fn archive(input: &[u8]) {
    let mut choices = Choices::new(input);
    let choice = choices.byte();
    let options = options(choice);
    let lower = (choice & 0x80 != 0).then(|| {
        let len = usize::from(choices.byte());
        Held::new(&tar::archive(choices.bytes(len)))
    });
    let upper = Held::new(&tar::archive(choices.rest()));
    let mut sources = vec![format!("tar:{}", upper.path())];
    if let Some(lower) = &lower {
        sources.insert(0, format!("{}:/b", lower.path()));
    }
    if let Some(read) = stream::read(&sources, &options) {
        again::again(&read);
    }
}

/// A container image: an OCI layout in a tar, or what `docker save` writes.
pub fn container(input: &[u8]) {
    let mut choices = Choices::new(input);
    let options = options(choices.byte());
    let made = container::container(&mut choices);
    let archive = Held::new(&made.archive);
    let source = format!("{}:{}:{}", made.prefix, archive.path(), made.reference);
    stream::read(&[source], &options);
}

/// A manifest over an archive, in our language or in that of mtree: what follows the first byte.
pub fn manifest(input: &[u8]) {
    let (&choice, text) = input.split_first().unwrap_or((&0, &[]));
    let prefix = if choice & 0x40 == 0 { "manifest" } else { "mtree" };
    let below = Held::new(&tar::everything());
    let beside = Beside::new(text);
    let place = if choice & 0x20 == 0 { "" } else { ":/a" };
    let sources = [below.path().to_owned(), format!("{prefix}:{}{place}", beside.path())];
    stream::read(&sources, &options(choice));
}

/// An image that is built of an archive, and of a manifest over it.
pub fn image(input: &[u8]) {
    let mut choices = Choices::new(input);
    let (choice, how) = (choices.byte(), choices.byte());
    let len = usize::from(choices.byte());
    let text = choices.bytes(len);
    let archive = Held::new(&tar::archive(choices.rest()));
    let beside = Beside::new(text);
    let mut sources = vec![archive.path().to_owned()];
    if !text.is_empty() {
        sources.push(format!("manifest:{}", beside.path()));
    }
    if let Some(read) = stream::read(&sources, &options(choice)) {
        built::built(&read, how);
    }
}

#[cfg(test)]
mod tests;
