//! `btrfs scrub`: the scrub of a mount, in the words and lines of btrfs-progs.
//!
//! A scrub of btrfs-progs is a process of its own, and one for each device. Here it is the daemon's
//! ([`crate::on_mount::scrub`]), and of the whole file system: a limit is that of all devices
//! together, and classes of priority are accepted and change nothing, because a scrub gives way to
//! other work anyway. Times are in UTC.

use super::mounted::Mounted;
use super::units::{LongUnits, Units};
use super::{Done, Failed, Global, must_be_directory};
use crate::jobs::ScrubOrder;
use crate::on_mount::scrub::{IS_RUNNING, NOTHING_TO_RESUME, Scrubbed};
use crate::{print, size};
use larder_fs::{ScrubCounts, ScrubState, ScrubStatus};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Start a scrub
    Start(Start),
    /// End a scrub
    Cancel { path: PathBuf },
    /// Go on with a scrub that was cancelled or interrupted
    Resume(Start),
    /// Say how far a scrub is
    Status(Status),
    /// Show or set the limit
    Limit(Limit),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Start {
    /// Wait for the end
    #[arg(short = 'B')]
    wait: bool,
    /// Counters of each device (with -B)
    #[arg(short = 'd')]
    per_device: bool,
    /// Print nothing
    #[arg(short = 'q')]
    quiet: bool,
    /// Only look
    #[arg(short = 'r')]
    read_only: bool,
    /// All counters
    #[arg(short = 'R')]
    counters: bool,
    /// Accepted
    #[arg(short = 'c', value_name = "CLASS")]
    class: Option<u32>,
    /// Accepted
    #[arg(short = 'n', value_name = "DATA")]
    class_data: Option<u32>,
    /// Accepted
    #[arg(short = 'f')]
    force: bool,
    /// Bytes in a second at most
    #[arg(long, value_parser = size::parse)]
    limit: Option<u64>,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Status {
    /// Counters of each device
    #[arg(short = 'd')]
    per_device: bool,
    /// All counters
    #[arg(short = 'R')]
    counters: bool,
    #[command(flatten)]
    units: LongUnits,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Limit {
    /// Of all devices, which is the only limit there is
    #[arg(short, long)]
    all: bool,
    /// Accepted, as -a
    #[arg(short, long, value_name = "DEVID")]
    devid: Option<u64>,
    /// The limit; 0 for none
    #[arg(short, long, value_parser = size::parse)]
    limit: Option<u64>,
    #[command(flatten)]
    units: LongUnits,
    path: PathBuf,
}

/// Exit code where there is nothing that could be stopped or resumed.
const NOTHING_THERE: u8 = 2;
/// Exit code where damage is left.
const UNCORRECTABLE: u8 = 3;

pub(super) fn run(what: What, global: Global) -> Done {
    match what {
        What::Start(options) => {
            let (read_only, limit) = (options.read_only, options.limit.unwrap_or(0));
            begin(&options, ScrubOrder::Start { read_only, limit }, global)
        }
        What::Resume(options) => {
            begin(&options, ScrubOrder::Resume { limit: options.limit }, global)
        }
        What::Cancel { path } => {
            let failed = |why: &str| format!("scrub cancel failed on {}: {why}", path.display());
            at(&path)?
                .change(ScrubOrder::Cancel)
                .map_err(|_| Failed::because(failed("not running")).with_code(NOTHING_THERE))?;
            Ok(print::line("scrub cancelled")?)
        }
        What::Status(options) => status(&options),
        What::Limit(options) => limit(&options),
    }
}

fn at(path: &Path) -> Result<Scrubbed, Failed> {
    must_be_directory(path)?;
    Ok(Scrubbed::behind(path)?)
}

fn begin(options: &Start, order: ScrubOrder, global: Global) -> Done {
    let scrubbed = at(&options.path)?;
    let (path, fsid) = (options.path.display(), scrubbed.fsid().to_owned());
    let quiet = options.quiet || global.quiet;
    let began = scrubbed.begin(order);
    let state = match began {
        Ok(state) => state,
        Err(e) if format!("{e:#}").contains(IS_RUNNING) => {
            return Err(Failed::because("Scrub is already running.")
                .and(format!("To cancel use 'btrfs scrub cancel {path}'."))
                .and(format!("To see the status use 'btrfs scrub status [-d] {path}'")));
        }
        Err(e) if format!("{e:#}").contains(NOTHING_TO_RESUME) => {
            print::line(&format!("scrub: nothing to resume for {path}, fsid {fsid}"))?;
            return Err(Failed::silently().with_code(NOTHING_THERE));
        }
        Err(e) => return Err(e.into()),
    };
    if !options.wait {
        let how = if matches!(order, ScrubOrder::Start { .. }) { "started" } else { "resumed" };
        if !quiet {
            let pid = scrubbed.pid().map_or_else(String::new, |pid| format!(" (pid={pid})"));
            print::line(&format!("scrub {how} on {path}, fsid {fsid}{pid}"))?;
        }
        return Ok(());
    }
    let state = scrubbed.wait_for_the_end(state, &|_| ())?;
    if !quiet {
        if !options.per_device {
            let how = if state.status == ScrubStatus::Canceled { "canceled" } else { "done" };
            print::line(&format!("scrub {how} for {fsid}"))?;
        }
        let shown = Shown {
            units: Units::from(LongUnits::default()),
            counters: options.counters,
            per_device: options.per_device,
            what: "done",
        };
        shown.print(&state, &options.path)?;
    }
    match state.status {
        ScrubStatus::Finished if state.sum().uncorrectable > 0 => {
            let why = "there are uncorrectable errors";
            Err(Failed::because(why).with_code(UNCORRECTABLE))
        }
        ScrubStatus::Finished => Ok(()),
        _ => Err(Failed::because(state.why.unwrap_or_else(|| "the scrub has ended".into()))),
    }
}

fn status(options: &Status) -> Done {
    let scrubbed = at(&options.path)?;
    let units = Units::from(options.units);
    print::line(&line("UUID:", scrubbed.fsid()))?;
    let Some(state) = scrubbed.status()? else {
        let mounted = Mounted::at(&options.path)?;
        let used = mounted.spaces().iter().map(|s| s.used * s.copies).sum();
        print::line("\tno stats available")?;
        print::line(&line("Total to scrub:", &units.text(used)))?;
        print::line(&line("Rate:", &format!("{}/s", units.text(0))))?;
        return Ok(print::line(&line("Error summary:", "no errors found"))?);
    };
    let (counters, per_device) = (options.counters, options.per_device);
    let what = if state.status == ScrubStatus::Running { "status" } else { "history" };
    Shown { units, counters, per_device, what }.print(&state, &options.path)
}

fn limit(options: &Limit) -> Done {
    let scrubbed = at(&options.path)?;
    let units = Units::from(options.units);
    let now = scrubbed.status()?.map_or(0, |state| state.limit);
    let text = |limit: u64, behind: &str| match limit {
        0 => "unlimited".to_owned(),
        limit => units.text(limit) + behind,
    };
    print::line(&format!("UUID: {}", scrubbed.fsid()))?;
    let Some(limit) = options.limit else {
        let source = Mounted::at(&options.path)?.source;
        let shown = if now == 0 { "-".to_owned() } else { units.text(now) };
        let (w, p) = (shown.len().max("Limit".len()), source.len().max("Path".len()));
        print::line(&format!("Id  {:>w$}  {:>p$}", "Limit", "Path"))?;
        print::line(&format!("--  {}  {}", "-".repeat(w), "-".repeat(p)))?;
        return Ok(print::line(&format!(" 1  {shown:>w$}  {source:>p$}"))?);
    };
    if !options.all && options.devid.is_none() {
        return Err(Failed::because("--limit must be used with either --all or --devid"));
    }
    scrubbed.change(ScrubOrder::Limit { limit })?;
    let (before, after) = (text(now, "/s"), text(limit, "/s"));
    let devid = options.devid.unwrap_or(1);
    Ok(print::line(&format!("Set scrub limit of devid {devid} from {before} to {after}"))?)
}

fn line(name: &str, value: &str) -> String {
    format!("{name:<18}{value}")
}

/// How a state is shown.
#[derive(Clone, Copy)]
struct Shown {
    units: Units,
    counters: bool,
    per_device: bool,
    what: &'static str,
}

impl Shown {
    fn print(&self, state: &ScrubState, path: &Path) -> Done {
        if !self.per_device {
            return self.print_one(state, &state.sum(), state.total);
        }
        let source = Mounted::at(path)?.source;
        for (id, counts) in &state.devices {
            print::line(&format!("\nScrub device {source} (id {id}) {}", self.what))?;
            self.print_one(state, counts, counts.bytes())?;
        }
        Ok(())
    }

    fn print_one(&self, state: &ScrubState, counts: &ScrubCounts, total: u64) -> Done {
        print::line(&line("Scrub started:", &time(state.started)))?;
        if let Some(resumed) = state.resumed {
            print::line(&line("Scrub resumed:", &time(resumed)))?;
        }
        let how = match state.status {
            ScrubStatus::Running => "running",
            ScrubStatus::Finished => "finished",
            ScrubStatus::Canceled => "aborted",
            ScrubStatus::Interrupted | ScrubStatus::Failed => "interrupted",
        };
        print::line(&line("Status:", how))?;
        print::line(&line("Duration:", &hours(state.seconds)))?;
        if self.counters {
            return raw(counts);
        }
        let runs = state.status == ScrubStatus::Running;
        if let Some(left) = state.seconds_left().filter(|_| runs) {
            print::line(&line("Time left:", &hours(left)))?;
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let end = now.map_or(0, |now| now.as_secs()) + left as u64;
            print::line(&line("ETA:", &time(end)))?;
        }
        print::line(&line("Total to scrub:", &self.units.text(total.max(counts.bytes()))))?;
        if state.status != ScrubStatus::Finished {
            let share = 100.0 * counts.bytes() as f64 / total.max(1) as f64;
            let text = format!("{}  ({share:.2}%)", self.units.text(counts.bytes()));
            print::line(&line("Bytes scrubbed:", &text))?;
        }
        let rate = (counts.bytes() as f64 / state.seconds.max(1.0)) as u64;
        let limit = match state.limit {
            0 => String::new(),
            limit => format!(" (limit {}/s)", self.units.text(limit)),
        };
        print::line(&line("Rate:", &format!("{}/s{limit}", self.units.text(rate))))?;
        summary(counts)
    }
}

fn summary(counts: &ScrubCounts) -> Done {
    let found = [
        ("read", counts.read_errors),
        ("super", counts.super_errors),
        ("verify", counts.verify_errors),
        ("csum", counts.csum_errors + counts.parity_errors + counts.differing),
    ];
    let found: Vec<String> =
        found.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name}={n}")).collect();
    if found.is_empty() {
        return Ok(print::line(&line("Error summary:", "no errors found"))?);
    }
    print::line(&line("Error summary:", &found.join(" ")))?;
    print::line(&line("  Corrected:", &counts.corrected.to_string()))?;
    print::line(&line("  Uncorrectable:", &counts.uncorrectable.to_string()))?;
    Ok(print::line(&line("  Unverified:", "0"))?)
}

fn raw(counts: &ScrubCounts) -> Done {
    /// Linux reads data in pieces of this length, and calls each an extent.
    const PIECE: u64 = 64 << 10;
    for (name, n) in [
        ("data_extents_scrubbed", counts.data_bytes.div_ceil(PIECE)),
        ("tree_extents_scrubbed", counts.tree_blocks),
        ("data_bytes_scrubbed", counts.data_bytes),
        ("tree_bytes_scrubbed", counts.tree_bytes),
        ("read_errors", counts.read_errors),
        ("csum_errors", counts.csum_errors + counts.parity_errors + counts.differing),
        ("verify_errors", counts.verify_errors),
        ("no_csum", counts.no_csum),
        ("csum_discards", 0),
        ("super_errors", counts.super_errors),
        ("malloc_errors", 0),
        ("uncorrectable_errors", counts.uncorrectable),
        ("unverified_errors", 0),
        ("corrected_errors", counts.corrected),
        ("last_physical", 0),
    ] {
        print::line(&format!("\t{name}: {n}"))?;
    }
    Ok(())
}

fn hours(seconds: f64) -> String {
    let seconds = seconds as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// `Wed Nov 25 19:20:43 2026`, in UTC.
fn time(seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let text = print::time(seconds.cast_signed());
    let day = DAYS[(seconds / 86400 % 7) as usize];
    let parts: Vec<&str> = text.split([' ', '-']).collect();
    let [year, month, date, clock] = parts[..] else { return text };
    let month = month.parse::<usize>().ok().and_then(|m| MONTHS.get(m.wrapping_sub(1)));
    format!("{day} {} {:>2} {clock} {year}", month.unwrap_or(&"?"), date.trim_start_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_c_does() {
        assert_eq!(time(1_795_634_443), "Wed Nov 25 19:20:43 2026");
        assert_eq!(time(0), "Thu Jan  1 00:00:00 1970");
        assert_eq!(hours(3661.9), "1:01:01");
    }
}
