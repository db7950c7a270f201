//! Bytes of a fuzzer as a row of choices.
//!
//! Hidden here is that inputs end: choices beyond the end are zeros. So every input means
//! something, a longer one means the same and more, and a fuzzer can cut off what does not matter.

/// Takes choices off the front of an input.
#[derive(Clone, Debug)]
pub struct Choices<'a> {
    left: &'a [u8],
}

impl<'a> Choices<'a> {
    /// The choices that stand in `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }
    /// Has every choice been taken?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }
    /// What was not taken yet.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.left
    }
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.left.len());
        out[..n].copy_from_slice(&self.left[..n]);
        self.left = &self.left[n..];
        out
    }
    /// One byte.
    pub fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }
    /// Two bytes.
    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
    /// Eight bytes.
    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
    /// A number below `n`; 0 if there is none.
    pub fn below(&mut self, n: usize) -> usize {
        match n {
            0 | 1 => 0,
            2..=256 => usize::from(self.byte()) % n,
            _ => usize::from(self.word()) % n,
        }
    }
    /// Up to `n` bytes as they are.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, left) = self.left.split_at(n.min(self.left.len()));
        self.left = left;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_go_on_with_zeros() {
        let mut c = Choices::new(&[7, 1, 2, 9]);
        assert_eq!((c.below(5), c.word(), c.is_empty()), (2, 0x201, false));
        assert_eq!((c.long(), c.is_empty(), c.byte(), c.below(3), c.below(0)), (9, true, 0, 0, 0));
        let mut c = Choices::new(&[1, 2, 3]);
        assert_eq!((c.bytes(2), c.bytes(2), c.rest()), (&[1u8, 2][..], &[3u8][..], &[][..]));
    }
}
