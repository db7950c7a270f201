//! Requests to the daemon behind a path on a mount.
//!
//! Hidden here is what an error of such a request means to the user: there is no daemon, the daemon
//! is gone, or the mount belongs to another user.

use crate::failure::Advise;
use crate::mount_table;
use anyhow::Context;
use larder_fuse::control;
use std::io::ErrorKind;
use std::path::Path;

/// Sends a request to the daemon behind `path`, and adds a hint to its error.
pub(crate) fn mounted<T>(
    path: &Path,
    send: impl FnOnce(&Path) -> std::io::Result<T>,
) -> anyhow::Result<T> {
    let result = send(path);
    let kind = result.as_ref().err().map(std::io::Error::kind);
    let number = result.as_ref().err().and_then(std::io::Error::raw_os_error);
    let dead = matches!(number, Some(libc::ENOTCONN | libc::ECONNABORTED));
    let elsewhere = matches!(&result, Err(e) if e.to_string().contains("not on a Larder mount"));
    let result = result.with_context(|| path.display().to_string());
    if dead {
        return result
            .hint(format!("its daemon is gone: `larder umount {}` clears it", path.display()))
            .could_not_run();
    }
    match kind {
        Some(ErrorKind::PermissionDenied) => match mount_table::why_denied(path) {
            Some(why) => result.hint(why),
            None => result,
        },
        Some(ErrorKind::Unsupported) if elsewhere => {
            result.hint("give a directory on a mounted image").could_not_run()
        }
        Some(ErrorKind::Unsupported) => result.could_not_run(),
        Some(ErrorKind::NotFound | ErrorKind::NotADirectory) => result.could_not_run(),
        Some(ErrorKind::ReadOnlyFilesystem) => {
            result.hint("`larder stats` says why nothing can be written, if it was not mounted so")
        }
        _ => result,
    }
}

/// As [`mounted`], for a request that file systems of the kernel answer, too: only a Larder mount
/// is asked.
pub(crate) fn mounted_here<T>(
    path: &Path,
    send: impl FnOnce(&Path) -> std::io::Result<T>,
) -> anyhow::Result<T> {
    mounted(path, |path| control::is_served(path).and_then(|()| send(path)))
}
