//! What `/proc` says of one process or thread.

use std::io;
use std::path::Path;

/// The fields of a process's or thread's `status`.
#[derive(Clone, Debug)]
pub struct Status(Vec<u8>);

impl Status {
    /// Of this process.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn own() -> io::Result<Self> {
        Self::read(Path::new("/proc/self"))
    }

    /// Of a process or thread.
    ///
    /// # Errors
    /// If there is none with this number.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::read(&Path::new("/proc").join(pid.to_string()))
    }

    /// Of the process or thread with this folder.
    ///
    /// # Errors
    /// If it is gone.
    pub fn read(folder: &Path) -> io::Result<Self> {
        std::fs::read(folder.join("status")).map(Self)
    }

    /// A field's value without the blanks around it; nothing if there is none, or if it is not
    /// text.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.split(|b| *b == b'\n');
        let value = lines.find_map(|l| l.strip_prefix(name.as_bytes())?.strip_prefix(b":"))?;
        std::str::from_utf8(value).ok().map(str::trim)
    }

    /// A field that is an amount of memory, in bytes.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<u64> {
        let kib: u64 = self.field(name)?.strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    }

    /// A field that is a set of bits, such as signals.
    #[must_use]
    pub fn bits(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.field(name)?, 16).ok()
    }
}

/// A status as `/proc` shows it.
impl From<&[u8]> for Status {
    fn from(text: &[u8]) -> Self {
        Self(text.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = b"Name:\t\xffname\nUmask:\t0022\nVmRSSX:\t1 kB\nVmRSS:\t   20 kB\nSigIgn:\t0a\n";
        let status = Status::from(&text[..]);
        assert_eq!(status.field("Umask"), Some("0022"));
        assert_eq!((status.field("Name"), status.field("Mask")), (None, None));
        assert_eq!((status.bytes("VmRSS"), status.bytes("Umask")), (Some(20 << 10), None));
        assert_eq!(status.bits("SigIgn"), Some(10));
    }

    /// The kernel cuts names after 15 bytes, be it in the middle of a letter.
    #[test]
    fn a_thread_may_have_a_name_that_is_not_text() {
        let thread = std::thread::spawn(|| {
            // SAFETY: the name is terminated, and lives through the call.
            let named = unsafe { libc::prctl(libc::PR_SET_NAME, c"n\xff".as_ptr()) };
            assert_eq!(named, 0);
            Status::read(Path::new("/proc/thread-self")).unwrap()
        });
        let status = thread.join().unwrap();
        assert_eq!(status.field("Name"), None);
        assert!(status.field("Umask").is_some());
        assert!(Status::own().unwrap().bytes("VmRSS").unwrap() > 0);
        assert!(Status::of(u32::MAX).is_err());
    }
}
