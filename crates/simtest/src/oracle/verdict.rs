//! What the kernel thinks of an image, in one call.
//!
//! The decision hidden here is how much it takes to believe the kernel. A mount that succeeds
//! proves little: wrong reference counts, block-group sums and free space show only when something
//! is allocated and freed. So the image is checked, mounted, read completely, changed in every tree
//! (a file with data, a directory, a rename, a deletion), unmounted, and checked again; and the
//! kernel must not have logged a warning on the way.

use super::manifest::{Manifest, manifest};
use super::mount::KernelMount;
use super::progs::btrfs_check;
use super::std_tree::StdTree;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Checks, mounts, reads, changes and checks the image again, which is changed thereby: give it a
/// copy ([`copy_image`]). Returns what the kernel showed before it changed anything; the log of an
/// image that has one has been replayed by then.
///
/// # Errors
/// The first thing that is wrong, with what the check or the kernel said about it.
pub fn kernel_verdict(image: &Path) -> Result<Manifest> {
    clean(image).context("before the kernel mounted it")?;
    let mount = KernelMount::image(image, "noatime")?;
    let shown = manifest(&StdTree::new(mount.path())).context("reading through the kernel")?;
    change(&mount).context("changing through the kernel")?;
    let complaints = mount.unmount()?;
    ensure!(complaints.is_empty(), "the kernel complained:\n  {}", complaints.join("\n  "));
    clean(image).context("after the kernel changed it")?;
    Ok(shown)
}

fn clean(image: &Path) -> Result<()> {
    let report = btrfs_check(image, true);
    if !report.is_clean() {
        bail!("btrfs check: {report}");
    }
    Ok(())
}

/// Something in every tree: made, made durable, and most of it removed again. A full image may
/// refuse; it must not fail otherwise.
fn change(mount: &KernelMount) -> Result<()> {
    let work = mount.join(".written-by-the-kernel");
    let done = || -> std::io::Result<()> {
        std::fs::create_dir(&work)?;
        for n in 0..20 {
            std::fs::write(work.join(format!("{n}")), vec![n; 100 << (n % 10)])?;
        }
        mount.sync()?;
        for n in (0..20).step_by(2) {
            std::fs::remove_file(work.join(format!("{n}")))?;
        }
        std::fs::rename(work.join("1"), work.join("renamed"))?;
        mount.sync()?;
        std::fs::remove_dir_all(&work)?;
        mount.sync()
    };
    match done() {
        Err(e) if e.kind() == std::io::ErrorKind::StorageFull => Ok(()),
        other => Ok(other?),
    }
}

/// Copies an image with its holes: `to` takes no more disk than `from`.
///
/// # Errors
/// Either file cannot be read or written.
pub fn copy_image(from: &Path, to: &Path) -> Result<()> {
    let source = File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
    let target = File::create(to).with_context(|| format!("cannot create {}", to.display()))?;
    target.set_len(source.metadata()?.len())?;
    each_piece(from, &source, &mut |at, piece| Ok(target.write_all_at(piece, at)?))
}

/// A sum over an image's data and where it lies; what lies in holes is not read.
///
/// # Errors
/// The file cannot be read.
pub fn sum_of_image(path: &Path) -> Result<u64> {
    let source = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut sum = xxhash_rust::xxh3::Xxh3::new();
    sum.update(&source.metadata()?.len().to_le_bytes());
    each_piece(path, &source, &mut |at, piece| {
        sum.update(&at.to_le_bytes());
        sum.update(piece);
        Ok(())
    })?;
    Ok(sum.digest())
}

/// Reads what is not a hole, in order.
fn each_piece(
    path: &Path,
    source: &File,
    each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    use super::tree::TreeSource;
    let tree = StdTree::new(path);
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    while let Some((start, end)) = tree.next_data(source, at)? {
        at = start;
        while at < end {
            let want = usize::try_from((end - at).min(buf.len() as u64))?;
            let got = source.read_at(&mut buf[..want], at)?;
            ensure!(got > 0, "{} became shorter", path.display());
            each(at, &buf[..got])?;
            at += got as u64;
        }
    }
    Ok(())
}
