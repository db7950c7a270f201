//! Writing: to every device that holds a range, all at the same time. What has parity is put
//! together by `rows`.
//!
//! A transfer that a device refuses costs a copy. As long as other devices have the bytes, the
//! write is good: the device is marked as **failed**, and nothing is written to it from then on.
//! Its copies are read last. The same holds for superblocks, and for flushes as long as it has
//! nothing that only it has (`unflushed`). So a failed device keeps an old superblock, by which it
//! is known as stale when the file system is opened next.
//!
//! Where no other device has the bytes, the caller gets the error, and the device counts as before:
//! whether to go on is for the layers above to say. A device that is behind gets every write. But
//! it lacks what was written before, so a device that fails is not left out for its sake.

use super::rows::{Fill, Piece};
use super::target::Written;
use super::together::{self, Share};
use super::unflushed::Moment;
use super::{ErrorKind, Member, Volume, no_member};
use crate::device::Write;
use crate::error::{VolumeError, VolumeResult};
use crate::file::overlap::Rings;
use crate::map::{MappedChunk, Stripe};
use crate::superblock::{self, SuperCopies};
use larder_format::superblock::Superblock;
use larder_format::{DeviceId, Logical, Physical, SUPER_OFFSETS};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// A part of a write that lies in one place of one device.
#[derive(Clone, Debug)]
pub(super) struct Transfer<'a> {
    /// The chunk that it is a part of.
    pub(super) chunk: Logical,
    pub(super) stripe: Stripe,
    /// Which write it belongs to.
    pub(super) of: usize,
    pub(super) data: Cow<'a, [IoSlice<'a>]>,
}

impl Volume {
    /// Writes `data` to all copies.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when part of the range is in no chunk; [`VolumeError::Io`] when
    /// bytes reached no device that may be lost: any part of any copy may have been written.
    pub fn write(&self, at: Logical, data: &[u8]) -> VolumeResult<()> {
        self.write_vectored(at, &[IoSlice::new(data)])
    }

    /// Writes several buffers that lie behind each other, beginning at `at`, to all copies.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub fn write_vectored(&self, at: Logical, data: &[IoSlice<'_>]) -> VolumeResult<()> {
        self.write_batch(&[(at, data)]).pop().unwrap_or(Ok(()))
    }

    /// Writes several ranges that do not touch each other to all copies, all in flight together. A
    /// result for each, as of [`Volume::write`].
    ///
    /// With parity, the rest of the rows is read, so that their parity stays right. A crash in the
    /// midst, together with the loss of a device, costs what else lies in these rows.
    pub fn write_batch(&self, writes: &[(Logical, &[IoSlice<'_>])]) -> Vec<VolumeResult<()>> {
        self.write_ranges(writes, Fill::Read)
    }

    /// As [`Volume::write_batch`], where nothing of value lies in the rows of these ranges beside
    /// them: with parity, the rest of the rows is overwritten with zeros, and nothing is read.
    pub fn write_fresh(&self, writes: &[(Logical, &[IoSlice<'_>])]) -> Vec<VolumeResult<()>> {
        self.write_ranges(writes, Fill::Zeros)
    }

    fn write_ranges(
        &self,
        writes: &[(Logical, &[IoSlice<'_>])],
        fill: Fill,
    ) -> Vec<VolumeResult<()>> {
        let to = self.written();
        let mut results: Vec<VolumeResult<()>> = writes.iter().map(|_| Ok(())).collect();
        let mut transfers = Vec::with_capacity(2 * writes.len());
        let mut pieces = Vec::new();
        for (n, (at, data)) in writes.iter().enumerate() {
            let before = (transfers.len(), pieces.len());
            if let Err(error) = self.cut(&to, *at, data, n, &mut transfers, &mut pieces) {
                transfers.truncate(before.0);
                pieces.truncate(before.1);
                results[n] = Err(error);
            }
        }
        if !transfers.is_empty() {
            for (of, error) in self.transfer(&to, &transfers) {
                results[of] = Err(error);
            }
        }
        if !pieces.is_empty() {
            for (of, error) in self.write_pieces(&to, pieces, fill) {
                results[of] = Err(error);
            }
        }
        results
    }

    /// Cuts a write into transfers, and into pieces where there is parity. A failed device gets no
    /// transfer while others have the bytes.
    fn cut<'a>(
        &self,
        to: &Written,
        at: Logical,
        data: &'a [IoSlice<'_>],
        of: usize,
        transfers: &mut Vec<Transfer<'a>>,
        pieces: &mut Vec<Piece<'a>>,
    ) -> VolumeResult<()> {
        let len = data.iter().map(|d| d.len() as u64).sum::<u64>();
        let mut done = 0;
        while done < len {
            let found = self.map.lookup(at.plus(done), len - done)?;
            let data = if found.len == len {
                Cow::Borrowed(data)
            } else {
                Cow::Owned(part(data, done..done + found.len))
            };
            if found.has_parity() {
                pieces.push(Piece { at: at.plus(done), len: found.len, of, data });
                done += found.len;
                continue;
            }
            let takes_none = |s: &Stripe| to.gets_nothing(s.device);
            let any_takes = !found.stripes.iter().all(takes_none);
            for stripe in found.stripes {
                let is_spared = any_takes && takes_none(&stripe);
                let transfer = Transfer { chunk: found.chunk, stripe, of, data: data.clone() };
                push(to, transfer, is_spared, transfers)?;
            }
            done += found.len;
        }
        Ok(())
    }

    /// Carries transfers out, and returns the writes of which bytes are on no device that counts.
    pub(super) fn transfer<'a>(
        &self,
        to: &Written,
        transfers: &'a [Transfer<'a>],
    ) -> Vec<(usize, VolumeError)> {
        let mut busy: Vec<(&Member, Vec<&Transfer<'_>>)> = Vec::new();
        for member in to.all() {
            let mine: Vec<_> = transfers.iter().filter(|t| t.stripe.device == member.id).collect();
            if !mine.is_empty() {
                busy.push((member, mine));
            }
        }
        let shares: Vec<Share<'_, '_>> =
            busy.iter().map(|(member, mine)| share_of(member, mine)).collect();
        let ended = together::write(self.rings(), &shares);
        let mut refused = Vec::new();
        for ((share, (_, mine)), results) in shares.iter().zip(&busy).zip(ended) {
            for (transfer, error) in self.ended(share, mine, results) {
                refused.push((share.member, transfer, error));
            }
        }
        if refused.is_empty() { Vec::new() } else { self.judge(refused) }
    }

    /// Counts what a device has written. Returns what it has not.
    fn ended<'t, 'a>(
        &self,
        share: &Share<'_, '_>,
        transfers: &[&'t Transfer<'a>],
        results: Vec<io::Result<()>>,
    ) -> Vec<(&'t Transfer<'a>, VolumeError)> {
        let member = share.member;
        let mut failed = Vec::new();
        for ((write, transfer), result) in share.writes.iter().zip(transfers).zip(results) {
            member.counters.writes.fetch_add(1, Relaxed);
            member.counters.written_bytes.fetch_add(write.len(), Relaxed);
            match result {
                Ok(()) => {
                    member.unflushed.note(transfer.chunk);
                    self.completed.fetch_add(write.len(), Relaxed);
                }
                Err(e) => {
                    member.went_wrong(ErrorKind::Write);
                    failed.push((*transfer, member.error("write", write.at, write.len(), e)));
                }
            }
        }
        failed
    }

    /// Which of the transfers that were refused cost more than a copy? Devices that cost no more
    /// are marked.
    fn judge(
        &self,
        refused: Vec<(&Member, &Transfer<'_>, VolumeError)>,
    ) -> Vec<(usize, VolumeError)> {
        let mut refusing: Vec<DeviceId> = refused.iter().map(|(m, ..)| m.id).collect();
        refusing.dedup();
        let is_gone = |id| refusing.contains(&id) || self.member(id).is_none_or(|m| m.is_no_help());
        let is_lost = |t: &Transfer<'_>| {
            let chunk = self.map.chunk_on(t.stripe);
            t.stripe.device != DeviceId::REPLACE_TARGET
                && chunk.is_none_or(|start| self.map.is_lost(start, &is_gone))
        };
        let (lost, spared): (Vec<_>, Vec<_>) =
            refused.into_iter().partition(|(_, t, _)| is_lost(t));
        for (member, _, error) in &spared {
            if !lost.iter().any(|(other, ..)| other.id == member.id) {
                self.mark_failed(member, error);
            }
        }
        lost.into_iter().map(|(_, t, error)| (t.of, error)).collect()
    }

    /// Nothing is written to this device any more.
    pub(super) fn mark_failed(&self, member: &Member, why: &VolumeError) {
        if !member.failed.swap(true, Relaxed) {
            self.uneven.store(true, Relaxed);
            self.failures.fetch_add(1, Release);
            tracing::error!(device = %member.device.name(), id = %member.id, "the device has \
                failed, and the file system goes on without it: {why}");
        }
    }

    /// Makes every write durable that had completed when the call began, on all devices. A failed
    /// device is asked as well if it has taken what no other device has (`unflushed`).
    ///
    /// # Errors
    /// The first device's error, after every device was flushed, unless the others have everything
    /// that lies on those that failed. A failed flush is final ([`crate::Device::flush`]).
    pub fn flush(&self) -> VolumeResult<()> {
        let completed = self.completed.load(Relaxed);
        let was_gone = |id| self.member(id).is_none_or(|m| m.is_no_help());
        self.on_all(
            |member| member.takes_writes() || self.has_alone(member, &was_gone),
            |members| {
                let begin = |member: &&Member| member.unflushed.now();
                let began: SmallVec<[Moment; 4]> = members.iter().map(begin).collect();
                let results = together::flush(self.rings(), members);
                let ended = members.iter().zip(began).zip(results);
                ended.map(|((member, began), result)| member.flushed(began, result)).collect()
            },
        )?;
        self.flushed.fetch_max(completed, Relaxed);
        Ok(())
    }

    /// Has a device taken something that is not durable yet, and that the others do not have either
    /// if these are gone? A target has nothing that its source does not have.
    fn has_alone(&self, member: &Member, is_gone: &dyn Fn(DeviceId) -> bool) -> bool {
        member.id != DeviceId::REPLACE_TARGET
            && member.unflushed.any(|chunk| self.map.is_lost(chunk, is_gone))
    }

    /// Writes to each device the superblock that is its own, if it is to have one: a device that is
    /// coming or going has none. Not durable before a flush.
    ///
    /// # Errors
    /// [`VolumeError::Io`] when a device fails without which something cannot be read.
    pub fn write_superblocks(
        &self,
        of: &(dyn Fn(DeviceId) -> Option<Box<Superblock>> + Sync),
        which: SuperCopies,
    ) -> VolumeResult<()> {
        let is_meant = |member: &Member| member.takes_writes() && of(member.id).is_some();
        self.on_all(is_meant, |members| match which {
            SuperCopies::Primary => write_first_superblocks(self.rings(), members, of),
            SuperCopies::All => together::at_once(members, |member| match of(member.id) {
                Some(superblock) => member.write_superblocks(&superblock),
                None => Ok(()),
            }),
        })
    }

    /// Has something done on some of the devices. An error counts if not everything can be read
    /// without the devices that failed, or if these have taken what is on no other one.
    fn on_all(
        &self,
        is_meant: impl Fn(&Member) -> bool,
        what: impl FnOnce(&[&Member]) -> SmallVec<[VolumeResult<()>; 4]>,
    ) -> VolumeResult<()> {
        let to = self.written();
        let here: SmallVec<[&Member; 4]> = to.all().filter(|m| is_meant(m)).collect();
        let results = what(&here);
        let failed: Vec<(&Member, VolumeError)> = here
            .into_iter()
            .zip(results)
            .filter_map(|(member, result)| Some((member, result.err()?)))
            .collect();
        if failed.is_empty() {
            return Ok(());
        }
        let was_gone = |id| self.member(id).is_none_or(|m| m.is_no_help());
        let is_gone = |id| failed.iter().any(|(m, _)| m.id == id) || was_gone(id);
        let is_lost = |chunk: &MappedChunk| {
            let without = |gone: &dyn Fn(DeviceId) -> bool| self.map.is_lost(chunk.start, gone);
            without(&is_gone) && !without(&was_gone)
        };
        if self.members.all().iter().all(|m| is_gone(m.id))
            || self.map.chunks().iter().any(is_lost)
            || failed.iter().any(|(m, _)| self.has_alone(m, &is_gone))
        {
            let first = failed.into_iter().next();
            return first.map_or(Ok(()), |(_, error)| Err(error));
        }
        for (member, error) in &failed {
            self.mark_failed(member, error);
        }
        Ok(())
    }
}

/// What is written to a place goes to the target as well, if the place is on its source. A place
/// that is spared has a device that gets nothing, and others have the bytes.
pub(super) fn push<'a>(
    to: &Written,
    transfer: Transfer<'a>,
    is_spared: bool,
    transfers: &mut Vec<Transfer<'a>>,
) -> VolumeResult<()> {
    let Stripe { device, at } = transfer.stripe;
    if let Some(mirror) = to.mirror(device) {
        let stripe = Stripe { device: mirror.id, at };
        transfers.push(Transfer { stripe, ..transfer.clone() });
    }
    if is_spared {
        return Ok(());
    }
    if to.member(device).is_none() {
        return Err(no_member(transfer.stripe));
    }
    transfers.push(transfer);
    Ok(())
}

impl Member {
    /// One transfer needs no batch.
    pub(super) fn write_all(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        match writes {
            [one] => vec![self.device.write_vectored_at(one.at, one.data)],
            _ => self.device.write_batch(writes),
        }
    }

    /// Counts a flush, which began at that moment.
    fn flushed(&self, began: Moment, result: io::Result<()>) -> VolumeResult<()> {
        self.counters.flushes.fetch_add(1, Relaxed);
        if result.is_ok() {
            self.unflushed.flushed(began);
        }
        result.map_err(|e| {
            self.went_wrong(ErrorKind::Flush);
            self.error("flush", Physical(0), self.device.size(), e)
        })
    }

    /// Writes all copies of the superblock.
    fn write_superblocks(&self, superblock: &Superblock) -> VolumeResult<()> {
        self.superblocks_asked_for(superblock::copies_within(self.device.size()).count() as u64);
        superblock::write_superblocks(&*self.device, superblock, SuperCopies::All)
            .inspect_err(|_| self.went_wrong(ErrorKind::Write))
    }

    fn superblocks_asked_for(&self, copies: u64) {
        self.counters.writes.fetch_add(copies, Relaxed);
        let bytes = copies * larder_format::SUPER_SIZE as u64;
        self.counters.written_bytes.fetch_add(bytes, Relaxed);
    }
}

fn share_of<'v, 't>(member: &'v Member, transfers: &[&'t Transfer<'t>]) -> Share<'v, 't> {
    let writes = transfers.iter().map(|t| Write { at: t.stripe.at, data: &t.data }).collect();
    Share { member, writes }
}

/// Writes the first copy of each device's superblock.
fn write_first_superblocks(
    rings: Option<&Rings>,
    members: &[&Member],
    of: &(dyn Fn(DeviceId) -> Option<Box<Superblock>> + Sync),
) -> SmallVec<[VolumeResult<()>; 4]> {
    let at = SUPER_OFFSETS[0];
    let seal = |member: &Member| Some(of(member.id)?.seal(at));
    let sealed: Vec<_> = members.iter().filter_map(|m| Some((*m, seal(m)?))).collect();
    let slices: Vec<_> = sealed.iter().map(|(_, bytes)| [IoSlice::new(bytes)]).collect();
    let share = |(member, data)| Share { member, writes: vec![Write { at, data }] };
    let with_data = sealed.iter().map(|(m, _)| *m).zip(slices.iter().map(|data| &data[..]));
    let shares: Vec<Share<'_, '_>> = with_data.map(share).collect();
    let ended = |(share, results): (&Share<'_, '_>, Vec<io::Result<()>>)| {
        share.member.superblocks_asked_for(1);
        let result = results.into_iter().collect::<io::Result<()>>();
        result.map_err(|e| {
            share.member.went_wrong(ErrorKind::Write);
            share.member.error("write", at, larder_format::SUPER_SIZE as u64, e)
        })
    };
    shares.iter().zip(together::write(rings, &shares)).map(ended).collect()
}

/// A part of several buffers that lie behind each other.
fn part<'a>(data: &'a [IoSlice<'_>], range: Range<u64>) -> Vec<IoSlice<'a>> {
    let (mut skip, mut left) = (range.start, range.end - range.start);
    let mut out = Vec::new();
    for buffer in data {
        let start = skip.min(buffer.len() as u64);
        let end = (start + left).min(buffer.len() as u64);
        skip -= start;
        left -= end - start;
        if start < end {
            out.push(IoSlice::new(&buffer[start as usize..end as usize]));
        }
    }
    out
}
