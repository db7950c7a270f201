//! `btrfs balance`: the balance of a mount, in the words and lines of btrfs-progs.
//!
//! The daemon balances ([`crate::on_mount::balance`]). A balance without filters moves everything,
//! as there, and says so; it begins at once, without the ten seconds in which it can be stopped.

use super::{Done, Failed, must_be_directory};
use crate::jobs::BalanceOrder;
use crate::on_mount::balance::{Balanced, IS_RUNNING, NOT_RUNNING};
use crate::print;
use larder_fs::{BalanceState, BalanceStatus, Filters};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Balance chunks
    Start(Start),
    /// Pause a balance
    Pause { path: PathBuf },
    /// End a balance
    Cancel { path: PathBuf },
    /// Go on with a balance that is paused
    Resume {
        /// Print nothing
        #[arg(short, long)]
        quiet: bool,
        path: PathBuf,
    },
    /// Say how far a balance is
    Status {
        /// Show the filters
        #[arg(short, long)]
        verbose: bool,
        path: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Start {
    /// Options of btrfs-progs, -d[FILTERS] -m[FILTERS] -s[FILTERS] among them, and the path
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// What the words of `start` say.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wanted {
    data: Option<String>,
    metadata: Option<String>,
    system: Option<String>,
    force: bool,
    verbose: bool,
    full: bool,
    background: bool,
    quiet: bool,
    paths: Vec<OsString>,
}

impl Wanted {
    fn of(words: &[OsString]) -> Result<Self, Failed> {
        let mut wanted = Self::default();
        let mut only_paths = false;
        for word in words {
            let text = word.to_str().filter(|text| text.starts_with('-') && !only_paths);
            match text {
                Some("--") => only_paths = true,
                Some(option) => wanted.option(option)?,
                None => wanted.paths.push(word.clone()),
            }
        }
        // Metadata takes the chunk tree along.
        if wanted.system.is_none() {
            wanted.system = wanted.metadata.clone();
        } else if !wanted.force {
            return Err(Failed::because("Refusing to explicitly operate on system chunks.")
                .and("Pass --force if you really want to do that."));
        }
        Ok(wanted)
    }

    fn option(&mut self, option: &str) -> Result<(), Failed> {
        match option {
            "-f" | "--force" => self.force = true,
            "-v" | "--verbose" => self.verbose = true,
            "-q" | "--quiet" => self.quiet = true,
            "--full-balance" => self.full = true,
            "--background" | "--bg" => self.background = true,
            "--enqueue" => {}
            _ => {
                let (set, filters) = match option.split_at_checked(2) {
                    Some(("-d", filters)) => (&mut self.data, filters),
                    Some(("-m", filters)) => (&mut self.metadata, filters),
                    Some(("-s", filters)) => (&mut self.system, filters),
                    _ => return Err(Failed::because(format!("unrecognized option '{option}'"))),
                };
                let read: Result<Filters, String> = filters.parse();
                *set = Some(read.map_err(Failed::because)?.to_string());
            }
        }
        Ok(())
    }
}

/// Exit code where there is nothing that could be paused, ended or resumed.
const NOTHING_RUNS: u8 = 2;

pub(super) fn run(what: What, quiet: bool) -> Done {
    match what {
        What::Start(start) => begin(Wanted::of(&start.words)?, quiet),
        What::Pause { path } => {
            change(&path, BalanceOrder::Pause, "pause", "Not running").map(drop)
        }
        What::Cancel { path } => {
            change(&path, BalanceOrder::Cancel, "cancel", "Not in progress").map(drop)
        }
        What::Resume { quiet: more, path } => {
            let balanced = at(&path)?;
            if balanced.ask(BalanceOrder::Status)?.unfinished.is_none() {
                return Err(nothing_runs(&path, "resume", "Not in progress"));
            }
            let told = change(&path, BalanceOrder::Resume, "resume", "Not in progress")?;
            conclude(&balanced.wait_for_the_end(told, &|_| ())?, &path, quiet || more)
        }
        What::Status { verbose, path } => status(&path, verbose),
    }
}

fn at(path: &Path) -> Result<Balanced, Failed> {
    must_be_directory(path)?;
    Ok(Balanced::behind(path)?)
}

fn nothing_runs(path: &Path, what: &str, why: &str) -> Failed {
    let why = format!("balance {what} on '{}' failed: {why}", path.display());
    Failed::because(why).with_code(NOTHING_RUNS)
}

fn change(
    path: &Path,
    order: BalanceOrder,
    what: &str,
    why: &str,
) -> Result<crate::on_mount::balance::Told, Failed> {
    match at(path)?.ask(order) {
        Err(e) if format!("{e:#}").contains(NOT_RUNNING) => Err(nothing_runs(path, what, why)),
        other => Ok(other?),
    }
}

fn begin(wanted: Wanted, quiet: bool) -> Done {
    let [path] = &wanted.paths[..] else {
        return Err(Failed::because("exactly 1 argument expected, the path"));
    };
    let path = PathBuf::from(path);
    let quiet = quiet || wanted.quiet;
    let balanced = at(&path)?;
    let none = wanted.data.is_none() && wanted.metadata.is_none() && wanted.system.is_none();
    let set = |set: Option<String>| if none { Some(String::new()) } else { set };
    let (data, metadata, system) = (set(wanted.data), set(wanted.metadata), set(wanted.system));
    if wanted.verbose && !quiet {
        for (name, set) in [("DATA", &data), ("METADATA", &metadata), ("SYSTEM", &system)] {
            if let Some(filters) = set {
                print::line(&format!("  {name}: {filters}"))?;
            }
        }
    }
    if none && !wanted.full && !quiet {
        print::say("WARNING: full balance without filters requested; it can take very long");
    }
    let force = wanted.force;
    let order = BalanceOrder::Start { data, metadata, system, force, as_linux: true };
    let told = match balanced.ask(order) {
        Err(e) if format!("{e:#}").contains(IS_RUNNING) => {
            let why =
                format!("error during balancing '{}': Operation now in progress", path.display());
            return Err(Failed::because(why));
        }
        other => other?,
    };
    if wanted.background {
        return Ok(());
    }
    conclude(&balanced.wait_for_the_end(told, &|_| ())?, &path, quiet)
}

fn conclude(state: &BalanceState, path: &Path, quiet: bool) -> Done {
    let failed = |why: &str| format!("error during balancing '{}': {why}", path.display());
    match state.status {
        BalanceStatus::Finished if state.left > 0 => {
            let why = state.why.as_deref().unwrap_or("some chunks could not be moved");
            Err(Failed::because(failed("No space left on device")).and(why))
        }
        BalanceStatus::Finished if quiet => Ok(()),
        BalanceStatus::Finished => {
            let (moved, all) = (state.completed, state.considered);
            Ok(print::line(&format!("Done, had to relocate {moved} out of {all} chunks"))?)
        }
        BalanceStatus::Paused | BalanceStatus::Canceled => {
            let how = if state.status == BalanceStatus::Paused { "paused" } else { "canceled" };
            print::say(&format!("balance {how} by user"));
            Ok(())
        }
        BalanceStatus::Running | BalanceStatus::Failed => {
            Err(Failed::because(failed(state.why.as_deref().unwrap_or("it has failed"))))
        }
    }
}

fn status(path: &Path, verbose: bool) -> Done {
    let told = at(path)?.ask(BalanceOrder::Status)?;
    let shown = path.display();
    let Some(sets) = &told.unfinished else {
        return Ok(print::line(&format!("No balance found on '{shown}'"))?);
    };
    let how = if told.running().is_some() { "running" } else { "paused" };
    print::line(&format!("Balance on '{shown}' is {how}"))?;
    let none = BalanceState::default();
    let state = told.state.as_ref().unwrap_or(&none);
    let left = 100.0 * (1.0 - state.completed as f64 / state.expected.max(1) as f64);
    print::line(&format!(
        "{} out of about {} chunks balanced ({} considered), {left:3.0}% left",
        state.completed, state.expected, state.considered
    ))?;
    if verbose {
        let all = [("DATA", &sets.data), ("METADATA", &sets.metadata), ("SYSTEM", &sets.system)];
        for (name, set) in all {
            if let Some(filters) = set {
                print::line(&format!("  {name}: {filters}"))?;
            }
        }
    }
    // As there: it is the answer of a question.
    Err(Failed::silently())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(line: &str) -> Result<Wanted, Failed> {
        Wanted::of(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn filters_hang_on_their_letter() {
        let one = wanted("-dusage=5,limit=2 mnt").unwrap();
        assert_eq!(one.data.as_deref(), Some("usage=5,limit=2"));
        assert_eq!((one.metadata.as_deref(), one.system.as_deref()), (None, None));
        assert_eq!(one.paths, ["mnt"]);
        let two = wanted("mnt -m -f --full-balance").unwrap();
        assert_eq!((two.metadata.as_deref(), two.system.as_deref()), (Some(""), Some("")));
        assert!(two.force && two.full);
        assert!(wanted("-s mnt").is_err());
        assert!(wanted("-s -f mnt").is_ok());
        assert!(wanted("-dusage=5x mnt").is_err());
        assert!(wanted("-x mnt").is_err());
    }
}
