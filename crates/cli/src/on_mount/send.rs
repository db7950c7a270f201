//! Streams of subvolumes on a mount, which the daemon of the mount writes.
//!
//! It is asked with the ids of subvolumes. Hidden here is that all paths have to lead to the same
//! daemon, and what an answer means to people.
//!
//! Nothing is held open on the mount meanwhile. So the mount can be unmounted, which ends the
//! stream.

use super::Served;
use crate::attach::SendRequest;
use crate::conduit::{Ended, Inlet};
use crate::failure::Advise;
use crate::mounted::mounted;
use crate::print;
use crate::streams::{Named, Wanted};
use anyhow::{Context, anyhow};
use larder_format::ObjectId;
use larder_fuse::subvolumes;
use larder_send::Options;
use larder_stream::Protocol;
use std::io::{ErrorKind, Write};
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
pub(crate) fn send_streams(
    paths: &Paths,
    how: How,
    out: &mut dyn Write,
    watch: &mut dyn FnMut(u64),
) -> anyhow::Result<serde_json::Value> {
    let first = paths.subvolumes.first().context("no subvolume is named")?;
    let served = Served::behind(first)?;
    let all = |list: &[PathBuf]| list.iter().map(|path| named(&served, path)).collect();
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
        fsid: served.fsid().to_owned(),
        daemon: served.daemon(),
    };
    let asked = ask(&served, request)?;
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

/// A subvolume of this daemon.
fn named(served: &Served, path: &Path) -> anyhow::Result<Named> {
    let shown = print::path(path);
    served.has(path)?;
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

fn ask(served: &Served, request: SendRequest) -> anyhow::Result<Inlet> {
    let found = served.found("send from there, because a stream has all files")?;
    let asked = found.map(|found| found.ask_to_send(request)).transpose();
    let asked = asked.with_context(|| print::path(served.path()))?.flatten();
    asked
        .ok_or_else(|| served.not_found())
        .hint(
            "it is looked for in the directory for state of the user that mounted; unmount the \
             image, and send from IMAGE:PATH",
        )
        .could_not_run()
}
