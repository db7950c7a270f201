//! An image that is built of what was read: `larder check` finds nothing in it.

use super::stream::Read;
use crate::hostile::tools::{self, ask};
use crate::image::Image;
use larder_build::{
    BoxError, BuildOptions, Compress, Error, ImageSize, Output, Place, Silent, TreeInput, build,
};
use larder_format::CsumType;
use larder_fs::Timestamp;
use larder_fs::mkfs::{Features, Profile};
use larder_sources::{Entry, Kind};

/// Trees with more to store are not built.
const LARGE: u64 = 8 << 20;
/// What the loader is told to use, and the buffers of its one thread.
const MEMORY: usize = 64 << 20;

fn options(how: u8) -> BuildOptions {
    let packing = [None, Some("zstd:1"), Some("lzo"), Some("zlib:1")][usize::from(how & 3)];
    let mixed = how & 4 != 0;
    BuildOptions {
        uuid: Some([7; 16]),
        time: Some(Timestamp { sec: 1_700_000_000, nsec: 0 }),
        features: Features { mixed, ..Features::default() },
        metadata: (how & 8 == 0).then_some(Profile::Single),
        data: (how & 8 == 0).then_some(Profile::Single),
        csum: if how & 16 == 0 { CsumType::Crc32c } else { CsumType::XxHash64 },
        nodesize: (how & 32 == 0).then_some(4096),
        compress: packing
            .map(|packing| Compress { packing: packing.parse().expect("a method"), force: true }),
        dedupe: how & 64 != 0,
        size: if how & 128 == 0 { ImageSize::Auto } else { ImageSize::Shrink { align: 4096 } },
        memory: 16 << 20,
        threads: Some(1),
        ..BuildOptions::default()
    }
}

/// Builds and checks an image.
pub(super) fn built(read: &Read, how: u8) {
    if stored(read) > LARGE {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("image");
    let open = |at: &_| read.sources.open(at).map_err(BoxError::from);
    let entries = read.entries.iter().cloned().map(Ok);
    let tree = TreeInput {
        place: Place::Top,
        read_only: false,
        default: false,
        snapshot_of: None,
        inner: Vec::new(),
        entries: Box::new(entries),
    };
    let output = Output::File { path: path.clone(), force: false };
    let made = ask("build", MEMORY, || build(&output, vec![tree], &open, &options(how), &Silent));
    let report = match made {
        Ok(report) => report,
        // An attribute may be too long for a leaf, an inode may have too many names.
        Err(error @ Error::Entry { .. }) => {
            assert!(!path.exists(), "hostile: an image in spite of an error");
            return assert!(!error.to_string().chars().any(char::is_control), "hostile: {error:?}");
        }
        Err(error) => panic!("hostile: no image: {error}"),
    };
    let image = Image::from_file(&path).expect("an image");
    assert_eq!(report.names + 1, read.entries.len() as u64, "hostile: names got lost");
    let report = tools::check(&image, 0).expect("an image of ours can be checked");
    assert!(report.is_clean(), "hostile: {:#?}", report.findings);
}

/// Bytes of all files, holes left out.
fn stored(read: &Read) -> u64 {
    let of = |entry: &Entry| {
        let Kind::File { contents: Some(at), .. } = &entry.kind else { return 0 };
        let parts = read.sources.open(at).and_then(|mut contents| contents.data());
        parts.expect("parts of a file").iter().map(|part| part.end - part.start).sum()
    };
    read.entries.iter().map(of).fold(0, u64::saturating_add)
}
