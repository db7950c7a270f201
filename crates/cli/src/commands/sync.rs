//! `larder sync`: makes everything on a mount durable.

use crate::failure::Advise;
use crate::mount_table;
use anyhow::Context;
use larder_fuse::control;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Make everything durable that was done on a mount. (`sync` and `syncfs` do not reach a FUSE
/// daemon.)
///
/// With what programs changed through mappings that they still have, and, on a mount with `-o
/// writeback`, wrote to files that are still open.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder sync mnt")]
pub(crate) struct Args {
    /// Directory on the mount
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    mounted(&args.directory, control::sync)
}

/// As [`mounted`], for a request that the kernel's file systems answer, too: theirs is not the one
/// that was meant.
pub(crate) fn mounted_here<T>(
    path: &Path,
    send: impl FnOnce(&Path) -> std::io::Result<T>,
) -> anyhow::Result<T> {
    mounted(path, |path| control::is_served(path).and_then(|()| send(path)))
}

/// Sends a request to the daemon behind `path`, with the right words where there is none.
pub(crate) fn mounted<T>(
    path: &Path,
    send: impl FnOnce(&Path) -> std::io::Result<T>,
) -> anyhow::Result<T> {
    let result = send(path);
    let kind = result.as_ref().err().map(std::io::Error::kind);
    let dead = matches!(&result, Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED)));
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
