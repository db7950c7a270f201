//! Workloads on a device that fails, and what must hold all the same.
//!
//! Whatever fails, nothing panics and nothing hangs. What a sync acknowledged is there in every
//! crash state afterwards. A failed metadata write or flush turns the file system read-only and is
//! reported to the sync that needed it. A failed data write is reported to the next fsync of its
//! file. A panic in the midst of writing is treated as a failure, too: a broken invariant turns the
//! file system read-only, and no waiter waits for ever for a thread that has ended.

use crate::crash::{Crashes, Limits, WriteClass};
use crate::device::{Counts, Fault, INJECTED_PANIC, OpKind, SimDevice};
use crate::disks::{Mishap, Plan};
use crate::image::Image;
use crate::judge::Judge;
use crate::model::{Domain, History};
use crate::ops::Op;
use crate::runner::{Config, quietly};
use crate::walk::{Handles, refusal, run_op};
use larder_fs::{Error, Filesystem};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

/// Longest time that one run with a fault may take. It takes a fraction of a second.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a run with a fault did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultReport {
    /// Did the fault strike?
    pub struck: bool,
    /// The operation that failed, and its error.
    pub failed: Option<(String, String)>,
    /// Did the file system turn read-only?
    pub turned_read_only: bool,
    /// Crash states judged.
    pub states: u64,
    /// Different disks among them.
    pub distinct: HashSet<u64>,
}

/// How many reads, writes and flushes the workload makes where nothing fails, mount and close
/// included.
///
/// # Errors
/// The workload fails without a fault.
pub fn accesses(config: &Config, ops: &[Op]) -> Result<Counts, String> {
    let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
    let fs = Filesystem::open_devices(device.devices(), config.options.clone())
        .map_err(|e| format!("open: {e}"))?;
    let mut handles = Handles::new();
    for op in ops {
        run_op(&fs, &mut handles, op).map_err(|e| format!("{op}: {e}"))?;
    }
    fs.close().map_err(|e| format!("close: {e}"))?;
    Ok(device.counts())
}

/// Runs the workload with faults and judges the crash states afterwards. A run that takes too long
/// is an error.
///
/// # Errors
/// What must not be.
pub fn run(config: &Config, ops: &[Op], faults: &[Fault]) -> Result<FaultReport, String> {
    patiently(config, ops, faults, None)
}

/// Runs the workload while one of several disks fails. If the profiles can do without it, nobody
/// notices, and everything that was promised is there without that disk, too.
///
/// # Errors
/// What must not be.
pub fn run_plan(config: &Config, ops: &[Op], plan: Plan) -> Result<FaultReport, String> {
    let ops = &possible(config, ops)?[..];
    patiently(config, ops, &[plan.fault()], Some(plan.disk)).map_err(|e| format!("{plan:?}: {e}"))
}

/// Those of the operations that can be done, one after the other.
fn possible(config: &Config, ops: &[Op]) -> Result<Vec<Op>, String> {
    let mut world = crate::runner::show(&config.base, &config.options)?;
    let mut can = |op: &&Op| {
        let mut after = world.clone();
        let done = after.apply(op).is_ok();
        if done {
            world = after;
        }
        done
    };
    Ok(ops.iter().filter(|op| can(op)).cloned().collect())
}

fn patiently(
    config: &Config,
    ops: &[Op],
    faults: &[Fault],
    disk: Option<usize>,
) -> Result<FaultReport, String> {
    let (config, ops, faults) = (config.clone(), ops.to_vec(), faults.to_vec());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is gone only after its patience has run out, and that has been reported.
        let _ = sender.send(quietly(|| run_here(&config, &ops, &faults, disk)));
    });
    receiver
        .recv_timeout(PATIENCE)
        .unwrap_or_else(|_| Err(format!("hangs: not done after {PATIENCE:?}")))
}

fn run_here(
    config: &Config,
    ops: &[Op],
    faults: &[Fault],
    disk: Option<usize>,
) -> Result<FaultReport, String> {
    let device = Arc::new(SimDevice::new(config.base.clone()));
    faults.iter().for_each(|f| device.inject(f.clone()));
    let world = crate::runner::show(&config.base, &config.options)?;
    let mut report = FaultReport::default();
    let mut history = History { domains: vec![Domain::new("", world)] };
    match calmly(|| Filesystem::open_devices(device.devices(), config.options.clone())) {
        Ok(fs) => operate(&fs, &device, &mut history, ops, &mut report)?,
        Err(e) => report.failed = Some(("open".into(), e.to_string())),
    }
    report.struck = device.counts().faults > 0;
    if !report.struck
        && let Some((op, error)) = &report.failed
    {
        return Err(format!("{op} failed without a fault: {error}"));
    }
    device.heal();
    let recording = device.recording();
    match disk {
        None => consequences(&recording.base, &recording.ops, &report)?,
        Some(_) if config.mishaps.tolerated > 0 => unnoticed(&report)?,
        Some(_) => {}
    }
    let crashes = Crashes::of(
        &recording,
        &Limits { per_epoch: 12, samples: 2, exhaustive: 3, ..config.limits },
    );
    let judge = Judge {
        history: &history,
        mode: config.mode,
        options: config.options.clone(),
        depth: config.depth,
        seed: config.limits.seed,
        before: &recording.base,
        mishaps: crate::disks::Mishaps::default(),
        may_be_behind: disk.is_some(),
        hurt: Mutex::default(),
    };
    // The states around the fault and at the end say most; the ones long before it are those of
    // every other run.
    for state in crashes.states.iter().rev().take(config.max_states) {
        let image = crashes.image(state);
        judge
            .state(state.id, &image, state.earliest, state.latest)
            .map_err(|e| format!("{report:?}: {e}\n{}", crashes.describe(state)))?;
        report.distinct.insert(state.id);
        report.states += 1;
        if let Some(disk) = disk.filter(|_| config.mishaps.tolerated > 0) {
            let moments = [state.latest, state.earliest];
            judge
                .mishap(&image, Mishap::Lost, &[disk], &moments)
                .map_err(|e| format!("{report:?}: {e}\n{}", crashes.describe(state)))?;
            report.states += 1;
        }
    }
    report.distinct.extend(judge.hurt.into_inner());
    Ok(report)
}

/// Enough disks were there all the time. Only opening wants all of them.
fn unnoticed(report: &FaultReport) -> Result<(), String> {
    if report.failed.as_ref().is_some_and(|(op, _)| op == "open") {
        return Ok(());
    }
    if report.failed.is_some() {
        return Err(format!(
            "one disk failed that is not needed, and that was noticed: {report:?}"
        ));
    }
    Ok(())
}

/// Calls the engine where a panic may have been injected: a caller of a server would get an error,
/// too. Any other panic goes on.
fn calmly<T>(f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| match panic.downcast_ref::<String>() {
        Some(text) if text.starts_with(INJECTED_PANIC) => Err(Error::Unsupported(text.clone())),
        _ => resume_unwind(panic),
    })
}

fn operate(
    fs: &Filesystem,
    device: &SimDevice,
    history: &mut History,
    ops: &[Op],
    report: &mut FaultReport,
) -> Result<(), String> {
    let mut handles = Handles::new();
    let domain = &mut history.domains[0];
    for op in ops {
        let mut after = domain.now().clone();
        let touched =
            after.apply(op).map_err(|e| format!("the workload is impossible: {op}: {e:?}"))?;
        let begin = device.mark();
        let result = calmly(|| run_op(fs, &mut handles, op));
        let end = device.mark();
        match result {
            Ok(real) => {
                if let (Some(made), Some(real)) = (touched.made, real) {
                    after.set_real(made, real);
                }
                domain.push(op, after, touched, begin, Some(end));
            }
            Err(e) if refusal(&e).is_some() => {
                return Err(format!("{op} was refused although it is possible: {e}"));
            }
            Err(e) => {
                // It may be there or not; from here on nothing new is begun.
                domain.push(op, after, touched, begin, None);
                report.failed = Some((op.to_string(), e.to_string()));
                break;
            }
        }
    }
    report.turned_read_only = fs.info().read_only;
    if report.turned_read_only {
        match calmly(|| fs.setxattr(fs.root(), b"user.late", b"x", larder_fs::XattrMode::Set)) {
            Err(Error::ReadOnly(_)) => {}
            other => {
                return Err(format!("read-only after a failure, but a change answers {other:?}"));
            }
        }
    }
    let begin = device.mark();
    let synced = calmly(|| fs.sync());
    let end = device.mark();
    if let Err(e) = &synced
        && report.failed.is_none()
    {
        report.failed = Some(("the last sync".into(), e.to_string()));
    }
    if report.turned_read_only && synced.is_ok() {
        return Err("a sync succeeds although the file system turned read-only".into());
    }
    let now = domain.now().clone();
    // After a failure a sync that succeeds says nothing about data whose loss was already reported.
    let promised = synced.is_ok() && report.failed.is_none();
    domain.push(&Op::Sync, now, crate::world::Touched::default(), begin, promised.then_some(end));
    for id in handles.values() {
        fs.release(*id, 1);
    }
    if let Err(e) = calmly(|| fs.close())
        && report.failed.is_none()
    {
        report.failed = Some(("close".into(), e.to_string()));
    }
    report.turned_read_only |= fs.info().read_only;
    Ok(())
}

/// What the failed accesses of a recording must have led to.
fn consequences(
    base: &Image,
    ops: &[crate::device::Op],
    report: &FaultReport,
) -> Result<(), String> {
    for op in ops.iter().filter(|o| o.completed.is_some_and(|c| !c.ok)) {
        let (what, fatal) = match &op.kind {
            OpKind::Flush { .. } => ("flush", true),
            OpKind::Discard { .. } => ("discard", false),
            OpKind::Write { at, .. } => match WriteClass::of(op, base) {
                WriteClass::Data | WriteClass::Discard => ("data write", false),
                WriteClass::Node => ("node write", true),
                // A mirror is a spare: the file system may go on if it could not be written.
                WriteClass::Super | WriteClass::LogSuper => {
                    ("superblock write", *at == larder_format::SUPER_OFFSETS[0].0)
                }
            },
        };
        let during_close = report.failed.as_ref().is_none_or(|f| f.0 == "close" || f.0 == "open");
        if fatal && !report.turned_read_only && !during_close {
            return Err(format!(
                "a {what} failed, and the file system is still writable: {report:?}"
            ));
        }
        if (fatal || what == "data write") && report.failed.is_none() {
            return Err(format!("a {what} failed, and nobody was told"));
        }
    }
    Ok(())
}
