//! The `btrfs` habit: called by this name, Larder takes the command lines of btrfs-progs 6.14.
//!
//! Backup programs and scripts start `btrfs subvolume snapshot` and read what `btrfs subvolume
//! list` prints. A link of that name on the PATH, and they work on a Larder mount. So the words,
//! the options, the exit codes and the lines of the output are those of btrfs-progs, and not those
//! of the commands of Larder, which stay free to be better.
//!
//! Paths are paths on a Larder mount. Where btrfs-progs takes a device, an image file will do. A
//! path elsewhere is refused, also on a btrfs of the kernel. What Larder cannot do is refused with
//! the name of what does it instead ([`elsewhere`]). One module per group of commands; `mounted`
//! and `units` serve all of them. docs/BTRFS-COMMAND.md lists what differs.

mod balance;
mod check;
mod device;
mod du;
mod dump_items;
mod dump_tree;
mod elsewhere;
mod filesystem;
mod inspect;
mod mounted;
mod options;
mod property;
mod receive;
mod replace;
mod scrub;
mod send;
mod status;
mod subvolume;
mod subvolume_list;
mod superblock;
mod units;
mod usage;

use crate::{failure, print};
use clap::error::ErrorKind;
use options::{Arguments, Group};
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Why a command failed: what is printed behind `ERROR:`, and the exit code.
#[derive(Debug)]
struct Failed {
    code: u8,
    lines: Vec<String>,
}

type Done = Result<(), Failed>;

impl Failed {
    fn because(why: impl Into<String>) -> Self {
        Self { code: 1, lines: vec![why.into()] }
    }

    /// Everything has been said already.
    fn silently() -> Self {
        Self { code: 1, lines: Vec::new() }
    }

    fn and(mut self, line: impl Into<String>) -> Self {
        self.lines.push(line.into());
        self
    }

    fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    fn say(&self) {
        self.lines.iter().for_each(|line| print::say(&format!("ERROR: {}", print::harmless(line))));
    }
}

impl From<anyhow::Error> for Failed {
    fn from(error: anyhow::Error) -> Self {
        let text = failure::text(&error);
        let lines = text.trim_start_matches("larder: ").lines().map(str::to_owned);
        Self { code: 1, lines: lines.collect() }
    }
}

/// What all commands get from the words in front of the group.
#[derive(Clone, Copy, Debug)]
struct Global {
    quiet: bool,
    json: bool,
    dry_run: bool,
}

/// Does it with each; one that fails does not keep the others from being done.
fn each<T>(all: &[T], mut doing: impl FnMut(&T) -> Done) -> Done {
    let mut result = Ok(());
    for one in all {
        if let Err(failed) = doing(one) {
            failed.say();
            result = Err(Failed { lines: Vec::new(), ..failed });
        }
    }
    result
}

/// Fails for anything but a directory on a Larder mount.
fn must_be_directory(path: &Path) -> Done {
    match path.metadata() {
        Err(e) => {
            let why = format!("cannot access '{}': {}", path.display(), reason(&e));
            Err(Failed::because(why))
        }
        Ok(meta) if !meta.is_dir() => {
            Err(Failed::because(format!("not a directory: {}", path.display())))
        }
        Ok(_) => mounted::must_be_larder(path),
    }
}

/// An error of the system in the words of the system, without its number.
fn reason(error: &std::io::Error) -> String {
    failure::without_numbers(&error.to_string())
}

/// Runs with the arguments of the program, its name first.
pub(crate) fn main(argv: Vec<OsString>) -> ExitCode {
    match run(argv) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            failed.say();
            ExitCode::from(failed.code)
        }
    }
}

fn run(argv: Vec<OsString>) -> Done {
    let arguments = match Arguments::of(argv) {
        Ok(arguments) => arguments,
        Err(e) if e.kind() == ErrorKind::DisplayHelp => {
            return Ok(print::unless_closed(print::line(e.to_string().trim_end()))?);
        }
        Err(e) => {
            print::say(e.to_string().trim_start_matches("error: ").trim_end());
            return Err(Failed::silently());
        }
    };
    let Some((global, group)) = arguments.split()? else {
        return Ok(print::line(options::VERSION)?);
    };
    match done(group, global) {
        // The reader of the output has what it wanted.
        Err(failed) if failed.lines.iter().any(|line| line.contains("Broken pipe")) => Ok(()),
        result => result,
    }
}

fn done(group: Group, global: Global) -> Done {
    match group {
        Group::Subvolume(what) => subvolume::run(what, global),
        Group::Filesystem(what) => filesystem::run(what, global),
        Group::Device(what) => device::run(what, global),
        Group::Property(what) => property::run(what),
        Group::InspectInternal(what) => inspect::run(what),
        Group::Balance(what) => balance::run(what, global.quiet),
        Group::Scrub(what) => scrub::run(what, global),
        Group::Replace(what) => replace::run(what),
        Group::Qgroup(what) => status::qgroup(what),
        Group::Check(options) => check::check(&options),
        Group::Rescue(what) => check::rescue(what),
        Group::Quota(_) => elsewhere::refuse("quota"),
        Group::Restore(_) => elsewhere::refuse("restore"),
        Group::Send(options) => send::run(options, global),
        Group::Receive(options) => receive::run(&options, global),
        Group::Help(_) => Ok(print::line(&Arguments::help())?),
        Group::Version => Ok(print::line(options::VERSION)?),
    }
}
