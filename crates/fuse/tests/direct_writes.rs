//! Writes past the page cache that the kernel does not wait for, beside reads through it. What the
//! kernel keeps of a file is what was written last.

mod common;

use common::can_mount;
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::handler::{
    DeferredReply, ExecContext, Failure, Handler, Outcome, Reply, Request, Service,
};
use larder_fuse::proto::{NodeId, Opcode, WriteIn};
use larder_fuse::server::Server;
use larder_fuse::{MountOptions, Stats, Transport, mount, serve_handler};
use larder_volume::file::{FileDevice, OpenMode};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

const PAGE: usize = 4096;

/// Memory as direct access wants it.
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Linux's `struct iocb`, little endian.
#[repr(C)]
#[derive(Default)]
struct Control {
    data: u64,
    key: u32,
    flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    more: [u32; 2],
}

/// Writes of one page that were submitted.
struct Submitted<'a> {
    context: libc::c_ulong,
    under_way: usize,
    page: &'a Page,
}

impl<'a> Submitted<'a> {
    /// None yet, and at most `most` at a time.
    fn new(most: usize, page: &'a Page) -> Self {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the context is the kernel's to fill.
        assert_eq!(unsafe { libc::syscall(libc::SYS_io_setup, most, &raw mut context) }, 0);
        Self { context, under_way: 0, page }
    }
    fn submit(&mut self, file: &File, offset: usize) {
        const PWRITE: u16 = 1;
        let mut control = Control {
            opcode: PWRITE,
            fd: file.as_raw_fd().cast_unsigned(),
            buffer: std::ptr::from_ref(self.page).addr() as u64,
            bytes: PAGE as u64,
            offset: offset as i64,
            ..Control::default()
        };
        let mut list = [&raw mut control];
        // SAFETY: the control block is read during the call; the page outlives the write, which
        // `drop` waits for.
        let got = unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
        assert_eq!(got, 1);
        self.under_way += 1;
    }
    /// Waits until this many more have ended.
    fn wait(&mut self, count: usize) {
        let mut events = vec![[0u64; 4]; self.under_way];
        let most = libc::timespec { tv_sec: 30, tv_nsec: 0 };
        // SAFETY: room for as many events as may come.
        let got = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                count,
                events.len(),
                events.as_mut_ptr(),
                &raw const most,
            )
        };
        let got = usize::try_from(got).unwrap();
        assert!(got >= count, "{got} of {count} have ended after 30 s");
        assert!(events[..got].iter().all(|event| event[2] == self.page.0.len() as u64));
        self.under_way -= got;
    }
}

impl Drop for Submitted<'_> {
    fn drop(&mut self) {
        // SAFETY: no memory is involved; it returns when nothing is under way any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// Stops threads while it is closed, and counts those that wait.
#[derive(Default)]
struct Gate {
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    fn close(&self) {
        self.state.lock().unwrap().0 = true;
    }
    fn open(&self) {
        *self.state.lock().unwrap() = (false, 0);
        self.changed.notify_all();
    }
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        if state.0 {
            state.1 += 1;
            self.changed.notify_all();
        }
        drop(self.changed.wait_while(state, |state| state.0).unwrap());
    }
    fn wait_for(&self, count: usize) {
        let state = self.state.lock().unwrap();
        let long = Duration::from_secs(30);
        let (state, late) =
            self.changed.wait_timeout_while(state, long, |state| state.1 < count).unwrap();
        assert!(!late.timed_out(), "{} of {count} have come", state.1);
    }
}

/// Direct writes stop at a gate before they are done, reads through the page cache at one
/// afterwards.
struct Staged {
    server: Server,
    writes: Gate,
    reads: Gate,
}

/// Opens the gates in the end, whatever happens: threads that wait there are waited for.
struct Opened<'a>(&'a Staged);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.writes.open();
        self.0.reads.open();
    }
}

impl Handler for Staged {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let (write, read) = (request.opcode == Opcode::Write, request.opcode == Opcode::Read);
        if (write || read) && context == ExecContext::Queue {
            return Err(Failure::Wait);
        }
        if write && context == ExecContext::Worker {
            assert_ne!(request.arg::<WriteIn>()?.flags & libc::O_DIRECT.cast_unsigned(), 0);
            self.writes.pass();
        }
        let outcome = self.server.handle(request, reply, context);
        if read {
            self.reads.pass();
        }
        outcome
    }
    fn service(&self, opcode: Opcode) -> Service {
        self.server.service(opcode)
    }
    fn handle_deferred(&self, request: &Request<'_>, deferred: DeferredReply) {
        self.server.handle_deferred(request, deferred);
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.server.forget(node, lookups);
    }
}

/// Calls from one CPU come to one queue.
fn stay_on_one_cpu() {
    let mut all = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
    all.clear();
    all.set(first);
    rustix::thread::sched_setaffinity(None, &all).unwrap();
}

/// An image that is mounted, with gates before its server.
struct Scene {
    staged: Arc<Staged>,
    stats: Arc<Stats>,
    filesystem: Arc<Filesystem>,
    point: tempfile::TempDir,
    serving: JoinHandle<()>,
}

impl Scene {
    fn new(image: &Path, transport: Transport) -> Self {
        File::create(image).unwrap().set_len(128 << 20).unwrap();
        let device = FileDevice::open(image, OpenMode::Write).unwrap();
        mkfs(&device, &MkfsOptions { force: true, ..MkfsOptions::default() }).unwrap();
        let filesystem = Filesystem::open(Arc::new(device), OpenOptions::default()).unwrap();
        let point = tempfile::tempdir().unwrap();
        let options = MountOptions { transport, ..MountOptions::default() };
        let mounted = mount(image, point.path(), options).unwrap();
        let stats = Arc::new(Stats::default());
        let server = Server::of(filesystem.clone(), &mounted, Arc::clone(&stats));
        let staged = Arc::new(Staged { server, writes: Gate::default(), reads: Gate::default() });
        let (tell, ready) = mpsc::channel();
        let serving = {
            let (staged, stats) = (Arc::clone(&staged), Arc::clone(&stats));
            std::thread::spawn(move || {
                serve_handler(staged, mounted, stats, |_| tell.send(()).unwrap()).unwrap();
            })
        };
        ready.recv_timeout(Duration::from_secs(20)).expect("served within 20 s");
        Self { staged, stats, filesystem, point, serving }
    }
    fn finish(self) {
        common::unmount_when_idle(self.point.path());
        self.serving.join().unwrap();
        assert_eq!(self.stats.panics(), 0);
        drop(self.staged);
        self.filesystem.close().unwrap();
    }
}

#[test]
fn what_was_read_during_a_write_past_the_cache_does_not_stay() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for transport in [Transport::DevFuse, Transport::Uring] {
        let scene = Scene::new(&dir.path().join("image"), transport);
        stay_on_one_cpu();
        let path = scene.point.path().join("disk");
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::DIRECT;
        let direct = File::from(rustix::fs::open(&path, flags, Mode::RUSR).unwrap());
        for n in 0..4 {
            direct.write_all_at(&Page([1; PAGE]).0, n * PAGE as u64).unwrap();
        }
        let buffered = File::open(&path).unwrap();
        let read = |at: usize| {
            let mut byte = [0];
            buffered.read_exact_at(&mut byte, at as u64).unwrap();
            byte[0]
        };
        assert_eq!(read(0), 1);
        for round in 2..6 {
            write_beside_a_read(&scene.staged, &direct, &read, round);
        }
        // On io_uring only some of the entries may wait for the kernel.
        let answered = if transport == Transport::Uring { MANY - 12 } else { 0 };
        more_writes_than_buffers(&scene.staged, &direct, &read, answered);
        drop((buffered, direct));
        scene.finish();
    }
}

/// The page cache gets a page while it is being written past the cache.
fn write_beside_a_read(staged: &Staged, direct: &File, read: &dyn Fn(usize) -> u8, round: u8) {
    let page = Page([round; PAGE]);
    staged.writes.close();
    let mut write = Submitted::new(1, &page);
    let _opened = Opened(staged);
    write.submit(direct, PAGE);
    staged.writes.wait_for(1);
    // The kernel has dropped its page, and gets this one instead.
    assert_eq!(read(PAGE), round - 1);
    staged.writes.open();
    write.wait(1);
    assert_eq!(read(PAGE), round, "a reader sees the write that has ended");
    assert_eq!((read(0), read(2 * PAGE)), (1, 1));
}

/// More than there are buffers.
const MANY: usize = 40;

/// All of the writes have to wait for a page that the kernel keeps locked for a reader. So many are
/// `answered` nevertheless before the reader goes on.
fn more_writes_than_buffers(
    staged: &Staged,
    direct: &File,
    read: &(dyn Fn(usize) -> u8 + Sync),
    answered: usize,
) {
    let page = Page([9; PAGE]);
    staged.writes.close();
    staged.reads.close();
    let mut writes = Submitted::new(MANY, &page);
    let opened = Opened(staged);
    for n in 1..=MANY {
        // One after the other: a write that comes when no buffer is left waits until another is
        // done, even if more are made.
        writes.submit(direct, PAGE);
        staged.writes.wait_for(n);
    }
    std::thread::scope(|scope| {
        let _opened = opened;
        let reader = scope.spawn(|| read(PAGE));
        staged.reads.wait_for(1);
        staged.writes.open();
        if answered > 0 {
            writes.wait(answered);
        }
        staged.reads.open();
        // The reader's page may have been dropped before it looked into it.
        assert!(matches!(reader.join().unwrap(), 5 | 9));
    });
    writes.wait(writes.under_way);
    assert_eq!(read(PAGE), 9);
}
