//! Writes a new file system: wipes what was there, then blocks, then superblocks.
//!
//! Nothing is on the devices that anybody needs. So a chunk with parity is written in whole rows,
//! and nothing has to be read for its parity. Rows behind the last block stay as they are: nothing
//! in them is in use.

use super::build::Image;
use super::layout::FIRST_DEVICE;
use super::plan::{Plan, PlannedDevice};
use crate::Result;
use larder_format::superblock::Superblock;
use larder_format::{Logical, Physical, STRIPE_LEN};
use larder_volume::parity::{p_of, q_of};
use larder_volume::superblock::{SuperCopies, copies_within, write_superblocks};
use larder_volume::{ChunkMap, Device, MappedChunk, Stripe, VolumeError, VolumeResult};
use std::ops::Range;

/// Room that other formats use at both ends of a device.
const ENDS: u64 = 2 << 20;
/// Unit in which old bytes are searched and overwritten.
const WIPE_BLOCK: u64 = 4096;

/// Writes everything, and makes it durable.
pub(super) fn write(
    devices: &[&dyn Device],
    plan: &Plan,
    image: &Image,
    discard: bool,
    superblock: &dyn Fn(&PlannedDevice) -> Box<Superblock>,
) -> Result<()> {
    for device in devices {
        wipe(*device, discard)?;
    }
    write_blocks(devices, plan, image)?;
    for device in devices {
        flush(*device)?;
    }
    for (device, planned) in devices.iter().zip(&plan.devices).rev() {
        write_superblocks(*device, &superblock(planned), SuperCopies::All)?;
        flush(*device)?;
    }
    Ok(())
}

/// Wipes what was on the device. It writes nothing where there is nothing, so a sparse file stays
/// sparse.
///
/// # Errors
/// [`crate::Error::Volume`] when the device fails.
pub fn wipe(device: &dyn Device, discard: bool) -> Result<()> {
    let size = device.size();
    if discard && let Err(e) = device.discard(Physical(0), size) {
        tracing::debug!("discarding {} failed, going on: {e}", device.name());
    }
    zero(device, Physical(0)..Physical(ENDS.min(size)))?;
    for at in copies_within(size) {
        zero(device, at..at.plus(WIPE_BLOCK))?;
    }
    zero(device, Physical(size.saturating_sub(ENDS))..Physical(size))?;
    flush(device)
}

/// Writes zeros over what is not zero.
fn zero(device: &dyn Device, range: Range<Physical>) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let len = WIPE_BLOCK.min(range.end.0 - at.0);
        let block = &mut [0; WIPE_BLOCK as usize][..usize::try_from(len).expect("one block")];
        device.read_at(at, block).map_err(|e| io_error(device, "read", at, len, e))?;
        if block.iter().any(|b| *b != 0) {
            block.fill(0);
            device.write_at(at, block).map_err(|e| io_error(device, "write", at, len, e))?;
        }
        at = at.plus(len);
    }
    Ok(())
}

fn write_blocks(devices: &[&dyn Device], plan: &Plan, image: &Image) -> VolumeResult<()> {
    let map = ChunkMap::new();
    for chunk in plan.layout.chunks() {
        map.insert(chunk.clone())?;
    }
    for chunk in plan.layout.chunks() {
        let content = content(chunk, image);
        if chunk.profile().parity() > 0 {
            write_rows(devices, &map, chunk, content)?;
        } else {
            write_copies(devices, &map, chunk, &content)?;
        }
    }
    Ok(())
}

/// What a chunk holds, from its first byte on: blocks lie behind each other.
fn content(chunk: &MappedChunk, image: &Image) -> Vec<u8> {
    let inside = |at: Logical| chunk.start <= at && at < chunk.end();
    let blocks = image.blocks.iter().filter(|(at, _)| inside(*at));
    let mut content = Vec::new();
    for (at, block) in blocks {
        let from = usize::try_from(at.0 - chunk.start.0).expect("the trees are small");
        content.resize(content.len().max(from + block.len()), 0);
        content[from..from + block.len()].copy_from_slice(block);
    }
    content
}

fn write_copies(
    devices: &[&dyn Device],
    map: &ChunkMap,
    chunk: &MappedChunk,
    content: &[u8],
) -> VolumeResult<()> {
    let (mut at, mut rest) = (chunk.start, content);
    while !rest.is_empty() {
        let found = map.lookup(at, rest.len() as u64)?;
        let piece;
        (piece, rest) = rest.split_at(usize::try_from(found.len).expect("at most the rest"));
        at = at.plus(found.len);
        for stripe in found.stripes {
            write_at(devices, stripe, piece)?;
        }
    }
    Ok(())
}

/// Writes the rows that have blocks, with their parity.
fn write_rows(
    devices: &[&dyn Device],
    map: &ChunkMap,
    chunk: &MappedChunk,
    mut content: Vec<u8>,
) -> VolumeResult<()> {
    const ELEMENT: usize = STRIPE_LEN as usize;
    let stripes = u16::try_from(chunk.stripes.len()).expect("a chunk that was planned");
    let row = usize::from(chunk.profile().data_stripes(stripes)) * ELEMENT;
    content.resize(content.len().next_multiple_of(row), 0);
    for (n, bytes) in content.chunks(row).enumerate() {
        let at = chunk.start.plus((n * row) as u64);
        let (places, parity) = map.row_places(at).expect("a chunk with parity");
        let columns: Vec<&[u8]> = bytes.chunks(ELEMENT).collect();
        for (place, column) in places.iter().zip(&columns) {
            write_at(devices, *place, column)?;
        }
        let mut sum = vec![0; ELEMENT];
        for (which, place) in parity.iter().enumerate() {
            let of = if which == 0 { p_of } else { q_of };
            of(&columns, &mut sum);
            write_at(devices, *place, &sum)?;
        }
    }
    Ok(())
}

fn write_at(devices: &[&dyn Device], place: Stripe, bytes: &[u8]) -> VolumeResult<()> {
    let number = usize::try_from(place.device.0 - FIRST_DEVICE.0).expect("one of the devices");
    let device = devices[number];
    let written = device.write_at(place.at, bytes);
    written.map_err(|e| io_error(device, "write", place.at, bytes.len() as u64, e))
}

fn flush(device: &dyn Device) -> Result<()> {
    Ok(device.flush().map_err(|e| io_error(device, "flush", Physical(0), device.size(), e))?)
}

fn io_error(
    device: &dyn Device,
    op: &'static str,
    at: Physical,
    len: u64,
    source: std::io::Error,
) -> VolumeError {
    VolumeError::Io { device: device.name(), op, at, len, source }
}
