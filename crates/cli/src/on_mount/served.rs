//! The daemon behind a path: how it is found, which caller may ask it for what, its answers.

use crate::attach::Found;
use crate::conduit::{Ended, Inlet};
use crate::failure::{Advise, usage};
use crate::jobs::{Job, JobRequest};
use crate::mount_table::{self, Mount};
use crate::mounted::mounted;
use crate::print;
use crate::state::Watch;
use anyhow::{Context, anyhow};
use larder_fuse::control;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The daemon behind a path, as far as other processes know it.
#[derive(Debug)]
pub(crate) struct Served {
    path: PathBuf,
    /// Number of the file system.
    device: u64,
    fsid: String,
    image: PathBuf,
    /// The user that mounted it, which is that of the daemon.
    user: u32,
    /// Its process, if it left a state file in this mount namespace.
    daemon: Option<u32>,
    /// Its attach socket, as that file has it.
    socket: Option<PathBuf>,
}

impl Served {
    /// # Errors
    /// The path is not on a Larder mount.
    pub(super) fn behind(path: &Path) -> anyhow::Result<Self> {
        let told = mounted(path, control::df)?;
        let told: serde_json::Value = serde_json::from_str(&told)?;
        let fsid = told["file_system"]["fsid"].as_str().unwrap_or_default().to_owned();
        let device = path.metadata().with_context(|| print::path(path))?.dev();
        let mut mounts: Vec<Mount> = mount_table::all()?;
        mounts.retain(|mount| mount.device == device && mount.is_larder());
        let first = mounts
            .first()
            .ok_or_else(|| anyhow!("{} is not in the mount table", print::path(path)))
            .could_not_run()?;
        let user = first.user.unwrap_or_default();
        // Of a mount that is bound to other places as well, one place is that of the state file.
        let mut watches =
            mounts.iter().filter_map(|mount| Watch::find(&mount.point, mount.user).ok().flatten());
        let record = watches.find_map(|mut watch| watch.record().ok());
        let (image, daemon, socket) = match record {
            Some(record) => (record.image, Some(record.pid), record.socket),
            None => (PathBuf::from(&first.source), None, None),
        };
        Ok(Self { path: path.to_owned(), device, fsid, image, user, daemon, socket })
    }

    /// The file system.
    pub(super) fn fsid(&self) -> &str {
        &self.fsid
    }

    /// The process of the daemon, if it is known here.
    pub(super) fn daemon(&self) -> Option<u32> {
        self.daemon
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The image, or the first device, by the name that the mount was given.
    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    /// Does another path lead to this daemon?
    ///
    /// # Errors
    /// It does not.
    pub(super) fn has(&self, path: &Path) -> anyhow::Result<()> {
        let shown = || print::path(path);
        if path.metadata().with_context(shown).could_not_run()?.dev() == self.device {
            return Ok(());
        }
        let other = Self::behind(path)?;
        if (&other.image, other.daemon) == (&self.image, self.daemon) {
            return Ok(());
        }
        usage(format!(
            "{} is not on a mount of {}: all subvolumes of a stream are in one image",
            shown(),
            print::path(&self.image)
        ))
    }

    /// Has a job begun, changed or ended. `files` come along. What the daemon says comes out of the
    /// inlet.
    ///
    /// # Errors
    /// This user may not; the daemon cannot be asked.
    pub(super) fn ask(&self, job: Job, files: &[BorrowedFd<'_>]) -> anyhow::Result<Inlet> {
        let found = self.found(job.what())?;
        let request = JobRequest { fsid: self.fsid.clone(), daemon: self.daemon, job };
        let asked = found.map(|found| found.ask_for_job(request, files)).transpose();
        let asked = asked.with_context(|| print::path(&self.path))?.flatten();
        asked.ok_or_else(|| self.not_found()).could_not_run()
    }

    /// The same, and waits for the answer: everything that the daemon says.
    ///
    /// # Errors
    /// It is refused; the daemon cannot be asked.
    pub(super) fn answer(&self, job: Job, files: &[BorrowedFd<'_>]) -> anyhow::Result<Vec<u8>> {
        let inlet = self.ask(job, files)?;
        let mut text = Vec::new();
        inlet.copy_to(&mut text, &mut |_| ())?;
        concluded(inlet).with_context(|| print::path(&self.path))?;
        Ok(text)
    }

    /// The attach socket of the daemon, for a user that may do `what`.
    ///
    /// # Errors
    /// This user may not.
    pub(super) fn found(&self, what: &str) -> anyhow::Result<Option<Found>> {
        let me = rustix::process::geteuid();
        if me.as_raw() != self.user && !me.is_root() {
            return Err(anyhow!(
                "{}: only root and user {}, who mounted it, may {what}",
                print::path(&self.path),
                self.user
            ))
            .could_not_run();
        }
        let socket = self.socket.as_deref();
        let noted = socket.and_then(|socket| Found::at(socket, self.user));
        Ok(noted.or_else(|| Found::of_user(&self.image, self.user)))
    }

    /// What to say where the daemon has no socket.
    pub(super) fn not_found(&self) -> anyhow::Error {
        let image = print::path(&self.image);
        anyhow!("{}: the daemon that serves {image} cannot be found", print::path(&self.path))
    }
}

/// How a job, or what was asked about it, ended.
///
/// # Errors
/// It was refused; the daemon has ended.
pub(super) fn concluded(inlet: Inlet) -> anyhow::Result<serde_json::Value> {
    match inlet.ended()? {
        Some(Ended::Complete { summary }) => Ok(summary),
        Some(Ended::Refused { why, .. }) => Err(anyhow!(why)).could_not_run(),
        None => Err(anyhow!("its daemon has ended, or is of a version that cannot do this"))
            .could_not_run(),
    }
}
