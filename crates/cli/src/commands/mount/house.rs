//! The daemon's mounts: how they move in, how they move out, and the end of the last one.
//!
//! - *A program asks at the door.* Options of the whole file system must be as they are. The
//!   porter of the new mount makes it, and a thread serves it.
//! - *A mount ends, others stay.* What only this mount held is deleted. Everything becomes durable.
//!   The result goes to the state file, the porter tidies up and ends, and the lock of the state
//!   file is released: `larder umount` of this mount returns.
//! - *The last mount ends.* No further mount is let in. The engine is closed, the result goes to
//!   the state file, the porter tidies up, and the process exits.
//! - *A signal comes.* No further mount is let in. Each mount is unmounted by its own porter; one
//!   that is in use is taken out of sight, and ends with its last user.
//!
//! A mount whose porter was killed cannot be unmounted. After a signal the daemon does not wait for
//! such mounts: everything is made durable, and they die with the process.

use super::{request, tidy_up};
use crate::door::{Answer, Asker, Door, Wanted};
use crate::failure;
use crate::image::advise_filesystem;
use crate::mount_options::MountWishes;
use crate::mount_options::whole::{self, Settings};
use crate::print;
use crate::state::{self, Claim, Outcome, Stage};
use anyhow::Context;
use larder_fs::Filesystem;
use larder_fuse::porter::{self, End};
use larder_fuse::{Family, JoinError, Left, Member, Mounted, Porter, Stats, serve_beside};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};

/// What belongs to one mount.
pub(super) struct Occupant {
    pub(super) member: Arc<Member>,
    pub(super) porter: Porter,
    pub(super) claim: Claim,
}

/// A mount that has moved in.
struct Room {
    /// Its own.
    number: u64,
    porter: Porter,
    claim: Claim,
    /// How it ended, if it was the last one.
    ended: Option<anyhow::Result<()>>,
    /// It should have been unmounted, and nobody can.
    stuck: bool,
}

#[derive(Default)]
struct Rooms {
    list: Vec<Room>,
    moved_in: u64,
    /// The last one has moved out.
    empty: bool,
}

/// A daemon with its mounts.
pub(super) struct House {
    image: PathBuf,
    settings: Settings,
    family: Arc<Family>,
    /// Until it is closed. Locked while a mount is let in.
    fs: RwLock<Option<Arc<Filesystem>>>,
    door: Option<PathBuf>,
    rooms: Mutex<Rooms>,
    changed: Condvar,
}

impl House {
    pub(super) fn new(
        image: &Path,
        settings: Settings,
        family: Arc<Family>,
        fs: Arc<Filesystem>,
        door: Option<PathBuf>,
    ) -> Arc<Self> {
        Arc::new(Self {
            image: image.to_owned(),
            settings,
            family,
            fs: RwLock::new(Some(fs)),
            door,
            rooms: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a mount, on a thread of its own. `told` is called once: when it is ready — true: FUSE
    /// over io_uring was turned on for it — or if it cannot be served. If it says no, nobody wants
    /// the mount any more.
    pub(super) fn move_in(
        self: &Arc<Self>,
        occupant: Occupant,
        mounted: Mounted,
        told: impl FnOnce(Result<bool, String>) -> bool + Send + 'static,
    ) {
        let Occupant { member, porter, claim } = occupant;
        let mut rooms = self.rooms();
        let number = rooms.moved_in;
        rooms.moved_in += 1;
        let room = Room { number, porter: porter.clone(), claim, ended: None, stuck: false };
        rooms.list.push(room);
        drop(rooms);
        let house = Arc::clone(self);
        let live = move || {
            let enabled_uring = mounted.enabled_uring;
            let mut told = Some(told);
            let served = serve_beside(&house.family, &member, mounted, Arc::<Stats>::default(), |_| {
                house.reached(number, Stage::Serving);
                if told.take().is_some_and(|told| !told(Ok(enabled_uring)))
                    && let Err(e) = porter.unmount().or_else(|_| porter.detach())
                {
                    tracing::warn!("a mount that nobody waits for cannot be taken away: {e}");
                }
            });
            let was_ready = told.is_none();
            if let (Err(e), Some(told)) = (&served, told) {
                told(Err(e.to_string()));
            }
            house.move_out(number, member, served.map_err(anyhow::Error::new), was_ready);
        };
        if let Err(e) = std::thread::Builder::new().name("larder-mount".into()).spawn(live) {
            // With the thread the mount and what would have been told are gone.
            tracing::error!("a mount cannot be served: {e}");
            self.forget(number, anyhow::Error::new(e).context("starting a thread for the mount"));
        }
    }

    fn reached(&self, number: u64, stage: Stage) {
        if let Some(room) = self.rooms().list.iter_mut().find(|room| room.number == number) {
            room.claim.reached(stage);
        }
    }

    /// A mount that never came to be served; the only one, perhaps.
    fn forget(&self, number: u64, why: anyhow::Error) {
        let mut rooms = self.rooms();
        if rooms.list.len() == 1 {
            rooms.empty = true;
            rooms.list[0].ended = Some(Err(why));
        } else {
            rooms.list.retain(|room| room.number != number);
        }
        drop(rooms);
        self.changed.notify_all();
    }

    /// The session of a mount has ended.
    fn move_out(&self, number: u64, member: Arc<Member>, served: anyhow::Result<()>, was_ready: bool) {
        if was_ready {
            self.reached(number, Stage::Ending);
        }
        let mut ended = served;
        if self.family.members().len() > 1 {
            // Still one of the family, so that nobody closes the file system meanwhile.
            member.filesystem().leave();
            let synced = member.filesystem().sync().context("syncing");
            ended = ended.and(synced);
        }
        let left = self.family.leave(&member);
        // With it goes a reference to the file system, which is to be closed.
        drop(member);
        if left == Left::Nobody {
            let mut rooms = self.rooms();
            rooms.empty = true;
            if let Some(room) = rooms.list.iter_mut().find(|room| room.number == number) {
                room.ended = Some(ended);
            }
        } else {
            let room = {
                let mut rooms = self.rooms();
                let at = rooms.list.iter().position(|room| room.number == number);
                at.map(|at| rooms.list.remove(at))
            };
            if let Some(room) = room {
                conclude_one_of_several(room, was_ready.then_some(&ended));
            }
        }
        self.changed.notify_all();
    }

    /// Lets further mounts in, from now on.
    pub(super) fn receive(self: &Arc<Self>, door: Door) {
        let house = Arc::downgrade(self);
        let work = move || {
            loop {
                let visit = match door.next() {
                    Ok(visit) => visit,
                    Err(e) => return tracing::warn!("no further mounts can be made: {e}"),
                };
                // An asker without an answer sees that its descriptors are closed.
                let Some(house) = house.upgrade() else { return };
                let (wanted, porter, state, asker) = visit.take();
                let let_in = move || house.let_in(&wanted, porter, state, asker);
                if let Err(e) = std::thread::Builder::new().name("larder-visit".into()).spawn(let_in) {
                    tracing::warn!("a further mount cannot be made: {e}");
                }
            }
        };
        if let Err(e) = std::thread::Builder::new().name("larder-door".into()).spawn(work) {
            tracing::warn!("no further mounts can be made: {e}");
        }
    }

    fn let_in(self: &Arc<Self>, wanted: &Wanted, porter: OwnedFd, state: File, asker: Asker) {
        match self.admit(wanted, porter, state) {
            Ok((occupant, mounted)) => self.move_in(occupant, mounted, move |outcome| {
                let answer = match outcome {
                    Ok(enabled_uring) => Answer::Ready { enabled_uring },
                    Err(why) => Answer::Refused { why, hint: None },
                };
                asker.say(&answer).is_ok()
            }),
            Err(answer) => {
                let _ = asker.say(&answer);
            }
        }
    }

    /// Makes a further mount, if it may be.
    fn admit(&self, wanted: &Wanted, porter: OwnedFd, state: File) -> Result<(Occupant, Mounted), Answer> {
        let wishes = MountWishes::parse(wanted.options.iter().map(String::as_str));
        let wishes = wishes.map_err(|why| Answer::Refused { why, hint: None })?;
        self.agree(wanted, &wishes)?;
        let member = self.join(wanted, &wishes)?;
        let read_only = wishes.read_only;
        let claim = Claim::take_over(state, &self.image, &wanted.mountpoint, read_only, wanted.porter);
        let porter = Porter::at(porter, &wanted.mountpoint);
        let mounted = porter.mount(request(&wishes)).map_err(|e| e.to_string());
        match (claim.map_err(|e| format!("{e:#}")), mounted) {
            (Ok(claim), Ok(mounted)) => Ok((Occupant { member, porter, claim }, mounted)),
            (claim, mounted) => {
                if mounted.is_ok() {
                    let _ = porter.detach();
                }
                if self.family.leave(&member) == Left::Nobody {
                    self.rooms().empty = true;
                    self.changed.notify_all();
                }
                let why = mounted.err().or_else(|| claim.err()).unwrap_or_default();
                Err(Answer::Refused { why, hint: None })
            }
        }
    }

    /// Is what is said about the whole file system as it is?
    fn agree(&self, wanted: &Wanted, wishes: &MountWishes) -> Result<(), Answer> {
        let at = || {
            let members = self.family.members();
            let first = members.first().map(|m| m.mountpoint().display().to_string());
            first.unwrap_or_else(|| "a directory".to_owned())
        };
        if let Some((said, is)) = whole::conflict(&wanted.whole, &self.settings) {
            let option = said.split('=').next().unwrap_or(said);
            return Err(Answer::Refused {
                why: format!(
                    "{said} is an option of the whole file system, which is mounted on {} with {is}",
                    at()
                ),
                hint: Some(format!(
                    "leave {option} out, or unmount all mounts of the image and mount it again"
                )),
            });
        }
        let opened_for_reading = || {
            let fs = self.fs.read().unwrap_or_else(PoisonError::into_inner);
            fs.as_ref().is_some_and(|fs| fs.is_opened_read_only())
        };
        if !wishes.read_only && opened_for_reading() {
            return Err(Answer::Refused {
                why: format!(
                    "its first mount, on {}, was made with ro, so the image is open for reading only",
                    at()
                ),
                hint: Some(
                    "mount this one with -o ro, too; or unmount the image, and mount it first where it is to be \
                     written"
                        .to_owned(),
                ),
            });
        }
        Ok(())
    }

    fn join(&self, wanted: &Wanted, wishes: &MountWishes) -> Result<Arc<Member>, Answer> {
        let fs = self.fs.read().unwrap_or_else(PoisonError::into_inner);
        let ending = || Answer::Ending { pid: std::process::id() };
        let fs = fs.as_ref().ok_or_else(ending)?;
        let front = advise_filesystem(fs.another(&wishes.subvol), &self.image.display().to_string());
        let front = front.map_err(|e| {
            let said = failure::text(&e);
            let (why, hint) = said.split_once("\nhint: ").map_or((&said[..], None), |(w, h)| (w, Some(h)));
            let why = why.trim_start_matches("larder: ").to_owned();
            Answer::Refused { why, hint: hint.map(str::to_owned) }
        })?;
        let joined = self.family.join(Arc::clone(&front), &wanted.mountpoint, &request(wishes));
        joined.map_err(|e| {
            front.leave();
            let why = e.to_string();
            match e {
                JoinError::Closing => ending(),
                JoinError::Writeback { mountpoint, mine } => {
                    let hint = if mine {
                        "leave writeback out".to_owned()
                    } else {
                        format!("unmount {} and mount it without writeback", mountpoint.display())
                    };
                    Answer::Refused { why, hint: Some(hint) }
                }
            }
        })
    }

    /// A signal: every mount ends. While files of one are in use it is taken out of sight and what
    /// was done is made durable at once; it then ends with its last user.
    fn end_all(&self) {
        self.family.close();
        let all: Vec<_> = self.rooms().list.iter().map(|r| (r.number, r.porter.clone())).collect();
        let mut busy = false;
        for (number, porter) in all {
            let Err(error) = porter.unmount() else { continue };
            if porter::is_gone(&error) {
                if let Some(room) = self.rooms().list.iter_mut().find(|room| room.number == number) {
                    room.stuck = true;
                }
                self.changed.notify_all();
                continue;
            }
            if let Err(e) = porter.detach() {
                tracing::warn!("cannot unmount: {e}");
            }
            busy = true;
        }
        let fs = self.fs.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(Err(e)) = fs.filter(|_| busy).map(|fs| fs.sync()) {
            tracing::warn!("syncing failed: {e}");
        }
    }

    /// Waits until the last mount has gone, and closes the file system.
    pub(super) fn stay(self: Arc<Self>) -> anyhow::Result<()> {
        let over = |rooms: &Rooms| {
            let stuck = !rooms.list.is_empty() && rooms.list.iter().all(|room| room.stuck);
            stuck || rooms.empty && rooms.list.iter().all(|room| room.ended.is_some())
        };
        let mut rooms = self.rooms();
        while !over(&rooms) {
            rooms = self.changed.wait(rooms).unwrap_or_else(PoisonError::into_inner);
        }
        let last = std::mem::take(&mut rooms.list);
        drop(rooms);
        let fs = self.fs.write().unwrap_or_else(PoisonError::into_inner).take();
        let closed = self.family.take_closed().or_else(|| fs.as_ref().map(|fs| fs.close()));
        let closed = closed.unwrap_or(Ok(())).map_err(anyhow::Error::new);
        // The image is free again before anybody learns that we are done.
        drop(fs);
        self.conclude(last, closed)
    }

    /// Leaves the results in the state files, and has the porters tidy up.
    fn conclude(&self, last: Vec<Room>, closed: anyhow::Result<()>) -> anyhow::Result<()> {
        let lost = || format!("{}: the last changes may be lost", self.image.display());
        let (mut result, mut stuck) = (closed, false);
        for room in last {
            result = result.and(room.ended.unwrap_or(Ok(())));
            let left = room.claim.finish(outcome_of(&result));
            let mountpoint = room.porter.mountpoint();
            room.porter.dismiss(End::Daemon, || {
                tidy_up(End::Daemon, mountpoint, &self.image, self.door.as_deref());
            });
            if room.stuck {
                stuck = true;
                print::say(&format!(
                    "larder: the process that unmounts is gone: `larder umount {}` clears the mount",
                    print::path(mountpoint)
                ));
            }
            if let Err(e) = left {
                print::say(&failure::text(&e));
            }
        }
        let result = result.with_context(lost);
        if stuck {
            // Threads still serve what is left of such mounts; they end with the process.
            if let Err(e) = result {
                print::say(&failure::text(&e));
            }
            std::process::exit(i32::from(failure::FAILED));
        }
        result
    }
}

fn outcome_of(result: &anyhow::Result<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::Clean,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    }
}

/// Leaves the result, if there ever was a mount.
fn conclude_one_of_several(room: Room, ended: Option<&anyhow::Result<()>>) {
    let Room { porter, claim, .. } = room;
    let tidy = || porter.dismiss(End::Mount, || state::tidy_up(porter.mountpoint()));
    let Some(ended) = ended else { return tidy() };
    if let Err(e) = claim.finish_one_of_several(outcome_of(ended), tidy) {
        tracing::warn!("the result of a mount cannot be told: {e:#}");
    }
}

/// Ends all mounts when asked to.
pub(super) fn obey(mut signals: Signals, house: &Arc<House>) {
    let house: Weak<House> = Arc::downgrade(house);
    let work = move || {
        for signal in signals.forever() {
            tracing::info!(signal, "unmounting");
            let Some(house) = house.upgrade() else { return };
            house.end_all();
        }
    };
    if let Err(e) = std::thread::Builder::new().name("signals".into()).spawn(work) {
        tracing::warn!("signals will not unmount: {e}");
    }
}
