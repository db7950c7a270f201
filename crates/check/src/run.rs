//! Runs: what a range of leaves holds of objects whose items may begin before it or end behind it.
//!
//! Items of one object (an inode, an extent) stand behind each other, but a leaf can end anywhere
//! among them. A run keeps the first and the last object of its range open, for a neighbour may
//! have more of them; objects in between are complete and closed. Two runs join into one by merging
//! what meets at the seam. Next to a range that was lost an object stays incomplete for good.

/// What is known of an object from part of its items.
pub(crate) trait Part: Clone {
    /// The object.
    fn id(&self) -> u64;
    /// Adds what comes behind.
    fn merge(&mut self, behind: Self);
    /// Items of it may be missing.
    fn set_incomplete(&mut self);
}

/// What happens to parts.
pub(crate) trait Close<P> {
    /// All that there is of an object.
    fn close(&mut self, part: P);
    /// Two objects are neighbours.
    fn meet(&mut self, _left: &P, _right: &P) {}
}

/// The open ends of a range.
#[derive(Clone, Debug)]
pub(crate) struct Run<P> {
    first: Option<P>,
    /// `None` where the first is also the last.
    last: Option<P>,
    open_left: bool,
    open_right: bool,
}

impl<P: Part> Run<P> {
    pub(crate) fn empty() -> Self {
        Self { first: None, last: None, open_left: false, open_right: false }
    }
    pub(crate) fn lost() -> Self {
        Self { first: None, last: None, open_left: true, open_right: true }
    }

    fn rightmost(&mut self) -> Option<&mut P> {
        self.last.as_mut().or(self.first.as_mut())
    }

    /// Adds a part behind the others.
    pub(crate) fn push(&mut self, part: P, closer: &mut impl Close<P>) {
        self.append(part, closer, true);
    }

    fn append(&mut self, part: P, closer: &mut impl Close<P>, new_neighbours: bool) {
        if let Some(last) = self.rightmost() {
            if last.id() == part.id() {
                last.merge(part);
                return;
            }
            if new_neighbours {
                closer.meet(last, &part);
            }
            if let Some(done) = self.last.replace(part) {
                closer.close(done);
            }
            return;
        }
        self.first = Some(part);
    }

    /// The run of both ranges, `right` directly behind.
    pub(crate) fn join(mut self, mut right: Self, closer: &mut impl Close<P>) -> Self {
        let torn = self.open_right || right.open_left;
        if torn {
            if let Some(part) = self.rightmost() {
                part.set_incomplete();
            }
            if let Some(part) = right.first.as_mut() {
                part.set_incomplete();
            }
        }
        let nothing = |run: &Self| run.first.is_none();
        if nothing(&right) {
            self.open_left |= nothing(&self) && right.open_left;
            self.open_right |= right.open_right;
            return self;
        }
        if nothing(&self) {
            right.open_left |= self.open_left;
            return right;
        }
        let open_right = right.open_right;
        // What lies between the right one's first and last has met its neighbours already.
        for (part, at_seam) in [(right.first, true), (right.last, false)] {
            let Some(part) = part else { continue };
            if torn && self.rightmost().is_some_and(|p| p.id() == part.id()) {
                // Parts of one object with a hole between them.
                if let Some(last) = self.rightmost() {
                    last.merge(part);
                    last.set_incomplete();
                }
                continue;
            }
            self.append(part, closer, at_seam);
        }
        self.open_right = open_right;
        self
    }

    /// No neighbours any more.
    pub(crate) fn finish(self, closer: &mut impl Close<P>) {
        let Self { mut first, mut last, open_left, open_right } = self;
        if open_left && let Some(part) = first.as_mut() {
            part.set_incomplete();
        }
        if open_right && let Some(part) = last.as_mut().or(first.as_mut()) {
            part.set_incomplete();
        }
        for part in [first, last].into_iter().flatten() {
            closer.close(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Sum {
        id: u64,
        sum: u32,
        whole: bool,
    }
    impl Part for Sum {
        fn id(&self) -> u64 {
            self.id
        }
        fn merge(&mut self, behind: Self) {
            self.sum += behind.sum;
            self.whole &= behind.whole;
        }
        fn set_incomplete(&mut self) {
            self.whole = false;
        }
    }
    #[derive(Default)]
    struct Closed(Vec<(u64, u32, bool)>, Vec<[u64; 2]>);
    impl Close<Sum> for Closed {
        fn close(&mut self, p: Sum) {
            self.0.push((p.id, p.sum, p.whole));
        }
        fn meet(&mut self, a: &Sum, b: &Sum) {
            self.1.push([a.id, b.id]);
        }
    }
    fn leaf(items: &[(u64, u32)], closed: &mut Closed) -> Run<Sum> {
        let mut run = Run::empty();
        for (id, sum) in items {
            run.push(Sum { id: *id, sum: *sum, whole: true }, closed);
        }
        run
    }

    /// However the items are cut into leaves and the leaves are joined, the objects are the same.
    #[test]
    fn joining_is_associative() {
        let items: Vec<(u64, u32)> = [1, 1, 2, 3, 3, 3, 3, 4, 5, 5].into_iter().zip(1..).collect();
        let expected = [(1, 3, true), (2, 3, true), (3, 22, true), (4, 8, true), (5, 19, true)];
        for a in 0..=items.len() {
            for b in a..=items.len() {
                for left_first in [true, false] {
                    let mut closed = Closed::default();
                    let x = leaf(&items[..a], &mut closed);
                    let y = leaf(&items[a..b], &mut closed);
                    let z = leaf(&items[b..], &mut closed);
                    let all = if left_first {
                        x.join(y, &mut closed).join(z, &mut closed)
                    } else {
                        let yz = y.join(z, &mut closed);
                        x.join(yz, &mut closed)
                    };
                    all.finish(&mut closed);
                    closed.0.sort_unstable();
                    closed.1.sort_unstable();
                    assert_eq!(closed.0, expected, "cut at {a} and {b}");
                    assert_eq!(closed.1, [[1, 2], [2, 3], [3, 4], [4, 5]]);
                }
            }
        }
    }

    #[test]
    fn what_touches_a_lost_range_is_incomplete() {
        for left_first in [true, false] {
            let mut closed = Closed::default();
            let x = leaf(&[(1, 1), (2, 1)], &mut closed);
            let z = leaf(&[(2, 1), (3, 1), (4, 1)], &mut closed);
            let all = if left_first {
                x.join(Run::lost(), &mut closed).join(z, &mut closed)
            } else {
                let yz = Run::lost().join(z, &mut closed);
                x.join(yz, &mut closed)
            };
            all.finish(&mut closed);
            closed.0.sort_unstable();
            assert_eq!(closed.0, [(1, 1, true), (2, 2, false), (3, 1, true), (4, 1, true)]);
        }
        let mut closed = Closed::default();
        Run::lost()
            .join(Run::lost(), &mut closed)
            .join(leaf(&[(7, 1)], &mut closed), &mut closed)
            .finish(&mut closed);
        assert_eq!(closed.0, [(7, 1, false)]);
    }
}
