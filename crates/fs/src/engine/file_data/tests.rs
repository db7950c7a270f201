//! The size of a file on the device, against a model. Whatever is written, cut, submitted and
//! completed in whatever order, the size covers what has completed and nothing that is still in
//! flight.

use super::dirty::{Buffers, index};
use super::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    /// Writes this many bytes behind the end.
    Append(u64),
    /// Writes at a share of the file, this many bytes.
    Write(u8, u64),
    /// Makes the file longer by this much. Zeros for the last sector are to come, or none are
    /// needed.
    Grow(u64, bool),
    /// Sets the size to a share of what it is. If it is odd, zeros for the last sector are to come.
    Shrink(u8),
    Submit,
    /// Completes the run in flight of this number, counted from the oldest.
    Complete(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![1u64..300, Just(4096), 1u64..20_000];
    prop_oneof![
        3 => len.clone().prop_map(Op::Append),
        3 => (any::<u8>(), len.clone()).prop_map(|(at, n)| Op::Write(at, n)),
        3 => (len, any::<bool>()).prop_map(|(n, tail)| Op::Grow(n, tail)),
        1 => any::<u8>().prop_map(Op::Shrink),
        3 => Just(Op::Submit),
        3 => any::<u8>().prop_map(Op::Complete),
    ]
}

/// What the functions of this module do with a file's lock held, without an engine around it.
#[derive(Default)]
struct File {
    inner: Inner,
    size: u64,
    /// Ranges that setting the size has added.
    set: Vec<(u64, u64)>,
    /// Bytes that the size on the device must not cover before they have completed.
    new: Vec<u64>,
}

impl File {
    fn is_clean(&self) -> bool {
        self.inner.dirty.is_empty() && self.inner.in_flight.is_empty()
    }
    /// Bytes of this range are written to the file, which had `size` bytes before.
    fn take_in(&mut self, range: Range<u64>, size: u64) {
        self.inner.begin_taking_in(size, self.is_clean());
        let bytes = vec![1; index(range.end - range.start)];
        self.inner.dirty.write(range.start, &bytes, Tick(0), &Buffers::default());
        self.inner.dirty.settle();
    }
    fn run(&mut self, op: &Op) {
        let size = self.size;
        match *op {
            Op::Append(len) => {
                self.size += len;
                self.take_in(size..self.size, size);
                self.new.extend((size..self.size).step_by(64));
            }
            Op::Write(share, len) => {
                let at = size * u64::from(share) / 256;
                let len = len.min(size - at);
                if len > 0 {
                    self.take_in(at..at + len, size);
                }
            }
            Op::Grow(by, tail) => {
                let sector = ceil(size);
                let tail = tail && size < sector;
                self.size += by;
                self.set.push((size, self.size));
                self.inner.grow(&(size..self.size), tail, self.is_clean());
                if tail {
                    self.take_in(size..sector, size);
                    self.new.push(size);
                }
            }
            Op::Shrink(share) => {
                let to = size * u64::from(share) / 256;
                if !self.inner.cut(to) {
                    return;
                }
                self.size = to;
                self.new.retain(|at| *at < to);
                self.set.iter_mut().for_each(|(_, end)| *end = to.min(*end));
                let sector = ceil(to);
                if share % 2 == 1 && to < sector {
                    self.take_in(to..sector, to);
                    self.new.push(to);
                }
            }
            Op::Submit => {
                let inner = &mut self.inner;
                let busy = |range: &Range<u64>| overlaps(&inner.in_flight, range);
                let mut from = inner.dirty.boundary(inner.stopped);
                let taken = inner.dirty.take(&mut from, 8192, busy);
                inner.stopped = if taken.is_some() { from } else { 0 };
                if let Some(taken) = taken {
                    inner.put_in_flight(RunInFlight { taken, size, inline: false });
                }
            }
            Op::Complete(n) => {
                let runs = &mut self.inner.in_flight;
                if runs.is_empty() {
                    return;
                }
                let nth = runs.keys().nth(usize::from(n) % runs.len()).copied();
                let run = nth.and_then(|start| runs.remove(&start)).expect("counted");
                self.inner.on_completion(self.size);
                let here = |at: &u64| run.taken.first_from(*at) == Some(*at);
                self.new.retain(|at| !here(at));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn the_size_on_disk_covers_what_completed_and_what_was_set(
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut file = File::default();
        for op in &ops {
            file.run(op);
            let shown = file.inner.disk_size(file.size);
            prop_assert!(shown <= file.size);
            for (from, to) in &file.set {
                prop_assert!(shown <= *from || shown >= *to, "{shown} lies in {from}..{to}");
            }
            if let Some(at) = file.new.iter().find(|at| **at < shown) {
                return Err(TestCaseError::fail(format!("{shown} covers {at}, which is on its \
                    way")));
            }
        }
        // Once everything has completed, nothing holds the size back.
        while !(file.inner.dirty.is_empty() && file.inner.in_flight.is_empty()) {
            file.run(&Op::Submit);
            file.run(&Op::Complete(0));
        }
        prop_assert_eq!(file.inner.on_disk.max(file.inner.disk_size(file.size)), file.size);
    }
}
