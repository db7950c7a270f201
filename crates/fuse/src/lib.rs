//! A file system of the engine as a mount: the FUSE protocol, its transports, and the server
//! between it and [`larder_fs::Filesystem`]. Only this crate knows FUSE, and only it knows errno.
//!
//! ```text
//!   kernel ── transport (io_uring | /dev/fuse) ── Handler ──┬── server ── larder_fs::Filesystem
//!             one thread per CPU, workers that wait         └── memserver (tests; the ceiling of benchmarks)
//! ```
//!
//! - [`mod@mount`] gets a descriptor with a mount behind it, as root or through `fusermount3`, and
//!   takes mounts away.
//! - [`transport`] brings requests to a [`handler::Handler`] and takes its replies back. Where a
//!   request is served decides more about speed than how: on its caller's CPU, without waiting;
//!   what must wait goes to workers.
//! - [`proto`] is the protocol as bytes, [`records`] what several replies share.
//! - [`server`] answers with the engine. [`nodes`] numbers inodes across subvolumes; [`acl`] and
//!   [`perm`] hold the rules that the kernel leaves to a file system; [`mod@errno`] translates
//!   errors.
//! - [`sandbox`] confines a daemon, whose [`porter`] does from outside what it then cannot do.
//! - [`control`] is how other processes talk to a live mount.
//!
//! The kernel is told to ask as little as possible: files and directories are opened, closed and
//! flushed without a request, files are made with MKNOD, and it may believe names and attributes
//! for a day. Three things follow that a reader of this crate meets again and again: there are no
//! file handles; an unlinked file lives as long as its look-up count; and truncation comes as an
//! ordinary SETATTR, which is why `ATOMIC_O_TRUNC` must never be accepted.
//!
//! ```no_run
//! # fn example(fs: std::sync::Arc<larder_fs::Filesystem>) -> Result<(), Box<dyn std::error::Error>> {
//! use larder_fuse::{MountOptions, Stats, mount, serve};
//! let mounted = mount("disk.img".as_ref(), "mnt".as_ref(), MountOptions::default())?;
//! let served = serve(fs.clone(), mounted, Stats::default().into(), |ready| {
//!     println!("ready, io_uring: {}", ready.uring);
//! })?;
//! // Unmounted. On a block device the kernel has waited for the close already.
//! served.closed.unwrap_or_else(|| fs.close())?;
//! # Ok(())
//! # }
//! ```

pub mod acl;
pub mod control;
pub mod errno;
pub mod handler;
pub mod latency;
mod later;
mod memory;
pub mod memserver;
pub mod mount;
pub mod mount_group;
pub mod nodes;
mod notify;
pub mod perm;
pub mod porter;
pub mod proto;
pub mod records;
pub mod sandbox;
pub mod server;
pub mod sharing;
pub mod stats;
pub mod subvolumes;
pub mod transport;
mod workers;

pub use memory::{default_cache_size, without_huge_pages};
pub use mount::{MountError, MountOptions, Mounted, Unmounter, mount};
pub use mount_group::{JoinError, Left, Member, MountGroup};
pub use porter::Porter;
pub use server::{Served, serve, serve_beside};
pub use stats::Stats;
pub use transport::{Ready, ServeError, Transport, serve_handler};
