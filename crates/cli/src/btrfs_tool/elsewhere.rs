//! What Larder does not do under the name `btrfs`, and where it is done instead.

use super::{Done, Failed};
use std::ffi::OsString;

/// Commands of btrfs-progs, and what to do. One that Larder learns leaves this list.
const INSTEAD: [(&str, &str); 22] = [
    ("device replace", "see `btrfs replace`, or `larder device replace`"),
    ("device scan", "Larder needs no scan: give the image to `larder mount`"),
    ("device ready", "Larder needs no scan: give the image to `larder mount`"),
    ("filesystem defragment", "see `larder map` for what is fragmented; copying a file mends it"),
    ("filesystem mkswapfile", "the kernel does not swap to a file on FUSE"),
    ("inspect-internal map-swapfile", "the kernel does not swap to a file on FUSE"),
    ("inspect-internal min-dev-size", "see `larder resize --how-small DIR`"),
    ("inspect-internal tree-stats", "see `larder inspect tree` and `larder map`"),
    ("inspect-internal list-chunks", "see `larder inspect chunks IMAGE`"),
    ("qgroup", NO_QUOTAS),
    ("quota", NO_QUOTAS),
    ("rescue chunk-recover", RESTORE),
    ("rescue super-recover", RESTORE),
    ("rescue fix-device-size", RESTORE),
    ("rescue create-control-device", "Larder needs no control device"),
    ("rescue clear-ino-cache", RESTORE),
    ("rescue clear-space-cache", "Larder does this itself when it mounts the image"),
    ("rescue clear-uuid-tree", RESTORE),
    ("restore", "see `larder restore`"),
    ("check --repair", "Larder repairs nothing in place: see `larder restore`"),
    ("check", "see `larder check --help` for what it does, and `larder restore`"),
    ("subvolume list -d", "`larder stats` says how many subvolumes are being deleted"),
];

const NO_QUOTAS: &str = "Larder has no quota groups";
const RESTORE: &str = "see `larder check` for what is wrong, and `larder restore`";

/// Arguments of a command that is refused whatever they are.
#[derive(Debug, clap::Args)]
pub(crate) struct Anything {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _rest: Vec<OsString>,
}

/// Fails with the name of what does it instead.
pub(super) fn refuse(command: &str) -> Done {
    let found = INSTEAD.iter().find(|(name, _)| *name == command);
    let instead = found.map_or("see `larder --help`", |(_, instead)| instead);
    Err(Failed::because(format!("`btrfs {command}` is not supported by Larder")).and(instead))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_is_named_and_what_there_is_instead() {
        for (command, instead) in INSTEAD {
            let lines = refuse(command).unwrap_err().lines;
            assert!(lines[0].contains(command) && lines[1] == instead);
        }
    }

    /// Each module refuses by a name of the list.
    #[test]
    fn the_list_has_what_is_refused() {
        for module in [
            include_str!("mod.rs"),
            include_str!("check.rs"),
            include_str!("device.rs"),
            include_str!("filesystem.rs"),
            include_str!("inspect.rs"),
            include_str!("status.rs"),
            include_str!("subvolume.rs"),
            include_str!("subvolume_list.rs"),
        ] {
            for call in module.split("elsewhere::refuse(\"").skip(1) {
                let (command, _) = call.split_once('"').unwrap();
                assert!(INSTEAD.iter().any(|(name, _)| *name == command), "{command}");
            }
        }
    }
}
