//! Bytes of one file that callers have written and the device has not.
//!
//! [`Dirty`] keeps them in segments, to the byte. A write over a segment goes into that segment.
//! Anything else becomes a segment of its own, with room up to the end of its last sector, which
//! the next write may fill. So bytes are copied once, when they come in, in whatever order that is;
//! neighbours are joined only when they are taken out. A segment never crosses a boundary of
//! [`WINDOW`] bytes. A reader overlays segments on what the extents hold, and reads the remaining
//! [`Gaps`] from there. Taking segments out ([`Taken`]) moves them and does not copy. Until they
//! are in extents, readers find their bytes there, beneath newer ones. A segment of one byte takes
//! more memory than a byte, so [`Dirty::memory`] is what counts against the budget.
//!
//! Blocks of one sector do not go to their places at once, but on a list. Their places lie in
//! tables that another processor had last: the one that writes back, and so takes most blocks out
//! again. Finding a place would take longer than copying the block. A caller that wants to know
//! what there is, as a rule write-back, brings the blocks to their places ([`Dirty::sort_in`]).
//! Until then a block counts as if nothing lay below it (`docs/DESIGN-NOTES.md`, "Random blocks").

use crate::base::sectors::{SECTOR, ceil, floor};
use crate::lock::{self, Mutex};
use larder_format::MAX_DATA_EXTENT;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Bytes of sectors that one batch makes whole. The last run of a batch may go beyond that, but has
/// no more than these by itself.
pub(crate) const MOST_MADE: u64 = 4 << 20;
/// Segments end at multiples of this.
const WINDOW: u64 = 1 << 20;
/// A new segment of at least this size gets room for the rest of its last sector.
const ROOMY: usize = 1024;
/// How many blocks at most wait until they are brought to their places.
pub(crate) const MOST_RECENT: usize = 1024;
/// Memory that a segment takes besides its buffer: its entry, with room for another, and the
/// allocator's headers.
const SEGMENT_MEMORY: u64 = 128;

#[derive(Debug)]
struct Segment {
    /// Tick of its oldest write.
    age: u64,
    buf: Vec<u8>,
}

impl Segment {
    fn memory(&self) -> u64 {
        self.buf.capacity() as u64 + SEGMENT_MEMORY
    }
}

/// Parts of a buffer that are still to be filled: start and end in the file, ascending.
#[derive(Debug)]
pub(crate) struct Gaps {
    /// File offset of the buffer's first byte.
    base: u64,
    left: SmallVec<[(u64, u64); 2]>,
}

impl Gaps {
    /// All of a buffer of `len` bytes, which is for the file's bytes from `base` on.
    pub(crate) fn new(base: u64, len: usize) -> Self {
        let left = if len == 0 {
            SmallVec::new()
        } else {
            SmallVec::from_slice(&[(base, base + len as u64)])
        };
        Self { base, left }
    }
    /// What is still to be filled.
    pub(crate) fn left(&self) -> &[(u64, u64)] {
        &self.left
    }
    /// The part of the buffer for a range of the file.
    pub(crate) fn slice<'b>(&self, buf: &'b mut [u8], start: u64, end: u64) -> &'b mut [u8] {
        &mut buf[index(start - self.base)..index(end - self.base)]
    }
    /// Copies from `data`, which lies at `at`, into the gaps.
    fn fill(&mut self, buf: &mut [u8], at: u64, data: &[u8]) {
        let data_end = at + data.len() as u64;
        let mut left = SmallVec::new();
        for &(start, end) in &self.left {
            let (a, b) = (start.max(at), end.min(data_end));
            if a >= b {
                left.push((start, end));
                continue;
            }
            buf[index(a - self.base)..index(b - self.base)]
                .copy_from_slice(&data[index(a - at)..index(b - at)]);
            left.extend([(start, a), (b, end)].into_iter().filter(|(s, e)| s < e));
        }
        self.left = left;
    }
    /// First byte and end of the gaps.
    pub(crate) fn bounds(&self) -> Option<(u64, u64)> {
        Some((self.left.first()?.0, self.left.last()?.1))
    }
}

/// An offset within a buffer in memory.
pub(crate) fn index(n: u64) -> usize {
    usize::try_from(n).expect("within a buffer in memory")
}

/// Bytes of the sectors that a range touches.
fn footprint(start: u64, len: usize) -> u64 {
    ceil(start + len as u64) - floor(start)
}

/// The segments within one window, ascending by their first bytes.
#[derive(Debug)]
struct SegmentWindow {
    segs: Vec<(u64, Segment)>,
    /// Tick of the oldest write in them.
    oldest: u64,
}

impl SegmentWindow {
    /// Index of the first segment that begins at or behind `at`.
    fn from(&self, at: u64) -> usize {
        self.segs.partition_point(|(s, _)| *s < at)
    }
    /// Index of the first segment that begins behind `at`.
    fn behind(&self, at: u64) -> usize {
        self.segs.partition_point(|(s, _)| *s <= at)
    }
}

/// The window of this number. If there is none, makes one for a segment of this age.
fn window_of<'a>(
    windows: &'a mut BTreeMap<u64, SegmentWindow>,
    ages: &mut BTreeSet<(u64, u64)>,
    number: u64,
    age: u64,
) -> &'a mut SegmentWindow {
    windows.entry(number).or_insert_with(|| {
        ages.insert((age, number));
        SegmentWindow { segs: Vec::new(), oldest: age }
    })
}

/// The segments of one file.
///
/// A large file that is written at random places has very many segments. So there is a table of
/// windows, and one of segments in each: both are short.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    /// By number; none is empty.
    windows: BTreeMap<u64, SegmentWindow>,
    /// Oldest tick and number of every window.
    ages: BTreeSet<(u64, u64)>,
    /// Blocks that are not in their places yet, in the order in which they came. They are newer
    /// than what the windows have.
    recent: VecDeque<(u64, Segment)>,
    counts: Counts,
    /// By how much the counts are too high, because of blocks that turned out to lie over others.
    /// It wraps around below zero.
    over: Counts,
    footprint: u64,
}

/// Sums over segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) segments: u64,
    pub(crate) bytes: u64,
    /// Bytes of memory that they take.
    pub(crate) memory: u64,
}

impl Counts {
    fn add(&mut self, segment: &Segment) {
        self.segments += 1;
        self.bytes += segment.buf.len() as u64;
        self.memory += segment.memory();
    }
    fn subtract(&mut self, segment: &Segment) {
        self.segments -= 1;
        self.bytes -= segment.buf.len() as u64;
        self.memory -= segment.memory();
    }
    fn plus(self, other: Self) -> Self {
        Self {
            segments: self.segments.wrapping_add(other.segments),
            bytes: self.bytes.wrapping_add(other.bytes),
            memory: self.memory.wrapping_add(other.memory),
        }
    }
    fn minus(self, other: Self) -> Self {
        Self {
            segments: self.segments.wrapping_sub(other.segments),
            bytes: self.bytes.wrapping_sub(other.bytes),
            memory: self.memory.wrapping_sub(other.memory),
        }
    }
}

impl Dirty {
    /// The sums of what is held. Until it is [settled](Self::settle), blocks over others count,
    /// too.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }
    /// Bytes of device space that the segments will need at most.
    pub(crate) fn footprint(&self) -> u64 {
        self.footprint
    }
    /// Is nothing held?
    pub(crate) fn is_empty(&self) -> bool {
        self.windows.is_empty() && self.recent.is_empty()
    }
    /// Tick of the oldest write held.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.ages
            .first()
            .map(|(age, _)| *age)
            .or_else(|| self.recent.front().map(|(_, block)| block.age))
    }
    /// Brings all blocks to their places. A caller that asks what there is must have done that.
    pub(crate) fn sort_in(&mut self) {
        self.sort_in_some(usize::MAX);
    }
    /// Brings the `most` oldest blocks to their places. Returns whether there are more.
    pub(crate) fn sort_in_some(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let Some((start, block)) = self.recent.pop_front() else { return false };
            self.sort_in_one(start, block);
        }
        !self.recent.is_empty()
    }
    fn sort_in_one(&mut self, start: u64, block: Segment) {
        let number = start / WINDOW;
        let age = block.age;
        let window = window_of(&mut self.windows, &mut self.ages, number, age);
        let at = window.behind(start);
        let before = at.checked_sub(1).map(|before| &window.segs[before]);
        let apart = before.is_none_or(|(s, segment)| *s + segment.buf.len() as u64 <= start)
            && window.segs.get(at).is_none_or(|(next, _)| start + SECTOR <= *next);
        if apart {
            window.segs.insert(at, (start, block));
        } else {
            // The counts stay as they are until they are settled, because others have passed them
            // on and must see each change.
            let told = self.counts;
            self.counts.subtract(&block);
            self.footprint -= SECTOR;
            self.put_all(start, &block.buf, age, &Buffers::default());
            self.over = self.over.plus(told.minus(self.counts));
            self.counts = told;
        }
    }
    /// As [`Self::sort_in`]. The counts are exact then.
    pub(crate) fn settle(&mut self) {
        self.sort_in();
        self.counts = self.counts.minus(std::mem::take(&mut self.over));
    }
    /// The segments that begin at or behind `at`, ascending.
    fn segs_from(&self, at: u64) -> impl Iterator<Item = (u64, &Segment)> {
        debug_assert!(self.recent.is_empty(), "blocks are not in their places");
        let first = at / WINDOW;
        self.windows.range(first..).flat_map(move |(number, window)| {
            let skip = if *number == first { window.from(at) } else { 0 };
            window.segs[skip..].iter().map(|(s, segment)| (*s, segment))
        })
    }
    /// Start and end of the last segment that begins at or before `at`, in the window of `at`.
    fn at_or_before(&self, at: u64) -> Option<(u64, u64)> {
        debug_assert!(self.recent.is_empty(), "blocks are not in their places");
        let window = self.windows.get(&(at / WINDOW))?;
        let (s, segment) = &window.segs[..window.behind(at)].last()?;
        Some((*s, *s + segment.buf.len() as u64))
    }
    fn insert(&mut self, start: u64, segment: Segment) {
        self.counts.add(&segment);
        self.footprint += footprint(start, segment.buf.len());
        let number = start / WINDOW;
        let age = segment.age;
        let window = window_of(&mut self.windows, &mut self.ages, number, age);
        if age < window.oldest {
            self.ages.remove(&(window.oldest, number));
            self.ages.insert((age, number));
            window.oldest = age;
        }
        let at = window.from(start);
        window.segs.insert(at, (start, segment));
    }
    /// Takes out the segments that begin in `start..end`.
    fn remove(&mut self, start: u64, end: u64) -> Vec<(u64, Segment)> {
        let mut out = Vec::new();
        let numbers: SmallVec<[u64; 2]> = match end.checked_sub(1) {
            Some(last) if start < end => {
                self.windows.range(start / WINDOW..=last / WINDOW).map(|(n, _)| *n).collect()
            }
            _ => SmallVec::new(),
        };
        for number in numbers {
            let window = self.windows.get_mut(&number).expect("just seen");
            let before = out.len();
            let range = window.from(start)..window.from(end);
            out.extend(window.segs.drain(range));
            let was = window.oldest;
            if window.segs.is_empty() {
                self.windows.remove(&number);
                self.ages.remove(&(was, number));
            } else if out[before..].iter().any(|(_, segment)| segment.age == was) {
                let oldest = window.segs.iter().map(|(_, segment)| segment.age).min();
                window.oldest = oldest.expect("it is not empty");
                self.ages.remove(&(was, number));
                self.ages.insert((window.oldest, number));
            }
        }
        if self.windows.is_empty() {
            // An empty map keeps a node once it had one, and files with nothing dirty are many.
            (self.windows, self.ages, self.recent) =
                (BTreeMap::new(), BTreeSet::new(), VecDeque::new());
        }
        for (s, segment) in &out {
            self.counts.subtract(segment);
            self.footprint -= footprint(*s, segment.buf.len());
        }
        out
    }

    /// Takes `data` in for the bytes from `start` on. It is newer than anything held. Now and then
    /// this [settles](Self::settle).
    pub(crate) fn write(&mut self, start: u64, data: &[u8], age: u64, buffers: &Buffers) {
        if data.len() == SECTOR_LEN
            && start.is_multiple_of(SECTOR)
            && self.recent.len() < MOST_RECENT
        {
            let mut buf = buffers.get(SECTOR_LEN);
            buf.extend_from_slice(data);
            let block = Segment { age, buf };
            self.counts.add(&block);
            self.footprint += SECTOR;
            self.recent.push_back((start, block));
            return;
        }
        self.settle();
        self.put_all(start, data, age, buffers);
    }
    fn put_all(&mut self, start: u64, data: &[u8], age: u64, buffers: &Buffers) {
        let (mut at, mut data) = (start, data);
        while !data.is_empty() {
            let n = self.put(at, data, age, buffers);
            at += n as u64;
            data = &data[n..];
        }
    }
    /// Takes in the first part of `data` that goes into one segment. Returns its length.
    fn put(&mut self, start: u64, data: &[u8], age: u64, buffers: &Buffers) -> usize {
        let number = start / WINDOW;
        let window_end = (number + 1) * WINDOW;
        let mut limit = window_end.min(start + data.len() as u64);
        let window = window_of(&mut self.windows, &mut self.ages, number, age);
        let at = window.behind(start);
        if let Some((s, segment)) = at.checked_sub(1).map(|before| &mut window.segs[before]) {
            let e = *s + segment.buf.len() as u64;
            if e > start {
                // This goes over what is there.
                let n = index(e.min(limit) - start);
                segment.buf[index(start - *s)..][..n].copy_from_slice(&data[..n]);
                return n;
            }
        }
        if let Some((next, _)) = window.segs.get(at) {
            limit = limit.min(*next);
        }
        let n = index(limit - start);
        if let Some((s, segment)) = at.checked_sub(1).map(|before| &mut window.segs[before])
            && *s + segment.buf.len() as u64 == start
        {
            // Appends what fits without moving much: into the room that there is, or up to the end
            // of the last sector.
            let (memory, len) = (segment.memory(), segment.buf.len());
            let room = (segment.buf.capacity() - len).max(index(ceil(start) - start));
            let n = n.min(room);
            if n > 0 {
                segment.buf.extend_from_slice(&data[..n]);
                self.counts.memory = self.counts.memory - memory + segment.memory();
                self.counts.bytes += n as u64;
                self.footprint += footprint(*s, len + n) - footprint(*s, len);
                return n;
            }
        }
        let room = match n {
            ROOMY.. => index(ceil(limit).min(window_end) - start),
            _ => n,
        };
        let mut buf = buffers.get(room);
        buf.extend_from_slice(&data[..n]);
        let segment = Segment { age, buf };
        self.counts.add(&segment);
        self.footprint += footprint(start, n);
        window.segs.insert(at, (start, segment));
        n
    }

    /// Forgets the bytes of `start..end`.
    pub(crate) fn cut(&mut self, start: u64, end: u64) {
        self.settle();
        let reaches_in = self.at_or_before(start).filter(|(s, e)| *s < start && *e > start);
        let from = reaches_in.map_or(start, |(s, _)| s);
        for (s, mut segment) in self.remove(from, end) {
            let e = s + segment.buf.len() as u64;
            if e > end {
                let rest = segment.buf[index(end - s)..].to_vec();
                self.insert(end, Segment { age: segment.age, buf: rest });
            }
            if s < start {
                segment.buf.truncate(index(start - s));
                self.insert(s, segment);
            }
        }
    }

    /// Copies what is held into the buffer's gaps.
    pub(crate) fn overlay(&self, buf: &mut [u8], gaps: &mut Gaps) {
        let Some((from, to)) = gaps.bounds() else { return };
        let first = self.at_or_before(from).map_or(from, |(s, _)| s);
        for (at, segment) in self.segs_from(first).take_while(|(at, _)| *at < to) {
            gaps.fill(buf, at, &segment.buf);
        }
    }

    /// The first byte held at or behind `from`.
    pub(crate) fn first_from(&self, from: u64) -> Option<u64> {
        match self.at_or_before(from) {
            Some((_, e)) if e > from => Some(from),
            _ => self.segs_from(from).next().map(|(s, _)| s),
        }
    }

    /// Start and end of the first stretch of touching segments that ends behind `from`.
    pub(crate) fn stretch(&self, from: u64) -> Option<(u64, u64)> {
        let first = self.at_or_before(from).filter(|(_, e)| *e > from).map_or(from, |(s, _)| s);
        let mut found: Option<(u64, u64)> = None;
        for (s, segment) in self.segs_from(first) {
            let e = s + segment.buf.len() as u64;
            match &mut found {
                None => found = Some((s, e)),
                Some((_, end)) if *end == s => *end = e,
                Some(_) => break,
            }
        }
        found
    }

    /// The first run, from sector `from` on, of sectors whose segments share or touch sectors. It
    /// has at most about `limit` bytes, and at most about [`MOST_MADE`] of them are of sectors that
    /// have to be made whole. Also returns how many bytes those are at most.
    fn run(&self, from: u64, limit: u64) -> Option<(u64, u64, u64)> {
        let mut run: Option<(u64, u64)> = None;
        let mut made = 0;
        for (s, segment) in self.segs_from(from) {
            let last = s + segment.buf.len() as u64;
            let (a, b) = (floor(s), ceil(last));
            match &mut run {
                None => run = Some((a, b)),
                // A sector is taken as a whole, whatever the limit.
                Some((_, end)) if a < *end => *end = b.max(*end),
                Some((start, end)) if a == *end && b - *start <= limit && made < MOST_MADE => {
                    *end = b
                }
                Some(_) => break,
            }
            made += (u64::from(a < s) + u64::from(last < b)) * SECTOR;
        }
        run.map(|(start, end)| (start, end, made.min(end - start)))
    }

    /// The last sector boundary at or before `at` that no segment crosses.
    pub(crate) fn boundary(&self, at: u64) -> u64 {
        let mut at = at;
        while let Some((s, _)) = self.at_or_before(at).filter(|(s, e)| *s < at && *e > at) {
            at = floor(s);
        }
        at
    }

    /// Takes out the first run of segments from `*from` on whose sectors are not `busy`, and moves
    /// `*from` behind it. The caller has [settled](Self::settle) before.
    pub(crate) fn take(
        &mut self,
        from: &mut u64,
        limit: u64,
        busy: impl Fn(u64, u64) -> bool,
    ) -> Option<Taken> {
        debug_assert!(
            self.recent.is_empty() && self.over == Counts::default(),
            "it is not settled"
        );
        loop {
            let (start, end, made) = self.run(*from, limit.min(MAX_DATA_EXTENT))?;
            *from = end;
            if busy(start, end) {
                continue;
            }
            let segments = self.remove(start, end);
            return Some(Taken {
                start,
                end,
                age: segments.iter().map(|(_, segment)| segment.age).min().unwrap_or(u64::MAX),
                bytes: segments.iter().map(|(_, segment)| segment.buf.len() as u64).sum(),
                memory: segments.iter().map(|(_, segment)| segment.memory()).sum(),
                made,
                parts: segments.into_iter().map(|(at, segment)| (at, segment.buf)).collect(),
            });
        }
    }
}

/// Free buffers of one sector. Single sectors come and go by the hundred thousand, from one thread
/// to another, which is the hardest case for an allocator.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>, lock::SectorBuffers>);

impl Buffers {
    /// An empty buffer for `capacity` bytes.
    fn get(&self, capacity: usize) -> Vec<u8> {
        let kept = if capacity == SECTOR_LEN { self.0.lock().pop() } else { None };
        kept.unwrap_or_else(|| Vec::with_capacity(capacity))
    }
    /// Takes buffers back whose bytes are not needed any more, and keeps up to `most` of one
    /// sector. They are looked at before the lock is taken, because a writer takes a buffer with
    /// each block.
    pub(crate) fn give_back(&self, buffers: impl Iterator<Item = Vec<u8>>, most: usize) {
        let mut free: Vec<_> = buffers.filter(|b| b.capacity() == SECTOR_LEN).collect();
        free.iter_mut().for_each(Vec::clear);
        let mut kept = self.0.lock();
        free.truncate(most.saturating_sub(kept.len()));
        kept.append(&mut free);
    }
}

/// Segments that were taken out, to be written to the device.
#[derive(Debug)]
pub(crate) struct Taken {
    /// First byte of their first sector.
    pub(crate) start: u64,
    /// First byte behind their last sector.
    pub(crate) end: u64,
    /// Tick of the oldest write in them.
    pub(crate) age: u64,
    /// File offset and bytes, ascending.
    pub(crate) parts: Vec<(u64, Vec<u8>)>,
    /// Their bytes together.
    pub(crate) bytes: u64,
    /// Bytes of memory that they take.
    pub(crate) memory: u64,
    /// Bytes of sectors that they fill only in part, at most.
    pub(crate) made: u64,
}

impl Taken {
    /// Copies them into the buffer's gaps.
    pub(crate) fn overlay(&self, buf: &mut [u8], gaps: &mut Gaps) {
        let Some((from, to)) = gaps.bounds() else { return };
        let first = self.parts.partition_point(|(at, data)| at + data.len() as u64 <= from);
        for (at, data) in self.parts[first..].iter().take_while(|(at, _)| *at < to) {
            gaps.fill(buf, *at, data);
        }
    }
    /// The first byte that it has at or behind `from`.
    pub(crate) fn first_from(&self, from: u64) -> Option<u64> {
        let first = self.parts.partition_point(|(at, data)| at + data.len() as u64 <= from);
        self.parts.get(first).map(|(at, _)| (*at).max(from))
    }
}

/// Sector size as an index.
pub(crate) const SECTOR_LEN: usize = SECTOR as usize;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Write(u64, usize),
        Cut(u64, u64),
        Take,
    }

    fn op() -> impl Strategy<Value = Op> {
        // Places around a window's border, and small ones, so that everything touches everything.
        let at = prop_oneof![0u64..30_000, (WINDOW - 20_000)..(WINDOW + 20_000)];
        let len = prop_oneof![1usize..300, 3000usize..9000, Just(4096), 60_000usize..150_000];
        prop_oneof![
            6 => (at.clone(), len).prop_map(|(a, l)| Op::Write(a, l)),
            6 => at.clone().prop_map(|a| Op::Write(floor(a), SECTOR_LEN)),
            2 => (at.clone(), 1u64..200_000).prop_map(|(a, l)| Op::Cut(a, a + l)),
            1 => Just(Op::Take),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn segments_match_bytes(ops in prop::collection::vec(op(), 1..40)) {
            const LEN: usize = (WINDOW + 400_000) as usize;
            let (mut dirty, buffers) = (Dirty::default(), Buffers::default());
            let mut model: Vec<Option<u8>> = vec![None; LEN];
            for (tick, op) in ops.into_iter().enumerate() {
                let mark = tick as u8 + 1;
                match op {
                    Op::Write(at, len) => {
                        let data: Vec<u8> = (0..len).map(|i| mark ^ (i as u8)).collect();
                        dirty.write(at, &data, tick as u64, &buffers);
                        for (i, b) in data.iter().enumerate() {
                            model[at as usize + i] = Some(*b);
                        }
                    }
                    Op::Cut(a, b) => {
                        dirty.cut(a, b);
                        model[a as usize..b as usize].fill(None);
                    }
                    Op::Take => {
                        dirty.settle();
                        let mut from = dirty.boundary(tick as u64 % 4 * 3 * SECTOR);
                        if let Some(t) = dirty.take(&mut from, 64 << 10, |a, _| a % 8192 == 0) {
                            prop_assert!(t.start % SECTOR == 0 && t.end % SECTOR == 0);
                            prop_assert!(t.end == from);
                            prop_assert!(!t.start.is_multiple_of(8192));
                            prop_assert_eq!(
                                t.parts.iter().map(|(_, p)| p.len() as u64).sum::<u64>(), t.bytes);
                            let mut buf = vec![0; (t.end - t.start) as usize];
                            let mut gaps = Gaps::new(t.start, buf.len());
                            t.overlay(&mut buf, &mut gaps);
                            for (i, b) in buf.iter().enumerate() {
                                let at = t.start + i as u64;
                                let left = gaps.left().iter().any(|(a, e)| (*a..*e).contains(&at));
                                prop_assert_eq!(model[at as usize].take(), (!left).then_some(*b));
                            }
                            // The buffers' old bytes must not come back.
                            buffers.give_back(t.parts.into_iter().map(|(_, buf)| buf), 3);
                        }
                    }
                }
                let held = model.iter().filter(|b| b.is_some()).count() as u64;
                // Until it is settled, blocks may be counted twice.
                prop_assert!(dirty.counts().bytes >= held && dirty.footprint() >= held);
                prop_assert_eq!(dirty.is_empty(), held == 0);
                let (oldest, told) = (dirty.oldest(), dirty.counts());
                if tick % 3 > 0 {
                    let before = dirty.recent.len();
                    let more = dirty.sort_in_some(tick % 3);
                    let left = before.saturating_sub(tick % 3);
                    prop_assert_eq!((dirty.recent.len(), more), (left, left > 0));
                    prop_assert_eq!((dirty.oldest(), dirty.counts()), (oldest, told));
                    continue;
                }
                if tick % 2 > 0 {
                    dirty.sort_in();
                    prop_assert_eq!(dirty.counts(), told);
                } else {
                    dirty.settle();
                    prop_assert_eq!(dirty.counts().bytes, held);
                    let memory: u64 = dirty.segs_from(0).map(|(_, s)| s.memory()).sum();
                    prop_assert_eq!(dirty.counts().memory, memory);
                    prop_assert_eq!(dirty.counts().segments, dirty.segs_from(0).count() as u64);
                }
                prop_assert!(dirty.footprint() >= held);
                prop_assert_eq!(oldest, dirty.segs_from(0).map(|(_, s)| s.age).min());
                prop_assert_eq!(dirty.ages.len(), dirty.windows.len());
                let mut buf = vec![0; LEN];
                let mut gaps = Gaps::new(0, LEN);
                dirty.overlay(&mut buf, &mut gaps);
                let mut covered = vec![true; LEN];
                for (a, b) in gaps.left() {
                    covered[*a as usize..*b as usize].fill(false);
                }
                for i in 0..LEN {
                    prop_assert_eq!(model[i], covered[i].then_some(buf[i]), "byte {}", i);
                }
                let first = model.iter().position(Option::is_some);
                prop_assert_eq!(dirty.stretch(0).map(|s| s.0), first.map(|f| f as u64));
                let from = tick * 7919 % LEN;
                let next = model[from..].iter().position(Option::is_some)
                    .map(|f| (from + f) as u64);
                prop_assert_eq!(dirty.first_from(from as u64), next);
                let boundary = dirty.boundary(5 * SECTOR);
                prop_assert!(boundary.is_multiple_of(SECTOR) && boundary <= 5 * SECTOR);
                let crosses =
                    |(s, seg): (u64, &Segment)| s < boundary && s + seg.buf.len() as u64 > boundary;
                prop_assert!(!dirty.segs_from(0).any(crosses));
                for (s, seg) in dirty.segs_from(0) {
                    prop_assert!(!seg.buf.is_empty());
                    prop_assert!(s / WINDOW == (s + seg.buf.len() as u64 - 1) / WINDOW);
                }
            }
            dirty.cut(0, LEN as u64);
            prop_assert!(dirty.is_empty() && dirty.footprint() == 0);
            prop_assert!(dirty.counts() == Counts::default());
        }
    }

    /// Blocks that are written again and again do not count many times for long.
    #[test]
    fn blocks_over_others_are_counted_once_in_the_end() {
        let (mut dirty, buffers) = (Dirty::default(), Buffers::default());
        for i in 0..4 * MOST_RECENT as u64 {
            dirty.write(i % 8 * SECTOR, &[i as u8; SECTOR_LEN], i, &buffers);
            assert!(dirty.counts().bytes <= (MOST_RECENT as u64 + 8) * SECTOR);
        }
        dirty.settle();
        assert_eq!((dirty.counts().bytes, dirty.footprint()), (8 * SECTOR, 8 * SECTOR));
        assert_eq!((dirty.counts().segments, dirty.oldest()), (8, Some(0)));
    }

    /// Memory stays near what was written, however it was written.
    #[test]
    fn small_writes_take_little_more_than_their_bytes() {
        let per_byte = |step: u64, len: usize, count: u64| {
            let (mut dirty, buffers) = (Dirty::default(), Buffers::default());
            for i in 0..count {
                dirty.write(i * step, &vec![1; len], i, &buffers);
            }
            dirty.counts().memory as f64 / (count * len as u64) as f64
        };
        assert!(per_byte(4096, 4096, 1000) < 1.05, "blocks");
        assert!(per_byte(8192, 4096, 1000) < 1.05, "every other block");
        assert!(per_byte(10_240, 10_240, 200) < 1.1, "what tar writes");
        assert!(per_byte(100, 100, 5000) < 1.2, "a log");
        assert!(per_byte(1 << 20, 1 << 20, 3) < 1.01, "large pieces");
    }
}
