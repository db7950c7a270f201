//! What was read is written as a tar, and read again: it is the same.
//!
//! A tar of ours has no sockets, no flags, and one time of each entry. So these are not compared.
//! An ACL may come back in another order, as it was text in between.

use super::files::Held;
use super::options;
use super::stream::{self, Read};
use crate::hostile::tools::ask;
use larder_archive::{Style, TarError, TarWriter};
use larder_sources::{Attributes, Entry, Kind, LinkGroup, TreePath};
use std::collections::HashMap;

/// Trees of more bytes are not written.
const LARGE: u64 = 1 << 20;
/// The longest path that the reader takes, and a slash behind it.
const LONGEST_PATH: usize = 4095;

/// Writes and reads a tree in each style.
pub(super) fn again(read: &Read) {
    let size = |entry: &Entry| match entry.kind {
        Kind::File { size, .. } => size,
        _ => 0,
    };
    let all = read.entries.iter().map(size).fold(0, u64::saturating_add);
    let too_long = |entry: &Entry| entry.path.as_bytes().len() > LONGEST_PATH;
    let socket = |entry: &Entry| entry.kind == Kind::Socket;
    if all > LARGE || read.entries.iter().any(|entry| too_long(entry) || socket(entry)) {
        return;
    }
    for style in [Style::Archive, Style::Layer] {
        let Some(bytes) = ask("write a tar", 0, || written(read, style)) else { continue };
        let tar = Held::new(&bytes);
        let copy = stream::read(&[format!("tar:{}", tar.path())], &options(0));
        let copy = copy.expect("a tar of ours can be read");
        let (before, after) = (seen(read, style), seen(&copy, style));
        let names = |seen: &[Seen]| seen.iter().map(|seen| seen.path.clone()).collect::<Vec<_>>();
        assert_eq!(names(&before), names(&after), "hostile: other names in a tar of ours");
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(before, after, "hostile: not the same in a tar of ours");
        }
    }
}

/// A tar of the entries. `None` where a layer cannot have one of their names.
fn written(read: &Read, style: Style) -> Option<Vec<u8>> {
    let mut tar = TarWriter::new(Vec::new(), style);
    for entry in &read.entries {
        let mut contents = match &entry.kind {
            Kind::File { contents: Some(at), .. } => Some(read.sources.open(at).expect("contents")),
            _ => None,
        };
        match tar.entry(entry, contents.as_deref_mut().map(|contents| contents as _)) {
            Err(TarError::Whiteout) if style == Style::Layer => return None,
            done => done.expect("memory"),
        };
    }
    Some(tar.finish().expect("memory"))
}

/// An entry as it is compared.
#[derive(Debug, PartialEq)]
struct Seen {
    path: TreePath,
    attributes: Attributes,
    kind: Kind,
    data: Vec<u8>,
    first_name: TreePath,
}

fn seen(read: &Read, style: Style) -> Vec<Seen> {
    let mut first: HashMap<LinkGroup, TreePath> = HashMap::new();
    let one = |entry: &Entry| {
        let Entry { path, attributes, kind, links } = entry.clone();
        let first_name = links.map(|group| first.entry(group).or_insert(path.clone()).clone());
        let data = match &kind {
            Kind::File { size, contents: Some(at) } => {
                let mut contents = read.sources.open(at).expect("contents");
                stream::bytes(&mut *contents, 0..*size)
            }
            _ => Vec::new(),
        };
        let kind = match kind {
            Kind::File { size, .. } => Kind::File { size, contents: None },
            kind => kind,
        };
        let first_name = first_name.unwrap_or(path.clone());
        Seen { path, attributes: kept(attributes, style), kind, data, first_name }
    };
    read.entries.iter().map(one).collect()
}

fn kept(mut attributes: Attributes, style: Style) -> Attributes {
    if style == Style::Archive {
        attributes.xattrs.retain(|(name, _)| !name.starts_with(b"system.posix_acl"));
    }
    let Attributes { uid, gid, permissions, modified, xattrs, .. } = attributes;
    Attributes { uid, gid, permissions, modified, xattrs, ..Attributes::default() }
}
