//! `larder inspect`: the structures of an image, as they lie on disk.
//!
//! Meant for images that may be broken: it reads blocks itself instead of opening the file system,
//! goes on after what it cannot read, says so, and ends with exit code 1 then. One module per
//! question:
//!
//! | module | question |
//! |---|---|
//! | `supers` | what do the superblocks say? |
//! | `trees` | what is in this tree, or block? Where do addresses lie? |
//! | `items` | what does this item hold? |
//! | `groups` | how full are the block groups? |
//! | `owners` | who uses this address? By back references, up through snapshots |
//! | `paths` | what is this inode called, and what has this name? |
//! | `extent`, `inode` | the answers for people and programs |
//! | `log` | what waits to be replayed? |

mod extent;
mod groups;
mod inode;
mod items;
pub(crate) mod log;
mod owners;
mod paths;
mod supers;
mod trees;

use crate::failure::Advise;
use crate::image::{self, Access, advise_content, open_device};
use crate::print;
use anyhow::bail;
use larder_restore::{Gap, Loss, Observer, Options, Reader, Trees, When, points};
use larder_volume::Device;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use groups::{Group, percent, read_groups};
pub(crate) use trees::type_text;

/// Show the structures of an image: superblocks, trees, chunks, block groups; whose an address is;
/// where a file lies.
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

/// What every kind has.
#[derive(Debug, clap::Args)]
struct Common {
    /// Image file or block device
    image: PathBuf,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, clap::Args)]
struct How {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read the image even if somebody is using it
    #[arg(long)]
    force: bool,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// All copies of the superblock
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
        What::Super(c) => {
            let device = device(&c.image, &c.how)?;
            advise_content(supers::run(&*device, c.how.json), &*device)
        }
        What::Tree(a) => trees::tree(a),
        What::Chunks(c) => trees::chunks(c),
        What::BlockGroups(c) => groups::run(c),
        What::Extent(a) => extent::extent(a),
        What::Inode(a) => inode::run(a),
        What::FilesAt(a) => extent::files_at(a),
        What::Log(c) => log::run(c),
    }
}

fn device(image: &Path, how: &How) -> anyhow::Result<Arc<dyn Device>> {
    Ok(open_device(image, Access::Read { force: how.force })?)
}

/// Collects what could not be read, in words.
#[derive(Debug, Default)]
pub(crate) struct Problems(Mutex<Vec<String>>);

/// Problems that are kept; more are counted.
const MOST_PROBLEMS: usize = 1000;

impl Observer for Problems {
    fn note(&self, text: &str) {
        self.add(text.to_owned());
    }
    fn loss(&self, loss: &Loss) {
        self.add(loss.what.clone());
    }
}

impl Problems {
    pub(crate) fn add(&self, text: String) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The same node is often needed more than once.
        if all.len() < MOST_PROBLEMS && !all.contains(&text) {
            all.push(text);
        }
    }

    pub(crate) fn gaps(&self, gaps: Vec<Gap>) {
        for gap in gaps {
            self.add(gap.why);
        }
    }

    /// Says what could not be read.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        let all = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for p in &all {
            print::say(&format!("larder: {}", print::harmless(p)));
        }
        match all.len() {
            0 => Ok(()),
            n => bail!("{}: what is shown is not everything", print::number(n as u64, "problem")),
        }
    }
}

/// An image, read without the engine.
pub(crate) struct Session<'a> {
    pub(crate) reader: &'a Reader<'a>,
    pub(crate) trees: Trees,
    pub(crate) problems: &'a Problems,
}

/// Opens an image, asks, and ends with what could not be read.
pub(crate) fn session(
    device: Arc<dyn Device>,
    ask: impl FnOnce(&Session<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    with_reader(device, |reader, problems| ask(&open_trees(reader, problems)?))
}

/// As [`session`], without looking at any tree but that of the chunks.
fn with_reader(
    device: Arc<dyn Device>,
    ask: impl FnOnce(&Reader<'_>, &Problems) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let problems = Problems::default();
    let options = Options { super_copy: None, scan: false };
    let opened = Reader::open(Arc::clone(&device), options, &problems).could_not_run();
    let reader = advise_content(opened, &*device)?;
    if reader.superblock().metadata_dump().is_some() {
        image::note_dump(&reader.device().name());
    }
    ask(&reader, &problems)?;
    drop(reader);
    problems.finish()
}

/// Reads the root tree.
fn open_trees<'a>(reader: &'a Reader<'a>, problems: &'a Problems) -> anyhow::Result<Session<'a>> {
    let point = points::choose(reader, When::Newest).could_not_run()?;
    let mut trees = Trees::open(reader, point, point.generation, false);
    problems.gaps(std::mem::take(&mut trees.gaps));
    Ok(Session { reader, trees, problems })
}
