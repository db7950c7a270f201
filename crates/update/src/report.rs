//! What was changed, for a list and for a summary.

use larder_sources::TreePath;

/// One change, or one that would be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    /// Where.
    pub path: &'a TreePath,
    /// What.
    pub what: What,
}

/// Kinds of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The image did not have it.
    Added,
    /// The sources do not have it. The contents of a removed directory are not reported one by one.
    Removed,
    /// It was something else, or another inode.
    Replaced,
    /// Other bytes.
    Contents,
    /// The same contents with another owner, mode, time or extended attribute.
    Attributes,
    /// A further name of a file that is there.
    Linked,
}

/// How many changes of each kind there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Summary {
    pub added: u64,
    pub removed: u64,
    pub replaced: u64,
    pub contents: u64,
    pub attributes: u64,
    pub linked: u64,
    /// Entries that were as the sources have them.
    pub unchanged: u64,
    /// Bytes of contents that were written; 0 in a dry run.
    pub written: u64,
}

impl Summary {
    pub(crate) fn count(&mut self, what: What) {
        *match what {
            What::Added => &mut self.added,
            What::Removed => &mut self.removed,
            What::Replaced => &mut self.replaced,
            What::Contents => &mut self.contents,
            What::Attributes => &mut self.attributes,
            What::Linked => &mut self.linked,
        } += 1;
    }

    /// Is the image as the sources say?
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        let Self { added, removed, replaced, contents, attributes, linked, .. } = self;
        added + removed + replaced + contents + attributes + linked == 0
    }
}
