//! `larder-bench`: the same workloads on the kernel's btrfs and on Larder, in one run, in turn.
//!
//! Several modules together make the comparison fair:
//!
//! - [`target`] gives both sides the same file, full of zeros, with a file system of the same
//!   shape.
//! - [`case`] brings the image into the same state for both.
//! - [`workload`] times through the unmount, starts every cold step cold, and looks whether what
//!   was written is there.
//! - [`measure`] counts the CPU time of the whole machine, and the memory of each side.
//! - [`ratio`] compares round by round. The kernel against itself is the noise.
//!
//! Beside both stands the ceiling: a server that keeps nothing, over the same transport
//! ([`daemon`]).

mod blocks;
mod bonnie;
mod case;
mod daemon;
mod database;
mod engine;
mod fsync;
mod interrupt;
mod lost;
mod measure;
mod moving;
mod names;
mod offline;
mod plot;
mod ratio;
mod report;
mod sharing;
mod source;
mod spread;
mod target;
mod transfer;
mod units;
mod workload;

use anyhow::{Context, Result, bail};
use case::{Case, Mkfs, Pages};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use spread::Spread;
use std::path::PathBuf;
use target::Target;
use units::Mib;
use workload::Workload;

/// The report that `make bench` writes.
const REPORT: &str = "docs/BENCHMARKS.md";

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
    /// Serves the ceiling; used by the benchmark itself.
    #[command(hide = true)]
    Serve(daemon::Serve),
    /// Makes names beside writers; used by the benchmark itself.
    #[command(hide = true)]
    Names(names::Names),
    /// Works on a table as a database's clients do; used by the benchmark itself.
    #[command(hide = true)]
    Database(database::Database),
    /// Draws the plots of a report anew, from what a run wrote with `--json`.
    Plots {
        /// That file.
        data: PathBuf,
        /// The report, beside which the plots lie.
        #[arg(long, default_value = REPORT)]
        out: PathBuf,
    },
    /// Makes a workload's calls on the engine, without a mount: for profilers.
    Engine(engine::Engine),
}

/// Profile of the metadata, for both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metadata {
    /// One copy.
    Single,
    /// Two copies.
    Dup,
}

impl Metadata {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Dup => "dup",
        }
    }
}

/// What to run.
#[derive(Args, Clone, Debug, Serialize)]
pub(crate) struct Run {
    /// Rounds; medians and ranges are over these.
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: usize,
    /// Directory for the image and the source archive; its disk is what is measured.
    #[arg(long, default_value = "/var/tmp")]
    pub(crate) dir: PathBuf,
    /// Archive to unpack (plain tar); otherwise that of the package linux-source is used, or one is
    /// made up.
    #[arg(long)]
    pub(crate) tar: Option<PathBuf>,
    /// MiB of the image (default: 4096, or half of what the disk has free).
    #[arg(long)]
    pub(crate) image_mib: Option<Mib>,
    /// MiB of the file that is written and read in sequence (default: 1024, or a quarter of the
    /// image).
    #[arg(long)]
    pub(crate) stream_mib: Option<Mib>,
    /// MiB that fio's processes write together; each of them writes at least 1 MiB.
    #[arg(long, default_value_t = Mib(512))]
    pub(crate) fsync_mib: Mib,
    /// Numbers of fio's processes: powers of two up to 1024.
    #[arg(long, value_delimiter = ',', default_values_t = fsync::JOBS.map(|(n, _)| n))]
    pub(crate) jobs: Vec<u64>,
    /// Clients of dbench.
    #[arg(long, default_value_t = 64)]
    pub(crate) clients: u64,
    /// Seconds that dbench runs.
    #[arg(long, default_value_t = 30)]
    pub(crate) dbench_seconds: u64,
    /// MiB that programs and the file system share in the workloads with little memory.
    #[arg(long, default_value_t = Mib(256))]
    pub(crate) limit_mib: Mib,
    /// Seconds that names are made beside writers.
    #[arg(long, default_value_t = 15)]
    pub(crate) names_seconds: u64,
    /// MiB of the files of those writers together.
    #[arg(long, default_value_t = Mib(512))]
    pub(crate) names_mib: Mib,
    /// Files in the subvolume of which snapshots are made.
    #[arg(long, default_value_t = 100_000)]
    pub(crate) files: u64,
    /// MiB of the database.
    #[arg(long, default_value_t = Mib(2048))]
    pub(crate) database_mib: Mib,
    /// Numbers of the database's clients.
    #[arg(long, value_delimiter = ',', default_values_t = database::CLIENTS)]
    pub(crate) database_clients: Vec<u64>,
    /// Numbers of files that the database lies in.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    pub(crate) database_files: Vec<u64>,
    /// Seconds that the database's clients work.
    #[arg(long, default_value_t = 20)]
    pub(crate) database_seconds: u64,
    /// MiB of each of the two devices between which data moves.
    #[arg(long, default_value_t = Mib(10240))]
    pub(crate) moving_mib: Mib,
    /// MiB of the data that moves.
    #[arg(long, default_value_t = Mib(2048))]
    pub(crate) moving_data_mib: Mib,
    /// Numbers of clones of one extent that are moved.
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 10_000, 100_000])]
    pub(crate) moving_clones: Vec<usize>,
    /// Numbers of snapshots of a tree that is moved.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100, 1000])]
    pub(crate) moving_snapshots: Vec<usize>,
    /// Seconds after which a move of these clones or snapshots is given up.
    #[arg(long, default_value_t = 300)]
    pub(crate) moving_seconds: u64,
    /// Where the image's pages lie when it is mounted. With both, everything is done in both cases.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Pages::Cold])]
    pub(crate) pages: Vec<Pages>,
    /// Which mkfs formats the image. With both, everything is done in both cases.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mkfs::Linux])]
    pub(crate) mkfs: Vec<Mkfs>,
    /// On how many devices, and how. With several, everything is done in each case.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Spread::One])]
    pub(crate) spread: Vec<Spread>,
    /// Profile of the metadata.
    #[arg(long, value_enum, default_value_t = Metadata::Single)]
    pub(crate) metadata: Metadata,
    /// Checksum of both sides, as mkfs calls it.
    #[arg(long, default_value = "crc32c")]
    pub(crate) csum: String,
    /// Size of Larder's cache, as `larder mount --cache-size` takes it (default: Larder's).
    #[arg(long)]
    pub(crate) cache_size: Option<String>,
    /// Further options for `larder mount -o`.
    #[arg(long)]
    pub(crate) larder_options: Option<String>,
    /// Workloads (by default those that need no other program: tree, stream and random).
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) workloads: Vec<Workload>,
    /// What is measured (default: all but those with slow flushes or old behaviour).
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) targets: Vec<Target>,
    /// The `larder` command (default: the one beside this program).
    #[arg(long)]
    #[serde(skip)]
    pub(crate) larder: Option<PathBuf>,
    /// Where the report goes: between its marks where the file has them. Its plots lie beside it.
    #[arg(long, default_value = REPORT)]
    #[serde(skip)]
    pub(crate) out: PathBuf,
    /// The report also has the tables of what each file system took, step by step.
    #[arg(long)]
    #[serde(skip)]
    pub(crate) tables: bool,
    /// Where every single measurement goes, as JSON (default: nowhere).
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) json: Option<PathBuf>,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.role {
        Some(Role::Serve(serve)) => serve.run(),
        Some(Role::Names(names)) => names.run(),
        Some(Role::Database(database)) => database.run(),
        Some(Role::Engine(engine)) => engine.run(),
        Some(Role::Plots { data, out }) => report::redraw(&data, &out),
        None => run(cli.run),
    }
}

/// Fills in what depends on the machine.
fn settle(mut run: Run) -> Result<Run> {
    if run.workloads.is_empty() {
        run.workloads = vec![Workload::Tree, Workload::Stream, Workload::Random];
    }
    if run.targets.is_empty() {
        run.targets = Target::value_variants().iter().copied().filter(|t| t.is_usual()).collect();
    }
    if let Some(odd) = run.jobs.iter().find(|n| fsync::JOBS.iter().all(|(known, _)| known != *n)) {
        bail!("--jobs {odd}: a power of two up to 1024 is needed");
    }
    if run.database_clients.contains(&0) {
        bail!("--database-clients 0: at least one client is needed");
    }
    if run.database_files.contains(&0) {
        bail!("--database-files 0: at least one file is needed");
    }
    if run.image_mib.is_none() {
        let disk = rustix::fs::statvfs(&run.dir).with_context(|| run.dir.display().to_string())?;
        let free_mib = disk.f_bavail.saturating_mul(disk.f_frsize) >> 20;
        run.image_mib = Some(Mib(4096).min(Mib(free_mib / 2)));
    }
    // Copy-on-write needs room beside what is there.
    if run.workloads.contains(&Workload::Database) && run.database_mib.doubled() > run.image_mib() {
        bail!(
            "--database-mib {0}: the image needs twice as much; --image-mib {1}, or a smaller \
                database",
            run.database_mib,
            run.database_mib.doubled()
        );
    }
    // Of what is lost there are two files, and two copies of each.
    let share = if run.workloads.contains(&Workload::Lost) { 8 } else { 4 };
    run.stream_mib = run.stream_mib.or(Some(Mib(1024).min(run.image_mib() / share)));
    let needs_larder =
        run.targets.iter().any(|t| t.is_larder()) || run.mkfs.contains(&Mkfs::Larder);
    if run.larder.is_none() && needs_larder {
        let beside = std::env::current_exe()?.with_file_name("larder");
        if !beside.exists() {
            bail!(
                "{} is missing: build it with the same profile (-p larder-cli)",
                beside.display()
            );
        }
        run.larder = Some(beside);
    }
    Ok(run)
}

impl Run {
    pub(crate) fn image_mib(&self) -> Mib {
        self.image_mib.unwrap_or(Mib(0))
    }
    /// Each number of clients with each number of files; more files than clients tell nothing new.
    pub(crate) fn database_shapes(&self) -> Vec<database::Shape> {
        let of = |clients| {
            let files = self.database_files.iter().copied();
            files
                .filter(move |n| *n <= clients)
                .map(move |files| database::Shape { clients, files })
        };
        self.database_clients.iter().copied().flat_map(of).collect()
    }
    pub(crate) fn stream_mib(&self) -> Mib {
        self.stream_mib.unwrap_or(Mib(0))
    }
}

fn run(run: Run) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the kernel's btrfs needs root to be mounted, and caches need root to be dropped");
    }
    let run = settle(run)?;
    // Mounts live in a namespace of their own. So no copy of a mount keeps it busy beyond the
    // unmount that is timed, and the mounts end with this process, however that ends.
    larder_simtest::oracle::enter_private_namespace().context("making a mount namespace")?;
    interrupt::install()?;
    let needs_archive = run.workloads.iter().any(|w| w.needs_archive());
    let archive = needs_archive.then(|| source::archive(&run)).transpose()?;
    let needs_two = run.workloads.iter().any(|w| w.moves_data());
    let moving = needs_two.then(|| moving::Files::make(&run)).transpose()?;
    let mut machine = measure::Machine::look(&run.dir)?;
    let mut steps = Vec::new();
    for round in 0..run.rounds {
        let mut order = run.targets.clone();
        if round % 2 == 1 {
            order.reverse();
        }
        for case in Case::all(&run.pages, &run.mkfs, &run.spread) {
            for target in &order {
                let bench = workload::Bench {
                    run: &run,
                    target: *target,
                    case,
                    round,
                    archive: archive.as_ref(),
                    moving: moving.as_ref(),
                };
                steps.extend(on_one_target(&bench)?);
            }
        }
    }
    machine.look_again();
    report::write(&run, &machine, archive.as_ref(), &steps)
}

/// All workloads on a target in one round and case.
fn on_one_target(bench: &workload::Bench<'_>) -> Result<Vec<workload::Step>> {
    let (run, target) = (bench.run, bench.target);
    let mut steps = Vec::new();
    for workload in run.workloads.iter().filter(|w| w.is_for(target, bench.case)) {
        let what = format!("{workload} on {}{}", target.name(), bench.case);
        eprintln!("round {} of {}: {what}", bench.round + 1, run.rounds);
        let done = bench.run(*workload).context(what)?;
        for s in &done {
            eprintln!("  {:<14} {:>8.2} s  {:>6.2} s CPU", s.step, s.seconds, s.cpu_seconds);
        }
        steps.extend(done);
    }
    Ok(steps)
}
