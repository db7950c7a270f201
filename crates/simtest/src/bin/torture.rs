//! Crash simulation from the command line: `make torture`.
//!
//! Runs workloads on the engine over a simulated disk, cuts the power everywhere, and judges what
//! is left, until enough different states were seen, the time is up, or something failed. Every
//! failure prints the command that repeats it.

use clap::Parser;
use clap::builder::PossibleValuesParser;
use larder_simtest::cloning::cloning;
use larder_simtest::crash::Limits;
use larder_simtest::disks::{KINDS, Kind, Plan};
use larder_simtest::faults::run_plan;
use larder_simtest::formats::ALL;
use larder_simtest::image::Image;
use larder_simtest::judge::Depth;
use larder_simtest::moving::{self, Moving, Scene};
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome, run};
use larder_simtest::sharing::sharing;
use larder_simtest::workload::{Sequences, Workload, random, threads};
use larder_simtest::{data, model, scenarios};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Sources of workloads.
const SOURCES: [&str; 7] =
    ["scenarios", "sequences", "random", "threads", "data", "sharing", "cloning"];

/// Crash simulation of the engine.
#[derive(Debug, Parser)]
#[command(name = "torture")]
struct Args {
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Stop after this many different crash states.
    #[arg(long, default_value_t = 20_000)]
    states: usize,
    /// Stop after this many seconds.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Share of the states that the kernel mounts.
    #[arg(long, default_value_t = 0.0)]
    kernel_share: f64,
    /// Share of the states that `larder check` looks at.
    #[arg(long, default_value_t = 0.05)]
    ours_share: f64,
    /// Share of the states that `btrfs check` looks at.
    #[arg(long, default_value_t = 0.02)]
    check_share: f64,
    /// Share of the states in which everything is removed.
    #[arg(long, default_value_t = 0.1)]
    empty_share: f64,
    /// Share of the states that crash again while they recover.
    #[arg(long, default_value_t = 0.05)]
    recovery_share: f64,
    /// Only sequences of this many operations.
    #[arg(long)]
    seq: Option<usize>,
    /// Of each sequence of two or three operations, so many placements of its syncs; 0 for all.
    #[arg(long, default_value_t = 3)]
    placements: usize,
    /// Only this source of workloads.
    #[arg(long, value_parser = SOURCES)]
    only: Option<String>,
    /// Compress all data: zlib[:1..9], lzo or zstd[:-15..15].
    #[arg(long)]
    compress: Option<larder_fs::Packing>,
    /// On images of this kind; `all`: each workload on the next one.
    #[arg(long, value_parser = formats())]
    format: Option<String>,
    /// On several disks: DATA-METADATA-DISKS, as raid1-raid1c3-4; `all`: each workload on the next
    /// kind. States are judged with disks lost, old or damaged, too.
    #[arg(long, conflicts_with = "format")]
    disks: Option<String>,
    /// Moves data beside the writers: one of relocate, balance, convert, remove, resize, replace,
    /// missing, bad-target, or several with commas; `all`: any of them. Each run is of another
    /// kind of disks, or of that of --disks.
    #[arg(long = "move", conflicts_with_all = ["format", "relocate", "script"])]
    moves: Option<String>,
    /// With --move: share of the states of which disks are lost, and of the runs in which one
    /// fails.
    #[arg(long, default_value_t = 0.2)]
    lost_share: f64,
    /// With --disks: runs of each workload in which a disk fails.
    #[arg(long, default_value_t = 3)]
    plans: u64,
    /// Store file data as the data workload of this number does.
    #[arg(long)]
    settings: Option<u64>,
    /// No commit but those of the workload: otherwise there is one after each step of an operation
    /// of several, in every second workload.
    #[arg(long)]
    whole: bool,
    /// After so many operations of a thread one block group moves, each in its turn.
    #[arg(long, default_value_t = 0)]
    relocate: usize,
    /// Leave out operations on file data: names, attributes and commits only.
    #[arg(long)]
    names: bool,
    /// Leave out this many workloads at the beginning.
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// Stop after this many workloads.
    #[arg(long)]
    workloads: Option<usize>,
    /// Run this workload instead, in the notation of the log scenarios.
    #[arg(long)]
    script: Option<String>,
    /// Judge only the crash state with this name.
    #[arg(long, value_parser = |s: &str| u64::from_str_radix(s, 16))]
    state: Option<u64>,
    /// Most states of one workload.
    #[arg(long, default_value_t = 400)]
    per_workload: usize,
    /// Threads for the judging; all processors by default.
    #[arg(long)]
    workers: Option<usize>,
    /// Append the names of the different disks to this file, one a line: some are met again with
    /// other seeds.
    #[arg(long, value_name = "FILE")]
    names_to: Option<PathBuf>,
    /// Go on after failures, up to this many.
    #[arg(long, default_value_t = 1)]
    failures: usize,
}

/// What `--format` takes.
fn formats() -> PossibleValuesParser {
    ALL.iter().map(|format| format.name).chain(["default", "all"]).into()
}

/// Fresh images of the kinds that were asked for, one for each workload in turn.
fn bases(args: &Args, usual: &Config) -> Result<Vec<Image>, String> {
    let chosen = args.format.as_deref().unwrap_or("default");
    let with_usual = matches!(chosen, "default" | "all").then(|| usual.base.clone());
    let others = ALL.iter().filter(|format| matches!(chosen, "all") || format.name == chosen);
    let others = others.map(|format| usual.clone().on(format).map(|config| config.base));
    with_usual
        .into_iter()
        .map(Ok)
        .chain(others)
        .collect::<Result<_, _>>()
        .map_err(|e| e.to_string())
}

/// Configurations on several disks, one for each workload in turn; none if that is not asked for.
fn on_disks(args: &Args, usual: &Config) -> Result<Vec<(Kind, Config)>, String> {
    let kinds = match args.disks.as_deref() {
        None => return Ok(Vec::new()),
        Some("all") => KINDS.to_vec(),
        Some(name) => vec![Kind::parse(name).ok_or(format!("{name} is no kind of disks"))?],
    };
    let on = |kind: Kind| match kind.config(usual, 1.0) {
        Ok(config) => Ok((kind, config)),
        Err(e) => Err(format!("{}: {e}", kind.name())),
    };
    kinds.into_iter().map(on).collect()
}

/// The workload again, while disks fail.
fn run_plans(args: &Args, n: usize, kind: Kind, config: &Config, workload: &Workload) -> Outcome {
    let mut outcome = Outcome::default();
    if !workload.is_single() {
        return outcome;
    }
    let config = Config { max_states: 6, depth: Depth::LOOK, ..config.clone() };
    let mut rng = StdRng::seed_from_u64(args.seed ^ (n as u64) << 32);
    for _ in 0..args.plans {
        let plan = Plan::random(&mut rng, kind.disks, 60);
        let ran = run_plan(&config, &workload.segments[0].threads[0], plan);
        outcome.add_plan(workload, ran);
    }
    outcome
}

/// What `--move` names.
fn moving(names: &str) -> Result<Vec<Moving>, String> {
    if names == "all" {
        return Ok(Moving::ALL.map(|(moving, _)| moving).into());
    }
    let one = |name| {
        let found = Moving::ALL.iter().find(|(_, its)| *its == name);
        found.map(|(moving, _)| *moving).ok_or(format!("{name} is nothing that moves"))
    };
    names.split(',').map(one).collect()
}

/// Runs scenes of moves, one after the other.
fn torture_moves(args: &Args, names: &str, usual: &Config) -> Result<Outcome, String> {
    let moves = moving(names)?;
    let kind = match args.disks.as_deref() {
        None | Some("all") => None,
        Some(name) => Some(Kind::parse(name).ok_or(format!("{name} is no kind of disks"))?),
    };
    let mut progress = Progress::new(args)?;
    for n in (args.skip as u64..).take(args.workloads.unwrap_or(usize::MAX)) {
        let seed = args.seed * 1_000_000 + n;
        let mut rng = StdRng::seed_from_u64(seed);
        let scene = Scene::choose(&mut rng, &moves, kind);
        let mut config = usual.clone();
        config.options.tuning.discard_everything = rng.random_bool(0.5);
        if rng.random_bool(0.5) {
            config = config.whole();
        }
        let share = args.lost_share;
        let mut ran =
            moving::run(&config, &moving::Moves { seed, lost: share, failing: share }, scene);
        for failure in &mut ran.failures {
            let again = format!("--seed {} --skip {n} --workloads 1", args.seed);
            failure.workload += &format!(": torture --move {names} {again}");
        }
        if progress.add(ran, &config)? {
            break;
        }
    }
    Ok(progress.end())
}

/// What was done so far, and when it is enough.
struct Progress<'a> {
    args: &'a Args,
    begin: Instant,
    told: Instant,
    outcome: Outcome,
    /// Gets the names of the disks.
    names: Option<File>,
}

impl<'a> Progress<'a> {
    fn new(args: &'a Args) -> Result<Self, String> {
        let now = Instant::now();
        let open = |path: &PathBuf| {
            let file = File::options().append(true).create(true).open(path);
            file.map_err(|e| format!("{}: {e}", path.display()))
        };
        let names = args.names_to.as_ref().map(open).transpose()?;
        Ok(Self { args, begin: now, told: now, outcome: Outcome::default(), names })
    }

    /// Adds a run, tells its failures, and writes down the names of disks that were not met before.
    /// Says whether that is enough.
    ///
    /// # Errors
    /// The names cannot be written.
    fn add(&mut self, ran: Outcome, config: &Config) -> Result<bool, String> {
        for failure in &ran.failures {
            println!("\nFAILURE: {failure}");
            if let Some(state) = failure.state {
                println!("  (append --state {state:016x} to judge only this one)");
            }
        }
        if let Some(file) = &mut self.names {
            let new = ran.distinct.difference(&self.outcome.distinct);
            let names: String = new.map(|id| format!("{id:016x}\n")).collect();
            file.write_all(names.as_bytes()).map_err(|e| format!("the names: {e}"))?;
        }
        self.outcome.add(ran);
        if self.told.elapsed() > Duration::from_secs(10) {
            println!("{:4} s: {}", self.begin.elapsed().as_secs(), self.outcome);
            self.told = Instant::now();
        }
        let is_enough = self.outcome.distinct.len() >= self.args.states
            || self.begin.elapsed().as_secs() >= self.args.seconds
            || self.outcome.failures.len() >= config.max_failures;
        Ok(is_enough)
    }

    /// Says what was done.
    fn end(self) -> Outcome {
        println!("{:4} s: {}", self.begin.elapsed().as_secs(), self.outcome);
        self.outcome
    }
}

/// Workloads without end, in the order of the seed.
fn source(args: &Args) -> Result<Box<dyn Iterator<Item = Workload>>, String> {
    if let Some(text) = &args.script {
        return Ok(Box::new(std::iter::once(Workload::script("script", text)?)));
    }
    let seed = args.seed;
    let placements = if args.placements == 0 { usize::MAX } else { args.placements };
    let sequences = |length: usize| -> Box<dyn Iterator<Item = Workload>> {
        let all = if length <= 2 {
            Sequences::all(length)
        } else {
            Sequences::sample(length, 5000, seed)
        };
        let mut order: Vec<usize> = (0..all.skeletons.len()).collect();
        let count: usize = if length <= 2 {
            order.iter().map(|i| all.workloads(*i).len()).sum()
        } else {
            order.len()
        };
        println!("seq-{length}: {} sequences, {count} workloads with their syncs", order.len());
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        Box::new(order.into_iter().flat_map(move |i| {
            let mut workloads = all.workloads(i);
            workloads.shuffle(&mut StdRng::seed_from_u64(seed ^ i as u64));
            if length > 1 {
                workloads.truncate(placements);
            }
            workloads
        }))
    };
    let randoms = move || (seed * 1000..).map(|s| random(s, 12 + s as usize % 40));
    let datas = move || (seed * 1000..).map(|s| data::data(s, 12 + s as usize % 30));
    let shares = move || (seed * 1000..).map(|s| sharing(s, 12 + s as usize % 40));
    let clones = move || (seed * 1000..).map(|s| cloning(s, 16 + s as usize % 40));
    let many = move || (seed * 1000..).map(|s| threads(s, 2 + s as usize % 4, 12));
    if let Some(length) = args.seq {
        return Ok(sequences(length));
    }
    Ok(match args.only.as_deref() {
        Some("scenarios") => Box::new(scenarios::all(true).into_iter()),
        Some("sequences") => Box::new(sequences(1).chain(sequences(2)).chain(sequences(3))),
        Some("random") => Box::new(randoms()),
        Some("threads") => Box::new(many()),
        Some("data") => Box::new(datas()),
        Some("sharing") => Box::new(scenarios::shared().into_iter().chain(shares())),
        Some("cloning") => Box::new(clones()),
        _ => {
            let bounded = sequences(1).chain(sequences(2)).chain(sequences(3));
            let mut mixed: Vec<Box<dyn Iterator<Item = Workload>>> = vec![
                Box::new(bounded),
                Box::new(randoms()),
                Box::new(many()),
                Box::new(datas()),
                Box::new(shares()),
                Box::new(clones()),
            ];
            let mut turn = 0;
            let endless = std::iter::from_fn(move || {
                turn += 1;
                let at = turn % mixed.len();
                mixed[at].next().or_else(|| mixed[1].next())
            });
            Box::new(scenarios::all(true).into_iter().chain(endless))
        }
    })
}

fn torture(args: &Args) -> Result<Outcome, String> {
    let mut config = Config::new(args.seed).map_err(|e| e.to_string())?;
    config.mode =
        if config.options.tuning.no_log { model::Mode::Strict } else { model::Mode::Weak };
    config.options.compress =
        args.compress.map(|packing| larder_fs::Compress { packing, force: true });
    config.limits = Limits { seed: args.seed, ..Limits::default() };
    config.max_states = args.per_workload;
    config.relocate_every = args.relocate;
    config.only = args.state;
    config.max_failures = args.failures.max(1);
    config.workers = args.workers.unwrap_or(config.workers);
    config.depth = Depth {
        emptied: args.empty_share,
        recovered: args.recovery_share,
        ours: args.ours_share,
        checked: args.check_share,
        kernel: args.kernel_share,
    };
    if args.state.is_some() {
        // It is the kernel, too, where it had its share.
        let kernel = if args.kernel_share > 0.0 { 1.0 } else { 0.0 };
        config.depth = Depth { emptied: 1.0, recovered: 1.0, ours: 1.0, checked: 1.0, kernel };
    }
    if config.depth.checked > 0.0 && !need(&[Need::BtrfsProgs]) {
        config.depth.checked = 0.0;
    }
    if config.depth.kernel > 0.0 && !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        config.depth.kernel = 0.0;
    }
    let bases = bases(args, &config)?;
    let disks = on_disks(args, &config)?;
    if let Some(names) = &args.moves {
        return torture_moves(args, names, &config);
    }
    let mut progress = Progress::new(args)?;
    let scripted = args.script.is_some();
    for (n, mut workload) in
        source(args)?.enumerate().skip(args.skip).take(args.workloads.unwrap_or(usize::MAX))
    {
        if args.names {
            for ops in workload.segments.iter_mut().flat_map(|s| s.threads.iter_mut()) {
                ops.retain(|op| !op.is_data());
            }
        }
        let mut config = Config { base: bases[n % bases.len()].clone(), ..config.clone() };
        // Another seed has other kinds for the same scenarios.
        let kind = disks.get((n + args.seed as usize) % disks.len().max(1));
        if let Some((_, on_disks)) = kind {
            config = on_disks.clone();
        }
        let every_second = StdRng::seed_from_u64(args.seed ^ (n as u64) << 32).random_bool(0.5);
        if args.whole || !scripted && (every_second || workload.name.starts_with("cloning")) {
            config = config.whole();
        }
        let number =
            || workload.name.split_once("--settings ")?.1.trim_end_matches(')').parse().ok();
        if let Some(number) = args.settings.or_else(number) {
            data::settings(number, &mut config.options);
        }
        let mut ran = run(&config, &workload);
        if let Some((kind, _)) = kind {
            ran.add(run_plans(args, n, *kind, &config, &workload));
            for failure in &mut ran.failures {
                failure.workload += &format!(" --disks {}", kind.name());
            }
        }
        if progress.add(ran, &config)? {
            break;
        }
    }
    Ok(progress.end())
}

fn main() -> ExitCode {
    let args = Args::parse();
    // A panic inside of a judged state is reported with the state; its own text comes first.
    match torture(&args) {
        Err(e) => {
            eprintln!("torture: {e}");
            ExitCode::from(2)
        }
        Ok(outcome) if outcome.failures.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
    }
}
