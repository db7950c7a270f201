//! Flags of inodes by the names that archives and manifests use.
//!
//! The names are those of libarchive and BSD, so that other programs know most of them. Two are our
//! own: `nosum`, and `nocompress` for files that stay as they are, which means no more than the
//! absence of `compress` to others.

use larder_format::items::InodeFlags;

/// Names, and the flags that they set. Of several names for one flag the first is written.
const NAMES: [(&str, InodeFlags); 16] = [
    ("sappnd", InodeFlags::APPEND),
    ("sappend", InodeFlags::APPEND),
    ("append", InodeFlags::APPEND),
    ("schg", InodeFlags::IMMUTABLE),
    ("schange", InodeFlags::IMMUTABLE),
    ("simmutable", InodeFlags::IMMUTABLE),
    ("immutable", InodeFlags::IMMUTABLE),
    ("nodump", InodeFlags::NODUMP),
    ("noatime", InodeFlags::NOATIME),
    ("sync", InodeFlags::SYNC),
    ("dirsync", InodeFlags::DIRSYNC),
    ("compress", InodeFlags::COMPRESS),
    ("nocompress", InodeFlags::NOCOMPRESS),
    ("nocow", InodeFlags::NODATACOW.union(InodeFlags::NODATASUM)),
    ("nosum", InodeFlags::NODATASUM),
    ("none", InodeFlags::empty()),
];

/// The bits for a list of names, as libarchive and BSD write them: `nodump,schg`. Names that btrfs
/// has no flag for come back.
pub(crate) fn from_names(names: &[u8]) -> (u64, Vec<String>) {
    let (mut flags, mut unknown) = (InodeFlags::empty(), Vec::new());
    let names = String::from_utf8_lossy(names);
    for name in names.split([',', ' ']).filter(|name| !name.is_empty()) {
        match NAMES.iter().find(|(known, _)| *known == name) {
            Some((_, flag)) => flags |= *flag,
            None => unknown.push(name.to_owned()),
        }
    }
    (flags.bits(), unknown)
}

/// The names of flags that have one, as archives have them. Empty if there are none.
#[must_use]
pub fn flag_names(bits: u64) -> String {
    let mut left = InodeFlags::from_bits_truncate(bits);
    let mut names = Vec::new();
    for (name, flag) in NAMES {
        if !flag.is_empty() && left.contains(flag) {
            left -= flag;
            names.push(name);
        }
    }
    names.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_flags_become_each_other() {
        for names in ["", "sappnd", "schg,nodump", "compress", "nocow", "nosum", "sync,dirsync"] {
            assert_eq!(flag_names(from_names(names.as_bytes()).0), names);
        }
        assert_eq!(flag_names(from_names(b"nosum,nocow immutable").0), "schg,nocow");
        assert_eq!(from_names(b"arch,nodump,x").1, ["arch", "x"]);
    }
}
