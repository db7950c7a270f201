//! `larder inspect`: the structures of an image, as they lie on disk.
//!
//! The image may be broken. So the command reads blocks without the engine ([`crate::raw`]), goes
//! on after those that it cannot read, reports them, and then ends with exit code 1. One module per
//! question:
//!
//! | module | question |
//! |---|---|
//! | `supers` | what do the superblocks say? |
//! | `trees` | what is in this tree, or block? Where do addresses lie? |
//! | `items` | what does this item hold? |
//! | `groups` | how full are the block groups? |
//! | `owners` | which files use this address? By back references, up through snapshots |
//! | `paths` | what is this inode called, and what has this name? |
//! | `extent`, `inode` | the answers for people and programs |
//! | `log` | what waits to be replayed? |
//!
//! `common` has the arguments of all of them.

mod common;
mod extent;
mod groups;
mod inode;
mod items;
mod log;
mod owners;
mod paths;
mod supers;
mod trees;

pub(crate) use extent::uses_of;

use common::{Common, devices};

/// Show the structures of an image: superblocks, trees, chunks, block groups; which files use an
/// address; where a file lies.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder inspect super disk.img
  larder inspect tree --tree root disk.img
  larder inspect files-at disk.img 30441472
  larder inspect inode disk.img:/etc/passwd")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// All copies of the superblock, on all devices
    #[command(after_help = "Example:\n  larder inspect super disk.img")]
    Super(Common),
    /// The blocks and items of a tree
    #[command(
        after_help = "Examples:\n  larder inspect tree --tree fs disk.img\n  larder inspect tree \
            --block 30441472 disk.img"
    )]
    Tree(trees::Args),
    /// Where the logical address space lies on the device
    #[command(after_help = "Example:\n  larder inspect chunks disk.img")]
    Chunks(Common),
    /// The block groups, and how much of each is used
    #[command(after_help = "Example:\n  larder inspect block-groups --json disk.img")]
    BlockGroups(Common),
    /// The extent at an address: its kind, place and references as recorded
    #[command(after_help = "Example:\n  larder inspect extent disk.img 30441472")]
    Extent(extent::Args),
    /// Where a file lies: its extents, copies, compression, sharing, fragments
    #[command(
        after_help = "Examples:\n  larder inspect inode disk.img:/etc/passwd\n  larder inspect \
            inode --subvolid 5 --number 257 disk.img"
    )]
    Inode(inode::Args),
    /// Which files, in which subvolumes and snapshots, use an address
    #[command(
        after_help = "Examples:\n  larder inspect files-at disk.img 30441472\n  larder inspect \
            files-at --physical disk.img 38797312"
    )]
    FilesAt(extent::Args),
    /// What was fsynced after the last commit and waits to be replayed
    #[command(after_help = "Example:\n  larder inspect log disk.img")]
    Log(Common),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::Super(c) => supers::run(&devices(&c.image, &c.how)?, c.how.json),
        What::Tree(a) => trees::tree(a),
        What::Chunks(c) => trees::chunks(c),
        What::BlockGroups(c) => groups::run(c),
        What::Extent(a) => extent::extent(a),
        What::Inode(a) => inode::run(a),
        What::FilesAt(a) => extent::files_at(a),
        What::Log(c) => log::run(c),
    }
}
