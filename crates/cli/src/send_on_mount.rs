//! Streams of subvolumes on a mount, which the daemon of the mount writes.
//!
//! The daemon has the image, so it does the work: it is asked at its [attach socket](crate::attach)
//! with the ids of subvolumes. Hidden here is how the daemon behind a path is found, that all paths
//! have to lead to the same one, and what an answer means to people.
//!
//! Nothing is held open on the mount meanwhile. So the mount can be unmounted, which ends the
//! stream.

use crate::attach::{Found, SendRequest};
use crate::conduit::Ended;
use crate::failure::{Advise, usage};
use crate::mount_table::{self, Mount};
use crate::mounted::mounted;
use crate::print;
use crate::state::Watch;
use crate::streams::{Named, Wanted};
use anyhow::{Context, anyhow};
use larder_format::ObjectId;
use larder_fuse::{control, subvolumes};
use larder_send::Options;
use larder_stream::Protocol;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Roots of read-only subvolumes on mounts of one image.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    pub(crate) subvolumes: Vec<PathBuf>,
    pub(crate) parent: Option<PathBuf>,
    pub(crate) clones: Vec<PathBuf>,
}

/// How streams are made of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) protocol: Protocol,
    pub(crate) options: Options,
    /// One stream with one end.
    pub(crate) joined: bool,
}

/// Has the daemon write the streams, and copies them to `out`. `watch` gets the number of bytes so
/// far. Returns a summary.
///
/// # Errors
/// The paths are not what they have to be; there is no daemon that may be asked; it could not send;
/// `out` does not take the stream.
pub(crate) fn send(
    paths: &Paths,
    how: How,
    out: &mut dyn Write,
    watch: &mut dyn FnMut(u64),
) -> anyhow::Result<serde_json::Value> {
    let first = paths.subvolumes.first().context("no subvolume is named")?;
    let served = Served::behind(first)?;
    let all = |list: &[PathBuf]| list.iter().map(|path| served.named(path)).collect();
    let all = |list: &[PathBuf]| -> anyhow::Result<Vec<Named>> { all(list) };
    let request = SendRequest {
        wanted: Wanted {
            subvolumes: all(&paths.subvolumes)?,
            parent: all(paths.parent.as_slice())?.pop(),
            clones: all(&paths.clones)?,
            options: how.options,
        },
        protocol: how.protocol.number(),
        joined: how.joined,
        fsid: served.fsid.clone(),
        daemon: served.daemon,
    };
    let asked = served.ask(first, request)?;
    asked.copy_to(out, watch).context("writing the stream")?;
    match asked.ended()? {
        Some(Ended::Complete { summary }) => Ok(summary),
        Some(Ended::Refused { why, hint, could_not_run }) => {
            let refused = Err(anyhow!(why));
            let refused = match hint {
                Some(hint) => refused.hint(hint),
                None => refused,
            };
            if could_not_run { refused.could_not_run() } else { refused }
        }
        None => Err(anyhow!(
            "{}: the daemon ended before the stream was complete, or is of a version that sends \
             nothing",
            print::path(first)
        ))
        .hint("mount the image again, and send again"),
    }
}

/// The daemon behind a path, as far as other processes know it.
#[derive(Debug)]
pub(crate) struct Served {
    /// Number of the file system.
    device: u64,
    pub(crate) fsid: String,
    image: PathBuf,
    /// The user that mounted it, which is that of the daemon.
    user: u32,
    /// Its process, if it left a state file in this mount namespace.
    pub(crate) daemon: Option<u32>,
}

impl Served {
    pub(crate) fn behind(path: &Path) -> anyhow::Result<Self> {
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
        let (image, daemon) = match record {
            Some(record) => (record.image, Some(record.pid)),
            None => (PathBuf::from(&first.source), None),
        };
        Ok(Self { device, fsid, image, user, daemon })
    }

    /// A subvolume of this daemon.
    fn named(&self, path: &Path) -> anyhow::Result<Named> {
        let shown = print::path(path);
        let meta = path.metadata().with_context(|| shown.clone()).could_not_run()?;
        if meta.dev() != self.device {
            let other = Self::behind(path)?;
            if (&other.image, other.daemon) != (&self.image, self.daemon) {
                return usage(format!(
                    "{shown} is not on a mount of {}: all subvolumes of a stream are in one image",
                    print::path(&self.image)
                ));
            }
        }
        let is_root = mounted(path, |path| match subvolumes::is_read_only(path) {
            Err(e) if matches!(e.kind(), ErrorKind::InvalidInput) => Ok(false),
            other => other.map(|_| true),
        })?;
        if !is_root {
            return Err(anyhow!("{shown} is not a subvolume"))
                .hint("`larder subvolume list` shows the subvolumes");
        }
        let id = mounted(path, subvolumes::id_of)?;
        Ok(Named { id: ObjectId(id), shown })
    }

    fn ask(&self, path: &Path, request: SendRequest) -> anyhow::Result<crate::conduit::Inlet> {
        let found = self.found(path, "send from there, because a stream has all files")?;
        let asked = found.map(|found| found.ask_to_send(request)).transpose();
        let asked = asked.with_context(|| print::path(path))?.flatten();
        asked
            .ok_or_else(|| self.not_found(path))
            .hint(
                "it is looked for in the directory for state of the user that mounted; unmount the \
                 image, and send from IMAGE:PATH",
            )
            .could_not_run()
    }

    /// The attach socket of the daemon, for a user that may do `what`.
    ///
    /// # Errors
    /// This user may not.
    pub(crate) fn found(&self, path: &Path, what: &str) -> anyhow::Result<Option<Found>> {
        let me = rustix::process::geteuid();
        if me.as_raw() != self.user && !me.is_root() {
            return Err(anyhow!(
                "{}: only root and user {}, who mounted it, may {what}",
                print::path(path),
                self.user
            ))
            .could_not_run();
        }
        Ok(Found::of_user(&self.image, self.user))
    }

    /// What to say where the daemon has no socket.
    pub(crate) fn not_found(&self, path: &Path) -> anyhow::Error {
        let image = print::path(&self.image);
        anyhow!("{}: the daemon that serves {image} cannot be found", print::path(path))
    }
}
