//! How a subvolume begins, goes on after an end, and becomes complete.
//!
//! While a subvolume is filled, its record says that its position is not known. From time to time a
//! *checkpoint* is made: everything is made durable, the record gets the position, and a read-only
//! snapshot keeps that state. After a power cut the checkpoint is where it goes on. After an
//! orderly end (an error, or the user's wish) the subvolume itself has its position. A short stream
//! comes to no checkpoint and would begin again.
//!
//! Two names take turns for checkpoints, so that there always is one that is whole. They lie beside
//! the subvolume and are deleted when it is complete.

use crate::destination::{BoxResult, Destination, Entry, Existing, Sent};
use crate::error::{BoxError, Error, Taken, shown};
use crate::record::{Origin, Position, Record};

/// What is between a checkpoint's name and the dot that it begins with.
const SUFFIXES: [&[u8]; 2] = [b".larder-part", b".larder-part2"];
/// Longest name of an entry.
const MAX_NAME: usize = 255;

/// How a subvolume begins.
#[derive(Debug)]
pub(crate) enum Start<S> {
    /// It has nothing yet: it is to be made.
    Anew,
    /// It has what the commands up to this position made.
    From(S, Position),
    /// It has everything, but may be writable still.
    Complete(Existing<S>),
}

/// The names of the checkpoints of a subvolume; none if they would be too long.
pub fn checkpoints(name: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    let all = SUFFIXES.iter().map(move |suffix| [b".", name, suffix].concat());
    all.filter(|name| name.len() <= MAX_NAME)
}

/// The subvolume whose checkpoint would have this name.
#[must_use]
pub fn checkpoint_of(name: &[u8]) -> Option<&[u8]> {
    let rest = name.strip_prefix(b".")?;
    SUFFIXES.iter().find_map(|suffix| rest.strip_suffix(*suffix)).filter(|name| !name.is_empty())
}

/// A checkpoint of this stream, the latest first.
fn latest<D: Destination>(
    to: &D,
    name: &[u8],
    origin: &Origin,
) -> BoxResult<Option<(D::Subvol, Position)>> {
    let mut best: Option<(D::Subvol, Position)> = None;
    for name in checkpoints(name) {
        let Some(Entry::Subvolume(found)) = to.look(&name)? else { continue };
        let record =
            found.record.as_deref().and_then(Record::parse).filter(|r| r.origin == *origin);
        let Some(at) = record.and_then(|r| r.position).filter(|_| found.read_only) else {
            continue;
        };
        if best.as_ref().is_none_or(|(_, other)| at.commands > other.commands) {
            best = Some((found.subvol, at));
        }
    }
    Ok(best)
}

/// What there is of a subvolume that a stream begins. Deletes what cannot be used. Without
/// `resume`, anything with this name is an error.
pub(crate) fn start<D: Destination>(
    to: &mut D,
    name: &[u8],
    origin: &Origin,
    resume: bool,
) -> Result<Start<D::Subvol>, Error> {
    let failed = failing(name, "looking for what was received before");
    let taken = |why| Err(Error::Taken { name: shown(name), why });
    let found = to.look(name).map_err(&failed)?;
    let checkpoint = latest(to, name, origin).map_err(&failed)?;
    let Some(found) = found else {
        return match checkpoint {
            Some(_) if !resume => taken(Taken::Partly),
            Some(checkpoint) => go_on(to, name, checkpoint),
            None => Ok(Start::Anew),
        };
    };
    let Entry::Subvolume(found) = found else { return taken(Taken::Foreign) };
    let record = found.record.as_deref().and_then(Record::parse);
    if found.received.as_ref() == Some(&origin.sent) && (found.read_only || resume) {
        return if resume { Ok(Start::Complete(found)) } else { taken(Taken::Received) };
    }
    match record {
        Some(record) if record.origin != *origin => return taken(Taken::OtherStream),
        Some(_) if !resume => return taken(Taken::Partly),
        Some(Record { position: Some(at), .. }) if !found.read_only => {
            return Ok(Start::From(found.subvol, at));
        }
        Some(_) => {}
        // The power failed between making the snapshot and giving it a record.
        None if resume && found.untouched_snapshot && !found.read_only => {}
        None => return taken(Taken::Foreign),
    }
    to.delete(name).map_err(failing(name, "deleting what cannot be used"))?;
    match checkpoint {
        Some(checkpoint) => go_on(to, name, checkpoint),
        None => Ok(Start::Anew),
    }
}

fn go_on<D: Destination>(
    to: &mut D,
    name: &[u8],
    (subvol, at): (D::Subvol, Position),
) -> Result<Start<D::Subvol>, Error> {
    let made = to.snapshot(&subvol, name, false);
    Ok(Start::From(made.map_err(failing(name, "taking the checkpoint"))?, at))
}

/// Makes everything durable and notes the position. Nothing may be applied afterwards before
/// [`running`] was called.
pub(crate) fn stop<D: Destination>(to: &mut D, origin: &Origin, at: Position) -> BoxResult<()> {
    to.sync()?;
    to.set_record(Some(&Record { origin: *origin, position: Some(at) }.encode()))?;
    to.sync()
}

/// The record of a subvolume to which commands are applied.
pub(crate) fn running(origin: &Origin) -> Vec<u8> {
    Record { origin: *origin, position: None }.encode()
}

/// Makes a checkpoint. `turn` counts them.
pub(crate) fn checkpoint<D: Destination>(
    to: &mut D,
    (name, subvol): (&[u8], &D::Subvol),
    (origin, at): (&Origin, Position),
    turn: u64,
) -> BoxResult<()> {
    let mut names: Vec<_> = checkpoints(name).collect();
    if names.len() < SUFFIXES.len() {
        return Ok(());
    }
    if turn % 2 == 1 {
        names.reverse();
    }
    remove(to, &names[0])?;
    to.sync()?;
    to.set_record(Some(&Record { origin: *origin, position: Some(at) }.encode()))?;
    to.snapshot(subvol, &names[0], true)?;
    to.set_record(Some(&running(origin)))?;
    remove(to, &names[1])
}

/// Deletes a checkpoint, if there is one.
fn remove<D: Destination>(to: &mut D, name: &[u8]) -> BoxResult<()> {
    match to.look(name)? {
        Some(Entry::Subvolume(found)) if is_ours(&found) => to.delete(name),
        _ => Ok(()),
    }
}

fn is_ours<S>(found: &Existing<S>) -> bool {
    found.record.as_deref().and_then(Record::parse).is_some()
}

/// A subvolume has everything: what it was received from is noted, and it becomes read-only. Each
/// step is one that [`start`] recognises.
pub(crate) fn complete<D: Destination>(to: &mut D, name: &[u8], sent: &Sent) -> BoxResult<()> {
    to.sync()?;
    to.set_received(sent)?;
    to.set_record(None)?;
    seal(to, name)
}

/// The last steps of [`complete`].
pub(crate) fn seal<D: Destination>(to: &mut D, name: &[u8]) -> BoxResult<()> {
    to.set_read_only()?;
    for name in checkpoints(name).collect::<Vec<_>>() {
        remove(to, &name)?;
    }
    to.sync()
}

/// Turns a destination's error into one that names the subvolume.
pub(crate) fn failing(name: &[u8], step: &'static str) -> impl Fn(BoxError) -> Error + use<> {
    let name = shown(name);
    move |source| Error::Subvolume { name: name.clone(), step, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_known_by_their_names() {
        for name in [&b"home"[..], b".home", b"home.larder-part"] {
            for checkpoint in checkpoints(name) {
                assert_eq!(checkpoint_of(&checkpoint), Some(name));
            }
        }
        for other in [&b"home.larder-part"[..], b".home", b"..larder-part2x", b".larder-part"] {
            assert_eq!(checkpoint_of(other), None);
        }
        assert_eq!(checkpoints(&[b'x'; 250]).count(), 0);
    }
}
