//! Compressed data, with [`crate::Options::data`]: can it be unpacked?
//!
//! Checksums are over the packed bytes, so a stream that was packed wrongly — by a program with a
//! bug, in bad memory — has the right checksum and is lost all the same. Each extent is unpacked
//! once, from the first copy from which that works, however many files and snapshots use it, and
//! named with the first file that was met. A stream may be shorter than the extent says: as in
//! Linux, the rest reads as zeros.
//!
//! Such extents are read a second time here, after their checksums: only files know what a checksum
//! is for.

use crate::finding::{Finding, Kind};
use crate::source::Edge;
use crate::world::Pass;
use larder_codec::decompress;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, InlineExtent};
use larder_format::{Key, LogicalRange, MAX_COMPRESSED_EXTENT};

/// Unpacks what a file extent item holds itself.
pub(crate) fn inline(pass: &Pass<'_>, edge: &Edge, key: Key, extent: &InlineExtent<'_>) {
    let Some(room) = buffer(extent.ram_bytes).filter(|_| extent.compression != Compression::None)
    else {
        return;
    };
    if pass.data.is_some()
        && let Err(e) = unpack(extent.compression, extent.data, room)
    {
        let what = format!("{} bytes that stand in the item: {e}", extent.data.len());
        pass.add(|| Finding::new(Kind::DataUnpack, what).tree(edge.tree).key(key).address(edge.at));
    }
}

/// Unpacks the extent that a file extent item refers to, if that was not done yet.
pub(crate) fn stored(pass: &Pass<'_>, edge: &Edge, key: Key, extent: &ExtentRecord) {
    let (at, len) = (extent.disk_bytenr, extent.disk_num_bytes);
    let Some(data) = pass.data else { return };
    if extent.compression == Compression::None
        || extent.kind != ExtentKind::Regular
        || len > MAX_COMPRESSED_EXTENT
        || !data.unpacked.insert(at.0)
    {
        return;
    }
    let (volume, meter) = (&pass.world.source.volume, pass.world.meter);
    let mut packed = vec![0; len as usize];
    let mut why = None;
    // What cannot be read was reported with the checksums.
    for copy in 0..volume.copies(at).unwrap_or(0) {
        meter.expect(len);
        meter.read(len);
        if volume.read(at, &mut packed, copy).is_err() {
            continue;
        }
        let Some(room) = buffer(extent.ram_bytes) else { return };
        match unpack(extent.compression, &packed, room) {
            Ok(()) => return,
            Err(e) => why = Some(e),
        }
    }
    let Some(why) = why else { return };
    let what = format!("{len} bytes at {at}, which should become {}: {why}", extent.ram_bytes);
    let follows = data.is_bad(LogicalRange::new(at, len));
    pass.add(|| {
        let finding = Finding::new(Kind::DataUnpack, what).tree(edge.tree).key(key).address(at);
        finding.follow_up_if(follows)
    });
}

/// Room for what a stream unpacks to; none if it says more than the format allows.
fn buffer(len: u64) -> Option<Vec<u8>> {
    (len <= MAX_COMPRESSED_EXTENT).then(|| vec![0; len as usize])
}

fn unpack(
    method: Compression,
    packed: &[u8],
    mut room: Vec<u8>,
) -> Result<(), larder_codec::CodecError> {
    decompress(method, packed, &mut room)
}
