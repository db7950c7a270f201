//! One large file in blocks of 4 KiB, written and read in orders that look random.
//!
//! The orders are the same in each run. What is read has another order than what was written.

use crate::interrupt;
use crate::units::Mib;
use anyhow::{Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Blocks in a MiB.
const IN_MIB: u64 = 256;
const BLOCK: usize = 4096;
const NAME: &str = "blocks";

/// What is done with the blocks.
#[derive(Clone, Copy)]
enum Pass {
    Write,
    Read,
}

/// So many blocks are in a file of this size.
pub(crate) fn count(mib: Mib) -> u64 {
    mib.0 * IN_MIB
}

/// Writes each block once.
///
/// # Errors
/// The file system's; a signal has come.
pub(crate) fn write(root: &Path, mib: Mib) -> Result<()> {
    let file = File::create(root.join(NAME))?;
    let mut buffer = vec![0; BLOCK];
    for n in shuffled(mib, Pass::Write) {
        interrupt::check()?;
        fill(&mut buffer, n);
        file.write_all_at(&buffer, n * BLOCK as u64)?;
    }
    Ok(())
}

/// Reads each block once.
///
/// # Errors
/// The file system's; a signal has come.
pub(crate) fn read(root: &Path, mib: Mib) -> Result<()> {
    let file = File::open(root.join(NAME))?;
    let mut buffer = vec![0; BLOCK];
    for n in shuffled(mib, Pass::Read) {
        interrupt::check()?;
        file.read_exact_at(&mut buffer, n * BLOCK as u64)?;
    }
    Ok(())
}

/// Reads all of it in sequence, and compares it with what was written.
///
/// # Errors
/// It is something else; the file system's; a signal has come.
pub(crate) fn verify(root: &Path, mib: Mib) -> Result<()> {
    let file = File::open(root.join(NAME))?;
    let (mut found, mut expected) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for m in 0..mib.0 {
        interrupt::check()?;
        file.read_exact_at(&mut found, m << 20)?;
        for (i, block) in expected.chunks_exact_mut(BLOCK).enumerate() {
            fill(block, m * IN_MIB + i as u64);
        }
        ensure!(found == expected, "the file's content is not what was written, in MiB {m}");
    }
    Ok(())
}

fn shuffled(mib: Mib, pass: Pass) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count(mib)).collect();
    let seed = match pass {
        Pass::Write => 0,
        Pass::Read => 1,
    };
    fastrand::Rng::with_seed(seed).shuffle(&mut order);
    order
}

/// Fills a block; no two blocks are the same.
fn fill(buffer: &mut [u8], n: u64) {
    for (i, part) in buffer.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(
            &(n * 512 + i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes(),
        );
    }
}
