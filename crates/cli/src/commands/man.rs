//! `larder man`: manual pages for `make install`.

use crate::args::Cli;
use anyhow::Context;
use clap::CommandFactory;
use std::path::{Path, PathBuf};

/// Write the manual pages into a directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder man /usr/local/share/man/man1")]
pub(crate) struct Args {
    /// Directory, made if necessary
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let dir = &args.directory;
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let mut top = Cli::command();
    top.build();
    page(dir, &top, "larder")?;
    for c in top.get_subcommands().filter(|c| !c.is_hide_set()) {
        page(dir, c, &format!("larder-{}", c.get_name()))?;
    }
    Ok(())
}

fn page(dir: &Path, command: &clap::Command, name: &str) -> anyhow::Result<()> {
    // clap wants names that live as long as the program; there are some fifteen.
    let leaked: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone().name(leaked)).render(&mut text)?;
    let path = dir.join(format!("{name}.1"));
    std::fs::write(&path, text).with_context(|| path.display().to_string())
}
