//! INIT: versions, limits and the flags by which both sides agree on what they can do.

// The derive for layouts makes hidden types that the lint sees.
#![allow(missing_debug_implementations)]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What the kernel offers.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitIn {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
    pub(crate) flags2: u32,
    pub(crate) unused: [u32; 11],
}

/// What we accept.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitOut {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
    pub(crate) max_background: u16,
    pub(crate) congestion_threshold: u16,
    pub(crate) max_write: u32,
    pub(crate) time_gran: u32,
    pub(crate) max_pages: u16,
    pub(crate) map_alignment: u16,
    pub(crate) flags2: u32,
    pub(crate) max_stack_depth: u32,
    pub(crate) request_timeout: u16,
    pub(crate) unused: [u16; 11],
}

const _: () = assert!(size_of::<InitIn>() == 64);
const _: () = assert!(size_of::<InitOut>() == 64);

/// Capabilities in INIT, both words as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InitFlags(pub(crate) u64);

impl InitFlags {
    pub(crate) const ASYNC_READ: Self = Self(1 << 0);
    /// Never accepted: without OPEN requests the kernel would leave truncation to a message that it
    /// does not send.
    #[cfg(test)]
    pub(crate) const ATOMIC_O_TRUNC: Self = Self(1 << 3);
    pub(crate) const EXPORT_SUPPORT: Self = Self(1 << 4);
    pub(crate) const BIG_WRITES: Self = Self(1 << 5);
    pub(crate) const DONT_MASK: Self = Self(1 << 6);
    pub(crate) const HAS_IOCTL_DIR: Self = Self(1 << 11);
    pub(crate) const DO_READDIRPLUS: Self = Self(1 << 13);
    pub(crate) const READDIRPLUS_AUTO: Self = Self(1 << 14);
    pub(crate) const ASYNC_DIO: Self = Self(1 << 15);
    pub(crate) const WRITEBACK_CACHE: Self = Self(1 << 16);
    pub(crate) const NO_OPEN_SUPPORT: Self = Self(1 << 17);
    pub(crate) const PARALLEL_DIROPS: Self = Self(1 << 18);
    pub(crate) const POSIX_ACL: Self = Self(1 << 20);
    pub(crate) const MAX_PAGES: Self = Self(1 << 22);
    pub(crate) const CACHE_SYMLINKS: Self = Self(1 << 23);
    pub(crate) const NO_OPENDIR_SUPPORT: Self = Self(1 << 24);
    pub(crate) const EXPLICIT_INVAL_DATA: Self = Self(1 << 25);
    pub(crate) const HANDLE_KILLPRIV_V2: Self = Self(1 << 28);
    pub(crate) const SETXATTR_EXT: Self = Self(1 << 29);
    pub(crate) const INIT_EXT: Self = Self(1 << 30);
    pub(crate) const DIRECT_IO_ALLOW_MMAP: Self = Self(1 << 36);
    pub(crate) const OVER_IO_URING: Self = Self(1 << 41);

    /// The two words of the message.
    #[must_use]
    pub(crate) const fn words(self) -> (u32, u32) {
        (self.0 as u32, (self.0 >> 32) as u32)
    }
    /// From the two words; the second counts only if the first announces it.
    #[must_use]
    pub(crate) const fn from_words(flags: u32, flags2: u32) -> Self {
        let high = if flags & Self::INIT_EXT.0 as u32 != 0 { flags2 } else { 0 };
        Self(flags as u64 | ((high as u64) << 32))
    }
    #[must_use]
    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
    #[must_use]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    #[must_use]
    pub(crate) const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Background requests that the kernel may have under way at a time.
pub(crate) const MAX_BACKGROUND: u16 = 64;
/// Largest read or write in one request, in bytes.
pub(crate) const MAX_WRITE: u32 = 1 << 20;

/// What a mount wants from the negotiation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InitOptions {
    /// Let the kernel delay writes.
    pub(crate) writeback: bool,
    /// The kernel checks permissions, ACLs included.
    pub(crate) kernel_permissions: bool,
    /// FUSE over io_uring, if the kernel offers it.
    pub(crate) uring: bool,
}

/// Chooses from the kernel's offer.
#[must_use]
pub(crate) fn negotiate(offer: &InitIn, options: InitOptions) -> InitOut {
    let offered = InitFlags::from_words(offer.flags, offer.flags2);
    let mut wanted = InitFlags::ASYNC_READ
        .or(InitFlags::EXPORT_SUPPORT)
        .or(InitFlags::BIG_WRITES)
        .or(InitFlags::DONT_MASK)
        .or(InitFlags::HAS_IOCTL_DIR)
        .or(InitFlags::DO_READDIRPLUS)
        .or(InitFlags::READDIRPLUS_AUTO)
        .or(InitFlags::ASYNC_DIO)
        .or(InitFlags::NO_OPEN_SUPPORT)
        .or(InitFlags::PARALLEL_DIROPS)
        .or(InitFlags::MAX_PAGES)
        .or(InitFlags::CACHE_SYMLINKS)
        .or(InitFlags::NO_OPENDIR_SUPPORT)
        .or(InitFlags::EXPLICIT_INVAL_DATA)
        .or(InitFlags::HANDLE_KILLPRIV_V2)
        .or(InitFlags::SETXATTR_EXT)
        .or(InitFlags::INIT_EXT)
        .or(InitFlags::DIRECT_IO_ALLOW_MMAP);
    if options.writeback {
        wanted = wanted.or(InitFlags::WRITEBACK_CACHE);
    }
    if options.kernel_permissions {
        wanted = wanted.or(InitFlags::POSIX_ACL);
    }
    if options.uring {
        wanted = wanted.or(InitFlags::OVER_IO_URING);
    }
    let (flags, flags2) = wanted.and(offered).words();
    InitOut {
        major: super::MAJOR,
        minor: super::MINOR.min(offer.minor),
        max_readahead: offer.max_readahead.min(MAX_WRITE),
        flags,
        max_background: MAX_BACKGROUND,
        congestion_threshold: 48,
        max_write: MAX_WRITE,
        time_gran: 1,
        max_pages: (MAX_WRITE / 4096) as u16,
        flags2,
        ..InitOut::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(flags: u64) -> InitIn {
        InitIn {
            major: 7,
            minor: 45,
            max_readahead: 131_072,
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            ..InitIn::default()
        }
    }

    #[test]
    fn takes_only_what_is_offered() {
        let out = negotiate(&offer(InitFlags::ASYNC_READ.0), InitOptions::default());
        assert_eq!(out.flags, InitFlags::ASYNC_READ.0 as u32);
        assert_eq!(out.flags2, 0);
        assert_eq!(out.max_readahead, 131_072);
    }

    #[test]
    fn never_takes_atomic_truncation_and_options_only_when_wished() {
        let all = negotiate(&offer(u64::MAX), InitOptions::default());
        let got = InitFlags::from_words(all.flags, all.flags2);
        assert!(!got.has(InitFlags::ATOMIC_O_TRUNC));
        assert!(!got.has(InitFlags::WRITEBACK_CACHE));
        assert!(!got.has(InitFlags::POSIX_ACL));
        assert!(!got.has(InitFlags::OVER_IO_URING));
        assert!(got.has(InitFlags::HANDLE_KILLPRIV_V2) && got.has(InitFlags::DIRECT_IO_ALLOW_MMAP));
        let all = negotiate(
            &offer(u64::MAX),
            InitOptions { writeback: true, kernel_permissions: true, uring: true },
        );
        let got = InitFlags::from_words(all.flags, all.flags2);
        assert!(got.has(InitFlags::WRITEBACK_CACHE) && got.has(InitFlags::POSIX_ACL));
        assert!(got.has(InitFlags::OVER_IO_URING));
        assert_eq!(usize::from(all.max_pages) * 4096, all.max_write as usize);
    }

    #[test]
    fn second_word_needs_its_announcement() {
        assert!(!InitFlags::from_words(0, 1 << 9).has(InitFlags::OVER_IO_URING));
        assert!(InitFlags::from_words(1 << 30, 1 << 9).has(InitFlags::OVER_IO_URING));
    }
}
