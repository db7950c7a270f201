//! Read-only subvolumes of an open file system as streams, for all that send.
//!
//! Which subvolumes are meant, and where the bytes go, is the caller's choice. Hidden here is what
//! follows from that choice: the name of each subvolume at the receiver, its parent where none is
//! named, and that a subvolume that has been sent can be cloned from by the next one.

use crate::failure::Advise;
use anyhow::{Context, anyhow};
use larder_format::{ObjectId, TreeId};
use larder_fs::{Filesystem, Frozen, SubvolInfo};
use larder_send::{Options, Source, Summary};
use larder_stream::StreamWriter;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::Write;
use std::sync::Arc;

/// A subvolume, and how messages call it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Named {
    #[serde(with = "IdAsNumber")]
    pub(crate) id: TreeId,
    pub(crate) shown: String,
}

/// What is sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Wanted {
    /// Each becomes a stream, one after the other.
    pub(crate) subvolumes: Vec<Named>,
    /// What the receiver has, and what only differences are sent from.
    pub(crate) parent: Option<Named>,
    /// What else the receiver has.
    pub(crate) clones: Vec<Named>,
    #[serde(with = "OptionsAsFields")]
    pub(crate) options: Options,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "ObjectId")]
struct IdAsNumber(u64);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Options")]
struct OptionsAsFields {
    compressed_data: bool,
    no_data: bool,
}

/// What was sent of each subvolume, by the name that messages have for it.
pub(crate) type Sent = Vec<(String, Summary)>;

/// Says that the work should end.
pub(crate) type End = Arc<dyn Fn() -> bool + Send + Sync>;

/// Writes the streams. `watch` sees each command counted. The output is not flushed.
///
/// # Errors
/// A subvolume can be written to, or has no name; reading, corruption; the output does not take it.
pub(crate) fn send_all<W: Write>(
    fs: &Filesystem,
    wanted: &Wanted,
    writer: &mut StreamWriter<W>,
    watch: &mut dyn FnMut(&Summary),
) -> anyhow::Result<Sent> {
    send_all_until(fs, wanted, writer, watch, None)
}

/// The same, where the work ends with an error as soon as `end` says so. It is asked often.
pub(crate) fn send_all_until<W: Write>(
    fs: &Filesystem,
    wanted: &Wanted,
    writer: &mut StreamWriter<W>,
    watch: &mut dyn FnMut(&Summary),
    end: Option<&End>,
) -> anyhow::Result<Sent> {
    let frozen = |named| -> anyhow::Result<Frozen> {
        let frozen = frozen(fs, named)?;
        let Some(end) = end.cloned() else { return Ok(frozen) };
        Ok(frozen.ending_when(move || end()))
    };
    let parent = wanted.parent.as_ref().map(frozen).transpose()?;
    let mut given = wanted.clones.iter().map(frozen).collect::<anyhow::Result<Vec<_>>>()?;
    let mut done = Vec::new();
    for named in &wanted.subvolumes {
        let subvolume = frozen(named)?;
        let name = name_of(fs, named)?;
        let clones: Vec<&Frozen> = given.iter().collect();
        let parent = parent.as_ref().or_else(|| relative(&subvolume, &clones));
        let source = Source { subvolume: &subvolume, name: &name, parent, clones: &clones };
        let sent = larder_send::send(&source, wanted.options, writer, watch);
        done.push((named.shown.clone(), sent.with_context(|| named.shown.clone())?));
        // The receiver has it now, so the next one may share with it.
        given.push(subvolume);
    }
    Ok(done)
}

/// A read-only subvolume, to be read as a whole.
pub(crate) fn frozen(fs: &Filesystem, named: &Named) -> anyhow::Result<Frozen> {
    let shown = &named.shown;
    match fs.frozen(named.id) {
        Err(larder_fs::Error::Invalid(why)) => Err(anyhow!("{shown}: {why}")).hint(format!(
            "make a snapshot that is: `larder subvolume snapshot -r {shown} SNAPSHOT`"
        )),
        other => other.with_context(|| shown.clone()),
    }
}

/// The name that a subvolume has at the receiver: the last one of its path.
fn name_of(fs: &Filesystem, subvolume: &Named) -> anyhow::Result<Vec<u8>> {
    let path = fs.subvolume_path(subvolume.id)?;
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
    if name.is_empty() {
        return Err(anyhow!("{}: the top-level subvolume has no name", subvolume.shown))
            .hint("send a snapshot of it: `larder subvolume snapshot -r`");
    }
    Ok(name)
}

/// Of the given subvolumes, the one from which the fewest changes are to be expected: the source of
/// the snapshot, or else the snapshot of the same source that was changed last before or after.
fn relative<'a>(subvolume: &Frozen, given: &[&'a Frozen]) -> Option<&'a Frozen> {
    let of: &SubvolInfo = subvolume.info();
    if of.parent_uuid == [0; 16] {
        return None;
    }
    let related = |other: &&&Frozen| {
        let other = other.info();
        other.uuid == of.parent_uuid || other.parent_uuid == of.parent_uuid
    };
    let distance = |other: &&Frozen| other.info().ctransid.0.abs_diff(of.ctransid.0);
    given.iter().filter(related).copied().min_by_key(distance)
}

/// What was sent, as JSON.
pub(crate) fn describe(done: &[(String, Summary)]) -> serde_json::Value {
    let one = |(subvolume, summary): &(String, Summary)| {
        json!({
            "subvolume": subvolume,
            "commands": summary.commands,
            "inodes": summary.inodes,
            "data": summary.data,
            "cloned": summary.cloned,
        })
    };
    done.iter().map(one).collect()
}
