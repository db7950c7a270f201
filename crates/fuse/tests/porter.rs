//! The process beside a daemon, for real: it mounts, resolves descriptors of the mount's clients,
//! unmounts, tidies up.
//!
//! The test is the daemon; the porter is this test program once more, in the role that
//! `porter_role` plays.

mod common;

use common::can_mount;
use larder_fuse::memserver::MemServer;
use larder_fuse::porter::{Duties, End, Porter, attend, is_gone};
use larder_fuse::{MountOptions, Transport, serve_handler};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

const ROLE: &str = "LARDER_TEST_PORTER_OF";

fn options() -> MountOptions {
    MountOptions { transport: Transport::DevFuse, enable_uring: false, ..MountOptions::default() }
}

/// Not a test unless asked for: the porter of a mount on the directory in the environment.
#[test]
fn porter_role() {
    let Some(mountpoint) = std::env::var_os(ROLE).map(PathBuf::from) else { return };
    let duties =
        Duties { source: "in memory".into(), mountpoint: mountpoint.clone(), options: options() };
    attend(rustix::stdio::stdin(), &duties, |_| {
        fs::write(mountpoint.with_extension("tidied"), b"").unwrap();
    })
    .unwrap();
}

fn start(mountpoint: &Path) -> Porter {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["porter_role", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, mountpoint);
    Porter::start(&mut command, mountpoint).unwrap()
}

/// A process that holds a descriptor, its standard input, and never looks at it. Ended when
/// dropped.
struct Client(Child);

impl Client {
    fn with(file: File) -> Self {
        Self(Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_porter_mounts_resolves_and_unmounts() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let point = dir.path().canonicalize().unwrap().join("mnt");
    fs::create_dir(&point).unwrap();
    let porter = start(&point);
    // Before there is a mount nothing is told and nothing unmounted.
    assert_eq!(
        porter.resolve_fd(std::process::id(), 0).unwrap_err().raw_os_error(),
        Some(libc::ENODEV)
    );
    assert_eq!(porter.unmount().unwrap_err().raw_os_error(), Some(libc::ENODEV));
    let mounted = porter.mount(options()).unwrap();
    assert!(porter.mount(options()).unwrap_err().to_string().contains("mounted already"), "once");
    let (tell, ready) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        serve_handler(Arc::new(MemServer::new(true)), mounted, Arc::default(), |_| {
            tell.send(()).unwrap()
        })
    });
    ready.recv().unwrap();

    let path = point.join("file");
    let mut file = File::create(&path).unwrap();
    file.write_all(b"content").unwrap();
    let number = fs::metadata(&path).unwrap().ino();
    let (me, fd) = (std::process::id(), file.as_raw_fd());
    assert_eq!(porter.resolve_fd(me, fd).unwrap(), number);
    // Requests carry the number of a thread.
    let thread = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
    assert_ne!(thread, me);
    assert_eq!(porter.resolve_fd(thread, fd).unwrap(), number);
    let directory = File::open(&point).unwrap();
    assert_eq!(
        porter.resolve_fd(me, directory.as_raw_fd()).unwrap(),
        fs::metadata(&point).unwrap().ino()
    );
    // The same in this process.
    assert_eq!(Porter::here(&point).resolve_fd(me, fd).unwrap(), number);
    // Another process, of the mount and not.
    let client = Client::with(File::open(&path).unwrap());
    assert_eq!(porter.resolve_fd(client.0.id(), 0).unwrap(), number);
    let errno = |pid, fd| porter.resolve_fd(pid, fd).unwrap_err().raw_os_error();
    assert_eq!(errno(client.0.id(), 77), Some(libc::EBADF));
    let stranger = Client::with(File::open("/etc/passwd").unwrap());
    assert_eq!(errno(stranger.0.id(), 0), Some(libc::EXDEV));
    // A deleted file is still one of ours.
    fs::remove_file(&path).unwrap();
    assert_eq!(porter.resolve_fd(me, fd).unwrap(), number);

    assert_eq!(porter.unmount().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    drop((client, stranger, file, directory));
    // A child that another test is just starting may hold copies of our descriptors for a moment.
    loop {
        match porter.unmount() {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => std::thread::yield_now(),
            done => break done.unwrap(),
        }
    }
    server.join().unwrap().unwrap();
    assert_eq!(
        porter.detach().unwrap_err().raw_os_error(),
        Some(libc::EINVAL),
        "what others mount there stays"
    );
    let tidied = point.with_extension("tidied");
    assert!(!tidied.exists());
    porter.dismiss(End::Daemon, || panic!("that is another process's to do"));
    assert!(tidied.exists());
    assert!(is_gone(&porter.resolve_fd(me, 0).unwrap_err()));
}
