//! Long reads of files that are spread over several devices.
//!
//! A long read is cut where its bytes go on in another place. All devices work on their parts at
//! the same time, and what lies side by side on a device is one transfer there: elements of rows
//! that follow each other mostly do. Where an element has to be worked out, the rest of its row is
//! mostly wanted as well, and is read once for both.
//!
//! Short reads, and those of one device, take the ordinary way, so that the machine's page cache
//! reads ahead for them. With several devices the caller is what reads ahead. What lies ahead on a
//! device may be parity, or the other mirror's turn, and would be read for nothing.

use super::together::{self, Reads};
use super::{ErrorKind, Volume, missing, usize_from};
use crate::device::Read;
use crate::error::{VolumeError, VolumeResult};
use crate::map::{Row, Stripe, Way};
use crate::parity;
use larder_format::Logical;
use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Reads from this length on are long.
pub(super) const LONG: usize = 256 << 10;

/// A part of a read.
struct Part {
    /// Which bytes of the caller's buffer.
    range: Range<usize>,
    source: Source,
}

enum Source {
    /// As it is stored there.
    Stored(Stripe),
    /// From the rest of its row.
    Rebuilt(Box<Row>),
}

/// What is read beside what the caller wants.
struct Extra {
    place: Stripe,
    bytes: Vec<u8>,
}

impl Volume {
    /// As [`Volume::read`], with all devices at the same time.
    pub(super) fn read_together(
        &self,
        at: Logical,
        buf: &mut [u8],
        copy: usize,
    ) -> VolumeResult<()> {
        let parts = self.cut_read(at, buf.len(), copy)?;
        let mut extras = extras_of(&parts);
        let mut places: Vec<(Stripe, &mut [u8])> = Vec::with_capacity(parts.len() + extras.len());
        let mut rest = &mut *buf;
        for part in &parts {
            let (bytes, more) = std::mem::take(&mut rest).split_at_mut(part.range.len());
            if let Source::Stored(place) = part.source {
                places.push((place, bytes));
            }
            rest = more;
        }
        places.extend(extras.iter_mut().map(|extra| (extra.place, &mut extra.bytes[..])));
        let mut shares = self.share_out(places)?;
        if let Some(error) = self.read_shares(&mut shares) {
            return Err(error);
        }
        drop(shares);
        for part in &parts {
            if let Source::Rebuilt(row) = &part.source {
                let bytes = rebuilt(row, part.range.len(), &parts, buf, &extras);
                buf[part.range.clone()].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }

    fn cut_read(&self, at: Logical, len: usize, copy: usize) -> VolumeResult<Vec<Part>> {
        let (mut parts, mut done) = (Vec::new(), 0);
        while done < len {
            let at = at.plus(done as u64);
            let found = self.in_one_turn(at, (len - done) as u64)?;
            let way = self.way_of(at, &found, copy.min(found.ways - 1));
            let source = match found.stripes.get(way) {
                Some(place) => Source::Stored(*place),
                None => {
                    let row = self.map.row(at, way);
                    let row = row.ok_or(VolumeError::Unmapped { at, len: found.len })?;
                    Source::Rebuilt(Box::new(row))
                }
            };
            let end = done + usize_from(found.len);
            parts.push(Part { range: done..end, source });
            done = end;
        }
        Ok(parts)
    }

    /// Has all devices read their shares. Returns the last error after all have ended.
    fn read_shares(&self, shares: &mut [Reads<'_>]) -> Option<VolumeError> {
        let ended = together::read(self.rings(), shares);
        let mut error = None;
        for (Reads { member, reads }, results) in shares.iter().zip(ended) {
            for (read, result) in reads.iter().zip(results) {
                member.counters.reads.fetch_add(1, Relaxed);
                member.counters.read_bytes.fetch_add(read.len(), Relaxed);
                if let Err(e) = result {
                    member.went_wrong(ErrorKind::Read);
                    error = Some(member.error("read", read.at, read.len(), e));
                }
            }
        }
        error
    }

    /// Says what each device has to read.
    fn share_out<'b>(
        &self,
        mut places: Vec<(Stripe, &'b mut [u8])>,
    ) -> VolumeResult<Vec<Reads<'b>>> {
        places.sort_unstable_by_key(|(place, _)| (place.device, place.at));
        let mut shares: Vec<Reads<'b>> = Vec::new();
        for (place, bytes) in places {
            if shares.last().is_none_or(|share| share.member.id != place.device) {
                let member = self.member(place.device);
                let member = member.ok_or_else(|| missing(place, bytes.len() as u64))?;
                shares.push(Reads { member, reads: Vec::new() });
            }
            let Some(Reads { reads, .. }) = shares.last_mut() else { continue };
            match reads.last_mut() {
                Some(last) if last.at.plus(last.len()) == place.at => {
                    last.into.push(IoSliceMut::new(bytes));
                }
                _ => reads.push(Read { at: place.at, into: vec![IoSliceMut::new(bytes)] }),
            }
        }
        Ok(shares)
    }
}

/// What has to be read so that parts can be worked out, and is in no other part.
fn extras_of(parts: &[Part]) -> Vec<Extra> {
    let mut extras: Vec<Extra> = Vec::new();
    for part in parts {
        let Source::Rebuilt(row) = &part.source else { continue };
        let len = part.range.len();
        for place in row.needed() {
            if within(parts, *place, len).is_none() {
                extras.push(Extra { place: *place, bytes: vec![0; len] });
            }
        }
    }
    extras
}

/// Where the caller's buffer gets the bytes of a place.
fn within(parts: &[Part], place: Stripe, len: usize) -> Option<Range<usize>> {
    parts.iter().find_map(|part| {
        let Source::Stored(stored) = part.source else { return None };
        let into = place.at.0.checked_sub(stored.at.0).map(|into| into as usize)?;
        let here = stored.device == place.device && into + len <= part.range.len();
        here.then(|| part.range.start + into..part.range.start + into + len)
    })
}

/// Works a part out from what was read.
fn rebuilt(row: &Row, len: usize, parts: &[Part], buf: &[u8], extras: &[Extra]) -> Vec<u8> {
    let mut out = vec![0; len];
    let Way::Rebuilt(by) = row.way else { return out };
    let read = |element, into: &mut [u8]| {
        let place = row.place(element);
        let bytes = match within(parts, place, len) {
            Some(range) => &buf[range],
            None => {
                let extra = extras.iter().find(|e| e.place == place && e.bytes.len() == len);
                &extra.expect("it was read").bytes[..]
            }
        };
        into.copy_from_slice(bytes);
        Ok::<(), std::convert::Infallible>(())
    };
    let Ok(()) = parity::rebuild(row.column, by, row.columns.len(), &mut out, read);
    out
}
