//! Refused system calls are noted.
//!
//! The filter raises SIGSYS. The handler notes the number, writes it to standard error the first
//! time, and lets the call fail with `EPERM`. It may run in the middle of anything, so it does not
//! allocate, lock or format.

use std::sync::atomic::{AtomicU64, Ordering};

/// Higher numbers are noted as the last one. The tables of all architectures here end far below.
const KNOWN: usize = 1024;

/// One bit for each number; set if it was refused.
static REFUSED: [AtomicU64; KNOWN / 64] = [const { AtomicU64::new(0) }; KNOWN / 64];

/// Notes a number. True the first time.
fn note(number: u64) -> bool {
    let number = usize::try_from(number).unwrap_or(KNOWN).min(KNOWN - 1);
    let bit = 1 << (number % 64);
    REFUSED[number / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0
}

/// All numbers that were noted.
pub(super) fn all() -> Vec<u32> {
    (0..KNOWN)
        .filter(|n| REFUSED[n / 64].load(Ordering::Relaxed) & (1 << (n % 64)) != 0)
        .map(|n| n as u32)
        .collect()
}

const BEFORE: &[u8] = b"larder: the sandbox refused system call ";
const AFTER: &[u8] = b" (please report it; -o nosandbox mounts without)\n";

/// The line for a number in a buffer, and its length.
fn line(mut number: u64) -> ([u8; 128], usize) {
    let mut digits = [0; 20];
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    let mut out = [0; 128];
    let mut len = 0;
    for part in [BEFORE, &digits[first..], AFTER] {
        out[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    (out, len)
}

/// Notes a number, and prints it the first time. May be called in a signal handler.
pub(super) fn refused(number: u64) {
    if note(number) {
        let (text, len) = line(number);
        // SAFETY: write(2) is safe in a signal handler and `len` bytes of the buffer are filled.
        // errno is put back for the interrupted code; the raw call's own result is ignored.
        unsafe {
            let errno = libc::__errno_location();
            let before = *errno;
            let _ = libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), len);
            *errno = before;
        }
    }
}

/// Installs the handler.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn watch() -> std::io::Result<()> {
    // SAFETY: all zeros is a valid sigaction: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigsys as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
    // SAFETY: the action is initialised and its handler has the form that SA_SIGINFO asks for.
    if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } == 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error())
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) fn watch() -> std::io::Result<()> {
    Ok(())
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
extern "C" fn on_sigsys(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes the interrupted thread's ucontext, which is ours
    // until we return.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
    #[cfg(target_arch = "x86_64")]
    let number = registers.gregs[libc::REG_RAX as usize].cast_unsigned();
    #[cfg(target_arch = "aarch64")]
    let number = registers.regs[8];
    refused(number);
    // What the call returns when the thread goes on.
    #[cfg(target_arch = "x86_64")]
    {
        registers.gregs[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
    }
    #[cfg(target_arch = "aarch64")]
    {
        registers.regs[0] = (-i64::from(libc::EPERM)).cast_unsigned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_noted_once_and_said() {
        assert!(note(700) && !note(700) && note(u64::MAX));
        let all = all();
        assert!(all.contains(&700) && all.contains(&1023), "{all:?}");
        let (text, len) = line(41);
        let text = std::str::from_utf8(&text[..len]).unwrap();
        assert!(text.contains(" system call 41 (") && text.ends_with('\n'), "{text}");
        let (_, len) = line(u64::MAX);
        assert!(len < 128);
    }
}
