//! `larder mount`: serves an image at a directory.
//!
//! One daemon serves an image, however often it is mounted. So the command first looks for a daemon
//! of this user that serves the image already (module [`further`]). Only if there is none, it
//! becomes the daemon itself (module [`first`]). Module [`mounts`] is what a daemon does with its
//! mounts.
//!
//! The command starts itself once more as the daemon, and waits at a pipe until the daemon is ready
//! or says why not. So it returns when the mount can be used, and its exit code tells. The daemon
//! opens everything itself, because locks on the image belong to a process. It leaves the process
//! group of its starter, and lives until its last mount is gone: unmounted, or ended by SIGTERM or
//! SIGINT. Then it commits, leaves its result for `larder umount`, and exits. With `--foreground`
//! the command is the daemon; for a further mount, it stays until that mount has ended.
//!
//! Before the daemon reads a byte of the image it goes into its sandbox ([`larder_fuse::sandbox`]).
//! What it can then no longer do — mount, unmount, take its state file away — a second process does
//! for it, its mount helper ([`larder_fuse::helper`]): this program once more, which the daemon
//! starts first. The daemon is the process that serves: its process id is known, it gets the
//! signals, and its end is waited for.
//!
//! | killed (SIGKILL) | then |
//! |---|---|
//! | the daemon | the mount is dead, `larder umount` clears it; the mount helper goes by itself |
//! | the mount helper | the mount goes on, `umount` and `larder umount` work; SIGTERM makes everything durable and ends the daemon, but leaves a dead mount for `larder umount` to clear |

mod first;
mod further;
mod jobs;
mod mounts;
mod sends;

use crate::attach::{self, StartLock};
use crate::failure::{self, Advise, usage};
use crate::image::may_be_degraded;
use crate::mount_options::{self, MountWishes};
use crate::state;
use crate::{devices, mount_table, print};
use anyhow::{Context, anyhow};
use larder_fuse::helper::{self, Ended};
use larder_fuse::{MountError, MountOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  larder mount disk.img mnt
  larder mount -o ro,subvol=home /dev/sdb1 /mnt
  larder mount -o subvol=home disk.img home
  larder mount --foreground -v disk.img mnt";

/// Mount an image or block device; returns when the mount is ready. One that is mounted already
/// gets a further mount.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = long_help())]
pub(crate) struct Args {
    /// Mount options, separated by commas (see below)
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Stay in the foreground, print a line when the mount is ready; interrupting it unmounts
    #[arg(long)]
    foreground: bool,
    /// Memory for metadata and for data that waits to be written (default: an eighth of what this
    /// machine or the memory cgroup has, at least 64M and at most 1G)
    #[arg(long, value_name = "SIZE", value_parser = mount_options::cache_size)]
    cache_size: Option<u64>,
    /// The other process of a mount in the background: reports on standard output
    #[arg(long, hide = true)]
    daemon: bool,
    /// The process that mounts and unmounts for a daemon, which tells it so on standard input
    #[arg(long, hide = true)]
    mount_helper: bool,
    /// What a mount helper removes when its daemon ends
    #[arg(long, hide = true)]
    attach_socket: Option<PathBuf>,
    /// Image file or block device; several if the file system spans them
    #[arg(value_name = "IMAGE|DEVICE", required = true)]
    sources: Vec<PathBuf>,
    /// Directory
    #[arg(required = true)]
    mountpoint: PathBuf,
}

impl Args {
    /// Everything that is named to be mounted.
    fn devices(&self, wishes: &MountWishes) -> Vec<PathBuf> {
        let named = self.sources.iter().flat_map(|source| devices::names(source));
        named.chain(wishes.devices.iter().cloned()).collect()
    }

    /// What the mount is known by: the first device.
    fn source(&self) -> PathBuf {
        devices::names(&self.sources[0]).swap_remove(0)
    }
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
    if !wishes.read_only && devices::are_seeds(&args.devices(&wishes)) {
        // As Linux does.
        wishes.read_only = true;
        if !args.daemon {
            print::say("larder: note: a seed is only read: mounted read-only");
        }
    }
    if args.mount_helper {
        return run_helper(args, &wishes);
    }
    if args.foreground && !larder_fuse::has_modest_allocator() {
        let failed = this_program()?.args(std::env::args_os().skip(1)).exec();
        tracing::info!("the program could not be started anew: {failed}");
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
    arguments.push("--".into());
    arguments.extend(args.sources.iter().chain([&args.mountpoint]).map(OsString::from));
    match start_daemon(&arguments)? {
        0 => Ok(()),
        // The daemon has said why.
        code => std::process::exit(code),
    }
}

/// The first arguments of this command in another role.
fn call(role: &str, options: &[String]) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["mount".into(), role.into()];
    for list in options {
        arguments.extend(["-o".into(), list.into()]);
    }
    if may_be_degraded() {
        arguments.extend(["-o".into(), "degraded".into()]);
    }
    arguments
}

/// This program once more, to serve a mount, or for another role.
fn this_program() -> anyhow::Result<Command> {
    let mut program = Command::new(
        std::env::current_exe().context("finding the program itself").could_not_run()?,
    );
    // The name under which this program was started may be that of the mount helper.
    program.arg0("larder");
    let (name, value) = larder_fuse::MODEST_ALLOCATOR;
    program.env(name, value);
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
    // A daemon that ends without saying that it is ready has failed, whatever its exit code.
    Ok(status.code().filter(|c| *c != 0).unwrap_or(i32::from(failure::FAILED)))
}

/// Descriptors that this process inherited, besides the standard ones, are not for the daemon: it
/// would keep a pipe from ending, or a file system from being unmounted.
fn keep_descriptors() {
    // SAFETY: no memory is involved and nothing is closed: descriptors are only marked to be closed
    // in programs that are started, which is how this program opens all of its own.
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

/// The mount helper: answers a daemon until that is gone.
fn run_helper(args: &Args, wishes: &MountWishes) -> anyhow::Result<()> {
    // A terminal's Ctrl-C is for the daemon, and so is what a service manager sends to every
    // process of a service: to obey, the daemon needs us.
    let _ = rustix::process::setsid();
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::default()).context("ignoring signals")?;
    }
    let config = helper::HelperConfig {
        source: args.source(),
        mountpoint: args.mountpoint.clone(),
        options: request(wishes),
    };
    let tidy_up =
        |end| tidy_up(end, &args.mountpoint, &args.source(), args.attach_socket.as_deref());
    helper::serve_daemon(rustix::stdio::stdin(), &config, tidy_up)?;
    Ok(())
}

/// Takes away what is left of a mount, and of its daemon if that ends, too.
fn tidy_up(end: Ended, mountpoint: &Path, image: &Path, socket: Option<&Path>) {
    state::tidy_up(mountpoint);
    if end == Ended::Daemon {
        attach::tidy_up(image, socket);
    }
}

/// This program as a mount helper.
fn helper_command(
    options: &[String],
    image: &Path,
    mountpoint: &Path,
    socket: Option<&Path>,
) -> anyhow::Result<Command> {
    let mut command = this_program()?;
    command.args(call("--mount-helper", options));
    if let Some(socket) = socket {
        command.args([OsStr::new("--attach-socket"), socket.as_ref()]);
    }
    command.args([OsStr::new("--"), image.as_ref(), mountpoint.as_ref()]);
    Ok(command)
}

/// Has the image served at the directory: by its daemon if there is one, or by this process.
fn serve(args: &Args, wishes: &MountWishes) -> anyhow::Result<()> {
    let shown = args.mountpoint.display().to_string();
    if larder_fuse::mount::is_dead(&args.mountpoint) {
        return Err(advise_mount(MountError::DeadMount(args.mountpoint.clone())));
    }
    let mountpoint = mount_table::absolute(&args.mountpoint).could_not_run()?;
    match std::fs::metadata(&mountpoint) {
        Err(e) => return Err(anyhow::Error::new(e).context(shown)).could_not_run(),
        Ok(m) if !m.is_dir() => {
            return usage(format!("{shown} is not a directory: a mount needs one"));
        }
        Ok(_) => {}
    }
    let start_lock = StartLock::of(&args.source()).could_not_run()?;
    match further::mount(args, wishes, &mountpoint)? {
        Some(further) => {
            drop(start_lock);
            further.stay(args)
        }
        None => first::serve(args, wishes, &mountpoint, start_lock),
    }
}

/// Tells the parent that the mount can be used.
fn say_ready() {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
}

/// Says it to people, in the foreground.
fn say_mounted(args: &Args) {
    let (source, shown) = (args.source(), args.mountpoint.display());
    let source = source.display();
    let _ = print::line(&format!("{source} is mounted on {shown}"));
}

fn note_uring(enabled: bool) {
    if enabled {
        print::say(
            "larder: note: FUSE over io_uring was off on this machine and is on now \
             (/sys/module/fuse/parameters/enable_uring)",
        );
    }
}

fn advise_mount(error: MountError) -> anyhow::Error {
    let not_ours = error.to_string().contains("no write access to mountpoint");
    let result = Err::<(), _>(anyhow!(error)).could_not_run();
    let result =
        if not_ours { result.hint("give a directory that belongs to you") } else { result };
    result.unwrap_err()
}
