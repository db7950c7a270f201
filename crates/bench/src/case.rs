//! The state of an image before it is mounted: where its pages lie, which mkfs made it, and on how
//! many devices it lies.
//!
//! All of it changes what is measured, on all sides. Pages of the image may be in the machine's
//! page cache (*hot*). They are read without the disk, and a write past the page cache first has to
//! drop them. An image that was just copied or downloaded is hot; after a boot it is *cold*. The
//! two mkfs lay out the first chunks differently. Several devices ([`Spread`]) are written at the
//! same time. No state is the true one. So each is a case of its own, the same for all, and ratios
//! are taken only within a case.
//!
//! [`Pages::arrange`] brings the state about before each mount. Then it asks the kernel whether it
//! has succeeded: a page that is in use stays when caches are dropped, and a page that was read
//! goes when memory is short.

use crate::interrupt;
use crate::measure::drop_caches;
use crate::spread::Spread;
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr;

/// Where the pages of the image lie when it is mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pages {
    /// On the disk only.
    #[default]
    Cold,
    /// In the machine's page cache, all of them: the image was just read to its end.
    Hot,
}

/// Which program formats the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mkfs {
    /// `mkfs.btrfs`
    #[default]
    Linux,
    /// `larder mkfs`
    Larder,
}

/// The state of an image before it is mounted. A name without a case means the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) pages: Pages,
    pub(crate) mkfs: Mkfs,
    #[serde(default)]
    pub(crate) spread: Spread,
}

impl Case {
    /// Every combination of these.
    pub(crate) fn all(pages: &[Pages], mkfs: &[Mkfs], spread: &[Spread]) -> Vec<Self> {
        let mut all = Vec::new();
        for &spread in spread {
            for &mkfs in mkfs {
                all.extend(pages.iter().map(|&pages| Self { pages, mkfs, spread }));
            }
        }
        all
    }
}

/// What differs from the default, as it stands behind a name.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        parts.extend((self.spread != Spread::One).then(|| self.spread.data()));
        parts.extend((self.pages == Pages::Hot).then_some("hot"));
        parts.extend((self.mkfs == Mkfs::Larder).then_some("larder mkfs"));
        if parts.is_empty() { Ok(()) } else { write!(f, " ({})", parts.join(", ")) }
    }
}

impl Pages {
    /// Drops the machine's caches, then brings the pages of an image to where they are wanted. A
    /// file in a memory file system stays in memory.
    pub(crate) fn arrange(self, devices: &[PathBuf]) -> Result<()> {
        drop_caches()?;
        devices.iter().try_for_each(|device| self.arrange_one(device))
    }
    fn arrange_one(self, image: &Path) -> Result<()> {
        if is_in_memory(image)? {
            return Ok(());
        }
        if self == Self::Hot {
            read_all(image)?;
        }
        let (cached, size) = (cached_bytes(image)?, image.metadata()?.len());
        ensure!(
            self.is_true_of(cached as f64 / size as f64),
            "{}: the page cache holds {} of {} MiB, which is not {self:?}; is it in use, or \
                memory short?",
            image.display(),
            cached >> 20,
            size >> 20
        );
        Ok(())
    }
    /// Is it so where this share of the image is in the page cache? A sixty-fourth may be
    /// elsewhere, since some pages are always on their way.
    fn is_true_of(self, cached: f64) -> bool {
        match self {
            Self::Cold => cached <= 1.0 / 64.0,
            Self::Hot => cached >= 63.0 / 64.0,
        }
    }
}

fn read_all(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {
        interrupt::check()?;
    }
    Ok(())
}

/// Is it a file of a memory file system? Its pages lie nowhere else.
fn is_in_memory(path: &Path) -> Result<bool> {
    let is = rustix::fs::statfs(path).with_context(|| path.display().to_string())?;
    Ok(is.f_type == libc::TMPFS_MAGIC)
}

/// How much of a file the machine's page cache holds.
pub(crate) fn cached_bytes(path: &Path) -> Result<u64> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let len = usize::try_from(file.metadata()?.len())?;
    if len == 0 {
        return Ok(0);
    }
    let page = rustix::param::page_size();
    let mut present = vec![0u8; len.div_ceil(page)];
    // SAFETY: a new mapping at an address of the kernel's choice; nothing reads through it.
    let mapping = unsafe {
        libc::mmap(ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if mapping == libc::MAP_FAILED {
        return Err(io::Error::last_os_error()).context("mapping the image");
    }
    // SAFETY: `mapping` is that mapping of `len` bytes, and `present` has a byte for each of its
    // pages.
    let asked = match unsafe { libc::mincore(mapping, len, present.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: no pointer into the mapping is left.
    unsafe { libc::munmap(mapping, len) };
    asked.context("asking which pages of the image are in memory")?;
    let pages = present.iter().filter(|bits| **bits & 1 == 1).count();
    Ok((pages * page).min(len) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_all_combinations_and_the_default_has_no_name() {
        let spread = [Spread::One, Spread::Raid5];
        let cases = Case::all(&[Pages::Cold, Pages::Hot], &[Mkfs::Linux, Mkfs::Larder], &spread);
        let names: Vec<String> = cases.iter().map(Case::to_string).collect();
        assert_eq!(names[..4], ["", " (hot)", " (larder mkfs)", " (hot, larder mkfs)"]);
        assert_eq!(
            (names[4].as_str(), names[7].as_str()),
            (" (raid5)", " (raid5, hot, larder mkfs)")
        );
        assert_eq!(cases[0], Case::default());
    }

    #[test]
    fn what_counts_as_cold_and_hot() {
        let of = |pages: f64| pages / 64.0;
        assert!(Pages::Cold.is_true_of(of(1.0)) && !Pages::Cold.is_true_of(of(2.0)));
        assert!(Pages::Hot.is_true_of(of(63.0)) && !Pages::Hot.is_true_of(of(62.0)));
    }

    #[test]
    fn what_was_written_is_in_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        assert_eq!(cached_bytes(&path).unwrap(), 1 << 20);
        assert!(cached_bytes(&dir.path().join("none")).is_err());
    }
}
