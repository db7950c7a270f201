//! `btrfs subvolume`: everything but the list.

use super::mounted::{id_of, must_be_larder, must_be_subvolume, subvolumes_of};
use super::units::Units;
use super::{Done, Failed, Global, each, elsewhere, reason, subvolume_list};
use crate::print;
use larder_fuse::{control, subvolumes};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Make empty subvolumes
    Create(Create),
    /// Delete subvolumes with everything in them
    Delete(Delete),
    /// List subvolumes
    List(subvolume_list::Options),
    /// Make a snapshot of a subvolume
    Snapshot(Snapshot),
    /// Show the default subvolume
    GetDefault { path: PathBuf },
    /// Choose the default subvolume: PATH, or ID PATH
    SetDefault {
        #[arg(required = true, num_args = 1..=2, value_name = "[ID] PATH")]
        words: Vec<PathBuf>,
    },
    /// List what was written to files since a transaction
    FindNew {
        path: PathBuf,
        #[arg(value_name = "LASTGEN")]
        since: u64,
    },
    /// Show what is known of a subvolume
    Show(Show),
    /// Wait until deleted subvolumes have given their space back
    Sync(Sync),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// Quota group (not supported)
    #[arg(short = 'i', value_name = "QGROUP")]
    qgroups: Vec<String>,
    /// Make missing directories above it, too
    #[arg(short, long)]
    parents: bool,
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Delete {
    /// Make the deletions durable at the end
    #[arg(short = 'c', long)]
    commit_after: bool,
    /// Make each deletion durable
    #[arg(short = 'C', long)]
    commit_each: bool,
    /// Id of the subvolume; PATH is on the same file system
    #[arg(short = 'i', long, value_name = "ID")]
    subvolid: Option<u64>,
    /// Delete subvolumes in it first
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Accepted
    #[arg(short, long)]
    verbose: bool,
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Snapshot {
    /// Read-only
    #[arg(short)]
    read_only: bool,
    /// Quota group (not supported)
    #[arg(short = 'i', value_name = "QGROUP")]
    qgroups: Vec<String>,
    source: PathBuf,
    /// The snapshot, or a directory for it
    target: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Show {
    /// Id of the subvolume
    #[arg(short = 'r', long = "rootid", value_name = "ID")]
    id: Option<u64>,
    /// UUID of the subvolume
    #[arg(short = 'u', long, value_name = "UUID")]
    uuid: Option<String>,
    #[command(flatten)]
    _units: Units,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Sync {
    /// Seconds between two looks
    #[arg(short, value_name = "SECONDS", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    path: PathBuf,
    #[arg(value_name = "ID")]
    ids: Vec<u64>,
}

pub(super) fn run(what: What, global: Global) -> Done {
    match what {
        What::Create(options) => {
            no_quotas(&options.qgroups)?;
            each(&options.paths, |path| create(path, options.parents, global))
        }
        What::Delete(options) => delete(&options, global),
        What::List(options) => subvolume_list::run(&options),
        What::Snapshot(options) => snapshot(&options, global),
        What::GetDefault { path } => get_default(&path),
        What::SetDefault { words } => set_default(&words),
        What::FindNew { path, since } => find_new(&path, since),
        What::Show(options) => show(&options),
        What::Sync(options) => sync(&options),
    }
}

fn no_quotas(qgroups: &[String]) -> Done {
    if qgroups.is_empty() { Ok(()) } else { elsewhere::refuse("qgroup") }
}

/// The directory that a path lies in.
fn above(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `DIR/NAME`, with the directory also where it is not written.
fn with_directory(path: &Path) -> PathBuf {
    path.file_name().map_or_else(|| path.to_owned(), |name| above(path).join(name))
}

fn create(path: &Path, parents: bool, global: Global) -> Done {
    let dir = above(path);
    if parents {
        std::fs::create_dir_all(dir).map_err(|e| {
            Failed::because(format!("failed to create '{}': {}", dir.display(), reason(&e)))
        })?;
    }
    if let Err(e) = dir.metadata() {
        return Err(Failed::because(format!("Could not open: {}", reason(&e))));
    }
    must_be_larder(dir)?;
    subvolumes::create(path).map_err(|e| could_not("create subvolume", &e))?;
    say(global, &format!("Create subvolume '{}'", with_directory(path).display()))
}

fn could_not(what: &str, error: &std::io::Error) -> Failed {
    Failed::because(format!("Could not {what}: {}", reason(error)))
}

fn say(global: Global, text: &str) -> Done {
    if global.quiet { Ok(()) } else { Ok(print::line(&print::harmless(text))?) }
}

fn delete(options: &Delete, global: Global) -> Done {
    if let Some(id) = options.subvolid {
        let [path] = &options.paths[..] else {
            return Err(Failed::because("exactly one path is expected with --subvolid"));
        };
        return delete_by_id(options, id, path, global);
    }
    // btrfs-progs mentions the commit at the end in the line of the last one.
    let last = options.paths.last();
    let done = each(&options.paths, |path| {
        let durable = options.commit_each || options.commit_after && Some(path) == last;
        delete_at(options, path, durable, global)
    });
    // Whatever was deleted becomes durable, also where another was not.
    if options.commit_after && !global.dry_run {
        let mut dirs: Vec<&Path> = options.paths.iter().map(|path| above(path)).collect();
        dirs.dedup();
        dirs.into_iter().filter(|dir| dir.is_dir()).try_for_each(make_durable)?;
    }
    done
}

fn make_durable(path: &Path) -> Done {
    control::sync(path).map_err(|e| could_not("sync filesystem", &e))
}

fn delete_at(options: &Delete, path: &Path, durable: bool, global: Global) -> Done {
    must_be_subvolume(path)?;
    let whole = path.canonicalize().map_err(|e| could_not("open", &e))?;
    let id = id_of(&whole)?;
    if options.recursive {
        for (id, below) in nested(&whole, id)? {
            delete_one(options, id, &whole.join(below), options.commit_each, global)?;
        }
    }
    delete_one(options, id, &whole, durable, global)
}

/// Subvolumes in another one, the deepest first, with their paths in it.
fn nested(path: &Path, id: u64) -> Result<Vec<(u64, PathBuf)>, Failed> {
    let (all, _) = subvolumes_of(path)?;
    let of = |id: u64| all.iter().find(|s| s["id"] == id).and_then(|s| s["path"].as_str());
    let top = Path::new(of(id).unwrap_or_default());
    let mut found = Vec::new();
    let mut ahead = vec![id];
    while let Some(at) = ahead.pop() {
        let path = Path::new(of(at).unwrap_or_default());
        found.push((at, path.strip_prefix(top).unwrap_or(path).to_owned()));
        ahead.extend(all.iter().filter(|s| s["parent_id"] == at).filter_map(|s| s["id"].as_u64()));
    }
    // What is found first is the subvolume itself.
    found.remove(0);
    found.reverse();
    Ok(found)
}

fn delete_one(options: &Delete, id: u64, path: &Path, durable: bool, global: Global) -> Done {
    announce(id, durable, &format!("'{}'", path.display()), global)?;
    if global.dry_run {
        return Ok(());
    }
    subvolumes::delete(path).map_err(|e| could_not("destroy subvolume/snapshot", &e))?;
    if options.commit_each { make_durable(above(path)) } else { Ok(()) }
}

fn announce(id: u64, durable: bool, what: &str, global: Global) -> Done {
    let when = if durable { "commit" } else { "no-commit" };
    say(global, &format!("Delete subvolume {id} ({when}): {what}"))
}

fn delete_by_id(options: &Delete, id: u64, path: &Path, global: Global) -> Done {
    must_be_larder(path)?;
    let (all, _) = subvolumes_of(path)?;
    let found = all.iter().find(|s| s["id"] == id).and_then(|s| s["path"].as_str());
    let what = match found {
        Some(inside) => format!("'{}'", path.join(inside).display()),
        None => format!("subvolid={id}"),
    };
    let durable = options.commit_after || options.commit_each;
    announce(id, durable, &what, global)?;
    if global.dry_run {
        return Ok(());
    }
    subvolumes::delete_by_id(path, id).map_err(|e| could_not("destroy subvolume/snapshot", &e))?;
    if durable { make_durable(path) } else { Ok(()) }
}

fn snapshot(options: &Snapshot, global: Global) -> Done {
    no_quotas(&options.qgroups)?;
    let (source, target) = (&options.source, &options.target);
    must_be_subvolume(source)?;
    let path = if target.is_dir() {
        let whole = source.canonicalize().map_err(|e| could_not("open", &e))?;
        let name = whole.file_name();
        target.join(name.ok_or_else(|| Failed::because("the snapshot needs a name"))?)
    } else {
        with_directory(target)
    };
    if let Err(e) = above(&path).metadata() {
        return Err(could_not("open", &e));
    }
    subvolumes::snapshot(source, &path, options.read_only)
        .map_err(|e| could_not("create subvolume", &e))?;
    let kind = if options.read_only { "readonly snapshot" } else { "snapshot" };
    say(global, &format!("Create {kind} of '{}' in '{}'", source.display(), path.display()))
}

fn get_default(path: &Path) -> Done {
    must_be_larder(path)?;
    let (all, default) = subvolumes_of(path)?;
    if default == 5 {
        return Ok(print::line("ID 5 (FS_TREE)")?);
    }
    let found = all.iter().find(|s| s["id"] == default).unwrap_or(&Value::Null);
    Ok(print::line(&format!(
        "ID {default} gen {} top level {} path {}",
        found["generation"],
        found["parent_id"],
        print::name(found["path"].as_str().unwrap_or_default().as_bytes())
    ))?)
}

fn set_default(words: &[PathBuf]) -> Done {
    let (id, path) = match words {
        [path] => {
            must_be_subvolume(path)?;
            (id_of(path)?, path)
        }
        [id, path] => {
            must_be_larder(path)?;
            let number = id.to_str().and_then(|text| text.parse().ok());
            let bad = || Failed::because(format!("{} is not the id of a subvolume", id.display()));
            (number.ok_or_else(bad)?, path)
        }
        _ => return Err(Failed::because("one or two arguments are expected")),
    };
    subvolumes::set_default(path, id).map_err(|e| could_not("set default subvolume", &e))
}

fn find_new(path: &Path, since: u64) -> Done {
    must_be_subvolume(path)?;
    let mut printed = Ok(());
    let upto = subvolumes::find_new(path, since, &mut |extent| {
        if printed.is_ok() {
            printed = print::line(&new_extent(extent));
        }
    })
    .map_err(|e| could_not("search for new extents", &e))?;
    printed?;
    Ok(print::line(&format!("transid marker was {upto}"))?)
}

fn new_extent(e: &Value) -> String {
    let flags = [("compressed", "COMPRESS"), ("reserved", "PREALLOC"), ("inline", "INLINE")];
    let flags: Vec<&str> =
        flags.iter().filter(|(key, _)| e[*key] == true).map(|(_, flag)| *flag).collect();
    format!(
        "inode {} file offset {} len {} disk start {} offset {} gen {} flags {} {}",
        e["inode"],
        e["offset"],
        e["length"],
        e["address"].as_u64().unwrap_or_default(),
        e["extent_offset"],
        e["generation"],
        if flags.is_empty() { "NONE".to_owned() } else { flags.join("|") },
        print::name(e["path"].as_str().unwrap_or_default().as_bytes())
    )
}

fn show(options: &Show) -> Done {
    let path = &options.path;
    if let Err(e) = path.metadata() {
        let shown = path.display();
        return Err(Failed::because(format!(
            "cannot find real path for '{shown}': {}",
            reason(&e)
        )));
    }
    let named = options.id.is_some() || options.uuid.is_some();
    if named {
        must_be_larder(path)?
    } else {
        must_be_subvolume(path)?
    }
    let (all, _) = subvolumes_of(path)?;
    let own = id_of(path)?;
    let found = all.iter().find(|s| match (options.id, &options.uuid) {
        (Some(id), _) => s["id"] == id,
        (None, Some(uuid)) => s["uuid"].as_str() == Some(uuid),
        (None, None) => s["id"] == own,
    });
    let found = found.ok_or_else(|| Failed::because("Could not find subvolume"))?;
    Ok(print::line(&facts(found, &all))?)
}

/// What is known of a subvolume.
fn facts(s: &Value, all: &[Value]) -> String {
    let text = |key: &str| s[key].as_str().unwrap_or("-").to_owned();
    let number = |key: &str| s[key].as_u64().unwrap_or_default();
    let time = |key: &str| match s[key].as_i64() {
        Some(seconds) => format!("{} +0000", print::time(seconds)),
        None => "-".to_owned(),
    };
    let top = number("id") == 5;
    let path = print::name(text("path").as_bytes());
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    let flags = if s["read_only"] == true { "readonly" } else { "-" };
    let mut lines = vec![if top { "/".to_owned() } else { path.clone() }];
    for (key, value) in [
        ("Name: \t\t\t", if top { "<FS_TREE>".to_owned() } else { name }),
        ("UUID: \t\t\t", text("uuid")),
        ("Parent UUID: \t\t", text("parent_uuid")),
        ("Received UUID: \t\t", text("received_uuid")),
        ("Creation time: \t\t", time("created")),
        ("Subvolume ID: \t\t", number("id").to_string()),
        ("Generation: \t\t", number("generation").to_string()),
        ("Gen at creation: \t", number("created_in").to_string()),
        ("Parent ID: \t\t", number("parent_id").to_string()),
        ("Top level ID: \t\t", number("parent_id").to_string()),
        ("Flags: \t\t\t", flags.to_owned()),
        ("Send transid: \t\t", number("sent_in").to_string()),
        ("Send time: \t\t", time(if s["sent"].is_null() { "created" } else { "sent" })),
        ("Receive transid: \t", number("received_in").to_string()),
        ("Receive time: \t\t", time("received")),
    ] {
        lines.push(format!("\t{key}{value}"));
    }
    lines.push("\tSnapshot(s):".to_owned());
    let of_this =
        |other: &&Value| other["parent_uuid"].is_string() && other["parent_uuid"] == s["uuid"];
    for snapshot in all.iter().filter(of_this) {
        let path = snapshot["path"].as_str().unwrap_or_default();
        lines.push(format!("\t\t\t\t{}", print::name(path.as_bytes())));
    }
    lines.push("\tQuota group:\t\tn/a".to_owned());
    lines.join("\n")
}

/// Subvolumes whose space has not come back yet.
fn being_deleted(path: &Path) -> Result<u64, Failed> {
    let text = control::stats(path).map_err(|e| could_not("ask the daemon", &e))?;
    let told: Value = serde_json::from_str(&text)
        .map_err(|e| Failed::because(format!("the daemon's answer is not JSON: {e}")))?;
    Ok(told["engine"]["subvolumes_to_drop"].as_u64().unwrap_or_default())
}

/// The daemon knows how many are left, and not which: so this waits for all of them.
fn sync(options: &Sync) -> Done {
    let path = &options.path;
    must_be_larder(path)?;
    let (all, _) = subvolumes_of(path)?;
    if let Some(id) = options.ids.iter().find(|id| all.iter().any(|s| s["id"] == **id)) {
        return Err(Failed::because(format!("subvolume {id} is not being deleted")));
    }
    let waiting = being_deleted(path)?;
    let count = if options.ids.is_empty() { waiting } else { options.ids.len() as u64 };
    if count == 0 {
        return Ok(());
    }
    print::line(&format!("Waiting for {}", print::number(count, "subvolume")))?;
    while being_deleted(path)? > 0 {
        std::thread::sleep(Duration::from_secs(options.seconds));
    }
    for (n, id) in options.ids.iter().enumerate() {
        print::line(&format!("Subvolume id {id} is gone ({}/{count})", n + 1))?;
    }
    Ok(())
}
