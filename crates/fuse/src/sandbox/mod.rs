//! The mount daemon gives up what it does not need, before it reads the first byte of an image.
//!
//! An image is hostile input, and the daemon of root's mount is root. This module hides how a
//! process is confined on Linux: no capabilities, no new privileges, Landlock for files, seccomp
//! for system calls, and, once requests are served, no further io_uring ([`Sandbox::seal`]). A
//! daemon still may work on the files that it has open, talk to the kernel's FUSE, have threads and
//! memory, look up a caller's groups, change the priority of its own threads, and end. The rest is
//! done by its mount [helper](crate::helper).
//!
//! A refused system call fails with `EPERM`; its number is on standard error and in `larder stats`.
//! A few calls that only foreign code would make end the process at once. What the kernel does not
//! offer is left out, and the log says so: a mount works without Landlock or seccomp.
//! `docs/FUSE.md` has the layers and their reasons, `docs/BENCHMARKS.md` the cost.

mod capabilities;
mod filter;
mod paths;
mod processes;
mod refused;

use crate::priority;
use std::sync::OnceLock;

/// What is in force, for the statistics.
static IN_FORCE: OnceLock<Sandbox> = OnceLock::new();

/// What is in force in this process. It cannot be undone.
#[derive(Clone, Copy, Debug)]
#[must_use = "seal it once requests are served"]
pub struct Sandbox {
    capabilities: bool,
    landlock: Option<i32>,
    seccomp: bool,
}

/// Confines this thread and all threads that it will start. The filter of system calls also
/// confines those that exist.
///
/// To be called while there is one thread, and after everything that will be needed is open:
/// devices, state files, `/dev/null`, the socket of the mount helper.
///
/// This never fails: what the kernel does not offer is left out, and the log says so.
pub fn enter() -> Sandbox {
    let precedes = priority::take();
    let capabilities = note("capabilities", capabilities::drop_all());
    // seccomp and Landlock need it and would set it themselves. It must hold even if both are
    // missing.
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
    /// Takes from all threads what only the start needed. To be called when requests are served.
    pub fn seal(self) {
        priority::end();
        if self.seccomp {
            note("sealing", filter::seal());
        }
    }
}

fn restrict_calls() -> std::io::Result<()> {
    refused::watch()?;
    let listener = processes::refuse()?;
    filter::apply()?;
    // The thread that answers is started last, so that all filters hold for it, too.
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
