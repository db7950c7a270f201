//! Bytes of one file that callers have written and the device has not.
//!
//! [`Dirty`] keeps them in segments, to the byte: a segment never crosses a boundary of [`WINDOW`] bytes, small writes
//! grow a segment in place, large ones become one of their own. Reading overlays them on what the extents hold; the
//! [`Gaps`] that are left are read from there. Taking segments out ([`Taken`]) moves them, it does not copy; until they
//! have landed in extents their bytes are still read from there, beneath newer ones.

use super::extents::{SECTOR, ceil, floor};
use larder_format::MAX_DATA_EXTENT;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Segments end at multiples of this.
const WINDOW: u64 = 1 << 20;
/// Writes from this size on are not copied into an existing segment.
const LARGE: usize = 64 << 10;

#[derive(Debug)]
struct Segment {
    /// Tick of the oldest write in it.
    age: u64,
    buf: Vec<u8>,
}

/// Parts of a buffer that are still to be filled: start and end in the file, ascending.
#[derive(Debug)]
pub(super) struct Gaps {
    /// File offset of the buffer's first byte.
    base: u64,
    left: SmallVec<[(u64, u64); 2]>,
}

impl Gaps {
    /// All of a buffer of `len` bytes for the file's bytes from `base` on.
    pub(super) fn new(base: u64, len: usize) -> Self {
        let left =
            if len == 0 { SmallVec::new() } else { SmallVec::from_slice(&[(base, base + len as u64)]) };
        Self { base, left }
    }
    /// What is left.
    pub(super) fn left(&self) -> &[(u64, u64)] {
        &self.left
    }
    /// The part of the buffer for a range of the file.
    pub(super) fn slice<'b>(&self, buf: &'b mut [u8], start: u64, end: u64) -> &'b mut [u8] {
        &mut buf[index(start - self.base)..index(end - self.base)]
    }
    /// Copies from `data`, which lies at `at`, into what is left.
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
    fn bounds(&self) -> Option<(u64, u64)> {
        Some((self.left.first()?.0, self.left.last()?.1))
    }
}

/// An offset within a buffer in memory.
pub(super) fn index(n: u64) -> usize {
    usize::try_from(n).expect("within a buffer in memory")
}

/// Bytes of the sectors that a range touches.
fn footprint(start: u64, len: usize) -> u64 {
    ceil(start + len as u64) - floor(start)
}

/// The segments of one file.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    segs: BTreeMap<u64, Segment>,
    bytes: u64,
    footprint: u64,
}

impl Dirty {
    /// Bytes held.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Bytes of device space that they will need at most.
    pub(super) fn footprint(&self) -> u64 {
        self.footprint
    }
    /// Nothing held?
    pub(super) fn is_empty(&self) -> bool {
        self.segs.is_empty()
    }
    /// Tick of the oldest write held.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.segs.values().map(|s| s.age).min()
    }
    fn insert(&mut self, start: u64, segment: Segment) {
        self.bytes += segment.buf.len() as u64;
        self.footprint += footprint(start, segment.buf.len());
        let old = self.segs.insert(start, segment);
        debug_assert!(old.is_none(), "segments do not overlap");
    }
    fn remove(&mut self, start: u64) -> Segment {
        let segment = self.segs.remove(&start).expect("looked up");
        self.bytes -= segment.buf.len() as u64;
        self.footprint -= footprint(start, segment.buf.len());
        segment
    }
    /// The segment that reaches furthest of those that begin at or before `at`.
    fn at_or_before(&self, at: u64) -> Option<(u64, u64)> {
        self.segs.range(..=at).next_back().map(|(s, seg)| (*s, *s + seg.buf.len() as u64))
    }

    /// Takes `data` for the bytes from `start` on; newer than anything held.
    pub(super) fn write(&mut self, start: u64, data: &[u8], age: u64) {
        let (mut start, mut data) = (start, data);
        while !data.is_empty() {
            let room = index(WINDOW - start % WINDOW);
            let (piece, rest) = data.split_at(room.min(data.len()));
            if piece.len() >= LARGE {
                self.cut(start, start + piece.len() as u64);
                self.insert(start, Segment { age, buf: piece.to_vec() });
            } else {
                self.write_small(start, piece, age);
            }
            start += piece.len() as u64;
            data = rest;
        }
    }
    /// Writes within a window, into the segment that is there or into a new one.
    fn write_small(&mut self, start: u64, data: &[u8], age: u64) {
        let end = start + data.len() as u64;
        let grows = self.at_or_before(start).filter(|(s, e)| *e >= start && *s / WINDOW == start / WINDOW);
        let (at, mut segment) = match grows {
            Some((s, e)) if e >= end => {
                // The common case of rewriting: in place.
                let segment = self.segs.get_mut(&s).expect("looked up");
                let from = index(start - s);
                segment.buf[from..from + data.len()].copy_from_slice(data);
                return;
            }
            Some((s, _)) => (s, self.remove(s)),
            None => (start, Segment { age, buf: Vec::new() }),
        };
        segment.buf.truncate(index(start - at));
        segment.buf.extend_from_slice(data);
        // What follows within the window and touches is one with it, but for what was overwritten.
        let window_end = (start / WINDOW + 1) * WINDOW;
        while let Some((&s, next)) = self.segs.range(start..=end).next()
            && s < window_end
        {
            let next_end = s + next.buf.len() as u64;
            let next = self.remove(s);
            segment.age = segment.age.min(next.age);
            if next_end > end {
                segment.buf.extend_from_slice(&next.buf[index(end - s)..]);
                break;
            }
        }
        self.insert(at, segment);
    }

    /// Forgets the bytes of `start..end`.
    pub(super) fn cut(&mut self, start: u64, end: u64) {
        if let Some((s, e)) = self.at_or_before(start)
            && s < start
            && e > start
        {
            let mut segment = self.remove(s);
            if e > end {
                let rest = segment.buf[index(end - s)..].to_vec();
                self.insert(end, Segment { age: segment.age, buf: rest });
            }
            segment.buf.truncate(index(start - s));
            self.insert(s, segment);
        }
        while let Some((&s, segment)) = self.segs.range(start..end).next() {
            let e = s + segment.buf.len() as u64;
            let mut segment = self.remove(s);
            if e > end {
                segment.buf.drain(..index(end - s));
                self.insert(end, segment);
                break;
            }
        }
    }

    /// Copies what is held into the buffer's gaps.
    pub(super) fn overlay(&self, buf: &mut [u8], gaps: &mut Gaps) {
        let Some((from, to)) = gaps.bounds() else { return };
        let first = self.at_or_before(from).map_or(from, |(s, _)| s);
        for (at, segment) in self.segs.range(first..to) {
            gaps.fill(buf, *at, &segment.buf);
        }
    }

    /// First and last byte (exclusive) of the first stretch of touching segments that ends behind `from`.
    pub(super) fn stretch(&self, from: u64) -> Option<(u64, u64)> {
        let first = self.at_or_before(from).filter(|(_, e)| *e > from).map_or(from, |(s, _)| s);
        let mut found: Option<(u64, u64)> = None;
        for (s, segment) in self.segs.range(first..) {
            let e = s + segment.buf.len() as u64;
            match &mut found {
                None => found = Some((*s, e)),
                Some((_, end)) if *end == *s => *end = e,
                Some(_) => break,
            }
        }
        found
    }

    /// The sectors of the first run of segments from sector `from` on that share or touch sectors; at most about
    /// `limit` bytes.
    fn run(&self, from: u64, limit: u64) -> Option<(u64, u64)> {
        let mut run: Option<(u64, u64)> = None;
        for (s, segment) in self.segs.range(from..) {
            let (a, b) = (floor(*s), ceil(s + segment.buf.len() as u64));
            match &mut run {
                None => run = Some((a, b)),
                // A sector goes as one, whatever the limit.
                Some((_, end)) if a < *end => *end = b.max(*end),
                Some((start, end)) if a == *end && b - *start <= limit => *end = b,
                Some(_) => break,
            }
        }
        run
    }

    /// Takes out the first run of segments from `*from` on whose sectors are none of `busy`, and moves `*from` behind it.
    pub(super) fn take(
        &mut self,
        from: &mut u64,
        limit: u64,
        busy: impl Fn(u64, u64) -> bool,
    ) -> Option<Taken> {
        loop {
            let (start, end) = self.run(*from, limit.min(MAX_DATA_EXTENT))?;
            *from = end;
            if busy(start, end) {
                continue;
            }
            let keys: SmallVec<[u64; 4]> = self.segs.range(start..end).map(|(s, _)| *s).collect();
            let mut taken =
                Taken { start, end, age: u64::MAX, parts: Vec::with_capacity(keys.len()), bytes: 0 };
            for key in keys {
                let segment = self.remove(key);
                taken.age = taken.age.min(segment.age);
                taken.bytes += segment.buf.len() as u64;
                taken.parts.push((key, segment.buf));
            }
            return Some(taken);
        }
    }
}

/// Segments on their way to the device.
#[derive(Debug)]
pub(super) struct Taken {
    /// First byte of their first sector.
    pub(super) start: u64,
    /// First byte behind their last sector.
    pub(super) end: u64,
    /// Tick of the oldest write in them.
    pub(super) age: u64,
    /// File offset and bytes, ascending.
    pub(super) parts: Vec<(u64, Vec<u8>)>,
    /// Their bytes together.
    pub(super) bytes: u64,
}

impl Taken {
    /// Copies them into the buffer's gaps.
    pub(super) fn overlay(&self, buf: &mut [u8], gaps: &mut Gaps) {
        let Some((from, to)) = gaps.bounds() else { return };
        for (at, data) in &self.parts {
            if *at < to && at + data.len() as u64 > from {
                gaps.fill(buf, *at, data);
            }
        }
    }
    /// Does it touch the sectors of `start..end`?
    pub(super) fn touches(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
    /// First byte that it has at or behind `from`.
    pub(super) fn first_from(&self, from: u64) -> Option<u64> {
        self.parts.iter().find(|(at, data)| at + data.len() as u64 > from).map(|(at, _)| (*at).max(from))
    }
}

/// Sector size as an index.
pub(super) const SECTOR_LEN: usize = SECTOR as usize;

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
        // Around a window's border and in small steps, so that everything touches everything.
        let at = prop_oneof![0u64..30_000, (WINDOW - 20_000)..(WINDOW + 20_000)];
        let len = prop_oneof![1usize..300, 3000usize..9000, Just(4096), 60_000usize..150_000];
        prop_oneof![
            6 => (at.clone(), len).prop_map(|(a, l)| Op::Write(a, l)),
            2 => (at.clone(), 1u64..200_000).prop_map(|(a, l)| Op::Cut(a, a + l)),
            1 => Just(Op::Take),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn segments_match_bytes(ops in prop::collection::vec(op(), 1..30)) {
            const LEN: usize = (WINDOW + 400_000) as usize;
            let mut dirty = Dirty::default();
            let mut model: Vec<Option<u8>> = vec![None; LEN];
            for (tick, op) in ops.into_iter().enumerate() {
                let mark = tick as u8 + 1;
                match op {
                    Op::Write(at, len) => {
                        let data: Vec<u8> = (0..len).map(|i| mark ^ (i as u8)).collect();
                        dirty.write(at, &data, tick as u64);
                        for (i, b) in data.iter().enumerate() {
                            model[at as usize + i] = Some(*b);
                        }
                    }
                    Op::Cut(a, b) => {
                        dirty.cut(a, b);
                        model[a as usize..b as usize].fill(None);
                    }
                    Op::Take => {
                        let mut from = 0;
                        if let Some(t) = dirty.take(&mut from, 64 << 10, |a, _| a % 8192 == 0) {
                            prop_assert!(t.start % SECTOR == 0 && t.end % SECTOR == 0 && t.end == from);
                            prop_assert!(!t.start.is_multiple_of(8192));
                            let mut buf = vec![0; (t.end - t.start) as usize];
                            let mut gaps = Gaps::new(t.start, buf.len());
                            t.overlay(&mut buf, &mut gaps);
                            for (i, b) in buf.iter().enumerate() {
                                let at = t.start + i as u64;
                                let left = gaps.left().iter().any(|(a, e)| (*a..*e).contains(&at));
                                prop_assert_eq!(model[at as usize].take(), (!left).then_some(*b));
                            }
                        }
                    }
                }
                let held = model.iter().filter(|b| b.is_some()).count() as u64;
                prop_assert_eq!(dirty.bytes(), held);
                prop_assert!(dirty.footprint() >= dirty.bytes());
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
                for (s, seg) in &dirty.segs {
                    prop_assert!(!seg.buf.is_empty() && s / WINDOW == (s + seg.buf.len() as u64 - 1) / WINDOW);
                }
            }
            dirty.cut(0, LEN as u64);
            prop_assert!(dirty.is_empty() && dirty.footprint() == 0);
        }
    }
}
