//! Checks of the repository that no standard tool makes: `cargo run -p xtask -- tidy`.
//!
//! They are rules that were agreed on once and would be broken silently otherwise. Each finding is
//! one line that names the place; the exit code is 1 if there is any.

mod directions;
mod documents;
mod faults;
mod lexer;
mod order;
mod prose;
mod tidy;
mod units;
mod width;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(about = "Checks of the repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Sizes, widths, essays, prose, units, white space, links, leftovers, directions of
    /// dependencies, faults without a test
    Tidy,
}

fn main() -> ExitCode {
    match run() {
        Ok(findings) if findings.is_empty() => ExitCode::SUCCESS,
        Ok(findings) => {
            for finding in &findings {
                eprintln!("{finding}");
            }
            eprintln!("{} to mend", findings.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<Vec<String>> {
    let root = root()?;
    match Arguments::parse().task {
        Task::Tidy => {
            Ok([tidy::check(&root)?, directions::check(&root)?, faults::check(&root)?].concat())
        }
    }
}

/// Top of the repository.
fn root() -> Result<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("xtask lies in the repository")?.to_owned())
}
