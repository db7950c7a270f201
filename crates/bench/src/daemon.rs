//! A process that serves one mount for the benchmark, and the handle by which the benchmark talks to it.
//!
//! It is this program once more. It says `ready` on a line, answers each line on its input with its statistics as JSON, and
//! exits when it is unmounted.

use anyhow::{Context, Result, bail};
use clap::Args;
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::memserver::MemServer;
use larder_fuse::{MountOptions, Stats, Transport, mount, serve, serve_handler};
use larder_volume::file::{FileDevice, OpenMode};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

#[derive(Args, Debug)]
pub(crate) struct Serve {
    mountpoint: PathBuf,
    /// Image or device; without it, memory that forgets what is written.
    #[arg(long)]
    image: Option<PathBuf>,
    /// Bypass the page cache.
    #[arg(long)]
    direct: bool,
    /// Not io_uring.
    #[arg(long)]
    dev_fuse: bool,
}

impl Serve {
    pub(crate) fn run(self) -> Result<()> {
        let stats = Arc::new(Stats::default());
        let counters = Arc::clone(&stats);
        std::thread::spawn(move || {
            for _ in std::io::stdin().lines().map_while(Result::ok) {
                say(&counters.to_json().to_string());
            }
        });
        let options = MountOptions {
            transport: if self.dev_fuse { Transport::DevFuse } else { Transport::Auto },
            ..MountOptions::default()
        };
        let ready = |_| say("ready");
        match &self.image {
            None => {
                let mounted = mount(Path::new("memory"), &self.mountpoint, options)?;
                serve_handler(Arc::new(MemServer::new(false)), mounted, stats, ready)?;
            }
            Some(image) => {
                let device = FileDevice::open(image, OpenMode::Write, self.direct)?;
                let fs = Filesystem::open(Arc::new(device), OpenOptions::default())?;
                let mounted = mount(image, &self.mountpoint, options)?;
                let served = serve(Arc::clone(&fs), mounted, stats, ready)?;
                match served.closed {
                    Some(result) => result?,
                    None => fs.close()?,
                }
            }
        }
        Ok(())
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The other end decides when it stops listening.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    ask: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Daemon {
    /// Starts one and waits until its mount can be used.
    pub(crate) fn start(mountpoint: &Path, image: Option<&Path>, direct: bool) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve").arg(mountpoint).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(image) = image {
            command.arg("--image").arg(image);
        }
        if direct {
            command.arg("--direct");
        }
        let mut child = command.spawn()?;
        let ask = child.stdin.take().context("its input")?;
        let said = BufReader::new(child.stdout.take().context("its output")?);
        let mut daemon = Self { child, ask, said };
        if daemon.line()? != "ready" {
            bail!("the daemon did not start");
        }
        Ok(daemon)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.said.read_line(&mut line)? == 0 {
            bail!("the daemon is gone");
        }
        Ok(line.trim_end().to_owned())
    }

    /// Requests served so far.
    pub(crate) fn requests(&mut self) -> Result<u64> {
        writeln!(self.ask, "stats")?;
        let stats: serde_json::Value = serde_json::from_str(&self.line()?)?;
        stats["total"].as_u64().context("a total")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end, after the unmount.
    pub(crate) fn wait(mut self) -> Result<()> {
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { bail!("the daemon failed: {status}") }
    }
}
