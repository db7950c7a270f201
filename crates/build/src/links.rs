//! The inodes that have several names, found again when a further name comes.
//!
//! Any number of them may be waiting for names, as in a tree that was copied with links. So they
//! lie in a table that goes to disk beyond its share of the memory.

use crate::error::Result;
use crate::spool::Scratch;
use larder_format::items::FileType;
use larder_sources::{LinkGroup, Table};

/// An inode, and how many of its names have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Linked {
    pub(crate) inode: u64,
    pub(crate) names: u32,
    pub(crate) kind: FileType,
}

/// The inodes of the stream that is being read, by subvolume and group of names.
#[derive(Debug)]
pub(crate) struct Links {
    table: Table,
    scratch: Scratch,
}

impl Links {
    /// Keeps about `budget` bytes in memory.
    pub(crate) fn new(scratch: &Scratch, budget: usize) -> Self {
        Self { table: Table::new(budget, scratch.directory()), scratch: scratch.clone() }
    }

    pub(crate) fn get(&mut self, tree: u32, group: LinkGroup) -> Result<Option<Linked>> {
        let value = self.table.get(number(tree, group));
        let value = value.map_err(|e| self.scratch.error("read", e))?;
        Ok(value.map(|bytes| Linked::read(&bytes)))
    }

    pub(crate) fn set(&mut self, tree: u32, group: LinkGroup, linked: Linked) -> Result<()> {
        let noted = self.table.insert(number(tree, group), &linked.bytes());
        noted.map_err(|e| self.scratch.error("write", e))
    }

    /// The stream has ended.
    pub(crate) fn clear(&mut self) {
        self.table.clear();
    }
}

fn number(tree: u32, LinkGroup(group): LinkGroup) -> u128 {
    u128::from(tree) << 64 | u128::from(group)
}

impl Linked {
    fn bytes(self) -> [u8; 13] {
        let mut bytes = [self.kind as u8; 13];
        bytes[..8].copy_from_slice(&self.inode.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.names.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Self {
        let inode = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        let names = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
        let kind = FileType::from_disk(bytes[12]).expect("it was written here");
        Self { inode, names, kind }
    }
}
