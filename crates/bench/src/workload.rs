//! What is done to each file system.
//!
//! A step that changes something is timed through the unmount. A plain FUSE mount never sees
//! `sync`, and a file system must not win by leaving work for later. A cold step begins with a
//! fresh mount and dropped caches. The ceiling would forget everything with its process, so the
//! same process mounts again.
//!
//! A file system that loses data would be fast. So each reading step counts what it finds. In the
//! first round contents are compared, outside of the measured time, and `btrfs check` examines the
//! image.

use crate::Run;
use crate::blocks;
use crate::bonnie;
use crate::case::{Case, Mkfs};
use crate::database;
use crate::fsync::{self, Said};
use crate::interrupt;
use crate::lost;
use crate::measure::{Cost, PageCache, Watch, Watched};
use crate::moving::{self, Moving};
use crate::names;
use crate::offline;
use crate::sharing::{self, By, SNAPSHOTS};
use crate::source::{Archive, block};
use crate::spread::Spread;
use crate::target::{Image, Mount, Target};
use crate::transfer;
use crate::units::Mib;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A group of steps on one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// Unpack, read, find and delete a source tree.
    Tree,
    /// Write and read one large file.
    Stream,
    /// Write one large file in blocks of 4 KiB, each once, in random order, and read it so.
    Random,
    /// fio: files written in pieces of 64 KiB with an fsync after each, by 1 to 1024 processes.
    Fsync,
    /// dbench: a file server's clients.
    Dbench,
    /// Creating and renaming files while 16 threads fsync large ones, with little memory.
    Names,
    /// bonnie++ with little memory.
    Bonnie,
    /// Snapshots of a subvolume with many files, a clone of a large file, two equal trees that come
    /// to share.
    Sharing,
    /// Clients of a database that read and write pages of one table at random, with little memory.
    Database,
    /// Commands on an image that is not mounted: checking it, printing its file, restoring.
    Offline,
    /// Snapshots sent as streams, and received: a source tree, and what changed among many files.
    Send,
    /// Scrubbing several devices, reading without one of them, rebuilding it.
    Lost,
    /// Balance, replace, remove, convert and shrink, and fsync beside them.
    Moving,
    /// Moving one extent with very many clones, and a tree with very many snapshots.
    Crowds,
}

impl Workload {
    /// Do all targets have little memory?
    fn is_limited(self) -> bool {
        matches!(self, Self::Names | Self::Bonnie | Self::Database)
    }
    pub(crate) fn needs_archive(self) -> bool {
        matches!(self, Self::Tree | Self::Sharing | Self::Send | Self::Moving)
    }
    /// Does it have two devices of its own?
    pub(crate) fn moves_data(self) -> bool {
        matches!(self, Self::Moving | Self::Crowds)
    }
    /// Can it be done there? The ceiling has no extents that could be shared. Commands on an image
    /// are compared on one device.
    pub(crate) fn is_for(self, target: Target, case: Case) -> bool {
        match self {
            Self::Sharing => target.keeps(),
            Self::Offline | Self::Send => case.spread == Spread::One && offline::is_for(target),
            Self::Moving | Self::Crowds => {
                let has_commands =
                    matches!(target, Target::Kernel | Target::KernelAgain | Target::Larder);
                case.spread == Spread::One && case.mkfs == Mkfs::Linux && has_commands
            }
            Self::Lost => case.spread != Spread::One && target.keeps(),
            _ => true,
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tree => "tree",
            Self::Stream => "stream",
            Self::Random => "random",
            Self::Fsync => "fsync",
            Self::Dbench => "dbench",
            Self::Names => "names",
            Self::Bonnie => "bonnie",
            Self::Sharing => "sharing",
            Self::Database => "database",
            Self::Offline => "offline",
            Self::Send => "send",
            Self::Lost => "lost",
            Self::Moving => "moving",
            Self::Crowds => "crowds",
        })
    }
}

/// Result of one step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) target: Target,
    pub(crate) round: usize,
    #[serde(default)]
    pub(crate) case: Case,
    pub(crate) step: Cow<'static, str>,
    pub(crate) seconds: f64,
    /// Of the whole machine.
    pub(crate) cpu_seconds: f64,
    /// CPU time that was wanted and that the hypervisor used elsewhere, of all CPUs.
    #[serde(default)]
    pub(crate) stolen_seconds: f64,
    /// Of the daemon, user and system.
    pub(crate) daemon_cpu_seconds: Option<f64>,
    pub(crate) memory_mib: f64,
    /// By how much the machine's page cache grew at most, from before the mount on.
    #[serde(default)]
    pub(crate) page_cache_mib: Option<f64>,
    /// What the page cache held of the image at the end.
    #[serde(default)]
    pub(crate) image_cached_mib: Option<f64>,
    /// Requests per operation: per entry of the tree, or per MiB.
    pub(crate) requests: Option<f64>,
    /// The daemon's statistics at the end of the step.
    pub(crate) stats: Option<serde_json::Value>,
    /// Of steps of programs that call fsync.
    pub(crate) fsync: Option<fsync::Extra>,
}

/// A stream that Larder wrote, and the directory that it is received into.
const OURS: &str = "ours";

/// How a step starts and what is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Fresh mount and empty caches; the time ends with the unmount.
    Through,
    /// Fresh mount and empty caches; the time ends before the unmount.
    Cold,
    /// The mount and the caches that the step before left.
    Warm,
}

type Action<'a> = &'a mut dyn FnMut(&Path) -> Result<()>;
/// Runs a program on a mount of an image; its steps.
type Program<'a> = &'a mut dyn FnMut(&Path, &Image<'_>) -> Result<Vec<(Cow<'static, str>, Said)>>;

/// One target in one round and one case.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    pub(crate) run: &'a Run,
    pub(crate) target: Target,
    pub(crate) case: Case,
    pub(crate) round: usize,
    pub(crate) archive: Option<&'a Archive>,
    pub(crate) moving: Option<&'a moving::Files>,
}

impl Bench<'_> {
    pub(crate) fn run(&self, workload: Workload) -> Result<Vec<Step>> {
        match workload {
            Workload::Fsync => return self.fsync(),
            Workload::Database => return self.database(),
            Workload::Send => return self.transfer(),
            Workload::Moving | Workload::Crowds => return self.moving(workload),
            _ => {}
        }
        let mut session = self.session(workload.is_limited())?;
        let run = self.run;
        match workload {
            Workload::Tree => self.tree(&mut session)?,
            Workload::Stream => self.stream(&mut session)?,
            Workload::Random => self.random(&mut session)?,
            Workload::Sharing => self.sharing(&mut session)?,
            Workload::Offline => self.offline(&mut session)?,
            Workload::Lost => self.lost(&mut session)?,
            Workload::Fsync
            | Workload::Database
            | Workload::Send
            | Workload::Moving
            | Workload::Crowds
            | Workload::Dbench => session.said(false, &mut |m, image| {
                let said = fsync::dbench(
                    image.command("dbench"),
                    m,
                    run.clients,
                    Duration::from_secs(run.dbench_seconds),
                )?;
                Ok(vec![(fsync::DBENCH.into(), said)])
            })?,
            Workload::Names => session.said(false, &mut |m, image| {
                let program = image.command(std::env::current_exe()?);
                let done = names::names(
                    program,
                    m,
                    Duration::from_secs(run.names_seconds),
                    run.names_mib,
                )?;
                let seconds = done.seconds / done.files as f64 * 1e3;
                let said = Said { seconds, fsyncs: done.fsyncs, latency_ms: done.p999_ms };
                Ok(vec![(names::NAMES.into(), said)])
            })?,
            Workload::Bonnie => session.said(false, &mut |m, image| {
                bonnie::bonnie(image.command("bonnie++"), m, run.limit_mib)
            })?,
        }
        session.finish()
    }
    fn session(&self, limited: bool) -> Result<Session<'_>> {
        let image = Image::make(self.run, self.target, self.case, limited)?;
        Ok(Session { bench: self, image, mount: None, operations: 0.0, done: Vec::new() })
    }

    /// The result of a step with this cost.
    fn result(&self, step: Cow<'static, str>, cost: Cost, image_cached_mib: Option<f64>) -> Step {
        Step {
            target: self.target,
            round: self.round,
            case: self.case,
            step,
            seconds: cost.seconds,
            cpu_seconds: cost.cpu_seconds,
            stolen_seconds: cost.stolen_seconds,
            daemon_cpu_seconds: cost.daemon_cpu_seconds,
            memory_mib: cost.memory_mib,
            page_cache_mib: Some(cost.page_cache_mib),
            image_cached_mib,
            requests: None,
            stats: None,
            fsync: None,
        }
    }

    /// Each number of processes on an image of its own.
    fn fsync(&self) -> Result<Vec<Step>> {
        let mut done = Vec::new();
        for (jobs, step) in fsync::JOBS.into_iter().filter(|(n, _)| self.run.jobs.contains(n)) {
            let mut session = self.session(false)?;
            session.said(true, &mut |m, image| {
                Ok(vec![(
                    step.into(),
                    fsync::fio(image.command("fio"), m, jobs, self.run.fsync_mib)?,
                )])
            })?;
            done.extend(session.finish()?);
        }
        Ok(done)
    }

    /// Each number of clients and of files on an image of its own.
    fn database(&self) -> Result<Vec<Step>> {
        let (mib, time) = (self.run.database_mib, Duration::from_secs(self.run.database_seconds));
        let mut done = Vec::new();
        for shape in self.run.database_shapes() {
            let mut session = self.session(Workload::Database.is_limited())?;
            session.aside(|m| database::fill(m, mib, shape.files, &block()))?;
            session.said(false, &mut |m, image| {
                let command = image.command(std::env::current_exe()?);
                let said = database::database(command, m, shape, time)?;
                Ok(vec![(database::step(shape), said)])
            })?;
            done.extend(session.finish()?);
        }
        Ok(done)
    }

    fn offline(&self, session: &mut Session<'_>) -> Result<()> {
        let mib = self.run.stream_mib();
        let file = session.image.file().to_owned();
        if self.target == Target::Ceiling {
            // No file system, but what is read is no hole and no zeros here either.
            write_mib(&mut File::options().write(true).open(&file)?, mib)?;
            return session.commands(offline::of_disk(&file, mib));
        }
        let mount = session.image.mount_with_kernel()?;
        write_file(mount.path(), mib)?;
        mount.unmount()?;
        if !self.target.is_larder() {
            session.commands(offline::of_linux(&file))?;
            session.operations = mib.0 as f64;
            session
                .step(offline::CAT, Shape::Through, &mut |m| read_file(m, mib, &mut |_| Ok(())))?;
            return session.image.check();
        }
        let larder = session.image.larder()?.to_owned();
        session.commands(offline::of_larder(&larder, &file, STREAM))?;
        if self.round == 0 {
            offline::verify(&larder, &file, STREAM, &block(), mib)?;
        }
        session.image.check()
    }

    /// On devices of its own.
    fn moving(&self, workload: Workload) -> Result<Vec<Step>> {
        let by = match self.run.larder.as_deref() {
            Some(larder) if self.target.is_larder() => By::Larder(larder),
            _ => By::Linux,
        };
        let files = self.moving.context("no devices")?;
        let moving = Moving::new(self.run, files, (self.case, self.round == 0), by)?;
        let done = match workload {
            Workload::Crowds => moving.crowds()?,
            _ => {
                let archive = self.archive.context("no archive")?;
                moving.moves(&|to| unpack(&archive.tar, to))?
            }
        };
        let step = |done: moving::Done| Step {
            fsync: done.fsync,
            ..self.result(done.step, done.cost, None)
        };
        Ok(done.into_iter().map(step).collect())
    }

    fn lost(&self, session: &mut Session<'_>) -> Result<()> {
        let (mib, is_larder) = (self.run.stream_mib(), self.target.is_larder());
        session.operations = mib.0 as f64;
        let larder = is_larder.then(|| session.image.larder().map(Path::to_owned)).transpose()?;
        let mut scrub = |m: &Path| lost::scrub(larder.as_deref(), m);
        session.by_linux(&|m| write_file(m, mib))?;
        session.step(lost::SCRUB, Shape::Cold, &mut scrub)?;
        session.unmount()?;
        if self.case.spread.survives_loss() {
            let [first, second] = lost::DEVICES;
            session.image.lose(first)?;
            session.step(lost::READ, Shape::Cold, &mut |m| read_file(m, mib, &mut |_| Ok(())))?;
            session.unmount_damaged()?;
            session.by_linux(&|m| write_mib(&mut File::create(m.join(lost::MEANWHILE))?, mib))?;
            session.image.get_back()?;
            session.step(lost::REBUILD, Shape::Cold, &mut scrub)?;
            session.unmount_damaged()?;
            if self.round == 0 && is_larder {
                session.image.lose(second)?;
                session
                    .by_linux(&|m| same_content(&[&m.join(STREAM), &m.join(lost::MEANWHILE)]))?;
                session.image.get_back()?;
            }
        }
        // What Linux has rebuilt is not ours to judge.
        if is_larder { session.image.check() } else { Ok(()) }
    }

    /// Snapshots are sent from one image, and received into another.
    fn transfer(&self) -> Result<Vec<Step>> {
        let archive = self.archive.context("no archive")?;
        let dir = tempfile::tempdir_in(&self.run.dir)?;
        let mut done = self.sending(archive, dir.path())?;
        done.extend(self.receiving(archive, dir.path())?);
        Ok(done)
    }

    /// The ceiling gets a file system, too, since the streams have to come from somewhere.
    fn session_with_files(&self) -> Result<Session<'_>> {
        let target = if self.target.keeps() { self.target } else { Target::Kernel };
        let image = Image::make(self.run, target, self.case, false)?;
        Ok(Session { bench: self, image, mount: None, operations: 1.0, done: Vec::new() })
    }

    /// Leaves the streams of Linux in `dir`, and in the first round one of Larder's.
    fn sending(&self, archive: &Archive, dir: &Path) -> Result<Vec<Step>> {
        let mut session = self.session_with_files()?;
        let mount = session.image.mount_with_kernel()?;
        transfer::fill(mount.path(), self.run.files, &|to| unpack(&archive.tar, to))?;
        for one in transfer::ALL {
            let stream = File::create(one.stream(dir))?;
            transfer::run(one.send_by_linux(mount.path()), Some(stream))?;
        }
        mount.unmount()?;
        let file = session.image.file().to_owned();
        for one in transfer::ALL {
            match self.target {
                Target::Ceiling => {
                    session.commands(vec![(one.send, one.read_by_disk(dir, &file)?)])?;
                }
                Target::Larder => {
                    let larder = session.image.larder()?.to_owned();
                    session.commands(vec![(one.send, one.send_by_larder(&larder, &file))])?;
                }
                _ => session.step(one.send, Shape::Cold, &mut |m| {
                    transfer::run(one.send_by_linux(m), None)
                })?,
            }
        }
        if self.target == Target::Larder && self.round == 0 {
            let send = transfer::TREE.send_by_larder(session.image.larder()?, &file);
            transfer::run(send, Some(File::create(dir.join(OURS))?))?;
        }
        session.unmount()?;
        session.image.check()?;
        session.finish()
    }

    fn receiving(&self, archive: &Archive, dir: &Path) -> Result<Vec<Step>> {
        let mut session = self.session_with_files()?;
        let file = session.image.file().to_owned();
        for one in transfer::ALL {
            match self.target {
                Target::Ceiling => {
                    session.commands(vec![(one.receive, one.write_by_disk(dir, &file))])?;
                }
                Target::Larder => {
                    let larder = session.image.larder()?.to_owned();
                    let receive = transfer::receive_by_larder(&larder, &one.stream(dir), &file);
                    session.commands(vec![(one.receive, receive)])?;
                }
                _ => session.step(one.receive, Shape::Through, &mut |m| {
                    transfer::run(transfer::receive_by_linux(&one.stream(dir), m), None)
                })?,
            }
        }
        if self.target.keeps() {
            if self.round == 0 {
                self.verify_received(&session, archive, dir)?;
            }
            session.image.check()?;
        }
        session.finish()
    }

    /// Is what was received what was sent? The stream of Larder's is received by Linux here.
    fn verify_received(&self, session: &Session<'_>, archive: &Archive, dir: &Path) -> Result<()> {
        let mount = session.image.mount_with_kernel()?;
        for tree in [transfer::TREE, transfer::PACKED] {
            compare(&archive.tar, &mount.path().join(tree.snapshot))?;
        }
        let files = self.run.files;
        for many in [transfer::MANY, transfer::CHANGED] {
            transfer::verify_many(&many, mount.path(), files)?;
        }
        if self.target == Target::Larder {
            let within = mount.path().join(OURS);
            fs::create_dir(&within)?;
            transfer::run(transfer::receive_by_linux(&dir.join(OURS), &within), None)?;
            compare(&archive.tar, &within.join(transfer::TREE.snapshot))?;
        }
        mount.unmount()
    }

    fn tree(&self, session: &mut Session<'_>) -> Result<()> {
        let archive = self.archive.context("no archive")?;
        session.operations = archive.entries as f64;
        session.step("unpack", Shape::Through, &mut |m| unpack(&archive.tar, m))?;
        if self.round == 0 {
            session.image.check()?;
        }
        session.step("read back", Shape::Cold, &mut |m| {
            let bytes = read_all(m)?;
            ensure!(
                bytes == archive.bytes,
                "{bytes} bytes read where {} were unpacked",
                archive.bytes
            );
            Ok(())
        })?;
        if self.round == 0 && self.target.keeps() {
            session.aside(|m| compare(&archive.tar, m))?;
        }
        let mut find_all = |m: &Path| {
            let found = find(m)?;
            ensure!(
                found == archive.entries,
                "{found} entries where {} were unpacked",
                archive.entries
            );
            Ok(())
        };
        session.step("find, cold", Shape::Cold, &mut find_all)?;
        session.step("find, warm", Shape::Warm, &mut find_all)?;
        session.step("rm -rf", Shape::Through, &mut remove_all)?;
        session.image.check()
    }

    fn stream(&self, session: &mut Session<'_>) -> Result<()> {
        let mib = self.run.stream_mib();
        session.operations = mib.0 as f64;
        session.step("write 1 file", Shape::Through, &mut |m| write_file(m, mib))?;
        session.step("read 1 file", Shape::Cold, &mut |m| read_file(m, mib, &mut |_| Ok(())))?;
        if self.round == 0 && self.target.keeps() {
            let expected = block();
            session.aside(|m| {
                read_file(m, mib, &mut |b| {
                    ensure!(b == expected, "the file's content is not what was written");
                    Ok(())
                })
            })?;
        }
        session.unmount()?;
        session.image.check()
    }

    fn sharing(&self, session: &mut Session<'_>) -> Result<()> {
        let by = match self.run.larder.as_deref() {
            Some(larder) if self.target.is_larder() => By::Larder(larder),
            _ => By::Linux,
        };
        session.operations = 1.0;
        session.aside(|m| by.fill(m, self.run.files))?;
        session.step("10 snapshots", Shape::Cold, &mut |m| by.snapshot(m))?;
        session
            .step("delete 9 of them", Shape::Through, &mut |m| by.delete(m, 1..SNAPSHOTS, None))?;
        session
            .step("delete all of it", Shape::Through, &mut |m| by.delete(m, 0..1, Some("many")))?;

        let mib = self.run.stream_mib();
        let mut before = 0;
        session.aside(|m| {
            write_file(m, mib)?;
            before = sharing::used(m)?;
            Ok(())
        })?;
        session.step("clone 1 file", Shape::Through, &mut |m| {
            sharing::copy(&m.join(STREAM), &m.join("clone"))
        })?;
        session.aside(|m| {
            let after = sharing::used(m)?;
            let most = before + mib.bytes() / 2;
            ensure!(
                after < most,
                "{before} bytes were used, and {after} with the clone: it is a copy"
            );
            if self.round == 0 {
                fs::rename(m.join("clone"), m.join(STREAM))?;
                let expected = block();
                read_file(m, mib, &mut |b| {
                    ensure!(b == expected, "the clone's content is not that of the file");
                    Ok(())
                })?;
            }
            remove_all(m)
        })?;

        let archive = self.archive.context("no archive")?;
        session.aside(|m| {
            for tree in ["one", "two"] {
                fs::create_dir(m.join(tree))?;
                unpack(&archive.tar, &m.join(tree))?;
            }
            before = sharing::used(m)?;
            Ok(())
        })?;
        let mut same = 0;
        session.step("dedupe 2 trees", Shape::Through, &mut |m| {
            same = by.dedupe(&m.join("one"), &m.join("two"))?;
            Ok(())
        })?;
        session.aside(|m| {
            let after = sharing::used(m)?;
            ensure!(same == sharing::shareable(&m.join("one"))?, "only {same} bytes were compared");
            ensure!(
                after < before - same / 2,
                "{before} bytes were used, and {after} after {same} are shared"
            );
            if self.round == 0 {
                compare(&archive.tar, &m.join("two"))?;
            }
            Ok(())
        })?;
        session.unmount()?;
        session.image.check()
    }

    fn random(&self, session: &mut Session<'_>) -> Result<()> {
        let mib = self.run.stream_mib();
        session.operations = blocks::count(mib) as f64;
        session.step("random 4 KiB", Shape::Through, &mut |m| blocks::write(m, mib))?;
        if self.target.keeps() {
            session.step("random 4 KiB, read", Shape::Cold, &mut |m| blocks::read(m, mib))?;
            if self.round == 0 {
                session.aside(|m| blocks::verify(m, mib))?;
            }
        }
        session.unmount()?;
        session.image.check()
    }
}

/// The steps of one workload on one image.
struct Session<'a> {
    bench: &'a Bench<'a>,
    // Before the image, so that it is dropped first.
    mount: Option<Mount>,
    image: Image<'a>,
    operations: f64,
    done: Vec<Step>,
}

impl Session<'_> {
    /// Ends the mount. The ceiling would forget everything, so it gets another mount at once.
    fn unmount(&mut self) -> Result<()> {
        if !self.bench.target.keeps() {
            return self.mount.as_mut().map_or(Ok(()), Mount::remount);
        }
        self.mount.take().map_or(Ok(()), Mount::unmount)
    }

    /// Ends the mount of something that is not whole.
    fn unmount_damaged(&mut self) -> Result<()> {
        self.mount.take().map_or(Ok(()), |mount| mount.unmount_damaged().map(drop))
    }

    /// Has Linux do something on the image, which is not measured.
    fn by_linux(&mut self, action: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        let mount = self.image.mount_with_kernel()?;
        action(mount.path())?;
        mount.unmount_damaged().map(drop)
    }

    fn step(&mut self, step: &'static str, shape: Shape, action: Action<'_>) -> Result<()> {
        interrupt::check()?;
        if shape != Shape::Warm {
            self.unmount()?;
            self.image.arrange()?;
        }
        let page_cache = PageCache::now()?;
        let mut mount = self.take_mount()?;
        let before = total(mount.stats()?.as_ref());
        let watch = Watch::start(mount.watched(), page_cache)?;
        action(mount.path())?;
        let stats = mount.stats()?;
        self.mount = Some(mount);
        if shape == Shape::Through {
            self.unmount()?;
        }
        let cost = watch.stop()?;
        let after = total(stats.as_ref());
        self.done.push(Step {
            requests: before.zip(after).map(|(b, a)| a.saturating_sub(b) as f64 / self.operations),
            stats,
            ..self.result(step.into(), cost)?
        });
        Ok(())
    }

    /// The steps of a program that measures itself. CPU time and memory are those of all its steps
    /// together. `unmount`: the time of the unmount counts, too.
    fn said(&mut self, unmount: bool, action: Program<'_>) -> Result<()> {
        interrupt::check()?;
        self.unmount()?;
        self.image.arrange()?;
        let page_cache = PageCache::now()?;
        let mut mount = self.take_mount()?;
        let before = total(mount.stats()?.as_ref());
        let watch = Watch::start(mount.watched(), page_cache)?;
        let said = action(mount.path(), &self.image)?;
        let stats = mount.stats()?;
        self.mount = Some(mount);
        let start = Instant::now();
        self.unmount()?;
        let unmounting = start.elapsed().as_secs_f64();
        let together = self.result(Cow::default(), watch.stop()?)?;
        self.image.check()?;
        let floor_seconds = match stats.as_ref().filter(|_| self.bench.target == Target::Larder) {
            Some(stats) => Some(fsync::floor(self.image.file(), stats)?),
            None => None,
        };
        let requests = before.zip(total(stats.as_ref()));
        for (step, said) in said {
            self.done.push(Step {
                step,
                seconds: said.seconds + if unmount { unmounting } else { 0.0 },
                requests: requests
                    .map(|(b, a)| a.saturating_sub(b) as f64 / said.fsyncs as f64)
                    .filter(|n| n.is_finite()),
                stats: stats.clone(),
                fsync: Some(fsync::Extra {
                    fsyncs: said.fsyncs,
                    latency_ms: said.latency_ms,
                    floor_seconds: floor_seconds.filter(|_| unmount),
                }),
                ..together.clone()
            });
        }
        Ok(())
    }

    /// Measures each of these commands as a step, on an image that is not mounted.
    fn commands(&mut self, commands: Vec<(&'static str, Command)>) -> Result<()> {
        for (step, mut command) in commands {
            interrupt::check()?;
            self.image.arrange()?;
            let page_cache = PageCache::now()?;
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            let child = command.spawn().with_context(|| format!("running {command:?}"))?;
            let watch = Watch::start(Watched::Process(child.id()), page_cache)?;
            let out = child.wait_with_output()?;
            let cost = watch.stop()?;
            let said = String::from_utf8_lossy(&out.stderr);
            ensure!(out.status.success(), "{command:?}: {}: {}", out.status, said.trim());
            self.done.push(self.result(step.into(), cost)?);
        }
        Ok(())
    }

    /// The result of a step with this cost.
    fn result(&self, step: Cow<'static, str>, cost: Cost) -> Result<Step> {
        Ok(self.bench.result(step, cost, Some(self.image.cached_mib()?)))
    }

    /// The mount that there is, or a new one.
    fn take_mount(&mut self) -> Result<Mount> {
        self.mount.take().map_or_else(|| self.image.mount(), Ok)
    }

    /// Does something on the mount that is not measured.
    fn aside(&mut self, action: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let mount = self.take_mount()?;
        let result = action(mount.path());
        self.mount = Some(mount);
        result
    }

    fn finish(mut self) -> Result<Vec<Step>> {
        if let Some(mount) = self.mount.take() {
            mount.unmount()?;
        }
        Ok(std::mem::take(&mut self.done))
    }
}

fn total(stats: Option<&serde_json::Value>) -> Option<u64> {
    stats?["requests"]["total"].as_u64()
}

fn unpack(tar: &Path, to: &Path) -> Result<()> {
    let status = Command::new("tar").arg("xf").arg(tar).arg("-C").arg(to).status()?;
    interrupt::check()?;
    if status.success() { Ok(()) } else { bail!("tar failed: {status}") }
}

/// Contents, modes, owners and times against the archive.
fn compare(tar: &Path, with: &Path) -> Result<()> {
    let out = Command::new("tar").arg("df").arg(tar).arg("-C").arg(with).output()?;
    let said = String::from_utf8_lossy(&out.stdout);
    let some: Vec<&str> = said.lines().take(5).collect();
    if out.status.success() {
        Ok(())
    } else {
        bail!("differs from the archive: {}", some.join("; "))
    }
}

/// Reads every file; returns the bytes.
fn read_all(root: &Path) -> Result<u64> {
    let mut buffer = vec![0; 256 << 10];
    let mut bytes = 0;
    for entry in walkdir::WalkDir::new(root) {
        let entry = entry?;
        if entry.file_type().is_file() {
            interrupt::check()?;
            let mut file = File::open(entry.path())?;
            loop {
                let n = file.read(&mut buffer)?;
                if n == 0 {
                    break;
                }
                bytes += n as u64;
            }
        }
    }
    Ok(bytes)
}

/// Looks at the attributes of everything below `root`; returns the number of entries.
fn find(root: &Path) -> Result<u64> {
    let mut entries = 0;
    for entry in walkdir::WalkDir::new(root).min_depth(1) {
        let entry = entry?;
        interrupt::check()?;
        // Not the entry's own `metadata`: that asks for the time of creation as well, which `find`
        // and `ls` do not.
        rustix::fs::lstat(entry.path())?;
        entries += 1;
    }
    Ok(entries)
}

fn remove_all(root: &Path) -> Result<()> {
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        interrupt::check()?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The file that is written and read in sequence.
const STREAM: &str = "stream";

fn write_file(root: &Path, mib: Mib) -> Result<()> {
    write_mib(&mut File::create(root.join(STREAM))?, mib)
}

fn write_mib(file: &mut File, mib: Mib) -> Result<()> {
    let block = block();
    for _ in 0..mib.0 {
        interrupt::check()?;
        file.write_all(&block)?;
    }
    Ok(())
}

/// Has each of these files what [`write_mib`] writes?
fn same_content(files: &[&Path]) -> Result<()> {
    let (expected, mut found) = (block(), vec![0; 1 << 20]);
    for path in files {
        let mut file = File::open(path)?;
        let mib = file.metadata()?.len() >> 20;
        ensure!(mib > 0, "{} is empty", path.display());
        for n in 0..mib {
            file.read_exact(&mut found)?;
            ensure!(found == expected, "{}: MiB {n} is not what was written", path.display());
        }
    }
    Ok(())
}

fn read_file(root: &Path, mib: Mib, look: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut file = File::open(root.join(STREAM))?;
    for _ in 0..mib.0 {
        interrupt::check()?;
        file.read_exact(&mut buffer)?;
        look(&buffer)?;
    }
    Ok(())
}
