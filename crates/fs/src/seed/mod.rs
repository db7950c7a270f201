//! Seeds: file systems upon which others are built.
//!
//! A file system that is marked as a seed is never written again, so many others may be built upon
//! it at the same time. Each of them has the seed's devices among its own, and goes on from the
//! seed's trees: what is changed goes to its own devices. Which devices are seeds is known by the
//! fsid in their items and superblocks (`larder_volume::Assembly`). Block groups of which a part
//! lies on a seed are closed and frozen for good ([`crate::space`]). When everything in them was
//! changed or relocated, the seed can be removed as any other device.
//!
//! | module | decision it hides |
//! |---|---|
//! | `mark` | how a file system becomes a seed |
//! | `sprout` | how a new file system is built upon one |

mod mark;
mod sprout;

pub use mark::set_seed;
pub use sprout::sprout;
