//! Quota groups: Larder has none, so nothing of theirs ever runs.
//!
//! Programs ask for the status before they do something. They get the answer of a file system where
//! nothing was ever started, which is true. To start one is refused ([`super::elsewhere`]).

use super::elsewhere::Anything;
use super::mounted::must_be_larder;
use super::{Done, Failed, elsewhere};
use std::path::PathBuf;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Qgroup {
    /// Say that there are none
    Show(QgroupShow),
    /// Not supported
    Assign(Anything),
    /// Not supported
    Remove(Anything),
    /// Not supported
    Create(Anything),
    /// Not supported
    ClearStale(Anything),
    /// Not supported
    Destroy(Anything),
    /// Not supported
    Limit(Anything),
}

#[derive(Debug, clap::Args)]
pub(crate) struct QgroupShow {
    /// Options of btrfs-progs, and the path last
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<PathBuf>,
}

pub(super) fn qgroup(what: Qgroup) -> Done {
    match what {
        Qgroup::Show(options) => {
            options.words.last().map_or(Ok(()), |path| must_be_larder(path))?;
            Err(Failed::because("can't list qgroups: quotas not enabled"))
        }
        _ => elsewhere::refuse("qgroup"),
    }
}
