//! What a directory holds of backups: snapshots, parts of them, checkpoints.
//!
//! A backup keeps no list of its own: each run looks at what there is, by name and by what the file
//! system says of a subvolume. Hidden here is how that is found out in an image and on a mount, how
//! one machine tells another one, and when a snapshot counts as received. It counts if it is
//! read-only, has the uuid under which it was sent, and no record of a part. Names go to people and
//! to other machines with escapes, which keep every byte.

use crate::image::Image;
use crate::mounted::mounted;
use crate::print;
use anyhow::{Context, anyhow};
use larder_backup::Name;
use larder_format::{Generation, ObjectId};
use larder_fs::{FileKind, InodeId, SubvolInfo};
use larder_fuse::subvolumes as on_mount;
use larder_receive::checkpoint_of;
use larder_receive::destination::Sent;
use larder_receive::record::{ATTRIBUTE, Record};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use uuid::Uuid;

/// A subvolume with a name that a backup gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: Vec<u8>,
    pub(super) read_only: bool,
    /// What it would be sent as.
    pub(super) sent: Sent,
    /// What it was received as.
    pub(super) received: Option<Sent>,
    /// What it says of itself while it is received.
    pub(super) record: Option<Record>,
    /// Nothing was changed in it since it was made, as a snapshot or empty.
    pub(super) untouched: bool,
}

/// An entry as one machine tells it to another, and to programs.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Told {
    /// With escapes.
    pub(super) name: String,
    pub(super) time: i64,
    pub(super) state: String,
    read_only: bool,
    uuid: String,
    transid: u64,
    received_uuid: Option<String>,
    received_transid: Option<u64>,
    record: Option<String>,
    untouched: bool,
}

/// A snapshot at the target, with its checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) name: Name,
    pub(super) state: State,
    /// Names of checkpoints that lie beside it.
    pub(super) checkpoints: Vec<Vec<u8>>,
    /// Is there more than checkpoints?
    pub(super) has_main: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Complete(Sent),
    Part {
        sent: Sent,
        parent: Parent,
    },
    /// It was made, and the run ended before it had a record or anything else of its own.
    Begun,
    /// Nothing that a backup made.
    Foreign,
}

/// From what a part has to be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    Whole,
    From(Sent),
    /// It has everything already, so any parent will do.
    Any,
}

/// The snapshot that an entry belongs to, if a backup made it.
fn snapshot_of(name: &[u8]) -> Option<Name> {
    Name::parse(checkpoint_of(name).unwrap_or(name))
}

/// Has it a name that a backup gives?
pub(super) fn is_ours(name: &[u8]) -> bool {
    snapshot_of(name).is_some()
}

/// The newest snapshot with this prefix, whatever state it is in.
pub(super) fn newest(entries: &[Entry], prefix: &[u8]) -> Option<Name> {
    let names = entries.iter().filter_map(|entry| snapshot_of(&entry.name));
    names.filter(|name| name.prefix == prefix).max()
}

/// Snapshots of a directory of an image.
pub(super) fn in_image(image: &Image, dir: InodeId) -> anyhow::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for (name, _) in image.entries(dir)? {
        if !is_ours(&name) {
            continue;
        }
        let attr = image.fs.lookup(dir, &name)?;
        if attr.kind != FileKind::Directory || attr.id.ino != ObjectId::FIRST_FREE.0 {
            continue;
        }
        let record = match image.fs.getxattr(attr.id, ATTRIBUTE) {
            Ok(record) => Record::parse(&record),
            Err(larder_fs::Error::NoAttribute) => None,
            Err(e) => return Err(e).context(print::name(&name)),
        };
        let info = image.fs.subvolume(attr.id.subvol)?;
        let (sent, received) = (sent_as(&info), received_as(&info));
        // Each snapshot is a transaction of its own. An empty one is made together with its record.
        let untouched = info.parent_uuid != [0; 16] && info.ctransid <= info.otransid;
        found.push(Entry { name, read_only: info.read_only, sent, received, record, untouched });
    }
    Ok(found)
}

/// What a subvolume is sent as.
pub(super) fn sent_as(info: &SubvolInfo) -> Sent {
    let uuid = if info.received_uuid == [0; 16] { info.uuid } else { info.received_uuid };
    Sent { uuid, ctransid: info.ctransid }
}

fn received_as(info: &SubvolInfo) -> Option<Sent> {
    let sent = Sent { uuid: info.received_uuid, ctransid: info.stransid };
    (info.received_uuid != [0; 16]).then_some(sent)
}

/// Snapshots of a directory of a mount.
pub(super) fn on_a_mount(dir: &Path) -> anyhow::Result<Vec<Entry>> {
    let (all, _) = mounted(dir, on_mount::list)?;
    let mut found = Vec::new();
    for entry in dir.read_dir().with_context(|| print::path(dir))? {
        let entry = entry.with_context(|| print::path(dir))?;
        let (name, path) = (entry.file_name().into_vec(), entry.path());
        if !is_ours(&name) {
            continue;
        }
        let place = path.symlink_metadata().with_context(|| print::path(&path))?;
        // Only the root of a subvolume has this flag.
        if !place.is_dir() || on_mount::is_read_only(&path).is_err() {
            continue;
        }
        let id = mounted(&path, on_mount::id_of)?;
        let facts = all.iter().find(|s| s["id"] == id);
        let facts = facts.with_context(|| format!("{} has just appeared", print::path(&path)))?;
        let record = record(&path).with_context(|| print::path(&path))?;
        let is_empty = || path.read_dir().is_ok_and(|mut entries| entries.next().is_none());
        let same = facts["last_change"].as_u64() <= facts["created_in"].as_u64();
        let untouched = same && (!facts["parent_uuid"].is_null() || is_empty());
        let entry = on_mount_entry(name, facts, record).with_context(|| print::path(&path))?;
        found.push(Entry { untouched, ..entry });
    }
    Ok(found)
}

fn on_mount_entry(
    name: Vec<u8>,
    facts: &serde_json::Value,
    record: Option<Record>,
) -> anyhow::Result<Entry> {
    let sent = |uuid: &str, transid: &str| {
        let uuid = facts[uuid].as_str().map(Uuid::parse_str).transpose().ok()??.into_bytes();
        Some(Sent { uuid, ctransid: Generation(facts[transid].as_u64()?) })
    };
    let own = sent("uuid", "last_change").context("the mount does not say its uuid")?;
    let received = sent("received_uuid", "sent_in");
    let uuid = received.map_or(own.uuid, |received| received.uuid);
    let read_only = facts["read_only"] == true;
    let sent = Sent { uuid, ..own };
    Ok(Entry { name, read_only, sent, received, record, untouched: false })
}

fn record(path: &Path) -> anyhow::Result<Option<Record>> {
    let mut value = vec![0; 512];
    match rustix::fs::lgetxattr(path, OsStr::from_bytes(ATTRIBUTE), &mut value[..]) {
        Ok(len) => Ok(Record::parse(&value[..len])),
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

impl Entry {
    fn is_complete(&self) -> bool {
        self.read_only && self.record.is_none()
    }

    /// For another machine, and for programs.
    pub(super) fn tell(&self) -> Told {
        let time = snapshot_of(&self.name).map_or(0, |name| name.time);
        let state = match self {
            _ if checkpoint_of(&self.name).is_some() => "checkpoint",
            Self { read_only: true, record: None, .. } => "complete",
            Self { record: Some(_), .. } | Self { received: Some(_), .. } => "part",
            _ => "writable",
        };
        Told {
            name: print::name(&self.name),
            time,
            state: state.to_owned(),
            read_only: self.read_only,
            uuid: print::uuid(self.sent.uuid),
            transid: self.sent.ctransid.0,
            received_uuid: self.received.map(|sent| print::uuid(sent.uuid)),
            received_transid: self.received.map(|sent| sent.ctransid.0),
            record: self.record.map(|r| String::from_utf8_lossy(&r.encode()).into_owned()),
            untouched: self.untouched,
        }
    }
}

impl Told {
    /// What another machine told, if it belongs to snapshots with this prefix.
    ///
    /// # Errors
    /// A value makes no sense.
    pub(super) fn understand(&self, prefix: &[u8]) -> anyhow::Result<Option<Entry>> {
        let shown = self.name.as_bytes();
        let base = checkpoint_of(shown).unwrap_or(shown);
        let escaped = print::name(prefix).into_bytes();
        let Some(name) = Name::parse(base).filter(|name| name.prefix == escaped) else {
            return Ok(None);
        };
        // Escapes are in the prefix only, and the prefix is known.
        let real = Name { prefix: prefix.to_vec(), time: name.time }.bytes();
        let start = usize::from(shown.len() != base.len());
        let name = [&shown[..start], &real, &shown[start + base.len()..]].concat();
        let uuid = |text: &str| Uuid::parse_str(text).map(Uuid::into_bytes);
        let received = match (&self.received_uuid, self.received_transid) {
            (Some(text), Some(n)) => Some(Sent { uuid: uuid(text)?, ctransid: Generation(n) }),
            _ => None,
        };
        let record = match &self.record {
            Some(text) => {
                let record = Record::parse(text.as_bytes());
                Some(record.ok_or_else(|| anyhow!("{}: the record is none", self.name))?)
            }
            None => None,
        };
        let sent = Sent { uuid: uuid(&self.uuid)?, ctransid: Generation(self.transid) };
        let (read_only, untouched) = (self.read_only, self.untouched);
        Ok(Some(Entry { name, read_only, sent, received, record, untouched }))
    }
}

/// A snapshot at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ready {
    pub(super) name: Name,
    pub(super) sent: Sent,
    /// It was received here itself, such as from the target after a loss. The target may know the
    /// same snapshot by another transaction then. It cannot have been changed: it would no longer
    /// be known as received.
    pub(super) received: bool,
}

/// The snapshots with this prefix that can be sent, the oldest first.
pub(super) fn to_send(entries: &[Entry], prefix: &[u8]) -> Vec<Ready> {
    let ready = entries.iter().filter(|entry| entry.is_complete()).filter_map(|entry| {
        let name = Name::parse(&entry.name)?;
        Some(Ready { name, sent: entry.sent, received: entry.received.is_some() })
    });
    let mut found: Vec<_> = ready.filter(|ready| ready.name.prefix == prefix).collect();
    found.sort_by_key(|ready| ready.name.time);
    found
}

/// What a target has with this prefix, the oldest first.
pub(super) fn received(entries: &[Entry], prefix: &[u8]) -> Vec<Held> {
    let mut groups: BTreeMap<Name, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        if let Some(name) = snapshot_of(&entry.name).filter(|name| name.prefix == prefix) {
            groups.entry(name).or_default().push(entry);
        }
    }
    groups.into_iter().map(|(name, entries)| held(name, &entries)).collect()
}

fn held(name: Name, entries: &[&Entry]) -> Held {
    let own = name.bytes();
    let (main, checkpoints): (Vec<&Entry>, Vec<&Entry>) =
        entries.iter().partition(|entry| entry.name == own);
    let main = main.first().copied();
    let record = main.into_iter().chain(checkpoints.iter().copied()).find_map(|e| e.record);
    let state = match (main, record) {
        (Some(Entry { read_only: true, received: Some(sent), record: None, .. }), _) => {
            State::Complete(*sent)
        }
        (_, Some(Record { origin, .. })) => {
            let parent = origin.parent.map_or(Parent::Whole, Parent::From);
            State::Part { sent: origin.sent, parent }
        }
        (Some(Entry { read_only: false, received: Some(sent), .. }), None) => {
            State::Part { sent: *sent, parent: Parent::Any }
        }
        (Some(Entry { read_only: false, untouched: true, .. }), None) => State::Begun,
        _ => State::Foreign,
    };
    let checkpoints = checkpoints.iter().map(|entry| entry.name.clone()).collect();
    Held { name, state, checkpoints, has_main: main.is_some() }
}

impl Held {
    /// All that there is of it.
    pub(super) fn everything(&self) -> Vec<Vec<u8>> {
        let main = self.has_main.then(|| self.name.bytes());
        main.into_iter().chain(self.checkpoints.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_receive::record::Origin;

    fn sent(n: u8) -> Sent {
        Sent { uuid: [n; 16], ctransid: Generation(n.into()) }
    }

    fn entry(name: &[u8]) -> Entry {
        let name = name.to_vec();
        let received = Some(sent(2));
        Entry { name, read_only: true, sent: sent(1), received, record: None, untouched: true }
    }

    const MONDAY: &[u8] = b"h\xfc.20261123T040000Z";

    fn record() -> Record {
        let origin = Origin { sent: sent(3), parent: Some(sent(4)) };
        Record { origin, position: None }
    }

    #[test]
    fn another_machine_understands_what_is_told() {
        let checkpoint = [b".", MONDAY, b".larder-part2"].concat();
        let part = Entry { record: Some(record()), received: None, ..entry(&checkpoint) };
        for said in [entry(MONDAY), part, Entry { read_only: false, ..entry(MONDAY) }] {
            let text = serde_json::to_string(&said.tell()).unwrap();
            let told: Told = serde_json::from_str(&text).unwrap();
            assert_eq!(told.understand(b"h\xfc").unwrap(), Some(said));
            assert_eq!(told.understand(b"h").unwrap(), None);
        }
    }

    #[test]
    fn what_counts_as_received() {
        let checkpoint = [b".", MONDAY, b".larder-part"].concat();
        let state = |entries: &[Entry]| received(entries, b"h\xfc")[0].state;
        let whole = entry(MONDAY);
        let part =
            Entry { read_only: false, received: None, record: Some(record()), ..whole.clone() };
        let goes_on = State::Part { sent: sent(3), parent: Parent::From(sent(4)) };
        assert_eq!(state(std::slice::from_ref(&whole)), State::Complete(sent(2)));
        assert_eq!(state(std::slice::from_ref(&part)), goes_on);
        // After a power cut the checkpoint is all that there is.
        assert_eq!(state(&[Entry { name: checkpoint.clone(), ..part.clone() }]), goes_on);
        let sealing = Entry { read_only: false, ..whole.clone() };
        assert_eq!(state(&[sealing]), State::Part { sent: sent(2), parent: Parent::Any });
        let begun = Entry { read_only: false, received: None, ..whole.clone() };
        assert_eq!(state(&[Entry { untouched: false, ..begun.clone() }]), State::Foreign);
        assert_eq!(state(&[begun]), State::Begun);
        assert_eq!(state(&[Entry { received: None, ..whole.clone() }]), State::Foreign);
        let left = received(&[whole, Entry { name: checkpoint.clone(), ..part }], b"h\xfc");
        assert_eq!(left[0].state, State::Complete(sent(2)));
        assert_eq!(left[0].everything(), [MONDAY.to_vec(), checkpoint]);
    }
}
