//! Writes past the page cache that the kernel does not wait for, beside reads through it: what it keeps of a file is what was
//! written last.

mod common;

use common::can_mount;
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::handler::{Failure, Handler, Outcome, Patience, Reply, Request};
use larder_fuse::proto::{Opcode, WriteIn};
use larder_fuse::server::Server;
use larder_fuse::{MountOptions, Stats, Transport, mount, serve_handler};
use larder_volume::file::{FileDevice, OpenMode};
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, mpsc};
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

/// A write that was submitted.
struct Submitted<'a> {
    context: libc::c_ulong,
    page: &'a Page,
}

impl<'a> Submitted<'a> {
    fn new(file: &File, page: &'a Page, offset: usize) -> Self {
        const PWRITE: u16 = 1;
        let mut context: libc::c_ulong = 0;
        let mut control = Control {
            opcode: PWRITE,
            fd: file.as_raw_fd().cast_unsigned(),
            buffer: std::ptr::from_ref(page).addr() as u64,
            bytes: PAGE as u64,
            offset: offset as i64,
            ..Control::default()
        };
        let mut list = [&raw mut control];
        // SAFETY: the context is the kernel's to fill; the control block is read during the call; the page outlives the write, which
        // `wait` or `drop` wait for.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &raw mut context), 0);
            assert_eq!(libc::syscall(libc::SYS_io_submit, context, 1, list.as_mut_ptr()), 1);
        }
        Self { context, page }
    }
    fn wait(self) {
        let mut event = [0u64; 4];
        let no_limit = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: room for the one event that is waited for.
        let got = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.context, 1, 1, event.as_mut_ptr(), no_limit)
        };
        assert_eq!((got, event[2]), (1, self.page.0.len() as u64));
    }
}

impl Drop for Submitted<'_> {
    fn drop(&mut self) {
        // SAFETY: no memory is involved; it returns when nothing is under way any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// Holds one direct write back, once told to, and says so.
struct Staged {
    server: Server,
    next: Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>,
}

impl Handler for Staged {
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, patience: Patience) -> Outcome {
        let direct = request.opcode == Opcode::Write
            && request.arg::<WriteIn>()?.flags & libc::O_DIRECT.cast_unsigned() != 0;
        if direct && patience == Patience::Queue {
            return Err(Failure::Wait);
        }
        if direct && let Some((here, go)) = self.next.lock().unwrap().take() {
            here.send(()).unwrap();
            go.recv().unwrap();
        }
        self.server.handle(request, reply, patience)
    }
    fn forget(&self, node: u64, count: u64) {
        self.server.forget(node, count);
    }
}

#[test]
fn what_was_read_during_a_write_past_the_cache_does_not_stay() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for transport in [Transport::DevFuse, Transport::Uring] {
        let image = dir.path().join("image");
        File::create(&image).unwrap().set_len(128 << 20).unwrap();
        let device = FileDevice::open(&image, OpenMode::Write, false).unwrap();
        mkfs(&device, &MkfsOptions { force: true, ..MkfsOptions::default() }).unwrap();
        let filesystem = Filesystem::open(Arc::new(device), OpenOptions::default()).unwrap();
        let point = tempfile::tempdir().unwrap();
        let options = MountOptions { transport, ..MountOptions::default() };
        let mounted = mount(&image, point.path(), options).unwrap();
        let stats = Arc::new(Stats::default());
        let server = Server::of(filesystem.clone(), &mounted, Arc::clone(&stats));
        let staged = Arc::new(Staged { server, next: Mutex::default() });
        let (tell, ready) = mpsc::channel();
        let serving = {
            let (staged, stats) = (Arc::clone(&staged), Arc::clone(&stats));
            std::thread::spawn(move || {
                serve_handler(staged, mounted, stats, |_| tell.send(()).unwrap()).unwrap();
            })
        };
        ready.recv_timeout(Duration::from_secs(20)).expect("served within 20 s");

        let path = point.path().join("disk");
        fs::write(&path, vec![1; 4 * PAGE]).unwrap();
        let buffered = File::open(&path).unwrap();
        let direct =
            File::from(rustix::fs::open(&path, OFlags::RDWR | OFlags::DIRECT, Mode::empty()).unwrap());
        let read = |file: &File, at: usize| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at as u64).unwrap();
            byte[0]
        };
        for round in 2..6 {
            let page = Page([round; PAGE]);
            let (here, arrived) = mpsc::channel();
            let (go, wait) = mpsc::channel();
            *staged.next.lock().unwrap() = Some((here, wait));
            let write = Submitted::new(&direct, &page, PAGE);
            arrived.recv().unwrap();
            // The kernel has dropped what it had; this is what it gets instead.
            assert_eq!(read(&buffered, PAGE), round - 1);
            go.send(()).unwrap();
            write.wait();
            assert_eq!(read(&buffered, PAGE), round, "a reader sees the write that has ended");
            assert_eq!((read(&buffered, 0), read(&buffered, 2 * PAGE)), (1, 1));
        }
        drop((buffered, direct));
        common::unmount_when_idle(point.path());
        serving.join().unwrap();
        assert_eq!(stats.panics(), 0);
        filesystem.close().unwrap();
    }
}
