//! The property of an inode that chooses how its data is compressed: what its values mean.

use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use larder_codec::Packing;
use larder_format::features::Incompat;
use larder_format::items::{Compression, InodeFlags};

/// The property that chooses how a file's data is compressed.
pub(crate) const COMPRESSION: &[u8] = b"btrfs.compression";

/// How the property wants an inode's data to be compressed; `None` if there is none or it says
/// never.
///
/// # Errors
/// Reading; corruption.
pub(crate) fn packing(core: &Core, inode: &Inode) -> Result<Option<Packing>> {
    Ok(match inode.stored_xattr(core, COMPRESSION)?.and_then(|v| Method::parse(&v)) {
        Some(Method::Compress(packing)) => Some(packing),
        _ => None,
    })
}

/// The bit that the superblock must have for extents of a method.
pub(crate) fn incompat(method: Compression) -> Incompat {
    match method {
        Compression::None | Compression::Zlib => Incompat::empty(),
        Compression::Lzo => Incompat::COMPRESS_LZO,
        Compression::Zstd => Incompat::COMPRESS_ZSTD,
    }
}

/// What the compression property says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Nothing: what the mount says is done.
    Unset,
    /// Never.
    Never,
    /// By this method and level.
    Compress(Packing),
}

impl Method {
    /// Checks a change of a property.
    pub(crate) fn of_property(inode: &Inode, name: &[u8], value: Option<&[u8]>) -> Result<Self> {
        if name != COMPRESSION {
            return Err(Error::Invalid("unknown property"));
        }
        let copied = !inode.flags().intersects(InodeFlags::NODATACOW | InodeFlags::NODATASUM);
        match value {
            None => Ok(Self::Unset),
            Some(_) if !copied => Err(Error::Invalid("this inode's data cannot be compressed")),
            Some(v) => Self::parse(v).ok_or(Error::Invalid(
                "the value is no compression method: use zlib, lzo, zstd, no or none",
            )),
        }
    }
    /// Parses a value as Linux does: when the property is set, what follows a method's name is not
    /// checked. If it is a level we use it, otherwise the method's default.
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        if matches!(value, b"no" | b"none") {
            return Some(Self::Never);
        }
        let method = [Compression::Zlib, Compression::Lzo, Compression::Zstd]
            .into_iter()
            .find(|m| value.starts_with(m.name().as_bytes()))?;
        let exact = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        exact.or_else(|| Packing::new(method, None)).map(Self::Compress)
    }
    pub(crate) fn flags(self) -> InodeFlags {
        match self {
            Self::Unset => InodeFlags::empty(),
            Self::Never => InodeFlags::NOCOMPRESS,
            Self::Compress(_) => InodeFlags::COMPRESS,
        }
    }
    pub(crate) fn incompat(self) -> Incompat {
        match self {
            Self::Compress(packing) => incompat(packing.method()),
            _ => Incompat::empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_compression_property() {
        for (value, shown) in [
            ("zlib", "zlib:3"),
            ("zlib:9", "zlib:9"),
            ("zlib:10", "zlib:9"),
            ("zlib:x", "zlib:3"),
            ("zlibx", "zlib:3"),
            ("lzo", "lzo"),
            ("lzo:1", "lzo"),
            ("zstd", "zstd:3"),
            ("zstd:15", "zstd:15"),
            ("zstd:-5", "zstd:-5"),
            ("zstd:", "zstd:3"),
        ] {
            let Some(Method::Compress(packing)) = Method::parse(value.as_bytes()) else {
                panic!("{value}")
            };
            assert_eq!(packing.to_string(), shown, "{value}");
        }
        assert_eq!(Method::parse(b"none"), Some(Method::Never));
        assert_eq!(Method::parse(b"no"), Some(Method::Never));
        for bad in [&b""[..], b"zli", b"gzip", b"ZLIB", b"nox", b"none:1", b" zstd"] {
            assert_eq!(Method::parse(bad), None, "{bad:?}");
        }
    }
}
