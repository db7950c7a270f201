//! New processes are refused, and that is noted, too.
//!
//! The signal that reports other refusals cannot be used here. libc blocks all signals around the
//! call that makes a process, and a signal that is raised then would kill. So the kernel asks a
//! thread of this process instead. That thread notes the number and answers `EPERM`, and the
//! calling thread waits for the answer. The kernel does not ask about threads: the filter
//! recognises them by their flags.
//!
//! A process may have one such listener only, its ancestors' filters included. If there is one
//! already, or the kernel is older than this, processes are refused without a note.

use super::{filter, refused};
use crate::priority;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Installs the filter for all threads, and returns the descriptor through which the kernel asks.
/// `None`: it will not ask.
pub(super) fn refuse() -> io::Result<Option<OwnedFd>> {
    match listen() {
        Ok(listener) => Ok(Some(listener)),
        Err(error) => {
            tracing::info!(%error, "refused processes will not be noted");
            filter::refuse_processes_silently().map(|()| None)
        }
    }
}

fn listen() -> io::Result<OwnedFd> {
    let program = filter::ask_about_processes()?;
    let program = libc::sock_fprog {
        len: program.len().try_into().map_err(io::Error::other)?,
        // The kernel only reads it.
        filter: program.as_ptr().cast_mut().cast(),
    };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_TSYNC
        | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH;
    // SAFETY: the program outlives the call, which reads as many instructions as `len` says; their
    // layout is the kernel's.
    let fd = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Answers for as long as the process lives.
pub(super) fn answer(listener: OwnedFd) -> io::Result<()> {
    let body = move || {
        priority::give_up();
        while let Ok(true) = answer_one(&listener) {}
        // No caller must wait for an answer that does not come: the call fails with ENOSYS from now
        // on.
        drop(listener);
    };
    let thread = std::thread::Builder::new().name("larder-refuser".into());
    thread.stack_size(128 << 10).spawn(body).map(drop)
}

/// Waits for a question. False: there will be none.
fn answer_one(listener: &OwnedFd) -> io::Result<bool> {
    // SAFETY: all zeros is a valid value, which the kernel demands.
    let mut question: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a question of just this type.
    let got = unsafe {
        libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut question)
    };
    if got < 0 {
        return match io::Error::last_os_error() {
            // A signal came, or the calling thread is gone.
            e if matches!(e.raw_os_error(), Some(libc::EINTR | libc::ENOENT)) => Ok(true),
            _ => Ok(false),
        };
    }
    refused::refused(u64::from(question.data.nr.cast_unsigned()));
    let answer =
        libc::seccomp_notif_resp { id: question.id, val: 0, error: -libc::EPERM, flags: 0 };
    // SAFETY: the kernel reads an answer of just this type. It does not matter if the caller has
    // stopped waiting.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const answer) };
    Ok(true)
}
