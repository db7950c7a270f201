//! The command line as a whole: what all commands have in common, and the command that is asked
//! for.

use crate::commands::Command;
use clap::{ArgAction, Parser};

/// btrfs in user space: make, mount, look into and change btrfs images without a kernel driver or
/// root.
#[derive(Debug, Parser)]
#[command(name = "larder", version, max_term_width = 100)]
#[command(after_help = "\
Commands that take IMAGE:PATH use the longest existing file before a colon as
the image. Devices of one file system have commas between them (A,B); those
that lie beside each other are found. `larder COMMAND --help` says more about
each command.
Exit codes: 0 done, 1 failed, 2 wrong usage or could not run.

Example:
  larder mkfs --size 1G disk.img && larder mount disk.img mnt && larder umount mnt")]
pub(crate) struct Cli {
    /// Say more (twice: even more).
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = 900)]
    pub(crate) verbose: u8,
    /// Go on without devices that are missing, if the others have everything.
    ///
    /// Commands that only read do so anyway. `-o degraded` says the same to `mount`.
    #[arg(long, global = true, display_order = 901)]
    pub(crate) degraded: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_an_example() {
        let top = Cli::command();
        let nested = top.get_subcommands().flat_map(clap::Command::get_subcommands);
        for c in top.get_subcommands().chain(nested).filter(|c| !c.is_hide_set()) {
            let help = c.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.contains("Example") && help.contains("larder "),
                "{} has no example",
                c.get_name()
            );
            assert!(c.get_about().is_some(), "{} says not what it does", c.get_name());
        }
    }

    /// clap wraps lines that do not fit, and what was aligned no longer is.
    #[test]
    fn what_stands_below_the_options_fits_a_terminal() {
        let top = Cli::command();
        let nested = top.get_subcommands().flat_map(clap::Command::get_subcommands);
        for c in [&top].into_iter().chain(top.get_subcommands()).chain(nested) {
            for help in [c.get_after_help(), c.get_after_long_help()].into_iter().flatten() {
                for line in help.to_string().lines().filter(|l| l.len() > 80) {
                    // A command line has to stay one.
                    assert!(
                        line.starts_with("  ") && line.contains("larder "),
                        "{}: {line}",
                        c.get_name()
                    );
                }
            }
        }
    }
}
