//! The mount helper as a process: it mounts, resolves descriptors of the mount's clients, unmounts,
//! tidies up.
//!
//! The test is the daemon; the helper is this test program once more, in the role that
//! `helper_role` plays.

mod common;

use common::can_mount;
use larder_fuse::helper::{Ended, HelperConfig, MountHelper, is_gone, serve_daemon};
use larder_fuse::{MountOptions, Transport, serve_handler};
use larder_simtest::memserver::MemServer;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

const ROLE: &str = "LARDER_TEST_HELPER_OF";

fn options() -> MountOptions {
    MountOptions { transport: Transport::DevFuse, enable_uring: false, ..MountOptions::default() }
}

/// Not a test unless asked for: the mount helper of a mount on the directory in the environment.
#[test]
fn helper_role() {
    let Some(mountpoint) = std::env::var_os(ROLE).map(PathBuf::from) else { return };
    let config = HelperConfig {
        source: "in memory".into(),
        mountpoint: mountpoint.clone(),
        options: options(),
    };
    serve_daemon(rustix::stdio::stdin(), &config, |_| {
        fs::write(mountpoint.with_extension("tidied"), b"").unwrap();
    })
    .unwrap();
}

fn start(mountpoint: &Path) -> MountHelper {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["helper_role", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, mountpoint);
    MountHelper::spawn(&mut command, mountpoint).unwrap()
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
fn a_helper_mounts_resolves_and_unmounts() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let point = dir.path().canonicalize().unwrap().join("mnt");
    fs::create_dir(&point).unwrap();
    let helper = start(&point);
    // Before there is a mount, the helper tells nothing and unmounts nothing.
    assert_eq!(
        helper.resolve_fd(std::process::id(), 0).unwrap_err().raw_os_error(),
        Some(libc::ENODEV)
    );
    assert_eq!(helper.unmount().unwrap_err().raw_os_error(), Some(libc::ENODEV));
    let mounted = helper.mount(options()).unwrap();
    assert!(helper.mount(options()).unwrap_err().to_string().contains("mounted already"), "once");
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
    assert_eq!(helper.resolve_fd(me, fd).unwrap(), number);
    // Requests carry the number of a thread.
    let thread = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
    assert_ne!(thread, me);
    assert_eq!(helper.resolve_fd(thread, fd).unwrap(), number);
    let directory = File::open(&point).unwrap();
    assert_eq!(
        helper.resolve_fd(me, directory.as_raw_fd()).unwrap(),
        fs::metadata(&point).unwrap().ino()
    );
    // The same in this process.
    assert_eq!(MountHelper::in_process(&point).resolve_fd(me, fd).unwrap(), number);
    // Other processes, one with a file of the mount and one without.
    let client = Client::with(File::open(&path).unwrap());
    assert_eq!(helper.resolve_fd(client.0.id(), 0).unwrap(), number);
    let errno = |pid, fd| helper.resolve_fd(pid, fd).unwrap_err().raw_os_error();
    assert_eq!(errno(client.0.id(), 77), Some(libc::EBADF));
    let stranger = Client::with(File::open("/etc/passwd").unwrap());
    assert_eq!(errno(stranger.0.id(), 0), Some(libc::EXDEV));
    // A deleted file is still one of ours.
    fs::remove_file(&path).unwrap();
    assert_eq!(helper.resolve_fd(me, fd).unwrap(), number);

    assert_eq!(helper.unmount().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    drop((client, stranger, file, directory));
    // A child that another test is just starting may hold copies of our descriptors for a moment.
    loop {
        match helper.unmount() {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => std::thread::yield_now(),
            done => break done.unwrap(),
        }
    }
    server.join().unwrap().unwrap();
    assert_eq!(
        helper.detach().unwrap_err().raw_os_error(),
        Some(libc::EINVAL),
        "what others mount there stays"
    );
    let tidied = point.with_extension("tidied");
    assert!(!tidied.exists());
    helper.dismiss(Ended::Daemon, || panic!("that is another process's to do"));
    assert!(tidied.exists());
    assert!(is_gone(&helper.resolve_fd(me, 0).unwrap_err()));
}
