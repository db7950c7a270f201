//! A file system of the engine as a mount: the FUSE protocol, its transports, and the server between it and
//! [`larder_fs::Filesystem`].

pub mod acl;
pub mod control;
pub mod errno;
pub mod handler;
pub mod memserver;
pub mod mount;
pub mod nodes;
pub mod perm;
pub mod proto;
pub mod records;
pub mod server;
pub mod stats;
pub mod transport;
mod workers;

pub use mount::{MountError, MountOptions, Mounted, Unmounter, mount};
pub use server::{Served, serve};
pub use stats::Stats;
pub use transport::{Ready, ServeError, Transport, serve_handler};
