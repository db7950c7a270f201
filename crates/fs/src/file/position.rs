//! A place in a file that an operation works on.

use crate::engine::Inode;
use std::sync::Arc;

/// An inode, and an offset in its data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position<'a> {
    pub(crate) inode: &'a Arc<Inode>,
    pub(crate) offset: u64,
}

impl Position<'_> {
    /// The place `bytes` further on.
    pub(super) fn plus(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
    /// Are both in the same file?
    pub(super) fn is_in_file_of(self, other: Position<'_>) -> bool {
        self.inode.id == other.inode.id
    }
}
