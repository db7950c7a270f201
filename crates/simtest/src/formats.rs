//! Kinds of image that workloads run on beside the usual one.
//!
//! The content of a log depends on the format: without `no-holes` every hole is an item, small
//! nodes split where large ones have room, mixed groups take data and nodes from the same space. So
//! each workload is worth running on each kind. Hidden here is which kinds those are: every option
//! that users of Linux have is in one of them.

use larder_format::CsumType;
use larder_fs::mkfs::{Features, MkfsOptions};

/// A kind of image.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// What it is called on command lines.
    pub name: &'static str,
    options: fn() -> MkfsOptions,
}

/// Every kind but the default.
pub const ALL: [Format; 6] = [
    Format { name: "explicit-holes", options: explicit_holes },
    Format { name: "small-nodes", options: || nodes_of(4096) },
    Format { name: "large-nodes", options: || nodes_of(65536) },
    Format { name: "mixed", options: mixed },
    Format {
        name: "xxhash",
        options: || MkfsOptions { csum: CsumType::XxHash64, ..MkfsOptions::default() },
    },
    Format { name: "no-free-space-tree", options: no_free_space_tree },
];

impl Format {
    /// The kind of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        ALL.into_iter().find(|format| format.name == name)
    }
    /// How such an image is made.
    #[must_use]
    pub fn mkfs_options(&self) -> MkfsOptions {
        (self.options)()
    }
}

fn nodes_of(bytes: u32) -> MkfsOptions {
    MkfsOptions { nodesize: Some(bytes), ..MkfsOptions::default() }
}

fn with(features: Features) -> MkfsOptions {
    MkfsOptions { features, ..MkfsOptions::default() }
}

fn explicit_holes() -> MkfsOptions {
    with(Features { no_holes: false, block_group_tree: false, ..Features::default() })
}

fn mixed() -> MkfsOptions {
    with(Features { mixed: true, ..Features::default() })
}

fn no_free_space_tree() -> MkfsOptions {
    with(Features { free_space_tree: false, block_group_tree: false, ..Features::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::{SIZE, fresh};
    use std::collections::HashSet;

    #[test]
    fn each_kind_can_be_made_and_differs_from_the_others() {
        let mut hashes: HashSet<u64> =
            ALL.iter().map(|f| fresh(SIZE, &f.mkfs_options()).unwrap().content_hash()).collect();
        hashes.insert(fresh(SIZE, &MkfsOptions::default()).unwrap().content_hash());
        assert_eq!(hashes.len(), ALL.len() + 1);
        assert_eq!(Format::named("mixed").unwrap().name, "mixed");
        assert!(Format::named("default").is_none());
    }
}
