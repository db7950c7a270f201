//! `larder assets`: manual pages and completion scripts for `make install`, made from the command
//! line's definition.

use anyhow::Context;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Write manual pages and shell completions into a directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder assets target/assets")]
pub(crate) struct Args {
    /// Directory, made if necessary; gets `man` and `completions`
    directory: PathBuf,
}

/// `whole` makes the definition of the whole command line.
pub(crate) fn run(args: &Args, whole: fn() -> clap::Command) -> anyhow::Result<()> {
    let (man, completions) = (args.directory.join("man"), args.directory.join("completions"));
    for dir in [&man, &completions] {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    let mut top = whole();
    top.build();
    page(&man, &top, "larder")?;
    for c in top.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        let name = format!("larder-{}", c.get_name());
        page(&man, c, &name)?;
        for below in c.get_subcommands().filter(|b| b.get_name() != "help") {
            page(&man, below, &format!("{name}-{}", below.get_name()))?;
        }
    }
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut whole(), "larder", &completions)
            .with_context(|| completions.display().to_string())?;
    }
    Ok(())
}

fn page(dir: &Path, command: &clap::Command, name: &str) -> anyhow::Result<()> {
    // clap wants names that live as long as the program; there are some thirty.
    let leaked: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone().name(leaked)).render(&mut text)?;
    let path = dir.join(format!("{name}.1"));
    std::fs::write(&path, text).with_context(|| path.display().to_string())
}
