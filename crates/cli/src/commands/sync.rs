//! `larder sync`: makes everything on a mount durable.

use crate::mounted::mounted;
use larder_fuse::control;
use std::path::PathBuf;

/// Make everything durable that was done on a mount. (`sync` and `syncfs` do not reach a FUSE
/// daemon.)
///
/// This includes changes that programs made through mappings that they still have, and, on a mount
/// with `-o writeback`, wrote to files that are still open.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder sync mnt")]
pub(crate) struct Args {
    /// Directory on the mount
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    mounted(&args.directory, control::sync)
}
