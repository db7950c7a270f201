//! The `mkfs.btrfs` habit: called by this name, Larder takes the command line of mkfs.btrfs.
//!
//! Programs that make images, such as systemd-repart and mkosi, start `mkfs.btrfs` with options
//! that they expect it to have. With a link of that name on the PATH they use Larder. So the
//! options, the defaults, the exit codes and the shape of the output are those of btrfs-progs 6.14
//! (`options`, `report`), and not those of `larder mkfs`: there is no block group tree by default,
//! an error is always 1, and errors begin with `ERROR:`.
//!
//! `fill` makes a file system that is filled from a directory.

mod fill;
mod options;
mod report;

use crate::image::when_free;
use crate::print;
use crate::source_date::source_date;
use clap::Parser;
use larder_fs::mkfs::{MkfsOptions, MkfsReport, mkfs_on, recognise};
use larder_volume::{Device, FileDevice, OpenMode};
use options::{Arguments, Options, Wish};
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Why nothing was made.
#[derive(Debug)]
enum Refused {
    /// The command line is not understood.
    Usage(String),
    /// Anything else: lines for people.
    Because(Vec<String>),
}

impl Refused {
    fn because(why: String) -> Self {
        Self::Because(vec![why])
    }
}

impl From<anyhow::Error> for Refused {
    fn from(error: anyhow::Error) -> Self {
        let text = crate::failure::text(&error);
        let lines = text.trim_start_matches("larder: ").lines().map(str::to_owned);
        Self::Because(lines.collect())
    }
}

/// Runs with the arguments of the program, its name first.
pub(crate) fn main(argv: Vec<OsString>) -> ExitCode {
    match run(argv) {
        Ok(()) => ExitCode::SUCCESS,
        Err(refused) => {
            match refused {
                Refused::Usage(why) => {
                    print::say(&format!("ERROR: {}", print::harmless(&why)));
                    print::say("usage: mkfs.btrfs [options] <dev>   (--help lists the options)");
                }
                Refused::Because(lines) => {
                    lines
                        .iter()
                        .for_each(|l| print::say(&format!("ERROR: {}", print::harmless(l))));
                }
            }
            ExitCode::from(1)
        }
    }
}

fn run(argv: Vec<OsString>) -> Result<(), Refused> {
    let arguments = Arguments::try_parse_from(argv).map_err(|e| {
        let text = e.to_string();
        let first = text.lines().next().unwrap_or_default();
        Refused::Usage(first.trim_start_matches("error: ").to_owned())
    })?;
    if arguments.help {
        return Ok(print::line(report::HELP)?);
    }
    if arguments.version {
        return Ok(print::line(report::VERSION)?);
    }
    let options = match arguments.wish()? {
        Wish::Make(options) => options,
        Wish::ListFeatures => {
            print::say(&report::features());
            return Ok(());
        }
    };
    if !options.quiet {
        print::line(report::TITLE)?;
    }
    let sizes: Vec<u64> = if let Some(content) = &options.content {
        fill::fill(&options, content)?;
        Vec::new()
    } else {
        make_empty(&options)?.devices.iter().map(|device| device.bytes).collect()
    };
    if !options.quiet {
        report::show(&options, &sizes)?;
    }
    Ok(())
}

fn make_empty(options: &Options) -> Result<MkfsReport, Refused> {
    let opened = options.devices.iter().map(|path| open(path));
    let devices = opened.collect::<Result<Vec<_>, _>>()?;
    for (path, device) in options.devices.iter().zip(&devices) {
        refuse_existing(options, path, device)?;
    }
    let devices: Vec<&dyn Device> = devices.iter().map(|device| device as &dyn Device).collect();
    let made = mkfs_on(
        &devices,
        &MkfsOptions {
            label: options.label.clone(),
            uuid: options.uuid,
            device_uuid: options.device_uuid,
            bytes: options.bytes,
            metadata: options.metadata,
            data: options.data,
            csum: options.csum,
            nodesize: options.nodesize,
            features: options.features,
            time: source_date()?,
            root_owner: (0, 0),
            force: true,
            discard: options.discard,
        },
    );
    made.map_err(|e| Refused::because(format!("{}: {e}", options.devices[0].display())))
}

fn open(path: &Path) -> Result<FileDevice, Refused> {
    let opened = when_free(path, || FileDevice::open(path, OpenMode::Write));
    opened.map_err(|e| Refused::because(e.to_string()))
}

/// What is there already is overwritten only with `-f`.
fn refuse_existing(options: &Options, path: &Path, device: &FileDevice) -> Result<(), Refused> {
    let Some(found) = recognise(device).filter(|_| !options.force) else { return Ok(()) };
    let path = path.display();
    Err(Refused::Because(vec![
        format!("{path} appears to contain an existing filesystem ({found})"),
        format!("use the -f option to force overwrite of {path}"),
    ]))
}
