//! `larder subvolume diff`: what differs between two read-only subvolumes of an image.

use crate::failure::{Advise, usage};
use crate::image::Access;
use crate::print;
use crate::subvolumes::{frozen, in_image};
use crate::target::{Place, Target};
use anyhow::anyhow;
use larder_format::items::FileType;
use larder_send::{Change, Changes, Sort};
use serde_json::json;
use std::ffi::OsString;

/// How the list is shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) json: bool,
    pub(super) stat: bool,
    pub(super) force: bool,
}

pub(super) fn diff(old: &OsString, new: &OsString, how: How) -> anyhow::Result<()> {
    let (old, new) = (target(old)?, target(new)?);
    if old.image != new.image {
        return usage("both subvolumes have to be in one image");
    }
    in_image(&old, Access::Read { force: how.force }, |image| {
        let (a, b) = (frozen(image, &old.path)?, frozen(image, &new.path)?);
        let mut totals = Totals::default();
        larder_send::diff(&a, &b, |change| {
            totals.add(&change);
            match how {
                How { stat: true, .. } => Ok(()),
                How { json: true, .. } => print::line(&describe(&change).to_string()),
                _ => print::line(&line(&change)),
            }
        })?;
        if how.stat { totals.print(how.json) } else { Ok(()) }
    })
}

fn target(text: &OsString) -> anyhow::Result<Target> {
    match Place::parse_existing(text)? {
        Place::Image(target) => Ok(target),
        Place::Host(path) => Err(anyhow!("{} is not IMAGE:PATH", print::path(&path)))
            .hint("unmount the image, and name it with the path")
            .could_not_run(),
    }
}

/// `M path (data, mode)`, with a slash behind a directory.
fn line(change: &Change) -> String {
    let slash = if change.kind == FileType::Directory { "/" } else { "" };
    let path = print::name(&change.path);
    let what = words(&change.changes).join(", ");
    let what = if what.is_empty() { what } else { format!(" ({what})") };
    match (change.sort, &change.from) {
        (Sort::Renamed, Some(from)) => {
            format!("R {}{slash} -> {path}{slash}{what}", print::name(from))
        }
        _ => format!("{} {path}{slash}{what}", letter(change.sort)),
    }
}

fn letter(sort: Sort) -> &'static str {
    match sort {
        Sort::Added => "A",
        Sort::Removed => "D",
        Sort::Renamed => "R",
        Sort::Changed => "M",
    }
}

fn words(changes: &Changes) -> Vec<&'static str> {
    let all = [
        (changes.data, "data"),
        (changes.mode, "mode"),
        (changes.owner, "owner"),
        (changes.xattrs, "xattrs"),
        (changes.flags, "flags"),
    ];
    all.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect()
}

fn describe(change: &Change) -> serde_json::Value {
    let sort = match change.sort {
        Sort::Added => "added",
        Sort::Removed => "removed",
        Sort::Renamed => "renamed",
        Sort::Changed => "changed",
    };
    json!({
        "change": sort,
        "path": print::name(&change.path),
        "from": change.from.as_deref().map(print::name),
        "directory": change.kind == FileType::Directory,
        "what": words(&change.changes),
        "size_before": change.sizes.0,
        "size": change.sizes.1,
    })
}

/// Sums of a list.
#[derive(Debug, Default)]
struct Totals {
    added: u64,
    removed: u64,
    renamed: u64,
    changed: u64,
}

impl Totals {
    fn add(&mut self, change: &Change) {
        *match change.sort {
            Sort::Added => &mut self.added,
            Sort::Removed => &mut self.removed,
            Sort::Renamed => &mut self.renamed,
            Sort::Changed => &mut self.changed,
        } += 1;
    }

    fn print(&self, as_json: bool) -> anyhow::Result<()> {
        let Self { added, removed, renamed, changed } = self;
        if as_json {
            return print::json(&json!({
                "added": added, "removed": removed, "renamed": renamed, "changed": changed,
            }));
        }
        print::line(&format!(
            "{added} added, {removed} removed, {renamed} renamed, {changed} changed"
        ))
    }
}
