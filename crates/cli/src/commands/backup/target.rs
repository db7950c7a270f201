//! The side that receives, on this machine: a directory of an image or on a mount.
//!
//! What was received in part always goes on: the caller sends the same stream again.

use super::flow::{Sender, piped};
use super::held::{self, Entry};
use crate::image::Image;
use crate::interrupt::Interrupt;
use crate::mounted::mounted;
use crate::receiving::{Shown, apply, directory};
use anyhow::Context;
use larder_fs::FileKind;
use larder_fuse::{control, subvolumes as on_mount};
use larder_receive::{MountedDir, Options};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The caller says what happens.
const SILENT: Shown = Shown { progress: false, names: false };

/// A directory that receives snapshots.
pub(super) trait Target {
    /// What it has.
    fn list(&mut self) -> anyhow::Result<Vec<Entry>>;
    /// Receives what `send` writes: one snapshot.
    fn receive(&mut self, send: &mut Sender<'_>) -> anyhow::Result<()>;
    /// Deletes subvolumes of it.
    fn delete(&mut self, names: &[Vec<u8>]) -> anyhow::Result<()>;
    /// Gives back the space of what was deleted, and makes that durable.
    fn finish(&mut self) -> anyhow::Result<()>;
}

fn options() -> Options {
    Options { resume: true, ..Options::default() }
}

/// A directory of an image.
#[derive(Debug)]
pub(super) struct InImage<'i> {
    pub(super) image: &'i Image,
    pub(super) path: Vec<u8>,
    pub(super) interrupt: Interrupt,
}

impl Target for InImage<'_> {
    fn list(&mut self) -> anyhow::Result<Vec<Entry>> {
        let dir = self.image.resolve(&self.path, true)?;
        anyhow::ensure!(
            dir.kind == FileKind::Directory,
            "{} is not a directory",
            self.image.show(&self.path)
        );
        held::in_image(self.image, dir.id)
    }

    fn receive(&mut self, send: &mut Sender<'_>) -> anyhow::Result<()> {
        let mut to = directory(self.image, &self.path)?;
        piped(send, |stream| {
            apply(stream, &mut to, &options(), (&self.interrupt, SILENT)).map(drop)
        })
    }

    fn delete(&mut self, names: &[Vec<u8>]) -> anyhow::Result<()> {
        let dir = self.image.resolve(&self.path, true)?.id;
        for name in names {
            let gone = self.image.fs.delete_subvolume(dir, name);
            gone.with_context(|| self.image.show(&[&self.path[..], b"/", name].concat()))?;
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.image.fs.wait_for_drops().context("giving the space of deleted snapshots back")
    }
}

/// A directory on a mount.
#[derive(Debug)]
pub(super) struct OnMount {
    pub(super) dir: PathBuf,
    pub(super) interrupt: Interrupt,
}

impl Target for OnMount {
    fn list(&mut self) -> anyhow::Result<Vec<Entry>> {
        held::on_a_mount(&self.dir)
    }

    fn receive(&mut self, send: &mut Sender<'_>) -> anyhow::Result<()> {
        let mut to = mounted(&self.dir, MountedDir::open)?;
        piped(send, |stream| {
            apply(stream, &mut to, &options(), (&self.interrupt, SILENT)).map(drop)
        })
    }

    fn delete(&mut self, names: &[Vec<u8>]) -> anyhow::Result<()> {
        for name in names {
            mounted(&self.dir.join(OsStr::from_bytes(name)), on_mount::delete)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        mounted(&self.dir, control::sync)
    }
}
