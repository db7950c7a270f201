//! The engine behind a mount, compared with the kernel's btrfs: the same commands must say the
//! same.

mod common;

use common::can_mount;
use larder_fs::{Filesystem, OpenOptions};
use larder_fuse::{MountOptions, Stats, Transport, Unmounter, control, mount, serve};
use larder_simtest::oracle::{
    KernelMount, LoopDevice, Need, btrfs_check, mkfs_btrfs, need, scratch, tree_compare,
};
use larder_volume::file::{FileDevice, OpenMode};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SIZE: u64 = 512 << 20;
const NOBODY: &str = "65534";

/// A Larder mount of an image or device, served by threads of this process.
struct Mount {
    dir: tempfile::TempDir,
    stats: Arc<Stats>,
    server: Option<JoinHandle<()>>,
}

impl Mount {
    fn new(image: &Path, options: MountOptions) -> Self {
        Self::with(image, options, OpenOptions::default())
    }
    fn with(image: &Path, options: MountOptions, open: OpenOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mode = if open.read_only { OpenMode::Read } else { OpenMode::Write };
        let device = FileDevice::open(image, mode).unwrap();
        let fs = Filesystem::open(Arc::new(device), open).unwrap();
        let mounted = mount(image, dir.path(), options).unwrap();
        let stats = Arc::new(Stats::default());
        let counters = Arc::clone(&stats);
        let (tell, ready) = mpsc::channel();
        let server = std::thread::spawn(move || {
            let served =
                serve(Arc::clone(&fs), mounted, counters, |_| tell.send(()).unwrap()).unwrap();
            served.closed.unwrap_or_else(|| fs.close()).unwrap();
        });
        ready.recv_timeout(Duration::from_secs(20)).expect("served within 20 s");
        Self { dir, stats, server: Some(server) }
    }
    fn path(&self) -> &Path {
        self.dir.path()
    }
    fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
    fn finish(mut self) {
        common::unmount_when_idle(self.path());
        self.server.take().unwrap().join().unwrap();
        assert_eq!(self.stats.panics(), 0);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            let _ = Unmounter::new(self.dir.path()).detach();
            if !std::thread::panicking() {
                let _ = server.join();
            }
        }
    }
}

/// Checks what these tests need, and gives them their turn. One runs at a time: programs that a
/// test starts inherit for a moment what another has open, and loop devices then stay attached.
fn everything() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    (need(&[Need::KernelBtrfs, Need::MkfsBtrfs, Need::BtrfsProgs]) && can_mount()).then_some(turn)
}

fn with_others(transport: Transport) -> MountOptions {
    MountOptions { allow_other: true, transport, ..MountOptions::default() }
}

fn image(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    mkfs_btrfs::<&str>(&path, SIZE, &[]).unwrap();
    path
}

/// Runs the probe in a new directory below `root`, and returns its output.
fn probe(root: &Path) -> String {
    let dir = root.join("probe");
    fs::create_dir(&dir).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe.sh");
    let out = Command::new("bash").arg(script).arg(NOBODY).current_dir(&dir).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn has_tools() -> bool {
    let missing: Vec<_> = ["bash", "python3", "setfacl", "setfattr", "chattr", "setpriv"]
        .into_iter()
        .filter(|tool| {
            Command::new(tool)
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_err()
        })
        .collect();
    if missing.is_empty() {
        return true;
    }
    assert!(!larder_simtest::oracle::required(), "needs {missing:?}");
    eprintln!("skipped: needs {missing:?}");
    false
}

/// Commands whose outputs differ.
fn differences(theirs: &str, ours: &str) -> Vec<String> {
    let blocks = |text: &str| {
        let mut blocks: Vec<String> = Vec::new();
        for line in text.lines() {
            if line.starts_with("$ ") || line.starts_with("## ") || blocks.is_empty() {
                blocks.push(String::new());
            }
            if let Some(last) = blocks.last_mut() {
                last.push_str("    ");
                last.push_str(line);
                last.push('\n');
            }
        }
        blocks
    };
    let (theirs, ours) = (blocks(theirs), blocks(ours));
    let count = theirs.len().max(ours.len());
    let none = String::new();
    (0..count)
        .map(|i| (theirs.get(i).unwrap_or(&none), ours.get(i).unwrap_or(&none)))
        .filter(|(a, b)| a != b)
        .map(|(a, b)| format!("  kernel:\n{a}  Larder:\n{b}"))
        .collect()
}

#[test]
fn commands_say_what_they_say_on_the_kernels_btrfs() {
    let Some(_turn) = everything() else { return };
    if !has_tools() {
        return;
    }
    let dir = scratch();
    let expected = {
        let m = KernelMount::image(&image(dir.path(), "kernel"), "noatime").unwrap();
        probe(m.path())
    };
    for transport in [Transport::DevFuse, Transport::Uring] {
        let path = image(dir.path(), "larder");
        let m = Mount::new(&path, with_others(transport));
        let said = probe(m.path());
        m.finish();
        let differences = differences(&expected, &said);
        assert!(
            differences.is_empty(),
            "{} differences:\n{}",
            differences.len(),
            differences.join("\n")
        );
        btrfs_check(&path, true).assert_clean("after the probe");
    }
}

#[test]
fn the_kernel_reads_what_was_written_through_the_mount() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let copy = dir.path().join("copy");
    let fill = |root: &Path| {
        for i in 0..300usize {
            let sub = root.join(format!("dir{}", i % 7));
            fs::create_dir_all(&sub).unwrap();
            let mut f = File::create(sub.join(format!("file{i}"))).unwrap();
            f.write_all(&vec![i as u8; i * i * 3]).unwrap();
            if i % 10 == 0 {
                f.sync_all().unwrap();
            }
        }
        std::os::unix::fs::symlink("dir1/file1", root.join("link")).unwrap();
        fs::hard_link(root.join("dir1/file8"), root.join("hard")).unwrap();
    };
    fs::create_dir(&copy).unwrap();
    fill(&copy);
    let m = Mount::new(&path, MountOptions::default());
    fill(m.path());
    m.finish();
    btrfs_check(&path, true).assert_clean("after writing");
    let k = KernelMount::image(&path, "").unwrap();
    let same = Command::new("diff").arg("-r").arg(&copy).arg(k.path()).output().unwrap();
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stdout));
    assert_eq!(fs::metadata(k.join("hard")).unwrap().nlink(), 2);
    k.unmount_clean().unwrap();
}

#[test]
fn larder_shows_what_the_kernel_wrote() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let k = KernelMount::image(&path, "").unwrap();
    larder_simtest::oracle::populate(k.path(), &larder_simtest::oracle::Fixture::small()).unwrap();
    k.unmount_clean().unwrap();
    // The same image cannot be mounted twice.
    let copy = dir.path().join("copy");
    larder_simtest::oracle::copy_image(&path, &copy).unwrap();
    let k = KernelMount::image_read_only(&copy, "").unwrap();
    for read_only in [true, false] {
        let open = OpenOptions { read_only, ..OpenOptions::default() };
        let m = Mount::with(&path, MountOptions { read_only, ..MountOptions::default() }, open);
        let differences = tree_compare(k.path(), m.path()).unwrap();
        assert!(differences.is_empty(), "{differences:?}");
        m.finish();
    }
    k.unmount_clean().unwrap();
    btrfs_check(&path, true).assert_clean("after reading");
}

#[test]
fn inode_numbers_are_unique_across_subvolumes() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let k = KernelMount::image(&path, "").unwrap();
    for sub in ["s1", "s1/nested", "s2"] {
        let status = Command::new("btrfs")
            .args(["-q", "subvolume", "create"])
            .arg(k.join(sub))
            .status()
            .unwrap();
        assert!(status.success());
        fs::write(k.join(format!("{sub}/file")), sub).unwrap();
    }
    fs::write(k.join("file"), "top").unwrap();
    k.unmount_clean().unwrap();
    let m = Mount::new(&path, MountOptions::default());
    let mut seen = HashSet::new();
    let mut walk = vec![m.path().to_owned()];
    let mut found = 0;
    while let Some(path) = walk.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        assert!(seen.insert(meta.ino()), "{} has the number of another", path.display());
        found += 1;
        if meta.is_dir() {
            walk.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    assert_eq!(found, 8);
    assert_eq!(fs::metadata(m.path()).unwrap().ino(), 256);
    assert_eq!(fs::read(m.join("s1/nested/file")).unwrap(), b"s1/nested");
    // A rename across a border is a copy, as on the kernel.
    let moved = fs::rename(m.join("s1/file"), m.join("moved"));
    assert_eq!(moved.unwrap_err().raw_os_error(), Some(libc::EXDEV));
    fs::write(m.join("s1/nested/new"), b"new").unwrap();
    m.finish();
    btrfs_check(&path, true).assert_clean("after writing into a subvolume");
}

#[test]
fn control_requests_answer() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let m = Mount::new(&path, MountOptions::default());
    fs::write(m.join("f"), b"content").unwrap();
    control::sync(m.path()).unwrap();
    let stats: serde_json::Value =
        serde_json::from_str(&control::stats(&m.join("f")).unwrap()).unwrap();
    assert!(stats["requests"]["by_kind"]["mknod"].as_u64() >= Some(1), "{stats}");
    assert!(stats["engine"]["commits"].as_u64() >= Some(1), "{stats}");
    let df: serde_json::Value = serde_json::from_str(&control::df(m.path()).unwrap()).unwrap();
    assert!(df["total"].as_u64() > Some(0) && df["file_system"]["nodesize"] == 16384, "{df}");
    assert_eq!(control::label(m.path()).unwrap(), b"");
    control::set_label(m.path(), b"pantry").unwrap();
    assert_eq!(control::label(m.path()).unwrap(), b"pantry");
    m.finish();
    let k = KernelMount::image(&path, "").unwrap();
    assert_eq!(control::label(k.path()).unwrap(), b"pantry");
    assert_eq!(fs::read(k.join("f")).unwrap(), b"content");
    assert_eq!(control::stats(k.path()).unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    k.unmount_clean().unwrap();
}

#[test]
fn a_block_device_is_durable_after_syncfs_and_after_umount() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let device = LoopDevice::attach(&path).unwrap();
    let m = Mount::new(device.path(), MountOptions::default());
    fs::write(m.join("one"), b"1").unwrap();
    rustix::fs::syncfs(File::open(m.path()).unwrap()).unwrap();
    btrfs_check(&path, true).assert_clean("after syncfs");
    fs::write(m.join("two"), b"2").unwrap();
    common::unmount_when_idle(m.path());
    // The server is not waited for, because umount has done that.
    btrfs_check(&path, true).assert_clean("after umount");
    let k = KernelMount::image_read_only(&path, "").unwrap();
    assert_eq!(
        (fs::read(k.join("one")).unwrap(), fs::read(k.join("two")).unwrap()),
        (b"1".into(), b"2".into())
    );
    drop(k);
    drop(m);
}

#[test]
fn many_threads_make_and_remove() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    for transport in [Transport::DevFuse, Transport::Uring] {
        let path = image(dir.path(), "image");
        let m = Mount::new(&path, MountOptions { transport, ..MountOptions::default() });
        std::thread::scope(|scope| {
            for t in 0..8 {
                let m = &m;
                scope.spawn(move || {
                    let sub = m.join(&format!("d{t}"));
                    fs::create_dir(&sub).unwrap();
                    for i in 0..200 {
                        let file = sub.join(format!("f{i}"));
                        fs::write(&file, vec![t as u8; i * 50]).unwrap();
                        match i % 4 {
                            0 => fs::remove_file(&file).unwrap(),
                            1 => fs::rename(&file, m.join(&format!("moved-{t}-{i}"))).unwrap(),
                            2 if i % 40 == 2 => File::open(&file).unwrap().sync_all().unwrap(),
                            _ => {}
                        }
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(m.path()).unwrap().count(), 8 + 8 * 50);
        m.finish();
        btrfs_check(&path, true).assert_clean("after many threads");
        let k = KernelMount::image(&path, "").unwrap();
        assert_eq!(fs::read(k.join("d7/f198")).unwrap(), vec![7; 198 * 50]);
        assert_eq!(fs::read_dir(k.join("d3")).unwrap().count(), 100);
        k.unmount_clean().unwrap();
    }
}

#[test]
fn an_unlinked_file_lives_until_it_is_closed_and_no_longer() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let m = Mount::new(&path, MountOptions::default());
    let used = || {
        control::sync(m.path()).unwrap();
        let df: serde_json::Value = serde_json::from_str(&control::df(m.path()).unwrap()).unwrap();
        df["file_system"]["bytes_used"].as_u64().unwrap()
    };
    let empty = used();
    let mut file =
        File::options().create_new(true).read(true).write(true).open(m.join("f")).unwrap();
    file.write_all(&vec![1; 10 << 20]).unwrap();
    fs::remove_file(m.join("f")).unwrap();
    file.sync_all().unwrap();
    assert!(used() >= empty + (10 << 20));
    let mut back = vec![0; 100];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut back, 5 << 20).unwrap();
    assert_eq!(back, [1; 100]);
    drop(file);
    // The last look-up is given back some time after the close.
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while used() > empty + (1 << 20) {
        assert!(Instant::now() < deadline, "its space is given back");
        std::thread::sleep(Duration::from_millis(20));
    }
    m.finish();
    let k = KernelMount::image(&path, "").unwrap();
    assert_eq!(fs::read_dir(k.path()).unwrap().count(), 0);
    k.unmount_clean().unwrap();
    btrfs_check(&path, true).assert_clean("without the file");
}

/// Does something as another user for file access, as a file server does.
fn acting_as<T>(uid: u32, action: impl FnOnce() -> T) -> T {
    // SAFETY: these change the calling thread's identity for file access and nothing else.
    unsafe {
        libc::setfsgid(uid);
        libc::setfsuid(uid);
    }
    let result = action();
    // SAFETY: as above.
    unsafe {
        libc::setfsuid(0);
        libc::setfsgid(0);
    }
    result
}

#[test]
fn callers_that_act_as_somebody_else_are_checked() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let m = Mount::new(&path, MountOptions::default());
    let errno = |r: std::io::Result<()>| r.err().and_then(|e| e.raw_os_error());
    fs::set_permissions(m.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in [("closed", 0o700), ("open", 0o777), ("sticky", 0o1777)] {
        fs::create_dir(m.join(name)).unwrap();
        fs::set_permissions(m.join(name), fs::Permissions::from_mode(mode)).unwrap();
        File::create(m.join(&format!("{name}/roots"))).unwrap();
    }
    acting_as(65_534, || {
        let at = |name: &str| m.join(name);
        assert_eq!(errno(fs::create_dir(at("new"))), Some(libc::EACCES));
        // The kernel does not know this name yet. For names that it knows, and for opening, it does
        // not ask the server.
        assert_eq!(errno(fs::metadata(at("closed/unknown")).map(drop)), Some(libc::EACCES));
        assert_eq!(
            errno(fs::read_dir(at("closed")).and_then(|mut l| l.next().transpose()).map(drop)),
            Some(libc::EACCES)
        );
        assert_eq!(errno(fs::create_dir(at("open/new"))), None);
        assert_eq!(fs::metadata(at("open/new")).unwrap().uid(), 65_534);
        assert_eq!(errno(fs::remove_file(at("open/roots"))), None);
        assert_eq!(errno(fs::remove_file(at("sticky/roots"))), Some(libc::EPERM));
        assert_eq!(errno(fs::rename(at("sticky/roots"), at("open/x"))), Some(libc::EPERM));
        assert_eq!(errno(fs::rename(at("open/new"), at("sticky/new"))), None);
        assert_eq!(errno(fs::remove_dir(at("sticky/new"))), None);
        let mode = fs::Permissions::from_mode(0o777);
        assert_eq!(errno(fs::set_permissions(at("sticky/roots"), mode)), Some(libc::EPERM));
        assert_eq!(
            errno(std::os::unix::fs::chown(at("sticky/roots"), Some(65_534), None)),
            Some(libc::EPERM)
        );
        let none = rustix::fs::XattrFlags::empty();
        let set = rustix::fs::setxattr(at("sticky/roots"), "user.x", b"1", none);
        assert_eq!(set, Err(rustix::io::Errno::ACCESS));
    });
    fs::create_dir(m.join("closed/x")).unwrap();
    m.finish();
}

/// A handle as `name_to_handle_at` gives it.
#[repr(C)]
struct Handle {
    len: u32,
    kind: i32,
    bytes: [u8; 128],
}

#[test]
fn file_handles_outlive_the_kernels_memory_of_an_inode() {
    let Some(_turn) = everything() else { return };
    let dir = scratch();
    let path = image(dir.path(), "image");
    let m = Mount::new(&path, MountOptions::default());
    fs::create_dir_all(m.join("a/b")).unwrap();
    let ino = fs::metadata(m.join("a/b")).unwrap().ino();
    let mut handle = Handle { len: 128, kind: 0, bytes: [0; 128] };
    let mut id = 0;
    let name = std::ffi::CString::new(m.join("a/b").into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: the name is terminated, and the handle has the room that its length says.
    let got = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            libc::AT_FDCWD,
            name.as_ptr(),
            &raw mut handle,
            &raw mut id,
            0,
        )
    };
    assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
    let root = File::open(m.path()).unwrap();
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    // SAFETY: the handle is one that the kernel filled in.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_raw_fd(),
            &raw mut handle,
            libc::O_RDONLY,
        )
    };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a descriptor that was just opened, and has no other owner.
    let file = unsafe { File::from_raw_fd(i32::try_from(fd).unwrap()) };
    assert_eq!(file.metadata().unwrap().ino(), ino);
    drop((file, root));
    m.finish();
}
