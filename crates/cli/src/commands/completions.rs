//! `larder completions`: completion scripts for `make install`.

use crate::args::Cli;
use clap::CommandFactory;
use clap_complete::Shell;

/// Print a completion script for a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder completions bash > /usr/share/bash-completion/completions/larder")]
pub(crate) struct Args {
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "larder", &mut text);
    crate::print::line(&String::from_utf8_lossy(&text))
}
