//! The `larder` command.
//!
//! Only this crate talks to people: it parses arguments, prints, asks nothing, and turns errors
//! into sentences, hints and exit codes. Each subcommand is one file or folder of `commands`. What
//! several of them need has a module here, which uses no command.
//!
//! The same binary is the mount helper: called as `mount.fuse.larder` or `umount.fuse.larder` it
//! follows the conventions of mount(8) instead (module `helper`). Called as `mkfs.btrfs` or `btrfs`
//! it takes the command line of that program (modules `mkfs_btrfs` and `btrfs_tool`).
//!
//! The crate is a library with a small program around it, so that fuzzers can call subcommands
//! without starting a process for each. It is meant for no other user.

mod args;
mod attach;
mod btrfs_tool;
mod commands;
mod conduit;
mod copy;
mod device_changes;
mod device_figures;
mod device_orders;
mod devices;
mod failure;
mod files;
mod format_options;
mod helper;
mod image;
mod interrupt;
mod jobs;
mod log;
mod mkfs_btrfs;
mod mount_options;
mod mount_table;
mod mounted;
mod on_mount;
mod print;
mod raw;
mod receiving;
mod select;
mod size;
mod source_date;
mod state;
mod streams;
mod subvolumes;
mod target;
mod utab;
mod watched;

use args::Cli;
use clap::{CommandFactory, Parser};
use std::ffi::OsString;
use std::process::ExitCode;

/// The program: reads its arguments, runs, and says how it ended.
#[must_use]
pub fn main() -> ExitCode {
    let mut argv = std::env::args_os().peekable();
    let name = argv.peek().map(|a| std::path::Path::new(a).file_name().unwrap_or(a).to_owned());
    match name.as_deref().and_then(|n| n.to_str()) {
        Some("mount.fuse.larder" | "mount.fuseblk.larder" | "mount.larder") => {
            log::start(0);
            return helper::mount(argv.skip(1).collect());
        }
        Some("umount.fuse.larder" | "umount.fuseblk.larder" | "umount.larder") => {
            log::start(0);
            return helper::umount(argv.skip(1).collect());
        }
        Some("mkfs.btrfs") => {
            log::start(0);
            return mkfs_btrfs::main(argv.collect());
        }
        Some("btrfs") => {
            log::start(0);
            return btrfs_tool::main(argv.collect());
        }
        _ => {}
    }
    let cli = Cli::parse();
    log::start(cli.verbose);
    if cli.degraded {
        image::allow_degraded();
    }
    match commands::run(cli.command, Cli::command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failure::report(&e),
    }
}

/// Runs a command line (the program's name first) in this process. What it prints goes to standard
/// output; its error comes back as the lines that people would have seen.
///
/// # Errors
/// Those lines: the command line is not understood, or the command failed.
pub fn run(argv: impl IntoIterator<Item = OsString>) -> Result<(), String> {
    let cli = Cli::try_parse_from(argv).map_err(|e| e.to_string())?;
    commands::run(cli.command, Cli::command).map_err(|e| failure::text(&e))
}
