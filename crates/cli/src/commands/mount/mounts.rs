//! The daemon's mounts: how they begin, how they end, and the end of the last one.
//!
//! - *A program asks at the socket for a mount.* Options of the whole file system must be as they
//!   are. The mount helper of the new mount makes it, and a thread serves it.
//! - *A program asks for a stream.* Module `sends` writes it.
//! - *A program asks for long work: a scrub, a balance, a change of devices.* Module `jobs` has
//!   it, and goes on with what the last mount has left.
//! - *A mount ends, others stay.* What only this mount held is deleted. Everything becomes durable.
//!   The result goes to the state file, the mount helper tidies up and ends, and the lock of the
//!   state file is released: `larder umount` of this mount returns.
//! - *The last mount ends.* No further mount is let in. Streams and long work end, the
//!   engine is closed, the result goes to the state file, the mount helper tidies
//!   up, and the process exits.
//! - *A signal comes.* No further mount is let in. Each mount is unmounted by its own mount helper;
//!   one that is in use is taken out of sight, and ends with its last user.
//!
//! A mount whose mount helper was killed cannot be unmounted. After a signal the daemon does not
//! wait for such mounts: everything is made durable, and they die with the process.

use super::jobs::Jobs;
use super::sends::Sends;
use super::{request, tidy_up};
use crate::attach::{Answer, AttachSocket, MountRequest, Received, Requester};
use crate::failure;
use crate::image::advise_filesystem;
use crate::mount_options::MountWishes;
use crate::mount_options::whole::{self, Settings};
use crate::print;
use crate::state::{self, Claim, Outcome, Stage};
use anyhow::Context;
use larder_fs::Filesystem;
use larder_fuse::helper::{self, Ended};
use larder_fuse::{
    JoinError, Member, MountGroup, MountHelper, Mounted, Remaining, Stats, serve_member,
};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};

/// What belongs to one mount.
pub(super) struct NewMount {
    pub(super) member: Arc<Member>,
    pub(super) helper: MountHelper,
    pub(super) claim: Claim,
}

/// A mount that is served.
struct ServedMount {
    /// Its own.
    number: u64,
    helper: MountHelper,
    claim: Claim,
    /// How it ended, if it was the last one.
    ended: Option<anyhow::Result<()>>,
    /// It should have been unmounted, but its porter is gone.
    stuck: bool,
}

#[derive(Default)]
struct ServedMounts {
    list: Vec<ServedMount>,
    started: u64,
    /// The last mount has ended.
    empty: bool,
}

/// A daemon with its mounts.
pub(super) struct Mounts {
    image: PathBuf,
    settings: Settings,
    group: Arc<MountGroup>,
    /// Until it is closed. Locked while a mount is let in.
    fs: RwLock<Option<Arc<Filesystem>>>,
    socket: Option<PathBuf>,
    served: Mutex<ServedMounts>,
    changed: Condvar,
    sends: Sends,
    jobs: Jobs,
}

impl Mounts {
    pub(super) fn new(
        image: &Path,
        settings: Settings,
        group: Arc<MountGroup>,
        fs: Arc<Filesystem>,
        socket: Option<PathBuf>,
    ) -> Arc<Self> {
        Arc::new(Self {
            image: image.to_owned(),
            settings,
            group,
            fs: RwLock::new(Some(fs)),
            socket,
            served: Mutex::default(),
            changed: Condvar::new(),
            sends: Sends::default(),
            jobs: Jobs::default(),
        })
    }

    fn served(&self) -> MutexGuard<'_, ServedMounts> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a mount on a thread of its own. `told` is called once: when the mount is ready (true
    /// if FUSE over io_uring was turned on for it), or when it cannot be served. If `told` returns
    /// false, the requester has gone and the mount ends.
    pub(super) fn start(
        self: &Arc<Self>,
        new: NewMount,
        mounted: Mounted,
        told: impl FnOnce(Result<bool, String>) -> bool + Send + 'static,
    ) {
        let NewMount { member, helper, claim } = new;
        let mut served = self.served();
        let number = served.started;
        served.started += 1;
        let one = ServedMount { number, helper: helper.clone(), claim, ended: None, stuck: false };
        served.list.push(one);
        drop(served);
        let mounts = Arc::clone(self);
        let live = move || {
            let enabled_uring = mounted.enabled_uring;
            let mut told = Some(told);
            let served =
                serve_member(&mounts.group, &member, mounted, Arc::<Stats>::default(), |_| {
                    mounts.reached(number, Stage::Serving);
                    if told.take().is_some_and(|told| !told(Ok(enabled_uring)))
                        && let Err(e) = helper.unmount().or_else(|_| helper.detach())
                    {
                        tracing::warn!("a mount whose requester is gone cannot be unmounted: {e}");
                    }
                });
            let was_ready = told.is_none();
            if let (Err(e), Some(told)) = (&served, told) {
                told(Err(e.to_string()));
            }
            mounts.finish(number, member, served.map_err(anyhow::Error::new), was_ready);
        };
        if let Err(e) = std::thread::Builder::new().name("larder-mount".into()).spawn(live) {
            // The mount and `told` are gone with the thread.
            tracing::error!("a mount cannot be served: {e}");
            self.forget(number, anyhow::Error::new(e).context("starting a thread for the mount"));
        }
    }

    fn reached(&self, number: u64, stage: Stage) {
        if let Some(one) = self.served().list.iter_mut().find(|one| one.number == number) {
            one.claim.reached(stage);
        }
    }

    /// Forgets a mount that was never served; perhaps it was the only one.
    fn forget(&self, number: u64, why: anyhow::Error) {
        let mut served = self.served();
        if served.list.len() == 1 {
            served.empty = true;
            served.list[0].ended = Some(Err(why));
        } else {
            served.list.retain(|one| one.number != number);
        }
        drop(served);
        self.changed.notify_all();
    }

    /// The session of a mount has ended.
    fn finish(
        &self,
        number: u64,
        member: Arc<Member>,
        served: anyhow::Result<()>,
        was_ready: bool,
    ) {
        if was_ready {
            self.reached(number, Stage::Ending);
        }
        let mut ended = served;
        if self.group.members().len() > 1 {
            // It is still one of the group, so that no other mount closes the file system
            // meanwhile.
            member.filesystem().leave();
            let synced = member.filesystem().sync().context("syncing");
            ended = ended.and(synced);
        }
        let left = self.group.leave(&member);
        // With it goes a reference to the file system, which is to be closed.
        drop(member);
        if left == Remaining::Nobody {
            let mut served = self.served();
            served.empty = true;
            if let Some(one) = served.list.iter_mut().find(|one| one.number == number) {
                one.ended = Some(ended);
            }
        } else {
            let one = {
                let mut served = self.served();
                let at = served.list.iter().position(|one| one.number == number);
                at.map(|at| served.list.remove(at))
            };
            if let Some(one) = one {
                conclude_one_of_several(one, was_ready.then_some(&ended));
            }
        }
        self.changed.notify_all();
    }

    /// Lets further mounts in and writes streams, from now on.
    pub(super) fn accept_requests(self: &Arc<Self>, socket: AttachSocket) {
        let mounts = Arc::downgrade(self);
        let work = move || {
            loop {
                let received = match socket.next() {
                    Ok(received) => received,
                    Err(e) => return tracing::warn!("nothing more can be asked for: {e}"),
                };
                // A requester without an answer sees that its descriptors are closed.
                let Some(mounts) = mounts.upgrade() else { return };
                let answer = move || mounts.answer(received);
                if let Err(e) =
                    std::thread::Builder::new().name("larder-received".into()).spawn(answer)
                {
                    tracing::warn!("what was asked for cannot be done: {e}");
                }
            }
        };
        if let Err(e) = std::thread::Builder::new().name("larder-socket".into()).spawn(work) {
            tracing::warn!("nothing more can be asked for: {e}");
        }
    }

    fn answer(self: &Arc<Self>, received: Received) {
        match received {
            Received::Mount { wanted, helper, state, requester } => {
                self.answer_mount(&wanted, helper, state, requester);
            }
            Received::Send { wanted, outlet } => {
                self.sends.serve(|| self.open(), &wanted, outlet);
            }
            Received::Job { wanted, files, outlet } => {
                self.jobs.serve(|| self.open(), wanted, files, &outlet);
            }
        }
    }

    /// The file system, until it is closed.
    fn open(&self) -> Option<Arc<Filesystem>> {
        self.fs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Goes on with the replacement of a device that was suspended. It counts as running from now
    /// on.
    pub(super) fn go_on_replacing(self: &Arc<Self>) {
        if let Some(begun) = self.open().and_then(|fs| self.jobs.claim_replacement(&fs)) {
            self.go_on_with("larder-replace", |mounts| {
                mounts.jobs.go_on_replacing(|| mounts.open(), begun);
            });
        }
    }

    /// Goes on with a balance that was under way when the file system was last closed.
    pub(super) fn go_on_with_balance(self: &Arc<Self>) {
        let work = |mounts: &Self| mounts.jobs.go_on_with_balance(|| mounts.open());
        self.go_on_with("larder-balance", work);
    }

    fn go_on_with(self: &Arc<Self>, name: &str, work: impl FnOnce(&Self) + Send + 'static) {
        let mounts = Arc::clone(self);
        let started = std::thread::Builder::new().name(name.into()).spawn(move || work(&mounts));
        if let Err(e) = started {
            tracing::warn!("{name}: what was under way does not go on: {e}");
        }
    }

    fn answer_mount(
        self: &Arc<Self>,
        wanted: &MountRequest,
        helper: OwnedFd,
        state: File,
        requester: Requester,
    ) {
        match self.admit(wanted, helper, state) {
            Ok((new, mounted)) => self.start(new, mounted, move |outcome| {
                let answer = match outcome {
                    Ok(enabled_uring) => Answer::Ready { enabled_uring },
                    Err(why) => Answer::Refused { why, hint: None },
                };
                requester.say(&answer).is_ok()
            }),
            Err(answer) => {
                let _ = requester.say(&answer);
            }
        }
    }

    /// Makes a further mount, if it may be.
    fn admit(
        &self,
        wanted: &MountRequest,
        helper: OwnedFd,
        state: File,
    ) -> Result<(NewMount, Mounted), Answer> {
        let wishes = MountWishes::parse(wanted.options.iter().map(String::as_str));
        let wishes = wishes.map_err(|why| Answer::Refused { why, hint: None })?;
        self.agree(wanted, &wishes)?;
        let member = self.join(wanted, &wishes)?;
        let read_only = wishes.read_only;
        let claim =
            Claim::take_over(state, &self.image, &wanted.mountpoint, read_only, wanted.helper)
                .map(|claim| claim.with_socket(self.socket.as_deref()));
        let helper = MountHelper::from_socket(helper, &wanted.mountpoint);
        let mounted = helper.mount(request(&wishes)).map_err(|e| e.to_string());
        match (claim.map_err(|e| format!("{e:#}")), mounted) {
            (Ok(claim), Ok(mounted)) => Ok((NewMount { member, helper, claim }, mounted)),
            (claim, mounted) => {
                if mounted.is_ok() {
                    let _ = helper.detach();
                }
                if self.group.leave(&member) == Remaining::Nobody {
                    self.served().empty = true;
                    self.changed.notify_all();
                }
                let why = mounted.err().or_else(|| claim.err()).unwrap_or_default();
                Err(Answer::Refused { why, hint: None })
            }
        }
    }

    /// Checks that options of the whole file system are as they are already.
    fn agree(&self, wanted: &MountRequest, wishes: &MountWishes) -> Result<(), Answer> {
        let at = || {
            let members = self.group.members();
            let first = members.first().map(|m| m.mountpoint().display().to_string());
            first.unwrap_or_else(|| "a directory".to_owned())
        };
        if let Some((said, is)) = whole::conflict(&wanted.whole, &self.settings) {
            let option = said.split('=').next().unwrap_or(said);
            return Err(Answer::Refused {
                why: format!(
                    "{said} is an option of the whole file system, which is mounted on {} with \
                        {is}",
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
                    "its first mount, on {}, was made with ro, so the image is open for reading \
                        only",
                    at()
                ),
                hint: Some(
                    "mount this one with -o ro, too; or unmount the image, and make the writable \
                     mount first"
                        .to_owned(),
                ),
            });
        }
        Ok(())
    }

    fn join(&self, wanted: &MountRequest, wishes: &MountWishes) -> Result<Arc<Member>, Answer> {
        let fs = self.fs.read().unwrap_or_else(PoisonError::into_inner);
        let ending = || Answer::Ending { pid: std::process::id() };
        let fs = fs.as_ref().ok_or_else(ending)?;
        let front =
            advise_filesystem(fs.another(&wishes.subvol), &self.image.display().to_string());
        let front = front.map_err(|e| {
            let said = failure::text(&e);
            let (why, hint) =
                said.split_once("\nhint: ").map_or((&said[..], None), |(w, h)| (w, Some(h)));
            let why = why.trim_start_matches("larder: ").to_owned();
            Answer::Refused { why, hint: hint.map(str::to_owned) }
        })?;
        let joined = self.group.join(Arc::clone(&front), &wanted.mountpoint, &request(wishes));
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
        self.group.close();
        let all: Vec<_> = self.served().list.iter().map(|r| (r.number, r.helper.clone())).collect();
        let mut busy = false;
        for (number, helper) in all {
            let Err(error) = helper.unmount() else { continue };
            if helper::is_gone(&error) {
                if let Some(one) = self.served().list.iter_mut().find(|one| one.number == number) {
                    one.stuck = true;
                }
                self.changed.notify_all();
                continue;
            }
            if let Err(e) = helper.detach() {
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
    pub(super) fn wait_for_the_last(self: Arc<Self>) -> anyhow::Result<()> {
        let over = |served: &ServedMounts| {
            let stuck = !served.list.is_empty() && served.list.iter().all(|one| one.stuck);
            stuck || served.empty && served.list.iter().all(|one| one.ended.is_some())
        };
        let mut served = self.served();
        while !over(&served) {
            served = self.changed.wait(served).unwrap_or_else(PoisonError::into_inner);
        }
        let last = std::mem::take(&mut served.list);
        drop(served);
        self.sends.end();
        self.jobs.end();
        let fs = self.fs.write().unwrap_or_else(PoisonError::into_inner).take();
        let closed = self.group.take_closed().or_else(|| fs.as_ref().map(|fs| fs.close()));
        let closed = closed.unwrap_or(Ok(())).map_err(anyhow::Error::new);
        // The image is free again before a waiter learns of the end.
        drop(fs);
        self.conclude(last, closed)
    }

    /// Leaves the results in the state files, and has the mount helpers tidy up.
    fn conclude(&self, last: Vec<ServedMount>, closed: anyhow::Result<()>) -> anyhow::Result<()> {
        let lost = || format!("{}: the last changes may be lost", self.image.display());
        let (mut result, mut stuck) = (closed, false);
        for one in last {
            result = result.and(one.ended.unwrap_or(Ok(())));
            let left = one.claim.finish(outcome_of(&result));
            let mountpoint = one.helper.mountpoint();
            one.helper.dismiss(Ended::Daemon, || {
                tidy_up(Ended::Daemon, mountpoint, &self.image, self.socket.as_deref());
            });
            if one.stuck {
                stuck = true;
                print::say(&format!(
                    "larder: the process that unmounts is gone: `larder umount {}` clears the \
                        mount",
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
fn conclude_one_of_several(one: ServedMount, ended: Option<&anyhow::Result<()>>) {
    let ServedMount { helper, claim, .. } = one;
    let tidy = || helper.dismiss(Ended::Mount, || state::tidy_up(helper.mountpoint()));
    let Some(ended) = ended else { return tidy() };
    if let Err(e) = claim.finish_one_of_several(outcome_of(ended), tidy) {
        tracing::warn!("the result of a mount cannot be written: {e:#}");
    }
}

/// Ends all mounts when asked to.
pub(super) fn obey(mut signals: Signals, mounts: &Arc<Mounts>) {
    let mounts: Weak<Mounts> = Arc::downgrade(mounts);
    let work = move || {
        for signal in signals.forever() {
            tracing::info!(signal, "unmounting");
            let Some(mounts) = mounts.upgrade() else { return };
            mounts.end_all();
        }
    };
    if let Err(e) = std::thread::Builder::new().name("larder-signals".into()).spawn(work) {
        tracing::warn!("signals will not unmount: {e}");
    }
}
