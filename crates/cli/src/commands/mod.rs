//! The subcommands, one file each: its arguments, and what it does with them.

pub(crate) mod assets;
pub(crate) mod cat;
pub(crate) mod check;
pub(crate) mod cp;
pub(crate) mod dedupe;
pub(crate) mod df;
pub(crate) mod du;
pub(crate) mod inspect;
pub(crate) mod label;
pub(crate) mod ls;
pub(crate) mod map;
pub(crate) mod mkdir;
pub(crate) mod mkfs;
pub(crate) mod mount;
pub(crate) mod property;
pub(crate) mod reflink;
pub(crate) mod rescue;
pub(crate) mod restore;
pub(crate) mod rm;
pub(crate) mod stats;
pub(crate) mod subvolume;
pub(crate) mod sync;
pub(crate) mod trim;
pub(crate) mod umount;

use crate::args::Command;

/// Runs a subcommand.
pub(crate) fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Mkfs(a) => mkfs::run(&a),
        Command::Mount(a) => mount::run(&a),
        Command::Umount(a) => umount::run(&a),
        Command::Sync(a) => sync::run(&a),
        Command::Stats(a) => stats::run(&a),
        Command::Ls(a) => ls::run(&a),
        Command::Cat(a) => cat::run(&a),
        Command::Cp(a) => cp::run(&a),
        Command::Rm(a) => rm::run(&a),
        Command::Mkdir(a) => mkdir::run(&a),
        Command::Property(a) => property::run(&a),
        Command::Label(a) => label::run(&a),
        Command::Dedupe(a) => dedupe::run(&a),
        Command::Du(a) => du::run(&a),
        Command::Df(a) => df::run(&a),
        Command::Trim(a) => trim::run(&a),
        Command::Inspect(a) => inspect::run(&a),
        Command::Check(a) => check::run(&a),
        Command::Map(a) => map::run(&a),
        Command::Reflink(a) => reflink::run(&a),
        Command::Rescue(a) => rescue::run(&a),
        Command::Restore(a) => restore::run(&a),
        Command::Subvolume(a) => subvolume::run(&a),
        Command::Assets(a) => assets::run(&a),
    }
}
