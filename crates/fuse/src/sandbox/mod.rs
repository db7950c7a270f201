//! The mount daemon gives up what it does not need, before it reads the first byte of an image.
//!
//! An image is hostile input, and the daemon of root's mount is root. The engine is written so that
//! bytes give errors; this module is for the day on which it is wrong about that. It hides how a
//! process is confined on Linux, and decides what a daemon still may do: work on the files that it
//! has open, talk to the kernel's FUSE, have threads and memory, look a caller's groups up, give
//! its own threads precedence, and end.
//!
//! | layer | what it takes |
//! |---|---|
//! | capabilities | all of them, from every set. Device, image and `/dev/fuse` are open descriptors, which ask for none |
//! | no new privileges | set-user-id programs give nothing |
//! | Landlock | files are not opened, made, removed or executed, but for reading `/proc` (a caller's groups, the daemon's own memory), the number of CPUs, cgroup limits and the daemon's program (names in backtraces), and `/dev/fuse` for further readers; no TCP, no signals to others, no abstract sockets; and, which comes with it, no looking into other processes |
//! | seccomp | a list of the system calls that are needed (module `filter`), some with certain arguments only. New processes, sockets, and memory that is both new and executable are not on it |
//! | sealed | once requests are served, no further io_uring can be made, since its operations pass no seccomp filter; those that exist take the two operations that the transport needs |
//!
//! What root of another process can do — unmount, mount, set the read-ahead, look at a caller's
//! descriptor — is done by the [porter](crate::porter), a small process that stays outside and
//! takes seven requests of fixed form.
//!
//! A refused system call fails with `EPERM`, and says so: its number goes to standard error the
//! first time, and into the statistics (`larder stats`), because after the daemon has left its
//! terminal nobody would see it otherwise. The price is a signal (SIGSYS), paid only by refused
//! calls, and a thread that sleeps until somebody tries to make a process. A few calls have no use
//! in this program whatever goes wrong, only in somebody else's — executing a program, reaching
//! into another process, loading code into the kernel: they end the process at once. That is safe,
//! for a killed daemon is a power cut, which the format is made for.
//!
//! What the kernel does not offer is left out and said: a mount works without Landlock or seccomp.
//!
//! Cost: filters without conditions are looked up in a bitmap by the kernel; `docs/BENCHMARKS.md`
//! has the figures.

mod capabilities;
mod filter;
mod paths;
mod processes;
mod refused;

use crate::transport::priority;
use std::sync::OnceLock;

/// What was put into force, for the statistics.
static IN_FORCE: OnceLock<Sandbox> = OnceLock::new();

/// What holds in this process. There is no way back.
#[derive(Clone, Copy, Debug)]
#[must_use = "seal it once requests are served"]
pub struct Sandbox {
    capabilities: bool,
    landlock: Option<i32>,
    seccomp: bool,
}

/// Confines this thread and all threads that it will start; the filter of system calls confines
/// those that exist, too.
///
/// To be called while there is one thread, and after everything is open that will be needed:
/// devices, state files, `/dev/null`, the way to the porter.
///
/// Nothing here fails: what the kernel does not offer is left out, which the log says.
pub fn enter() -> Sandbox {
    let precedes = priority::take();
    let capabilities = note("capabilities", capabilities::drop_all());
    // seccomp and Landlock ask for it and would set it themselves; it shall hold even where both
    // are missing.
    let no_new_privs = rustix::thread::set_no_new_privs(true).map_err(std::io::Error::from);
    note("no_new_privs", no_new_privs);
    let landlock = match paths::restrict() {
        Ok(Some(abi)) => Some(abi),
        Ok(None) => {
            tracing::info!("this kernel has no Landlock: the daemon could open files");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "Landlock is not in force");
            None
        }
    };
    let seccomp = note("seccomp", restrict_calls());
    if precedes {
        priority::pass_on();
    }
    let sandbox = Sandbox { capabilities, landlock, seccomp };
    let _ = IN_FORCE.set(sandbox);
    sandbox
}

impl Sandbox {
    /// Takes what only the start needed, from all threads. To be called when requests are served.
    pub fn seal(self) {
        priority::end();
        if self.seccomp {
            note("sealing", filter::seal());
        }
    }

    /// The filter of system calls is in force.
    #[must_use]
    pub fn has_seccomp(self) -> bool {
        self.seccomp
    }

    /// Landlock is in force, with this version of its interface.
    #[must_use]
    pub fn landlock(self) -> Option<i32> {
        self.landlock
    }
}

fn restrict_calls() -> std::io::Result<()> {
    refused::watch()?;
    let listener = processes::refuse()?;
    filter::apply()?;
    // The thread that answers comes last, so that nothing of this holds for others only.
    listener.map_or(Ok(()), processes::answer)
}

fn note(what: &str, outcome: std::io::Result<()>) -> bool {
    if let Err(error) = &outcome {
        tracing::warn!(%error, "the sandbox lacks: {what}");
    }
    outcome.is_ok()
}

/// Numbers of the system calls that were refused in this process so far.
#[must_use]
pub fn refused_calls() -> Vec<u32> {
    refused::all()
}

/// What is in force and what was refused, for the statistics; `null` outside of a sandbox.
pub(crate) fn to_json() -> serde_json::Value {
    match IN_FORCE.get() {
        Some(s) => serde_json::json!({
            "capabilities_dropped": s.capabilities,
            "landlock": s.landlock,
            "seccomp": s.seccomp,
            "refused_system_calls": refused::all(),
        }),
        None => serde_json::Value::Null,
    }
}
