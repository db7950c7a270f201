//! Memory of a batch: pieces of it are lent, and come back in any order. It is handed out round and
//! round, so a piece that stays long keeps those behind it waiting, and nothing is ever moved.

use crate::file::memory::TransferMemory;
use std::collections::VecDeque;
use std::ops::Range;

/// Aligned memory of a fixed size.
pub(super) struct Memory {
    /// Empty before it is first used.
    bytes: TransferMemory,
    size: usize,
    /// Where the next piece may begin.
    next: usize,
    /// The pieces that are lent, and those between them that came back, in their order.
    lent: VecDeque<Place>,
    /// The number of the first of these.
    first: u64,
}

/// Where a piece lies.
struct Place {
    range: Range<usize>,
    is_back: bool,
}

/// A piece that is lent.
#[derive(Debug)]
#[must_use]
pub(super) struct Lent {
    number: u64,
    range: Range<usize>,
}

impl Memory {
    pub(super) fn new(size: usize) -> Self {
        Self { bytes: TransferMemory::default(), size, next: 0, lent: VecDeque::new(), first: 0 }
    }

    /// Lends `len` bytes that lie behind each other, whole blocks. `None` while there is no room
    /// for them; there is room for all of the memory when nothing is lent.
    pub(super) fn lend(&mut self, len: usize) -> Option<Lent> {
        let start = self.room_for(len)?;
        if self.bytes.is_empty() {
            self.bytes = TransferMemory::new(self.size);
        }
        let range = start..start + len;
        self.next = range.end;
        let number = self.first + self.lent.len() as u64;
        self.lent.push_back(Place { range: range.clone(), is_back: false });
        Some(Lent { number, range })
    }

    fn room_for(&self, len: usize) -> Option<usize> {
        let fits = |room: Range<usize>| (room.len() >= len).then_some(room.start);
        let Some(oldest) = self.lent.front().map(|place| place.range.start) else {
            return fits(0..self.size);
        };
        if oldest < self.next {
            fits(self.next..self.size).or_else(|| fits(0..oldest))
        } else {
            fits(self.next..oldest)
        }
    }

    /// The bytes of a piece that is lent.
    pub(super) fn bytes(&mut self, lent: &Lent) -> &mut [u8] {
        &mut self.bytes[lent.range.clone()]
    }

    pub(super) fn give_back(&mut self, lent: Lent) {
        let n = usize::try_from(lent.number - self.first).expect("it is in memory");
        self.lent[n].is_back = true;
        while self.lent.front().is_some_and(|place| place.is_back) {
            self.lent.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::aligned::ALIGN;

    /// Pieces come back in any order, never overlap, and all of it can be lent in the end.
    #[test]
    fn pieces_do_not_overlap() {
        const SIZE: usize = 64 * ALIGN;
        let mut rng = fastrand::Rng::with_seed(7);
        let mut memory = Memory::new(SIZE);
        let mut out: Vec<Lent> = Vec::new();
        for n in 0..10_000 {
            let len = rng.usize(1..=16) * ALIGN;
            match memory.lend(len) {
                Some(lent) => {
                    let apart = |o: &Lent| {
                        o.range.end <= lent.range.start || lent.range.end <= o.range.start
                    };
                    assert!(lent.range.len() == len && lent.range.end <= SIZE, "{lent:?}");
                    assert!(out.iter().all(apart), "piece {n}: {lent:?} and {out:?}");
                    assert!(memory.bytes(&lent).as_ptr().addr().is_multiple_of(ALIGN));
                    out.push(lent);
                }
                None => memory.give_back(out.swap_remove(rng.usize(..out.len()))),
            }
        }
        out.into_iter().for_each(|lent| memory.give_back(lent));
        assert!(memory.lend(SIZE).is_some());
    }
}
