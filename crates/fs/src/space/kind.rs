//! What space is for.

/// What space is for. On an image with mixed groups data and metadata share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum SpaceKind {
    /// File data.
    Data,
    /// Tree blocks, the chunk tree's excepted.
    Metadata,
    /// The chunk tree.
    System,
}
