//! Forbidden things, tried from inside the sandbox.
//!
//! The sandbox cannot be undone. So every attempt is made by this test program once more, as a
//! child that confines itself exactly as the mount daemon does, and then prints the outcome.

use larder_fuse::sandbox;
use larder_simtest::oracle::{Need, need};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const ROLE: &str = "LARDER_TEST_ATTEMPT";
const SCRATCH: &str = "LARDER_TEST_SCRATCH";

/// Runs `attempts_role` as `role` in a process of its own.
fn confined(role: &str, scratch: &Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["attempts_role", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(SCRATCH, scratch)
        .env_remove("RUST_BACKTRACE")
        .output()
        .unwrap()
}

/// Does this kernel have what most of these tests are about? Where oracles are required, it must.
fn available(landlock: bool) -> bool {
    let seccomp = Path::new("/proc/sys/kernel/seccomp/actions_avail").exists();
    // SAFETY: asks for the version: no pointer, no size, and only a number comes back.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0usize, 0usize, 1u32) };
    let here = seccomp && (!landlock || abi > 0);
    if !here {
        assert!(!larder_simtest::oracle::required(), "this kernel has no seccomp or no Landlock");
        eprintln!("skipped: needs seccomp and Landlock");
    }
    here
}

fn errno(e: io::Error) -> String {
    e.raw_os_error().map_or_else(|| e.to_string(), |n| n.to_string())
}

fn plain(outcome: io::Result<()>) -> String {
    outcome.map_or_else(errno, |()| "done".into())
}

type Outcomes = BTreeMap<&'static str, String>;

/// What a role may use inside the sandbox: things that were open or known before.
struct Inside {
    scratch: PathBuf,
    own: File,
    port: u16,
    path_of_socket: PathBuf,
}

/// A system call with three arguments: its result with a `!`, or its error number.
fn raw(number: libc::c_long, a: usize, b: usize, c: usize) -> String {
    // SAFETY: none of the calls in this file is given memory to write to.
    let result = unsafe { libc::syscall(number, a, b, c, 0usize, 0usize, 0usize) };
    if result >= 0 { format!("{result}!") } else { errno(io::Error::last_os_error()) }
}

/// Not a test unless asked for: goes into the sandbox and tries what its role says.
#[test]
fn attempts_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let scratch = PathBuf::from(std::env::var_os(SCRATCH).unwrap());
    let own = File::options().read(true).write(true).open(scratch.join("own")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let path_of_socket = scratch.join("socket");
    let _unix = std::os::unix::net::UnixListener::bind(&path_of_socket);
    let inside = Inside { scratch, own, port, path_of_socket };
    let confinement = sandbox::enter();
    if role != "unsealed" {
        confinement.seal();
    }
    let outcomes = match role.as_str() {
        "files" => attempts_on_files(&inside),
        "calls" => attempts_of_calls(&inside),
        // The ring's operations would pass no filter, so none may be made later; but at the start
        // they can.
        "unsealed" => Outcomes::from([("new ring", raw(libc::SYS_io_uring_setup, 1, 0, 0))]),
        "status" => {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            for line in status.lines() {
                println!("<{line}>");
            }
            Outcomes::new()
        }
        "panic" => {
            let caught = std::panic::catch_unwind(|| panic!("it works"));
            let trace = std::backtrace::Backtrace::force_capture().to_string();
            Outcomes::from([
                ("caught", caught.is_err().to_string()),
                ("names", trace.contains("attempts_role").to_string()),
            ])
        }
        attack => {
            attacks(attack);
            Outcomes::new()
        }
    };
    // The harness has begun a line.
    println!();
    for (what, outcome) in outcomes {
        println!("<{what}: {outcome}>");
    }
}

fn attempts_on_files(inside: &Inside) -> Outcomes {
    let at = |name: &str| inside.scratch.join(name);
    let open = |path: &Path| plain(File::options().read(true).write(true).open(path).map(drop));
    let read = |path: &Path| plain(fs::read(path).map(drop));
    Outcomes::from([
        ("read /etc/passwd", read(Path::new("/etc/passwd"))),
        ("read another file", read(&at("other"))),
        ("write another file", plain(File::options().write(true).open(at("other")).map(drop))),
        ("make a file", plain(File::create(at("new")).map(drop))),
        ("list", plain(fs::read_dir("/proc").map(drop))),
        ("write to /proc", plain(fs::write("/proc/self/comm", "x"))),
        ("unlink", plain(fs::remove_file(at("other")))),
        ("rename", plain(fs::rename(at("other"), at("else")))),
        ("mkdir", plain(fs::create_dir(at("dir")))),
        ("symlink", plain(std::os::unix::fs::symlink("a", at("link")))),
        ("read another's memory", read(Path::new("/proc/1/environ"))),
        // What is open stays usable, and what is needed can be read.
        (
            "use what is open",
            plain(inside.own.write_all_at(b"x", 3).and_then(|()| inside.own.sync_data())),
        ),
        ("groups", read(Path::new("/proc/1/status"))),
        ("own status", read(Path::new("/proc/self/status"))),
        ("number of CPUs", read(Path::new("/sys/devices/system/cpu/possible"))),
        ("/dev/fuse", open(Path::new("/dev/fuse"))),
    ])
}

fn attempts_of_calls(inside: &Inside) -> Outcomes {
    let mut outcomes = Outcomes::from([
        ("tcp", plain(TcpStream::connect(("127.0.0.1", inside.port)).map(drop))),
        ("udp", plain(UdpSocket::bind("127.0.0.1:0").map(drop))),
        ("unix", plain(UnixStream::connect(&inside.path_of_socket).map(drop))),
        ("socket pair", plain(UnixDatagram::pair().map(drop))),
        ("program", plain(Command::new("true").status().map(drop))),
    ]);
    outcomes.extend(raw_calls(&inside.own));
    let thread = std::thread::spawn(|| fs::read("/etc/passwd").map(drop).map_err(errno));
    outcomes.insert("a thread works", plain(Ok(())));
    outcomes.insert("a thread is confined", thread.join().unwrap().unwrap_err());
    let refused = sandbox::refused_calls();
    let noted = |call| refused.contains(&u32::try_from(call).unwrap());
    outcomes.insert("noted", noted(libc::SYS_mount).to_string());
    // This one is noted because the kernel asks.
    outcomes.insert("process noted", noted(libc::SYS_clone).to_string());
    outcomes
}

/// `PR_GET_AUXV`, here into no memory.
const GET_AUXV: usize = 0x4155_5856;

fn raw_calls(own: &File) -> Outcomes {
    let (nul, root) = (c"".as_ptr() as usize, c"/".as_ptr() as usize);
    let parent = std::os::unix::process::parent_id() as usize;
    let (own, executable) = (own.as_raw_fd() as usize, libc::PROT_READ | libc::PROT_EXEC);
    let calls = [
        // Without CLONE_THREAD; the child would end at once.
        ("fork", libc::SYS_clone, libc::SIGCHLD as usize, 0, 0),
        ("clone3", libc::SYS_clone3, 0, 0, 0),
        ("kill", libc::SYS_kill, parent, 0, 0),
        ("tgkill", libc::SYS_tgkill, parent, 1, 0),
        ("mount", libc::SYS_mount, nul, root, 0),
        ("umount", libc::SYS_umount2, nul, 0, 0),
        ("setuid", libc::SYS_setuid, 0, 0, 0),
        ("capset", libc::SYS_capset, 0, 0, 0),
        ("dumpable", libc::SYS_prctl, libc::PR_SET_DUMPABLE as usize, 0, 0),
        ("what it was told", libc::SYS_prctl, GET_AUXV, 0, 0),
        ("terminal input", libc::SYS_ioctl, 0, libc::TIOCSTI as usize, nul),
        ("executable memory", libc::SYS_mmap, 0, 4096, executable as usize),
        ("make executable", libc::SYS_mprotect, 0, 4096, libc::PROT_EXEC as usize),
        ("memory file", libc::SYS_memfd_create, nul, 0, 0),
        ("new ring", libc::SYS_io_uring_setup, 1, 0, 0),
        ("owner of signals", libc::SYS_fcntl, own, libc::F_SETOWN as usize, 1),
        ("nice", libc::SYS_setpriority, 0, parent, 19),
        ("nice for all", libc::SYS_setpriority, libc::PRIO_USER as usize, 0, 19),
        ("precedence", libc::SYS_setpriority, 0, 0, usize::MAX),
        ("raise a limit", libc::SYS_prlimit64, 1, 0, 0),
    ];
    calls.into_iter().map(|(what, number, a, b, c)| (what, raw(number, a, b, c))).collect()
}

/// Calls that end the process.
fn attacks(role: &str) {
    match role {
        "abort" => std::process::abort(),
        "execve" => drop(raw(libc::SYS_execve, c"/bin/true".as_ptr() as usize, 0, 0)),
        "ptrace" => drop(raw(libc::SYS_ptrace, libc::PTRACE_TRACEME as usize, 0, 0)),
        "process_vm_readv" => drop(raw(libc::SYS_process_vm_readv, 1, 0, 0)),
        "bpf" => drop(raw(libc::SYS_bpf, 0, 0, 0)),
        "unshare" => drop(raw(libc::SYS_unshare, 0, 0, 0)),
        other => panic!("no role {other}"),
    }
}

fn scratch() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("own"), b"mine").unwrap();
    fs::write(dir.path().join("other"), b"not mine").unwrap();
    dir
}

/// What a role printed, as pairs and as text.
fn report(role: &str, dir: &Path) -> (BTreeMap<String, String>, String) {
    let output = confined(role, dir);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{role}: {}\n{out}\n{err}", output.status);
    let lines = out.lines().filter_map(|l| l.strip_prefix('<')?.strip_suffix('>')?.split_once(':'));
    (lines.map(|(a, b)| (a.to_owned(), b.trim().to_owned())).collect(), err.into_owned())
}

#[track_caller]
fn assert_all(said: &BTreeMap<String, String>, expected: &[(&str, i32)]) {
    for (what, errno) in expected {
        assert_eq!(said.get(*what), Some(&errno.to_string()), "{what}, of {said:?}");
    }
}

#[test]
fn no_file_can_be_reached_but_what_is_open() {
    if !available(true) {
        return;
    }
    let dir = scratch();
    let (said, _) = report("files", dir.path());
    let (eacces, eperm) = (libc::EACCES, libc::EPERM);
    assert_all(
        &said,
        &[
            ("read /etc/passwd", eacces),
            ("read another file", eacces),
            ("write another file", eacces),
            ("make a file", eacces),
            ("list", eacces),
            ("write to /proc", eacces),
            ("read another's memory", eacces),
            // These do not even reach Landlock.
            ("unlink", eperm),
            ("rename", eperm),
            ("mkdir", eperm),
            ("symlink", eperm),
        ],
    );
    for what in ["use what is open", "groups", "own status", "number of CPUs"] {
        assert_eq!(said[what], "done", "{what}");
    }
    if need(&[Need::Fuse]) {
        assert_eq!(said["/dev/fuse"], "done");
    }
    assert_eq!(fs::read(dir.path().join("own")).unwrap(), b"minx");
    assert_eq!(fs::read(dir.path().join("other")).unwrap(), b"not mine");
}

#[test]
fn forbidden_calls_fail_and_are_seen() {
    if !available(false) {
        return;
    }
    let dir = scratch();
    let (said, err) = report("calls", dir.path());
    let refused = [
        "tcp",
        "udp",
        "unix",
        "socket pair",
        "program",
        "fork",
        "kill",
        "tgkill",
        "mount",
        "umount",
        "setuid",
        "capset",
        "dumpable",
        "terminal input",
        "executable memory",
        "make executable",
        "memory file",
        "new ring",
        "owner of signals",
        "nice",
        "nice for all",
        "raise a limit",
    ];
    assert_all(&said, &refused.map(|what| (what, libc::EPERM)));
    // The kernel refuses this one by itself, because a thread may raise its own nice value.
    assert_all(&said, &[("clone3", libc::ENOSYS), ("precedence", libc::EACCES)]);
    assert_eq!(said["a thread works"], "done");
    // Kernels before 6.4 do not know the question.
    let told = &said["what it was told"];
    assert!(told.ends_with('!') || *told == libc::EINVAL.to_string(), "{told}");
    if available(true) {
        assert_all(&said, &[("a thread is confined", libc::EACCES)]);
    }
    assert_eq!((said["noted"].as_str(), said["process noted"].as_str()), ("true", "true"));
    for call in [libc::SYS_mount, libc::SYS_clone] {
        let line = format!("refused system call {call} (");
        assert_eq!(err.matches(&line).count(), 1, "{err}");
    }
}

#[test]
fn rings_are_made_at_the_start_only() {
    if !available(false) {
        return;
    }
    let (said, _) = report("unsealed", scratch().path());
    // The kernel came as far as its parameters, or io_uring is switched off on this machine.
    let efault = libc::EFAULT.to_string();
    let off =
        fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|v| v.trim() != "0");
    assert!(said["new ring"] == efault || off, "{said:?}");
}

#[test]
fn attacks_end_the_process() {
    if !available(false) {
        return;
    }
    let dir = scratch();
    for role in ["execve", "ptrace", "process_vm_readv", "bpf", "unshare"] {
        let output = confined(role, dir.path());
        assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{role}: {output:?}");
    }
}

#[test]
fn a_confined_process_has_no_privileges() {
    if !available(false) {
        return;
    }
    let (status, _) = report("status", scratch().path());
    assert_eq!(status["NoNewPrivs"], "1");
    assert_eq!(status["Seccomp"], "2");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    if rustix::process::geteuid().is_root() {
        assert_eq!(status["CapBnd"], "0000000000000000");
    }
}

#[test]
fn panics_and_aborts_work_as_ever() {
    if !available(false) {
        return;
    }
    let dir = scratch();
    let (said, err) = report("panic", dir.path());
    assert_eq!((said["caught"].as_str(), said["names"].as_str()), ("true", "true"), "{err}");
    assert!(err.contains("it works") && !err.contains("refused"), "{err}");
    let output = confined("abort", dir.path());
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
}
