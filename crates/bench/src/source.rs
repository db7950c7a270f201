//! The archive that is unpacked: Debian's kernel source where it is installed, otherwise a made-up
//! tree of the same shape, and smaller.

use crate::Run;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is unpacked.
#[derive(Debug, Serialize)]
pub(crate) struct Archive {
    pub(crate) tar: PathBuf,
    pub(crate) what: String,
    /// Files, directories and whatever else is there after unpacking.
    pub(crate) entries: u64,
    /// Bytes in regular files.
    pub(crate) bytes: u64,
}

pub(crate) fn archive(run: &Run) -> Result<Archive> {
    let (tar, what) = match &run.tar {
        Some(tar) => (tar.clone(), tar.display().to_string()),
        None => match packaged() {
            Some(packed) => {
                let tar = run.dir.join(packed.file_stem().context("its name")?);
                if !tar.exists() {
                    unpack(&packed, &tar)?;
                }
                (tar, format!("`{}`", packed.display()))
            }
            None => {
                let tar = run.dir.join("larder-bench-tree.tar");
                if !tar.exists() {
                    make_up(&tar, 20_000)?;
                }
                (tar, "a made-up tree (the package linux-source is not installed)".into())
            }
        },
    };
    let (entries, bytes) = contents(&tar)?;
    Ok(Archive { tar, what, entries, bytes })
}

/// What is in an archive: entries, directories that are only implied included, and bytes in files.
fn contents(tar: &Path) -> Result<(u64, u64)> {
    let names = list(tar, "tf")?;
    let mut paths = HashSet::new();
    for name in names.lines() {
        let name = name.trim_start_matches("./").trim_matches('/');
        paths.extend(Path::new(name).ancestors().filter(|p| !p.as_os_str().is_empty()));
    }
    let long = list(tar, "tvf")?;
    if long.starts_with('h') || long.contains("\nh") {
        bail!("{} has hard links, which are not counted", tar.display());
    }
    Ok((paths.len() as u64, long.lines().filter_map(file_size).sum()))
}

fn list(tar: &Path, how: &str) -> Result<String> {
    let out = Command::new("tar")
        .env("LC_ALL", "C")
        .arg(how)
        .arg(tar)
        .stderr(Stdio::inherit())
        .output()?;
    if !out.status.success() {
        bail!("{} is not a tar archive", tar.display());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Bytes of a regular file in a long listing: mode, owner, size, date, time, name.
fn file_size(line: &str) -> Option<u64> {
    line.starts_with('-').then(|| line.split_ascii_whitespace().nth(2)?.parse().ok())?
}

/// A MiB that does not compress and is not zeros; the same in each run.
pub(crate) fn block() -> Vec<u8> {
    let mut block = vec![0; 1 << 20];
    fastrand::Rng::with_seed(0).fill(&mut block);
    block
}

fn packaged() -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir("/usr/src")
        .ok()?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            name.starts_with("linux-source-") && name.ends_with(".tar.xz")
        })
        .collect();
    found.sort();
    found.pop()
}

fn unpack(packed: &Path, tar: &Path) -> Result<()> {
    let partial = tar.with_extension("partial");
    let status = Command::new("xz")
        .args(["-dc", "-T0"])
        .arg(packed)
        .stdout(File::create(&partial)?)
        .status()?;
    if !status.success() {
        bail!("xz failed on {}", packed.display());
    }
    fs::rename(&partial, tar)?;
    Ok(())
}

/// Writes a tar archive of `files` files, most of them a few KiB, twelve to a directory.
pub(crate) fn make_up(tar: &Path, files: u64) -> Result<()> {
    let partial = tar.with_extension("partial");
    let mut out = BufWriter::new(File::create(&partial)?);
    let mut random = fastrand::Rng::with_seed(0);
    let mut content = vec![0u8; 512 << 10];
    content.iter_mut().for_each(|b| *b = random.u8(0x20..0x60));
    for i in 0..files {
        let (top, dir) = (i / 600, i / 12);
        if i % 600 == 0 {
            out.write_all(&header(&format!("tree/{top}/"), 0, b'5'))?;
        }
        if i % 12 == 0 {
            out.write_all(&header(&format!("tree/{top}/{dir}/"), 0, b'5'))?;
        }
        // Sizes as in a source tree: median 5 KiB, mean 15, a few large.
        let size = match random.u8(..100) {
            0..=39 => random.u64(..4 << 10),
            40..=89 => random.u64(4 << 10..24 << 10),
            90..=98 => random.u64(24 << 10..84 << 10),
            _ => random.u64(84 << 10..484 << 10),
        };
        out.write_all(&header(&format!("tree/{top}/{dir}/file{i}.c"), size, b'0'))?;
        out.write_all(&content[..size as usize])?;
        let pad = size.next_multiple_of(512) - size;
        out.write_all(&vec![0; pad as usize])?;
    }
    out.write_all(&[0; 1024])?;
    out.into_inner()?.sync_all()?;
    fs::rename(&partial, tar)?;
    Ok(())
}

/// A ustar header.
fn header(name: &str, size: u64, kind: u8) -> [u8; 512] {
    let mut h = [0; 512];
    let mut put = |at: usize, text: &str| h[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, if kind == b'5' { "0000755\0" } else { "0000644\0" });
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{size:011o}\0"));
    put(136, "14000000000\0");
    put(148, "        ");
    put(257, "ustar\x0000");
    h[156] = kind;
    let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
    h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_up_archive_unpacks() {
        let dir = tempfile::tempdir().unwrap();
        let tar = dir.path().join("t.tar");
        make_up(&tar, 30).unwrap();
        let status =
            Command::new("tar").arg("xf").arg(&tar).arg("-C").arg(dir.path()).status().unwrap();
        assert!(status.success());
        let found: Vec<_> = walkdir::WalkDir::new(dir.path().join("tree"))
            .into_iter()
            .map(Result::unwrap)
            .collect();
        let files: Vec<_> = found.iter().filter(|e| e.file_type().is_file()).collect();
        assert_eq!(files.len(), 30);
        let bytes = files.iter().map(|e| e.metadata().unwrap().len()).sum();
        assert_eq!(contents(&tar).unwrap(), (found.len() as u64, bytes));
    }

    #[test]
    fn long_listings() {
        assert_eq!(file_size("-rw-r--r-- root/root 1234 2024-01-01 00:00 a b"), Some(1234));
        assert_eq!(file_size("drwxr-xr-x root/root 0 2024-01-01 00:00 a/"), None);
        assert_eq!(file_size(""), None);
    }
}
