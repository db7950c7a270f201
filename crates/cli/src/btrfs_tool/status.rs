//! Balance, replacement, quota groups: Larder has none of these, so none ever runs.
//!
//! Programs ask for the status before they do something. They get the answer of a file system where
//! nothing was ever started, which is true. To start one is refused ([`super::elsewhere`]).

use super::elsewhere::Anything;
use super::mounted::must_be_larder;
use super::{Done, Failed, elsewhere};
use crate::print;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Balance {
    /// Not supported
    Start(Anything),
    /// Nothing runs
    Pause { path: PathBuf },
    /// Nothing runs
    Cancel { path: PathBuf },
    /// Nothing runs
    Resume { path: PathBuf },
    /// Say that none runs
    Status {
        /// Accepted
        #[arg(short, long)]
        verbose: bool,
        path: PathBuf,
    },
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Replace {
    /// Not supported
    Start(Anything),
    /// Say that none ran
    Status {
        /// Accepted
        #[arg(short = '1')]
        once: bool,
        path: PathBuf,
    },
    /// Nothing runs
    Cancel { path: PathBuf },
}

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

/// Exit code where there is nothing that could be stopped or resumed.
const NOTHING_RUNS: u8 = 2;

fn nothing_runs(path: &Path, what: &str, why: &str) -> Done {
    must_be_larder(path)?;
    Err(Failed::because(what.replace("{}", &path.display().to_string()) + why)
        .with_code(NOTHING_RUNS))
}

pub(super) fn balance(what: Balance) -> Done {
    match what {
        Balance::Start(_) => elsewhere::refuse("balance start"),
        Balance::Pause { path } => {
            nothing_runs(&path, "balance pause on '{}' failed: ", "Not running")
        }
        Balance::Cancel { path } => {
            nothing_runs(&path, "balance cancel on '{}' failed: ", "Not in progress")
        }
        Balance::Resume { path } => {
            nothing_runs(&path, "balance resume on '{}' failed: ", "Not in progress")
        }
        Balance::Status { path, .. } => {
            must_be_larder(&path)?;
            Ok(print::line(&format!("No balance found on '{}'", path.display()))?)
        }
    }
}

pub(super) fn replace(what: Replace) -> Done {
    match what {
        Replace::Start(_) => elsewhere::refuse("replace start"),
        Replace::Status { path, .. } => {
            must_be_larder(&path)?;
            Ok(print::line("Never started")?)
        }
        Replace::Cancel { path } => {
            nothing_runs(&path, "replace cancel on '{}' failed: ", "not started")
        }
    }
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
