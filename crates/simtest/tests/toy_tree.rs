//! The model against a file system that is right by construction: it keeps the list of operations
//! itself, and writes it out at every sync. Random workloads must pass in every crash state, and
//! each way of lying must be caught.

use larder_format::{Physical, SUPER_OFFSETS};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::model::{Domain, History, Mode};
use larder_simtest::ops::{Op, line, parse};
use larder_simtest::scenarios;
use larder_simtest::workload::{Workload, random};
use larder_simtest::world::World;
use larder_volume::Device;

const SUPER: u64 = SUPER_OFFSETS[0].0;
const SLOTS: [u64; 2] = [1 << 20, 8 << 20];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    /// Every other fsync does nothing.
    LazyFsync,
    /// The last rename is forgotten, what came after is not.
    RenameLost,
    /// The operation before a sync is not written, as if its completion had been missed.
    LastLost,
    /// Removals are forgotten.
    RemovedComesBack,
    /// The last write to a file is forgotten, names are not.
    DataLost,
    /// xattrs are forgotten.
    XattrsLost,
}

struct Toy {
    device: SimDevice,
    ops: Vec<Op>,
    syncs: usize,
    lie: Lie,
}

impl Toy {
    fn sync(&mut self) {
        self.syncs += 1;
        if self.lie == Lie::LazyFsync && self.syncs.is_multiple_of(2) {
            return;
        }
        let mut ops = self.ops.clone();
        let forget = match self.lie {
            Lie::RenameLost => ops.iter().rposition(|o| matches!(o, Op::Rename { .. })),
            Lie::LastLost => ops.len().checked_sub(1),
            Lie::RemovedComesBack => {
                ops.iter().rposition(|o| matches!(o, Op::Unlink(_) | Op::Rmdir(_)))
            }
            Lie::DataLost => {
                ops.iter().rposition(|o| matches!(o, Op::Write { .. } | Op::Append { .. }))
            }
            Lie::XattrsLost => ops.iter().rposition(|o| matches!(o, Op::SetXattr { .. })),
            Lie::None | Lie::LazyFsync => None,
        };
        if let Some(at) = forget {
            ops.remove(at);
        }
        let text = line(&ops);
        let slot = SLOTS[self.syncs % 2];
        self.device.write_at(Physical(slot), text.as_bytes()).unwrap();
        self.device.flush().unwrap();
        let mut sup = vec![0; 4096];
        sup[..8].copy_from_slice(&slot.to_le_bytes());
        sup[8..16].copy_from_slice(&(text.len() as u64).to_le_bytes());
        self.device.write_at(Physical(SUPER), &sup).unwrap();
        self.device.flush().unwrap();
    }
}

fn numbered(world: &mut World, op: &Op) -> Option<larder_simtest::world::Touched> {
    let touched = world.apply(op).ok()?;
    if let Some(made) = touched.made {
        world.set_real(made, made + 256);
    }
    Some(touched)
}

fn recover(image: &Image) -> World {
    let mut sup = [0; 16];
    image.read(SUPER, &mut sup);
    let number = |at: usize| u64::from_le_bytes(sup[at..at + 8].try_into().unwrap());
    let mut text = vec![0; usize::try_from(number(8)).unwrap()];
    image.read(number(0), &mut text);
    let mut world = World::empty(0o755, 256);
    for op in parse(&String::from_utf8(text).unwrap()).unwrap().concat() {
        numbered(&mut world, &op);
    }
    world
}

/// Runs the first segment of a workload, looks at every crash state: how many, and what is wrong
/// first.
fn crash(workload: &Workload, lie: Lie, mode: Mode) -> (usize, Option<String>) {
    let mut toy =
        Toy { device: SimDevice::new(Image::zeroed(16 << 20)), ops: Vec::new(), syncs: 0, lie };
    let mut domain = Domain::new("", World::empty(0o755, 256));
    for op in &workload.segments[0].threads[0] {
        let begin = toy.device.mark();
        let mut after = domain.now().clone();
        let Some(touched) = numbered(&mut after, op) else { continue };
        if op.is_sync() {
            toy.sync();
        } else {
            toy.ops.push(op.clone());
        }
        let end = toy.device.mark();
        domain.push(op, after, touched, begin, Some(end));
    }
    let history = History { domains: vec![domain] };
    let crashes = Crashes::of(&toy.device.recording(), &Limits { samples: 4, ..Limits::default() });
    let wrong = crashes.states.iter().find_map(|state| {
        let world = recover(&crashes.image(state));
        let verdict = [state.earliest, state.latest].map(|at| history.verify(&world, at, mode));
        verdict.into_iter().find_map(Result::err)
    });
    (crashes.states.len(), wrong)
}

#[test]
fn the_truthful_one_passes_everything() {
    let workloads = scenarios::all(false).into_iter().chain((0..60).map(|seed| random(seed, 30)));
    let mut states = 0;
    for workload in workloads {
        for mode in [Mode::Strict, Mode::Weak] {
            let (n, wrong) = crash(&workload, Lie::None, mode);
            assert_eq!(wrong, None, "{mode:?} {}: {}", workload.name, workload.text());
            states += n;
        }
    }
    assert!(states > 2000, "{states}");
}

#[test]
fn every_lie_is_caught_in_both_modes() {
    for mode in [Mode::Strict, Mode::Weak] {
        for lie in [
            Lie::LazyFsync,
            Lie::RenameLost,
            Lie::LastLost,
            Lie::RemovedComesBack,
            Lie::DataLost,
            Lie::XattrsLost,
        ] {
            let caught =
                (0..40).filter(|seed| crash(&random(*seed, 40), lie, mode).1.is_some()).count();
            assert!(caught >= 3, "{lie:?}, {mode:?}: caught in {caught} of 40 workloads");
        }
    }
}
