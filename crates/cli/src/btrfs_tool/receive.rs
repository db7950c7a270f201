//! `btrfs receive`: applies a stream to a directory on a mount, or shows it.
//!
//! A stream never leaves its target here, so what btrfs-progs offers against that (`-C`) is only
//! accepted.

use super::{Done, Failed, Global, must_be_directory, reason};
use crate::commands::receive::dump;
use crate::print;
use larder_receive::{Failure, MountedDir, Observer};
use larder_stream::{FirstStream, StreamReader};
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Options {
    /// Read the stream from FILE instead of standard input
    #[arg(short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// End with the first stream
    #[arg(short = 'e')]
    one_stream: bool,
    /// Accepted: nothing outside of the directory is reached in any case
    #[arg(short = 'C', long)]
    chroot: bool,
    /// End after so many commands have failed; 0: go on to the end
    #[arg(short = 'E', long, value_name = "NERR", default_value_t = 1)]
    max_errors: u64,
    /// Accepted
    #[arg(short = 'm', value_name = "ROOTMOUNT")]
    root: Option<PathBuf>,
    /// Unpack compressed data (on a mount it always is)
    #[arg(long)]
    force_decompress: bool,
    /// Show the commands of the stream, and receive nothing
    #[arg(long)]
    dump: bool,
    /// Accepted
    #[arg(short, long)]
    verbose: bool,
    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
    /// Directory on a mount
    #[arg(required_unless_present = "dump", value_name = "MOUNT")]
    target: Option<PathBuf>,
}

pub(super) fn run(options: &Options, global: Global) -> Done {
    let input = open(options)?;
    let target = match &options.target {
        Some(target) if !options.dump => target,
        _ => return Ok(dump::show(StreamReader::new(input))?),
    };
    must_be_directory(target)?;
    let mut to = MountedDir::open(target).map_err(|e| {
        Failed::because(format!("cannot open '{}': {}", target.display(), reason(&e)))
    })?;
    let how = larder_receive::Options {
        max_errors: options.max_errors,
        force_decompress: options.force_decompress,
        ..larder_receive::Options::default()
    };
    let mut teller = Teller { quiet: options.quiet || global.quiet };
    let received = larder_receive::receive(input, &mut to, &how, &mut teller)
        .map_err(|e| Failed::from(anyhow::Error::new(e)))?;
    match (received.bytes, received.errors) {
        (0, _) => Err(Failed::because("empty stream is not considered valid")),
        (_, 0) => Ok(()),
        // They have been told.
        _ => Err(Failed::silently()),
    }
}

/// The stream. With `-e`, what follows the first one is left to the next reader.
fn open(options: &Options) -> Result<Box<dyn Read + Send>, Failed> {
    let input: Box<dyn Read + Send> = match &options.file {
        Some(path) => Box::new(File::open(path).map_err(|e| unopened(path, &e))?),
        None if std::io::stdin().is_terminal() => {
            return Err(Failed::because("a stream cannot be read from a terminal"));
        }
        // Without the buffer of the standard library.
        None => Box::new(
            rustix::io::dup(rustix::stdio::stdin())
                .map(File::from)
                .map_err(|e| Failed::because(e.to_string()))?,
        ),
    };
    Ok(if options.one_stream { Box::new(FirstStream::new(input)) } else { input })
}

fn unopened(path: &Path, error: &std::io::Error) -> Failed {
    Failed::because(format!("cannot open '{}': {}", path.display(), reason(error)))
}

/// Says what btrfs-progs says meanwhile.
struct Teller {
    quiet: bool,
}

impl Observer for Teller {
    fn announces(&mut self, name: &[u8], incremental: bool) {
        let name = print::name(name);
        match (self.quiet, incremental) {
            (true, _) => {}
            (false, false) => print::say(&format!("At subvol {name}")),
            // There, this line alone goes to standard output.
            (false, true) => drop(print::line(&format!("At snapshot {name}"))),
        }
    }

    fn failed(&mut self, failure: &Failure) {
        Failed::because(failure.to_string()).say();
    }
}
