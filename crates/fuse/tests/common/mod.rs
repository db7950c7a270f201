//! What the mount tests share: the gate, and a mount that is taken away again whatever happens.

#![allow(unreachable_pub, dead_code, missing_debug_implementations)]

use larder_fuse::handler::Handler;
use larder_fuse::{MountOptions, Ready, Stats, Transport, mount, serve_handler};
use larder_simtest::oracle::{Need, enter_private_namespace, need};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// True if mounts can be made here. Otherwise it prints what is missing, or fails if nothing may be
/// missing.
///
/// The test's thread moves into a mount namespace of its own, so that no other process keeps its
/// mounts alive.
pub fn can_mount() -> bool {
    need(&[Need::Root, Need::Fuse]) && {
        enter_private_namespace().expect("root may do that");
        true
    }
}

/// A mount served by threads of this process.
pub struct Mount {
    dir: Option<tempfile::TempDir>,
    path: PathBuf,
    pub stats: Arc<Stats>,
    pub ready: Ready,
    server: Option<JoinHandle<()>>,
}

impl Mount {
    pub fn new<H: Handler>(handler: Arc<H>, options: MountOptions) -> Self {
        let dir = tempfile::tempdir().expect("a directory to mount on");
        let path = dir.path().to_owned();
        let mounted = mount(Path::new("test"), &path, options).expect("mounting");
        let stats = Arc::new(Stats::default());
        let (tell, ready) = mpsc::channel();
        let counters = Arc::clone(&stats);
        let server = std::thread::spawn(move || {
            serve_handler(handler, mounted, counters, |r| tell.send(r).expect("the test waits"))
                .expect("serving");
        });
        let ready = ready.recv_timeout(Duration::from_secs(20)).expect("served within 20 s");
        Self { dir: Some(dir), path, stats, ready, server: Some(server) }
    }
    pub fn over<H: Handler>(handler: H, transport: Transport) -> Self {
        Self::new(Arc::new(handler), MountOptions { transport, ..MountOptions::default() })
    }
    pub fn path(&self) -> &Path {
        &self.path
    }
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
    /// Unmounts and waits for the server.
    pub fn finish(mut self) {
        unmount_when_idle(&self.path);
        self.server.take().expect("once").join().expect("the server ends well");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            let _ = larder_fuse::Unmounter::new(&self.path).detach();
            // A server that hangs must not hang the test as well.
            if !std::thread::panicking() {
                let _ = server.join();
            } else if let Some(dir) = self.dir.take() {
                std::mem::forget(dir);
            }
        }
    }
}

/// Unmounts as soon as the mount is not in use. A child that another test is just starting holds
/// copies of all our open files until it has called `exec`. So "busy" may be over in a moment; it
/// counts after ten seconds.
#[allow(dead_code)]
pub fn unmount_when_idle(path: &Path) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        match larder_fuse::Unmounter::new(path).unmount() {
            Err(e)
                if e.kind() == std::io::ErrorKind::ResourceBusy
                    && std::time::Instant::now() < deadline =>
            {
                std::thread::yield_now();
            }
            done => return done.expect("unmounting"),
        }
    }
}
