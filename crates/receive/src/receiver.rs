//! The loop: commands from the stream to the destination, subvolume by subvolume.
//!
//! A stream is read from its beginning in any case, by a thread of its own ([`Ahead`]). What a
//! subvolume has already is skipped, after its checksums were compared. An error of the stream ends
//! the loop. An error of a command ends it when as many have occurred as the caller permits. Either
//! way the subvolume notes its position.

use crate::ahead::Ahead;
use crate::apply::{How, apply, apply_both, makes};
use crate::destination::{BoxResult, Destination, Sent};
use crate::error::{Error, Failure, Refused, Taken, shown, uuid};
use crate::path::check_name;
use crate::record::{Origin, Position};
use crate::subvolume::{self, Start, failing};
use larder_format::csum::crc32c_raw;
use larder_stream::Command;
use std::collections::HashMap;
use std::io::Read;
use std::time::{Duration, Instant};

/// A command, with the bytes where they were read.
type Frame<'a> = larder_stream::Frame<&'a [u8]>;

/// How to receive.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Go on with what was received in part.
    pub resume: bool,
    /// Errors of commands after which receiving ends; 0: it does not end.
    pub max_errors: u64,
    /// Unpack what is packed, also where it could be stored so.
    pub force_decompress: bool,
    /// Time between checkpoints.
    pub checkpoint_after: Duration,
    /// Commands between checkpoints, if these are to be counted, too.
    pub checkpoint_commands: Option<u64>,
}

/// Commands after which the clock is looked at.
const LOOK_AFTER: u64 = 64;

impl Default for Options {
    fn default() -> Self {
        Self {
            resume: false,
            max_errors: 1,
            force_decompress: false,
            checkpoint_after: Duration::from_secs(60),
            checkpoint_commands: None,
        }
    }
}

/// Sees how receiving goes on.
pub trait Observer {
    /// The stream has a subvolume; `incremental` if as differences from another one.
    fn announces(&mut self, _name: &[u8], _incremental: bool) {}
    /// A subvolume has been begun; `resumed` if it had a part already.
    fn begins(&mut self, _name: &[u8], _resumed: bool) {}
    /// A subvolume is complete.
    fn completed(&mut self, _name: &[u8]) {}
    /// The stream was read up to this byte.
    fn at(&mut self, _offset: u64) {}
    /// A command failed, and receiving goes on.
    fn failed(&mut self, _failure: &Failure) {}
    /// Is receiving to end? Asked before each command, and while none comes.
    fn stop(&self) -> bool {
        false
    }
}

/// A subvolume that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its name in the target.
    pub name: Vec<u8>,
    /// What it was sent as.
    pub sent: Sent,
    /// The parent's, where the stream has only what changed.
    pub parent: Option<Sent>,
    /// Commands that were applied.
    pub applied: u64,
    /// Commands that it had already.
    pub skipped: u64,
}

impl Received {
    fn origin(&self) -> Origin {
        Origin { sent: self.sent, parent: self.parent }
    }
}

/// What was received.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The subvolumes that are complete.
    pub subvolumes: Vec<Received>,
    /// Commands that failed.
    pub errors: u64,
    /// Bytes of the stream.
    pub bytes: u64,
}

/// The subvolume that is being received.
#[derive(Debug)]
struct Current<S> {
    subvol: S,
    received: Received,
    at: Position,
    /// Commands up to here are not applied.
    skip: Skip,
    checkpoint: Instant,
    /// Position of the last checkpoint, that at which the clock was looked at last, and the number
    /// of checkpoints.
    checkpoint_at: u64,
    looked_at: u64,
    checkpoints: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Skip {
    Nothing,
    To(Position),
    /// It is complete; only whether it is read-only remains to be seen.
    All {
        sealed: bool,
    },
}

struct Receiver<'a, D: Destination> {
    to: &'a mut D,
    options: &'a Options,
    observer: &'a mut dyn Observer,
    current: Option<Current<D::Subvol>>,
    /// Subvolumes that were looked for by what they were sent as.
    known: HashMap<Sent, D::Subvol>,
    summary: Summary,
}

/// Receives all subvolumes of the streams that `input` has.
///
/// # Errors
/// See [`Error`]. What is complete stays; the subvolume that was being received stays as well, and
/// [`Options::resume`] goes on with it.
pub fn receive<D: Destination>(
    input: impl Read + Send + 'static,
    to: &mut D,
    options: &Options,
    observer: &mut dyn Observer,
) -> Result<Summary, Error> {
    let mut stream = Ahead::begin(input)?;
    let mut receiver = Receiver {
        to,
        options,
        observer,
        current: None,
        known: HashMap::new(),
        summary: Summary::default(),
    };
    let done = receiver.run(&mut stream);
    if done.is_err() {
        receiver.leave();
    }
    receiver.summary.bytes = stream.bytes();
    done.map(|()| receiver.summary)
}

impl<D: Destination> Receiver<'_, D> {
    fn run(&mut self, stream: &mut Ahead) -> Result<(), Error> {
        while stream.wait(|| self.observer.stop())? {
            if self.observer.stop() {
                return Err(Error::Interrupted);
            }
            if self.pair(stream)? {
                stream.pass();
            } else {
                let frame = stream.get(0).expect("it was waited for");
                self.command(&frame)?;
                self.observer.at(frame.end());
            }
            stream.pass();
        }
        self.complete()
    }

    /// Applies two commands as one, if the first makes an inode under a name of the stream's own,
    /// and the second gives it its name. Most inodes come so. `false`: nothing was done.
    fn pair(&mut self, stream: &mut Ahead) -> Result<bool, Error> {
        let applies = self.current.as_ref().is_some_and(|c| c.skip == Skip::Nothing);
        let first = stream.get(0).expect("it was waited for");
        if !applies || !makes(&first.command()?) {
            return Ok(false);
        }
        // What ends the stream here is for the next command to say.
        let _ = stream.look_ahead(|| self.observer.stop());
        let first = stream.get(0).expect("it was waited for");
        let Some(second) = stream.get(1) else { return Ok(false) };
        let (Ok(make), Ok(name)) = (first.command(), second.command()) else { return Ok(false) };
        self.observer.at(first.end());
        if self.observer.stop() || !apply_both(self.to, &make, &name) {
            return Ok(false);
        }
        self.observer.at(second.end());
        self.applied(&first);
        self.applied(&second);
        self.checkpoint()?;
        Ok(true)
    }

    fn command(&mut self, frame: &Frame<'_>) -> Result<(), Error> {
        let command = frame.command()?;
        match command {
            Command::Subvol { path, uuid, ctransid } => {
                self.begin(frame, path, Sent { uuid, ctransid }, None)
            }
            Command::Snapshot { path, uuid, ctransid, parent_uuid, parent_ctransid } => {
                let parent = Sent { uuid: parent_uuid, ctransid: parent_ctransid };
                self.begin(frame, path, Sent { uuid, ctransid }, Some(parent))
            }
            Command::End {} => self.complete(),
            _ => self.change(frame, &command),
        }
    }

    /// Begins a subvolume, after the one before it has been completed.
    fn begin(
        &mut self,
        frame: &Frame<'_>,
        name: &[u8],
        sent: Sent,
        parent: Option<Sent>,
    ) -> Result<(), Error> {
        self.complete()?;
        let refused = |e: Refused| failure(frame, e.into());
        check_name(name).map_err(refused)?;
        self.observer.announces(name, parent.is_some());
        let received = Received { name: name.to_vec(), sent, parent, applied: 0, skipped: 0 };
        let start = subvolume::start(self.to, name, &received.origin(), self.options.resume)?;
        let has_some = !matches!(start, Start::Anew);
        let (subvol, skip) = match start {
            Start::Anew => {
                let made = self.make(name, &received.origin()).map_err(|e| failure(frame, e))?;
                (made, Skip::Nothing)
            }
            Start::From(subvol, at) => (subvol, Skip::To(at)),
            Start::Complete(found) => {
                // A record may be left from before.
                if !found.read_only && found.record.is_some() {
                    self.to.enter(&found.subvol).map_err(failing(name, "entering it"))?;
                    self.to.set_record(None).map_err(failing(name, "removing its record"))?;
                }
                (found.subvol, Skip::All { sealed: found.read_only })
            }
        };
        self.to.enter(&subvol).map_err(failing(name, "entering it"))?;
        self.observer.begins(name, has_some);
        let at = Position { commands: 0, digest: digest(0, frame) };
        let current = Current {
            subvol,
            received,
            at,
            skip,
            checkpoint: Instant::now(),
            checkpoint_at: 0,
            looked_at: 0,
            checkpoints: 0,
        };
        self.current = Some(current);
        self.reached()
    }

    /// Makes a subvolume that has nothing yet.
    fn make(&mut self, name: &[u8], origin: &Origin) -> BoxResult<D::Subvol> {
        let record = subvolume::running(origin);
        let Some(parent) = origin.parent else { return self.to.create(name, &record) };
        let parent = self.find(&parent)?;
        let made = self.to.snapshot(&parent, name, false)?;
        self.to.enter(&made)?;
        self.to.set_record(Some(&record))?;
        Ok(made)
    }

    /// A subvolume of the destination that has what was sent.
    fn find(&mut self, sent: &Sent) -> BoxResult<D::Subvol> {
        if let Some(known) = self.known.get(sent) {
            return Ok(known.clone());
        }
        let Some(found) = self.to.find(sent)? else {
            let (uuid, ctransid) = (uuid(sent.uuid), sent.ctransid.0);
            return Err(Refused::NoSource { uuid, ctransid }.into());
        };
        self.known.insert(*sent, found.clone());
        Ok(found)
    }

    /// A command that changes the subvolume.
    fn change(&mut self, frame: &Frame<'_>, command: &Command<'_>) -> Result<(), Error> {
        let Some(current) = &mut self.current else {
            return Err(failure(frame, Refused::NoSubvolume.into()).into());
        };
        if current.skip != Skip::Nothing {
            current.received.skipped += 1;
            current.at.pass(frame);
            return self.reached();
        }
        let (own, subvol) = (current.received.sent.uuid, current.subvol.clone());
        let done = match *command {
            Command::Clone { from_uuid, .. } if from_uuid == own => Ok(Some(subvol)),
            Command::Clone { from_uuid, from_ctransid, .. } => {
                self.find(&Sent { uuid: from_uuid, ctransid: from_ctransid }).map(Some)
            }
            _ => Ok(None),
        };
        let how = How { force_decompress: self.options.force_decompress };
        let done = done.and_then(|source| apply(self.to, command, source.as_ref(), how));
        if let Err(e) = done {
            self.failed(failure(frame, e))?;
        }
        self.applied(frame);
        self.checkpoint()
    }

    /// A command was applied, or failed.
    fn applied(&mut self, frame: &Frame<'_>) {
        let current = self.current.as_mut().expect("it was there");
        current.received.applied += 1;
        current.at.pass(frame);
    }

    /// A command failed: does receiving end?
    fn failed(&mut self, failure: Failure) -> Result<(), Error> {
        self.summary.errors += 1;
        if self.options.max_errors != 0 && self.summary.errors >= self.options.max_errors {
            return Err(failure.into());
        }
        self.observer.failed(&failure);
        Ok(())
    }

    /// Begins to apply commands when all that are to be skipped were.
    fn reached(&mut self) -> Result<(), Error> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let Skip::To(wanted) = current.skip else { return Ok(()) };
        if current.at.commands < wanted.commands {
            return Ok(());
        }
        let name = &current.received.name;
        if current.at != wanted {
            return Err(Error::Taken { name: shown(name), why: Taken::OtherStream });
        }
        let running = subvolume::running(&current.received.origin());
        self.to.set_record(Some(&running)).map_err(failing(name, "noting that it goes on"))?;
        current.skip = Skip::Nothing;
        Ok(())
    }

    /// Makes a checkpoint if it is time for one.
    fn checkpoint(&mut self) -> Result<(), Error> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let since = current.at.commands - current.checkpoint_at;
        let counted = self.options.checkpoint_commands.is_some_and(|n| since >= n);
        let looks = current.at.commands - current.looked_at >= LOOK_AFTER;
        if looks {
            current.looked_at = current.at.commands;
        }
        let timed = looks && current.checkpoint.elapsed() >= self.options.checkpoint_after;
        if !counted && !timed {
            return Ok(());
        }
        let (name, origin) = (&current.received.name, current.received.origin());
        let (of, at) = ((&name[..], &current.subvol), (&origin, current.at));
        subvolume::checkpoint(self.to, of, at, current.checkpoints)
            .map_err(failing(name, "making a checkpoint"))?;
        current.checkpoint = Instant::now();
        current.checkpoint_at = current.at.commands;
        current.checkpoints += 1;
        Ok(())
    }

    /// The subvolume has all its commands.
    fn complete(&mut self) -> Result<(), Error> {
        let Some(current) = self.current.take() else { return Ok(()) };
        let name = &current.received.name;
        let done = match current.skip {
            Skip::All { sealed: true } => Ok(()),
            Skip::All { sealed: false } => subvolume::seal(self.to, name),
            Skip::Nothing => subvolume::complete(self.to, name, &current.received.sent),
            Skip::To(_) => {
                return Err(Error::Taken { name: shown(name), why: Taken::OtherStream });
            }
        };
        done.map_err(failing(name, "completing it"))?;
        self.observer.completed(name);
        self.summary.subvolumes.push(current.received);
        Ok(())
    }

    /// Receiving ends before the stream does: the subvolume gets its position.
    fn leave(&mut self) {
        let Some(current) = self.current.take().filter(|c| c.skip == Skip::Nothing) else { return };
        if let Err(e) = subvolume::stop(self.to, &current.received.origin(), current.at) {
            tracing::warn!("{}: its position is not noted: {e}", shown(&current.received.name));
        }
    }
}

impl Position {
    /// A command more.
    fn pass(&mut self, frame: &Frame<'_>) {
        self.commands += 1;
        self.digest = digest(self.digest, frame);
    }
}

fn digest(before: u32, frame: &Frame<'_>) -> u32 {
    crc32c_raw(before, &frame.checksum().to_le_bytes())
}

fn failure(frame: &Frame<'_>, source: crate::BoxError) -> Failure {
    let (command, path) = match frame.command() {
        Ok(command) => (command.name(), command.path().map(shown).unwrap_or_default()),
        Err(_) => ("command", String::new()),
    };
    Failure { offset: frame.offset(), command, path, source }
}
