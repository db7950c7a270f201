//! Which system calls the daemon may make: seccomp.
//!
//! There are several filters, and the kernel takes the strictest answer:
//!
//! 1. the list of what is needed; anything else is refused and noted ([`super::refused`]);
//! 2. `clone3` does not exist: its flags lie in memory, where a filter cannot see them. libc then
//!    uses `clone`;
//! 3. `clone` makes threads only; the refusal of processes is noted in another way
//!    ([`super::processes`]);
//! 4. what only somebody else's code would call ends the process;
//! 5. once sealed: what only the start needed is refused.
//!
//! The list was found with strace over the tests. Where a library may choose between relatives
//! (`readv`, `preadv2`, `poll`, `ppoll`) it has all of them.

use std::io;

/// Puts all filters but the last into force for all threads.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn apply() -> io::Result<()> {
    for filter in [imp::without_clone3(), imp::fatal(), imp::needed()] {
        imp::install(filter)?;
    }
    Ok(())
}

/// Puts the filter that makes `clone` fail for processes into force for all threads.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn refuse_processes_silently() -> io::Result<()> {
    imp::install(imp::threads_only(imp::SILENTLY))
}

/// The filter by which the kernel asks before `clone` makes a process, to be installed with a
/// listener.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn ask_about_processes() -> io::Result<Vec<seccompiler::sock_filter>> {
    imp::asking(imp::threads_only(imp::ASKING))
}

/// Puts the last filter into force for all threads.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn seal() -> io::Result<()> {
    imp::install(imp::start_only())
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn apply() -> io::Result<()> {
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "there is no list of system calls for this processor",
    ))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn seal() -> io::Result<()> {
    Ok(())
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn refuse_processes_silently() -> io::Result<()> {
    Ok(())
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn ask_about_processes() -> io::Result<Vec<seccompiler::sock_filter>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod imp {
    use libc::c_long;
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch, apply_filter_all_threads,
    };
    use std::collections::BTreeMap;
    use std::io;

    type Filter = Result<SeccompFilter, seccompiler::BackendError>;

    const ARCH: TargetArch =
        if cfg!(target_arch = "x86_64") { TargetArch::x86_64 } else { TargetArch::aarch64 };

    /// Its number on every architecture but Alpha; `libc` does not have it on all of them.
    const CACHESTAT: c_long = 451;

    /// Needed whatever the arguments.
    const NEEDED: &[c_long] = &[
        // Devices, images, /dev/fuse, pipes and the mount helper's socket: what is open already.
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_pread64,
        libc::SYS_pwrite64,
        libc::SYS_preadv,
        libc::SYS_pwritev,
        libc::SYS_preadv2,
        libc::SYS_pwritev2,
        libc::SYS_lseek,
        libc::SYS_fsync,
        libc::SYS_fdatasync,
        libc::SYS_sync_file_range,
        libc::SYS_fallocate,
        libc::SYS_ftruncate,
        libc::SYS_fadvise64,
        CACHESTAT,
        libc::SYS_flock,
        libc::SYS_fstat,
        libc::SYS_statx,
        libc::SYS_newfstatat,
        libc::SYS_close,
        libc::SYS_dup,
        libc::SYS_dup3,
        libc::SYS_pipe2,
        libc::SYS_eventfd2,
        libc::SYS_ppoll,
        libc::SYS_sendto,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_shutdown,
        // Reading /proc and joining /dev/fuse; Landlock says which files.
        libc::SYS_openat,
        libc::SYS_readlinkat,
        // The allocator looks for the number of memory nodes.
        libc::SYS_faccessat,
        libc::SYS_getcwd,
        // FUSE over io_uring; what a ring may do is restricted in the ring, and making one ends
        // with the start.
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_register,
        libc::SYS_io_uring_enter,
        // Memory.
        libc::SYS_brk,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        // Threads. Other filters refuse `clone3` and processes.
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::SYS_set_robust_list,
        libc::SYS_get_robust_list,
        libc::SYS_set_tid_address,
        libc::SYS_rseq,
        libc::SYS_futex,
        libc::SYS_membarrier,
        libc::SYS_sched_yield,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_setaffinity,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_getcpu,
        // Signals of its own.
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sigaltstack,
        libc::SYS_restart_syscall,
        // The time, and waiting for it.
        libc::SYS_clock_gettime,
        libc::SYS_clock_getres,
        libc::SYS_clock_nanosleep,
        libc::SYS_nanosleep,
        libc::SYS_gettimeofday,
        // Facts about this process and the machine.
        libc::SYS_getuid,
        libc::SYS_geteuid,
        libc::SYS_getgid,
        libc::SYS_getegid,
        libc::SYS_capget,
        libc::SYS_uname,
        libc::SYS_sysinfo,
        libc::SYS_getrusage,
        libc::SYS_getrandom,
        // Leaving the process group that it was started in, and waiting for the mount helper's end.
        libc::SYS_setpgid,
        libc::SYS_wait4,
        libc::SYS_waitid,
        // The last filter is installed while this one is in force.
        libc::SYS_seccomp,
    ];

    /// Older variants, which only this architecture has.
    #[cfg(target_arch = "x86_64")]
    const NEEDED_HERE: &[c_long] = &[
        libc::SYS_open,
        libc::SYS_stat,
        libc::SYS_access,
        libc::SYS_readlink,
        libc::SYS_dup2,
        libc::SYS_pipe,
        libc::SYS_poll,
        libc::SYS_arch_prctl,
        libc::SYS_time,
    ];
    #[cfg(not(target_arch = "x86_64"))]
    const NEEDED_HERE: &[c_long] = &[];

    /// Executing a program, entering another process, loading code into the kernel, leaving a
    /// namespace. No code of ours or of its libraries does that in a daemon, not even by mistake.
    const FATAL: &[c_long] = &[
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_getfd,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_open_by_handle_at,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_reboot,
    ];

    /// Only the start of a daemon needs these.
    const START_ONLY: &[c_long] =
        &[libc::SYS_io_uring_setup, libc::SYS_io_uring_register, libc::SYS_seccomp];

    /// `FUSE_DEV_IOC_CLONE`, `BLKDISCARD`, `BLKZEROOUT`, `BLKSSZGET`, `BLKPBSZGET`, `BLKGETSIZE64`;
    /// `TCGETS`, by which libraries find out whether they write to a terminal; and the questions
    /// and answers of [`super::super::processes`].
    const IOCTLS: [u32; 9] = [
        0x8004_e500,
        0x1277,
        0x127f,
        0x1268,
        0x127b,
        0x8008_1272,
        0x5401,
        libc::SECCOMP_IOCTL_NOTIF_RECV as u32,
        libc::SECCOMP_IOCTL_NOTIF_SEND as u32,
    ];

    /// What happens to a call that would make a process: it fails, or the listener is asked. The
    /// filter's compiler does not know the latter. So an action that is not used otherwise stands
    /// for it, until [`asking`] replaces it.
    pub(super) const SILENTLY: SeccompAction = SeccompAction::Errno(libc::EPERM as u32);
    pub(super) const ASKING: SeccompAction = SeccompAction::Trace(0);

    const FCNTLS: [libc::c_int; 6] = [
        libc::F_DUPFD,
        libc::F_DUPFD_CLOEXEC,
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
    ];

    /// `PR_GET_AUXV`: what the kernel has told the process of itself and the machine.
    const GET_AUXV: libc::c_int = 0x4155_5856;

    /// What a thread may do with itself: have a name, name its memory, and read its rights and what
    /// it was told at its start.
    const PRCTLS: [libc::c_int; 6] = [
        libc::PR_SET_NAME,
        libc::PR_GET_NAME,
        libc::PR_SET_VMA,
        libc::PR_CAPBSET_READ,
        libc::PR_SET_NO_NEW_PRIVS,
        GET_AUXV,
    ];

    /// One condition on the low 32 bits of an argument.
    fn when(
        argument: u8,
        how: SeccompCmpOp,
        value: u64,
    ) -> Result<SeccompRule, seccompiler::BackendError> {
        SeccompRule::new(vec![SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            how,
            value,
        )?])
    }

    fn one_of(
        argument: u8,
        values: impl IntoIterator<Item = u32>,
    ) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
        values.into_iter().map(|v| when(argument, SeccompCmpOp::Eq, u64::from(v))).collect()
    }

    fn any(calls: &[c_long]) -> BTreeMap<i64, Vec<SeccompRule>> {
        calls.iter().map(|call| (*call, Vec::new())).collect()
    }

    /// The list of what may be called.
    pub(super) fn needed() -> Filter {
        let mut rules = any(NEEDED);
        rules.extend(any(NEEDED_HERE));
        let not_executable = || when(2, SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64), 0);
        rules.insert(libc::SYS_mmap, vec![not_executable()?]);
        rules.insert(libc::SYS_mprotect, vec![not_executable()?]);
        rules.insert(libc::SYS_ioctl, one_of(1, IOCTLS)?);
        rules.insert(libc::SYS_fcntl, one_of(1, FCNTLS.map(libc::c_int::cast_unsigned))?);
        rules.insert(libc::SYS_prctl, one_of(0, PRCTLS.map(libc::c_int::cast_unsigned))?);
        // abort() ends in a signal to itself.
        let own = u64::from(std::process::id());
        rules.insert(libc::SYS_tgkill, vec![when(0, SeccompCmpOp::Eq, own)?]);
        // Reading its own limits: the pointer to new ones is null.
        let null = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
        let itself = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 0)?;
        rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![itself.clone(), null])?]);
        // The calling thread's nice value, which it may only raise.
        let this_thread = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 0)?;
        let own = SeccompRule::new(vec![itself, this_thread])?;
        rules.insert(libc::SYS_getpriority, vec![own.clone()]);
        rules.insert(libc::SYS_setpriority, vec![own]);
        SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, ARCH)
    }

    pub(super) fn without_clone3() -> Filter {
        let missing = SeccompAction::Errno(libc::ENOSYS as u32);
        SeccompFilter::new(any(&[libc::SYS_clone3]), SeccompAction::Allow, missing, ARCH)
    }

    pub(super) fn threads_only(otherwise: SeccompAction) -> Filter {
        // Threads must share memory and signals, so this one flag is enough.
        let process = when(0, SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64), 0)?;
        let rules = BTreeMap::from([(libc::SYS_clone, vec![process])]);
        SeccompFilter::new(rules, SeccompAction::Allow, otherwise, ARCH)
    }

    pub(super) fn asking(filter: Filter) -> io::Result<BpfProgram> {
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let mut program: BpfProgram =
            filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
        for step in &mut program {
            if step.code == RETURN && step.k == libc::SECCOMP_RET_TRACE {
                step.k = libc::SECCOMP_RET_USER_NOTIF;
            }
        }
        Ok(program)
    }

    pub(super) fn fatal() -> Filter {
        SeccompFilter::new(any(FATAL), SeccompAction::Allow, SeccompAction::KillProcess, ARCH)
    }

    pub(super) fn start_only() -> Filter {
        SeccompFilter::new(any(START_ONLY), SeccompAction::Allow, SeccompAction::Trap, ARCH)
    }

    pub(super) fn install(filter: Filter) -> io::Result<()> {
        let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
        apply_filter_all_threads(&program).map_err(io::Error::other)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_filters_compile_and_do_not_contradict_each_other() {
            for filter in
                [needed(), without_clone3(), threads_only(SILENTLY), fatal(), start_only()]
            {
                let program: BpfProgram = filter.unwrap().try_into().unwrap();
                assert!(!program.is_empty() && program.len() < 4096);
            }
            let listed = |call: &c_long| NEEDED.contains(call) || NEEDED_HERE.contains(call);
            assert!(!FATAL.iter().any(listed));
            assert!(START_ONLY.iter().all(listed), "sealing takes what was there");
            let asks = |program: BpfProgram| {
                program.iter().filter(|step| step.k == libc::SECCOMP_RET_USER_NOTIF).count()
            };
            assert_eq!(asks(asking(threads_only(ASKING)).unwrap()), 1);
            assert_eq!(asks(asking(threads_only(SILENTLY)).unwrap()), 0);
        }
    }
}
