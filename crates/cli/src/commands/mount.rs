//! `larder mount`: serves an image at a directory.
//!
//! The command starts itself once more as the daemon and waits for its word over a pipe: that it is ready, or why not.
//! So the command returns when the mount can be used, with an exit code that tells. The daemon opens everything itself
//! (locks on the image belong to the process that serves), leaves the process group of whoever started it, and lives until
//! the mount is gone: unmounted, or ended by SIGTERM or SIGINT. Then it commits, leaves its result where
//! `larder umount` finds it, and exits.
//!
//! With `--foreground` the command is the daemon itself.
//!
//! Before the daemon reads a byte of the image it goes into its sandbox ([`larder_fuse::sandbox`]). What it can then no
//! longer do — mount, unmount, take its state file away — a second process does for it, its porter
//! ([`larder_fuse::porter`]): this program once more, which the daemon starts first. The daemon remains who serves: its
//! process id is known, it gets the signals, its end is what is waited for.
//!
//! | killed (SIGKILL) | then |
//! |---|---|
//! | the daemon | the mount is dead, `larder umount` clears it; the porter goes by itself |
//! | the porter | the mount goes on, `umount` and `larder umount` work; SIGTERM makes everything durable and ends the daemon, but leaves a dead mount for `larder umount` to clear |

use crate::failure::{self, Advise, usage};
use crate::image::{Access, advise_content, advise_filesystem, advise_open, when_free};
use crate::mount_options::{self, MountWishes};
use crate::state::{self, Claim, Outcome, Stage};
use crate::utab;
use crate::{mount_table, print};
use anyhow::{Context, anyhow};
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::{MountError, MountOptions, Mounted, Porter, Stats, porter, sandbox};
use larder_volume::{Device, FileDevice, OpenMode};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

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
    /// Memory for metadata and for data that waits to be written (default: an eighth of what this machine or the memory
    /// cgroup has, at least 64M and at most 1G)
    #[arg(long, value_name = "SIZE", value_parser = mount_options::cache_size)]
    cache_size: Option<u64>,
    /// The other process of a mount in the background: reports on standard output
    #[arg(long, hide = true)]
    daemon: bool,
    /// The process beside a daemon that mounts and unmounts for it: told so on standard input
    #[arg(long, hide = true)]
    porter: bool,
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
    if args.porter {
        return attend(args, &wishes);
    }
    if args.daemon || args.foreground {
        larder_fuse::without_huge_pages();
        // The sandbox would not show how much memory there is.
        wishes.cache_size.get_or_insert_with(larder_fuse::default_cache_size);
        return serve(args, &wishes);
    }
    let mut arguments = call("--daemon", &args.options);
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

/// The first arguments of this command in another role.
fn call(role: &str, options: &[String]) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["mount".into(), role.into()];
    for list in options {
        arguments.extend(["-o".into(), list.into()]);
    }
    arguments
}

/// This program once more, for another role.
fn this_program() -> anyhow::Result<Command> {
    let mut program =
        Command::new(std::env::current_exe().context("finding the program itself").could_not_run()?);
    // By whatever name we were called: it is the command, not the mount helper.
    program.arg0("larder");
    Ok(program)
}

/// Starts this program as a daemon and waits until it is ready (0) or has failed (its exit code).
pub(crate) fn start_daemon(arguments: &[OsString]) -> anyhow::Result<i32> {
    keep_descriptors();
    let mut child = this_program()?
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

/// What we were given open, besides standard input and output, is not for the daemon: it would keep somebody's pipe from ending, or a
/// file system from being unmounted.
fn keep_descriptors() {
    // SAFETY: no memory is involved and nothing is closed: descriptors are only marked to be closed in programs that are
    // started, which is how this program opens all of its own.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// How the kernel is asked for the mount.
fn request(wishes: &MountWishes) -> MountOptions {
    MountOptions {
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
    }
}

/// The porter: waits beside a daemon for what that asks, until it is gone.
fn attend(args: &Args, wishes: &MountWishes) -> anyhow::Result<()> {
    // A terminal's Ctrl-C is for the daemon, and so is what a service manager sends to every process of a service: to
    // obey, the daemon needs us.
    let _ = rustix::process::setsid();
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::default()).context("ignoring signals")?;
    }
    let duties = porter::Duties {
        source: args.source.clone(),
        mountpoint: args.mountpoint.clone(),
        options: request(wishes),
    };
    porter::attend(rustix::stdio::stdin(), &duties, || state::tidy_up(&args.mountpoint))?;
    Ok(())
}

fn start_porter(args: &Args, image: &Path, mountpoint: &Path) -> anyhow::Result<Porter> {
    let mut command = this_program()?;
    command.args(call("--porter", &args.options)).args([
        OsStr::new("--"),
        image.as_ref(),
        mountpoint.as_ref(),
    ]);
    Porter::start(&mut command, mountpoint).context("starting the daemon's second process").could_not_run()
}

/// The daemon's announcement, until somebody takes it back at the end.
type Announced = Arc<Mutex<Option<Claim>>>;

fn take(announced: &Announced) -> Option<Claim> {
    announced.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn reached(announced: &Announced, stage: Stage) {
    if let Some(claim) = &mut *announced.lock().unwrap_or_else(PoisonError::into_inner) {
        claim.reached(stage);
    }
}

/// Serves the mount until it is gone. As daemon, tells the parent when it is ready and detaches.
fn serve(args: &Args, wishes: &MountWishes) -> anyhow::Result<()> {
    let (source, daemon) = (&args.source, args.daemon);
    let shown = args.mountpoint.display().to_string();
    if larder_fuse::mount::is_dead(&args.mountpoint) {
        return Err(advise_mount(MountError::DeadMount(args.mountpoint.clone())));
    }
    let mountpoint = mount_table::absolute(&args.mountpoint).could_not_run()?;
    match std::fs::metadata(&mountpoint) {
        Err(e) => return Err(anyhow::Error::new(e).context(shown)).could_not_run(),
        Ok(m) if !m.is_dir() => return usage(format!("{shown} is not a directory: a mount needs one")),
        Ok(_) => {}
    }
    let (access, mode) =
        if wishes.read_only { (Access::Serve, OpenMode::Read) } else { (Access::Write, OpenMode::Write) };
    let device =
        advise_open(when_free(source, || FileDevice::open_cached(source, mode, wishes.caching)), access)
            .map_err(|e| read_only_advice(e, wishes))?;
    let image = std::fs::canonicalize(source).with_context(|| source.display().to_string())?;
    let claim = Claim::new(&image, &mountpoint, wishes.read_only).could_not_run()?;
    utab::add(&image, &mountpoint);
    // Before the mount exists, so that no signal can come in between and leave it behind.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let nowhere = File::options().read(true).write(true).open("/dev/null").ok();
    if daemon {
        let _ = std::env::set_current_dir("/");
    }
    // From here on nothing can be opened any more. Nothing was read yet that somebody else could have written.
    let porter = match wishes.sandbox.then(|| start_porter(args, &image, &mountpoint)).transpose() {
        Ok(porter) => porter,
        Err(e) => {
            state::tidy_up(&mountpoint);
            return Err(e);
        }
    };
    let sandbox = porter.is_some().then(sandbox::enter);

    let (fs, mounted) = match open_and_mount(device, args, wishes, &image, &mountpoint, porter.as_ref()) {
        Ok(both) => both,
        Err(e) => {
            porter.unwrap_or_else(|| Porter::here(&mountpoint)).dismiss(|| state::tidy_up(&mountpoint));
            drop(claim);
            return Err(e);
        }
    };
    if mounted.enabled_uring {
        print::say(
            "larder: note: FUSE over io_uring was off on this machine and is on now \
             (/sys/module/fuse/parameters/enable_uring)",
        );
    }
    let porter = mounted.porter().clone();
    let announced = Arc::new(Mutex::new(Some(claim)));
    obey(signals, porter.clone(), Arc::clone(&fs), Arc::clone(&announced));
    let served = larder_fuse::serve(Arc::clone(&fs), mounted, Arc::new(Stats::default()), |_| {
        if let Some(sandbox) = sandbox {
            sandbox.seal();
        }
        reached(&announced, Stage::Serving);
        if daemon {
            detach(nowhere);
        } else {
            let _ = print::line(&format!("{} is mounted on {shown}", source.display()));
        }
    });
    reached(&announced, Stage::Ending);
    let result = match served {
        Ok(served) => served.closed.unwrap_or_else(|| fs.close()).map_err(anyhow::Error::new),
        Err(e) => fs.close().map_err(anyhow::Error::new).and(Err(anyhow::Error::new(e))),
    };
    // The image is free again before anybody learns that we are done.
    drop(fs);
    let Some(claim) = take(&announced) else {
        // A signal is just ending this process.
        loop {
            std::thread::park();
        }
    };
    conclude(claim, &porter, &result)?;
    result.with_context(|| format!("{}: the last changes may be lost", image.display()))
}

/// Reads the image for the first time, and mounts it.
fn open_and_mount(
    device: FileDevice,
    args: &Args,
    wishes: &MountWishes,
    image: &Path,
    mountpoint: &Path,
    porter: Option<&Porter>,
) -> anyhow::Result<(Arc<Filesystem>, Mounted)> {
    let options = OpenOptions {
        read_only: wishes.read_only,
        no_log_replay: wishes.no_log_replay,
        metadata_dump: false,
        subvol: wishes.subvol.clone(),
        cache_size: wishes.cache_size.unwrap_or(OpenOptions::default().cache_size),
        commit_interval: Some(wishes.commit),
        compress: wishes.compress,
        discard: wishes.discard.unwrap_or(!device.is_block_device()),
        max_inline: wishes.max_inline.unwrap_or(OpenOptions::default().max_inline),
        no_data_cow: wishes.no_data_cow,
        no_data_sum: wishes.no_data_sum,
        tuning: wishes.tuning.clone(),
    };
    let name = args.source.display().to_string();
    let device = Arc::new(device);
    let opened = Filesystem::open(Arc::clone(&device) as Arc<dyn Device>, options);
    let fs = advise_content(advise_filesystem(opened, &name), &*device)?;
    if fs.info().has_unreplayed_log {
        print::say(&format!("larder: note: {name} has a log that is not replayed; showing its last commit"));
    }
    let mounted = match porter {
        Some(porter) => porter.mount(request(wishes)),
        None => larder_fuse::mount(image, mountpoint, request(wishes)),
    };
    Ok((fs, mounted.map_err(advise_mount)?))
}

/// Leaves the result for whoever waits, and the porter to tidy up.
fn conclude(claim: Claim, porter: &Porter, result: &anyhow::Result<()>) -> anyhow::Result<()> {
    let outcome = match result {
        Ok(()) => Outcome::Clean,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    };
    let left = claim.finish(outcome);
    porter.dismiss(|| state::tidy_up(porter.mountpoint()));
    left
}

/// Unmounts when asked to end. While files are in use the mount is taken out of sight and what was done is made
/// durable at once; the daemon then ends with the last user.
fn obey(mut signals: Signals, porter: Porter, fs: Arc<Filesystem>, announced: Announced) {
    let fs = Arc::downgrade(&fs);
    let work = move || {
        for signal in signals.forever() {
            tracing::info!(signal, "unmounting");
            let Err(error) = porter.unmount() else { continue };
            if porter::is_gone(&error) {
                let Some(fs) = fs.upgrade() else { return };
                end_without_unmounting(&fs, &porter, &announced);
                return;
            }
            if let Err(e) = porter.detach() {
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

/// The end where nobody can unmount for us: everything becomes durable, and the mount dies with this process.
fn end_without_unmounting(fs: &Filesystem, porter: &Porter, announced: &Announced) {
    let result = fs.close().map_err(anyhow::Error::new);
    // Nothing left to take back: the mount has just ended by itself, and so does the process.
    let Some(claim) = take(announced) else { return };
    print::say(&format!(
        "larder: the process that unmounts is gone: `larder umount {}` clears the mount",
        porter.mountpoint().display()
    ));
    for error in [conclude(claim, porter, &result), result].into_iter().filter_map(Result::err) {
        print::say(&failure::text(&error));
    }
    std::process::exit(i32::from(failure::FAILED));
}

/// Tells the parent that the mount can be used, and lets go of what belongs to whoever started us: a terminal's Ctrl-C, and
/// the end of the terminal, go to process groups.
///
/// It does not leave the session: Linux's scheduler sees those who ask and those who answer together only if they are in one.
fn detach(nowhere: Option<File>) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
    let _ = rustix::process::setpgid(None, None);
    if let Some(null) = nowhere {
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
    let not_ours = error.to_string().contains("no write access to mountpoint");
    let result = Err::<(), _>(anyhow!(error)).could_not_run();
    let result = if not_ours { result.hint("give a directory that belongs to you") } else { result };
    result.unwrap_err()
}
