//! `larder subvolume`: making, snapshotting, deleting and listing subvolumes, on a mount or in an
//! image.
//!
//! On a mount the daemon is asked ([`larder_fuse::subvolumes`]); an image is opened for the one
//! command, which for a deletion means that it also waits until the space is free.

mod diff;

use crate::failure::{Advise, usage};
use crate::image::Access;
use crate::mounted::mounted;
use crate::print;
use crate::subvolumes::{in_image, read_only, root_of};
use crate::target::{Place, Target};
use anyhow::Context;
use larder_format::ids::{Generation, ObjectId};
use larder_fs::{FileKind, InodeId, NewInode};
use larder_fuse::subvolumes as on_mount;
use serde_json::Value;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;

/// Make, snapshot, delete and list subvolumes of an image or a mount.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder subvolume create disk.img:/home
  larder subvolume snapshot -r mnt/home mnt/home-monday

Paths are IMAGE:PATH for an image that is not mounted, or paths on a mount.")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make empty subvolumes
    #[command(after_help = "Example:\n  larder subvolume create disk.img:/home disk.img:/srv")]
    Create {
        /// IMAGE:PATH, or a path on a mount
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<OsString>,
    },
    /// Delete subvolumes with everything in them
    #[command(after_help = "\
Example:
  larder subvolume delete mnt/home-monday

On a mount the space comes back in the background: `larder stats` says how many
are left. Subvolumes that have others in them, the default one and the mounted
one are not deleted.")]
    Delete {
        /// Make the deletion durable before going on (in an image it always is)
        #[arg(short = 'c', long)]
        commit: bool,
        /// IMAGE:PATH, or a path on a mount
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<OsString>,
    },
    /// List subvolumes
    #[command(after_help = "Example:\n  larder subvolume list --json disk.img")]
    List {
        /// Only read-only ones
        #[arg(short, long)]
        read_only: bool,
        /// Only snapshots
        #[arg(short, long)]
        snapshots: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Read the image even if it is in use
        #[arg(long)]
        force: bool,
        /// Image, or a path on a mount
        #[arg(value_name = "IMAGE|PATH")]
        target: OsString,
    },
    /// Show what is known of a subvolume
    #[command(after_help = "Example:\n  larder subvolume show mnt/home")]
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Read the image even if it is in use
        #[arg(long)]
        force: bool,
        /// IMAGE:PATH, or a path on a mount
        path: OsString,
    },
    /// Make a snapshot: a subvolume that begins as another is now
    #[command(after_help = "\
Example:
  larder subvolume snapshot -r mnt/home mnt/snapshots

It is durable when the command returns, and has what programs changed through
mappings that they still have. If TO is a directory, the snapshot is made in it
under the name of its source. Both are in the same image or on the same mount.")]
    Snapshot {
        /// Read-only
        #[arg(short, long)]
        read_only: bool,
        /// Subvolume: IMAGE:PATH, or a path on a mount
        from: OsString,
        /// The snapshot, or a directory for it
        to: OsString,
    },
    /// Show which subvolume is mounted where none is named
    #[command(after_help = "Example:\n  larder subvolume get-default disk.img")]
    GetDefault {
        /// Read the image even if it is in use
        #[arg(long)]
        force: bool,
        /// Image, or a path on a mount
        #[arg(value_name = "IMAGE|PATH")]
        target: OsString,
    },
    /// Choose which subvolume is mounted where none is named
    #[command(after_help = "\
Example:
  larder subvolume set-default disk.img:/system

5 is the id of the top-level subvolume, with which every image begins.")]
    SetDefault {
        /// Id of the subvolume, where PATH does not lead to it
        #[arg(long, value_name = "ID")]
        id: Option<u64>,
        /// The subvolume: IMAGE:PATH, or a path on a mount
        path: OsString,
    },
    /// List what was written to files of a subvolume since some transaction
    #[command(after_help = "\
Example:
  larder subvolume find-new mnt/home 1234

The last line has the number of the last transaction in the list: the next list
begins with that number plus one. Deletions do not show.")]
    FindNew {
        /// Print JSON, one line for each extent
        #[arg(long)]
        json: bool,
        /// Read the image even if it is in use
        #[arg(long)]
        force: bool,
        /// The subvolume: IMAGE:PATH, or a path on a mount
        path: OsString,
        /// The first transaction that is wanted (`larder subvolume list` shows it as gen)
        #[arg(value_name = "GENERATION")]
        since: u64,
    },
    /// List what differs between two read-only subvolumes
    #[command(after_help = "\
Example:
  larder subvolume diff disk.img:/home-monday disk.img:/home-tuesday

A: added, D: removed, R: renamed, M: changed, and what changed. What takes time
is what differs, not what there is. Times alone are no difference.")]
    Diff {
        /// Print JSON, one line for each difference
        #[arg(long)]
        json: bool,
        /// Print how many differences there are
        #[arg(long)]
        stat: bool,
        /// Read the image even if it is in use
        #[arg(long)]
        force: bool,
        /// The older subvolume: IMAGE:PATH
        old: OsString,
        /// The newer subvolume: IMAGE:PATH
        new: OsString,
    },
    /// Make a subvolume read-only, or writable again
    #[command(after_help = "\
Example:
  larder subvolume read-only mnt/home on

A subvolume that was received does not become writable without --forget, and
then is no longer known as received.")]
    ReadOnly {
        /// Forget where it was received from (images only)
        #[arg(long)]
        forget: bool,
        /// The subvolume: IMAGE:PATH, or a path on a mount
        path: OsString,
        /// Neither: show which
        #[arg(value_parser = ["on", "off"])]
        state: Option<String>,
    },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::Create { paths } => paths.iter().try_for_each(create),
        What::Delete { commit, paths } => paths.iter().try_for_each(|p| delete(p, *commit)),
        What::List { read_only, snapshots, json, force, target } => {
            let (all, _) = all(target, *force)?;
            let wanted = all.into_iter().filter(|s| {
                s["id"] != 5
                    && (!read_only || s["read_only"] == true)
                    && (!snapshots || !s["parent_uuid"].is_null())
            });
            list(wanted.collect(), *json)
        }
        What::Show { json, force, path } => show(path, *json, *force),
        What::Snapshot { read_only, from, to } => snapshot(from, to, *read_only),
        What::GetDefault { force, target } => {
            let (all, default) = all(target, *force)?;
            let found = all.iter().find(|s| s["id"] == default);
            let path = found.map_or("", |s| s["path"].as_str().unwrap_or_default());
            print::line(&format!("{default} {}", if default == 5 { "(top level)" } else { path }))
        }
        What::FindNew { json, force, path, since } => find_new(path, *since, *json, *force),
        What::Diff { json, stat, force, old, new } => {
            diff::diff(old, new, diff::How { json: *json, stat: *stat, force: *force })
        }
        What::SetDefault { id, path } => set_default(path, *id),
        What::ReadOnly { forget, path, state } => {
            let wanted = state.as_deref().map(|s| s == "on");
            match read_only(path, wanted, *forget)? {
                Some(on) => print::line(if on { "on" } else { "off" }),
                None => Ok(()),
            }
        }
    }
}

fn create(path: &OsString) -> anyhow::Result<()> {
    match Place::parse_existing(path)? {
        Place::Host(path) => mounted(&path, on_mount::create),
        Place::Image(t) => in_image(&t, Access::Write, |image| {
            let (dir, name) = image.parent(&t.path)?;
            let (uid, gid) =
                (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            let kind = FileKind::Directory;
            let new = NewInode { kind, perm: 0o755, uid, gid, rdev: 0, target: b"", xattrs: &[] };
            image.fs.create_subvolume(dir, name, &new).map(drop).with_context(|| t.display())
        }),
    }
}

fn delete(path: &OsString, commit: bool) -> anyhow::Result<()> {
    match Place::parse_existing(path)? {
        Place::Host(path) => {
            let done = mounted(&path, on_mount::delete);
            let kind = |e: &anyhow::Error| e.downcast_ref().map(std::io::Error::kind);
            match done {
                Err(e) if kind(&e) == Some(ErrorKind::DirectoryNotEmpty) => {
                    Err(e).hint("delete the subvolumes in it first")
                }
                Err(e) if kind(&e) == Some(ErrorKind::ResourceBusy) => {
                    Err(e).hint("it is being sent, or it is the root of a mount: end that first")
                }
                Err(e) => Err(e),
                Ok(()) if commit => {
                    let dir = path.parent().filter(|p| !p.as_os_str().is_empty());
                    mounted(dir.unwrap_or(Path::new(".")), larder_fuse::control::sync)
                }
                Ok(()) => Ok(()),
            }
        }
        Place::Image(t) => in_image(&t, Access::Write, |image| {
            root_of(image, &t.path)?;
            let (dir, name) = image.parent(&t.path)?;
            let gone = image.fs.delete_subvolume(dir, name);
            let hint = match &gone {
                Err(larder_fs::Error::NotEmpty) => Some("delete the subvolumes in it first"),
                Err(larder_fs::Error::NotPermitted(_)) => {
                    Some("make another one the default first: `larder subvolume set-default`")
                }
                _ => None,
            };
            let gone = gone.with_context(|| t.display());
            match hint {
                Some(hint) => gone.hint(hint)?,
                None => gone?,
            };
            image.fs.wait_for_drops().context("giving its space back")
        }),
    }
}

/// All subvolumes, and the default one.
fn all(target: &OsString, force: bool) -> anyhow::Result<(Vec<Value>, u64)> {
    let path = Path::new(target);
    if path.is_dir() || larder_fuse::mount::is_dead(path) {
        return mounted(path, on_mount::list);
    }
    of_image(&Target::parse(target), force)
}

fn of_image(target: &Target, force: bool) -> anyhow::Result<(Vec<Value>, u64)> {
    in_image(target, Access::Read { force }, |image| {
        let all = image.fs.subvolumes()?;
        let all = all.iter().map(|s| Ok(on_mount::describe(s, &image.fs.subvolume_path(s.id)?)));
        Ok((all.collect::<anyhow::Result<_>>()?, image.fs.default_subvolume()?.0))
    })
}

fn list(all: Vec<Value>, json: bool) -> anyhow::Result<()> {
    if json {
        return print::json(&all);
    }
    for s in all {
        let path = s["path"].as_str().unwrap_or_default();
        print::line(&format!(
            "ID {} gen {} top level {} path {}",
            s["id"],
            s["generation"],
            s["parent_id"],
            print::name(path.as_bytes())
        ))?;
    }
    Ok(())
}

fn show(path: &OsString, json: bool, force: bool) -> anyhow::Result<()> {
    let (all, id) = match Place::parse_existing(path)? {
        Place::Image(t) => {
            let id = in_image(&t, Access::Read { force }, |image| {
                Ok(root_of(image, &t.path)?.subvol.0)
            })?;
            (of_image(&t, force)?.0, id)
        }
        Place::Host(path) => {
            let id =
                mounted(&path, |p| on_mount::is_read_only(p).and_then(|_| on_mount::id_of(p)))?;
            (mounted(&path, on_mount::list)?.0, id)
        }
    };
    let found =
        all.iter().find(|s| s["id"] == id).context("the subvolume has just been deleted")?;
    if json {
        return print::json(found);
    }
    let text = |v: &Value| match v {
        Value::Null => "-".to_owned(),
        Value::String(s) => print::name(s.as_bytes()),
        other => other.to_string(),
    };
    let time = |v: &Value| v.as_i64().map_or_else(|| "-".to_owned(), print::time);
    let snapshots =
        all.iter().filter(|s| !s["parent_uuid"].is_null() && s["parent_uuid"] == found["uuid"]);
    let snapshots: Vec<String> = snapshots.map(|s| text(&s["path"])).collect();
    for (name, value) in [
        ("Path", if id == 5 { "(top level)".to_owned() } else { text(&found["path"]) }),
        ("Subvolume ID", id.to_string()),
        ("Parent ID", text(&found["parent_id"])),
        ("UUID", text(&found["uuid"])),
        ("Parent UUID", text(&found["parent_uuid"])),
        ("Received UUID", text(&found["received_uuid"])),
        ("Created", time(&found["created"])),
        ("Generation", text(&found["generation"])),
        ("Gen at creation", text(&found["created_in"])),
        ("Flags", if found["read_only"] == true { "readonly".to_owned() } else { "-".to_owned() }),
        ("Snapshots", if snapshots.is_empty() { "-".to_owned() } else { snapshots.join(", ") }),
    ] {
        print::line(&format!("{name:<16} {value}"))?;
    }
    Ok(())
}

fn snapshot(from: &OsString, to: &OsString, read_only: bool) -> anyhow::Result<()> {
    match (Place::parse_existing(from)?, Place::parse_existing(to)?) {
        (Place::Host(from), Place::Host(to)) => {
            // Otherwise it would look as if the snapshot's place were missing.
            from.metadata().with_context(|| from.display().to_string()).could_not_run()?;
            let to = if to.is_dir() {
                let name = from.canonicalize().with_context(|| from.display().to_string())?;
                to.join(name.file_name().context("what is it to be called?").could_not_run()?)
            } else {
                to
            };
            mounted(&to, |to| on_mount::snapshot(&from, to, read_only))
        }
        (Place::Image(from), Place::Image(to)) if from.image == to.image => {
            in_image(&from, Access::Write, |image| {
                let source = root_of(image, &from.path)?;
                let into = image.lookup(&to.path, true).filter(|a| a.kind == FileKind::Directory);
                let own = image.parent(&from.path);
                let (dir, name) = match (&into, &own) {
                    (Some(dir), Ok((_, name))) => (dir.id, *name),
                    (Some(_), Err(_)) => return usage("the snapshot needs a name"),
                    (None, _) => image.parent(&to.path)?,
                };
                let made = image.fs.snapshot(source.subvol, dir, name, read_only);
                made.map(drop).with_context(|| to.display())
            })
        }
        _ => usage("a snapshot has to be in the same image, or on the same mount, as its source"),
    }
}

fn find_new(path: &OsString, since: u64, json: bool, force: bool) -> anyhow::Result<()> {
    let mut failed = Ok(());
    let mut show = |e: &Value| {
        if failed.is_err() {
            return;
        }
        let address = e["address"].as_u64().map_or_else(|| "-".to_owned(), |at| at.to_string());
        let flags: Vec<&str> =
            ["inline", "reserved", "compressed"].into_iter().filter(|f| e[f] == true).collect();
        let path = e["path"].as_str().map_or_else(|| "?".to_owned(), |p| print::name(p.as_bytes()));
        failed = print::line(&if json {
            e.to_string()
        } else {
            format!(
                "inode {} offset {} len {} address {address} extent offset {} gen {} flags {} \
                    {path}",
                e["inode"],
                e["offset"],
                e["length"],
                e["extent_offset"],
                e["generation"],
                if flags.is_empty() { "-".to_owned() } else { flags.join(",") }
            )
        });
    };
    let upto = match Place::parse_existing(path)? {
        Place::Host(path) => mounted(&path, |p| {
            on_mount::is_read_only(p)?;
            on_mount::find_new(p, since, &mut show)
        })?,
        Place::Image(t) => in_image(&t, Access::Read { force }, |image| {
            let subvol = root_of(image, &t.path)?.subvol;
            let first = InodeId { subvol, ino: 0 }.at(0);
            image.fs.find_new(first, Generation(since), &mut |e| {
                let path = image.fs.path_of(InodeId { subvol, ino: e.ino }).ok();
                show(&on_mount::describe_new(e, path.as_deref()));
                true
            })?;
            Ok(image.fs.info().generation.0)
        })?,
    };
    failed?;
    if json { Ok(()) } else { print::line(&format!("up to gen {upto}")) }
}

fn set_default(path: &OsString, id: Option<u64>) -> anyhow::Result<()> {
    let place = match Place::parse_existing(path)? {
        // An image as a whole, which has no path in it that could be meant.
        Place::Host(p) if id.is_some() && p.is_file() => Place::Image(Target::parse(path)),
        place => place,
    };
    match place {
        Place::Image(t) => in_image(&t, Access::Write, |image| {
            let id = match id {
                Some(id) => ObjectId(id),
                None => root_of(image, &t.path)?.subvol,
            };
            image.fs.set_default_subvolume(id).with_context(|| format!("subvolume {id}"))
        }),
        Place::Host(path) => {
            let id = match id {
                Some(id) => id,
                None => {
                    mounted(&path, |p| on_mount::is_read_only(p).and_then(|_| on_mount::id_of(p)))?
                }
            };
            mounted(&path, |p| on_mount::set_default(p, id))
        }
    }
}
