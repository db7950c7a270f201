//! `larder umount`: ends a mount, and returns when everything is durable and its daemon has exited.

use crate::failure::{Advise, usage};
use crate::mount_table::{self, Mount};
use crate::print;
use crate::state::{Outcome, Watch};
use crate::utab;
use anyhow::{Context, anyhow, bail};
use larder_fuse::Unmounter;
use std::path::{Path, PathBuf};

/// Unmount; returns when everything is durable and the daemon has exited. Also clears the mount of
/// a killed daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder umount mnt")]
pub(crate) struct Args {
    /// Take the mount away at once even if it is in use; still waits until its last user is gone
    #[arg(short, long)]
    lazy: bool,
    /// Directory that it is mounted on
    mountpoint: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    unmount(&args.mountpoint, args.lazy, true)
}

/// Unmounts and, if `wait`, waits for the daemon.
pub(crate) fn unmount(mountpoint: &Path, lazy: bool, wait: bool) -> anyhow::Result<()> {
    let point = mount_table::absolute(mountpoint).could_not_run()?;
    let shown = mountpoint.display();
    let mount = match mount_table::on(&point)? {
        Some(m) if m.is_larder() => m,
        Some(m) => {
            return usage(format!(
                "{shown} is not a Larder mount but {}",
                mount_table::show(&m.kind)
            ));
        }
        // An earlier lazy unmount may have taken the mount out of sight; its daemon may still be
        // busy.
        None => match Watch::find(&point, None)? {
            Some(watch) => return conclude(watch, &point),
            None => return usage(format!("{shown} is not mounted")),
        },
    };
    let mut watch = Watch::find(&point, mount.user)?;
    let killed = watch.as_mut().is_some_and(Watch::is_being_killed);
    let ended = if killed { Unmounter::new(&mount.point).abort() } else { end(&mount, lazy) };
    let busy = matches!(&ended, Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy);
    let ended = ended.with_context(|| format!("unmounting {shown}"));
    if busy {
        ended.hint(format!("`fuser -vm {shown}` shows who is using it"))?;
    } else {
        ended?;
    }
    if mount_table::all()?.iter().any(|m| m.device == mount.device && m.is_larder()) {
        // The mount is bound to another place as well, or this was such a place: the file system is
        // still in use.
        return Ok(());
    }
    if killed && watch.as_mut().is_some_and(Watch::has_siblings) {
        // The daemon may end only when its other mounts are unmounted, too.
        utab::remove(&point);
        return Err(was_killed(&point));
    }
    if wait && !lazy && !killed && watch.as_mut().is_some_and(|w| !w.sees_the_end()) {
        print::say(&format!(
            "larder: note: {shown} is unmounted here, but still mounted elsewhere: its daemon goes \
             on"
        ));
        return Ok(());
    }
    match watch {
        Some(watch) if wait => conclude(watch, &point),
        Some(_) => Ok(()),
        None => {
            print::say(&format!(
                "larder: note: {shown} is unmounted, but its daemon left no trace, so its end was \
                 not waited for"
            ));
            Ok(())
        }
    }
}

fn end(mount: &Mount, lazy: bool) -> std::io::Result<()> {
    let unmounter = Unmounter::new(&mount.point);
    if lazy || larder_fuse::mount::is_dead(&mount.point) {
        return unmounter.detach();
    }
    // The daemon syncs while the kernel drops its caches. The request may fail: the daemon may be
    // of an older version, or belong to another user.
    let _ = larder_fuse::control::start_sync(&mount.point);
    unmounter.unmount()
}

fn conclude(watch: Watch, point: &Path) -> anyhow::Result<()> {
    let ended = watch.wait().with_context(|| point.display().to_string())?;
    if ended.is_none() {
        utab::remove(point);
    }
    match ended {
        Some(Outcome::Clean) => Ok(()),
        Some(Outcome::Failed(why)) => {
            bail!("{}: unmounted, but changes may be lost: {why}", point.display())
        }
        None => Err(was_killed(point)),
    }
}

fn was_killed(point: &Path) -> anyhow::Error {
    anyhow!(
        "{}: cleared, but its daemon had been killed: the image holds what was last committed or \
         synced",
        point.display()
    )
}
