//! The features that a new file system can have, by the names that `mkfs.btrfs -O` knows.
//!
//! Features are names on the command line and bits in the superblock, and a few imply others. Only
//! features that Larder can also mount and write are offered. Each other one is refused by name,
//! with the reason.

use crate::{Error, Result};

/// On-disk feature bits.
pub(super) const MIXED_BACKREF: u64 = 0x1;
pub(super) const MIXED_GROUPS: u64 = 0x4;
pub(super) const BIG_METADATA: u64 = 0x20;
pub(super) const EXTENDED_IREF: u64 = 0x40;
pub(super) const SKINNY_METADATA: u64 = 0x100;
pub(super) const NO_HOLES: u64 = 0x200;
pub(super) const FREE_SPACE_TREE: u64 = 0x1;
pub(super) const FREE_SPACE_TREE_VALID: u64 = 0x2;
pub(super) const BLOCK_GROUP_TREE: u64 = 0x8;

/// Features of a new file system. The default is that of a current mkfs.btrfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub struct Features {
    /// More hard links per directory than fit one item.
    pub extref: bool,
    /// Smaller records for metadata extents.
    pub skinny_metadata: bool,
    /// Holes in files need no items.
    pub no_holes: bool,
    /// Free space is kept in a tree (`space_cache=v2`).
    pub free_space_tree: bool,
    /// Block groups have a tree of their own. Needs the two above.
    pub block_group_tree: bool,
    /// Data and metadata share block groups.
    pub mixed: bool,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            extref: true,
            skinny_metadata: true,
            no_holes: true,
            free_space_tree: true,
            block_group_tree: true,
            mixed: false,
        }
    }
}

/// Features that mkfs.btrfs has and Larder has not.
const UNSUPPORTED: &[&str] = &[
    "quota",
    "squota",
    "raid56",
    "raid1c34",
    "zoned",
    "extent-tree-v2",
    "raid-stripe-tree",
    "remap-tree",
    "list-all",
];

impl Features {
    /// Names that [`Features::apply`] takes.
    pub const NAMES: [&'static str; 6] = [
        "extref",
        "skinny-metadata",
        "no-holes",
        "free-space-tree",
        "block-group-tree",
        "mixed-bg",
    ];

    /// The features of a new file system, from lists as [`Features::apply`] takes them. A list may
    /// turn off what a default needs. Then that default is off as well, and the second result has a
    /// sentence about it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names what is unknown or not supported. If a list turns a feature on,
    /// and off what it needs, it names what is needed.
    pub fn chosen<'a>(lists: impl IntoIterator<Item = &'a str>) -> Result<(Self, Vec<String>)> {
        let mut features = Self::default();
        // The block-group tree is off at first, so it is on in the end only if a list says so.
        let mut asked = Self { block_group_tree: false, ..Self::default() };
        for list in lists {
            features.apply(list)?;
            asked.apply(list)?;
        }
        let mut notes = Vec::new();
        if let Some(missing) = features.lacks().filter(|_| !asked.block_group_tree) {
            features.block_group_tree = false;
            notes.push(format!("block-group-tree is left off, because it needs {missing}"));
        }
        features.check()?;
        Ok((features, notes))
    }

    /// Applies a list as `mkfs.btrfs -O` takes it: names separated by commas; `^` in front of a
    /// name turns it off.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names what is unknown or not supported.
    pub fn apply(&mut self, list: &str) -> Result<()> {
        for word in list.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            let (name, on) = word.strip_prefix('^').map_or((word, true), |n| (n, false));
            let field = match name {
                "extref" => &mut self.extref,
                "skinny-metadata" => &mut self.skinny_metadata,
                "no-holes" => &mut self.no_holes,
                "free-space-tree" | "fst" => &mut self.free_space_tree,
                "block-group-tree" | "bgt" => &mut self.block_group_tree,
                "mixed-bg" => &mut self.mixed,
                other if UNSUPPORTED.contains(&other) && !on => continue,
                other if UNSUPPORTED.contains(&other) => {
                    return Err(Error::Unsupported(format!(
                        "feature {other} is not supported by Larder"
                    )));
                }
                other => {
                    return Err(Error::Unsupported(format!(
                        "unknown feature {other:?}; known are {}",
                        Self::NAMES.join(", ")
                    )));
                }
            };
            *field = on;
        }
        Ok(())
    }

    /// What the block-group tree needs and these features lack.
    fn lacks(&self) -> Option<&'static str> {
        match (self.free_space_tree, self.no_holes) {
            _ if !self.block_group_tree => None,
            (false, _) => Some("free-space-tree"),
            (_, false) => Some("no-holes"),
            _ => None,
        }
    }

    /// Checks what depends on what.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the feature that is missing.
    pub fn check(&self) -> Result<()> {
        let Some(missing) = self.lacks() else { return Ok(()) };
        Err(Error::Unsupported(format!(
            "block-group-tree needs {missing}: leave {missing} on, or block-group-tree off"
        )))
    }

    /// The superblock's `incompat` flags.
    #[must_use]
    pub fn incompat(&self, nodesize: u32) -> u64 {
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        MIXED_BACKREF
            | bit(self.mixed, MIXED_GROUPS)
            | bit(nodesize > 4096, BIG_METADATA)
            | bit(self.extref, EXTENDED_IREF)
            | bit(self.skinny_metadata, SKINNY_METADATA)
            | bit(self.no_holes, NO_HOLES)
    }

    /// The superblock's `compat_ro` flags.
    #[must_use]
    pub fn compat_ro(&self) -> u64 {
        let free_space =
            if self.free_space_tree { FREE_SPACE_TREE | FREE_SPACE_TREE_VALID } else { 0 };
        free_space | if self.block_group_tree { BLOCK_GROUP_TREE } else { 0 }
    }

    /// Names of the features that are on.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        let on = [
            self.extref,
            self.skinny_metadata,
            self.no_holes,
            self.free_space_tree,
            self.block_group_tree,
            self.mixed,
        ];
        Self::NAMES.into_iter().zip(on).filter(|(_, on)| *on).map(|(n, _)| n).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_turn_features_on_and_off() {
        let mut f = Features::default();
        assert_eq!((f.incompat(16384), f.compat_ro()), (0x361, 0xb), "as mkfs.btrfs 6.19 has them");
        f.apply("^bgt, ^fst,,^no-holes,mixed-bg,^quota").unwrap();
        assert_eq!(f.names(), ["extref", "skinny-metadata", "mixed-bg"]);
        assert_eq!((f.incompat(4096), f.compat_ro()), (0x145, 0));
        f.check().unwrap();
    }

    #[test]
    fn refusals_name_the_feature() {
        let text = |list: &str| {
            let mut f = Features::default();
            f.apply(list).and_then(|()| f.check()).unwrap_err().to_string()
        };
        assert!(text("extref,zoned").contains("zoned"));
        assert!(text("wings").contains("\"wings\""));
        assert!(text("^no-holes").contains("needs no-holes"));
        assert!(text("^free-space-tree").contains("needs free-space-tree"));
    }

    #[test]
    fn a_default_that_cannot_be_goes_with_what_it_needs_and_a_wish_is_refused() {
        let chosen = |lists: &[&str]| Features::chosen(lists.iter().copied());
        for (lists, missing, left) in [
            (&["^no-holes"][..], "no-holes", &["extref", "skinny-metadata", "free-space-tree"][..]),
            (&["^fst"], "free-space-tree", &["extref", "skinny-metadata", "no-holes"]),
            (&["^no-holes", "^fst"], "free-space-tree", &["extref", "skinny-metadata"]),
            (&["bgt,^no-holes", "^bgt"], "", &["extref", "skinny-metadata", "free-space-tree"]),
        ] {
            let (features, notes) = chosen(lists).unwrap();
            assert_eq!(features.names(), left, "{lists:?}");
            let said = if missing.is_empty() {
                notes.is_empty()
            } else {
                notes.concat().contains(missing)
            };
            assert!(said && notes.len() < 2, "{lists:?}: {notes:?}");
        }
        for lists in
            [&["^no-holes,block-group-tree"][..], &["bgt", "^fst"], &["^no-holes,^bgt", "bgt"]]
        {
            let refused = chosen(lists).unwrap_err().to_string();
            assert!(refused.contains("block-group-tree needs"), "{lists:?}: {refused}");
        }
        assert_eq!(chosen(&["^no-holes,no-holes"]).unwrap(), (Features::default(), vec![]));
    }
}
