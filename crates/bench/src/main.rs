//! `larder-bench`: the same workloads on the kernel's btrfs and on Larder, in one run, in turn.
//!
//! What makes the comparison fair is spread over the modules: [`target`] gives both sides the same file, zeroed, with the same
//! file system on it; [`workload`] times through the unmount and starts every reading step cold; [`measure`] counts
//! the whole machine's CPU and everybody's memory; [`report`] prints ratios with their range, the kernel against itself as the noise, and
//! the ceiling beside them: an in-memory server over the same transport.

mod daemon;
mod measure;
mod report;
mod source;
mod target;
mod workload;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use target::Target;
use workload::Workload;

#[derive(Parser)]
#[command(about, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    run: Run,
}

#[derive(Subcommand)]
enum Role {
    /// Serves a mount; used by the benchmark itself.
    #[command(hide = true)]
    Serve(daemon::Serve),
}

/// What to run.
#[derive(Args, Clone, Debug)]
pub(crate) struct Run {
    /// Rounds; medians and ranges are over these.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Directory for the image and the source archive; its disk is what is measured.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Archive to unpack (plain tar); otherwise that of the package linux-source is used, or one is made up.
    #[arg(long)]
    tar: Option<PathBuf>,
    /// MiB of the image.
    #[arg(long, default_value_t = 6144)]
    image_mib: u64,
    /// MiB of the file that is written and read in sequence.
    #[arg(long, default_value_t = 1024)]
    stream_mib: u64,
    /// Workloads (all of them by default).
    #[arg(long, value_enum, value_delimiter = ',')]
    workloads: Vec<Workload>,
    /// Who takes part (everybody by default).
    #[arg(long, value_enum, value_delimiter = ',')]
    targets: Vec<Target>,
    /// Where the report goes; the plots lie beside it.
    #[arg(long, default_value = "docs/BENCHMARKS.md")]
    out: PathBuf,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.role {
        Some(Role::Serve(serve)) => serve.run(),
        None => run(cli.run),
    }
}

fn run(mut run: Run) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the kernel's btrfs needs root to be mounted, and caches need root to be dropped");
    }
    if run.workloads.is_empty() {
        run.workloads = vec![Workload::Tree, Workload::Stream];
    }
    if run.targets.is_empty() {
        run.targets = Target::ALL.to_vec();
    }
    let tree = run.workloads.contains(&Workload::Tree).then(|| source::archive(&run)).transpose()?;
    let machine = measure::Machine::look(&run.dir)?;
    let mut results = Vec::new();
    for round in 0..run.rounds {
        let mut order = run.targets.clone();
        if round % 2 == 1 {
            order.reverse();
        }
        for target in order {
            for workload in &run.workloads {
                eprintln!("round {} of {}: {} on {}", round + 1, run.rounds, workload, target.name());
                let bench = workload::Bench { run: &run, target, round, archive: tree.as_ref() };
                let steps =
                    bench.run(*workload).with_context(|| format!("{workload} on {}", target.name()))?;
                for s in &steps {
                    eprintln!("  {:<16} {:>8.2} s  {:>6.2} s CPU", s.step, s.seconds, s.cpu_seconds);
                }
                results.extend(steps);
            }
        }
    }
    report::write(&run, &machine, tree.as_ref(), &results)
}
