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
//! Blocks of one sector go to a list first, and later to their places. A block's place lies in
//! tables that another processor used last: the processor that writes back takes most blocks out
//! again. So finding the place would take longer than copying the block. A caller that wants to
//! know what there is, as a rule write-back, brings the blocks to their places
//! ([`Dirty::sort_in`]). Until then a block counts as if nothing lay below it
//! (`docs/DESIGN-NOTES.md`, "Random blocks").

use crate::base::sectors::{SECTOR, ceil, floor};
use crate::lock::{self, Mutex};
use larder_format::{FileOffset, MAX_DATA_EXTENT};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

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

/// When something was written. Ticks order the writes of all files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tick(pub(crate) u64);

impl Tick {
    /// Later than every write.
    pub(crate) const NEVER: Self = Self(u64::MAX);
    /// The tick after this one.
    pub(crate) fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

#[derive(Debug)]
struct Segment {
    /// Tick of its oldest write.
    age: Tick,
    buf: Vec<u8>,
}

impl Segment {
    fn memory(&self) -> u64 {
        self.buf.capacity() as u64 + SEGMENT_MEMORY
    }
}

/// Parts of a buffer that are still to be filled: ranges of the file, ascending.
#[derive(Debug)]
pub(crate) struct Gaps {
    /// File offset of the buffer's first byte.
    base: u64,
    left: SmallVec<[Range<u64>; 2]>,
}

impl Gaps {
    /// All of a buffer of `len` bytes, which is for the file's bytes from `base` on.
    pub(crate) fn new(base: u64, len: usize) -> Self {
        let all = base..base + len as u64;
        Self { base, left: (len > 0).then_some(all).into_iter().collect() }
    }
    /// What is still to be filled.
    pub(crate) fn left(&self) -> &[Range<u64>] {
        &self.left
    }
    /// The part of the buffer for a range of the file.
    pub(crate) fn slice<'b>(&self, buf: &'b mut [u8], range: &Range<u64>) -> &'b mut [u8] {
        &mut buf[index(range.start - self.base)..index(range.end - self.base)]
    }
    /// Copies from `data`, which lies at `at`, into the gaps.
    fn fill(&mut self, buf: &mut [u8], at: u64, data: &[u8]) {
        let data_end = at + data.len() as u64;
        let mut left = SmallVec::new();
        for gap in &self.left {
            let (a, b) = (gap.start.max(at), gap.end.min(data_end));
            if a >= b {
                left.push(gap.clone());
                continue;
            }
            buf[index(a - self.base)..index(b - self.base)]
                .copy_from_slice(&data[index(a - at)..index(b - at)]);
            left.extend([gap.start..a, b..gap.end].into_iter().filter(|rest| !rest.is_empty()));
        }
        self.left = left;
    }
    /// From the first gap to the end of the last one.
    pub(crate) fn bounds(&self) -> Option<Range<u64>> {
        Some(self.left.first()?.start..self.left.last()?.end)
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
    oldest: Tick,
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
    ages: &mut BTreeSet<(Tick, u64)>,
    number: u64,
    age: Tick,
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
    ages: BTreeSet<(Tick, u64)>,
    /// Blocks that are not in their places yet, in the order in which they came. They are newer
    /// than what the windows have.
    recent: VecDeque<(u64, Segment)>,
    counts: Counts,
    /// By how much the counts are too high, because some blocks turned out to lie over others. A
    /// negative number wraps around.
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
    pub(crate) fn oldest(&self) -> Option<Tick> {
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
            // The counts stay as they are until they are settled. Others have passed them on, and
            // must see each change.
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
    /// Takes out the segments that begin in the range.
    fn remove(&mut self, range: &Range<u64>) -> Vec<(u64, Segment)> {
        let mut out = Vec::new();
        let numbers: SmallVec<[u64; 2]> = if range.is_empty() {
            SmallVec::new()
        } else {
            let (first, last) = (range.start / WINDOW, (range.end - 1) / WINDOW);
            self.windows.range(first..=last).map(|(n, _)| *n).collect()
        };
        for number in numbers {
            let window = self.windows.get_mut(&number).expect("just seen");
            let before = out.len();
            let segs = window.from(range.start)..window.from(range.end);
            out.extend(window.segs.drain(segs));
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
    pub(crate) fn write(&mut self, start: u64, data: &[u8], age: Tick, buffers: &Buffers) {
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
    fn put_all(&mut self, start: u64, data: &[u8], age: Tick, buffers: &Buffers) {
        let (mut at, mut data) = (start, data);
        while !data.is_empty() {
            let n = self.put(at, data, age, buffers);
            at += n as u64;
            data = &data[n..];
        }
    }
    /// Takes in the first part of `data` that goes into one segment. Returns its length.
    fn put(&mut self, start: u64, data: &[u8], age: Tick, buffers: &Buffers) -> usize {
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

    /// Forgets the bytes of a range.
    pub(crate) fn cut(&mut self, range: Range<u64>) {
        self.settle();
        let Range { start, end } = range;
        let reaches_in = self.at_or_before(start).filter(|(s, e)| *s < start && *e > start);
        let from = reaches_in.map_or(start, |(s, _)| s);
        for (s, mut segment) in self.remove(&(from..end)) {
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
        let Some(all) = gaps.bounds() else { return };
        let first = self.at_or_before(all.start).map_or(all.start, |(s, _)| s);
        for (at, segment) in self.segs_from(first).take_while(|(at, _)| *at < all.end) {
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

    /// The first stretch of touching segments that ends behind `from`.
    pub(crate) fn stretch(&self, from: u64) -> Option<Range<u64>> {
        let first = self.at_or_before(from).filter(|(_, e)| *e > from).map_or(from, |(s, _)| s);
        let mut found: Option<Range<u64>> = None;
        for (s, segment) in self.segs_from(first) {
            let e = s + segment.buf.len() as u64;
            match &mut found {
                None => found = Some(s..e),
                Some(stretch) if stretch.end == s => stretch.end = e,
                Some(_) => break,
            }
        }
        found
    }

    /// The first run, from sector `from` on, of sectors whose segments share or touch sectors. It
    /// has at most about `limit` bytes, and at most about [`MOST_MADE`] of them are of sectors that
    /// have to be made whole. Also returns how many bytes those are at most.
    fn run(&self, from: FileOffset, limit: u64) -> Option<(Range<u64>, u64)> {
        let mut run: Option<Range<u64>> = None;
        let mut made = 0;
        for (s, segment) in self.segs_from(from.0) {
            let last = s + segment.buf.len() as u64;
            let (a, b) = (floor(s), ceil(last));
            match &mut run {
                None => run = Some(a..b),
                // A sector is taken as a whole, whatever the limit.
                Some(run) if a < run.end => run.end = b.max(run.end),
                Some(run) if a == run.end && b - run.start <= limit && made < MOST_MADE => {
                    run.end = b
                }
                Some(_) => break,
            }
            made += (u64::from(a < s) + u64::from(last < b)) * SECTOR;
        }
        run.map(|run| {
            let made = made.min(run.end - run.start);
            (run, made)
        })
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
        busy: impl Fn(&Range<u64>) -> bool,
    ) -> Option<Taken> {
        debug_assert!(
            self.recent.is_empty() && self.over == Counts::default(),
            "it is not settled"
        );
        loop {
            let (range, made) = self.run(FileOffset(*from), limit.min(MAX_DATA_EXTENT))?;
            *from = range.end;
            if busy(&range) {
                continue;
            }
            let segments = self.remove(&range);
            return Some(Taken {
                start: range.start,
                end: range.end,
                age: segments.iter().map(|(_, segment)| segment.age).min().unwrap_or(Tick::NEVER),
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
    pub(crate) age: Tick,
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
    /// Bytes of their sectors.
    pub(crate) fn span(&self) -> u64 {
        self.end - self.start
    }
    /// Copies them into the buffer's gaps.
    pub(crate) fn overlay(&self, buf: &mut [u8], gaps: &mut Gaps) {
        let Some(all) = gaps.bounds() else { return };
        let first = self.parts.partition_point(|(at, data)| at + data.len() as u64 <= all.start);
        for (at, data) in self.parts[first..].iter().take_while(|(at, _)| *at < all.end) {
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

    const LEN: usize = (WINDOW + 400_000) as usize;

    /// What is dirty, and what should be, byte by byte.
    struct Both {
        dirty: Dirty,
        buffers: Buffers,
        model: Vec<Option<u8>>,
    }

    impl Both {
        fn apply(&mut self, op: Op, tick: usize) {
            let mark = tick as u8 + 1;
            match op {
                Op::Write(at, len) => {
                    let data: Vec<u8> = (0..len).map(|i| mark ^ (i as u8)).collect();
                    self.dirty.write(at, &data, Tick(tick as u64), &self.buffers);
                    for (i, b) in data.iter().enumerate() {
                        self.model[at as usize + i] = Some(*b);
                    }
                }
                Op::Cut(a, b) => {
                    self.dirty.cut(a..b);
                    self.model[a as usize..b as usize].fill(None);
                }
                Op::Take => self.take(tick as u64 % 4 * 3 * SECTOR),
            }
        }
        fn take(&mut self, from: u64) {
            self.dirty.settle();
            let mut from = self.dirty.boundary(from);
            let taken = self.dirty.take(&mut from, 64 << 10, |r| r.start % 8192 == 0);
            let Some(t) = taken else { return };
            assert!(t.start % SECTOR == 0 && t.end % SECTOR == 0);
            assert_eq!(t.end, from);
            assert!(!t.start.is_multiple_of(8192));
            assert_eq!(t.parts.iter().map(|(_, p)| p.len() as u64).sum::<u64>(), t.bytes);
            let mut buf = vec![0; index(t.span())];
            let mut gaps = Gaps::new(t.start, buf.len());
            t.overlay(&mut buf, &mut gaps);
            for (i, b) in buf.iter().enumerate() {
                let at = t.start + i as u64;
                let left = gaps.left().iter().any(|gap| gap.contains(&at));
                assert_eq!(self.model[at as usize].take(), (!left).then_some(*b));
            }
            // The buffers' old bytes must not come back.
            self.buffers.give_back(t.parts.into_iter().map(|(_, buf)| buf), 3);
        }
        fn held(&self) -> u64 {
            self.model.iter().filter(|b| b.is_some()).count() as u64
        }
        /// Brings some blocks to their places, or all of them, and looks at the sums.
        fn check_sums(&mut self, tick: usize) {
            let (held, dirty) = (self.held(), &mut self.dirty);
            // Until it is settled, blocks may be counted twice.
            assert!(dirty.counts().bytes >= held && dirty.footprint() >= held);
            assert_eq!(dirty.is_empty(), held == 0);
            let (oldest, told) = (dirty.oldest(), dirty.counts());
            if !tick.is_multiple_of(3) {
                let before = dirty.recent.len();
                let more = dirty.sort_in_some(tick % 3);
                let left = before.saturating_sub(tick % 3);
                assert_eq!((dirty.recent.len(), more), (left, left > 0));
                assert_eq!((dirty.oldest(), dirty.counts()), (oldest, told));
                return;
            }
            if !tick.is_multiple_of(2) {
                dirty.sort_in();
                assert_eq!(dirty.counts(), told);
            } else {
                dirty.settle();
                assert_eq!(dirty.counts().bytes, held);
                let memory: u64 = dirty.segs_from(0).map(|(_, s)| s.memory()).sum();
                assert_eq!(dirty.counts().memory, memory);
                assert_eq!(dirty.counts().segments, dirty.segs_from(0).count() as u64);
            }
            assert!(dirty.footprint() >= held);
            assert_eq!(oldest, dirty.segs_from(0).map(|(_, s)| s.age).min());
            assert_eq!(dirty.ages.len(), dirty.windows.len());
        }
        /// Looks at the bytes. All blocks are in their places.
        fn check_bytes(&self, from: usize) {
            let Self { dirty, model, .. } = self;
            let mut buf = vec![0; LEN];
            let mut gaps = Gaps::new(0, LEN);
            dirty.overlay(&mut buf, &mut gaps);
            let mut covered = vec![true; LEN];
            for gap in gaps.left() {
                covered[gap.start as usize..gap.end as usize].fill(false);
            }
            for i in 0..LEN {
                assert_eq!(model[i], covered[i].then_some(buf[i]), "byte {i}");
            }
            let next = |from: usize| {
                model[from..].iter().position(Option::is_some).map(|f| (from + f) as u64)
            };
            assert_eq!(dirty.stretch(0).map(|s| s.start), next(0));
            assert_eq!(dirty.first_from(from as u64), next(from));
            let boundary = dirty.boundary(5 * SECTOR);
            assert!(boundary.is_multiple_of(SECTOR) && boundary <= 5 * SECTOR);
            let crosses =
                |(s, seg): (u64, &Segment)| s < boundary && s + seg.buf.len() as u64 > boundary;
            assert!(!dirty.segs_from(0).any(crosses));
            for (s, seg) in dirty.segs_from(0) {
                assert!(!seg.buf.is_empty());
                assert!(s / WINDOW == (s + seg.buf.len() as u64 - 1) / WINDOW);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn segments_match_bytes(ops in prop::collection::vec(op(), 1..40)) {
            let (dirty, buffers) = (Dirty::default(), Buffers::default());
            let mut both = Both { dirty, buffers, model: vec![None; LEN] };
            for (tick, op) in ops.into_iter().enumerate() {
                both.apply(op, tick);
                both.check_sums(tick);
                if tick % 3 == 0 {
                    both.check_bytes(tick * 7919 % LEN);
                }
            }
            both.dirty.cut(0..LEN as u64);
            prop_assert!(both.dirty.is_empty() && both.dirty.footprint() == 0);
            prop_assert!(both.dirty.counts() == Counts::default());
        }
    }

    /// Blocks that are written again and again do not count many times for long.
    #[test]
    fn blocks_over_others_are_counted_once_in_the_end() {
        let (mut dirty, buffers) = (Dirty::default(), Buffers::default());
        for i in 0..4 * MOST_RECENT as u64 {
            dirty.write(i % 8 * SECTOR, &[i as u8; SECTOR_LEN], Tick(i), &buffers);
            assert!(dirty.counts().bytes <= (MOST_RECENT as u64 + 8) * SECTOR);
        }
        dirty.settle();
        assert_eq!((dirty.counts().bytes, dirty.footprint()), (8 * SECTOR, 8 * SECTOR));
        assert_eq!((dirty.counts().segments, dirty.oldest()), (8, Some(Tick(0))));
    }

    /// Memory stays near what was written, however it was written.
    #[test]
    fn small_writes_take_little_more_than_their_bytes() {
        let per_byte = |step: u64, len: usize, count: u64| {
            let (mut dirty, buffers) = (Dirty::default(), Buffers::default());
            for i in 0..count {
                dirty.write(i * step, &vec![1; len], Tick(i), &buffers);
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
