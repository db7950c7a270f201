//! `btrfs property`: read-only for subvolumes, the label for what is mounted, compression for files
//! and directories.

use super::filesystem::{label_of, set_label};
use super::{Done, Failed, mounted, reason};
use crate::{mount_table, print};
use larder_fuse::subvolumes;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Show one property, or all
    Get {
        /// inode, subvol, filesystem or device
        #[arg(short = 't', value_name = "TYPE")]
        kind: Option<String>,
        object: PathBuf,
        name: Option<String>,
    },
    /// Change a property
    Set {
        /// Also a received subvolume (not supported on a mount)
        #[arg(short = 'f')]
        force: bool,
        /// inode, subvol, filesystem or device
        #[arg(short = 't', value_name = "TYPE")]
        kind: Option<String>,
        object: PathBuf,
        name: String,
        value: OsString,
    },
    /// List the properties that there are
    List {
        /// inode, subvol, filesystem or device
        #[arg(short = 't', value_name = "TYPE")]
        kind: Option<String>,
        object: PathBuf,
    },
}

/// A property: its name, the kind of object that has it, and what it is.
struct Property {
    name: &'static str,
    kind: Kind,
    about: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Inode,
    Subvolume,
    FileSystem,
    Device,
}

const RO: &str = "ro";
const LABEL: &str = "label";
const COMPRESSION: &str = "compression";

const ALL: [Property; 4] = [
    Property { name: RO, kind: Kind::Subvolume, about: "read-only status of a subvolume" },
    Property { name: LABEL, kind: Kind::FileSystem, about: "label of the filesystem" },
    Property { name: LABEL, kind: Kind::Device, about: "label of the device" },
    Property {
        name: COMPRESSION,
        kind: Kind::Inode,
        about: "compression algorithm for the file or directory",
    },
];

pub(super) fn run(what: What) -> Done {
    match what {
        What::Get { kind, object, name: None } => {
            properties(&object, kind.as_deref())?.iter().try_for_each(|p| get(&object, p.name))
        }
        What::Get { kind, object, name: Some(name) } => {
            get(&object, find(&object, kind.as_deref(), &name)?)
        }
        What::Set { kind, object, name, value, .. } => {
            set(&object, find(&object, kind.as_deref(), &name)?, &value)
        }
        What::List { kind, object } => properties(&object, kind.as_deref())?
            .iter()
            .try_for_each(|p| Ok(print::line(&format!("{:<20}{}", p.name, p.about))?)),
    }
}

/// The properties of an object.
fn properties(object: &Path, kind: Option<&str>) -> Result<Vec<&'static Property>, Failed> {
    let mut kinds = kinds_of(object)?;
    if let Some(text) = kind {
        let names = [
            ("inode", Kind::Inode),
            ("subvol", Kind::Subvolume),
            ("filesystem", Kind::FileSystem),
            ("device", Kind::Device),
        ];
        let found = names.iter().find(|(name, _)| !text.is_empty() && name.starts_with(text));
        let (_, wanted) = found.ok_or_else(|| Failed::because("invalid object type"))?;
        kinds.retain(|kind| kind == wanted);
        if kinds.is_empty() {
            return Err(Failed::because(format!("type of {} is not {text}", object.display())));
        }
    }
    Ok(ALL.iter().filter(|p| kinds.contains(&p.kind)).collect())
}

fn find(object: &Path, kind: Option<&str>, name: &str) -> Result<&'static str, Failed> {
    if !ALL.iter().any(|p| p.name == name) {
        return Err(Failed::because(format!("unknown property: {name}")));
    }
    let found = properties(object, kind)?.into_iter().find(|p| p.name == name);
    let shown = object.display();
    let other =
        || Failed::because(format!("object is not compatible with property {name}: {shown}"));
    found.map(|p| p.name).ok_or_else(other)
}

fn kinds_of(object: &Path) -> Result<Vec<Kind>, Failed> {
    if let Err(e) = object.symlink_metadata() {
        return Err(Failed::because(format!("failed to detect object type: {}", reason(&e))));
    }
    if let Err(refused) = mounted::must_be_larder(object) {
        // A file elsewhere may be an image.
        return if object.is_dir() { Err(refused) } else { Ok(vec![Kind::Device]) };
    }
    let mut kinds = vec![Kind::Inode];
    if subvolumes::is_read_only(object).is_ok() {
        kinds.push(Kind::Subvolume);
    }
    if mount_table::on(object)?.is_some() {
        kinds.push(Kind::FileSystem);
    }
    Ok(kinds)
}

fn get(object: &Path, name: &str) -> Done {
    let value = match name {
        RO => {
            let on = subvolumes::is_read_only(object)
                .map_err(|e| Failed::because(format!("failed to get flags: {}", reason(&e))))?;
            Some(on.to_string().into_bytes())
        }
        LABEL => Some(label_of(object)?),
        _ => compression(object)?,
    };
    // Nothing is set: nothing to print, and no mistake.
    match value {
        Some(value) => Ok(print::line(&format!("{name}={}", print::name(&value)))?),
        None => Ok(()),
    }
}

const ATTRIBUTE: &str = "btrfs.compression";

fn compression(object: &Path) -> Result<Option<Vec<u8>>, Failed> {
    let mut value = vec![0; 256];
    match rustix::fs::getxattr(object, ATTRIBUTE, &mut value[..]) {
        Ok(len) => {
            value.truncate(len);
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(e) => Err(failed_for(COMPRESSION, "get", object, e)),
    }
}

fn failed_for(name: &str, what: &str, object: &Path, error: Errno) -> Failed {
    let why = reason(&error.into());
    Failed::because(format!("failed to {what} {name} for {}: {why}", object.display()))
}

fn set(object: &Path, name: &str, value: &OsString) -> Done {
    match name {
        RO => {
            let read_only = match value.to_str() {
                Some("true") => true,
                Some("false") => false,
                _ => {
                    let shown = value.display();
                    return Err(Failed::because(format!("invalid value for property: {shown}")));
                }
            };
            subvolumes::set_read_only(object, read_only)
                .map_err(|e| Failed::because(format!("failed to set flags: {}", reason(&e))))
        }
        LABEL => set_label(object, value.as_bytes()),
        _ => rustix::fs::setxattr(object, ATTRIBUTE, value.as_bytes(), XattrFlags::empty())
            .map_err(|e| failed_for(COMPRESSION, "set", object, e)),
    }
}
