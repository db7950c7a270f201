//! Long work of a daemon: scrubs, balances, replacements of a device, other changes of devices.
//!
//! A program asks at the socket that something is begun, changed or ended. Work that begins is done
//! on the thread that got the request; of each kind one runs at a time ([`LongJob`]). The program
//! learns how far it is by asking again, or, with changes of devices, as long as they run. Two
//! kinds go on by themselves where the last mount left them: a balance and a replacement.
//!
//! Before the file system is closed, everything is told to end, and each thread has let go of the
//! file system: [`Jobs::end`] waits for that. What was moved stays where it is.

mod balance;
mod devices;
mod long_job;
mod replace;
mod scrub;

use crate::conduit::{Ended, Outlet};
use crate::jobs::{Job, JobRequest};
use crate::{failure, print};
use anyhow::{anyhow, bail};
use balance::Balances;
use devices::DeviceChanges;
use larder_fs::{Filesystem, ReplaceControl};
use long_job::{LongJob, Running};
use replace::Replaces;
use scrub::Scrubs;
use serde::Serialize;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// All kinds of long work.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    scrubs: Scrubs,
    balances: Balances,
    replaces: Replaces,
    device_changes: DeviceChanges,
    /// Threads that use the file system.
    users: Mutex<Users>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Users {
    count: usize,
    /// No more may come.
    ended: bool,
}

/// One of the threads, as long as it uses the file system.
struct User<'a>(&'a Jobs);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.users().count -= 1;
        self.0.changed.notify_all();
    }
}

impl Jobs {
    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> Option<User<'_>> {
        let mut users = self.users();
        if users.ended {
            return None;
        }
        users.count += 1;
        Some(User(self))
    }

    /// Does what is wanted, and answers. `open` gives the file system while it is open.
    pub(super) fn serve(
        &self,
        open: impl FnOnce() -> Option<Arc<Filesystem>>,
        wanted: JobRequest,
        files: Vec<OwnedFd>,
        outlet: &Outlet,
    ) {
        let user = self.enter();
        let fs = user.as_ref().and_then(|_| open());
        let done = match &fs {
            Some(fs) => {
                is_meant(fs, &wanted).and_then(|()| self.obey(fs, wanted.job, files, outlet))
            }
            None => Err(unmounted()),
        };
        drop(fs);
        drop(user);
        if let Err(e) = done {
            refuse(outlet, &e);
        }
    }

    fn obey(
        &self,
        fs: &Filesystem,
        job: Job,
        files: Vec<OwnedFd>,
        outlet: &Outlet,
    ) -> anyhow::Result<()> {
        match job {
            Job::Scrub(order) => self.scrubs.obey(fs, order, files, outlet),
            Job::Balance(order) => self.balances.obey(fs, &order, outlet),
            Job::Replace(order) => self.replaces.obey(fs, &order, files, outlet),
            Job::Devices { order, device } => {
                let device = device.and_then(|device| device.device(files));
                self.device_changes.obey(fs, &order, device, outlet)
            }
        }
    }

    /// Goes on with a balance that was under way when the file system was last closed.
    pub(super) fn go_on_with_balance(&self, open: impl FnOnce() -> Option<Arc<Filesystem>>) {
        let user = self.enter();
        if let Some(fs) = user.as_ref().and_then(|_| open()) {
            self.balances.go_on(&fs);
        }
    }

    /// The replacement of a device that was suspended. It counts as running from now on.
    pub(super) fn claim_replacement(&self, fs: &Filesystem) -> Option<Running<ReplaceControl>> {
        self.replaces.claim(fs)
    }

    /// Goes on with it.
    pub(super) fn go_on_replacing(
        &self,
        open: impl FnOnce() -> Option<Arc<Filesystem>>,
        begun: Running<ReplaceControl>,
    ) {
        let user = self.enter();
        if let Some(fs) = user.as_ref().and_then(|_| open()) {
            replace::go_on(&fs, begun);
        }
    }

    /// Has everything end, and waits until nothing of the file system is in use any more.
    pub(super) fn end(&self) {
        self.users().ended = true;
        self.scrubs.end();
        self.balances.end();
        self.replaces.end();
        self.device_changes.end();
        let mut users = self.users();
        while users.count > 0 {
            users = self.changed.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn unmounted() -> anyhow::Error {
    anyhow!("the image is being unmounted")
}

/// Is the file system the one that the requester sees?
fn is_meant(fs: &Filesystem, wanted: &JobRequest) -> anyhow::Result<()> {
    let is_here = wanted.daemon.is_none_or(|pid| pid == std::process::id());
    if !is_here || wanted.fsid != print::uuid(fs.info().fsid) {
        bail!("the image of the mount is not the one that has its path");
    }
    Ok(())
}

/// Says something to the requester. One that has gone needs no answer.
fn tell(outlet: &Outlet, what: &impl Serialize) {
    let mut out = outlet;
    let _ = out.write_all(&serde_json::to_vec(what).unwrap_or_default());
    outlet.conclude(&Ended::Complete { summary: serde_json::Value::Null });
}

fn refuse(outlet: &Outlet, error: &anyhow::Error) {
    let said = failure::text(error);
    let why = said.strip_prefix("larder: ").unwrap_or(&said).to_owned();
    outlet.conclude(&Ended::Refused { why, hint: None, could_not_run: true });
}
