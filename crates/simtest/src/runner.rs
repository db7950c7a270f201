//! Runs a workload on the engine over a simulated device, cuts the power everywhere, and has each
//! state judged.
//!
//! A run depends on its [`Config`] alone: the file system is made with fixed uuid and time, the
//! engine counts time instead of reading it, and everything random comes from the seed. Where a
//! workload has several threads the engine's answers still depend on how they were scheduled; a
//! failure then names the state that it found, and the image is kept where `LARDER_KEEP_STATES`
//! points.
//!
//! Checks of different states run on all processors; results are put together in the order of the
//! states.

use crate::crash::{Crashes, Kind, Limits};
use crate::device::{DiscardEffect, Recording, Seq, SimDevice};
use crate::disks::Mishaps;
use crate::faults::FaultReport;
use crate::formats::Format;
use crate::image::{Image, STRIDE};
use crate::judge::{Depth, Done, Judge};
use crate::model::{Domain, History, Mode};
use crate::ops::Op;
use crate::walk::{Handles, refusal, run_op, walk};
use crate::workload::{Segment, Workload, prefix};
use crate::world::{Refusal, World};
use larder_format::{ObjectId, Physical, SUPER_OFFSETS, SUPER_SIZE};
use larder_fs::mkfs::{MkfsOptions, mkfs_on};
use larder_fs::{Error, Filesystem, OpenOptions, SubvolChoice, Timestamp, Tuning};
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Everything that a run depends on.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk to begin with.
    pub base: Image,
    /// How to open.
    pub options: OpenOptions,
    /// What promises mean.
    pub mode: Mode,
    /// How many states are made.
    pub limits: Limits,
    /// Most states of a segment that are judged; a seeded sample, the ends always among them.
    pub max_states: usize,
    /// How deep each is looked into.
    pub depth: Depth,
    /// What happens to disks while the power is off.
    pub mishaps: Mishaps,
    /// After so many operations of a thread one block group moves, each in its turn; 0: none.
    pub relocate_every: usize,
    /// Threads for the judging.
    pub workers: usize,
    /// Judge only this one.
    pub only: Option<u64>,
    /// Stop at this many failures.
    pub max_failures: usize,
}

/// Size of the simulated file systems, in bytes.
pub const SIZE: u64 = 256 << 20;

/// An empty file system that is the same bytes for the same options.
///
/// # Errors
/// What mkfs says.
pub fn fresh(size: u64, options: &MkfsOptions) -> Result<Image, larder_fs::Error> {
    fresh_on(vec![size], options)
}

/// The same on disks of these sizes.
///
/// # Errors
/// What mkfs says.
pub fn fresh_on(sizes: Vec<u64>, options: &MkfsOptions) -> Result<Image, larder_fs::Error> {
    let device =
        SimDevice::new(Image::stack(sizes)).unrecorded().with_discard(DiscardEffect::Ignore);
    let device = Arc::new(device);
    let fixed = MkfsOptions {
        uuid: options.uuid.or(Some(*b"larder-simulator")),
        time: Some(Timestamp { sec: 1_700_000_000, nsec: 0 }),
        ..options.clone()
    };
    let disks = device.devices();
    mkfs_on(&disks.iter().map(|disk| &**disk).collect::<Vec<_>>(), &fixed)?;
    let mut image = device.image();
    image.freeze();
    Ok(image)
}

impl Config {
    /// The same with every operation in as few transactions as it takes. The usual is a commit
    /// after each step, so that a cut can fall between any two. But such commits also make durable
    /// at once what an `fsync` would have to log: clones above all.
    #[must_use]
    pub fn whole(mut self) -> Self {
        self.options.tuning.commit_steps = false;
        self.options.tuning.seal_ahead = None;
        self
    }

    /// The same on a fresh image of another kind.
    ///
    /// # Errors
    /// What mkfs says.
    pub fn on(mut self, format: &Format) -> Result<Self, larder_fs::Error> {
        self.base = fresh(SIZE, &format.mkfs_options())?;
        Ok(self)
    }

    /// The usual: a fresh file system, commits only when asked for, opening and looking.
    ///
    /// # Errors
    /// What mkfs says.
    pub fn new(seed: u64) -> Result<Self, larder_fs::Error> {
        Ok(Self {
            base: fresh(SIZE, &MkfsOptions::default())?,
            options: OpenOptions {
                commit_interval: None,
                cache_size: 64 << 20,
                // Whichever a workload makes the default one.
                subvol: SubvolChoice::Id(ObjectId::FS_TREE.0),
                // Freed space turns to poison: a read of what is still in use shows.
                discard: true,
                tuning: Tuning {
                    fake_clock: true,
                    seal_ahead: Some(2),
                    discard_everything: seed.is_multiple_of(2),
                    commit_steps: true,
                    ..Tuning::default()
                },
                ..OpenOptions::default()
            },
            mode: Mode::Weak,
            limits: Limits { seed, ..Limits::default() },
            max_states: usize::MAX,
            depth: Depth::LOOK,
            mishaps: Mishaps::default(),
            relocate_every: 0,
            workers: std::thread::available_parallelism().map_or(2, usize::from),
            only: None,
            max_failures: 3,
        })
    }
}

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Workload and how to run it again.
    pub workload: String,
    /// The crash state, unless it happened before any crash.
    pub state: Option<u64>,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.workload)?;
        writeln!(f, "{}", self.what)?;
        match self.state {
            Some(state) => write!(f, "crash state {state:016x}"),
            None => write!(f, "before any crash"),
        }
    }
}

/// What a run did and found.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Workloads run.
    pub workloads: u64,
    /// Operations done.
    pub ops: u64,
    /// States judged, by kind.
    pub states: BTreeMap<Kind, u64>,
    /// Different disks among them.
    pub distinct: HashSet<u64>,
    /// What was done to shares of them.
    pub done: Done,
    /// Runs in which a disk failed.
    pub plans: u64,
    /// What must not be.
    pub failures: Vec<Failure>,
}

impl Outcome {
    /// Adds a run in which a disk failed.
    pub fn add_plan(&mut self, workload: &Workload, ran: Result<FaultReport, String>) {
        self.plans += 1;
        match ran {
            Ok(report) => self.distinct.extend(report.distinct),
            Err(what) => {
                let workload = workload.text();
                self.failures.push(Failure { workload, state: None, what });
            }
        }
    }
    /// Adds another run.
    pub fn add(&mut self, other: Self) {
        self.workloads += other.workloads;
        self.ops += other.ops;
        for (kind, n) in other.states {
            *self.states.entry(kind).or_default() += n;
        }
        self.distinct.extend(other.distinct);
        self.done.add(other.done);
        self.plans += other.plans;
        self.failures.extend(other.failures);
    }
    fn add_done(&mut self, done: Done) {
        self.done.add(done);
        if done.recovered > 0 {
            *self.states.entry(Kind::Recovery).or_default() += done.recovered;
        }
    }
    /// # Panics
    /// Something failed; the message holds the failures.
    pub fn assert_sound(&self) {
        if !self.failures.is_empty() {
            let all: Vec<String> = self.failures.iter().map(ToString::to_string).collect();
            panic!("{} violations:\n\n{}\n\n{self}", all.len(), all.join("\n\n"));
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: u64 = self.states.values().sum();
        write!(f, "{} workloads, {} operations, {total} crash states", self.workloads, self.ops)?;
        write!(f, " ({} different disks), by what was open:", self.distinct.len())?;
        for (kind, n) in &self.states {
            write!(f, " {kind} {n}")?;
        }
        let Done { emptied, recovered, ours, checked, kernel, hurt, resumed, given_up } = self.done;
        write!(
            f,
            "; emptied {emptied}, crashed again {recovered}, larder check {ours}, btrfs check \
                {checked}, kernel {kernel}"
        )?;
        if hurt > 0 {
            write!(f, ", with disks lost, old or damaged {hurt}")?;
        }
        if resumed + given_up > 0 {
            write!(f, ", moves that went on {resumed}, were given up {given_up}")?;
        }
        if self.plans > 0 {
            write!(f, ", runs with a failing disk {}", self.plans)?;
        }
        write!(f, "; failures {}", self.failures.len())
    }
}

/// Runs workloads, each in the next of the configurations, until one has failed too often.
///
/// # Panics
/// Something failed; the message holds the failures.
pub fn run_in_turn(configs: &[Config], workloads: impl IntoIterator<Item = Workload>) -> Outcome {
    let mut outcome = Outcome::default();
    for (workload, config) in workloads.into_iter().zip(configs.iter().cycle()) {
        outcome.add(run(config, &workload));
        if outcome.failures.len() >= config.max_failures {
            break;
        }
    }
    println!("{outcome}");
    outcome.assert_sound();
    outcome
}

/// A segment that ran: what the device saw and what the model knows.
#[derive(Debug)]
pub struct Run {
    /// The device's side.
    pub recording: Recording,
    /// The model's side.
    pub history: History,
}

/// Runs one segment on a disk, without any crash.
///
/// # Errors
/// The engine refuses what is possible, does what is not, fails, panics, or shows another tree than
/// the model.
pub fn execute(
    config: &Config,
    base: &Image,
    world: &World,
    segment: &Segment,
) -> Result<Run, String> {
    let device = Arc::new(SimDevice::new(base.clone()));
    let fs = quietly(|| {
        Filesystem::open_devices(device.devices(), config.options.clone())
            .map_err(|e| format!("open: {e}"))
    })?;
    let many = segment.threads.len() > 1;
    let domains: Vec<Result<(Domain, Handles), String>> = std::thread::scope(|scope| {
        let spawn = |(i, ops): (usize, &Vec<Op>)| {
            let name = if many { prefix(i) } else { String::new() };
            let domain = Domain::new(name, world.clone());
            let (fs, device, ops) = (&fs, &device, ops.clone());
            let each = |done| relocate_in_turn(fs, config.relocate_every, done);
            scope.spawn(move || quietly(|| perform_and(fs, device, domain, &ops, &each)))
        };
        let running: Vec<_> = segment.threads.iter().enumerate().map(spawn).collect();
        running.into_iter().map(|t| t.join().expect("panics are caught inside")).collect()
    });
    let domains: Vec<(Domain, Handles)> = domains.into_iter().collect::<Result<_, _>>()?;
    let handles: Vec<Handles> = domains.iter().map(|d| d.1.clone()).collect();
    let mut history = History { domains: domains.into_iter().map(|d| d.0).collect() };
    quietly(|| {
        let shown = walk(&fs)?;
        history.verify_now(&shown).map_err(|e| format!("before any crash: {e}"))?;
        for id in handles.iter().flat_map(|h| h.values()) {
            fs.release(*id, 1);
        }
        let begin = device.mark();
        fs.close().map_err(|e| format!("close: {e}"))?;
        let end = device.mark();
        history.close(begin, end);
        mirrors(&device.image())
    })?;
    Ok(Run { recording: device.recording(), history })
}

/// Moves a block group after every so many operations.
fn relocate_in_turn(fs: &Filesystem, every: usize, done: usize) -> Result<(), String> {
    if every == 0 || !done.is_multiple_of(every) {
        return Ok(());
    }
    let groups = fs.block_groups();
    let group = groups[done / every % groups.len()].start;
    match fs.relocate(group, &mut |_| ControlFlow::Continue(())) {
        // Another thread relocates; or a commit has taken the group out meanwhile.
        Ok(_) | Err(Error::Busy(_) | Error::NotFound | Error::NoSpace) => Ok(()),
        Err(e) => Err(format!("relocating block group {group}: {e}")),
    }
}

/// Does operations of one thread, each first on the model, then on the engine. Returns the domain
/// with them.
///
/// # Errors
/// The engine refuses what is possible, does what is not, or fails.
pub fn perform(
    fs: &Filesystem,
    device: &SimDevice,
    domain: Domain,
    ops: &[Op],
) -> Result<(Domain, Handles), String> {
    perform_and(fs, device, domain, ops, &|_| Ok(()))
}

/// As [`perform`]. `each` is called after each operation, with how many there were.
pub(crate) fn perform_and(
    fs: &Filesystem,
    device: &SimDevice,
    mut domain: Domain,
    ops: &[Op],
    each: &dyn Fn(usize) -> Result<(), String>,
) -> Result<(Domain, Handles), String> {
    let mut handles = Handles::new();
    for (index, op) in ops.iter().enumerate() {
        let mut after = domain.now().clone();
        let expected = after.apply(op);
        let published = fs.stats().generation;
        let begin = device.mark();
        let result = run_op(fs, &mut handles, op);
        let end = device.mark();
        each(index + 1)?;
        match (expected, result) {
            (Ok(touched), Ok(real)) => {
                if let (Some(made), Some(real)) = (touched.made, real) {
                    after.set_real(made, real);
                }
                domain.push(op, after, touched, begin, Some(end));
                if *op != Op::Sync && fs.stats().generation != published {
                    domain.has_committed();
                }
            }
            (Err(Refusal::NotModelled), _) => {
                return Err(format!(
                    "operation {index}, {op}: the model does not know what it does"
                ));
            }
            (Err(_), Err(e)) if refusal(&e).is_some() => {}
            (Err(reason), Ok(_)) => {
                return Err(format!(
                    "operation {index}, {op}: done, but must be refused ({reason:?})"
                ));
            }
            (_, Err(e)) => return Err(format!("operation {index}, {op}: {e}")),
        }
    }
    Ok((domain, handles))
}

/// After a commit every copy of the superblock is the same but for its own address.
///
/// # Errors
/// Which copy is not.
pub fn mirrors(image: &Image) -> Result<(), String> {
    let copy = |at: u64| {
        let mut bytes = vec![0; SUPER_SIZE];
        image.read(at, &mut bytes);
        bytes[..0x20].fill(0);
        bytes[0x30..0x38].fill(0);
        bytes
    };
    for (disk, size) in image.sizes().iter().enumerate() {
        let first = disk as u64 * STRIDE;
        let primary = copy(first + SUPER_OFFSETS[0].0);
        let fits = |at: &&Physical| at.0 + SUPER_SIZE as u64 <= *size;
        let mut others = SUPER_OFFSETS[1..].iter().filter(fits);
        if let Some(at) = others.find(|at| copy(first + at.0) != primary) {
            return Err(format!(
                "after a clean close the superblock at {at} of disk {disk} is not like the first"
            ));
        }
    }
    Ok(())
}

/// Runs something that may panic; the panic becomes an error.
///
/// # Errors
/// Its own, or the panic's message.
pub fn quietly<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(format!("panic: {text}"))
    })
}

/// What a disk shows.
///
/// # Errors
/// It cannot be opened or read.
pub fn show(image: &Image, options: &OpenOptions) -> Result<World, String> {
    let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
    let options = OpenOptions { read_only: true, ..options.clone() };
    let fs = Filesystem::open_devices(device.devices(), options);
    walk(&*fs.map_err(|e| format!("read-only open: {e}"))?)
}

/// Runs a workload and judges its crash states.
#[must_use]
pub fn run(config: &Config, workload: &Workload) -> Outcome {
    let mut outcome = Outcome { workloads: 1, ..Outcome::default() };
    let mut bases = vec![config.base.clone()];
    for (number, segment) in workload.segments.iter().enumerate() {
        let mut next = Vec::new();
        for base in &bases {
            let ran = quietly(|| {
                let world = show(base, &config.options)?;
                execute(config, base, &world, segment)
            });
            match ran {
                Err(what) => {
                    let workload = title(config, workload);
                    outcome.failures.push(Failure { workload, state: None, what });
                }
                Ok(run) => {
                    let crashes = judge_all(config, workload, &run, &mut outcome);
                    // The next segment begins where a cut after the last operation can leave the
                    // disk, but for the one after the close.
                    let late =
                        crashes.states.iter().rev().filter(|s| s.earliest < run.recording.end);
                    next.extend(late.take(2).map(|s| crashes.image(s)));
                }
            }
            if outcome.failures.len() >= config.max_failures {
                return outcome;
            }
        }
        if number + 1 < workload.segments.len() {
            bases = next;
        }
    }
    outcome
}

fn title(config: &Config, workload: &Workload) -> String {
    let text = workload.text();
    let name = &workload.name;
    if workload.is_single() {
        let whole = if config.options.tuning.commit_steps { "" } else { " --whole" };
        let relocate = match config.relocate_every {
            0 => String::new(),
            every => format!(" --relocate {every}"),
        };
        let seed = config.limits.seed;
        format!("{name}: torture --seed {seed}{whole}{relocate} --script '{text}'")
    } else {
        format!("{name} (several threads; seed {}): {text}", config.limits.seed)
    }
}

/// Judges the crash states of something that ran, whichever way.
#[must_use]
pub fn judge_run(config: &Config, name: &str, run: &Run) -> Outcome {
    let mut outcome = Outcome { workloads: 1, ..Outcome::default() };
    judge_all(config, &Workload { name: name.into(), segments: Vec::new() }, run, &mut outcome);
    outcome
}

fn judge_all(config: &Config, workload: &Workload, run: &Run, outcome: &mut Outcome) -> Crashes {
    let crashes = Crashes::of(&run.recording, &config.limits);
    outcome.ops += run.history.domains.iter().map(|d| d.len() as u64).sum::<u64>();
    let judge = Judge {
        history: &run.history,
        mode: config.mode,
        options: config.options.clone(),
        depth: config.depth,
        seed: config.limits.seed,
        before: &run.recording.base,
        mishaps: config.mishaps,
        may_be_behind: false,
        hurt: Mutex::default(),
    };
    let mut order: Vec<usize> = (0..crashes.states.len()).collect();
    if let Some(only) = config.only {
        order.retain(|i| crashes.states[*i].id == only);
    } else if order.len() > config.max_states {
        order.shuffle(&mut StdRng::seed_from_u64(config.limits.seed ^ 0x006f_7264_6572));
        order.truncate(config.max_states);
        order.sort_unstable();
    }
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    let mut results: Vec<(usize, Result<Done, String>)> = std::thread::scope(|scope| {
        let work = || {
            let mut mine = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= order.len() || failed.load(Ordering::Relaxed) >= config.max_failures {
                    return mine;
                }
                let state = &crashes.states[order[at]];
                let image = crashes.image(state);
                let verdict =
                    quietly(|| judge.state(state.id, &image, state.earliest, state.latest));
                if verdict.is_err() {
                    failed.fetch_add(1, Ordering::Relaxed);
                }
                mine.push((order[at], verdict));
            }
        };
        let workers: Vec<_> =
            (0..config.workers.clamp(1, order.len().max(1))).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().expect("panics are caught inside")).collect()
    });
    results.sort_by_key(|r| r.0);
    outcome.distinct.extend(judge.hurt.into_inner());
    for (index, verdict) in results {
        let state = &crashes.states[index];
        *outcome.states.entry(state.kind).or_default() += 1;
        outcome.distinct.insert(state.id);
        match verdict {
            Ok(done) => outcome.add_done(done),
            Err(what) => {
                keep(&crashes.image(state), state.id);
                let Seq(earliest) = state.earliest;
                let Seq(latest) = state.latest;
                outcome.failures.push(Failure {
                    workload: title(config, workload),
                    state: Some(state.id),
                    what: format!(
                        "{what}\n{}cut in [{earliest}, {latest}]",
                        crashes.describe(state)
                    ),
                });
            }
        }
    }
    crashes
}

/// Keeps the disks of a failure, where asked for.
pub(crate) fn keep(image: &Image, id: u64) {
    let Some(dir) = std::env::var_os("LARDER_KEEP_STATES") else { return };
    for disk in (0..image.sizes().len()).filter(|disk| image.sizes()[*disk] > 0) {
        let path = std::path::Path::new(&dir).join(format!("{id:016x}-{}.img", disk + 1));
        // The failure itself is reported whether or not its disks can be kept.
        let _ = image.disk(disk).write_sparse(&path);
    }
}
