//! The trees of which a file system has one each.

use crate::tree::Tree;

/// The global trees. Only the committer edits them.
#[derive(Debug)]
pub(crate) struct Roots {
    pub(crate) root: Tree,
    pub(crate) chunk: Tree,
    pub(crate) extent: Tree,
    pub(crate) dev: Tree,
    pub(crate) csum: Tree,
    pub(crate) uuid: Option<Tree>,
    pub(crate) free_space: Option<Tree>,
    pub(crate) block_group: Option<Tree>,
}

impl Roots {
    /// All global trees.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Tree> {
        [&self.root, &self.chunk].into_iter().chain(self.with_items())
    }
    /// All trees that have a ROOT_ITEM.
    pub(crate) fn with_items(&self) -> impl Iterator<Item = &Tree> {
        [
            Some(&self.extent),
            Some(&self.dev),
            Some(&self.csum),
            self.uuid.as_ref(),
            self.free_space.as_ref(),
            self.block_group.as_ref(),
        ]
        .into_iter()
        .flatten()
    }
}
