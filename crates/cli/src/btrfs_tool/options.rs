//! The command line up to the group, as btrfs-progs 6.14 has it.
//!
//! Words may be cut short as long as they stay unambiguous, options may stand anywhere behind the
//! command, and a later one overrides an earlier one. `-h` is a unit there, so help is `--help`.

use super::elsewhere::Anything;
use super::{
    Failed, Global, balance, check, device, filesystem, inspect, property, receive, replace, scrub,
    send, status, subvolume,
};
use clap::{Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;

pub(super) const VERSION: &str = concat!(
    "btrfs-progs v6.14 (command lines; this is larder ",
    env!("CARGO_PKG_VERSION"),
    ")\n-EXPERIMENTAL -INJECT -STATIC +LZO +ZSTD -UDEV -FSVERITY -ZONED CRYPTO=builtin"
);

/// btrfs on Larder mounts and images, with the command lines of btrfs-progs 6.14.
#[derive(Debug, Parser)]
#[command(
    name = "btrfs",
    disable_help_flag = true,
    disable_version_flag = true,
    disable_help_subcommand = true,
    args_override_self = true,
    infer_long_args = true,
    infer_subcommands = true,
    max_term_width = 100
)]
#[command(after_help = "\
Paths are on a mount made by `larder mount`; where a device is wanted, an image
file will do. Other file systems are refused.

Example:
  btrfs subvolume snapshot -r mnt/home mnt/home-monday")]
pub(super) struct Arguments {
    /// text, or json where the command supports it
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    format: String,
    /// Say more
    #[arg(short, long, action = ArgAction::Count)]
    verbose: u8,
    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
    /// default, info, verbose, debug or quiet
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Say what would be done, where the command supports it
    #[arg(long)]
    dry_run: bool,
    /// Print the version
    #[arg(long)]
    version: bool,
    #[command(subcommand)]
    group: Option<Group>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Group {
    /// Move chunks, or convert them
    #[command(subcommand)]
    Balance(balance::What),
    /// Check an image
    Check(check::Options),
    /// Devices of the file system
    #[command(subcommand)]
    Device(device::What),
    /// Space, label, sync
    #[command(subcommand)]
    Filesystem(filesystem::What),
    /// Look into structures
    #[command(subcommand)]
    InspectInternal(inspect::What),
    /// Properties of files, subvolumes, the file system
    #[command(subcommand)]
    Property(property::What),
    /// Quota groups (there are none)
    #[command(subcommand)]
    Qgroup(status::Qgroup),
    /// Not supported
    Quota(Anything),
    /// Receive a stream
    Receive(receive::Options),
    /// Replace a device
    #[command(subcommand)]
    Replace(replace::Replace),
    /// Last resorts
    #[command(subcommand)]
    Rescue(check::Rescue),
    /// See `larder restore`
    Restore(Anything),
    /// Verify and repair everything that is stored
    #[command(subcommand)]
    Scrub(scrub::What),
    /// Send snapshots
    Send(send::Options),
    /// Make, delete, list subvolumes
    #[command(subcommand)]
    Subvolume(subvolume::What),
    /// Print help
    Help(Anything),
    /// Print the version
    Version,
}

impl Arguments {
    pub(super) fn of(argv: Vec<OsString>) -> Result<Self, clap::Error> {
        let matches = with_help(Self::command()).try_get_matches_from(argv)?;
        Self::from_arg_matches(&matches)
    }

    pub(super) fn help() -> String {
        Self::command().render_help().to_string()
    }

    /// The group and what stood before it; nothing if the version is asked for.
    pub(super) fn split(self) -> Result<Option<(Global, Group)>, Failed> {
        if self.version {
            return Ok(None);
        }
        let json = match self.format.as_str() {
            "text" => false,
            "json" => true,
            other => {
                let why = format!("invalid output format \"{other}\"");
                return Err(Failed::because(why).and("formats are text, json"));
            }
        };
        let quiet = self.quiet || self.log.as_deref() == Some("quiet");
        let Some(group) = self.group else {
            return Err(Failed::because("no command is given").and("`btrfs --help` lists them"));
        };
        if json && !has_json(&group) {
            let why = "output format json is unsupported for this command";
            return Err(Failed::because(why));
        }
        Ok(Some((Global { quiet, json, dry_run: self.dry_run }, group)))
    }
}

fn has_json(group: &Group) -> bool {
    matches!(
        group,
        Group::Filesystem(filesystem::What::Df(_)) | Group::Device(device::What::Stats(_))
    )
}

/// Gives each command `--help`, without the short form.
fn with_help(command: clap::Command) -> clap::Command {
    let help = Arg::new("help").long("help").action(ArgAction::Help).help("Print help");
    command.arg(help).mut_subcommands(with_help)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::of(std::iter::once("btrfs").chain(line.split(' ')).map(Into::into).collect())
    }

    #[test]
    fn the_command_line_is_consistent() {
        with_help(Arguments::command()).debug_assert();
    }

    #[test]
    fn words_may_be_cut_short() {
        for line in ["subv l x", "su list x", "fi us x", "f df x", "i rootid x", "prop g x"] {
            assert!(parsed(line).is_ok(), "{line}");
        }
        for line in [
            "s l x",
            "re x",
            "receive",
            "receive a b",
            "send",
            "bogus",
            "subvolume bogus x",
            "subvolume s x",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn options_stand_anywhere() {
        for line in [
            "-q subvolume delete x -c y",
            "subvolume list x -o -t",
            "--form json fi df -h x",
            "subvolume snapshot a -r b",
            "filesystem resize -10M x",
            "send -p a -f out b",
            "send b -e -c a --proto 2 --no-data -c c --compressed-data",
            "receive dir -e -f in -E 0 -C -m /mnt --force-decompress",
            "receive --dump -f in",
        ] {
            assert!(parsed(line).is_ok(), "{line}: {:?}", parsed(line).err());
        }
    }
}
