//! `larder scrub`: reads everything that is stored, and repairs what is bad from what is good.
//!
//! An image is scrubbed by this process. What is mounted is scrubbed by the daemon of the mount, in
//! the background (`on_mount::scrub`). Here their state becomes text or JSON, and a verdict.

use crate::failure::{Advise, usage};
use crate::image::{
    Access, advise_content, advise_filesystem, as_devices, note_devices, open_devices,
};
use crate::jobs::ScrubOrder;
use crate::on_mount::scrub::Scrubbed;
use crate::watched::watched;
use crate::{devices, print, size};
use anyhow::{anyhow, bail};
use indicatif::{HumanDuration, ProgressBar};
use larder_fs::{
    Damage, Filesystem, OpenOptions, ScrubControl, ScrubDamage, ScrubOptions, ScrubState,
    ScrubStatus,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Read everything that is stored: every copy of data and metadata, parity, all superblocks. What
/// is bad is repaired from what is good, and what cannot be repaired is listed with its files.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
On a mount the daemon scrubs in the background, and gives way to other work. An
image that is not mounted is scrubbed at once.

Exit codes: 0 nothing is wrong (any more), 1 damage is left, 2 could not run.

Examples:
  larder scrub disk.img
  larder scrub -r --json disk.img
  larder scrub start --limit 50M mnt
  larder scrub status mnt
  larder scrub cancel mnt && larder scrub resume mnt"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    how: How,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Scrub the devices that are there, although others are missing
    #[arg(long)]
    degraded: bool,
    /// Image file or block device; several if the file system spans them and they do not lie in
    /// one directory
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::Args)]
struct How {
    /// Only look: nothing is written
    #[arg(short, long)]
    read_only: bool,
    /// Bytes to read in a second at most, of all devices together: 50M
    #[arg(long, value_name = "RATE", value_parser = size::parse)]
    limit: Option<u64>,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Start a scrub of what is mounted
    #[command(after_help = "Example:\n  larder scrub start --wait mnt")]
    Start {
        #[command(flatten)]
        how: How,
        /// Wait for its end, and say what came of it
        #[arg(short, long)]
        wait: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Directory on the mount
        directory: PathBuf,
    },
    /// Go on with a scrub that was cancelled or interrupted
    #[command(after_help = "Example:\n  larder scrub resume mnt")]
    Resume {
        /// Bytes to read in a second at most; as before without it
        #[arg(long, value_name = "RATE", value_parser = size::parse)]
        limit: Option<u64>,
        /// Wait for its end, and say what came of it
        #[arg(short, long)]
        wait: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Directory on the mount
        directory: PathBuf,
    },
    /// Say how far a scrub is, and what it has found
    #[command(after_help = "Example:\n  larder scrub status --json mnt")]
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Directory on the mount
        directory: PathBuf,
    },
    /// End a scrub; it can be resumed
    #[command(after_help = "Example:\n  larder scrub cancel mnt")]
    Cancel {
        /// Directory on the mount
        directory: PathBuf,
    },
    /// Change how many bytes the running scrub may read in a second; 0 for any number
    #[command(after_help = "Example:\n  larder scrub limit 20M mnt")]
    Limit {
        /// Bytes in a second, of all devices together
        #[arg(value_parser = size::parse)]
        rate: u64,
        /// Directory on the mount
        directory: PathBuf,
    },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        None => images(args),
        Some(What::Start { how, wait, json, directory }) => {
            let order =
                ScrubOrder::Start { read_only: how.read_only, limit: how.limit.unwrap_or(0) };
            begin(directory, order, *wait, *json)
        }
        Some(What::Resume { limit, wait, json, directory }) => {
            begin(directory, ScrubOrder::Resume { limit: *limit }, *wait, *json)
        }
        Some(What::Status { json, directory }) => {
            let state = Scrubbed::behind(directory)?.status()?;
            match state {
                Some(state) => show(&state, *json),
                None if *json => print::json(&serde_json::Value::Null),
                None => print::line("There was no scrub yet"),
            }
        }
        Some(What::Cancel { directory }) => {
            Scrubbed::behind(directory)?.change(ScrubOrder::Cancel)?;
            print::line("The scrub has ended; `larder scrub resume` goes on with it")
        }
        Some(What::Limit { rate, directory }) => {
            Scrubbed::behind(directory)?.change(ScrubOrder::Limit { limit: *rate })
        }
    }
}

/// Starts or resumes a scrub of what is mounted.
fn begin(directory: &Path, order: ScrubOrder, wait: bool, json: bool) -> anyhow::Result<()> {
    let scrubbed = Scrubbed::behind(directory)?;
    let state = scrubbed.begin(order)?;
    if !wait {
        if json {
            return print::json(&state);
        }
        let shown = print::path(directory);
        return print::line(&format!(
            "The scrub runs: `larder scrub status {shown}` shows how far"
        ));
    }
    let bar = print::progress_to_the_end();
    let state = scrubbed.wait_for_the_end(state, &|now| show_progress(&bar, now))?;
    bar.finish_and_clear();
    conclude(&state, json, &print::path(directory))
}

/// Scrubs what is not mounted.
fn images(args: &Args) -> anyhow::Result<()> {
    let image = devices::join(&args.images);
    if args.images.iter().any(|path| path.is_dir()) {
        return usage(format!(
            "{} is a directory: `larder scrub start DIR` scrubs what is mounted",
            print::path(&image)
        ));
    }
    let read_only = args.how.read_only;
    let access = if read_only { Access::Read { force: false } } else { Access::Write };
    let opened = open_devices(&image, access)?;
    let name = print::path(&image);
    // It is not opened for writing: repairs change nothing that it says. Only a commit can say that
    // a device is not behind any more.
    let open = |read_only| {
        let options = OpenOptions {
            read_only,
            no_log_replay: read_only,
            commit_interval: None,
            degraded: args.degraded,
            ..OpenOptions::default()
        };
        Filesystem::open_devices(as_devices(&opened), options)
    };
    let mut fs = advise_content(advise_filesystem(open(true), &name), &*opened[0])?;
    if !read_only && !fs.devices_behind().is_empty() {
        fs = open(false).unwrap_or(fs);
    }
    note_devices(&name, &fs.info());
    if fs.info().has_unreplayed_log {
        print::say(&format!("larder: note: {name}: a log waits to be replayed; it is not read"));
    }
    let limit = args.how.limit.unwrap_or(0);
    let control = ScrubControl::new(ScrubState { limit, ..ScrubState::default() });
    let result = watched(
        &print::progress_to_the_end(),
        || fs.scrub(ScrubOptions { read_only }, &control, &|_| ()),
        |bar| show_progress(bar, &control.state()),
        || control.cancel(),
    );
    fs.close()?;
    result?.map_err(|e| anyhow!(e).context(name.clone())).could_not_run()?;
    conclude(&control.state(), args.json, &name)
}

/// Shows what came of a scrub that has ended. Damage that is left is an error.
fn conclude(state: &ScrubState, json: bool, name: &str) -> anyhow::Result<()> {
    print::unless_closed(show(state, json)).could_not_run()?;
    let sum = state.sum();
    match state.status {
        ScrubStatus::Finished => {}
        ScrubStatus::Failed => bail!("{name}: {}", state.why.as_deref().unwrap_or("it failed")),
        _ => bail!("{name}: the scrub has ended before everything was read"),
    }
    let left = if state.read_only { sum.errors() } else { sum.uncorrectable };
    if left > 0 {
        bail!("{name}: {} left", print::number(left, "error"));
    }
    Ok(())
}

fn show_progress(bar: &ProgressBar, state: &ScrubState) {
    let sum = state.sum();
    bar.set_length(state.total.max(sum.bytes()));
    bar.set_position(sum.bytes());
    if sum.errors() > 0 {
        bar.set_message(print::number(sum.errors(), "error"));
    }
}

fn show(state: &ScrubState, json: bool) -> anyhow::Result<()> {
    if json {
        return print::json(&value_of(state));
    }
    for line in lines(state) {
        print::line(&line)?;
    }
    for damage in &state.damage {
        for line in damage_lines(damage) {
            print::line(&line)?;
        }
    }
    if state.more_damage > 0 {
        print::line(&format!("and {} more places", state.more_damage))?;
    }
    Ok(())
}

/// The state, and what people work out of it.
fn value_of(state: &ScrubState) -> serde_json::Value {
    let sum = state.sum();
    let mut value = serde_json::to_value(state).unwrap_or_default();
    if let Some(all) = value.as_object_mut() {
        // These are of use to the daemon only.
        all.remove("chunks");
        all.remove("positions");
        let rate = if state.seconds > 0.0 { sum.bytes() as f64 / state.seconds } else { 0.0 };
        all.insert("done".into(), sum.bytes().into());
        all.insert("rate".into(), (rate as u64).into());
        let left = (state.status == ScrubStatus::Running).then(|| state.seconds_left()).flatten();
        all.insert("seconds_left".into(), left.into());
        all.insert("errors".into(), sum.errors().into());
        all.insert("sum".into(), serde_json::to_value(sum).unwrap_or_default());
    }
    value
}

fn lines(state: &ScrubState) -> Vec<String> {
    let sum = state.sum();
    let how = match state.status {
        ScrubStatus::Running => "runs",
        ScrubStatus::Finished => "is complete",
        ScrubStatus::Canceled => "was cancelled",
        ScrubStatus::Interrupted => "was interrupted: `larder scrub resume` goes on with it",
        ScrubStatus::Failed => "has failed",
    };
    let why = state.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    let at = |seconds: u64| print::time(seconds.cast_signed());
    let mut lines = vec![
        format!("The scrub {how}{why}"),
        format!("File system  {}", state.fsid),
        format!("Started      {} UTC, took {}", at(state.started), duration(state.seconds)),
    ];
    if let Some(resumed) = state.resumed {
        lines.push(format!("Resumed      {} UTC", at(resumed)));
    }
    let rate = if state.seconds > 0.0 { sum.bytes() as f64 / state.seconds } else { 0.0 };
    lines.push(format!(
        "Read         {} of about {} ({} of data, {} of metadata, {} of parity), {}/s",
        size::human(sum.bytes()),
        size::human(state.total.max(sum.bytes())),
        size::human(sum.data_bytes),
        size::human(sum.tree_bytes),
        size::human(sum.parity_bytes),
        size::human(rate as u64),
    ));
    if state.limit > 0 {
        lines.push(format!("Limit        {}/s", size::human(state.limit)));
    }
    if let Some(left) = state.seconds_left().filter(|_| state.status == ScrubStatus::Running) {
        lines.push(format!("Left         about {}", duration(left)));
    }
    for (id, counts) in &state.devices {
        let found = [
            (counts.csum_errors, "wrong checksums"),
            (counts.verify_errors, "damaged tree blocks"),
            (counts.read_errors, "sectors that cannot be read"),
            (counts.super_errors, "damaged superblocks"),
            (counts.parity_errors, "wrong parity"),
            (counts.differing, "copies that differ"),
        ];
        let found: Vec<String> =
            found.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        if !found.is_empty() {
            lines.push(format!("Device {id:<5} {}", found.join(", ")));
        }
    }
    for id in &state.brought_up_to_date {
        lines.push(format!("Device {id:<5} had been away, and is up to date now"));
    }
    lines.push(match (sum.errors(), state.read_only) {
        (0, _) => "No errors".to_owned(),
        (errors, true) => format!(
            "{}, of which {} could be repaired: scrub without -r",
            print::number(errors, "error"),
            sum.corrected
        ),
        (errors, false) => format!(
            "{}: {} repaired, {} left",
            print::number(errors, "error"),
            sum.corrected,
            sum.uncorrectable
        ),
    });
    lines
}

fn duration(seconds: f64) -> String {
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    HumanDuration(Duration::from_secs_f64(seconds)).to_string()
}

fn damage_lines(damage: &ScrubDamage) -> Vec<String> {
    let what = match damage.what {
        Damage::Unreadable => "cannot be read, and no other copy is good",
        Damage::Data => "data without a good copy",
        Damage::TreeBlock => "a tree block without a good copy",
        Damage::CopiesDiffer => "copies of data without checksums differ: one of them is right",
        Damage::ParityDiffers => "parity does not fit data without checksums",
        Damage::Parity => "parity of a row with something else lost",
    };
    let mut lines = vec![format!(
        "address {} +{}, device {} at {}: {what}",
        damage.address, damage.length, damage.device, damage.offset
    )];
    if let Some((tree, level)) = damage.tree {
        lines.push(format!("    tree {tree}, level {level}"));
    }
    for file in &damage.files {
        let path = match &file.path {
            Some(path) => print::name(path.as_bytes()).replace("\\\\", "\\"),
            None => "(no name)".to_owned(),
        };
        lines.push(format!(
            "    {path} at {} (subvolume {}, inode {})",
            file.offset, file.subvolume, file.inode
        ));
    }
    if damage.more_files {
        lines.push("    and more files".to_owned());
    }
    lines
}
