//! What moves, again and again until the writers are done.

use super::members::{disk, number_in};
use super::{Moving, Scene};
use crate::device::{Seq, SimDevice};
use larder_format::DeviceId;
use larder_fs::mkfs::Profile;
use larder_fs::{
    BalanceControl, BalanceStatus, BalanceWish, Clearing, DataMay, Error, Filesystem, Filters,
    Outcome, ReplaceControl, ReplaceOptions, ReplaceSource,
};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::ops::{ControlFlow, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most rounds.
const ROUNDS: u64 = 6;

/// Moves what a scene says.
pub(crate) struct Mover<'a> {
    pub(crate) fs: &'a Filesystem,
    pub(crate) device: &'a Arc<SimDevice>,
    pub(crate) scene: Scene,
    pub(crate) seed: u64,
    /// A disk fails meanwhile: what cannot be done without it may be refused.
    pub(crate) may_refuse: bool,
    /// A conversion has left chunks as they were, because the disks had no room for them. Then
    /// nothing remembers it.
    pub(crate) stayed: AtomicBool,
    /// When something ended, from its last step on.
    pub(crate) ends: Mutex<Vec<RangeInclusive<Seq>>>,
}

impl<'a> Mover<'a> {
    pub(crate) fn new(fs: &'a Filesystem, device: &'a Arc<SimDevice>, scene: Scene) -> Self {
        let (stayed, ends) = (AtomicBool::default(), Mutex::default());
        Self { fs, device, scene, seed: 0, may_refuse: false, stayed, ends }
    }

    /// Goes on until `over`, and once in any case.
    ///
    /// # Errors
    /// Something could not be moved.
    pub(crate) fn run(&self, over: &AtomicBool) -> Result<(), String> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        for round in 0..ROUNDS {
            let begin = self.device.mark();
            match self.round(round, &mut rng) {
                Err(e) if self.may_refuse && is_refusal(&e) => return Ok(()),
                done => done.map_err(|e| format!("{}, round {round}: {e}", self.scene.name()))?,
            }
            self.ends.lock().push(begin..=self.device.mark());
            let once = matches!(self.scene.moving, Moving::Missing | Moving::BadTarget);
            if over.load(Ordering::Relaxed) || once {
                break;
            }
        }
        Ok(())
    }

    /// Everything once.
    ///
    /// # Errors
    /// It could not be moved.
    pub(crate) fn round(&self, round: u64, rng: &mut StdRng) -> Result<(), Error> {
        match self.scene.moving {
            Moving::Relocate => self.relocate(),
            Moving::Balance => self.balance(&every_chunk()),
            Moving::Convert => self.balance(&self.conversion(round)),
            Moving::Remove => self.remove(rng),
            Moving::Resize => self.resize(rng),
            Moving::Replace | Moving::Missing | Moving::BadTarget => self.replace(rng),
        }
    }

    fn relocate(&self) -> Result<(), Error> {
        for group in self.fs.block_groups() {
            match self.fs.relocate(group.start, &mut |_| ControlFlow::Continue(())) {
                // A commit has taken it out, or there is no other place.
                Ok(_) | Err(Error::NotFound | Error::NoSpace) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn conversion(&self, round: u64) -> BalanceWish {
        let kind = self.scene.kind;
        let (data, metadata) = match round % 2 {
            0 => self.scene.to,
            _ => (kind.data, kind.metadata),
        };
        convert(data, metadata)
    }

    fn balance(&self, wish: &BalanceWish) -> Result<(), Error> {
        let control = BalanceControl::new();
        match self.fs.balance(wish, DataMay::KeepRedundancy, &control) {
            Err(Error::NoSpace) => {
                self.stayed.store(true, Ordering::Relaxed);
                return Ok(());
            }
            balanced => balanced?,
        }
        match control.state() {
            state if state.status == BalanceStatus::Finished => {
                self.stayed.fetch_or(state.left > 0, Ordering::Relaxed);
                Ok(())
            }
            state => Err(Error::Unsupported(format!("the balance has ended: {state:?}"))),
        }
    }

    /// The disk that is no member, by its number.
    fn spare(&self) -> Option<usize> {
        let taken: Vec<usize> = self.disks().into_iter().map(|(_, number)| number).collect();
        let all = 0..self.device.image().sizes().len();
        all.rev().find(|n| !taken.contains(n) && disk(self.device, *n).is_some())
    }

    /// The devices that are there, with the numbers of their disks.
    fn disks(&self) -> Vec<(DeviceId, usize)> {
        let devices = self.fs.devices().into_iter();
        devices.filter_map(|d| Some((DeviceId(d.id), number_in(&d.name?)?))).collect()
    }

    fn remove(&self, rng: &mut StdRng) -> Result<(), Error> {
        if let Some(spare) = self.spare() {
            let begin = self.device.mark();
            let joins = disk(self.device, spare).expect("it is there");
            self.fs.add_device(joins)?;
            self.ends.lock().push(begin..=self.device.mark());
        }
        let devices = self.disks();
        // The newest stays.
        let (leaves, _) = *devices[..devices.len() - 1].choose(rng).expect("several");
        let mut last = self.device.mark();
        let watch = &mut |_: Clearing| {
            last = self.device.mark();
            ControlFlow::Continue(())
        };
        let outcome = self.fs.remove_device(leaves, watch)?;
        self.ends.lock().push(last..=self.device.mark());
        is_done(outcome)
    }

    fn resize(&self, rng: &mut StdRng) -> Result<(), Error> {
        let on = &mut |_: Clearing| ControlFlow::Continue(());
        let (id, _) = *self.disks().choose(rng).expect("there are devices");
        let begin = self.device.mark();
        match self.fs.shrink_device(id, on) {
            Ok((_, outcome)) => is_done(outcome)?,
            Err(Error::DoesNotFit(_)) => {}
            Err(e) => return Err(e),
        }
        self.ends.lock().push(begin..=self.device.mark());
        let most = self.fs.device_bytes(id)?;
        is_done(self.fs.resize_device(id, most, on)?)
    }

    fn replace(&self, rng: &mut StdRng) -> Result<(), Error> {
        let missing = self.fs.info().missing_devices.first().map(|d| d.id);
        let source = match missing {
            Some(id) => id,
            None => self.disks().choose(rng).expect("there are devices").0,
        };
        let Some(spare) = self.spare() else { return Ok(()) };
        let target = disk(self.device, spare).expect("it is there");
        if target.size() < self.fs.devices().iter().find(|d| d.id == source.0).map_or(0, |d| d.size)
        {
            // The spare one is what a larger one has replaced before.
            return Ok(());
        }
        let read = if rng.random_bool(0.3) { ReplaceSource::Avoid } else { ReplaceSource::Use };
        let control = ReplaceControl::default();
        match self.fs.replace_device(ReplaceOptions { source, read }, target, &control) {
            Err(Error::Unsupported(_) | Error::Volume(_))
                if self.scene.moving == Moving::BadTarget =>
            {
                Ok(())
            }
            done => done,
        }
    }
}

fn is_done(outcome: Outcome) -> Result<(), Error> {
    match outcome {
        Outcome::Done => Ok(()),
        Outcome::Stopped => Err(Error::Busy("it was told to end by nobody")),
    }
}

/// May this be because a disk fails?
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Unsupported(_) | Error::NoSpace | Error::DoesNotFit(_) | Error::Busy(_))
        || matches!(error, Error::Volume(_))
}

/// A balance of everything.
fn every_chunk() -> BalanceWish {
    let all = Some(Filters::default());
    BalanceWish { data: all.clone(), metadata: all.clone(), system: all, force: true }
}

/// A balance that converts everything to these profiles.
fn convert(data: Profile, metadata: Profile) -> BalanceWish {
    let set = |p: Profile| Some(format!("convert={}", p.name()).parse().expect("a filter"));
    BalanceWish { data: set(data), metadata: set(metadata), system: set(metadata), force: true }
}
