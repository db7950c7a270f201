//! A further mount of an image that a daemon of this user serves: asked for at its
//! [attach socket](crate::attach).
//!
//! This process does what needs rights and a mount namespace: it claims the state file of the mount
//! and starts the mount helper that will make it. The daemon gets both, and then has for this mount
//! what it has for its first one.

use super::{Args, helper_command, note_uring, say_mounted, say_ready};
use crate::attach::{Answer, Found, MountRequest, are_one};
use crate::failure::Advise;
use crate::mount_options::{MountWishes, whole};
use crate::mount_table::{self, Mount};
use crate::state::{self, Claim, Outcome, Watch};
use crate::{devices, utab};
use anyhow::{Context, anyhow, bail};
use larder_fuse::{MountHelper, Unmounter, control};
use larder_volume::{FileDevice, OpenMode, VolumeError};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};

/// A mount that another process serves.
pub(super) struct Further {
    mountpoint: PathBuf,
    signals: Signals,
}

/// Has the image mounted by the daemon that serves it. `None`: there is none, or not any more.
pub(super) fn mount(
    args: &Args,
    wishes: &MountWishes,
    mountpoint: &Path,
) -> anyhow::Result<Option<Further>> {
    let source = args.source();
    let by_another_name = || devices::others(&source).iter().find_map(|path| Found::of(path));
    let found =
        Found::of(&source).or_else(by_another_name).or_else(|| by_devices_of_mounts(&source));
    let Some(found) = found else { return Ok(None) };
    let shown = source.display().to_string();
    let image = std::fs::canonicalize(&source).with_context(|| shown.clone())?;
    let claim = Claim::new(&image, mountpoint, wishes.read_only).could_not_run()?;
    utab::add(&image, mountpoint);
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let asked = ask(&found, args, wishes, &image, mountpoint, &claim);
    if !matches!(asked, Ok(Some(Answer::Ready { .. }))) {
        state::tidy_up(mountpoint);
    }
    match asked.with_context(|| shown.clone())? {
        Some(Answer::Ready { enabled_uring }) => {
            note_uring(enabled_uring);
            Ok(Some(Further { mountpoint: mountpoint.to_owned(), signals }))
        }
        Some(Answer::Refused { why, hint }) => {
            let refused = Err(anyhow!("{shown}: {why}"));
            match hint {
                Some(hint) => refused.hint(hint).could_not_run(),
                None => refused.could_not_run(),
            }
        }
        Some(Answer::Ending { pid }) => {
            wait_for(pid);
            Ok(None)
        }
        None => Ok(None),
    }
}

/// The daemon that uses this device instead of one that it was given: the device has taken the
/// place of that one, or was added.
fn by_devices_of_mounts(device: &Path) -> Option<Found> {
    // Mounts are only asked if one of them may be meant.
    if !matches!(FileDevice::open(device, OpenMode::Read), Err(VolumeError::Busy { .. })) {
        return None;
    }
    let user = rustix::process::geteuid().as_raw();
    let has = |mount: &Mount| {
        let devices = control::devices(&mount.point).unwrap_or_default();
        let mut names = devices.iter().filter_map(|told| told["name"].as_str());
        names.any(|name| are_one(Path::new(name), device))
    };
    let mounts = mount_table::all().ok()?;
    let mut own = mounts.iter().filter(|m| m.is_larder() && m.user == Some(user));
    let mount = own.find(|mount| has(mount))?;
    let record = Watch::find(&mount.point, mount.user).ok()??.record().ok()?;
    Found::at(&record.socket?, user)
}

fn ask(
    found: &Found,
    args: &Args,
    wishes: &MountWishes,
    image: &Path,
    mountpoint: &Path,
    claim: &Claim,
) -> anyhow::Result<Option<Answer>> {
    let whole = whole::settings(wishes, false);
    let given = whole::given(&args.options, args.cache_size.is_some(), &whole);
    // A second fuseblk mount of a block device would only show the first one in another place.
    let options: Vec<String> =
        args.options.iter().cloned().chain(["nofuseblk".to_owned()]).collect();
    let mut command = helper_command(&options, image, mountpoint, Some(&found.path))?;
    let (helper, pid) = MountHelper::spawn_for_daemon(&mut command)
        .context("starting the process that mounts")
        .could_not_run()?;
    let wanted = MountRequest::new(&options, given, mountpoint, pid);
    Ok(found.ask(&wanted, helper, claim.file())?)
}

/// Waits for a daemon's end, but not for ever: a file may be open on a mount that is out of sight.
fn wait_for(pid: u32) {
    const PATIENCE: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    let pid = Pid::from_raw(pid.cast_signed());
    if let Some(Ok(process)) = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        let mut fds = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, Some(&PATIENCE));
    }
}

impl Further {
    /// Says that the mount can be used. In the foreground, stays until it has ended.
    pub(super) fn stay(mut self, args: &Args) -> anyhow::Result<()> {
        if args.daemon {
            say_ready();
            return Ok(());
        }
        let watch = Watch::find(&self.mountpoint, None)?.context("the mount has left no trace")?;
        say_mounted(args);
        let unmounter = Unmounter::new(&self.mountpoint);
        let unmount = move || {
            for _ in self.signals.forever() {
                if let Err(e) = unmounter.unmount().or_else(|_| unmounter.detach()) {
                    tracing::warn!("cannot unmount: {e}");
                }
            }
        };
        std::thread::Builder::new()
            .name("larder-signals".into())
            .spawn(unmount)
            .context("catching signals")?;
        match watch.wait()? {
            Some(Outcome::Clean) => Ok(()),
            Some(Outcome::Failed(why)) => bail!("the last changes may be lost: {why}"),
            None => bail!("the daemon that served it was killed"),
        }
    }
}
