//! The first mount of an image: this process becomes the daemon that serves it.
//!
//! What needs rights comes first: the image with its lock, the state file, the [attach
//! socket](crate::attach) for further mounts, the mount helper. Then the daemon goes into its
//! sandbox, and only then it reads the image. The start lock is released when the mount is ready or
//! has failed. A second mount that waited for it then finds the socket, or no daemon.

use super::mounts::{Mounts, NewMount};
use super::{
    Args, advise_mount, helper_command, note_uring, request, say_mounted, say_ready, tidy_up,
};
use crate::attach::{AttachSocket, StartLock};
use crate::devices::Part;
use crate::failure::Advise;
use crate::image::{
    Access, advise_content, advise_filesystem, advise_open, may_be_degraded, note_devices,
    open_filesystem, when_free,
};
use crate::mount_options::{MountWishes, whole};
use crate::state::Claim;
use crate::{devices, print, utab};
use anyhow::Context;
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::helper::Ended;
use larder_fuse::{MountGroup, MountHelper, Mounted, sandbox};
use larder_volume::{FileDevice, OpenMode};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Serves the image until its last mount is gone. A daemon tells its parent when the first mount is
/// ready, and detaches.
pub(super) fn serve(
    args: &Args,
    wishes: &MountWishes,
    mountpoint: &Path,
    start_lock: Option<StartLock>,
) -> anyhow::Result<()> {
    let source = args.source();
    let devices =
        devices::open(args.devices(wishes), |path, part| open_device(path, wishes, part))?;
    let settings = whole::settings(wishes, devices[0].is_block_device());
    let image = std::fs::canonicalize(&source).with_context(|| source.display().to_string())?;
    let claim = Claim::new(&image, mountpoint, wishes.read_only).could_not_run()?;
    utab::add(&image, mountpoint);
    // Without an attach socket there is one mount.
    let socket = AttachSocket::open(&image)
        .inspect_err(|e| tracing::warn!("no further mounts can be made: {e:#}"))
        .ok();
    let socket_path = socket.as_ref().map(|socket| socket.path().to_owned());
    let claim = claim.with_socket(socket_path.as_deref());
    let tidy = || tidy_up(Ended::Daemon, mountpoint, &image, socket_path.as_deref());
    // Before the mount exists, so that no signal can come in between and leave it behind.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let nowhere = File::options().read(true).write(true).open("/dev/null").ok();
    if args.daemon {
        let _ = std::env::set_current_dir("/");
    }
    // From here on nothing can be opened any more. So far nothing was read that another user could
    // have written.
    let started =
        wishes.sandbox.then(|| spawn_helper(args, &image, mountpoint, socket_path.as_deref()));
    let helper = started.transpose().inspect_err(|_| tidy())?;
    let sandbox = helper.is_some().then(sandbox::enter);

    let (fs, mounted) =
        match open_and_mount(devices, args, wishes, &image, mountpoint, helper.as_ref()) {
            Ok(both) => both,
            Err(e) => {
                start_lock.into_iter().for_each(StartLock::leave);
                helper
                    .unwrap_or_else(|| MountHelper::in_process(mountpoint))
                    .dismiss(Ended::Daemon, tidy);
                drop(claim);
                return Err(e);
            }
        };
    note_uring(mounted.enabled_uring);
    let helper = mounted.helper().clone();
    let group = Arc::<MountGroup>::default();
    let member =
        group.join(Arc::clone(&fs), mountpoint, &request(wishes)).context("the first mount")?;
    let mounts = Mounts::new(&image, settings, group, fs, socket_path);
    super::mounts::obey(signals, &mounts);
    let (daemon, foreground) = (args.daemon, (!args.daemon).then(|| args.clone()));
    let open = Arc::clone(&mounts);
    let may_balance = !wishes.read_only && !wishes.skip_balance;
    mounts.start(NewMount { member, helper, claim }, mounted, move |outcome| {
        if outcome.is_err() {
            // The error is reported at the end.
            start_lock.into_iter().for_each(StartLock::leave);
            return true;
        }
        if let Some(sandbox) = sandbox {
            sandbox.seal();
        }
        open.go_on_replacing();
        if let Some(socket) = socket {
            open.accept_requests(socket);
        }
        if may_balance {
            open.go_on_with_balance();
        }
        drop(open);
        start_lock.into_iter().for_each(StartLock::leave);
        if daemon {
            detach(nowhere);
        }
        foreground.iter().for_each(say_mounted);
        true
    });
    mounts.wait_for_the_last()
}

/// Opens the image's device for a daemon, with its lock.
fn open_device(source: &Path, wishes: &MountWishes, part: Part) -> anyhow::Result<FileDevice> {
    let (access, mode) = if wishes.read_only || part == Part::Seed {
        (Access::Serve, OpenMode::Read)
    } else {
        (Access::Write, OpenMode::Write)
    };
    let open = || FileDevice::open_cached(source, mode, wishes.caching);
    advise_open(when_free(source, open), access).map_err(|e| read_only_advice(e, wishes))
}

fn spawn_helper(
    args: &Args,
    image: &Path,
    mountpoint: &Path,
    socket: Option<&Path>,
) -> anyhow::Result<MountHelper> {
    let mut command = helper_command(&args.options, image, mountpoint, socket)?;
    MountHelper::spawn(&mut command, mountpoint)
        .context("starting the daemon's second process")
        .could_not_run()
}

/// Reads the image for the first time, and mounts it. Only the file system keeps the devices: the
/// image is free again as soon as that is closed.
fn open_and_mount(
    devices: Vec<Arc<FileDevice>>,
    args: &Args,
    wishes: &MountWishes,
    image: &Path,
    mountpoint: &Path,
    helper: Option<&MountHelper>,
) -> anyhow::Result<(Arc<Filesystem>, Mounted)> {
    let options = OpenOptions {
        read_only: wishes.read_only,
        no_log_replay: wishes.no_log_replay,
        metadata_dump: false,
        degraded: wishes.degraded || may_be_degraded(),
        subvol: wishes.subvol.clone(),
        cache_size: wishes.cache_size.unwrap_or(OpenOptions::default().cache_size),
        commit_interval: Some(wishes.commit),
        compress: wishes.compress,
        discard: wishes.discard.unwrap_or(!devices[0].is_block_device()),
        max_inline: wishes.max_inline.unwrap_or(OpenOptions::default().max_inline),
        no_data_cow: wishes.no_data_cow,
        no_data_sum: wishes.no_data_sum,
        reclaim: wishes.reclaim,
        tuning: wishes.tuning.clone(),
    };
    let name = args.source().display().to_string();
    let opened = open_filesystem(&devices, args.devices(wishes).len(), options);
    let fs = advise_content(advise_filesystem(opened, &name), &*devices[0])?;
    note_devices(&name, &fs.info());
    if fs.info().has_unreplayed_log {
        print::say(&format!(
            "larder: note: {name} has a log that is not replayed; showing its last commit"
        ));
    }
    let mounted = match helper {
        Some(helper) => helper.mount(request(wishes)),
        None => larder_fuse::mount(image, mountpoint, request(wishes)),
    };
    Ok((fs, mounted.map_err(advise_mount)?))
}

/// Tells the parent that the mount can be used, and leaves the process group of its starter: Ctrl-C
/// in a terminal, and the end of the terminal, go to process groups.
///
/// The daemon stays in the session: only within one session does Linux's scheduler compare the
/// daemon with its callers.
fn detach(nowhere: Option<File>) {
    // Before the parent is told: afterwards the terminal may end at any moment.
    let _ = rustix::process::setpgid(None, None);
    say_ready();
    if let Some(null) = nowhere {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
}

fn read_only_advice(error: anyhow::Error, wishes: &MountWishes) -> anyhow::Error {
    let denied = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>()).any(|e| {
        matches!(
            e.kind(),
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem
        )
    });
    if denied && !wishes.read_only {
        return Err::<(), _>(error).hint("-o ro needs only the right to read").unwrap_err();
    }
    error
}
