//! Writing: to every device that holds a range, all at the same time. What has parity is put
//! together by `rows`.
//!
//! A transfer that a device refuses costs a copy. As long as other devices have the bytes, the
//! write is good: the device is marked as **failed**, and nothing is written to it from then on.
//! Its copies are read last. The same holds for flushes and superblocks. So a failed device keeps
//! an old superblock, by which it is known as stale when the file system is opened next.
//!
//! Where no other device has the bytes, the caller gets the error, and the device counts as before:
//! whether to go on is for the layers above to say.

use super::rows::{Fill, Piece};
use super::{Member, Volume};
use crate::device::Write;
use crate::error::{VolumeError, VolumeResult};
use crate::map::{MappedChunk, Stripe};
use crate::superblock::{self, SuperCopies};
use larder_format::superblock::Superblock;
use larder_format::{DeviceId, Logical, Physical};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

/// A part of a write that lies in one place of one device.
#[derive(Clone, Debug)]
pub(super) struct Transfer<'a> {
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
        let mut results: Vec<VolumeResult<()>> = writes.iter().map(|_| Ok(())).collect();
        let mut transfers = Vec::with_capacity(2 * writes.len());
        let mut pieces = Vec::new();
        for (n, (at, data)) in writes.iter().enumerate() {
            let before = (transfers.len(), pieces.len());
            if let Err(error) = self.cut(*at, data, n, &mut transfers, &mut pieces) {
                transfers.truncate(before.0);
                pieces.truncate(before.1);
                results[n] = Err(error);
            }
        }
        if !transfers.is_empty() {
            for (of, error) in self.transfer(&transfers) {
                results[of] = Err(error);
            }
        }
        if !pieces.is_empty() {
            for (of, error) in self.write_pieces(pieces, fill) {
                results[of] = Err(error);
            }
        }
        results
    }

    /// Cuts a write into transfers, and into pieces where there is parity. A failed device gets no
    /// transfer while others have the bytes.
    fn cut<'a>(
        &self,
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
            let takes_none = |s: &Stripe| self.member(s.device).is_none_or(Member::has_failed);
            let any_takes = !found.stripes.iter().all(takes_none);
            for stripe in found.stripes {
                if !(any_takes && takes_none(&stripe)) {
                    self.member_of(stripe)?;
                    transfers.push(Transfer { stripe, of, data: data.clone() });
                }
            }
            done += found.len;
        }
        Ok(())
    }

    /// Carries transfers out, and returns the writes of which bytes are on no device that counts.
    pub(super) fn transfer(&self, transfers: &[Transfer<'_>]) -> Vec<(usize, VolumeError)> {
        let on = |id: DeviceId| move |t: &&Transfer<'_>| t.stripe.device == id;
        let busy: SmallVec<[&Member; 4]> = self
            .members
            .iter()
            .filter(|m| transfers.iter().any(|t| t.stripe.device == m.id))
            .collect();
        let ended = at_once(&busy, |member| {
            let mine: Vec<&Transfer<'_>> = transfers.iter().filter(on(member.id)).collect();
            let errors = member.carry_out(&mine, &self.completed);
            errors.into_iter().map(|(n, error)| (mine[n], error)).collect::<Vec<_>>()
        });
        let refused: Vec<(&Member, &Transfer<'_>, VolumeError)> = busy
            .iter()
            .zip(ended)
            .flat_map(|(member, errors)| errors.into_iter().map(|(t, e)| (*member, t, e)))
            .collect();
        if refused.is_empty() {
            return Vec::new();
        }
        self.judge(refused)
    }

    /// Which of the transfers that were refused cost more than a copy? Devices that cost no more
    /// are marked.
    fn judge(
        &self,
        refused: Vec<(&Member, &Transfer<'_>, VolumeError)>,
    ) -> Vec<(usize, VolumeError)> {
        let mut refusing: Vec<DeviceId> = refused.iter().map(|(m, ..)| m.id).collect();
        refusing.dedup();
        let is_gone = |id| refusing.contains(&id) || self.member(id).is_none_or(Member::has_failed);
        let is_lost = |t: &Transfer<'_>| {
            let chunk = self.map.chunk_on(t.stripe);
            chunk.is_none_or(|start| self.map.is_lost(start, &is_gone))
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
    fn mark_failed(&self, member: &Member, why: &VolumeError) {
        if !member.failed.swap(true, Relaxed) {
            self.uneven.store(true, Relaxed);
            tracing::error!(device = %member.device.name(), id = %member.id, "the device has \
                failed, and the file system goes on without it: {why}");
        }
    }

    /// Makes every write durable that had completed when the call began, on all devices.
    ///
    /// # Errors
    /// The first device's error, after every device was flushed, unless the others have everything
    /// that lies on those that failed. A failed flush is final ([`crate::Device::flush`]).
    pub fn flush(&self) -> VolumeResult<()> {
        let completed = self.completed.load(Relaxed);
        self.on_all(Member::flush)?;
        self.flushed.fetch_max(completed, Relaxed);
        Ok(())
    }

    /// Writes to each device the superblock that is its own. Not durable before a flush.
    ///
    /// # Errors
    /// [`VolumeError::Io`] when a device fails without which something cannot be read.
    pub fn write_superblocks(
        &self,
        of: &(dyn Fn(DeviceId) -> Box<Superblock> + Sync),
        which: SuperCopies,
    ) -> VolumeResult<()> {
        self.on_all(|member| member.write_superblock(&of(member.id), which))
    }

    /// Has something done on all devices that have not failed. An error counts if not everything
    /// can be read without the devices that failed.
    fn on_all(&self, what: impl Fn(&Member) -> VolumeResult<()> + Sync) -> VolumeResult<()> {
        let here: SmallVec<[&Member; 4]> =
            self.members.iter().filter(|m| !m.has_failed()).collect();
        let results = at_once(&here, what);
        let failed: Vec<(&Member, VolumeError)> = here
            .into_iter()
            .zip(results)
            .filter_map(|(member, result)| Some((member, result.err()?)))
            .collect();
        if failed.is_empty() {
            return Ok(());
        }
        let is_gone = |id| {
            failed.iter().any(|(m, _)| m.id == id) || self.member(id).is_none_or(Member::has_failed)
        };
        let is_lost = |chunk: &MappedChunk| self.map.is_lost(chunk.start, &is_gone);
        if self.members.iter().all(|m| is_gone(m.id)) || self.map.chunks().iter().any(is_lost) {
            let first = failed.into_iter().next();
            return first.map_or(Ok(()), |(_, error)| Err(error));
        }
        for (member, error) in &failed {
            self.mark_failed(member, error);
        }
        Ok(())
    }
}

impl Member {
    /// Writes, and returns what failed, by its place in the list.
    fn carry_out(
        &self,
        transfers: &[&Transfer<'_>],
        completed: &std::sync::atomic::AtomicU64,
    ) -> Vec<(usize, VolumeError)> {
        let writes: Vec<Write<'_>> =
            transfers.iter().map(|t| Write { at: t.stripe.at, data: &t.data }).collect();
        let ended = self.write_all(&writes);
        let mut failed = Vec::new();
        for (n, (write, result)) in writes.iter().zip(ended).enumerate() {
            self.counters.writes.fetch_add(1, Relaxed);
            self.counters.written_bytes.fetch_add(write.len(), Relaxed);
            match result {
                Ok(()) => _ = completed.fetch_add(write.len(), Relaxed),
                Err(e) => {
                    self.counters.write_errors.fetch_add(1, Relaxed);
                    failed.push((n, self.error("write", write.at, write.len(), e)));
                }
            }
        }
        failed
    }

    /// One transfer needs no batch.
    fn write_all(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        match writes {
            [one] => vec![self.device.write_vectored_at(one.at, one.data)],
            _ => self.device.write_batch(writes),
        }
    }

    fn flush(&self) -> VolumeResult<()> {
        self.counters.flushes.fetch_add(1, Relaxed);
        self.device.flush().map_err(|e| {
            self.counters.flush_errors.fetch_add(1, Relaxed);
            self.error("flush", Physical(0), self.device.size(), e)
        })
    }

    fn write_superblock(&self, superblock: &Superblock, which: SuperCopies) -> VolumeResult<()> {
        let copies = match which {
            SuperCopies::Primary => 1,
            SuperCopies::All => superblock::copies_within(self.device.size()).count() as u64,
        };
        let bytes = copies * larder_format::SUPER_SIZE as u64;
        self.counters.writes.fetch_add(copies, Relaxed);
        self.counters.written_bytes.fetch_add(bytes, Relaxed);
        superblock::write_superblocks(&*self.device, superblock, which).inspect_err(|_| {
            self.counters.write_errors.fetch_add(1, Relaxed);
        })
    }
}

/// Does something with each device, with several at the same time.
fn at_once<'m, T: Send>(
    members: &[&'m Member],
    what: impl Fn(&'m Member) -> T + Sync,
) -> SmallVec<[T; 4]> {
    let Some((first, others)) = members.split_first() else { return SmallVec::new() };
    if others.is_empty() {
        return SmallVec::from_iter([what(first)]);
    }
    thread::scope(|scope| {
        let what = &what;
        let start = |member: &&'m Member| {
            let member = *member;
            let thread = thread::Builder::new().name("larder-device".into());
            // Without a thread it is done afterwards.
            thread.spawn_scoped(scope, move || what(member)).map_err(|_| member)
        };
        let started: SmallVec<[_; 4]> = others.iter().map(start).collect();
        let mut results = SmallVec::from_iter([what(first)]);
        for thread in started {
            results.push(match thread {
                Ok(thread) => {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }
                Err(member) => what(member),
            });
        }
        results
    })
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
