//! From the engine's errors to the numbers of system calls. The only place that knows both.

use larder_fs::Error;
use std::fmt;

/// An errno, positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

#[allow(missing_docs)]
impl Errno {
    pub(crate) const ACCES: Self = Self(libc::EACCES);
    pub const EXIST: Self = Self(libc::EEXIST);
    pub const INVAL: Self = Self(libc::EINVAL);
    pub const IO: Self = Self(libc::EIO);
    pub const NODATA: Self = Self(libc::ENODATA);
    pub const NOENT: Self = Self(libc::ENOENT);
    pub const NOSYS: Self = Self(libc::ENOSYS);
    pub const NOTDIR: Self = Self(libc::ENOTDIR);
    pub(crate) const NOTTY: Self = Self(libc::ENOTTY);
    pub const NXIO: Self = Self(libc::ENXIO);
    pub const OPNOTSUPP: Self = Self(libc::EOPNOTSUPP);
    pub const PERM: Self = Self(libc::EPERM);
    pub const RANGE: Self = Self(libc::ERANGE);
    pub const STALE: Self = Self(libc::ESTALE);
}

/// The errno for an error of the engine.
///
/// Where Linux's btrfs has a number for the same case, it is the same one.
#[must_use]
pub fn errno(error: &Error) -> Errno {
    Errno(match error {
        Error::Corrupt { .. } => libc::EUCLEAN,
        Error::Volume(_) | Error::DataLost => libc::EIO,
        Error::Unsupported(_) | Error::NotSupported(_) => libc::EOPNOTSUPP,
        Error::ReadOnly(_) | Error::SubvolumeReadOnly => libc::EROFS,
        Error::NotFound => libc::ENOENT,
        Error::NoAttribute => libc::ENODATA,
        Error::Exists => libc::EEXIST,
        Error::NotDirectory => libc::ENOTDIR,
        Error::IsDirectory => libc::EISDIR,
        Error::NotEmpty => libc::ENOTEMPTY,
        // An xattr that fits no item is ENOSPC on Linux's btrfs too.
        Error::NoSpace | Error::DoesNotFit(_) => libc::ENOSPC,
        Error::TooBig => libc::E2BIG,
        Error::TooManyLinks => libc::EMLINK,
        Error::NameTooLong => libc::ENAMETOOLONG,
        Error::Overflow => libc::EOVERFLOW,
        Error::FileTooBig => libc::EFBIG,
        Error::Invalid(_) => libc::EINVAL,
        Error::CrossSubvolume => libc::EXDEV,
        Error::NotPermitted(_) => libc::EPERM,
        Error::Busy(_) | Error::NotEmptied { .. } => libc::EBUSY,
        Error::WouldBlock => libc::EAGAIN,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_cases() {
        assert_eq!(errno(&Error::NotFound).0, 2);
        assert_eq!(errno(&Error::CrossSubvolume).0, 18);
        assert_eq!(errno(&Error::ReadOnly(None)).0, 30);
        assert_eq!(errno(&Error::NoAttribute).0, 61);
        assert_eq!(errno(&Error::corrupt(larder_fs::error::Place::default(), "x")).0, 117);
    }
}
