//! The volume: logical addresses in, transfers on devices out.
//!
//! A read names its copy. The layers above know the checksums, so they alone can tell a good copy
//! from a bad one; they ask for the next, and [`Volume::write_one_copy`] writes the good one over
//! the bad one. A copy is a way to read: with parity the copies behind the first are what the rest
//! of the row says (`parity`), so those layers need not know of it.
//!
//! Writing (`write`) goes to all copies; `rows` makes the parity of what is written. What opens a
//! volume to write asks [`Volume::may_be_written`] first. Devices come and go meanwhile
//! (`changes`, `members`), and one may take the place of another (`target`).

mod changes;
mod errors;
mod members;
mod places;
mod read;
mod rows;
mod target;
#[cfg(test)]
mod tests;
mod together;
mod unflushed;
mod write;

pub use errors::{ErrorCounts, ErrorKind};

use self::members::{Member, Members};
use self::target::Target;
use crate::assembly::Assembly;
use crate::device::{Device, Work};
use crate::error::{VolumeError, VolumeResult};
use crate::file::overlap::Rings;
use crate::map::{ChunkMap, Located, MappedChunk, Row, Stripe, Way};
use crate::parity;
use larder_format::items::chunk::parse_sys_array;
use larder_format::{DeviceId, Generation, Logical, Physical, STRIPE_LEN};
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Counters of a device, and what callers see of them.
macro_rules! counters {
    ($($name:ident),* $(,)?) => {
        /// What was asked of a device since the volume was opened. Errors count as requests, too.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct DeviceStats {
            $(pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        struct Counters {
            $($name: AtomicU64,)*
        }

        impl Counters {
            fn snapshot(&self) -> DeviceStats {
                DeviceStats { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}
counters! {
    reads, read_bytes, writes, written_bytes, flushes, discards, discarded_bytes,
    read_errors, write_errors, flush_errors,
}

/// So many bytes are read from one mirror before the next has its turn. Reading ahead stops where
/// it has: turns of 1 MiB made long reads half as fast.
const SPREAD: u64 = 64 << 20;

/// Numbers of copies.
pub type Copies = SmallVec<[usize; 4]>;

/// How much is to be expected of what a copy is read from. A copy is worth what its worst device
/// is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    Current,
    /// It lacks something. What lacks less comes first.
    Stale(Reverse<Generation>),
    Missing,
}

/// The devices of a file system behind one logical address space.
#[derive(Debug)]
pub struct Volume {
    members: Members,
    map: ChunkMap,
    /// Chunks may lie on devices that are missing.
    degraded: bool,
    /// Not all copies are worth the same.
    uneven: AtomicBool,
    /// What gets all that another device gets.
    target: RwLock<Option<Target>>,
    /// Held while rows are written that hold something else, see `rows`.
    rows_in_use: Mutex<()>,
    /// Reads are spread over mirrors.
    spread: bool,
    /// For what several devices do together. They are there before a second device comes.
    rings: Rings,
    /// Bytes whose writing has completed, on all devices, and how many of those had when the last
    /// flush began that succeeded.
    completed: AtomicU64,
    flushed: AtomicU64,
    failures: AtomicU64,
}

impl Volume {
    /// A volume of the given devices, without chunks.
    ///
    /// # Errors
    /// [`VolumeError::Corrupt`] for a device id that occurs twice or a volume without devices.
    pub fn new(devices: Vec<(DeviceId, Arc<dyn Device>)>) -> VolumeResult<Self> {
        let corrupt =
            |device: String, what: &str| VolumeError::Corrupt { device, what: what.into() };
        if devices.is_empty() {
            return Err(corrupt("file system".into(), "it has no devices"));
        }
        for (i, (id, device)) in devices.iter().enumerate() {
            if devices[..i].iter().any(|(other, _)| other == id) {
                return Err(corrupt(device.name(), "two devices have the same id"));
            }
        }
        let members = devices.into_iter().map(|(id, device)| Member::new(id, device)).collect();
        Ok(Self {
            members: Members::new(members),
            map: ChunkMap::new(),
            degraded: false,
            uneven: AtomicBool::new(false),
            target: RwLock::new(None),
            rows_in_use: Mutex::new(()),
            spread: false,
            rings: Rings::default(),
            completed: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// The same volume, whose chunks may lie on devices that are not there. Copies stay in their
    /// order.
    #[must_use]
    pub fn with_missing(self) -> Self {
        Self { degraded: true, ..self }
    }

    /// The volume of the devices of a file system, with its system chunks: enough to read the chunk
    /// tree, whose other chunks are then added with [`Volume::add_chunk`].
    ///
    /// `degraded`: chunks may lie on devices that are not there. What only those have cannot be
    /// read.
    ///
    /// # Errors
    /// [`VolumeError::Corrupt`] for system chunks that cannot be right, or lie on a device that is
    /// not there.
    pub fn open(found: Assembly, degraded: bool) -> VolumeResult<Self> {
        let behind: Vec<_> = found.stale().map(|f| (f.id, f.generation)).collect();
        let seeds: Vec<DeviceId> = found.seeds().map(|f| f.id).collect();
        let devices = found.devices.into_iter().map(|f| (f.id, f.device)).collect();
        let mut volume = Self::new(devices)?;
        let members = volume.members.all();
        for member in members.iter().filter(|m| seeds.contains(&m.id)) {
            member.is_seed.store(true, Relaxed);
        }
        volume.make_rings();
        let incomplete = (members.len() as u64) < found.superblock.num_devices();
        volume.degraded = degraded;
        volume.spread = true;
        volume.uneven = AtomicBool::new(incomplete);
        behind.into_iter().for_each(|(id, since)| volume.set_behind(id, since));
        let name = volume.name();
        let chunks = parse_sys_array(found.superblock.sys_chunk_bytes())
            .map_err(|e| VolumeError::Corrupt { device: name, what: e.to_string() })?;
        for (key, chunk) in chunks {
            volume.add_chunk(MappedChunk::from_item(Logical(key.offset), &chunk))?;
        }
        Ok(volume)
    }

    /// Makes rings for the devices, and for those that join them later: a confined daemon can make
    /// none.
    fn make_rings(&self) {
        let members = self.members.all();
        let may_be_several = members.len() > 1 || !self.is_read_only();
        let uses_rings = |m: &Arc<Member>| m.device.file_for(&Work::Read(&[])).is_some();
        if may_be_several
            && members.iter().any(uses_rings)
            && let Err(error) = self.rings.make()
        {
            tracing::info!(%error, "no io_uring: several devices take a thread each");
        }
    }

    /// What is used where there are several devices.
    fn rings(&self) -> Option<&Rings> {
        (self.written().all().count() > 1).then_some(&self.rings)
    }

    /// The chunks. Look-ups go here directly; chunks are added with [`Volume::add_chunk`].
    #[must_use]
    pub fn map(&self) -> &ChunkMap {
        &self.map
    }

    /// Adds a chunk, after checking that its stripes lie on devices that exist and are long enough.
    /// In a degraded volume those that do not exist are missing.
    ///
    /// # Errors
    /// As [`ChunkMap::insert`], and for stripes that lead nowhere.
    pub fn add_chunk(&self, chunk: MappedChunk) -> VolumeResult<()> {
        for s in &chunk.stripes {
            let Some(member) = self.member(s.device) else {
                if self.degraded {
                    continue;
                }
                let (at, id) = (chunk.start, s.device);
                return Err(VolumeError::Corrupt {
                    device: "chunk tree".into(),
                    what: format!("chunk at {at} lies on device {id}, which is missing"),
                });
            };
            changes::reaches_no_further(&chunk, *s, &*member.device)?;
        }
        self.map.insert(chunk)
    }

    /// Devices and their ids.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, Arc<dyn Device>)> {
        let members = self.members.all();
        (0..members.len()).map(move |n| (members[n].id, members[n].device.clone()))
    }

    /// The device with that id.
    #[must_use]
    pub fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>> {
        self.member(id).map(|m| m.device.clone())
    }

    /// A device that stands for all in messages.
    fn name(&self) -> String {
        let name = self.members.all().first().map(|m| m.device.name());
        name.unwrap_or_else(|| "file system".into())
    }

    /// Is any of the devices read-only? Of a seed nobody expects anything else.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.members.all().iter().any(|m| m.device.is_read_only() && !m.is_seed())
    }

    /// Is it a seed, which is only read?
    #[must_use]
    pub fn is_seed(&self, id: DeviceId) -> bool {
        self.member(id).is_some_and(|m| m.is_seed())
    }

    /// Refuses by name what can be read, but not written: chunks that miss more devices than their
    /// profile may lose. For callers that are going to write, when all chunks have been added.
    ///
    /// # Errors
    /// [`VolumeError::Missing`].
    pub fn may_be_written(&self) -> VolumeResult<()> {
        if let Some(chunk) = self.map.chunks().iter().find(|c| self.misses_too_much(c)) {
            return Err(self.cannot_be_written(chunk));
        }
        Ok(())
    }

    /// Stripes of a chunk that lie on devices that are not there.
    fn missing_stripes<'c>(&self, chunk: &'c MappedChunk) -> impl Iterator<Item = &'c Stripe> {
        chunk.stripes.iter().filter(|s| self.member(s.device).is_none())
    }

    /// Linux's rule. It counts devices, so it refuses a RAID10 of which two halves are missing even
    /// where they are of different pairs.
    fn misses_too_much(&self, chunk: &MappedChunk) -> bool {
        self.missing_stripes(chunk).count() > usize::from(chunk.profile().tolerated_losses())
    }

    fn cannot_be_written(&self, chunk: &MappedChunk) -> VolumeError {
        let missing: Vec<String> = self.missing_of(chunk).iter().map(ToString::to_string).collect();
        let (profile, kind) = (chunk.profile(), chunk.flags().type_name());
        let what = format!(
            "without device {} the file system cannot be written: the chunk at {} ({kind}, {}) has \
                stripes there, and {} may lose {} of its {} stripes",
            missing.join(" and "),
            chunk.start,
            profile.name(),
            profile.name(),
            profile.tolerated_losses(),
            chunk.stripes.len(),
        );
        VolumeError::Missing { device: self.name(), what }
    }

    /// So many devices can have new chunks.
    #[must_use]
    pub fn devices_for_chunks(&self) -> usize {
        self.members.all().iter().filter(|m| m.takes_chunks()).count()
    }

    /// May new chunks lie on the device? Not if it is missing or has failed, and not while it comes
    /// or goes.
    #[must_use]
    pub fn takes_chunks(&self, id: DeviceId) -> bool {
        self.member(id).is_some_and(|m| m.takes_chunks())
    }

    /// Is the device there, has it not failed, and is it no seed?
    #[must_use]
    pub fn takes_writes(&self, id: DeviceId) -> bool {
        self.member(id).is_some_and(|m| m.takes_writes())
    }

    /// How many devices have failed since the volume was opened.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Acquire)
    }

    /// Are there bytes of a chunk that no device can take which has not failed?
    #[must_use]
    pub fn cannot_take(&self, chunk: Logical) -> bool {
        self.map.is_lost(chunk, &|id| !self.takes_writes(id))
    }

    /// What a device has may be older than what the others have, since a commit, and is not trusted
    /// without a checksum: it is read last. It is written as any other.
    pub fn set_behind(&self, id: DeviceId, since: Generation) {
        if let Some(member) = self.member(id) {
            member.set_behind(Some(since));
            self.uneven.store(true, Relaxed);
        }
    }

    /// A device has everything again: all that is stored on it was compared with the others.
    pub fn set_current(&self, id: DeviceId) {
        if let Some(member) = self.member(id) {
            member.set_behind(None);
        }
    }

    /// Devices that are read last, because they may lack something that the others have.
    pub fn behind(&self) -> Vec<DeviceId> {
        self.members.all().iter().filter(|m| m.is_behind()).map(|m| m.id).collect()
    }

    /// The errors of each device over its life.
    #[must_use]
    pub fn errors(&self) -> Vec<(DeviceId, ErrorCounts)> {
        self.members.all().iter().map(|m| (m.id, m.errors.now())).collect()
    }

    /// The errors of a device as they were kept when the file system was closed.
    pub fn go_on_counting(&self, id: DeviceId, kept: ErrorCounts) {
        if let Some(member) = self.member(id) {
            member.errors.go_on_from(kept);
        }
    }

    /// Counts from zero, on all devices.
    pub fn reset_errors(&self) {
        self.members.all().iter().for_each(|m| m.errors.reset());
    }

    /// Is there something for [`Volume::take_changed_errors`]?
    #[must_use]
    pub fn errors_have_changed(&self) -> bool {
        self.members.all().iter().any(|m| m.errors.have_changed())
    }

    /// The errors of the devices for which they have changed since this was last asked.
    pub fn take_changed_errors(&self) -> Vec<(DeviceId, ErrorCounts)> {
        let changed = |m: &Arc<Member>| Some((m.id, m.errors.take_changed()?));
        self.members.all().iter().filter_map(changed).collect()
    }

    /// A copy that could be read is not what it should be. It counts for the device that has it.
    /// What parity says is of several devices, so it counts for none.
    pub fn found_bad(&self, at: Logical, copy: usize, what: ErrorKind) {
        let Ok(found) = self.map.lookup(at, 1) else { return };
        let stripe = found.stripes.get(self.way_of(at, &found, copy));
        if let Some(member) = stripe.and_then(|s| self.member(s.device)) {
            member.errors.count(what);
        }
    }

    /// Devices that have failed and are not written any more.
    pub fn failed(&self) -> Vec<DeviceId> {
        self.members.all().iter().filter(|m| m.has_failed()).map(|m| m.id).collect()
    }

    /// A chunk of which nothing can be read in some place, because too many of its devices are
    /// missing: the first of those that `wanted` picks. With the devices of its stripes that are
    /// missing.
    pub fn first_lost(
        &self,
        wanted: impl Fn(&MappedChunk) -> bool,
    ) -> Option<(MappedChunk, Vec<DeviceId>)> {
        let chunk = self.map.chunks().into_iter().find(|c| wanted(c) && self.is_lost(c))?;
        let missing = self.missing_of(&chunk);
        Some((chunk, missing))
    }

    /// All chunks of which nothing can be read in some place, as [`Volume::first_lost`].
    #[must_use]
    pub fn all_lost(&self) -> Vec<(MappedChunk, Vec<DeviceId>)> {
        let lost = self.map.chunks().into_iter().filter(|c| self.is_lost(c));
        lost.map(|chunk| (self.missing_of(&chunk), chunk)).map(|(ids, c)| (c, ids)).collect()
    }

    fn is_lost(&self, chunk: &MappedChunk) -> bool {
        self.map.is_lost(chunk.start, &|id| self.member(id).is_none())
    }

    fn missing_of(&self, chunk: &MappedChunk) -> Vec<DeviceId> {
        let mut missing: Vec<DeviceId> = self.missing_stripes(chunk).map(|s| s.device).collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// The copies of the bytes at `at` that need no missing device, in two lists. The first, read
    /// together, show everything that is stored for these bytes: each mirror, or the bytes and what
    /// their parity says. The others are needed only where none of these is right.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn copies_to_check(&self, at: Logical) -> VolumeResult<(Copies, Copies)> {
        let found = self.map.lookup(at, 1)?;
        let here = (0..found.ways)
            .filter(|way| !self.degraded || self.worth(at, &found, *way) != Worth::Missing);
        let stored = self.map.stored(at)?;
        Ok(here.partition(|way| *way < stored))
    }

    /// Number of copies of the bytes at `at`, as far as reading goes: ways to read them.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn copies(&self, at: Logical) -> VolumeResult<usize> {
        self.map.copies(at)
    }

    /// So many of the first copies of the bytes at `at` may be read where no checksum tells whether
    /// they are right: none of a device that is behind, if a device that is not has one.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when no chunk covers `at`.
    pub fn trusted_copies(&self, at: Logical) -> VolumeResult<usize> {
        let found = self.map.lookup(at, 1)?;
        if !self.uneven.load(Relaxed) {
            return Ok(found.ways);
        }
        let worth = |copy| self.worth(at, &found, self.way_of(at, &found, copy));
        let best = worth(0);
        Ok((0..found.ways).take_while(|copy| worth(*copy) == best).count())
    }

    /// Fills `buf` with data of files from copy number `copy`, of which this volume will keep
    /// nothing in memory: the caller, or a layer above it, has the contents from now on. A range
    /// that goes on in the next chunk is read from both; where a chunk has fewer copies, its last
    /// one is read.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when part of the range is in no chunk; [`VolumeError::Io`] when
    /// the device fails.
    pub fn read(&self, at: Logical, buf: &mut [u8], copy: usize) -> VolumeResult<()> {
        if self.spread && buf.len() >= read::LONG && self.members.all().len() > 1 {
            return self.read_together(at, buf, copy);
        }
        let (mut at, mut rest) = (at, buf);
        while !rest.is_empty() {
            let found = self.in_one_turn(at, rest.len() as u64)?;
            let (piece, more) = rest.split_at_mut(usize_from(found.len));
            let way = self.way_of(at, &found, copy.min(found.ways - 1));
            self.read_piece(at, &found, piece, way)?;
            if let Some(stripe) = found.stripes.get(way) {
                self.passed(*stripe, found.len);
            }
            (at, rest) = (at.plus(found.len), more);
        }
        Ok(())
    }

    /// Looks up what is read of a range in one go: no more than what one mirror has its turn for.
    fn in_one_turn(&self, at: Logical, len: u64) -> VolumeResult<Located> {
        let mut found = self.map.lookup(at, len)?;
        if self.spread && found.stripes.len() > 1 {
            found.len = found.len.min(SPREAD - at.0 % SPREAD);
        }
        Ok(found)
    }

    /// As [`Volume::read`], from the first copy, if that can be done without waiting. False, and
    /// `buf` holds anything, where it cannot: then [`Volume::read`] has to wait, or says what is
    /// wrong.
    pub fn read_at_once(&self, at: Logical, buf: &mut [u8]) -> bool {
        let Some(stripe) = self.first_at_once(at, buf) else { return false };
        self.passed(stripe, buf.len() as u64);
        true
    }

    /// As [`Volume::read_at_once`], for a tree block.
    pub fn read_block_at_once(&self, at: Logical, buf: &mut [u8]) -> bool {
        self.first_at_once(at, buf).is_some()
    }

    /// Fills `buf` from the first copy without waiting; where that copy lies.
    fn first_at_once(&self, at: Logical, buf: &mut [u8]) -> Option<Stripe> {
        let found = self.map.lookup(at, buf.len() as u64).ok()?;
        let stripe = *found.stripes.get(self.way_of(at, &found, 0))?;
        let member = self.member(stripe.device)?;
        if found.len < buf.len() as u64 || !member.device.read_at_once(stripe.at, buf) {
            return None;
        }
        member.counters.reads.fetch_add(1, Relaxed);
        member.counters.read_bytes.fetch_add(buf.len() as u64, Relaxed);
        Some(stripe)
    }

    fn passed(&self, stripe: Stripe, len: u64) {
        if let Some(member) = self.member(stripe.device) {
            member.device.passed(stripe.at, len);
        }
    }

    /// Fills `buf` with a tree block from copy number `copy`. Unlike data, a block lies within one
    /// chunk.
    ///
    /// # Errors
    /// As [`Volume::read`]; [`VolumeError::Unmapped`] also when the block reaches past its chunk or
    /// has no such copy.
    pub fn read_block(&self, at: Logical, buf: &mut [u8], copy: usize) -> VolumeResult<()> {
        let len = buf.len() as u64;
        let found = self.map.lookup(at, len)?;
        if copy >= found.ways {
            return Err(VolumeError::Unmapped { at, len });
        }
        if found.len == len {
            let way = self.way_of(at, &found, copy);
            return self.read_piece(at, &found, buf, way);
        }
        // Out of one element into the next, in chunks of which Linux makes none any more.
        match self.map.chunk_at(at) {
            Some(chunk) if at.0 - chunk.start.0 + len <= chunk.length => self.read(at, buf, copy),
            _ => Err(VolumeError::Unmapped { at, len }),
        }
    }

    /// The way that a copy is: the best ones come first, and among mirrors of equal worth each has
    /// its turn, by the address.
    fn way_of(&self, at: Logical, found: &Located, copy: usize) -> usize {
        if !self.uneven.load(Relaxed) {
            return self.turned(at, found, copy);
        }
        let mut ways: SmallVec<[(Worth, usize, usize); 8]> = (0..found.ways)
            .map(|turn| (turn, self.turned(at, found, turn)))
            .map(|(turn, way)| (self.worth(at, found, way), turn, way))
            .collect();
        ways.sort_unstable();
        ways.get(copy).map_or(copy, |(.., way)| *way)
    }

    /// Which way has its turn? By address rather than by load, so that a copy is the same one when
    /// it is read, counted and repaired.
    fn turned(&self, at: Logical, found: &Located, copy: usize) -> usize {
        let mirrors = found.stripes.len();
        if !self.spread || mirrors < 2 || copy >= mirrors {
            return copy;
        }
        // Of two copies on one device, the first is as good as the second.
        if found.stripes[0].device == found.stripes[1].device {
            return copy;
        }
        let turn = usize::try_from(at.0 / SPREAD % mirrors as u64).unwrap_or(0);
        (copy + turn) % mirrors
    }

    fn worth(&self, at: Logical, found: &Located, way: usize) -> Worth {
        let of = |stripe: &Stripe| match self.member(stripe.device) {
            None => Worth::Missing,
            Some(member) if member.has_failed() => Worth::Stale(Reverse(Generation(0))),
            Some(member) => match member.lacks_since() {
                None => Worth::Current,
                Some(since) => Worth::Stale(Reverse(since)),
            },
        };
        if let Some(stripe) = found.stripes.get(way) {
            return of(stripe);
        }
        let Some(row) = self.map.row(at, way) else { return Worth::Missing };
        row.needed().map(of).max().unwrap_or(Worth::Missing)
    }

    /// Reads what was found at `at` in the way of a number.
    fn read_piece(
        &self,
        at: Logical,
        found: &Located,
        buf: &mut [u8],
        way: usize,
    ) -> VolumeResult<()> {
        match found.stripes.get(way) {
            Some(stripe) => self.read_stripe(*stripe, buf),
            None => self.rebuild(at, buf, way),
        }
    }

    /// Works out what lies at `at`, in one element, from the rest of its row.
    fn rebuild(&self, at: Logical, buf: &mut [u8], way: usize) -> VolumeResult<()> {
        let len = buf.len() as u64;
        let row = self.map.row(at, way).ok_or(VolumeError::Unmapped { at, len })?;
        let by = match row.way {
            Way::Direct(_) => return self.read_stripe(row.columns[row.column], buf),
            Way::Rebuilt(by) => by,
        };
        parity::rebuild(row.column, by, row.columns.len(), buf, |element, buf| {
            self.read_stripe(row.place(element), buf)
        })
    }

    /// Writes `data` over one copy, to repair it from another. Parity is left as it is: it is not
    /// of this copy that is bad, and what another device has of the row may be bad as well.
    ///
    /// # Errors
    /// As [`Volume::read_block`]: the range must lie within one chunk, which must have that copy.
    pub fn write_one_copy(&self, at: Logical, data: &[u8], copy: usize) -> VolumeResult<()> {
        let len = data.len() as u64;
        let found = self.map.lookup(at, len)?;
        match found.stripes.get(self.way_of(at, &found, copy)) {
            // What is not there needs no repair, and gets none. What was worked out is no copy.
            None if copy < found.ways => Ok(()),
            Some(stripe) if !self.takes_writes(stripe.device) => Ok(()),
            Some(stripe) if found.len == len => self.write_stripe(*stripe, data),
            _ => Err(VolumeError::Unmapped { at, len }),
        }
    }

    /// Starts write-back of completed writes in all copies of a range, without waiting. Ranges in
    /// no chunk are skipped.
    pub fn start_writeback(&self, at: Logical, len: u64) {
        let (mut at, mut len) = (at, len);
        while len > 0 {
            let Ok(found) = self.map.lookup(at, len) else { return };
            for stripe in found.stripes {
                if let Some(member) = self.member(stripe.device) {
                    member.device.start_writeback(stripe.at, found.len);
                }
            }
            (at, len) = (at.plus(found.len), len - found.len);
        }
    }

    /// About how many bytes have been written that no flush has made durable yet, superblocks
    /// aside. The next flush waits for that much: many devices, and every file, begin to write it
    /// only then.
    #[must_use]
    pub fn unflushed(&self) -> u64 {
        // In this order: the other way round a flush could come in between.
        let flushed = self.flushed.load(Relaxed);
        self.completed.load(Relaxed).saturating_sub(flushed)
    }

    /// Tells the devices that a range holds nothing of value any more, in any copy. Superblock
    /// copies inside it are left alone: they lie in chunks without belonging to them. With parity,
    /// only full stripes are discarded that lie in the range as a whole: the rest has a part in the
    /// parity of others. Devices that are missing or have failed are not told. Returns the bytes of
    /// all other copies.
    ///
    /// # Errors
    /// [`VolumeError::Unmapped`] when part of the range is in no chunk, or what a device says;
    /// callers may go on.
    pub fn discard(&self, at: Logical, len: u64) -> VolumeResult<u64> {
        let (mut at, mut len, mut done) = (at, len, 0);
        while len > 0 {
            let found = self.map.lookup(at, len)?;
            let passed = match self.map.full_stripe(at) {
                None => {
                    for stripe in &found.stripes {
                        done += self.discard_on(stripe.device, stripe.at, found.len)?;
                    }
                    found.len
                }
                Some(all) if all.start == at && all.len() <= len => {
                    for stripe in self.map.row(at, 0).iter().flat_map(Row::elements) {
                        done += self.discard_on(stripe.device, stripe.at, STRIPE_LEN)?;
                    }
                    all.len()
                }
                Some(all) => len.min(all.end().0 - at.0),
            };
            (at, len) = (at.plus(passed), len - passed);
        }
        Ok(done)
    }

    /// The same for a range of one device, which no chunk needs to cover. Returns the bytes: none
    /// where the device is missing, has failed, or is a seed.
    ///
    /// # Errors
    /// What the device says.
    pub fn discard_on(&self, device: DeviceId, at: Physical, len: u64) -> VolumeResult<u64> {
        let to = self.written();
        if let Some(mirror) = to.mirror(device) {
            for part in outside_superblocks(at..at.plus(len)) {
                mirror.discard_too(&part);
            }
        }
        let Some(member) = to.member(device).filter(|m| m.takes_writes()) else { return Ok(0) };
        let mut done = 0;
        for part in outside_superblocks(at..at.plus(len)) {
            let (at, len) = (part.start, part.end.0 - part.start.0);
            member.counters.discards.fetch_add(1, Relaxed);
            member.counters.discarded_bytes.fetch_add(len, Relaxed);
            let discarded = member.device.discard(at, len);
            discarded.map_err(|e| member.error("discard", at, len, e))?;
            done += len;
        }
        Ok(done)
    }

    /// Does any device take discards?
    #[must_use]
    pub fn can_discard(&self) -> bool {
        self.members.all().iter().any(|m| m.device.can_discard())
    }

    /// Bytes below which a discard gives nothing back on any device that takes discards.
    #[must_use]
    pub fn discard_granularity(&self) -> u64 {
        let those = self.devices().filter(|(_, d)| d.can_discard());
        those.map(|(_, d)| d.discard_granularity()).min().unwrap_or_default()
    }

    /// Counters of each device.
    #[must_use]
    pub fn stats(&self) -> Vec<(DeviceId, DeviceStats)> {
        self.members.all().iter().map(|m| (m.id, m.counters.snapshot())).collect()
    }

    fn member(&self, id: DeviceId) -> Option<Arc<Member>> {
        self.members.get(id)
    }

    fn read_stripe(&self, stripe: Stripe, buf: &mut [u8]) -> VolumeResult<()> {
        let Some(member) = self.member(stripe.device) else {
            return Err(missing(stripe, buf.len() as u64));
        };
        member.counters.reads.fetch_add(1, Relaxed);
        member.counters.read_bytes.fetch_add(buf.len() as u64, Relaxed);
        member.device.read_at(stripe.at, buf).map_err(|e| {
            member.went_wrong(ErrorKind::Read);
            member.error("read", stripe.at, buf.len() as u64, e)
        })
    }

    fn write_stripe(&self, stripe: Stripe, data: &[u8]) -> VolumeResult<()> {
        let to = self.written();
        if let Some(mirror) = to.mirror(stripe.device) {
            self.write_mirror(mirror, stripe.at, data);
        }
        let member = to.member(stripe.device).ok_or_else(|| no_member(stripe))?;
        member.counters.writes.fetch_add(1, Relaxed);
        member.counters.written_bytes.fetch_add(data.len() as u64, Relaxed);
        member.device.write_at(stripe.at, data).map_err(|e| {
            member.went_wrong(ErrorKind::Write);
            member.error("write", stripe.at, data.len() as u64, e)
        })?;
        self.completed.fetch_add(data.len() as u64, Relaxed);
        Ok(())
    }
}

/// Writing to a device that is missing.
fn no_member(stripe: Stripe) -> VolumeError {
    let what = format!("device {} is missing", stripe.device);
    VolumeError::Corrupt { device: "file system".into(), what }
}

/// Reading from a device that is missing, which is an error of the device as any other.
fn missing(stripe: Stripe, len: u64) -> VolumeError {
    let source = std::io::Error::new(std::io::ErrorKind::NotFound, "the device is missing");
    let device = format!("device {}", stripe.device);
    VolumeError::Io { device, op: "read", at: stripe.at, len, source }
}

/// A length that was cut to that of a slice.
fn usize_from(len: u64) -> usize {
    usize::try_from(len).expect("no longer than a slice in memory")
}

/// The parts of a device range that hold no superblock copy.
fn outside_superblocks(range: Range<Physical>) -> impl Iterator<Item = Range<Physical>> {
    let holes =
        larder_format::SUPER_OFFSETS.map(|at| at..at.plus(larder_format::SUPER_SIZE as u64));
    let (ends, starts) = (holes.clone().map(|hole| hole.start), holes.map(|hole| hole.end));
    let starts = std::iter::once(range.start).chain(starts.map(|end| end.max(range.start)));
    let ends = ends.map(|start| start.min(range.end)).into_iter().chain([range.end]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|part| !part.is_empty())
}
