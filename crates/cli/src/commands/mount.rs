//! `larder mount`: serves an image at a directory.
//!
//! The command starts itself once more as the daemon and waits for its word over a pipe: that it is ready, or why not.
//! So the command returns when the mount can be used, with an exit code that tells. The daemon opens everything itself
//! (locks on the image belong to the process that serves), leaves the session of whoever started it, and lives until
//! the mount is gone: unmounted, or ended by SIGTERM or SIGINT. Then it commits, leaves its result where
//! `larder umount` finds it, and exits.
//!
//! With `--foreground` the command is the daemon itself.

use crate::failure::{self, Advise, usage};
use crate::image::{Access, advise_filesystem, advise_open};
use crate::mount_options::{self, MountWishes};
use crate::mount_table;
use crate::state::{Claim, Outcome};
use anyhow::{Context, anyhow};
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::{MountError, MountOptions, Stats, Unmounter};
use larder_volume::{Device, FileDevice, OpenMode};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  larder mount disk.img mnt
  larder mount -o ro,subvol=home /dev/sdb1 /mnt
  larder mount --foreground -v disk.img mnt";

/// Mount an image or block device; returns when the mount is ready.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = long_help())]
pub(crate) struct Args {
    /// Mount options, separated by commas (see below)
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Stay in the foreground, print a line when the mount is ready; interrupting it unmounts
    #[arg(long)]
    foreground: bool,
    /// Memory for metadata and for data that waits to be written
    #[arg(long, value_name = "SIZE", value_parser = mount_options::cache_size)]
    cache_size: Option<u64>,
    /// The other process of a mount in the background: reports on standard output
    #[arg(long, hide = true)]
    daemon: bool,
    /// Image file or block device
    #[arg(value_name = "IMAGE|DEVICE")]
    source: PathBuf,
    /// Directory
    mountpoint: PathBuf,
}

/// Help at length: the examples, and the options for `-o`.
fn long_help() -> String {
    format!("{EXAMPLES}\n\n{}", mount_options::HELP)
}

/// What the daemon says when the mount can be used.
const READY: &str = "ready";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut wishes = match MountWishes::parse(args.options.iter().map(String::as_str)) {
        Ok(w) => w,
        Err(e) => return usage(e),
    };
    if let Some(bytes) = args.cache_size {
        wishes.cache_size = Some(bytes);
    }
    if args.daemon || args.foreground {
        return serve(&args.source, &args.mountpoint, &wishes, args.daemon);
    }
    let mut arguments: Vec<OsString> = vec!["mount".into(), "--daemon".into()];
    for list in &args.options {
        arguments.extend(["-o".into(), list.into()]);
    }
    if let Some(bytes) = args.cache_size {
        arguments.extend(["--cache-size".into(), bytes.to_string().into()]);
    }
    arguments.extend(["--".into(), args.source.clone().into(), args.mountpoint.clone().into()]);
    match start_daemon(&arguments)? {
        0 => Ok(()),
        // It has said why.
        code => std::process::exit(code),
    }
}

/// Starts this program as a daemon and waits until it is ready (0) or has failed (its exit code).
pub(crate) fn start_daemon(arguments: &[OsString]) -> anyhow::Result<i32> {
    let program = std::env::current_exe().context("finding the program itself").could_not_run()?;
    let mut child = Command::new(program)
        // By whatever name we were called: the daemon is the command, not the mount helper.
        .arg0("larder")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the daemon")
        .could_not_run()?;
    let out = child.stdout.take().context("the daemon has no output")?;
    for line in BufReader::new(out).lines() {
        match line {
            Ok(l) if l == READY => return Ok(0),
            Ok(_) => {}
            Err(_) => break,
        }
    }
    let status = child.wait().context("waiting for the daemon")?;
    // A daemon that ends without the word has failed even if it thinks otherwise.
    Ok(status.code().filter(|c| *c != 0).unwrap_or(i32::from(failure::FAILED)))
}

/// Serves the mount until it is gone. As `daemon`, tells the parent when it is ready and detaches.
fn serve(source: &Path, mountpoint: &Path, wishes: &MountWishes, daemon: bool) -> anyhow::Result<()> {
    let shown = mountpoint.display().to_string();
    if larder_fuse::mount::is_dead(mountpoint) {
        return Err(advise_mount(MountError::DeadMount(mountpoint.to_owned())));
    }
    let mountpoint = mount_table::absolute(mountpoint).could_not_run()?;
    match std::fs::metadata(&mountpoint) {
        Err(e) => return Err(anyhow::Error::new(e).context(shown)).could_not_run(),
        Ok(m) if !m.is_dir() => return usage(format!("{shown} is not a directory: a mount needs one")),
        Ok(_) => {}
    }
    let (access, mode) = if wishes.read_only {
        (Access::Read { force: false }, OpenMode::Read)
    } else {
        (Access::Write, OpenMode::Write)
    };
    let device = advise_open(FileDevice::open(source, mode, wishes.direct), access)
        .map_err(|e| read_only_advice(e, wishes))?;
    let image = std::fs::canonicalize(source).with_context(|| source.display().to_string())?;
    let options = OpenOptions {
        read_only: wishes.read_only,
        no_log_replay: wishes.no_log_replay,
        subvol: wishes.subvol.clone(),
        cache_size: wishes.cache_size.unwrap_or(OpenOptions::default().cache_size),
        commit_interval: Some(wishes.commit),
        ..OpenOptions::default()
    };
    let name = source.display().to_string();
    let fs = advise_filesystem(Filesystem::open(Arc::new(device) as Arc<dyn Device>, options), &name)?;
    if fs.info().has_unreplayed_log {
        eprintln!("larder: note: {name} has a log that is not replayed; showing its last commit");
    }
    let claim = Claim::new(&image, &mountpoint).could_not_run()?;
    let request = MountOptions {
        fsname: wishes.fsname.clone(),
        allow_other: wishes.allow_other,
        read_only: wishes.read_only,
        nosuid: wishes.nosuid,
        nodev: wishes.nodev,
        noexec: wishes.noexec,
        dirsync: wishes.dirsync,
        synchronous: wishes.synchronous,
        writeback: wishes.writeback,
        transport: wishes.transport,
        default_permissions: wishes.default_permissions,
        fuseblk: wishes.fuseblk,
        ..MountOptions::default()
    };
    // Before the mount exists, so that no signal can come in between and leave it behind.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let mounted = larder_fuse::mount(&image, &mountpoint, request).map_err(advise_mount)?;
    if mounted.enabled_uring {
        eprintln!(
            "larder: note: FUSE over io_uring was off on this machine and is on now \
             (/sys/module/fuse/parameters/enable_uring)"
        );
    }
    let stats = Arc::new(Stats::default());
    obey(signals, mounted.unmounter(), Arc::clone(&fs));
    let served = larder_fuse::serve(Arc::clone(&fs), mounted, stats, |_| {
        if daemon {
            detach();
        } else {
            let _ = crate::print::line(&format!("{name} is mounted on {shown}"));
        }
    });
    let result = match served {
        Ok(served) => served.closed.unwrap_or_else(|| fs.close()).map_err(anyhow::Error::new),
        Err(e) => fs.close().map_err(anyhow::Error::new).and(Err(anyhow::Error::new(e))),
    };
    // The image is free again before anybody learns that we are done.
    drop(fs);
    let outcome = match &result {
        Ok(()) => Outcome::Clean,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    };
    claim.finish(outcome)?;
    result.with_context(|| format!("{}: the last changes may be lost", image.display()))
}

/// Unmounts when asked to end. While files are in use the mount is taken out of sight and what was done is made
/// durable at once; the daemon then ends with the last user.
fn obey(mut signals: Signals, unmounter: Unmounter, fs: Arc<Filesystem>) {
    let fs = Arc::downgrade(&Arc::clone(&fs));
    let work = move || {
        for signal in signals.forever() {
            tracing::info!(signal, "unmounting");
            if unmounter.unmount().is_ok() {
                continue;
            }
            if let Err(e) = unmounter.detach() {
                tracing::warn!("cannot unmount: {e}");
            }
            if let Some(Err(e)) = fs.upgrade().map(|fs| fs.sync()) {
                tracing::warn!("syncing failed: {e}");
            }
        }
    };
    if let Err(e) = std::thread::Builder::new().name("signals".into()).spawn(work) {
        tracing::warn!("signals will not unmount: {e}");
    }
}

/// Tells the parent that the mount can be used, and lets go of everything that belongs to whoever started us.
fn detach() {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
}

fn read_only_advice(error: anyhow::Error, wishes: &MountWishes) -> anyhow::Error {
    let denied = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>()).any(|e| {
        matches!(e.kind(), std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem)
    });
    if denied && !wishes.read_only {
        return Err::<(), _>(error).hint("-o ro needs only the right to read").unwrap_err();
    }
    error
}

fn advise_mount(error: MountError) -> anyhow::Error {
    Err::<(), _>(anyhow!(error)).could_not_run().unwrap_err()
}
