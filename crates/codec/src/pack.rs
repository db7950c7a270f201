//! The packing side: methods, their levels, and the streams that Linux reads.
//!
//! What Linux wants of a stream is seen to here: zstd frames have a window of at most 128 KiB, and
//! lzo segments are framed by sectors. A stream is given out only if it is as short as the caller
//! wants. A [`Packer`] keeps what is costly to set up, and is meant to be used again.

use crate::lzo;
use crate::lzo_pack::Table;
use larder_format::items::Compression;
use std::fmt;
use std::str::FromStr;
use zstd::zstd_safe::{CCtx, CParameter, ResetDirective};

/// How to pack: a method and a level. Never [`Compression::None`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Packing {
    method: Compression,
    level: i32,
}

/// Why a text names no way to pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PackingError {
    /// The method is none of those that there are.
    #[error("use zlib, lzo, zstd or none")]
    Method,
    /// The level is not a number.
    #[error("a level is a number: 1 to 9 for zlib, -15 to 15 for zstd")]
    Level,
}

/// Level of zlib and zstd when none is given, as in Linux.
const DEFAULT_LEVEL: i32 = 3;

impl Packing {
    /// A method at a level; `None` for no compression. Levels beyond what the method has become the
    /// nearest that it has, 0 the default, as in Linux.
    #[must_use]
    pub fn new(method: Compression, level: Option<i32>) -> Option<Self> {
        let level = level.filter(|l| *l != 0).unwrap_or(DEFAULT_LEVEL);
        let level = match method {
            Compression::None => return None,
            Compression::Zlib => level.clamp(1, 9),
            Compression::Zstd => level.clamp(-15, 15),
            Compression::Lzo => 0,
        };
        Some(Self { method, level })
    }
    /// Reads `zlib`, `lzo`, `zstd`, the same with `:LEVEL`, or `no` or `none`.
    ///
    /// # Errors
    /// Anything else.
    pub fn parse(text: &str) -> Result<Option<Self>, PackingError> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level.parse().map_err(|_| PackingError::Level)?)),
            None => (text, None),
        };
        let method = match name {
            "zlib" => Compression::Zlib,
            "lzo" => Compression::Lzo,
            "zstd" => Compression::Zstd,
            "no" | "none" if level.is_none() => Compression::None,
            _ => return Err(PackingError::Method),
        };
        Ok(Self::new(method, level))
    }
    /// The method, as extents name it.
    #[must_use]
    pub fn method(self) -> Compression {
        self.method
    }
    /// The level; 0 for lzo, which has none.
    #[must_use]
    pub fn level(self) -> i32 {
        self.level
    }
}

impl Default for Packing {
    /// What Linux takes when no method is named.
    fn default() -> Self {
        Self { method: Compression::Zlib, level: DEFAULT_LEVEL }
    }
}

impl FromStr for Packing {
    type Err = PackingError;
    /// As [`Packing::parse`], where something is to be packed.
    fn from_str(text: &str) -> Result<Self, PackingError> {
        Self::parse(text)?.ok_or(PackingError::Method)
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.method {
            Compression::Lzo => f.write_str(self.method.name()),
            _ => write!(f, "{}:{}", self.method.name(), self.level),
        }
    }
}

/// Packs, and keeps what that takes for the next time: some hundred KiB, some MiB after high
/// levels.
#[derive(Default)]
pub struct Packer {
    out: Vec<u8>,
    /// With its level.
    zlib: Option<(i32, flate2::Compress)>,
    zstd: Option<CCtx<'static>>,
    lzo: Table,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").finish_non_exhaustive()
    }
}

impl Packer {
    /// Packs `data`; `None` when that does not fit into `limit` bytes. An inline extent's stream is
    /// the same as any other.
    ///
    /// # Panics
    /// If `data` is empty.
    pub fn pack(&mut self, packing: Packing, data: &[u8], limit: usize) -> Option<&[u8]> {
        assert!(!data.is_empty(), "there is nothing to pack");
        // What the worst of them makes of data that does not shrink.
        let limit = limit.min(data.len() + data.len() / 8 + 1024);
        let fits = match packing.method {
            Compression::None => unreachable!("a packing packs"),
            Compression::Zlib => self.zlib(packing.level, data, limit),
            Compression::Lzo => lzo::compress(data, limit, &mut self.out, &mut self.lzo),
            Compression::Zstd => self.zstd(packing.level, data, limit),
        };
        (fits && self.out.len() <= limit).then_some(&self.out[..])
    }

    fn zlib(&mut self, level: i32, data: &[u8], limit: usize) -> bool {
        if self.zlib.as_ref().is_some_and(|(l, _)| *l != level) {
            self.zlib = None;
        }
        let (_, stream) = self.zlib.get_or_insert_with(|| {
            (level, flate2::Compress::new(flate2::Compression::new(level.unsigned_abs()), true))
        });
        stream.reset();
        self.out.resize(limit, 0);
        let status = stream.compress(data, &mut self.out, flate2::FlushCompress::Finish);
        let len = usize::try_from(stream.total_out()).expect("no more than the buffer");
        self.out.truncate(len);
        matches!(status, Ok(flate2::Status::StreamEnd))
    }

    fn zstd(&mut self, level: i32, data: &[u8], limit: usize) -> bool {
        if self.zstd.is_none() {
            self.zstd = CCtx::try_create();
        }
        let Some(context) = &mut self.zstd else { return false };
        // None of these can fail for what a packing allows; if one did, the data would be left as
        // it is. What did not fit the last time left the context in the middle.
        let set = context
            .reset(ResetDirective::SessionOnly)
            .and_then(|_| context.set_parameter(CParameter::CompressionLevel(level)))
            .and_then(|_| context.set_parameter(CParameter::WindowLog(crate::ZSTD_WINDOW_LOG)));
        if set.is_err() {
            return false;
        }
        // Exactly so much room: with hardly more than a frame takes zstd gives up. Room that was
        // left from a longer call would make what is stored depend on what was packed before.
        self.out.resize(limit, 0);
        match context.compress2(&mut self.out[..], data) {
            Ok(len) => {
                self.out.truncate(len);
                true
            }
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decompress;
    use proptest::prelude::*;

    fn all() -> Vec<Packing> {
        let zlib = (1..=9).map(|l| (Compression::Zlib, l));
        let zstd = (-15..=15).filter(|l| *l != 0).map(|l| (Compression::Zstd, l));
        zlib.chain(zstd)
            .chain([(Compression::Lzo, 0)])
            .filter_map(|(m, l)| Packing::new(m, Some(l)))
            .collect()
    }

    #[test]
    fn words_are_those_of_linux() {
        for (text, shown) in [
            ("zlib", "zlib:3"),
            ("zlib:9", "zlib:9"),
            ("zlib:10", "zlib:9"),
            ("zlib:0", "zlib:3"),
            ("lzo", "lzo"),
            ("lzo:3", "lzo"),
            ("zstd", "zstd:3"),
            ("zstd:16", "zstd:15"),
            ("zstd:-20", "zstd:-15"),
        ] {
            assert_eq!(text.parse::<Packing>().unwrap().to_string(), shown);
        }
        assert_eq!(Packing::parse("no"), Ok(None));
        assert_eq!(Packing::parse("none"), Ok(None));
        for (bad, why) in [
            ("", PackingError::Method),
            ("zstdx", PackingError::Method),
            ("none:1", PackingError::Method),
            ("zstd:", PackingError::Level),
            ("zstd:x", PackingError::Level),
        ] {
            assert_eq!(Packing::parse(bad), Err(why), "{bad}");
        }
        assert!("none".parse::<Packing>().is_err());
    }

    #[test]
    fn what_does_not_fit_is_not_given_out() {
        let mut packer = Packer::default();
        let text: Vec<u8> = (0..20_000u32).map(|i| (i / 7 % 251) as u8).collect();
        for packing in all() {
            let len = packer.pack(packing, &text, usize::MAX).unwrap().len();
            assert!(len < text.len(), "{packing}");
            assert!(packer.pack(packing, &text, len - 1).is_none(), "{packing}");
            // The packer is as good as new.
            let again = packer.pack(packing, &text, text.len()).unwrap();
            let mut out = vec![0; text.len()];
            decompress(packing.method(), again, &mut out).unwrap();
            assert_eq!(out, text, "{packing}");
        }
    }

    #[test]
    fn zstd_frames_have_windows_that_linux_reads() {
        let data: Vec<u8> = (0..131_072u64).map(|i| ((i * i) >> 11) as u8).collect();
        let mut packer = Packer::default();
        for packing in all().into_iter().filter(|p| p.method() == Compression::Zstd) {
            let frame = packer.pack(packing, &data, usize::MAX).unwrap();
            let size = zstd::zstd_safe::get_frame_content_size(frame).unwrap();
            // A frame that says its size needs no window beyond that.
            assert_eq!(size, Some(data.len() as u64), "{packing}");
        }
    }

    /// An image has to be the same whatever a thread has packed before.
    #[test]
    fn what_was_packed_before_does_not_show() {
        let mut used = Packer::default();
        let zstd = Packing::new(Compression::Zstd, Some(3)).unwrap();
        let mut seed = 1u32;
        let mut text = |len: usize| -> Vec<u8> {
            let mut byte = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                b'a' + (seed >> 24) as u8 % 24
            };
            (0..len).map(|_| byte()).collect()
        };
        used.pack(zstd, &text(131_072), usize::MAX).unwrap();
        for len in (4097..40_000).step_by(997) {
            let data = text(len);
            let packed = used.pack(zstd, &data, usize::MAX).unwrap().len();
            // With hardly more room than it takes, zstd may give up.
            for limit in packed..packed + 40 {
                let fresh = Packer::default().pack(zstd, &data, limit).map(<[u8]>::to_vec);
                let again = used.pack(zstd, &data, limit).map(<[u8]>::to_vec);
                assert!(again == fresh, "{len} bytes into {limit}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn what_is_packed_comes_back(
            mut data in crate::repeating(300, 200),
            which in any::<prop::sample::Index>(),
            second in any::<prop::sample::Index>(),
        ) {
            data.truncate(131_072);
            let mut packer = Packer::default();
            for packing in [*which.get(&all()), *second.get(&all())] {
                let packed = packer.pack(packing, &data, usize::MAX).unwrap();
                let mut out = vec![0xee; data.len()];
                decompress(packing.method(), packed, &mut out).unwrap();
                prop_assert_eq!(&out, &data);
            }
        }
    }
}
