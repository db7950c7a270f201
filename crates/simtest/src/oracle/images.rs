//! Which single-device images Linux can make, as `mkfs.btrfs` arguments and mount options.
//!
//! The decision hidden here is which combinations a test has to try. [`kernel_images`] is a
//! selection from all that mkfs accepts. Every value of every dimension occurs in it, with every
//! value of those that it interacts with (node size with mixed groups, block-group tree with
//! free-space tree, holes with node size).

use super::progs::mkfs_btrfs;
use anyhow::Result;
use std::path::Path;

/// One way to make and mount an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageVariant {
    /// Short and unique, fit for a file name.
    pub name: String,
    /// Arguments of `mkfs.btrfs`, without target.
    pub mkfs: Vec<String>,
    /// Options for the first mount by the kernel, which decide the kind of free-space cache.
    pub mount: String,
}

impl ImageVariant {
    /// Makes an empty image of this kind.
    ///
    /// # Errors
    /// As [`mkfs_btrfs`].
    pub fn make(&self, path: &Path, size: u64) -> Result<()> {
        mkfs_btrfs(path, size, &self.mkfs)
    }
}

/// How free space is remembered on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    /// Free-space tree with a block-group tree.
    TreeAndGroups,
    /// Free-space tree.
    Tree,
    /// Version 1: hidden files.
    V1,
    /// Nothing.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    csum: &'static str,
    nodesize: u32,
    mixed: bool,
    cache: Cache,
    no_holes: bool,
    /// Metadata profile.
    metadata: &'static str,
}

impl Shape {
    /// mkfs refuses the rest.
    fn is_possible(&self) -> bool {
        // A block-group tree needs no-holes; mixed groups need nodes of one sector.
        (self.cache != Cache::TreeAndGroups || self.no_holes)
            && (!self.mixed || self.nodesize == 4096)
    }

    fn variant(&self) -> ImageVariant {
        let (cache, features, mount) = match self.cache {
            Cache::TreeAndGroups => ("bgt", "free-space-tree,block-group-tree", ""),
            Cache::Tree => ("fst", "free-space-tree,^block-group-tree", ""),
            Cache::V1 => ("v1", "^free-space-tree,^block-group-tree", "space_cache=v1"),
            Cache::None => ("nocache", "^free-space-tree,^block-group-tree", "nospace_cache"),
        };
        let holes = if self.no_holes { "no-holes" } else { "^no-holes" };
        let mixed = if self.mixed { ",mixed-bg" } else { "" };
        let mut mkfs: Vec<String> = [
            "--csum",
            self.csum,
            "--nodesize",
            &self.nodesize.to_string(),
            "-O",
            &format!("{holes},{features}{mixed}"),
            "-m",
            self.metadata,
            "-d",
            if self.mixed { self.metadata } else { "single" },
        ]
        .map(str::to_owned)
        .to_vec();
        if self.mixed {
            mkfs.push("--mixed".into());
        }
        let name = format!(
            "{}-{}k-{cache}{}{}-{}",
            self.csum,
            self.nodesize / 1024,
            if self.mixed { "-mixed" } else { "" },
            if self.no_holes { "" } else { "-holes" },
            self.metadata
        );
        ImageVariant { name, mkfs, mount: mount.into() }
    }
}

const CSUMS: [&str; 4] = ["crc32c", "xxhash", "sha256", "blake2"];
const NODESIZES: [u32; 5] = [4096, 8192, 16_384, 32_768, 65_536];
const CACHES: [Cache; 4] = [Cache::TreeAndGroups, Cache::Tree, Cache::V1, Cache::None];

/// The selection for everyday tests: some twenty images.
#[must_use]
pub fn kernel_images() -> Vec<ImageVariant> {
    let usual = Shape {
        csum: "crc32c",
        nodesize: 16_384,
        mixed: false,
        cache: Cache::TreeAndGroups,
        no_holes: true,
        metadata: "dup",
    };
    let mut shapes = vec![usual, Shape { metadata: "single", ..usual }];
    for (n, nodesize) in NODESIZES.into_iter().enumerate() {
        shapes.push(Shape { nodesize, csum: CSUMS[n % CSUMS.len()], ..usual });
        let cache = [Cache::Tree, Cache::V1, Cache::None][n % 3];
        shapes.push(Shape {
            nodesize,
            cache,
            no_holes: false,
            csum: CSUMS[(n + 1) % CSUMS.len()],
            ..usual
        });
    }
    for csum in CSUMS {
        shapes.push(Shape { csum, cache: Cache::Tree, ..usual });
    }
    for (n, cache) in CACHES.into_iter().enumerate() {
        let metadata = if n % 2 == 0 { "single" } else { "dup" };
        shapes.push(Shape { mixed: true, nodesize: 4096, cache, metadata, ..usual });
        shapes.push(Shape { cache, no_holes: cache == Cache::TreeAndGroups, ..usual });
    }
    variants(shapes)
}

fn variants(shapes: Vec<Shape>) -> Vec<ImageVariant> {
    let mut made: Vec<ImageVariant> = Vec::new();
    for variant in shapes.iter().filter(|s| s.is_possible()).map(Shape::variant) {
        if !made.iter().any(|m| m.name == variant.name) {
            made.push(variant);
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selection_has_every_value_and_is_part_of_all() {
        let some = kernel_images();
        let has = |part: &str| some.iter().any(|v| v.name.contains(part));
        for part in CSUMS.into_iter().chain(["-4k", "-8k", "-16k", "-32k", "-64k"]) {
            assert!(has(part), "{part}");
        }
        for part in [
            "-bgt",
            "-fst",
            "-v1",
            "-nocache",
            "-mixed",
            "-holes",
            "-single",
            "-bgt-mixed",
            "-v1-mixed",
        ] {
            assert!(has(part), "{part}");
        }
        assert!(some.len() <= 32, "{} images are too many for every test run", some.len());
    }
}
