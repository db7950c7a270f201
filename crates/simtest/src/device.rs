//! A disk in memory that records the order of all accesses, and fails when told to.
//!
//! [`SimDevice`] keeps the contract of [`larder_volume::Device`] and no more: a call that has
//! returned need not survive a power cut. It records the *submission* and the *completion* of every
//! write, flush and discard as separate moments of one global clock ([`Seq`]), because the contract
//! is about these: a flush covers what completed before it was submitted. Callers on several
//! threads really overlap; they share only a short look at the clock. [`crate::crash`] works out
//! from the [`Recording`] what a power cut can leave.
//!
//! Several devices of one file system are one [`SimDevice`] on a stack of disks
//! ([`SimDevice::devices`] gives each of them), so that there is one clock. A flush is one of its
//! own disk, and what is open on one disk says nothing of another.
//!
//! Tests steer it in two ways. A [`Fault`] makes chosen accesses fail, before or half-way through
//! their effect. A [`Gate`] holds chosen accesses between submission and effect until the test
//! opens it, which forces two operations to overlap without sleeping.

use crate::image::{Image, PAGE, Page, Piece, STRIDE, pieces};
use larder_format::{Physical, SUPER_OFFSETS, SUPER_SIZE};
use larder_volume::Device;
use larder_volume::device::Write;
use parking_lot::{Condvar, Mutex, RwLock};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A moment on the device's clock. Every submission, every completion and every [`SimDevice::mark`]
/// has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Seq(pub u64);

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum AccessKind {
    Read,
    Write,
    /// A write with FUA.
    WriteFua,
    Flush,
    Discard,
}

/// An access as predicates and hooks see it. A flush has the address of its disk's first byte and
/// length 0.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// What it does.
    pub kind: AccessKind,
    /// First byte, in the stack of disks.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

impl Access {
    /// The number of the disk.
    #[must_use]
    pub fn disk(&self) -> usize {
        disk_of(self.at)
    }
    /// Is it a write, with FUA or without?
    #[must_use]
    pub fn is_write(&self) -> bool {
        matches!(self.kind, AccessKind::Write | AccessKind::WriteFua)
    }
    /// Does it touch exactly one superblock?
    #[must_use]
    pub fn is_superblock(&self) -> bool {
        self.kind != AccessKind::Flush && is_super(&(self.at..self.at + self.len))
    }
    /// Does it touch the range?
    #[must_use]
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.at < range.end && range.start < self.at + self.len
    }
}

/// Chooses accesses.
pub type Predicate = Arc<dyn Fn(&Access) -> bool + Send + Sync>;

/// How long a fault lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// It strikes once.
    Once,
    /// It strikes from then on.
    Forever,
}

/// What a failing write has done when it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Its first half, cut at 512 bytes.
    Half,
    /// Everything: only the report is lost.
    All,
}

/// Makes accesses fail.
#[derive(Clone)]
pub struct Fault {
    /// Which accesses count.
    pub matches: Predicate,
    /// How many of them pass before the first that fails.
    pub skip: u64,
    /// Once or from then on.
    pub lasting: Lasting,
    /// What a failing write leaves behind.
    pub effect: Effect,
    /// Error to report.
    pub error: io::ErrorKind,
    /// Panics instead: a broken invariant somewhere below the caller.
    pub panics: bool,
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fault")
            .field("skip", &self.skip)
            .field("lasting", &self.lasting)
            .field("effect", &self.effect)
            .field("panics", &self.panics)
            .finish_non_exhaustive()
    }
}

impl Fault {
    /// The access number `n` (from 0) that matches fails, once, without effect.
    pub fn nth(n: u64, matches: impl Fn(&Access) -> bool + Send + Sync + 'static) -> Self {
        Self {
            matches: Arc::new(matches),
            skip: n,
            lasting: Lasting::Once,
            effect: Effect::None,
            error: io::ErrorKind::Other,
            panics: false,
        }
    }
    /// The same, but that it panics in the thread that makes the access, quietly.
    #[must_use]
    pub fn panicking(mut self) -> Self {
        self.panics = true;
        self
    }
    /// The same, and all that match afterwards.
    #[must_use]
    pub fn forever(mut self) -> Self {
        self.lasting = Lasting::Forever;
        self
    }
    /// The same, with an effect.
    #[must_use]
    pub fn with_effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }
}

/// What a recorded operation did.
#[derive(Clone, Debug)]
pub enum OpKind {
    /// A write, cut into pages.
    Write {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Durable when completed?
        fua: bool,
        /// The data.
        pieces: Arc<[Piece]>,
    },
    /// A flush of a disk.
    Flush {
        /// Its number.
        disk: usize,
    },
    /// A discard; `pieces` is what the range reads as afterwards, if that differs from before.
    Discard {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// What the range reads as.
        pieces: Arc<[Piece]>,
    },
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// When.
    pub at: Seq,
    /// Without error?
    pub ok: bool,
}

/// A recorded operation.
#[derive(Clone, Debug)]
pub struct Op {
    /// What it did.
    pub kind: OpKind,
    /// When the caller handed it over.
    pub submitted: Seq,
    /// When the call returned; `None` while it runs.
    pub completed: Option<Completion>,
}

/// Everything that happened to a device since it was made, and what it held before.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Content at the beginning, all of it durable.
    pub base: Image,
    /// Operations in order of submission.
    pub ops: Vec<Op>,
    /// The moment the recording was taken; all its moments are before this one.
    pub end: Seq,
}

/// What discarded ranges read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DiscardEffect {
    /// Nothing changes.
    Ignore,
    /// Zeros.
    Zero,
    /// Bytes that no file system wrote: a read of a range that is still in use shows.
    #[default]
    Poison,
}

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub discards: u64,
    /// Writes and discards that were refused because the device is read-only.
    pub refused: u64,
    /// Faults that struck.
    pub faults: u64,
}

#[derive(Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    refused: AtomicU64,
    faults: AtomicU64,
}

struct Log {
    next: u64,
    ops: Vec<Op>,
}

impl Log {
    fn tick(&mut self) -> Seq {
        self.next += 1;
        Seq(self.next)
    }
}

struct FaultState {
    fault: Fault,
    seen: u64,
    spent: bool,
}

/// The simulated disk. See the module's text.
pub struct SimDevice {
    name: String,
    sizes: Vec<u64>,
    read_only: bool,
    fua: bool,
    record: bool,
    discard: DiscardEffect,
    base: Image,
    image: RwLock<Image>,
    log: Mutex<Log>,
    faults: Mutex<Vec<FaultState>>,
    gates: RwLock<Vec<Arc<GateState>>>,
    counters: Counters,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDevice")
            .field("name", &self.name)
            .field("sizes", &self.sizes)
            .finish_non_exhaustive()
    }
}

impl SimDevice {
    /// A writable device that holds `image` and records what happens to it.
    #[must_use]
    pub fn new(image: Image) -> Self {
        let mut base = image;
        base.freeze();
        Self {
            name: "sim".into(),
            sizes: base.sizes().to_vec(),
            read_only: false,
            fua: false,
            record: true,
            discard: DiscardEffect::default(),
            image: RwLock::new(base.clone()),
            base,
            log: Mutex::new(Log { next: 0, ops: Vec::new() }),
            faults: Mutex::default(),
            gates: RwLock::default(),
            counters: Counters::default(),
        }
    }
    /// With this name in messages.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
    /// Refusing writes.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }
    /// Taking FUA writes.
    #[must_use]
    pub fn with_fua(mut self) -> Self {
        self.fua = true;
        self
    }
    /// Not recording: for devices that no crash state is made of.
    #[must_use]
    pub fn unrecorded(mut self) -> Self {
        self.record = false;
        self
    }
    /// With this effect of discards.
    #[must_use]
    pub fn with_discard(mut self, effect: DiscardEffect) -> Self {
        self.discard = effect;
        self
    }

    /// The disks that are there, each as a device of its own.
    #[must_use]
    pub fn devices(self: &Arc<Self>) -> Vec<Arc<dyn Device>> {
        if let [_] = self.sizes[..] {
            return vec![self.clone()];
        }
        let there = (0..self.sizes.len()).filter(|n| self.sizes[*n] > 0);
        let disk = |number| -> Arc<dyn Device> { Arc::new(Disk { number, of: self.clone() }) };
        there.map(disk).collect()
    }

    /// A new moment, to be compared with those of accesses.
    pub fn mark(&self) -> Seq {
        self.log.lock().tick()
    }

    /// Everything recorded up to now.
    #[must_use]
    pub fn recording(&self) -> Recording {
        let mut log = self.log.lock();
        let end = log.tick();
        Recording { base: self.base.clone(), ops: log.ops.clone(), end }
    }

    /// What the device holds now, with all completed writes.
    #[must_use]
    pub fn image(&self) -> Image {
        self.image.read().clone()
    }

    /// Accesses up to now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        Counts {
            reads: get(&self.counters.reads),
            writes: get(&self.counters.writes),
            flushes: get(&self.counters.flushes),
            discards: get(&self.counters.discards),
            refused: get(&self.counters.refused),
            faults: get(&self.counters.faults),
        }
    }

    /// Adds a fault. Its count starts now.
    pub fn inject(&self, fault: Fault) {
        self.faults.lock().push(FaultState { fault, seen: 0, spent: false });
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.faults.lock().clear();
    }

    /// Holds accesses that match, after their submission was recorded and before they take effect,
    /// until the gate is opened or dropped.
    pub fn gate(
        self: &Arc<Self>,
        matches: impl Fn(&Access) -> bool + Send + Sync + 'static,
    ) -> Gate {
        let state = Arc::new(GateState {
            matches: Arc::new(matches),
            inner: Mutex::new(GateInner { open: false, waiting: 0, passed: 0 }),
            changed: Condvar::new(),
        });
        self.gates.write().push(state.clone());
        Gate { device: self.clone(), state }
    }

    fn check(&self, access: &Access, len: usize) -> io::Result<()> {
        let size = self.sizes.get(access.disk()).copied().unwrap_or(0);
        let at = access.at % STRIDE;
        if at.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "beyond the end of the simulated device",
            ));
        }
        Ok(())
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.read_only {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the simulated device is read-only",
            ));
        }
        Ok(())
    }

    fn submit(&self, kind: OpKind) -> usize {
        let mut log = self.log.lock();
        let submitted = log.tick();
        if !self.record {
            return 0;
        }
        log.ops.push(Op { kind, submitted, completed: None });
        log.ops.len() - 1
    }

    fn complete(&self, index: usize, ok: bool) {
        let mut log = self.log.lock();
        let at = log.tick();
        if self.record {
            log.ops[index].completed = Some(Completion { at, ok });
        }
    }

    /// Waits at gates, then says whether a fault strikes.
    fn pass(&self, access: &Access) -> Option<Strike> {
        let gates: Vec<_> =
            self.gates.read().iter().filter(|g| (g.matches)(access)).cloned().collect();
        for gate in gates {
            gate.wait();
        }
        let mut faults = self.faults.lock();
        for state in faults.iter_mut().filter(|s| !s.spent && (s.fault.matches)(access)) {
            state.seen += 1;
            if state.seen > state.fault.skip {
                state.spent = state.fault.lasting == Lasting::Once;
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                let error =
                    io::Error::new(state.fault.error, format!("injected failure of {access:?}"));
                return Some(Strike {
                    effect: state.fault.effect,
                    error,
                    panics: state.fault.panics,
                });
            }
        }
        None
    }

    fn flush_disk(&self, disk: usize) -> io::Result<()> {
        let access = Access { kind: AccessKind::Flush, at: disk as u64 * STRIDE, len: 0 };
        self.check(&access, 0)?;
        self.counters.flushes.fetch_add(1, Ordering::Relaxed);
        if self.read_only {
            return Ok(());
        }
        let index = self.submit(OpKind::Flush { disk });
        let fault = self.pass(&access);
        self.complete(index, fault.is_none());
        fault.map_or(Ok(()), Strike::fail)
    }

    fn write(&self, kind: AccessKind, at: u64, data: &[u8]) -> io::Result<()> {
        self.begin_write(kind, at, data).and_then(|begun| self.end_write(begun))
    }

    /// Submits a write.
    fn begin_write(&self, kind: AccessKind, at: u64, data: &[u8]) -> io::Result<Begun> {
        let access = Access { kind, at, len: data.len() as u64 };
        self.check(&access, data.len())?;
        self.check_writable()?;
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        let pieces: Arc<[Piece]> = pieces(at, data).into();
        let index = self.submit(OpKind::Write {
            at: access.at,
            len: access.len,
            fua: access.kind == AccessKind::WriteFua,
            pieces: pieces.clone(),
        });
        Ok(Begun { access, pieces, index })
    }

    /// Has a submitted write take effect, and complete.
    fn end_write(&self, Begun { access, pieces, index }: Begun) -> io::Result<()> {
        let strike = self.pass(&access);
        let end = match strike.as_ref().map_or(Effect::All, |s| s.effect) {
            Effect::None => access.at,
            Effect::Half => access.at + access.len / 2 / 512 * 512,
            Effect::All => access.at + access.len,
        };
        if end > access.at {
            let mut image = self.image.write();
            for piece in pieces.iter().filter_map(|p| p.clip(access.at..end)) {
                image.put(&piece);
            }
        }
        self.complete(index, strike.is_none());
        strike.map_or(Ok(()), Strike::fail)
    }
}

/// A write between submission and effect.
struct Begun {
    access: Access,
    pieces: Arc<[Piece]>,
    index: usize,
}

/// How the message of a panic begins that a [`Fault`] asked for.
pub(crate) const INJECTED_PANIC: &str = "injected panic";

/// A fault that strikes.
struct Strike {
    effect: Effect,
    error: io::Error,
    panics: bool,
}

impl Strike {
    /// Panics or fails.
    fn fail(self) -> io::Result<()> {
        if self.panics {
            // Not `panic!`, which would also print: tests do this hundreds of times.
            std::panic::resume_unwind(Box::new(format!("{INJECTED_PANIC}: {}", self.error)));
        }
        Err(self.error)
    }
}

/// Is this range of a stack exactly one superblock of a disk?
pub(crate) fn is_super(range: &Range<u64>) -> bool {
    let len = range.end - range.start;
    len == SUPER_SIZE as u64 && SUPER_OFFSETS.contains(&Physical(range.start % STRIDE))
}

/// The number of the disk that an address lies on.
pub(crate) fn disk_of(at: u64) -> usize {
    usize::try_from(at / STRIDE).expect("few disks")
}

/// The parts of a write, as one.
fn joined(parts: &[io::IoSlice<'_>]) -> Vec<u8> {
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| all.extend_from_slice(part));
    all
}

/// One disk of a stack.
#[derive(Debug)]
struct Disk {
    number: usize,
    of: Arc<SimDevice>,
}

impl Disk {
    /// Where the disk's byte lies in the stack.
    fn at(&self, at: Physical) -> Physical {
        // What is behind the end of this disk must not be on the next one.
        Physical(self.number as u64 * STRIDE + at.0.min(STRIDE - 1))
    }
}

impl Device for Disk {
    fn name(&self) -> String {
        format!("{}-{}", self.of.name, self.number + 1)
    }
    fn size(&self) -> u64 {
        self.of.sizes[self.number]
    }
    fn is_read_only(&self) -> bool {
        self.of.read_only
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.of.read_at(self.at(at), buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.of.write_at(self.at(at), data)
    }
    fn write_vectored_at(&self, at: Physical, data: &[io::IoSlice<'_>]) -> io::Result<()> {
        self.of.write_vectored_at(self.at(at), data)
    }
    fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        let moved = writes.iter().map(|w| Write { at: self.at(w.at), data: w.data });
        self.of.write_batch(&moved.collect::<Vec<_>>())
    }
    fn flush(&self) -> io::Result<()> {
        self.of.flush_disk(self.number)
    }
    fn write_fua(&self, at: Physical, data: &[u8]) -> Option<io::Result<()>> {
        self.of.write_fua(self.at(at), data)
    }
    fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
        self.of.discard(self.at(at), len)
    }
}

impl Device for SimDevice {
    fn name(&self) -> String {
        self.name.clone()
    }
    fn size(&self) -> u64 {
        self.sizes[0]
    }
    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        let access = Access { kind: AccessKind::Read, at: at.0, len: buf.len() as u64 };
        self.check(&access, buf.len())?;
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.pass(&access).map_or(Ok(()), Strike::fail)?;
        self.image.read().read(at.0, buf);
        Ok(())
    }

    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.write(AccessKind::Write, at.0, data)
    }

    fn write_vectored_at(&self, at: Physical, data: &[io::IoSlice<'_>]) -> io::Result<()> {
        // One operation, as on a real device: it may tear anywhere.
        self.write_at(at, &joined(data))
    }

    fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        // All are submitted before the first takes effect, and the last one completes first.
        let begun: Vec<io::Result<Begun>> = writes
            .iter()
            .map(|w| self.begin_write(AccessKind::Write, w.at.0, &joined(w.data)))
            .collect();
        let mut ended: Vec<_> =
            begun.into_iter().rev().map(|b| b.and_then(|b| self.end_write(b))).collect();
        ended.reverse();
        ended
    }

    fn flush(&self) -> io::Result<()> {
        self.flush_disk(0)
    }

    fn write_fua(&self, at: Physical, data: &[u8]) -> Option<io::Result<()>> {
        self.fua.then(|| self.write(AccessKind::WriteFua, at.0, data))
    }

    fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
        let access = Access { kind: AccessKind::Discard, at: at.0, len };
        self.check(&access, usize::try_from(len).unwrap_or(usize::MAX))?;
        self.check_writable()?;
        self.counters.discards.fetch_add(1, Ordering::Relaxed);
        let pieces: Arc<[Piece]> = match self.discard {
            DiscardEffect::Ignore => Arc::new([]),
            DiscardEffect::Zero => filled(at.0..at.0 + len, 0, &self.image.read()).into(),
            DiscardEffect::Poison => filled(at.0..at.0 + len, 0xdb, &self.image.read()).into(),
        };
        let index = self.submit(OpKind::Discard { at: at.0, len, pieces: pieces.clone() });
        let fault = self.pass(&access);
        if fault.is_none() {
            let mut image = self.image.write();
            pieces.iter().for_each(|p| image.put(p));
        }
        self.complete(index, fault.is_none());
        fault.map_or(Ok(()), Strike::fail)
    }
}

/// Pieces that fill a range with one byte. Pages that were never written stay so: they hold nothing
/// that could be lost.
fn filled(range: Range<u64>, byte: u8, image: &Image) -> Vec<Piece> {
    let data = Page::new([byte; PAGE]);
    let page = PAGE as u64;
    let whole = |n| Piece { page: n, start: 0, end: PAGE, data: data.clone() };
    (range.start / page..range.end.div_ceil(page))
        .filter(|n| image.page(*n).is_some())
        .filter_map(|n| whole(n).clip(range.clone()))
        .collect()
}

struct GateInner {
    open: bool,
    waiting: u64,
    passed: u64,
}

struct GateState {
    matches: Predicate,
    inner: Mutex<GateInner>,
    changed: Condvar,
}

impl GateState {
    fn wait(&self) {
        let mut inner = self.inner.lock();
        if inner.open {
            return;
        }
        inner.waiting += 1;
        self.changed.notify_all();
        let ticket = inner.waiting;
        while !inner.open && inner.passed < ticket {
            self.changed.wait(&mut inner);
        }
    }
}

/// Holds accesses; see [`SimDevice::gate`]. Dropping it opens it for good.
pub struct Gate {
    device: Arc<SimDevice>,
    state: Arc<GateState>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.state.inner.lock();
        write!(f, "Gate({} arrived, {} let through)", inner.waiting, inner.passed)
    }
}

impl Gate {
    /// Waits until `n` accesses in all have arrived at the gate. `false` if that takes longer than
    /// `patience`.
    #[must_use]
    pub fn wait_for(&self, n: u64, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut inner = self.state.inner.lock();
        while inner.waiting < n {
            if self.state.changed.wait_until(&mut inner, until).timed_out() {
                return inner.waiting >= n;
            }
        }
        true
    }
    /// Lets the `n` accesses that arrived first and still wait go on.
    pub fn let_through(&self, n: u64) {
        self.state.inner.lock().passed += n;
        self.state.changed.notify_all();
    }
    /// Opens the gate for good.
    pub fn open(&self) {
        self.state.inner.lock().open = true;
        self.state.changed.notify_all();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
        self.device.gates.write().retain(|g| !Arc::ptr_eq(g, &self.state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const SECOND: Duration = Duration::from_secs(10);

    fn device() -> Arc<SimDevice> {
        Arc::new(SimDevice::new(Image::zeroed(1 << 20)))
    }

    fn read(d: &SimDevice, at: u64, len: usize) -> Vec<u8> {
        let mut buf = vec![0xaa; len];
        d.read_at(Physical(at), &mut buf).unwrap();
        buf
    }

    #[test]
    fn accesses_beyond_the_end_are_errors_and_read_only_refuses() {
        let d = device();
        let mut buf = [0; 10];
        assert_eq!(
            d.read_at(Physical((1 << 20) - 5), &mut buf).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert!(d.write_at(Physical(u64::MAX - 2), b"abcdef").is_err());
        let ro = SimDevice::new(Image::zeroed(1 << 20)).read_only();
        assert!(ro.write_at(Physical(0), b"x").is_err());
        assert!(ro.discard(Physical(0), 4096).is_err());
        assert!(ro.flush().is_ok());
        assert_eq!(ro.counts().refused, 2);
        assert!(ro.recording().ops.is_empty());
    }

    #[test]
    fn a_vectored_write_is_one_operation_and_discarded_pages_are_poisoned() {
        let d = device();
        d.write_vectored_at(Physical(100), &[io::IoSlice::new(b"ab"), io::IoSlice::new(b"cd")])
            .unwrap();
        assert_eq!(read(&d, 100, 4), b"abcd");
        assert_eq!(d.recording().ops.len(), 1);
        d.discard(Physical(0), 8192).unwrap();
        assert_eq!(read(&d, 100, 4), [0xdb; 4]);
        assert_eq!(read(&d, 4096, 4), [0; 4], "never written, so nothing to lose");
    }

    #[test]
    fn the_nth_matching_access_fails_once_or_forever_with_the_chosen_effect() {
        let d = device();
        d.inject(Fault::nth(1, Access::is_write).with_effect(Effect::Half));
        d.write_at(Physical(0), &[1; 4096]).unwrap();
        assert!(d.write_at(Physical(4096), &[2; 4096]).is_err());
        d.write_at(Physical(8192), &[3; 4096]).unwrap();
        assert_eq!(read(&d, 4096, 2048), [2; 2048]);
        assert_eq!(read(&d, 4096 + 2048, 2048), [0; 2048]);
        d.heal();
        d.inject(
            Fault::nth(0, |a| a.kind == AccessKind::Read && a.overlaps(&(4096..4097))).forever(),
        );
        let mut buf = [0; 4096];
        for _ in 0..3 {
            assert!(d.read_at(Physical(4096), &mut buf).is_err());
            d.read_at(Physical(0), &mut buf).unwrap();
        }
        d.heal();
        d.inject(Fault::nth(0, |a| a.kind == AccessKind::Flush));
        assert!(d.flush().is_err());
        assert!(d.flush().is_ok());
        assert_eq!(d.counts().faults, 5);
    }

    #[test]
    fn gated_accesses_overlap_and_their_record_says_so() {
        let d = device();
        let gate = d.gate(Access::is_write);
        std::thread::scope(|s| {
            let writer = s.spawn(|| d.write_at(Physical(0), &[1; 512]));
            assert!(gate.wait_for(1, SECOND));
            d.flush().unwrap();
            assert_eq!(read(&d, 0, 1), [0], "held before its effect");
            gate.open();
            writer.join().unwrap().unwrap();
        });
        let ops = d.recording().ops;
        assert!(ops[0].submitted < ops[1].submitted);
        assert!(ops[1].completed.unwrap().at < ops[0].completed.unwrap().at);
        drop(gate);
        d.write_at(Physical(0), &[2; 512]).unwrap();
    }
}
