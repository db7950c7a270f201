//! Mounts that other processes serve: as another user, killed, and on a block device.
//!
//! The daemon is this test program once more, in the role that `daemon_role` plays.

mod common;

use common::{Mount, can_mount};
use larder_fuse::proto::Opcode;
use larder_fuse::{MountOptions, Stats, Transport, Unmounter, mount, serve_handler};
use larder_simtest::memserver::MemServer;
use larder_simtest::oracle::{LoopDevice, Need, need};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

const ROLE: &str = "LARDER_TEST_MOUNTPOINT";
const NOBODY: u32 = 65_534;

/// Not a test unless asked for: mounts, says how that went on one line, and serves.
#[test]
fn daemon_role() {
    let Some(mountpoint) = std::env::var_os(ROLE) else { return };
    match mount(Path::new("in, memory"), Path::new(&mountpoint), MountOptions::default()) {
        Ok(mounted) => {
            let stats = Arc::new(Stats::default());
            serve_handler(Arc::new(MemServer::new(true)), mounted, stats, |ready| {
                println!("<ready {}>", ready.uring);
            })
            .expect("serving");
            println!("<ended>");
        }
        Err(e) => println!("<failed {e}>"),
    }
}

struct Daemon {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
    mountpoint: PathBuf,
}

impl Daemon {
    fn start(mountpoint: &Path, uid: Option<u32>) -> Self {
        let exe = std::env::current_exe().unwrap();
        let mut command = Command::new(exe);
        command
            .args(["daemon_role", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, mountpoint)
            .stdout(Stdio::piped());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Self { child, said, mountpoint: mountpoint.to_owned() }
    }
    /// The next line that it prints.
    fn says(&mut self) -> String {
        let mut line = String::new();
        while self.said.read_line(&mut line).unwrap() > 0 {
            if let Some((_, said)) = line.split_once('<') {
                return said.trim_end().trim_end_matches('>').to_owned();
            }
            line.clear();
        }
        panic!("the daemon said nothing");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = Unmounter::new(&self.mountpoint).detach();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_mount_of_a_killed_daemon_can_be_cleared() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::start(dir.path(), None);
    assert!(daemon.says().starts_with("ready"));
    fs::write(dir.path().join("f"), b"x").unwrap();
    assert!(!larder_fuse::mount::is_dead(dir.path()));
    let open = File::open(dir.path().join("f")).unwrap();
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(larder_fuse::mount::is_dead(dir.path()));
    let refused = mount(Path::new("x"), dir.path(), MountOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("larder umount"), "{refused}");
    Unmounter::new(dir.path()).detach().unwrap();
    assert!(!larder_fuse::mount::is_dead(dir.path()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    drop(open);
}

#[test]
fn ordinary_users_mount_through_the_helper() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let permitted = fs::metadata("/dev/fuse").unwrap().permissions().mode() & 0o006 == 0o006;
    let exe_is_reachable =
        Command::new(std::env::current_exe().unwrap()).arg("--list").uid(NOBODY).output().is_ok();
    if !exe_is_reachable {
        eprintln!(
            "skipped: ordinary_users_mount_through_the_helper needs a build directory that all \
                can read"
        );
        return;
    }
    let mut daemon = Daemon::start(dir.path(), Some(NOBODY));
    let said = daemon.says();
    if !permitted {
        assert!(said.starts_with("failed") && said.contains("chmod 0666 /dev/fuse"), "{said}");
        return;
    }
    assert!(said.starts_with("ready"), "{said}");
    // This thread's namespace: `/proc/self` is the main thread's.
    let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap();
    let line = mounts.lines().find(|l| l.contains(dir.path().to_str().unwrap())).unwrap();
    assert!(line.starts_with("in,\\040memory ") && line.contains(" fuse.larder "), "{line}");
    for option in ["nosuid", "nodev", "default_permissions", "user_id=65534"] {
        assert!(line.contains(option), "{line}");
    }
    // Not even root enters another user's mount.
    assert_eq!(fs::read_dir(dir.path()).unwrap_err().raw_os_error(), Some(libc::EACCES));
    let as_owner = |script: &str| {
        Command::new("sh")
            .args(["-c", script])
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .unwrap()
    };
    let m = dir.path().display();
    let out = as_owner(&format!(
        "cd {m} && echo hello > f && chmod 0 f && ! cat f && chmod 600 f && cat f"
    ));
    assert_eq!(
        String::from_utf8_lossy(&out.stdout),
        "hello\n",
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(as_owner(&format!("fusermount3 -u {m}")).status.success());
    assert_eq!(daemon.says(), "ended");
}

#[test]
fn others_enter_only_if_allowed_and_are_checked() {
    if !can_mount() {
        return;
    }
    let run = |m: &Mount, script: &str| {
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .env("M", m.path())
            .uid(NOBODY)
            .gid(NOBODY)
            .stderr(Stdio::null());
        command.stdout(Stdio::null()).status().unwrap().success()
    };
    let m = Mount::over(MemServer::new(true), Transport::Auto);
    assert!(!run(&m, "ls $M"));
    m.finish();
    let options = MountOptions { allow_other: true, ..MountOptions::default() };
    let m = Mount::new(Arc::new(MemServer::new(true)), options);
    fs::write(m.join("secret"), b"s").unwrap();
    fs::set_permissions(m.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(m.join("public"), b"p").unwrap();
    assert!(run(&m, "ls $M && cat $M/public"));
    assert!(!run(&m, "cat $M/secret"));
    assert!(!run(&m, "echo x > $M/public"));
    assert!(!run(&m, "touch $M/new"));
    m.finish();
}

#[test]
fn block_devices_see_sync_and_the_end() {
    if !can_mount() {
        return;
    }
    if !need(&[Need::LoopDevices]) {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let device = LoopDevice::attach(file.path()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mounted = mount(device.path(), dir.path(), MountOptions::default()).unwrap();
    assert!(mounted.fuseblk);
    let stats = Arc::new(Stats::default());
    let counters = Arc::clone(&stats);
    let (tell, ready) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        serve_handler(Arc::new(MemServer::new(true)), mounted, counters, |_| tell.send(()).unwrap())
    });
    ready.recv().unwrap();
    let mut file = File::create(dir.path().join("f")).unwrap();
    std::io::Write::write_all(&mut file, b"data").unwrap();
    rustix::fs::syncfs(&file).unwrap();
    assert_eq!(stats.of(Opcode::Syncfs), 1);
    assert_ne!(file.metadata().unwrap().dev(), fs::metadata("/").unwrap().dev());
    drop(file);
    common::unmount_when_idle(dir.path());
    assert_eq!(stats.of(Opcode::Destroy), 1, "umount waited for it");
    server.join().unwrap().unwrap();
}
