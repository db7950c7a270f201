//! `btrfs filesystem`: space, the label, sync, and what is mounted or lies in an image.

use super::elsewhere::Anything;
use super::mounted::{Mounted, all, must_be_larder};
use super::units::{LongUnits, Units};
use super::{Done, Failed, Global, du, each, elsewhere, must_be_directory, reason, usage};
use crate::device_orders::{Order, Place};
use crate::image::{Access, Image};
use crate::on_mount::devices::change_devices;
use crate::{mount_table, print, size};
use larder_fs::SpaceUsage;
use larder_fuse::control;
use serde_json::json;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Show the space of each kind
    Df(Df),
    /// Show how much files and directories take, alone and shared with others
    Du(du::Options),
    /// Show what is mounted, or lies in an image
    Show(Show),
    /// Make everything durable
    Sync { path: PathBuf },
    /// Show or change the label
    Label {
        /// Directory of a mount, or an image
        target: PathBuf,
        new: Option<OsString>,
    },
    /// Show the space in detail
    Usage(Usage),
    /// See `larder map`
    Defragment(Anything),
    /// Make a device larger or smaller
    Resize(Resize),
    /// Not supported
    Mkswapfile(Anything),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Df {
    #[command(flatten)]
    units: Units,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Resize {
    /// Accepted
    #[arg(long)]
    enqueue: bool,
    /// [DEVID:][+|-]SIZE or [DEVID:]max
    #[arg(allow_hyphen_values = true)]
    size: String,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Usage {
    #[command(flatten)]
    units: Units,
    /// Print a table
    #[arg(short = 'T')]
    table: bool,
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Show {
    /// Accepted
    #[arg(short = 'd', long)]
    all_devices: bool,
    /// Only what is mounted
    #[arg(short = 'm', long)]
    mounted: bool,
    #[command(flatten)]
    units: LongUnits,
    /// Directory of a mount, image, label or UUID
    which: Option<OsString>,
}

pub(super) fn run(what: What, global: Global) -> Done {
    match what {
        What::Df(options) => df(&options, global),
        What::Du(options) => du::run(options),
        What::Show(options) => show(options),
        What::Sync { path } => sync(&path),
        What::Label { target, new } => label(&target, new),
        What::Usage(options) => each(&options.paths, |path| {
            must_be_directory(path)?;
            usage::file_system(&Mounted::at(path)?, options.units, options.table)
        }),
        What::Defragment(_) => elsewhere::refuse("filesystem defragment"),
        What::Resize(options) => resize(&options),
        What::Mkswapfile(_) => elsewhere::refuse("filesystem mkswapfile"),
    }
}

fn df(options: &Df, global: Global) -> Done {
    let mounted = Mounted::at(&options.path)?;
    let mut lines: Vec<(&str, String, u64, u64)> =
        mounted.spaces().into_iter().map(|s| (s.name, s.profile, s.total, s.used)).collect();
    // Linux names the system chunks before those of metadata.
    let system = lines.pop().into_iter();
    let at = usize::from(lines.len() > 1);
    lines.splice(at..at, system);
    lines.push(("GlobalReserve", "single".to_owned(), mounted.reserve(), 0));
    if global.json {
        let lines = lines.iter().map(|(kind, profile, total, used)| {
            json!({ "bg-type": kind, "bg-profile": profile, "total": total, "used": used })
        });
        return Ok(print::json(&json!({
            "__header": { "version": "1" },
            "filesystem-df": lines.collect::<Vec<_>>(),
        }))?);
    }
    for (kind, profile, total, used) in lines {
        let (total, used) = (options.units.text(total), options.units.text(used));
        print::line(&format!("{kind}, {profile}: total={total}, used={used}"))?;
    }
    Ok(())
}

fn sync(path: &Path) -> Done {
    if let Err(e) = path.metadata() {
        return Err(Failed::because(format!("Could not open: {}", reason(&e))));
    }
    must_be_larder(path)?;
    control::sync(path)
        .map_err(|e| Failed::because(format!("Could not sync filesystem: {}", reason(&e))))
}

fn resize(options: &Resize) -> Done {
    must_be_directory(&options.path)?;
    let place: Place = options.size.parse().map_err(|why: String| Failed::because(why))?;
    let summary = change_devices(&options.path, Order::Resize(place), None)?;
    let name = summary.name.as_deref().map_or_else(String::new, print::harmless);
    let (before, now) = (size::human(summary.before), size::human(summary.size));
    Ok(print::line(&format!(
        "Resize device id {} ({name}) from {before} to {now}",
        summary.device
    ))?)
}

/// What is said of one file system.
struct Seen {
    label: String,
    fsid: String,
    used: u64,
    size: u64,
    allocated: u64,
    path: String,
}

impl Seen {
    fn mounted(path: &Path) -> Result<Self, Failed> {
        let m = Mounted::at(path)?;
        Ok(Self {
            label: m.label().to_owned(),
            fsid: m.fsid().to_owned(),
            used: m.bytes_used(),
            size: m.size(),
            allocated: m.allocated(),
            path: m.source,
        })
    }

    fn image(path: &Path) -> Result<Self, Failed> {
        let image = Image::open(path, Access::Read { force: false }, None)?;
        let (info, space) = (image.fs.info(), image.fs.space_usage());
        image.close()?;
        let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Ok(Self {
            label: String::from_utf8_lossy(&info.label).into_owned(),
            fsid: print::uuid(info.fsid),
            used: info.bytes_used,
            size: info.total_bytes,
            allocated: allocated(&space),
            path: whole.to_string_lossy().into_owned(),
        })
    }

    fn print(&self, units: Units) -> Done {
        let label = match self.label.as_str() {
            "" => "none".to_owned(),
            label => format!("'{}'", print::name(label.as_bytes())),
        };
        Ok(print::line(&format!(
            "Label: {label}  uuid: {}\n\tTotal devices 1 FS bytes used {}\n\tdevid    1 size {} \
             used {} path {}",
            self.fsid,
            units.text(self.used),
            units.text(self.size),
            units.text(self.allocated),
            print::harmless(&self.path)
        ))?)
    }
}

/// Bytes of the device that chunks take, with all their copies.
fn allocated(space: &SpaceUsage) -> u64 {
    let kinds = [&space.data, &space.metadata, &space.system].into_iter();
    // Mixed chunks are in both sums, of data and of metadata.
    kinds.skip(usize::from(space.mixed)).map(|kind| kind.total * kind.copies).sum()
}

fn show(options: Show) -> Done {
    let units = options.units.into();
    let Some(which) = options.which else {
        return all()?.iter().try_for_each(|point| Seen::mounted(point)?.print(units));
    };
    let path = Path::new(&which);
    if path.is_dir() {
        return Seen::mounted(path)?.print(units);
    }
    if path.exists() && !options.mounted {
        // The daemon knows more of an image that is mounted.
        let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut table = mount_table::all()?.into_iter();
        return match table.find(|m| m.is_larder() && Path::new(&m.source) == whole) {
            Some(mount) => Seen::mounted(&mount.point)?.print(units),
            None => Seen::image(path)?.print(units),
        };
    }
    for point in all()? {
        let seen = Seen::mounted(&point)?;
        if which.to_str().is_some_and(|name| name == seen.label || name == seen.fsid) {
            return seen.print(units);
        }
    }
    Err(Failed::because(format!("not a valid btrfs filesystem: {}", which.display())))
}

/// Exit code of a label that cannot be read or set.
const NO_LABEL: u8 = 255;

fn label(target: &Path, new: Option<OsString>) -> Done {
    if let Err(e) = target.metadata() {
        let why = format!("unable to access {}: {}", target.display(), reason(&e));
        return Err(Failed::because(why).with_code(NO_LABEL));
    }
    match new {
        Some(new) => set_label(target, new.as_bytes()).map_err(|e| e.with_code(NO_LABEL)),
        None => {
            let label = label_of(target).map_err(|e| e.with_code(NO_LABEL))?;
            Ok(print::line(&print::name(&label))?)
        }
    }
}

/// The label of what is mounted on a directory, or of an image.
pub(super) fn label_of(target: &Path) -> Result<Vec<u8>, Failed> {
    if target.is_dir() {
        must_be_larder(target)?;
        return control::label(target).map_err(|e| Failed::because(reason(&e)));
    }
    let image = Image::open(target, Access::Read { force: false }, None)?;
    let label = image.fs.info().label;
    image.close()?;
    Ok(label)
}

pub(super) fn set_label(target: &Path, new: &[u8]) -> Done {
    if new.len() > 255 || new.iter().any(|b| matches!(b, 0 | b'\n')) {
        return Err(Failed::because("a label has up to 255 bytes, without line breaks"));
    }
    if target.is_dir() {
        must_be_larder(target)?;
        return control::set_label(target, new)
            .map_err(|e| Failed::because(format!("unable to set label: {}", reason(&e))));
    }
    let image = Image::open(target, Access::Write, None)?;
    let set = image.fs.set_label(new).map_err(anyhow::Error::from);
    let closed = image.close();
    set.and(closed)?;
    Ok(())
}
