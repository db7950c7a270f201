//! The processes that serve mounts for the benchmark: the `larder` command, and the ceiling.
//!
//! The ceiling is this program once more, around the in-memory server. It prints `ready` when its
//! mount can be used, and answers each line on its input with its counters. On request it unmounts
//! and mounts again: its files stay, and the kernel loses its caches of them. It ends when it is
//! unmounted or its input ends.
//!
//! Larder is run as a user runs it, by `larder mount` and `larder umount`. It stays in the
//! foreground, so that the process is a child that can be watched and whose exit code counts.

use anyhow::{Context, Result, bail};
use clap::Args;
use larder_fuse::{MountOptions, Stats, Transport, Unmounter, control, mount, serve_handler};
use larder_simtest::memserver::MemServer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Serves memory that forgets what is written into files.
#[derive(Args, Debug)]
pub(crate) struct Serve {
    mountpoint: PathBuf,
    /// `dev` instead of io_uring.
    #[arg(long)]
    dev_fuse: bool,
    /// Behind the kernel's cache of dirty pages.
    #[arg(long)]
    writeback: bool,
}

impl Serve {
    pub(crate) fn run(self) -> Result<()> {
        let server = Arc::new(MemServer::new(false));
        let stats = Arc::new(Stats::default());
        let again = Arc::new(AtomicBool::new(false));
        let unmounter = Unmounter::new(&self.mountpoint);
        let (counters, wanted) = (Arc::clone(&stats), Arc::clone(&again));
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                if line == REMOUNT {
                    wanted.store(true, Ordering::SeqCst);
                    if let Err(e) = unmounter.unmount() {
                        say(&format!("unmounting: {e}"));
                    }
                } else {
                    say(&counters.to_json().to_string());
                }
            }
            // The benchmark is gone or does not need us any more.
            let _ = unmounter.detach();
        });
        loop {
            let options = MountOptions {
                transport: if self.dev_fuse { Transport::DevFuse } else { Transport::Auto },
                writeback: self.writeback,
                ..MountOptions::default()
            };
            let mounted = mount(Path::new("memory"), &self.mountpoint, options)?;
            serve_handler(Arc::clone(&server), mounted, Arc::clone(&stats), |_| say(READY))?;
            if !again.swap(false, Ordering::SeqCst) {
                return Ok(());
            }
        }
    }
}

const READY: &str = "ready";
const REMOUNT: &str = "remount";

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The other end decides when it stops listening.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// A mount of `larder`, as its command line makes it.
#[derive(Clone, Debug)]
pub(crate) struct LarderMount<'a> {
    /// The command.
    pub(crate) larder: &'a Path,
    /// Image or device.
    pub(crate) source: &'a Path,
    /// `-o`
    pub(crate) options: String,
    /// `--cache-size`
    pub(crate) cache_size: Option<&'a str>,
}

/// A running daemon. Dropping it takes its mount away and ends it.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    said: BufReader<ChildStdout>,
    mountpoint: PathBuf,
    kind: Kind,
    ended: bool,
}

#[derive(Debug)]
enum Kind {
    Ceiling { ask: Option<ChildStdin> },
    Larder { command: PathBuf },
}

impl Daemon {
    /// Starts the ceiling, which is this program; returns when its mount can be used.
    pub(crate) fn ceiling(
        mut command: Command,
        mountpoint: &Path,
        writeback: bool,
    ) -> Result<Self> {
        command
            .arg("serve")
            .args(writeback.then_some("--writeback"))
            .arg(mountpoint)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = start(&mut command)?;
        let kind = Kind::Ceiling { ask: child.stdin.take() };
        Self::ready(child, mountpoint, kind)
    }

    /// Mounts with Larder, which `command` starts; returns when the mount can be used.
    pub(crate) fn larder(
        mut command: Command,
        mountpoint: &Path,
        how: &LarderMount<'_>,
    ) -> Result<Self> {
        command.args(["mount", "--foreground", "-o", &how.options]);
        if let Some(size) = how.cache_size {
            command.args(["--cache-size", size]);
        }
        command.arg(how.source).arg(mountpoint).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = start(&mut command)?;
        Self::ready(child, mountpoint, Kind::Larder { command: how.larder.to_owned() })
    }

    /// Both say a line when their mount can be used.
    fn ready(mut child: Child, mountpoint: &Path, kind: Kind) -> Result<Self> {
        let said = BufReader::new(child.stdout.take().context("its output")?);
        let mut daemon =
            Self { child, said, mountpoint: mountpoint.to_owned(), kind, ended: false };
        daemon.line().context("mounting")?;
        Ok(daemon)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.said.read_line(&mut line)? == 0 {
            bail!("the daemon is gone");
        }
        Ok(line.trim_end().to_owned())
    }

    /// The daemon's statistics; counters of requests under `requests`.
    pub(crate) fn stats(&mut self) -> Result<Value> {
        match &mut self.kind {
            Kind::Larder { .. } => Ok(serde_json::from_str(&control::stats(&self.mountpoint)?)?),
            Kind::Ceiling { ask } => {
                writeln!(ask.as_mut().context("its input")?, "stats")?;
                let requests: Value = serde_json::from_str(&self.line()?)?;
                Ok(serde_json::json!({ "requests": requests }))
            }
        }
    }

    /// Mounts the ceiling afresh, with the files that are in it.
    pub(crate) fn remount(&mut self) -> Result<()> {
        let Kind::Ceiling { ask } = &mut self.kind else {
            bail!("only the ceiling is mounted again in place")
        };
        writeln!(ask.as_mut().context("its input")?, "{REMOUNT}")?;
        let said = self.line()?;
        if said == READY { Ok(()) } else { bail!("the in-memory server: {said}") }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Unmounts and waits until everything is durable and the process is gone.
    pub(crate) fn unmount(mut self) -> Result<()> {
        match &self.kind {
            Kind::Ceiling { .. } => {
                rustix::mount::unmount(&self.mountpoint, rustix::mount::UnmountFlags::empty())?;
            }
            Kind::Larder { command } => {
                let status = Command::new(command).arg("umount").arg(&self.mountpoint).status()?;
                if !status.success() {
                    bail!("larder umount: {status}");
                }
            }
        }
        let status = self.child.wait()?;
        self.ended = true;
        if status.success() { Ok(()) } else { bail!("the daemon failed: {status}") }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let _ = rustix::mount::unmount(&self.mountpoint, rustix::mount::UnmountFlags::DETACH);
        if let Kind::Ceiling { ask } = &mut self.kind {
            *ask = None;
        }
        // A detached mount without users is gone, and its daemon ends. One that hangs is killed.
        if !ends_within(&self.child, PATIENCE) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// How long a daemon may take to end once its mount is gone.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Waits for the end of a process.
pub(crate) fn ends_within(child: &Child, patience: Timespec) -> bool {
    let Ok(fd) = pidfd_open(Pid::from_child(child), PidfdFlags::empty()) else { return false };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&patience)) == Ok(1)
}

/// Starts a daemon that the terminal's signals do not reach, and that ends if this process is
/// killed.
fn start(command: &mut Command) -> Result<Child> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.process_group(0);
    // SAFETY: between fork and exec one system call is made, which neither allocates nor takes a
    // lock.
    unsafe {
        command
            .pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.spawn().with_context(|| format!("starting {name}"))
}
