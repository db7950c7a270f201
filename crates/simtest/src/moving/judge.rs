//! Looks at a crash state of a move.
//!
//! Every state is opened by the disks that belong to it, and must show what the model allows. A
//! conversion of which half is done must be remembered. Then what was interrupted goes on to its
//! end, or is given up: the state's hash decides. In a share of them the move begins anew. The file
//! system is used, closed, found sound by `larder check --data`, and opened again. Of a share of
//! the states as many disks are lost as the profiles tolerate, and all of that is done without
//! them.

use super::members::open;
use super::mover::{Mover, is_refusal};
use super::{Moving, Scene, writers};
use crate::crash::CrashState;
use crate::device::{Seq, SimDevice};
use crate::image::Image;
use crate::judge::{Done, Judge, READ_ONLY, check, check_but_for, check_ourselves};
use crate::walk::walk;
use larder_check::{Finding, Kind as What};
use larder_format::items::BlockGroupFlags;
use larder_fs::{
    BalanceControl, BalanceStatus, Error, FileKind, Filesystem, NewInode, OpenOptions,
    ReplaceControl, ReplaceStatus, ScrubControl, ScrubOptions,
};
use larder_volume::Device;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Share of the states in which the move begins anew.
const ANEW: f64 = 0.12;

/// What is the same for all states of a run.
pub(crate) struct MoveJudge<'a> {
    pub(crate) judge: Judge<'a>,
    pub(crate) scene: Scene,
    /// The disk that failed meanwhile.
    pub(crate) failing: Option<usize>,
    /// A conversion came to its end, and left chunks for which there was no room.
    pub(crate) stayed: bool,
}

/// How a state is looked at.
struct Look<'a> {
    id: u64,
    moments: &'a [Seq],
    /// Disks were lost.
    is_hurt: bool,
}

impl MoveJudge<'_> {
    /// Judges a state.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn state(&self, state: &CrashState, image: &Image) -> Result<Done, String> {
        let mut done = Done::default();
        let (id, judge) = (state.id, &self.judge);
        let mut moments = vec![state.latest, state.earliest];
        moments.dedup();
        let whole = Look { id, moments: &moments, is_hurt: false };
        if judge.chosen(id, judge.depth.ours, 6) && self.failing.is_none() {
            self.check_as_it_is(image)?;
            done.ours += 1;
        }
        if judge.chosen(id, judge.depth.kernel, 4) && self.failing.is_none() {
            done.kernel += u64::from(self.linux(image, &moments)?);
        }
        self.goes_on(&whole, image, &mut done)?;
        for disks in self.losses(id, image) {
            let mut hurt = image.clone();
            disks.iter().for_each(|disk| hurt.lose(*disk));
            let id = hurt.content_hash();
            judge.hurt.lock().insert(id);
            let look = Look { id, moments: &moments, is_hurt: true };
            self.goes_on(&look, &hurt, &mut done)
                .map_err(|e| format!("without disks {disks:?}: {e}"))?;
            done.hurt += 1;
        }
        Ok(done)
    }

    /// The disks that are lost in a state.
    fn losses(&self, id: u64, image: &Image) -> Vec<Vec<usize>> {
        let mishaps = &self.judge.mishaps;
        if mishaps.tolerated == 0 {
            return Vec::new();
        }
        let mut rng = StdRng::seed_from_u64(id);
        let mut all = Vec::new();
        if let Some(disk) = self.failing {
            if rng.random_bool(0.3) {
                all.push(vec![disk]);
            }
        } else if self.judge.chosen(id, mishaps.share, 5) {
            let there = (0..image.sizes().len()).filter(|n| image.sizes()[*n] > 0);
            let mut disks: Vec<usize> = there.collect();
            disks.shuffle(&mut rng);
            disks.truncate(rng.random_range(1..=mishaps.tolerated));
            all.push(disks);
        }
        all
    }

    fn check_as_it_is(&self, image: &Image) -> Result<(), String> {
        let device = Arc::new(SimDevice::new(image.clone()).read_only().unrecorded());
        let options = OpenOptions { read_only: true, ..self.judge.options.clone() };
        let (fs, _) = open(&device, &options).map_err(|e| format!("read-only open: {e}"))?;
        let mut devices = device.devices();
        let names: Vec<String> = fs.devices().into_iter().filter_map(|d| d.name).collect();
        devices.retain(|disk| names.contains(&disk.name()));
        if image.sizes().contains(&0) {
            return Ok(());
        }
        // Where the cut comes between the superblocks of two disks, one is older, and so is what it
        // says of its disk.
        let is_of_its_time = |found: &Finding| found.kind == What::SuperDeviceItem;
        check_but_for(&is_of_its_time, &devices, "as the crash left it")
    }

    /// Opens, goes on and uses a state.
    fn goes_on(&self, look: &Look<'_>, image: &Image, done: &mut Done) -> Result<(), String> {
        let device = Arc::new(SimDevice::new(image.clone()).unrecorded());
        // A replacement that began may lack its target, if that has failed.
        let degraded = self.scene.moving == Moving::BadTarget;
        let options = &OpenOptions { degraded, ..self.judge.options.clone() };
        let fs = match open(&device, options) {
            Ok((fs, _)) => fs,
            Err(Error::Unsupported(why)) if self.may_refuse(look) && why.ends_with(READ_ONLY) => {
                let options = OpenOptions { read_only: true, ..options.clone() };
                let (fs, _) = open(&device, &options).map_err(|e| format!("read-only: {e}"))?;
                return self.shows(&fs, look, "read-only");
            }
            Err(e) => return Err(format!("open: {e}")),
        };
        self.shows(&fs, look, "as the cut left it")?;
        if !self.may_refuse(look) {
            self.is_remembered(&fs)?;
        }
        self.finish(&fs, look, done)?;
        if self.judge.chosen(look.id, ANEW, 9) {
            let mover = Mover::new(&fs, &device, self.scene);
            match mover.round(0, &mut StdRng::seed_from_u64(look.id)) {
                Err(e) if self.may_refuse(look) && is_refusal(&e) => {}
                round => round.map_err(|e| format!("anew: {e}"))?,
            }
        }
        let name = format!("{}after the cut", self.prefix());
        let data = used(&fs, &name).map_err(|e| format!("used: {e}"))?;
        if !fs.devices_behind().is_empty() && !self.may_refuse(look) {
            mend(&fs)?;
        }
        let names: Vec<String> = fs.devices().into_iter().filter_map(|d| d.name).collect();
        fs.close().map_err(|e| format!("close: {e}"))?;
        drop(fs);
        self.sound(look, &device, &names, done)?;
        let (fs, _) = open(&device, options).map_err(|e| format!("opened again: {e}"))?;
        has(&fs, &name, &data)?;
        let later = Look { moments: &look.moments[..1], ..*look };
        self.shows(&fs, &later, "opened again")?;
        fs.close().map_err(|e| format!("closed again: {e}"))
    }

    /// Is nothing wrong with what was closed?
    fn sound(
        &self,
        look: &Look<'_>,
        device: &Arc<SimDevice>,
        names: &[String],
        done: &mut Done,
    ) -> Result<(), String> {
        let mut devices = device.devices();
        devices.retain(|disk| names.contains(&disk.name()));
        if look.is_hurt || self.failing.is_some() || is_degraded(device) {
            return Ok(());
        }
        check_ourselves(&devices, "afterwards")?;
        done.ours += 1;
        if self.judge.chosen(look.id, self.judge.depth.checked, 1) {
            check(&only(device, &devices), "afterwards")?;
            done.checked += 1;
        }
        Ok(())
    }

    fn prefix(&self) -> String {
        writers::prefix_of(0, self.judge.history.domains.len())
    }

    /// May something be refused, since a disk is missing or behind?
    fn may_refuse(&self, look: &Look<'_>) -> bool {
        look.is_hurt || self.failing.is_some()
    }

    fn shows(&self, fs: &Filesystem, look: &Look<'_>, how: &str) -> Result<(), String> {
        let world = walk(fs).map_err(|e| format!("{how}: {e}"))?;
        self.judge.verify(&world, look.moments, how)
    }

    /// Without a balance that goes on, chunks of one type have one profile.
    fn is_remembered(&self, fs: &Filesystem) -> Result<(), String> {
        let unfinished = fs.unfinished_balance().map_err(|e| format!("the balance: {e}"))?;
        if self.scene.moving != Moving::Convert || unfinished.is_some() || self.stayed {
            return Ok(());
        }
        for of in [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM] {
            let found = profiles(fs, of);
            if found.len() > 1 {
                return Err(format!("a half-done conversion is forgotten: {found:?}"));
            }
        }
        Ok(())
    }

    /// What was interrupted goes on to its end, or is given up.
    fn finish(&self, fs: &Filesystem, look: &Look<'_>, done: &mut Done) -> Result<(), String> {
        let gives_up = look.id.is_multiple_of(3);
        if fs.replacement().status == ReplaceStatus::Suspended {
            let goes_on = match gives_up {
                true => Err(Error::NoSpace),
                false => fs.resume_replacement(&ReplaceControl::default()),
            };
            match goes_on {
                Ok(()) => done.resumed += 1,
                Err(e) if gives_up || self.may_refuse(look) && is_refusal(&e) => {
                    // One that fails on its way is given up by itself.
                    if fs.replacement().status == ReplaceStatus::Suspended {
                        fs.cancel_replacement().map_err(|e| format!("giving up: {e}"))?;
                    }
                    done.given_up += 1;
                }
                Err(e) => return Err(format!("resuming the replacement: {e}")),
            }
        }
        if fs.unfinished_balance().map_err(|e| format!("the balance: {e}"))?.is_none() {
            return Ok(());
        }
        if gives_up {
            done.given_up += 1;
            return fs.cancel_paused_balance().map_err(|e| format!("cancelling: {e}"));
        }
        let control = BalanceControl::new();
        match fs.resume_balance(&control) {
            Err(e) if self.may_refuse(look) && is_refusal(&e) => return Ok(()),
            // It is over, and chunks are left.
            Err(Error::NoSpace) if self.scene.moving == Moving::Convert => return Ok(()),
            resumed => resumed.map_err(|e| format!("resuming the balance: {e}"))?,
        }
        done.resumed += 1;
        let state = control.state();
        if state.status != BalanceStatus::Finished {
            return Err(format!("the balance went on and is {state:?}"));
        }
        if state.left == 0 && !self.may_refuse(look) {
            self.is_remembered(fs)?;
        }
        Ok(())
    }
}

/// Profiles of the chunks of some type.
fn profiles(fs: &Filesystem, of: BlockGroupFlags) -> BTreeSet<&'static str> {
    let groups = fs.block_groups();
    let of = groups.iter().filter(|g| g.flags.contains(of));
    of.map(|g| g.flags.profile().map_or("no profile", |p| p.name())).collect()
}

/// A disk without the last superblock counts as one that was away, until a scrub has looked at it.
fn mend(fs: &Filesystem) -> Result<(), String> {
    let control = ScrubControl::default();
    fs.scrub(ScrubOptions { read_only: false }, &control, &|_| ())
        .map_err(|e| format!("a scrub: {e}"))?;
    match &fs.devices_behind()[..] {
        [] => Ok(()),
        behind => Err(format!("still behind after a scrub: {behind:?}")),
    }
}

/// Writes a file, and has it durable by `fsync`.
fn used(fs: &Filesystem, name: &str) -> Result<Vec<u8>, Error> {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    let file = fs.create(fs.root(), name.as_bytes(), &new)?.id;
    let data: Vec<u8> = (0..30_000u32).map(|b| (b % 249) as u8).collect();
    fs.write(file, 0, &data)?;
    fs.fsync(file, false)?;
    Ok(data)
}

/// Has the file these contents? It is removed.
fn has(fs: &Filesystem, name: &str, data: &[u8]) -> Result<(), String> {
    let found = || {
        let file = fs.lookup(fs.root(), name.as_bytes())?;
        let mut found = vec![0; data.len() + 1];
        let len = fs.read(file.id, 0, &mut found)?;
        found.truncate(len);
        fs.unlink(fs.root(), name.as_bytes())?;
        Ok::<_, Error>(found)
    };
    match found() {
        Ok(found) if found == data => Ok(()),
        Ok(_) => Err(format!("{name} has other contents")),
        Err(e) => Err(format!("{name}: {e}")),
    }
}

fn is_degraded(device: &Arc<SimDevice>) -> bool {
    device.image().sizes().contains(&0)
}

/// The disks of the stack that are these devices.
pub(crate) fn only(device: &Arc<SimDevice>, devices: &[Arc<dyn Device>]) -> Image {
    let mut image = device.image();
    let names: Vec<String> = devices.iter().map(|d| d.name()).collect();
    for disk in device.devices() {
        if let Some(number) = super::members::number_of(&*disk)
            && !names.contains(&disk.name())
        {
            image.lose(number);
        }
    }
    image
}
