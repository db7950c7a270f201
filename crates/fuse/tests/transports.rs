//! Both transports, with the in-memory server behind them.

mod common;

use common::{Mount, can_mount};
use larder_fuse::handler::{ExecContext, Failure, Handler, Outcome, Reply, Request};
use larder_fuse::proto::{NodeId, Opcode};
use larder_fuse::{MountOptions, Transport};
use larder_simtest::memserver::MemServer;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

const TRANSPORTS: [Transport; 2] = [Transport::DevFuse, Transport::Uring];

/// Makes every second request wait, so that the workers' paths are used.
struct Slow(MemServer, AtomicU64);

impl Slow {
    fn new() -> Self {
        Self(MemServer::new(true), AtomicU64::new(0))
    }
}

impl Handler for Slow {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        if context == ExecContext::Queue && self.1.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)
        {
            // What a refused request leaves in the buffer does not matter.
            let _ = reply.bytes(&[0xee; 40]);
            return Err(Failure::Wait);
        }
        self.0.handle(request, reply, context)
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.0.forget(node, lookups);
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 4096) as u8).collect()
}

/// A bit of everything.
fn exercise(m: &Mount) {
    // Data of several requests, read back past the cache.
    let data = pattern(3 << 20);
    fs::write(m.join("big"), &data).unwrap();
    let direct =
        rustix::fs::open(m.join("big"), OFlags::RDWR | OFlags::DIRECT, Mode::empty()).unwrap();
    let mut direct = File::from(direct);
    let mut back = Vec::new();
    direct.read_to_end(&mut back).unwrap();
    assert!(back == data, "what was written comes back");
    // Reads arrive in megabytes.
    rustix::fs::fadvise(&direct, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let before = m.stats.of(Opcode::Read);
    assert!(fs::read(m.join("big")).unwrap() == data);
    assert!(m.stats.of(Opcode::Read) - before < 10);
    // Direct writes at any offset.
    direct.write_all_at(&[0xaa; 100], 3).unwrap();
    let mut part = [0; 104];
    File::open(m.join("big")).unwrap().read_exact(&mut part).unwrap();
    assert_eq!(part[..3], data[..3]);
    assert!(part[3..103].iter().all(|b| *b == 0xaa));

    // O_TRUNC keeps nothing of what was there.
    fs::write(m.join("t"), b"a long first content").unwrap();
    fs::write(m.join("t"), b"ab").unwrap();
    assert_eq!(fs::read(m.join("t")).unwrap(), b"ab");
    assert_eq!(fs::metadata(m.join("t")).unwrap().len(), 2);
    let grown = OpenOptions::new().write(true).open(m.join("t")).unwrap();
    grown.set_len(6).unwrap();
    assert_eq!(fs::read(m.join("t")).unwrap(), b"ab\0\0\0\0");

    // Names.
    fs::create_dir(m.join("d")).unwrap();
    fs::rename(m.join("t"), m.join("d/t2")).unwrap();
    assert!(!m.join("t").exists());
    assert_eq!(fs::read(m.join("d/t2")).unwrap().len(), 6);
    assert_eq!(fs::remove_dir(m.join("d")).unwrap_err().raw_os_error(), Some(libc::ENOTEMPTY));
    fs::hard_link(m.join("d/t2"), m.join("link")).unwrap();
    assert_eq!(fs::metadata(m.join("link")).unwrap().nlink(), 2);
    fs::remove_file(m.join("d/t2")).unwrap();
    assert_eq!(fs::metadata(m.join("link")).unwrap().nlink(), 1);
    fs::remove_dir(m.join("d")).unwrap();
    let target = "x".repeat(3000);
    symlink(&target, m.join("sym")).unwrap();
    assert_eq!(fs::read_link(m.join("sym")).unwrap().to_str(), Some(&target[..]));

    // Unlinked but open.
    let mut open =
        OpenOptions::new().read(true).write(true).create_new(true).open(m.join("gone")).unwrap();
    open.write_all(b"still here").unwrap();
    fs::remove_file(m.join("gone")).unwrap();
    open.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), open.metadata().unwrap().nlink()), ("still here", 0));
    drop(open);

    // Extended attributes, one of them as large as they get.
    let value = pattern(65_536);
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(m.join("link"), "user.small", b"v", none).unwrap();
    rustix::fs::setxattr(m.join("link"), "user.large", &value, none).unwrap();
    let mut got = vec![0; 70_000];
    let n = rustix::fs::getxattr(m.join("link"), "user.large", &mut got[..]).unwrap();
    assert!(got[..n] == value);
    let n = rustix::fs::listxattr(m.join("link"), &mut got[..]).unwrap();
    assert_eq!(&got[..n], b"user.large\0user.small\0");
    rustix::fs::removexattr(m.join("link"), "user.small").unwrap();
    assert_eq!(
        rustix::fs::getxattr(m.join("link"), "user.small", &mut got[..]).unwrap_err(),
        rustix::io::Errno::NODATA
    );

    mapped(m);
}

/// A shared mapping reads and writes the file.
fn mapped(m: &Mount) {
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(m.join("mapped")).unwrap();
    file.set_len(8192).unwrap();
    // SAFETY: a new mapping of a file that stays open and as long as it is, unmapped below.
    unsafe {
        use std::os::fd::AsRawFd;
        let p = libc::mmap(
            std::ptr::null_mut(),
            8192,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(p, libc::MAP_FAILED);
        p.cast::<u8>().add(5000).write(42);
        assert_eq!(libc::msync(p, 8192, libc::MS_SYNC), 0);
        assert_eq!(libc::munmap(p, 8192), 0);
    }
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5000).unwrap();
    assert_eq!(byte, [42]);
    assert!(m.stats.of(Opcode::Fsync) >= 1, "msync asks for durability");
}

fn many_entries(m: &Mount, count: usize) {
    for i in 0..count {
        File::create(m.join(&format!("entry-{i}"))).unwrap();
    }
    let names: BTreeSet<String> = fs::read_dir(m.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), count);
    let total: u64 =
        fs::read_dir(m.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(total, 0);
}

#[test]
fn everything_on_both_transports() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(MemServer::new(true), transport);
        assert_eq!(m.ready.uring, transport == Transport::Uring);
        exercise(&m);
        assert_eq!(m.stats.deferred(), 0);
        m.finish();
    }
}

#[test]
fn everything_when_requests_wait() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(Slow::new(), transport);
        exercise(&m);
        assert!(m.stats.deferred() > 20);
        m.finish();
    }
}

#[test]
fn everything_with_writeback() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let options = MountOptions { writeback: true, transport, ..MountOptions::default() };
        let m = Mount::new(std::sync::Arc::new(MemServer::new(true)), options);
        assert!(m.ready.writeback);
        exercise(&m);
        merges(&m);
        m.finish();
    }
}

/// Pages that are written in any order reach the server together, as root.
fn merges(m: &Mount) {
    const PAGES: u64 = 2048;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let device = fs::metadata(m.join(".")).unwrap().dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let limit = fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/strict_limit")).unwrap();
    assert_eq!(limit.trim(), "0");
    let path = m.join("scattered");
    let file = fs::File::create(&path).unwrap();
    let before = m.stats.of(Opcode::Write);
    for n in 0..PAGES {
        // Each once: the factor and the number have no divisor in common.
        let page = n * 1237 % PAGES;
        file.write_all_at(&[(page % 251) as u8 + 1; 4096], page * 4096).unwrap();
    }
    file.sync_data().unwrap();
    let requests = m.stats.of(Opcode::Write) - before;
    assert!(requests < PAGES / 4, "{requests} requests");
    let bytes = fs::read(&path).unwrap();
    assert!((0..PAGES).all(|page| bytes[page as usize * 4096] == (page % 251) as u8 + 1));
}

#[test]
fn large_directories_and_few_requests() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(MemServer::new(true), transport);
        many_entries(&m, 20_000);
        // A file is made with LOOKUP and MKNOD, without OPEN, FLUSH, RELEASE or GETATTR of its
        // directory.
        assert_eq!(m.stats.of(Opcode::Mknod), 20_000);
        assert!(m.stats.of(Opcode::Lookup) <= 20_000 + 10);
        for op in [Opcode::Create, Opcode::Open, Opcode::Opendir, Opcode::Flush] {
            assert!(m.stats.of(op) <= 1, "{} is asked at most once", op.name());
        }
        assert_eq!(m.stats.of(Opcode::Release), 0);
        assert!(m.stats.of(Opcode::Getattr) < 200, "{}", m.stats.of(Opcode::Getattr));
        m.finish();
    }
}

#[test]
fn many_processes_at_once() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(Slow::new(), transport);
        std::thread::scope(|scope| {
            for t in 0..16 {
                let m = &m;
                scope.spawn(move || {
                    let dir = m.join(&format!("dir{t}"));
                    fs::create_dir(&dir).unwrap();
                    for i in 0..100 {
                        let path = dir.join(format!("f{i}"));
                        let data = pattern(i * 977);
                        let mut f = File::create(&path).unwrap();
                        f.write_all(&data).unwrap();
                        f.sync_all().unwrap();
                        assert!(fs::read(&path).unwrap() == data);
                        if i % 2 == 0 {
                            fs::remove_file(&path).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(m.join("dir3")).unwrap().count(), 50);
        m.finish();
    }
}

/// Answers no `fsync` before all have come.
struct Gathering(MemServer, Barrier);

/// How many may certainly wait at once, even if all of them called from one CPU.
fn together() -> usize {
    200 / std::thread::available_parallelism().map_or(2, usize::from).max(2)
}

impl Handler for Gathering {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        if request.opcode == Opcode::Fsync {
            if context == ExecContext::Queue {
                return Err(Failure::Wait);
            }
            self.1.wait();
        }
        self.0.handle(request, reply, context)
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.0.forget(node, lookups);
    }
}

#[test]
fn those_who_wait_do_not_hold_up_others() {
    if !can_mount() {
        return;
    }
    let together = together();
    for transport in TRANSPORTS {
        let m = Mount::over(Gathering(MemServer::new(true), Barrier::new(together)), transport);
        std::thread::scope(|scope| {
            for t in 0..together {
                let m = &m;
                scope.spawn(move || {
                    let mut f = File::create(m.join(&format!("f{t}"))).unwrap();
                    for _ in 0..2 {
                        f.write_all(&[t as u8; 5000]).unwrap();
                        f.sync_all().unwrap();
                    }
                });
            }
        });
        for t in 0..together {
            assert!(fs::read(m.join(&format!("f{t}"))).unwrap() == [t as u8; 10_000]);
        }
        // Entries that were registered late carry large pieces as well.
        let data = pattern(3 << 20);
        std::thread::scope(|scope| {
            for t in 0..4 {
                let (m, data) = (&m, &data);
                scope.spawn(move || {
                    fs::write(m.join(&format!("large{t}")), data).unwrap();
                    let file = File::open(m.join(&format!("large{t}"))).unwrap();
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                    assert!(fs::read(m.join(&format!("large{t}"))).unwrap() == *data);
                });
            }
        });
        m.finish();
    }
}

/// Panics where it is asked to.
struct Panicky(MemServer);

impl Handler for Panicky {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        if request.opcode == Opcode::Lookup {
            match request.name()? {
                b"now" => panic!("asked to panic"),
                b"later" if context == ExecContext::Queue => return Err(Failure::Wait),
                b"later" => panic!("asked to panic on a worker"),
                _ => {}
            }
        }
        self.0.handle(request, reply, context)
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.0.forget(node, lookups);
    }
}

#[test]
fn a_panic_is_an_io_error_and_no_more() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(Panicky(MemServer::new(true)), transport);
        for _ in 0..50 {
            for name in ["now", "later"] {
                assert_eq!(fs::metadata(m.join(name)).unwrap_err().raw_os_error(), Some(libc::EIO));
            }
        }
        fs::write(m.join("fine"), b"yes").unwrap();
        assert_eq!(fs::read(m.join("fine")).unwrap(), b"yes");
        assert_eq!(m.stats.panics(), 100);
        m.finish();
    }
}

/// Forgets nothing before STATFS comes, and slowly then. It has to know what the kernel forgot
/// before it answers.
struct Forgetful {
    server: MemServer,
    asked: AtomicBool,
    forgotten: AtomicU64,
    at_the_answer: AtomicU64,
}

impl Handler for Forgetful {
    fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        if request.opcode == Opcode::Statfs {
            if context == ExecContext::Queue {
                self.asked.store(true, Ordering::Release);
                return Err(Failure::Wait);
            }
            self.at_the_answer.store(self.forgotten.load(Ordering::Acquire), Ordering::Release);
        }
        self.server.handle(request, reply, context)
    }
    fn comes_after_forgets(&self, request: &Request<'_>) -> bool {
        request.opcode == Opcode::Statfs
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        while !self.asked.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        (0..1000).for_each(|_| std::hint::spin_loop());
        self.server.forget(node, lookups);
        self.forgotten.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn what_the_kernel_forgot_before_a_sync_is_forgotten_before_its_answer() {
    const FILES: u64 = 300;
    if !can_mount() {
        return;
    }
    let handler = Arc::new(Forgetful {
        server: MemServer::new(true),
        asked: AtomicBool::new(false),
        forgotten: AtomicU64::new(0),
        at_the_answer: AtomicU64::new(0),
    });
    let m = Mount::new(
        Arc::clone(&handler),
        MountOptions { transport: Transport::Uring, ..MountOptions::default() },
    );
    for i in 0..FILES {
        fs::write(m.join(&format!("{i}")), b"x").unwrap();
        fs::remove_file(m.join(&format!("{i}"))).unwrap();
    }
    rustix::fs::statvfs(m.path()).unwrap();
    assert_eq!(handler.at_the_answer.load(Ordering::Acquire), FILES);
    m.finish();
}

#[test]
fn a_lazy_unmount_ends_the_session_when_its_last_user_leaves() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        let m = Mount::over(MemServer::new(true), transport);
        let mut file = File::create(m.join("f")).unwrap();
        let unmounter = larder_fuse::Unmounter::new(m.path());
        assert_eq!(unmounter.unmount().unwrap_err().raw_os_error(), Some(libc::EBUSY));
        unmounter.detach().unwrap();
        file.write_all(b"still served").unwrap();
        drop(file);
        drop(m);
    }
}

#[test]
fn those_who_were_waiting_for_the_mount_are_served() {
    if !can_mount() {
        return;
    }
    for transport in TRANSPORTS {
        for _ in 0..10 {
            let dir = tempfile::tempdir().unwrap();
            let options = MountOptions { transport, ..MountOptions::default() };
            let mounted = larder_fuse::mount("test".as_ref(), dir.path(), options).unwrap();
            // They hang in the kernel until INIT is answered and every queue is registered.
            let waiting: Vec<_> = (0..8)
                .map(|i| {
                    let path = dir.path().join(format!("absent{i}"));
                    std::thread::spawn(move || fs::metadata(path).unwrap_err().raw_os_error())
                })
                .collect();
            let server = std::thread::spawn(move || {
                let handler = std::sync::Arc::new(MemServer::new(true));
                larder_fuse::serve_handler(handler, mounted, std::sync::Arc::default(), |_| {})
                    .unwrap();
            });
            for one in waiting {
                assert_eq!(one.join().unwrap(), Some(libc::ENOENT));
            }
            common::unmount_when_idle(dir.path());
            server.join().unwrap();
        }
    }
}
