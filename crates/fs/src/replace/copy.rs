//! The copy: along the device, from front to back.
//!
//! What is copied at once belongs to one version of the extent tree, and the version lives until
//! all of it is written. Pieces are read and written by a few threads, so that both devices have
//! something to do.

use super::control::ReplaceControl;
use super::gather::{Gather, Trouble};
use super::plan::{Piece, What, pieces};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::lock::{self, Mutex};
use crate::scrub::content::{Content, View};
use crate::side_by_side::side_by_side;
use larder_format::{DeviceId, Physical};
use larder_volume::{Device, MappedChunk, Strip, Stripe, TransferMemory, VolumeError};
use std::sync::Arc;

/// Bytes of the device that are looked at together.
const STRIP: u64 = 8 << 20;
/// Pieces that are copied at the same time.
const WORKERS: usize = 4;

/// What is copied.
pub(super) struct Copying<'a> {
    pub(super) core: &'a Core,
    pub(super) control: &'a ReplaceControl,
    pub(super) source: DeviceId,
    pub(super) target: Arc<dyn Device>,
    /// Is the source read only where nothing else has its bytes?
    pub(super) avoid: bool,
    /// That of pieces that were copied.
    pub(super) memory: Mutex<Vec<TransferMemory>, lock::ReplaceMemory>,
}

/// A stripe on the source.
struct Part {
    chunk: MappedChunk,
    /// Its number in the chunk.
    stripe: usize,
    range: (Physical, u64),
}

impl Copying<'_> {
    /// Copies what lies from a place of the device on.
    ///
    /// # Errors
    /// `Busy` when it is told to end; the target's; reading trees.
    pub(super) fn run(&self, from: Physical) -> Result<()> {
        let map = self.core.volume.map();
        // What comes later is written to both devices.
        let taken = map.taken_on(self.source);
        // Linux that is told to end in the midst of a chunk may say that it is at the chunk's end.
        let last = taken.iter().rev().find(|(at, ..)| *at < from);
        let from = last.map_or(from, |(at, ..)| *at);
        for (at, len, chunk) in taken {
            if at.plus(len) <= from {
                continue;
            }
            let is_here = |s: &Stripe| s.device == self.source && s.at == at;
            // A chunk that is gone held nothing any more.
            let Some(chunk) = map.chunk_at(chunk) else { continue };
            let Some(stripe) = chunk.stripes.iter().position(is_here) else { continue };
            self.part(&Part { chunk, stripe, range: (at, len) }, from)?;
        }
        let end = self.control.with(|state| state.size);
        self.reached(Physical(end), Physical(end));
        Ok(())
    }

    fn part(&self, part: &Part, from: Physical) -> Result<()> {
        let (start, len) = part.range;
        let mut next = from.0.saturating_sub(start.0);
        loop {
            let map = self.core.volume.map();
            let is_there = map.chunk_at(part.chunk.start).as_ref() == Some(&part.chunk);
            let Some(strip) = part.chunk.strip(next..next + STRIP).filter(|_| is_there) else {
                self.reached(start.plus(len), start.plus(len));
                // A power cut does not throw it back further than to here.
                return self.core.commit_now();
            };
            self.control.check()?;
            let on_device = strip.on_device(part.stripe, 0).at;
            self.reached(on_device, start.plus(len));
            self.strip(strip, part.stripe)?;
            next = strip.end();
        }
    }

    /// Everything in front of a place is on the target.
    fn reached(&self, copied: Physical, copying: Physical) {
        self.core.replacement.set_cursor(copied, copying);
        self.control.with(|state| state.cursor = copied.0);
    }

    fn strip(&self, strip: Strip<'_>, stripe: usize) -> Result<()> {
        let core = self.core;
        // It lives until all pieces are written.
        let view = View::new(core);
        let content = Content::of(core, &view, &strip.addresses())?;
        let pieces = pieces(&strip, stripe, &content);
        let source = self.source;
        // It may fail at any time.
        let volume = &core.volume;
        let is_old = !volume.takes_writes(source) || volume.behind().contains(&source);
        let avoid = self.avoid || is_old;
        let gather = Gather { core, strip, content: &content, source, avoid };
        side_by_side(&pieces, WORKERS, |piece| self.piece(&gather, stripe, piece))?;
        drop(view);
        Ok(())
    }

    fn piece(&self, gather: &Gather<'_>, stripe: usize, piece: &Piece) -> Result<()> {
        let len = piece.range.end - piece.range.start;
        let mut bytes = self.memory.lock().pop().unwrap_or_default();
        bytes.resize(usize::try_from(len).expect("a piece lies in memory"));
        let in_place = matches!(piece.what, What::Data { in_place: true, .. });
        let _kept_out = in_place.then(|| self.core.in_place.write());
        let trouble = gather.fill(&piece.range, &piece.what, &mut bytes);
        self.write(gather.strip.on_device(stripe, piece.range.start).at, &bytes)?;
        self.memory.lock().push(bytes);
        self.count(trouble, len);
        Ok(())
    }

    fn count(&self, trouble: Trouble, copied: u64) {
        self.control.with(|state| {
            state.copied += copied;
            state.corrected += trouble.corrected;
            state.unreadable += trouble.unreadable;
        });
        if trouble.unreadable > 0 {
            self.core.replacement.change(|item| item.unreadable += trouble.unreadable);
        }
    }

    fn write(&self, at: Physical, bytes: &[u8]) -> Result<()> {
        self.target.write_at(at, bytes).map_err(|source| {
            self.control.with(|state| state.write_errors += 1);
            self.core.replacement.change(|item| item.write_errors += 1);
            let (device, len) = (self.target.name(), bytes.len() as u64);
            let error = VolumeError::Io { device, op: "write", at, len, source };
            self.core.volume.target_has_failed(&error);
            Error::from(error)
        })
    }
}
