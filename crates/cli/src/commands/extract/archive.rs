//! Images as tars and container images.
//!
//! A tar gets its name when it is complete: an interrupted one leaves nothing that looks like a
//! tar. An entry that cannot be read is reported, and the others follow, as long as no part of it
//! has been written.

use super::{Extracted, Job};
use crate::copy::image::ImageTree;
use crate::copy::walk::{Event, Found, Walk};
use crate::copy::{Source, Trouble};
use crate::failure::{Advise, usage};
use crate::interrupt::Interrupt;
use crate::source_date::source_date;
use crate::{failure, print, size};
use anyhow::Context;
use indicatif::ProgressBar;
use larder_archive::{
    Compression, Compressor, ImageConfig, Layout, Method, OciError, Platform, Style, TarError,
    TarWriter,
};
use larder_fs::{FileKind, InodeId, Timestamp};
use larder_sources::{Attributes, Contents, Entry, Kind, LinkGroup, Time, TreePath};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Bytes that are gathered for a write.
const BUFFER: usize = 1 << 20;

/// Writes a tar to a file, or to standard output for `-`.
pub(super) fn tar(job: &Job<'_>, file: &Path) -> anyhow::Result<Extracted> {
    let how = job.args.compress.unwrap_or_else(|| Compression::of_file(file));
    if file == Path::new("-") {
        let out = BufWriter::with_capacity(BUFFER, io::stdout().lock());
        let (extracted, out) = tar_to(job, how, out)?;
        let whole = out.into_inner().map_err(io::IntoInnerError::into_error);
        return whole.context(print::STDOUT).map(|_| extracted);
    }
    let existing = std::fs::metadata(file).or_else(|_| std::fs::symlink_metadata(file)).ok();
    if existing.as_ref().is_some_and(|meta| !meta.is_file() && !meta.is_symlink()) {
        // A device or a pipe is written as it is, and not replaced.
        let out = std::fs::OpenOptions::new().write(true).open(file);
        let out = out.with_context(|| print::path(file)).could_not_run()?;
        return tar_to(job, how, out).with_context(|| print::path(file)).map(|(done, _)| done);
    }
    if existing.is_some() && !job.args.force {
        return exists(file);
    }
    // What is replaced is what a link leads to, and not the link.
    let file = &file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let above = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = tempfile::Builder::new()
        .prefix(".larder-")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(above);
    let made = made.with_context(|| print::path(above)).could_not_run()?;
    let out = BufWriter::with_capacity(BUFFER, made);
    let (extracted, out) = tar_to(job, how, out).with_context(|| print::path(file))?;
    let made = out.into_inner().map_err(io::IntoInnerError::into_error);
    let named = made.and_then(|made| {
        if job.args.force {
            made.persist(file).map(drop).map_err(io::Error::from)
        } else {
            made.persist_noclobber(file).map(drop).map_err(io::Error::from)
        }
    });
    named.with_context(|| print::path(file))?;
    Ok(extracted)
}

fn exists<T>(file: &Path) -> anyhow::Result<T> {
    Err(anyhow::anyhow!("{} exists", print::path(file))).hint("--force replaces it").could_not_run()
}

/// Writes a tar, and gives back where it went.
fn tar_to<W: Write>(job: &Job<'_>, how: Compression, out: W) -> anyhow::Result<(Extracted, W)> {
    let mut tar = TarWriter::new(Compressor::new(out, how)?, Style::Archive);
    let extracted = entries(job, &mut tar)?;
    let out = tar.finish().and_then(Compressor::finish).context("writing the tar")?;
    Ok((extracted, out))
}

/// A layout, and the name of an image in it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OciName {
    layout: PathBuf,
    tag: String,
}

impl OciName {
    /// `LAYOUT[:TAG]`. A tag has no slash, so a colon before the last slash belongs to the
    /// directory.
    pub(super) fn parse(text: &OsString) -> Self {
        let letter = |b: &u8| b.is_ascii_alphanumeric() || b"._-+@".contains(b);
        let bytes = text.as_bytes();
        let colon = bytes.iter().rposition(|b| *b == b':').filter(|at| *at > 0);
        let tag = colon.map(|at| &bytes[at + 1..]).filter(|tag| tag.iter().all(letter));
        match (colon, tag.and_then(|tag| str::from_utf8(tag).ok())) {
            (Some(at), Some(tag)) if !tag.is_empty() => {
                Self { layout: PathBuf::from(OsStr::from_bytes(&bytes[..at])), tag: tag.to_owned() }
            }
            _ => Self { layout: PathBuf::from(text), tag: "latest".to_owned() },
        }
    }
}

/// Writes a container image of one layer.
pub(super) fn oci(job: &Job<'_>, name: &OciName) -> anyhow::Result<Extracted> {
    if job.start.kind != FileKind::Directory {
        return usage(format!("{} is a file: a container image is a tree", job.shown));
    }
    let config = ImageConfig {
        platform: job.args.platform.clone().unwrap_or_else(this_platform),
        created: source_date()?.map(|t| print::time(t.sec).replace(' ', "T") + "Z"),
        tag: name.tag.clone(),
        replace: job.args.force,
    };
    let layout = Layout::open(&name.layout).could_not_run()?;
    if !config.replace && layout.has(&name.tag).could_not_run()? {
        let (path, tag) = (name.layout.clone(), name.tag.clone());
        return Err(OciError::Exists { path, tag }).hint("--force replaces it").could_not_run();
    }
    let how = Compression { method: Method::Gzip, level: None };
    let layer = layout.layer(job.args.compress.unwrap_or(how)).could_not_run()?;
    let mut tar = TarWriter::new(layer, Style::Layer);
    let mut extracted = entries(job, &mut tar)?;
    let layer = tar.finish().context("writing the layer")?.finish()?;
    extracted.digest = Some(layout.image(&[layer], &config)?.digest);
    Ok(extracted)
}

/// This machine, in the words of container images.
fn this_platform() -> Platform {
    let (architecture, variant) = match std::env::consts::ARCH {
        "x86_64" => ("amd64", None),
        "x86" => ("386", None),
        "aarch64" => ("arm64", Some("v8")),
        "powerpc64" if cfg!(target_endian = "little") => ("ppc64le", None),
        "powerpc64" => ("ppc64", None),
        "loongarch64" => ("loong64", None),
        other => (other, None),
    };
    Platform {
        os: std::env::consts::OS.to_owned(),
        architecture: architecture.to_owned(),
        variant: variant.map(str::to_owned),
    }
}

/// Puts everything that is selected into a tar.
fn entries<W: Write>(job: &Job<'_>, tar: &mut TarWriter<W>) -> anyhow::Result<Extracted> {
    let (progress, interrupt) = (print::progress(), Interrupt::watch());
    let mut walk = Walk::new(&job.tree, &job.select, &job.start.id, &job.shown);
    let mut writing = Writing {
        job,
        tar,
        interrupt,
        progress,
        groups: HashMap::new(),
        done: Extracted::default(),
    };
    while let Some(event) = walk.next() {
        let step = event.and_then(|event| match event {
            Event::Leave => Ok(()),
            Event::Enter(found) | Event::Other(found) => writing.entry(&found),
        });
        match step {
            Ok(()) => {}
            Err(Trouble::Entry(e)) => {
                writing.done.failed += 1;
                writing.progress.suspend(|| print::say(&failure::text(&e)));
            }
            Err(Trouble::All(e)) => {
                writing.progress.finish_and_clear();
                return Err(e);
            }
        }
    }
    writing.progress.finish_and_clear();
    Ok(writing.done)
}

/// A tar in the making.
struct Writing<'a, W> {
    job: &'a Job<'a>,
    tar: &'a mut TarWriter<W>,
    interrupt: Interrupt,
    progress: ProgressBar,
    /// Numbers of files that have several names.
    groups: HashMap<(u64, u64), LinkGroup>,
    done: Extracted,
}

impl<W: Write> Writing<'_, W> {
    fn entry(&mut self, found: &Found<InodeId>) -> Result<(), Trouble> {
        self.interrupt.check().map_err(|e| Trouble::All(e.into()))?;
        let of_source = |e: anyhow::Error| Trouble::Entry(e.context(found.shown.clone()));
        let entry = self.described(found).map_err(of_source)?;
        let mut contents = ImageFile {
            tree: &self.job.tree,
            id: found.node,
            size: found.meta.size,
            interrupt: &self.interrupt,
            progress: &self.progress,
            before: self.done.bytes,
            read: 0,
        };
        let written = self.tar.entry(&entry, Some(&mut contents));
        self.done.bytes += contents.read;
        self.progress.inc(1);
        match written {
            Ok(()) => {
                self.done.entries += 1;
                if found.nested {
                    self.done.subvolumes.push(print::name(&found.path));
                }
                Ok(())
            }
            Err(TarError::Socket) => {
                self.done.sockets += 1;
                Ok(())
            }
            Err(TarError::Unreadable(e)) => Err(of_source(unwrapped(e))),
            Err(TarError::Torn(e)) => Err(Trouble::All(unwrapped(e).context(found.shown.clone()))),
            Err(TarError::Output(e)) => {
                Err(Trouble::All(anyhow::Error::new(e).context("writing the tar")))
            }
        }
    }

    /// The entry for something in the image.
    fn described(&mut self, found: &Found<InodeId>) -> anyhow::Result<Entry> {
        let meta = &found.meta;
        let path = if found.path.is_empty() && meta.kind != FileKind::Directory {
            &self.job.name
        } else {
            &found.path
        };
        let path = TreePath::new(path).context("the name is not one")?;
        let part = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let (major, minor) = (part(meta.rdev >> 20), part(meta.rdev & 0xf_ffff));
        let kind = match meta.kind {
            FileKind::Directory => Kind::Directory,
            FileKind::Regular => Kind::File { size: meta.size, contents: None },
            FileKind::Symlink => Kind::Symlink(self.job.tree.readlink(&found.node)?),
            FileKind::CharDevice => Kind::CharDevice { major, minor },
            FileKind::BlockDevice => Kind::BlockDevice { major, minor },
            FileKind::Fifo => Kind::Fifo,
            FileKind::Socket => Kind::Socket,
        };
        let mut xattrs = found.xattrs.clone();
        xattrs.sort();
        let attributes = Attributes {
            uid: meta.uid,
            gid: meta.gid,
            permissions: meta.perm,
            modified: time(meta.mtime),
            accessed: Some(time(meta.atime)),
            xattrs,
            ..Attributes::default()
        };
        let next = LinkGroup(self.groups.len() as u64);
        let links = meta.identity.map(|identity| *self.groups.entry(identity).or_insert(next));
        Ok(Entry { path, attributes, kind, links })
    }
}

fn time(t: Timestamp) -> Time {
    Time { seconds: t.sec, nanoseconds: t.nsec }
}

/// The error within an error, which is one of the image or of a signal.
fn unwrapped(error: io::Error) -> anyhow::Error {
    match error.downcast::<Carried>() {
        Ok(Carried(inner)) => inner,
        Err(error) => error.into(),
    }
}

/// Any error as one that I/O has.
#[derive(Debug)]
struct Carried(anyhow::Error);

impl std::fmt::Display for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Carried {}

/// The contents of a file in an image.
struct ImageFile<'a> {
    tree: &'a ImageTree<'a>,
    id: InodeId,
    size: u64,
    interrupt: &'a Interrupt,
    progress: &'a ProgressBar,
    /// Bytes of the files before this one.
    before: u64,
    read: u64,
}

impl Contents for ImageFile<'_> {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        let (mut parts, mut at): (Vec<Range<u64>>, u64) = (Vec::new(), 0);
        while at < self.size {
            let data = self.tree.data(&self.id, at..self.size);
            let Some(part) = data.map_err(|e| io::Error::other(Carried(e)))? else { break };
            let part = part.start.max(at)..part.end.min(self.size);
            at = part.end;
            if part.start < part.end {
                parts.push(part);
            }
        }
        Ok(parts)
    }

    fn read_exact_at(&mut self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            self.interrupt.check().map_err(|e| io::Error::other(Carried(e.into())))?;
            let n = self.tree.read(&self.id, offset, buf);
            let n = n.map_err(|e| io::Error::other(Carried(e)))?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buf = &mut buf[n..];
            offset += n as u64;
            self.read += n as u64;
            self.progress.set_message(size::human(self.before + self.read));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_follows_the_last_colon() {
        for (text, layout, tag) in [
            ("layout", "layout", "latest"),
            ("layout:v1.2", "layout", "v1.2"),
            ("a:b/layout", "a:b/layout", "latest"),
            ("a:b:c", "a:b", "c"),
            ("layout:", "layout:", "latest"),
        ] {
            let expected = OciName { layout: layout.into(), tag: tag.into() };
            assert_eq!(OciName::parse(&text.into()), expected, "{text}");
        }
    }
}
