//! The ring of one CPU, which carries the queues of all mounts there.
//!
//! Only the thread that made it can use it. It is restricted to what is done here, because its
//! operations pass no filter of system calls: commands of FUSE, and the read by which other threads
//! wake this one.

use io_uring::register::Restriction;
use io_uring::squeue::{self, Entry128};
use io_uring::types::Fixed;
use io_uring::{IoUring, cqueue, opcode};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

type Ring = IoUring<Entry128, cqueue::Entry>;

/// User data of the read that wakes the thread.
pub(super) const WAKE: u64 = u64::MAX;

/// A ring, and what its thread needs for every mount.
pub(super) struct CpuRing {
    /// Number of the CPU, and of the queues.
    pub(super) id: u16,
    ring: Ring,
    event: Arc<OwnedFd>,
    /// Where the eventfd is read into.
    wake_buffer: Box<[u8; 8]>,
    /// A read of the eventfd is under way.
    listening: bool,
    /// Copy of the last request's names: the reply goes where they came in.
    pub(super) names: Vec<u8>,
}

impl CpuRing {
    /// For the calling thread, with room for the entries of one mount. With further mounts it
    /// submits more often.
    pub(super) fn new(id: u16, entries: usize, event: Arc<OwnedFd>) -> io::Result<Self> {
        let slots = u32::try_from(entries + 1).map_err(io::Error::other)?.next_power_of_two();
        let ring: Ring = IoUring::builder()
            .dontfork()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_submit_all()
            .setup_r_disabled()
            .build(slots)?;
        ring.submitter().register_files(&[event.as_raw_fd()])?;
        ring.submitter().register_restrictions(&mut [
            Restriction::sqe_op(opcode::UringCmd80::CODE),
            Restriction::sqe_op(opcode::Read::CODE),
            Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()),
        ])?;
        ring.submitter().register_enable_rings()?;
        let mut ring = Self {
            id,
            ring,
            event,
            wake_buffer: Box::new([0; 8]),
            listening: false,
            names: Vec::new(),
        };
        ring.listen()?;
        Ok(ring)
    }

    /// Adds a submission. The memory it points to must belong to the thread and outlive the ring,
    /// or not be touched until it has completed.
    pub(super) fn push(&mut self, submission: Entry128) -> io::Result<()> {
        if self.ring.submission().is_full() && !self.submit_all() {
            return Err(io::Error::other("io_uring failed"));
        }
        // SAFETY: what submissions point to — an entry's memory, the wake buffer — belongs to a
        // queue of this thread or to the ring itself and lives until it has completed (see `drop`);
        // entries are not touched while the kernel has them.
        unsafe { self.ring.submission().push(&submission) }.map_err(io::Error::other)
    }

    /// Reads the eventfd again.
    pub(super) fn listen(&mut self) -> io::Result<()> {
        let read =
            opcode::Read::new(Fixed(0), self.wake_buffer.as_mut_ptr(), 8).build().user_data(WAKE);
        self.push(read.into())?;
        self.listening = true;
        Ok(())
    }

    /// Submits, and waits until there are this many completions. False if the ring has failed.
    pub(super) fn submit(&mut self, completions: usize) -> bool {
        let submitted = if completions > 0 {
            self.ring.submit_and_wait(completions)
        } else {
            self.ring.submit()
        };
        match submitted {
            Ok(_) => true,
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) =>
            {
                true
            }
            Err(error) => {
                tracing::error!(queue = self.id, %error, "io_uring failed");
                false
            }
        }
    }

    /// Submits all that was pushed. False as for [`submit`](Self::submit).
    pub(super) fn submit_all(&mut self) -> bool {
        while !self.ring.submission().is_empty() {
            if !self.submit(0) {
                return false;
            }
        }
        true
    }

    /// User data and results of what has completed.
    pub(super) fn take_completed(&mut self, into: &mut Vec<(u64, i32)>) {
        let listening = &mut self.listening;
        into.extend(self.ring.completion().map(|c| (c.user_data(), c.result())).inspect(
            |(user, _)| {
                if *user == WAKE {
                    *listening = false;
                }
            },
        ));
    }
}

impl Drop for CpuRing {
    fn drop(&mut self) {
        // The kernel fills entries in this thread's own task work only, which ends here. The read
        // of the eventfd must not outlive its buffer: let it complete.
        super::inbox::wake(&self.event);
        let mut completed = Vec::new();
        while self.listening && self.ring.submit_and_wait(1).is_ok() {
            self.take_completed(&mut completed);
        }
    }
}
