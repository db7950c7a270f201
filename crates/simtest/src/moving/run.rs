//! A run of a scene: writers and a mover, then every crash state that is looked at.

use super::judge::MoveJudge;
use super::members::open;
use super::mover::Mover;
use super::{Moving, Scene, writers};
use crate::crash::{CrashState, Crashes, Kind, Limits};
use crate::device::{Access, AccessKind, Effect, Fault, Seq, SimDevice};
use crate::disks::{Mishaps, Plan};
use crate::image::Image;
use crate::judge::{Done, Judge};
use crate::model::{Domain, History};
use crate::ops::Op;
use crate::runner::{Config, Failure, Outcome, keep, perform_and, quietly};
use crate::walk::{Handles, walk};
use crate::world::World;
use larder_fs::{Filesystem, ReplaceStatus};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a run depends on, beside the scene.
#[derive(Clone, Debug)]
pub struct Moves {
    /// Seed of everything random.
    pub seed: u64,
    /// Share of the states of which disks are lost.
    pub lost: f64,
    /// Share of the runs in which a disk fails, where the profiles tolerate that.
    pub failing: f64,
}

/// The commit in which a target takes over fails without it.
const TARGET_FAILED: &str = "take the place of another one has failed";

/// What was done and recorded.
struct Ran {
    crashes: Crashes,
    history: History,
    ends: Vec<RangeInclusive<Seq>>,
    /// The disk that failed.
    failing: Option<usize>,
    /// Chunks were left as they were.
    stayed: bool,
    /// What it was before.
    before: Image,
}

/// The device, and the writers' part of the work.
struct Work<'a> {
    device: &'a Arc<SimDevice>,
    /// What each writer begins with.
    worlds: &'a [World],
    threads: &'a [Vec<Op>],
    /// Accesses of the mover between two operations of a writer.
    pace: u64,
}

/// Runs a scene and judges its crash states.
#[must_use]
pub fn run(config: &Config, moves: &Moves, scene: Scene) -> Outcome {
    let mut outcome = Outcome { workloads: 1, ..Outcome::default() };
    let mut rng = StdRng::seed_from_u64(moves.seed);
    let threads = if rng.random_ratio(1, 3) { rng.random_range(2..4) } else { 1 };
    let title = format!("{}, {threads} writers, run {}", scene.name(), moves.seed);
    match quietly(|| work(config, moves, scene, threads, &mut rng)) {
        Err(what) => outcome.failures.push(Failure { workload: title, state: None, what }),
        Ok(None) => {}
        Ok(Some(ran)) => {
            outcome.ops += ran.history.domains.iter().map(|d| d.len() as u64).sum::<u64>();
            outcome.plans += u64::from(ran.failing.is_some());
            judge_all(config, moves, scene, &ran, &title, &mut outcome);
        }
    }
    outcome
}

/// The file system before anything moves, and what each writer has in it.
fn filled(config: &Config, scene: Scene, threads: usize) -> Result<(Image, Vec<World>), String> {
    let base = scene.fresh().map_err(|e| format!("mkfs: {e}"))?;
    let device = Arc::new(SimDevice::new(base).unrecorded());
    let ops: Vec<Vec<Op>> = (0..threads)
        .map(|thread| writers::beginning(&writers::prefix_of(thread, threads)))
        .collect();
    let (fs, _) = open(&device, &config.options).map_err(|e| format!("open: {e}"))?;
    let empty = vec![walk(&fs)?; threads];
    let work = Work { device: &device, worlds: &empty, threads: &ops, pace: 0 };
    let history = write(&fs, &work, &AtomicBool::new(true))?;
    history.verify_now(&walk(&fs)?)?;
    fs.close().map_err(|e| format!("close: {e}"))?;
    let mut image = device.image();
    image.freeze();
    Ok((image, history.domains.iter().map(|domain| domain.now().clone()).collect()))
}

/// Writers, side by side.
fn write(fs: &Filesystem, work: &Work<'_>, alone: &AtomicBool) -> Result<History, String> {
    let many = work.threads.len();
    let all: Vec<Result<(Domain, Handles), String>> = std::thread::scope(|scope| {
        let spawn = |(i, ops): (usize, &Vec<Op>)| {
            let domain = Domain::new(writers::prefix_of(i, many), work.worlds[i].clone());
            let ops = ops.clone();
            scope.spawn(move || {
                let begin = accesses(work.device);
                let each = |done: usize| {
                    let until = begin + done as u64 * work.pace;
                    while !alone.load(Ordering::Relaxed) && accesses(work.device) < until {
                        std::thread::yield_now();
                    }
                    Ok(())
                };
                let domain = domain.beside_others();
                quietly(|| perform_and(fs, work.device, domain, &ops, &each))
            })
        };
        let running: Vec<_> = work.threads.iter().enumerate().map(spawn).collect();
        running.into_iter().map(|t| t.join().expect("panics are caught inside")).collect()
    });
    let all = all.into_iter().collect::<Result<Vec<_>, String>>()?;
    for id in all.iter().flat_map(|(_, handles)| handles.values()) {
        fs.release(*id, 1);
    }
    Ok(History { domains: all.into_iter().map(|(domain, _)| domain).collect() })
}

/// Changes that have been made to the disks.
fn accesses(device: &SimDevice) -> u64 {
    let counts = device.counts();
    counts.writes + counts.flushes
}

/// A fault of a disk, and which disk that is.
fn fault(moves: &Moves, scene: Scene, rng: &mut StdRng) -> Option<(usize, Fault)> {
    if scene.moving == Moving::BadTarget {
        let disk = scene.kind.disks;
        let kinds = [AccessKind::Write, AccessKind::Flush];
        let strikes = move |a: &Access| a.disk() == disk && kinds.contains(&a.kind);
        let fault = Fault::nth(rng.random_range(0..60), strikes).with_effect(Effect::Half);
        return Some((disk, fault.forever()));
    }
    if scene.tolerated() == 0 || scene.moving == Moving::Missing || !rng.random_bool(moves.failing)
    {
        return None;
    }
    let plan = Plan::random(rng, scene.kind.disks, 200);
    Some((plan.disk, plan.fault()))
}

/// Was it not the target of a replacement that failed, but the device that it had become? That is
/// more than some profiles tolerate. The commit that makes it one has to have it.
fn has_failed_as_member(fs: &Filesystem, scene: Scene, what: &str) -> bool {
    let is_member = fs.replacement().status == ReplaceStatus::Finished;
    let is_too_much = scene.tolerated() == 0 || what.contains(TARGET_FAILED);
    scene.moving == Moving::BadTarget && is_member && is_too_much
}

/// Writers and the mover at the same time. `None`: they were stopped by more than is tolerated.
fn work(
    config: &Config,
    moves: &Moves,
    scene: Scene,
    threads: usize,
    rng: &mut StdRng,
) -> Result<Option<Ran>, String> {
    let (mut image, worlds) = filled(config, scene, threads)?;
    if scene.moving == Moving::Missing {
        image.lose(scene.some_disk(rng));
    }
    let length = rng.random_range(12..36);
    let ops: Vec<Vec<Op>> = (0..threads)
        .map(|n| writers::walk(rng.random(), length, &writers::prefix_of(n, threads), &worlds[n]))
        .collect();
    let device = Arc::new(SimDevice::new(image.clone()));
    let (fs, _) = open(&device, &config.options).map_err(|e| format!("open: {e}"))?;
    let fault = fault(moves, scene, rng);
    if let Some((_, fault)) = &fault {
        device.inject(fault.clone());
    }
    let mut mover = Mover::new(&fs, &device, scene);
    mover.seed = rng.random();
    mover.may_refuse = fault.is_some();
    let pace = rng.random_range(3..60);
    let work = Work { device: &device, worlds: &worlds, threads: &ops, pace };
    let (over, moved) = (AtomicBool::new(false), AtomicBool::new(false));
    let (done, wrote) = std::thread::scope(|scope| {
        let moving = scope.spawn(|| {
            let done = quietly(|| mover.run(&over));
            moved.store(true, Ordering::Relaxed);
            done
        });
        let wrote = write(&fs, &work, &moved);
        over.store(true, Ordering::Relaxed);
        (moving.join().expect("panics are caught inside"), wrote)
    });
    let mut history = match wrote {
        Err(what) if has_failed_as_member(&fs, scene, &what) => return Ok(None),
        wrote => wrote?,
    };
    done?;
    let shown = walk(&fs)?;
    history.verify_now(&shown).map_err(|e| format!("before any crash: {e}"))?;
    let begin = device.mark();
    match fs.close().map_err(|e| format!("close: {e}")) {
        Err(what) if has_failed_as_member(&fs, scene, &what) => return Ok(None),
        closed => closed?,
    }
    history.close(begin, device.mark());
    let limits = Limits { exhaustive: 4, samples: 4, per_epoch: 14, seed: moves.seed };
    let crashes = Crashes::of(&device.recording(), &limits);
    let (ends, stayed) = (mover.ends.into_inner(), mover.stayed.into_inner());
    let failing = fault.map(|(disk, _)| disk);
    Ok(Some(Ran { crashes, history, ends, failing, stayed, before: image }))
}

/// The states that are looked at: half of them around the ends of steps, the others evenly.
fn chosen(config: &Config, ran: &Ran) -> Vec<usize> {
    let states = &ran.crashes.states;
    if let Some(only) = config.only {
        return (0..states.len()).filter(|i| states[*i].id == only).collect();
    }
    if states.len() <= config.max_states {
        return (0..states.len()).collect();
    }
    let is_near = |s: &CrashState| {
        s.kind == Kind::Commit || ran.ends.iter().any(|end| end.contains(&s.latest))
    };
    let (mut near, far): (Vec<usize>, Vec<usize>) =
        (0..states.len()).partition(|i| is_near(&states[*i]));
    near.shuffle(&mut StdRng::seed_from_u64(config.limits.seed));
    near.truncate(config.max_states / 2);
    let left = config.max_states - near.len();
    let every = far.len().div_ceil(left.max(1)).max(1);
    near.extend(far.into_iter().step_by(every));
    near.sort_unstable();
    near
}

/// Has the states judged, on all workers.
fn judge_all(
    config: &Config,
    moves: &Moves,
    scene: Scene,
    ran: &Ran,
    title: &str,
    outcome: &mut Outcome,
) {
    let judge = MoveJudge {
        judge: Judge {
            history: &ran.history,
            mode: config.mode,
            options: config.options.clone(),
            depth: config.depth,
            seed: moves.seed,
            before: &ran.before,
            mishaps: Mishaps { tolerated: scene.tolerated(), share: moves.lost },
            may_be_behind: ran.failing.is_some(),
            hurt: Mutex::default(),
        },
        scene,
        failing: ran.failing,
        stayed: ran.stayed,
    };
    let order = chosen(config, ran);
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut results: Vec<(usize, Result<Done, String>)> = std::thread::scope(|scope| {
        let work = || {
            let mut mine = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= order.len() || failed.load(Ordering::Relaxed) >= config.max_failures {
                    return mine;
                }
                let state = &ran.crashes.states[order[at]];
                let image = ran.crashes.image(state);
                let verdict = quietly(|| judge.state(state, &image));
                failed.fetch_add(verdict.is_err().into(), Ordering::Relaxed);
                mine.push((order[at], verdict));
            }
        };
        let workers: Vec<_> = (0..config.workers.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().expect("panics are caught inside")).collect()
    });
    results.sort_by_key(|r| r.0);
    outcome.distinct.extend(judge.judge.hurt.into_inner());
    for (index, verdict) in results {
        let state = &ran.crashes.states[index];
        *outcome.states.entry(state.kind).or_default() += 1;
        outcome.distinct.insert(state.id);
        match verdict {
            Ok(done) => outcome.done.add(done),
            Err(what) => {
                keep(&ran.crashes.image(state), state.id);
                let what = format!("{what}\n{}", ran.crashes.describe(state));
                let (workload, state) = (title.to_owned(), Some(state.id));
                outcome.failures.push(Failure { workload, state, what });
            }
        }
    }
}
