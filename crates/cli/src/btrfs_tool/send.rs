//! `btrfs send`: a stream that the daemon of the mount writes ([`crate::on_mount::send`]).

use super::mounted::must_be_subvolume;
use super::{Done, Failed, Global, reason};
use crate::on_mount::send::{How, Paths, send_streams};
use crate::print;
use larder_stream::Protocol;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// One stream with one end, also for several subvolumes
    #[arg(short = 'e')]
    joined: bool,
    /// Send differences from this snapshot
    #[arg(short, value_name = "PARENT")]
    parent: Option<PathBuf>,
    /// A snapshot that the receiver has, to clone from
    #[arg(short, value_name = "CLONE-SRC")]
    clone_sources: Vec<PathBuf>,
    /// Write to this file instead of standard output
    #[arg(short, value_name = "OUTFILE")]
    file: Option<PathBuf>,
    /// Send no data, but say which ranges of files differ
    #[arg(long)]
    no_data: bool,
    /// Protocol; 0: the newest
    #[arg(long, value_name = "N")]
    proto: Option<u32>,
    /// Send compressed data as it is
    #[arg(long)]
    compressed_data: bool,
    /// Accepted
    #[arg(short, long)]
    verbose: bool,
    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
    #[arg(required = true, value_name = "SUBVOL")]
    subvolumes: Vec<PathBuf>,
}

pub(super) fn run(options: Options, global: Global) -> Done {
    let protocol = protocol(&options)?;
    let all = options.parent.iter().chain(&options.clone_sources).chain(&options.subvolumes);
    for path in all {
        must_be_read_only(path)?;
    }
    let mut out = open(options.file.as_deref())?;
    if !options.quiet && !global.quiet {
        for path in &options.subvolumes {
            print::say(&format!("At subvol {}", print::path(path)));
        }
    }
    let how = How {
        protocol,
        options: larder_send::Options {
            compressed_data: options.compressed_data,
            no_data: options.no_data,
        },
        joined: options.joined,
    };
    let paths = Paths {
        subvolumes: options.subvolumes,
        parent: options.parent,
        clones: options.clone_sources,
    };
    send_streams(&paths, how, &mut *out, &mut |_| ())?;
    Ok(())
}

fn protocol(options: &Options) -> Result<Protocol, Failed> {
    let newest = Protocol::V2;
    let wanted = match options.proto {
        None if options.compressed_data => newest.number(),
        None => Protocol::V1.number(),
        Some(0) => newest.number(),
        Some(number) => number,
    };
    let Some(protocol) = Protocol::from_number(wanted) else {
        let newest = newest.number();
        return Err(Failed::because(format!(
            "requested protocol version {wanted}, but the highest supported one is {newest}"
        )));
    };
    if options.compressed_data && protocol < Protocol::V2 {
        return Err(Failed::because(format!(
            "--compressed-data requires protocol version >= 2 (requested {wanted})"
        )));
    }
    Ok(protocol)
}

fn must_be_read_only(path: &Path) -> Done {
    must_be_subvolume(path)?;
    let read_only = larder_fuse::subvolumes::is_read_only(path)
        .map_err(|e| Failed::because(format!("{}: {}", path.display(), reason(&e))))?;
    if read_only {
        return Ok(());
    }
    Err(Failed::because(format!("subvolume {} is not read-only", path.display())))
}

/// The file, or standard output if that is no terminal.
fn open(file: Option<&Path>) -> Result<Box<dyn Write>, Failed> {
    if let Some(path) = file {
        let made = File::create(path).map_err(|e| {
            Failed::because(format!("cannot create '{}': {}", path.display(), reason(&e)))
        })?;
        return Ok(Box::new(made));
    }
    let out = std::io::stdout();
    if out.is_terminal() {
        let why = "not dumping send stream into a terminal, redirect it into a file";
        return Err(Failed::because(why));
    }
    Ok(Box::new(out.lock()))
}
