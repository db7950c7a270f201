//! The subcommands, one file or folder each: its arguments, and what it does with them.
//!
//! A command uses the modules beside this one, never another command. Only the command line, the
//! mount helper and the `btrfs` habit use commands.

mod assets;
mod backup;
mod balance;
mod build;
mod cat;
pub(crate) mod check;
mod cp;
mod dedupe;
mod device;
mod df;
pub(crate) mod du;
mod extract;
pub(crate) mod inspect;
mod label;
mod ls;
mod map;
mod mkdir;
mod mkfs;
pub(crate) mod mount;
mod property;
pub(crate) mod receive;
mod reflink;
mod rescue;
mod resize;
mod restore;
mod rm;
mod scrub;
mod seed;
mod send;
mod shrink;
mod stats;
mod subvolume;
mod sync;
mod trim;
pub(crate) mod umount;

use anyhow::Context;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Backup(Box<backup::Args>),
    Balance(Box<balance::Args>),
    Build(Box<build::Args>),
    Mkfs(mkfs::Args),
    Mount(mount::Args),
    Umount(umount::Args),
    Sync(sync::Args),
    Stats(stats::Args),
    Ls(ls::Args),
    Cat(cat::Args),
    Cp(cp::Args),
    Extract(extract::Args),
    Receive(receive::Args),
    Reflink(reflink::Args),
    Rm(rm::Args),
    Mkdir(mkdir::Args),
    Label(label::Args),
    Property(property::Args),
    Dedupe(dedupe::Args),
    Device(device::Args),
    Df(df::Args),
    Du(du::Args),
    Trim(trim::Args),
    Inspect(inspect::Args),
    Check(check::Args),
    Scrub(scrub::Args),
    Seed(seed::Args),
    Resize(resize::Args),
    Shrink(shrink::Args),
    Map(map::Args),
    Restore(restore::Args),
    Rescue(rescue::Args),
    Send(send::Args),
    #[command(visible_alias = "sub")]
    Subvolume(subvolume::Args),
    #[command(hide = true)]
    Assets(assets::Args),
}

/// Runs a subcommand. `whole` makes the definition of the whole command line.
pub(crate) fn run(command: Command, whole: fn() -> clap::Command) -> anyhow::Result<()> {
    match command {
        Command::Backup(a) => backup::run(&a),
        Command::Balance(a) => balance::run(&a),
        Command::Build(a) => {
            let map = a.map().map(|(image, picture)| map::Args::of(image, picture));
            map.as_ref().map_or(Ok(false), map::Args::is_html)?;
            build::run(&a)?;
            let drawn = map.map_or(Ok(()), |map| map::run(&map));
            drawn.with_context(|| format!("{} is complete, its map is not", a.image_name()))
        }
        Command::Mkfs(a) => mkfs::run(&a),
        Command::Mount(a) => mount::run(&a),
        Command::Umount(a) => umount::run(&a),
        Command::Sync(a) => sync::run(&a),
        Command::Stats(a) => stats::run(&a),
        Command::Ls(a) => ls::run(&a),
        Command::Cat(a) => cat::run(&a),
        Command::Cp(a) => cp::run(&a),
        Command::Extract(a) => extract::run(&a),
        Command::Rm(a) => rm::run(&a),
        Command::Mkdir(a) => mkdir::run(&a),
        Command::Property(a) => property::run(&a),
        Command::Label(a) => label::run(&a),
        Command::Dedupe(a) => dedupe::run(&a),
        Command::Du(a) => du::run(&a),
        Command::Device(a) => device::run(&a),
        Command::Df(a) => df::run(&a),
        Command::Trim(a) => trim::run(&a),
        Command::Inspect(a) => inspect::run(&a),
        Command::Check(a) => check::run(&a),
        Command::Scrub(a) => scrub::run(&a),
        Command::Seed(a) => seed::run(&a),
        Command::Resize(a) => resize::run(&a),
        Command::Shrink(a) => shrink::run(&a),
        Command::Map(a) => map::run(&a),
        Command::Receive(a) => receive::run(&a),
        Command::Reflink(a) => reflink::run(&a),
        Command::Rescue(a) => rescue::run(&a),
        Command::Restore(a) => restore::run(&a),
        Command::Send(a) => send::run(&a),
        Command::Subvolume(a) => subvolume::run(&a),
        Command::Assets(a) => assets::run(&a, whole),
    }
}
