//! `larder device replace`: another device takes the place of one.
//!
//! What is mounted is the business of the daemon (`on_mount::replace`). An image that is not
//! mounted is opened here. Here their state becomes text or JSON, and a verdict.

use crate::device_changes::NewDevice;
use crate::failure::usage;
use crate::image::{Access, Image, allow_degraded};
use crate::jobs::ReplaceOrder;
use crate::on_mount::replace::{Replaced, number_of};
use crate::watched::watched;
use crate::{print, size};
use anyhow::{anyhow, bail};
use indicatif::{HumanDuration, ProgressBar};
use larder_format::DeviceId;
use larder_fs::{ReplaceControl, ReplaceOptions, ReplaceSource, ReplaceStatus, Replacing};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Overwrite a target that holds something
    #[arg(short, long)]
    force: bool,
    /// Make the target an image file of this size: 10G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// Read the old device only where nothing else has its bytes
    #[arg(short = 'r', long)]
    avoid_source: bool,
    /// On a mount: do not wait for the end
    #[arg(short, long)]
    background: bool,
    /// Say how far a replacement is, or how the last one ended
    #[arg(long, group = "what")]
    status: bool,
    /// Go on with a replacement that was suspended
    #[arg(long, group = "what")]
    resume: bool,
    /// On a mount: suspend a replacement
    #[arg(long, group = "what")]
    suspend: bool,
    /// Give a replacement up
    #[arg(long, group = "what")]
    cancel: bool,
    /// Replace a device of an image although it, or another one, is missing
    #[arg(long)]
    degraded: bool,
    /// Print JSON, in bytes
    #[arg(long)]
    json: bool,
    /// The old device by its number or name, or `missing` for the first that is missing; the new
    /// one; and the image or directory of a mount. With --status, --resume, --suspend or --cancel
    /// the last of these only
    #[arg(value_name = "SOURCE TARGET IMAGE|DIR", required = true, num_args = 1..=3)]
    words: Vec<PathBuf>,
}

pub(super) const HELP: &str = "\
Everything that the old device holds is copied to the new one, which then takes
its place. The file system can be used meanwhile. What is bad on the old device
comes from other copies, and so does everything if it is missing. The new one is
at least as large. The old one is no part of the file system afterwards.

Ctrl-C suspends a replacement. It goes on with --resume, and when the image is
mounted again, with the new device named as well: `larder mount A,B DIR`.

Exit codes: 0 done, 1 not done, 2 could not run.

Examples:
  larder device replace --size 10G 1 new.img mnt
  larder device replace --status mnt
  larder device replace disk-2.img new.img disk-1.img";

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    if args.degraded {
        allow_degraded();
    }
    match &args.words[..] {
        [at] if args.status => status(args, at),
        [at] if args.cancel => cancel(args, at),
        [at] if args.suspend => conclude(args, &on_mount(at)?.change(ReplaceOrder::Suspend)?, at),
        [at] if args.resume => resume(args, at),
        [source, target, at] if !(args.status || args.cancel || args.suspend || args.resume) => {
            replace(args, source, target, at)
        }
        _ => usage(
            "give SOURCE, TARGET and the image or a directory of a mount; with --status, \
            --resume, --suspend and --cancel only the latter",
        ),
    }
}

fn is_mount(at: &Path) -> bool {
    at.is_dir() || larder_fuse::mount::is_dead(at)
}

fn on_mount(at: &Path) -> anyhow::Result<Replaced> {
    if is_mount(at) {
        return Replaced::behind(at);
    }
    usage(format!("{} is no directory of a mount", print::path(at)))
}

fn status(args: &Args, at: &Path) -> anyhow::Result<()> {
    let state = if is_mount(at) {
        Replaced::behind(at)?.change(ReplaceOrder::Status)?
    } else {
        let image = Image::open(at, Access::Read { force: false }, None)?;
        let state = image.fs.replacement();
        image.close()?;
        state
    };
    show(args.json, &state)
}

fn cancel(args: &Args, at: &Path) -> anyhow::Result<()> {
    let state = if is_mount(at) {
        Replaced::behind(at)?.change(ReplaceOrder::Cancel)?
    } else {
        // Its target may be lost.
        allow_degraded();
        let image = Image::open(at, Access::Write, None)?;
        let done = image.fs.cancel_replacement();
        let state = image.fs.replacement();
        image.close()?;
        match done {
            Err(larder_fs::Error::NotFound) => bail!("no device is being replaced"),
            done => done?,
        }
        state
    };
    show(args.json, &state)
}

fn resume(args: &Args, at: &Path) -> anyhow::Result<()> {
    if is_mount(at) {
        let replaced = Replaced::behind(at)?;
        let state = replaced.change(ReplaceOrder::Resume)?;
        return watch(args, &replaced, state, at);
    }
    let image = Image::open(at, Access::Write, None)?;
    let state = here(|control| image.fs.resume_replacement(control));
    image.close()?;
    conclude(args, &state?, at)
}

fn replace(args: &Args, source: &Path, target: &Path, at: &Path) -> anyhow::Result<()> {
    let source = number_of(source, at)?;
    let new = NewDevice { path: target, size: args.size, force: args.force };
    if is_mount(at) {
        let replaced = Replaced::behind(at)?;
        return new.replace(|device| {
            let state = replaced.begin(source, args.avoid_source, device)?;
            watch(args, &replaced, state, at)
        });
    }
    let image = Image::open(at, Access::Write, None)?;
    let read = if args.avoid_source { ReplaceSource::Avoid } else { ReplaceSource::Use };
    let options = ReplaceOptions { source: DeviceId(source), read };
    let state = new.replace(|device| {
        let state = here(|control| image.fs.replace_device(options, Arc::new(device), control))?;
        must_be_done(&state, at).map(|()| state)
    });
    image.close()?;
    show(args.json, &state?)
}

/// Waits for the daemon, if that is wanted.
fn watch(args: &Args, replaced: &Replaced, state: Replacing, at: &Path) -> anyhow::Result<()> {
    if args.background {
        if args.json {
            return print::json(&value_of(&state));
        }
        let shown = print::path(at);
        return print::line(&format!(
            "The device is being replaced: `larder device replace --status {shown}` shows how far"
        ));
    }
    let bar = print::progress_to_the_end();
    let state = replaced.wait_for_the_end(state, &|now| show_progress(&bar, now))?;
    bar.finish_and_clear();
    conclude(args, &state, at)
}

/// Does it in this process. A signal suspends it. What came of it is in the state.
fn here(
    work: impl FnOnce(&ReplaceControl) -> larder_fs::Result<()> + Send,
) -> anyhow::Result<Replacing> {
    let control = ReplaceControl::default();
    let _in_the_state = watched(
        &print::progress_to_the_end(),
        || work(&control),
        |bar| show_progress(bar, &control.state()),
        || control.suspend(),
    )?;
    Ok(control.state())
}

/// Shows what came of it. What is not done is an error.
fn conclude(args: &Args, state: &Replacing, at: &Path) -> anyhow::Result<()> {
    must_be_done(state, at)?;
    show(args.json, state)
}

fn must_be_done(state: &Replacing, at: &Path) -> anyhow::Result<()> {
    match (state.status, &state.why) {
        (ReplaceStatus::Canceled | ReplaceStatus::Never, Some(why)) => {
            Err(anyhow!("{}: the device was not replaced: {why}", print::path(at)))
        }
        (ReplaceStatus::Suspended, Some(why)) => Err(anyhow!("{}: {why}", print::path(at))),
        _ => Ok(()),
    }
}

fn show_progress(bar: &ProgressBar, state: &Replacing) {
    bar.set_length(state.total.max(state.copied));
    bar.set_position(state.copied);
}

fn rate(state: &Replacing) -> u64 {
    if state.seconds > 0.0 { (state.copied as f64 / state.seconds) as u64 } else { 0 }
}

fn show(json: bool, state: &Replacing) -> anyhow::Result<()> {
    if json {
        return print::json(&value_of(state));
    }
    for line in lines(state) {
        print::line(&line)?;
    }
    Ok(())
}

/// The state, and what people work out of it.
fn value_of(state: &Replacing) -> serde_json::Value {
    let mut value = serde_json::to_value(state).unwrap_or_default();
    if let Some(all) = value.as_object_mut() {
        let left = (state.status == ReplaceStatus::Running).then(|| state.seconds_left()).flatten();
        all.insert("rate".into(), rate(state).into());
        all.insert("seconds_left".into(), left.into());
    }
    value
}

fn lines(state: &Replacing) -> Vec<String> {
    let permille = state.permille();
    let of = state.source.map_or_else(String::new, |id| format!(" of device {id}"));
    let mut lines = vec![match state.status {
        ReplaceStatus::Never => return vec!["No device was replaced yet".to_owned()],
        ReplaceStatus::Running => {
            format!("The replacement{of} runs: {}.{} %", permille / 10, permille % 10)
        }
        ReplaceStatus::Suspended => {
            format!("The replacement{of} is suspended at {}.{} %", permille / 10, permille % 10)
        }
        ReplaceStatus::Finished => "The device was replaced".to_owned(),
        ReplaceStatus::Canceled => "The replacement was given up".to_owned(),
    }];
    if let Some(target) = &state.target {
        lines.push(format!("Target     {}", print::name(target.as_bytes())));
    }
    lines.push(format!("Started    {} UTC", print::time(state.started.cast_signed())));
    if state.stopped > 0 {
        lines.push(format!("Ended      {} UTC", print::time(state.stopped.cast_signed())));
    }
    if state.copied > 0 {
        lines.push(format!(
            "Copied     {} of about {}, {}/s",
            size::human(state.copied),
            size::human(state.total.max(state.copied)),
            size::human(rate(state))
        ));
    }
    if let Some(left) = state.seconds_left().filter(|_| state.status == ReplaceStatus::Running) {
        lines.push(format!("Left       about {}", HumanDuration(Duration::from_secs_f64(left))));
    }
    for (n, what) in [
        (state.corrected, "sectors came from other copies"),
        (state.unreadable, "sectors had no good copy: `larder scrub` lists them"),
        (state.write_errors, "writes were refused by the target"),
    ] {
        if n > 0 {
            lines.push(format!("Trouble    {n} {what}"));
        }
    }
    lines
}
