//! A disk for the system's own file systems that remembers what happens to it.
//!
//! [`RecordedDisk`] is a file of a FUSE mount of this process, in front of a [`SimDevice`]. Behind
//! a loop device every write and flush of whatever is mounted there becomes a call of the device,
//! so that [`crate::crash`] can work out what a power cut of *Linux's* btrfs leaves, in the same
//! way as of ours. What makes that sound:
//!
//! - the mount has no write-back cache: a write of the loop device returns when the device has
//!   completed it;
//! - a flush of the block device is an FSYNC here, and loop devices have no FUA: such a write is a
//!   write and a flush;
//! - there is no FALLOCATE, so that nothing is discarded.
//!
//! A long write may arrive in several requests; each counts as a write of its own, which only adds
//! states.

use crate::device::SimDevice;
use crate::oracle::enter_private_namespace;
use anyhow::{Context, Result, anyhow};
use larder_format::Physical;
use larder_format::ids::Generation;
use larder_fuse::errno::Errno;
use larder_fuse::handler::{ExecContext, Failure, Handler, Outcome, Reply, Request};
use larder_fuse::proto::{self, NodeId, Opcode, ROOT_NODE};
use larder_fuse::records::{attributes, entry, settled};
use larder_fuse::{MountOptions, Stats, Transport, Unmounter, mount, serve_handler};
use larder_volume::Device;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

const NAME: &str = "disk";
const NODE: NodeId = NodeId(ROOT_NODE.0 + 1);

/// One directory with one file, whose bytes are the device's.
struct Server {
    device: Arc<dyn Device>,
    /// Flushes take their time: other requests are served meanwhile.
    slow: bool,
}

impl Server {
    fn attr(&self, node: NodeId) -> Result<proto::Attr, Errno> {
        let (mode, size, nlink) = match node {
            ROOT_NODE => (libc::S_IFDIR | 0o755, 0, 2),
            NODE => (libc::S_IFREG | 0o600, self.device.size(), 1),
            _ => return Err(Errno::STALE),
        };
        Ok(proto::Attr {
            ino: node.0,
            size,
            blocks: size / 512,
            mode,
            nlink,
            blksize: 4096,
            ..proto::Attr::default()
        })
    }
}

impl Handler for Server {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        if let Some(answer) = settled(request.opcode) {
            return answer;
        }
        let node = request.header.node();
        let io = |result: std::io::Result<()>| result.map_err(|_| Failure::Errno(Errno::IO));
        match request.opcode {
            Opcode::Lookup if node == ROOT_NODE && request.name()? == NAME.as_bytes() => {
                reply.value(&entry(NODE, Generation(1), self.attr(NODE)?))
            }
            Opcode::Lookup => Err(Errno::NOENT.into()),
            Opcode::Getattr => reply.value(&attributes(self.attr(node)?)),
            Opcode::Read if node == NODE => {
                let read: proto::ReadIn = request.arg()?;
                let len = self.device.size().saturating_sub(read.offset).min(u64::from(read.size));
                let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
                io(self.device.read_at(Physical(read.offset), reply.buffer(len)?))?;
                Ok(len)
            }
            Opcode::Write if node == NODE => {
                let write: proto::WriteIn = request.arg()?;
                let data = request.data.get(..write.size as usize).ok_or(Errno::INVAL)?;
                io(self.device.write_at(Physical(write.offset), data))?;
                reply.value(&proto::WriteOut { size: write.size, padding: 0 })
            }
            Opcode::Fsync if self.slow && context == ExecContext::Queue => Err(Failure::Wait),
            Opcode::Fsync if node == NODE => io(self.device.flush()).map(|()| 0),
            Opcode::Access | Opcode::Destroy | Opcode::Syncfs => Ok(0),
            _ => Err(Errno::NOSYS.into()),
        }
    }
    fn forget(&self, _: NodeId, _: u64) {}
}

/// The file, served until this is dropped; its users must have closed it by then. The mount is the
/// calling thread's own.
#[derive(Debug)]
pub struct RecordedDisk {
    dir: tempfile::TempDir,
    server: Option<JoinHandle<Result<(), larder_fuse::ServeError>>>,
}

impl RecordedDisk {
    /// Serves `device` as a file.
    ///
    /// # Errors
    /// No mount can be made here.
    pub fn serve(device: Arc<SimDevice>) -> Result<Self> {
        Self::with(Server { device, slow: false })
    }

    /// Serves a device whose flushes take long, and which need not record anything. Other requests
    /// are served meanwhile.
    ///
    /// # Errors
    /// No mount can be made here.
    pub fn serve_slow(device: Arc<dyn Device>) -> Result<Self> {
        Self::with(Server { device, slow: true })
    }

    fn with(server: Server) -> Result<Self> {
        enter_private_namespace().context("cannot make a private mount namespace")?;
        let dir =
            tempfile::Builder::new().prefix("larder-disk-").tempdir().context("no mount point")?;
        let options = MountOptions { transport: Transport::DevFuse, ..MountOptions::default() };
        let mounted = mount(Path::new("recorded"), dir.path(), options)?;
        let (tell, ready) = mpsc::channel();
        let server = std::thread::spawn(move || {
            let stats = Arc::new(Stats::default());
            // Nobody to tell: then nobody waits for it.
            serve_handler(Arc::new(server), mounted, stats, |_| {
                let _ = tell.send(());
            })
        });
        let mut this = Self { dir, server: Some(server) };
        match ready.recv() {
            Ok(()) => Ok(this),
            Err(_) => {
                this.stop().and(Err(anyhow!("the server of a recorded disk ended before it began")))
            }
        }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join(NAME)
    }

    /// Takes the mount away and waits for the server.
    ///
    /// # Errors
    /// The server has failed.
    pub fn end(mut self) -> Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> Result<()> {
        let Some(server) = self.server.take() else { return Ok(()) };
        let _ = Unmounter::new(self.dir.path()).detach();
        let ended = server.join().map_err(|_| anyhow!("the server of a recorded disk panicked"))?;
        ended.context("serving a recorded disk")
    }
}

impl Drop for RecordedDisk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A file system on it may still be in use, and would hang a test that has failed.
            let _ = Unmounter::new(self.dir.path()).detach();
        } else {
            let _ = self.stop();
        }
    }
}
