//! `btrfs replace`: as `larder device replace` on a mount, with the words of btrfs-progs.

use super::mounted::must_be_larder;
use super::{Done, Failed};
use crate::device_changes::NewDevice;
use crate::jobs::ReplaceOrder;
use crate::on_mount::replace::{NOT_RUNNING, Replaced, number_of};
use crate::print;
use larder_fs::{ReplaceStatus, Replacing};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Replace {
    /// Let another device take the place of one
    Start {
        /// Wait for the end
        #[arg(short = 'B')]
        wait: bool,
        /// Overwrite a target that holds something
        #[arg(short)]
        force: bool,
        /// Read the old device only where nothing else has its bytes
        #[arg(short = 'r')]
        avoid: bool,
        /// Accepted
        #[arg(short = 'K', long = "nodiscard")]
        nodiscard: bool,
        /// Accepted
        #[arg(long)]
        enqueue: bool,
        source: PathBuf,
        target: PathBuf,
        path: PathBuf,
    },
    /// Say how far a replacement is
    Status {
        /// Once, and not until its end
        #[arg(short = '1')]
        once: bool,
        path: PathBuf,
    },
    /// Give a replacement up
    Cancel { path: PathBuf },
}

/// Exit code where there is nothing that could be stopped.
const NOTHING_RUNS: u8 = 2;

pub(super) fn run(what: Replace) -> Done {
    match what {
        Replace::Start { wait, force, avoid, source, target, path, .. } => {
            must_be_larder(&path)?;
            start(&path, (&source, &target), (force, avoid), wait)
        }
        Replace::Status { once, path } => {
            must_be_larder(&path)?;
            let replaced = Replaced::behind(&path)?;
            let mut state = replaced.change(ReplaceOrder::Status)?;
            if !once {
                state = replaced.watch(state)?;
            }
            Ok(print::line(&line(&state))?)
        }
        Replace::Cancel { path } => {
            must_be_larder(&path)?;
            let canceled = Replaced::behind(&path)?.change(ReplaceOrder::Cancel);
            match canceled {
                Err(e) if e.chain().any(|e| e.to_string() == NOT_RUNNING) => {
                    let what =
                        format!("replace cancel on '{}' failed: not started", path.display());
                    Err(Failed::because(what).with_code(NOTHING_RUNS))
                }
                canceled => Ok(canceled.map(drop)?),
            }
        }
    }
}

fn start(
    path: &Path,
    (source, target): (&Path, &Path),
    (force, avoid): (bool, bool),
    wait: bool,
) -> Done {
    let number = number_of(source, path)?;
    let new = NewDevice { path: target, size: None, force };
    let replaced = Replaced::behind(path)?;
    let state = new.replace(|device| replaced.begin(number, avoid, device))?;
    if !wait {
        return Ok(());
    }
    let state = replaced.wait_for_the_end(state, &|_| ())?;
    match (state.status, state.why) {
        (ReplaceStatus::Finished, _) => Ok(()),
        (_, why) => {
            let (path, why) = (path.display(), why.unwrap_or_else(|| "it was ended".into()));
            Err(Failed::because(format!("replace start on '{path}' failed: {why}")))
        }
    }
}

/// What btrfs-progs says.
fn line(state: &Replacing) -> String {
    let percent = format!("{}.{}%", state.permille() / 10, state.permille() % 10);
    let at = |seconds: u64| day_and_time(seconds.cast_signed());
    let (started, stopped) = (at(state.started), at(state.stopped));
    let how = match state.status {
        ReplaceStatus::Never => return "Never started".into(),
        ReplaceStatus::Running => format!("{percent} done"),
        ReplaceStatus::Finished => format!("Started on {started}, finished on {stopped}"),
        ReplaceStatus::Canceled => {
            format!("Started on {started}, canceled on {stopped} at {percent}")
        }
        ReplaceStatus::Suspended => {
            format!("Started on {started}, suspended on {stopped} at {percent}")
        }
    };
    format!("{how}, {} write errs, {} uncorr. read errs", state.write_errors, state.unreadable)
}

/// `25.Nov 22:15:51`.
fn day_and_time(seconds: i64) -> String {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let shown = print::time(seconds);
    // 2026-11-25 22:15:51
    let part = |from: usize, to: usize| shown.get(from..to).unwrap_or_default();
    let month = part(5, 7).parse::<usize>().ok().and_then(|n| MONTHS.get(n.checked_sub(1)?));
    format!("{:>2}.{} {}", part(8, 10), month.unwrap_or(&"???"), part(11, 19))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_btrfs_progs() {
        let state = Replacing {
            status: ReplaceStatus::Finished,
            started: 1_795_644_951,
            stopped: 1_795_644_954,
            ..Replacing::default()
        };
        assert_eq!(
            line(&state),
            "Started on 25.Nov 22:15:51, finished on 25.Nov 22:15:54, 0 write errs, 0 uncorr. \
                read errs"
        );
        let state = Replacing {
            status: ReplaceStatus::Running,
            cursor: 322,
            size: 1000,
            ..Replacing::default()
        };
        assert_eq!(line(&state), "32.2% done, 0 write errs, 0 uncorr. read errs");
        assert_eq!(line(&Replacing::default()), "Never started");
    }
}
