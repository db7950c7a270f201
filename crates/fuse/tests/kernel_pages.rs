//! Pages that only the kernel has when a program asks for a sync or a snapshot.

mod common;

use common::{Mount, can_mount};
use larder_fs::{Filesystem, OpenOptions as EngineOptions};
use larder_fuse::handler::{ExecContext, Failure, Handler, Outcome, Reply, Request};
use larder_fuse::proto::{IoctlOut, NodeId, Opcode, WRITE_CACHE, WriteIn};
use larder_fuse::server::Server;
use larder_fuse::{MountOptions, Stats, Transport, control, subvolumes};
use larder_simtest::memserver::MemServer;
use larder_simtest::oracle::scratch;
use larder_volume::file::{FileDevice, OpenMode};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const TRANSPORTS: [Transport; 2] = [Transport::DevFuse, Transport::Uring];
const PAGE: usize = 4096;

/// A shared, writable mapping of a whole file, which needs no open file.
struct Mapping {
    start: *mut u8,
    len: usize,
}

impl Mapping {
    fn of(file: &File) -> Self {
        let len = file.metadata().unwrap().len() as usize;
        // SAFETY: a new mapping of a file that keeps its size.
        let start = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), len }
    }
    fn fill(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: within the mapping, which is not used elsewhere in this process.
        unsafe { self.start.add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and not used any more.
        unsafe {
            // munmap writes, too, but under a lock that the server needs, which is in this process.
            libc::msync(self.start.cast(), self.len, libc::MS_SYNC);
            libc::munmap(self.start.cast(), self.len);
        }
    }
}

/// Counts the bytes that the kernel has written by itself, and notes how many they were when an
/// ioctl came. Every second such write takes its time.
#[derive(Default)]
struct Counting {
    inner: Option<MemServer>,
    writes: AtomicU64,
    bytes: AtomicU64,
    noted: AtomicU64,
}

impl Handler for Counting {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let inner = self.inner.as_ref().unwrap();
        match request.opcode {
            Opcode::Ioctl if context == ExecContext::Queue => Err(Failure::Wait),
            Opcode::Ioctl => {
                self.noted.store(self.bytes.load(Ordering::SeqCst), Ordering::SeqCst);
                reply.value(&IoctlOut::default())
            }
            Opcode::Write if request.arg::<WriteIn>()?.write_flags & WRITE_CACHE != 0 => {
                if context == ExecContext::Queue {
                    if self.writes.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
                        return Err(Failure::Wait);
                    }
                } else {
                    (0..20).for_each(|_| std::thread::yield_now());
                }
                let outcome = inner.handle(request, reply, context);
                self.bytes.fetch_add(request.arg::<WriteIn>()?.size.into(), Ordering::SeqCst);
                outcome
            }
            _ => inner.handle(request, reply, context),
        }
    }
    fn comes_after_writes(&self, request: &Request<'_>) -> bool {
        request.opcode == Opcode::Ioctl
    }
    fn nodes_in_use(&self, most: usize) -> Vec<NodeId> {
        self.inner.as_ref().unwrap().nodes_in_use(most)
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.inner.as_ref().unwrap().forget(node, lookups);
    }
}

/// Every page is a request of its own, and there are far more of them than the kernel lets be under
/// way. On a mount that is at rest, and on one that is written and read all the time.
#[test]
fn an_ioctl_after_syncfs_comes_after_every_page() {
    const PAGES: usize = 1000;
    if !can_mount() {
        return;
    }
    for (transport, busy) in TRANSPORTS.into_iter().flat_map(|t| [(t, false), (t, true)]) {
        let counting =
            Arc::new(Counting { inner: Some(MemServer::new(true)), ..Counting::default() });
        let m = Mount::new(
            Arc::clone(&counting),
            MountOptions { transport, ..MountOptions::default() },
        );
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(m.join("mapped"))
            .unwrap();
        file.set_len((2 * PAGES * PAGE) as u64).unwrap();
        let mut mapping = Mapping::of(&file);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            if busy {
                s.spawn(|| {
                    let mut how = OpenOptions::new();
                    let other =
                        how.read(true).write(true).create_new(true).open(m.join("other")).unwrap();
                    let mut block = [7; 10_000];
                    for n in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                        other.write_all_at(&block, n % 1000 * 10_000).unwrap();
                        if n % 100 == 0 {
                            rustix::fs::fadvise(&other, 0, None, rustix::fs::Advice::DontNeed)
                                .unwrap();
                        }
                        other.read_exact_at(&mut block, 0).unwrap();
                    }
                });
            }
            for round in 1..=20u64 {
                for page in 0..PAGES {
                    mapping.fill(2 * page * PAGE, &round.to_ne_bytes());
                }
                control::sync(m.path()).unwrap();
                let noted = counting.noted.load(Ordering::SeqCst);
                if noted != round * (PAGES * PAGE) as u64 {
                    stop.store(true, Ordering::Relaxed);
                    panic!("{transport:?}, busy: {busy}, round {round}: {noted} bytes were there");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        drop((mapping, file));
        m.finish();
    }
}

/// A program waits for pages when the mount is taken away.
#[test]
fn nobody_waits_for_a_mount_that_is_gone() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(MemServer::new(true), transport);
        let path = m.path().to_owned();
        std::thread::scope(|s| {
            for _ in 0..4 {
                // MemServer knows no ioctl, and after the detaching there is no mount: any error is
                // right.
                s.spawn(|| (0..50).for_each(|_| drop(control::sync(&path))));
            }
            larder_fuse::Unmounter::new(&path).detach().unwrap();
        });
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i / 7) as u8 ^ seed).collect()
}

/// The contents of a file of an image, without the mount.
fn on_disk(image: &Path, copy: &Path, name: &[u8]) -> Vec<u8> {
    fs::copy(image, copy).unwrap();
    let device = FileDevice::open(copy, OpenMode::Read).unwrap();
    let options = EngineOptions { read_only: true, ..EngineOptions::default() };
    let fs = Filesystem::open(Arc::new(device), options).unwrap();
    let attr = fs.lookup(fs.root(), name).unwrap();
    let mut out = vec![0; attr.size as usize];
    let n = fs.read(attr.id, 0, &mut out).unwrap();
    out.truncate(n);
    out
}

#[test]
fn snapshots_and_syncs_have_what_a_live_mapping_changed() {
    const LEN: usize = 3_000_000;
    if !can_mount() {
        return;
    }
    let cases = TRANSPORTS.into_iter().flat_map(|t| [(t, false), (t, true)]);
    for (transport, writeback) in cases {
        let dir = scratch();
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(256 << 20).unwrap();
        let device = FileDevice::open(&image, OpenMode::Write).unwrap();
        larder_fs::mkfs::mkfs(&device, &larder_fs::mkfs::MkfsOptions::default()).unwrap();
        let engine = Filesystem::open(Arc::new(device), EngineOptions::default()).unwrap();
        let server = Arc::new(Server::new(Arc::clone(&engine), true, Arc::new(Stats::default())));
        let m =
            Mount::new(server, MountOptions { transport, writeback, ..MountOptions::default() });
        subvolumes::create(&m.join("s")).unwrap();
        let create = |name: &str| {
            let file =
                OpenOptions::new().read(true).write(true).create_new(true).open(m.join(name));
            let file = file.unwrap();
            file.set_len(LEN as u64).unwrap();
            file
        };
        let (inside, outside) = (create("s/f"), create("f"));
        let (mut in_s, mut at_top) = (Mapping::of(&inside), Mapping::of(&outside));
        for seed in 1..10u8 {
            let data = pattern(LEN, seed);
            in_s.fill(0, &data);
            let name = format!("snap{seed}");
            subvolumes::snapshot(&m.join("s"), &m.join(&name), seed % 2 == 0).unwrap();
            assert!(
                fs::read(m.join(&name).join("f")).unwrap() == data,
                "{transport:?}, {writeback}, {seed}"
            );
            at_top.fill(0, &data);
            // Behind the kernel's cache also what was written.
            outside.write_all_at(b"written", 0).unwrap();
            control::sync(m.path()).unwrap();
            let there = on_disk(&image, &dir.path().join("copy"), b"f");
            assert!(
                there[..7] == *b"written" && there[7..] == data[7..],
                "{transport:?}, {writeback}, {seed}"
            );
        }
        let data = pattern(LEN, 99);
        in_s.fill(0, &data);
        subvolumes::set_read_only(&m.join("s"), true).unwrap();
        // Past the page cache.
        subvolumes::snapshot(&m.join("s"), &m.join("last"), true).unwrap();
        assert!(fs::read(m.join("last/f")).unwrap() == data, "{transport:?}, {writeback}");
        drop((in_s, at_top, inside, outside));
        m.finish();
        engine.close().unwrap();
    }
}

/// More than the kernel's queues have room for: each waits in an entry that the fences need, too.
#[test]
fn hundreds_who_sync_at_once_do_not_block_each_other() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let counting =
            Arc::new(Counting { inner: Some(MemServer::new(true)), ..Counting::default() });
        let m = Mount::new(counting, MountOptions { transport, ..MountOptions::default() });
        fs::write(m.join("f"), b"a file that the kernel knows").unwrap();
        std::thread::scope(|s| {
            for _ in 0..600 {
                s.spawn(|| (0..3).for_each(|_| control::sync(m.path()).unwrap()));
            }
        });
        m.finish();
    }
}
