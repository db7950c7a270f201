//! Flags of inodes by the names that archives and manifests use.

use larder_format::items::InodeFlags;

/// The bits for a list of names, as libarchive and BSD write them: `nodump,schg`. A name that
/// btrfs has no flag for is the error.
pub(crate) fn from_names(names: &[u8]) -> Result<u64, String> {
    let mut flags = InodeFlags::empty();
    let names = String::from_utf8_lossy(names);
    for name in names.split([',', ' ']).filter(|name| !matches!(*name, "" | "none")) {
        flags |= match name {
            "nocow" => InodeFlags::NODATACOW | InodeFlags::NODATASUM,
            "nosum" => InodeFlags::NODATASUM,
            "compress" => InodeFlags::COMPRESS,
            "nocompress" => InodeFlags::NOCOMPRESS,
            "sync" => InodeFlags::SYNC,
            "dirsync" => InodeFlags::DIRSYNC,
            "noatime" => InodeFlags::NOATIME,
            "nodump" => InodeFlags::NODUMP,
            "schg" | "schange" | "simmutable" | "immutable" => InodeFlags::IMMUTABLE,
            "sappnd" | "sappend" | "append" => InodeFlags::APPEND,
            _ => return Err(name.to_owned()),
        };
    }
    Ok(flags.bits())
}
