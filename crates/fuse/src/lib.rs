//! A file system of the engine as a mount: the FUSE protocol, its transports, and the server
//! between it and [`larder_fs::Filesystem`]. Only this crate knows FUSE, and only it knows errno.
//!
//! ```text
//!   kernel ── transport (io_uring | /dev/fuse) ── Handler ── server ── larder_fs::Filesystem
//!             one thread per CPU, workers that wait
//! ```
//!
//! - [`mod@mount`] gets a descriptor with a mount behind it, as root or through `fusermount3`, and
//!   takes mounts away.
//! - [`transport`] brings requests to a [`handler::Handler`] and takes its replies back. Speed is
//!   decided by where a request is served: on its caller's CPU, without waiting. What must wait
//!   goes to workers.
//! - [`proto`] is the protocol as bytes, [`records`] what several replies share.
//! - [`server`] answers with the engine. `nodes` numbers inodes across subvolumes; `acl` and `perm`
//!   hold the rules that the kernel leaves to a file system; [`mod@errno`] translates errors.
//! - [`sandbox`] confines a daemon, and [`helper`] does from outside what the daemon then cannot do
//!   for its mount.
//! - [`control`] is how other processes talk to a live mount.
//!
//! The kernel opens, closes and flushes without a request, makes files with MKNOD, and believes
//! names and attributes for a day. Three things follow: there are no file handles; an unlinked file
//! lives as long as its look-up count; and truncation comes as an ordinary SETATTR, which is why
//! `ATOMIC_O_TRUNC` must never be accepted. `docs/FUSE.md` has the longer reasons.
//!
//! ```no_run
//! # use larder_fs::Filesystem;
//! # fn example(fs: std::sync::Arc<Filesystem>) -> Result<(), Box<dyn std::error::Error>> {
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

mod acl;
pub mod control;
mod deferred;
pub mod errno;
pub mod handler;
pub mod helper;
mod latency;
mod memory;
pub mod mount;
pub mod mount_group;
mod nodes;
mod notify;
mod perm;
mod priority;
pub mod proto;
pub mod records;
pub mod sandbox;
pub mod server;
pub mod sharing;
mod stats;
pub mod subvolumes;
pub mod transport;
mod workers;

pub use helper::{MountHelper, Mounted, mount};
pub use memory::{MODEST_ALLOCATOR, default_cache_size, has_modest_allocator, without_huge_pages};
pub use mount::{MountError, MountOptions, Transport, Unmounter};
pub use mount_group::{JoinError, Member, Remaining};
pub use server::{MountGroup, Served, serve, serve_member};
pub use stats::Stats;
pub use transport::{Ready, ServeError, serve_handler};
