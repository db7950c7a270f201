//! `larder check` beside `btrfs check` on random damage: if Linux's checker reports an error, so
//! does ours.
//!
//! Each number stands for one change of one sound image ([`larder_simtest::damage::random`]). Ours
//! returns soon, takes no more memory than a hostile image may cost, and finds something wherever
//! theirs does. Findings of ours alone are counted by kind: mostly theirs does not look at such
//! things, and the catalogue has them.
//!
//! `make test` tries a few on the fuzzer's small images of Linux, which never change. The long form
//! adds those that are made anew each time, the engine's and the catalogue's, and says what both
//! found:
//!
//! ```sh
//! LARDER_SCALE=50 LARDER_SEED=1000 \
//!     cargo test -p larder-simtest --test check_differs -- --nocapture
//! ```
//!
//! `LARDER_IMAGES=Quotas,v1` leaves only images with one of these in their names.

#[path = "check_catalogue/bases.rs"]
mod bases;

use larder_check::{Finding, Kind, Options, Report, Severity};
use larder_simtest::damage::random::{Patient, Wounded};
use larder_simtest::hostile::device::HostileDevice;
use larder_simtest::hostile::limits::{self, CountingAllocator, HEAP, PanicLog};
use larder_simtest::hostile::seeds;
use larder_simtest::image::Image;
use larder_simtest::oracle::{
    self, Fixture, ImageVariant, KernelMount, Need, btrfs, btrfs_check_within, kernel_images, need,
    populate, scratch,
};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn number_from(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// The images that are damaged, by name.
fn patients(long: bool) -> Vec<(String, Patient)> {
    let mut images: Vec<(String, Image)> = seeds::NAMES
        .into_iter()
        .enumerate()
        .filter(|(_, name)| long || *name != "larder")
        .map(|(n, name)| (name.to_owned(), seeds::seed(n).image.clone()))
        .collect();
    for base in bases::ALL.into_iter().filter(|_| long) {
        if let Some(image) = base.image() {
            images.push((format!("{base:?}"), image.clone()));
        }
    }
    if long && need(&[Need::MkfsBtrfs, Need::KernelBtrfs]) {
        // A mount lives in the namespace of its thread: one that ends takes it along.
        let made = std::thread::spawn(|| kernel_images().iter().map(by_linux).collect::<Vec<_>>());
        images.extend(made.join().expect("no panic"));
    }
    let look = |(name, image)| {
        let patient = Patient::new(image).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name, patient)
    };
    images.into_iter().map(look).collect()
}

/// An image of a kind that Linux makes, with a little of everything in it.
fn by_linux(variant: &ImageVariant) -> (String, Image) {
    let few = Fixture { entries: 20, large_file: 1 << 20, fragments: 100, links: 20 };
    let make = || -> anyhow::Result<Image> {
        let dir = scratch();
        let path = dir.path().join("image");
        variant.make(&path, 256 << 20)?;
        let mount = KernelMount::image(&path, &variant.mount)?;
        populate(mount.path(), &few)?;
        mount.unmount_clean()?;
        Ok(Image::from_file(&path)?)
    };
    (variant.name.clone(), make().unwrap_or_else(|e| panic!("{}: {e:#}", variant.name)))
}

/// What ours says of an image.
type Ours = Result<Report, larder_check::Error>;

/// Checks an image with ours, data included.
fn ours(image: &Image) -> Ours {
    /// The largest of the images has a few thousand nodes and sectors in use.
    const READS: u64 = 2_000_000;
    let device = Arc::new(HostileDevice::new(image.clone()).allowing(READS));
    larder_check::check(&[device], &Options { data: true, threads: 1, keep: 20 }, &|_| ())
}

/// What theirs says: without data first, for damage there hides nothing else. In the long form also
/// what its other implementation says where this one is content.
fn theirs(image: &Image, long: bool) -> (oracle::Report, Option<oracle::Report>) {
    /// Seconds; most take hundredths.
    const TIME: u32 = 10;
    let dir = scratch();
    let path = dir.path().join("image");
    image.write_sparse(&path).expect("a scratch image");
    let plain = btrfs_check_within(&path, &[], TIME);
    if !plain.is_clean() {
        return (plain, None);
    }
    let with_data = btrfs_check_within(&path, &["--check-data-csum"], TIME);
    let other = long && with_data.is_clean();
    (with_data, other.then(|| btrfs_check_within(&path, &["--mode=lowmem"], TIME)))
}

/// A damage that both have seen.
struct Case {
    name: String,
    wounded: Wounded,
    ours: Ours,
    theirs: oracle::Report,
    lowmem: Option<oracle::Report>,
}

impl Case {
    fn ours_errs(&self) -> bool {
        self.ours.as_ref().map_or(true, |r| !r.is_clean())
    }
    /// Does theirs report something that ours passes over?
    fn only_theirs(&self) -> bool {
        let warned = self.ours.as_ref().is_ok_and(|r| r.count(Severity::Warning) > 0);
        // It only warned, or gave up for another reason than the image's, or a signal ended it
        // after a warning.
        let mild = matches!(self.theirs.code, Some(0 | 134) | None) && warned;
        !self.theirs.is_clean() && !self.theirs.timed_out() && !self.ours_errs() && !mild
    }
    fn describe(&self) -> String {
        let said: Vec<&str> = self.theirs.complaints.iter().take(4).map(String::as_str).collect();
        let ours = match &self.ours {
            Ok(r) => r.findings.iter().take(3).map(|f| format!("{}: {}", f.kind, f.what)).collect(),
            Err(e) => vec![e.to_string()],
        };
        format!("{}: {}\n    theirs: {said:?}\n    ours: {ours:?}", self.name, self.wounded.what)
    }
    /// All that both said, each in a line.
    fn all(&self) -> String {
        let mut text = format!("case {} [{}] {}", self.name, self.wounded.class, self.wounded.what);
        text.push_str(&format!("\n  theirs {:?}", self.theirs.code));
        self.theirs.complaints.iter().take(60).for_each(|c| text.push_str(&format!("\n  - {c}")));
        let lowmem = self.lowmem.iter().flat_map(|r| &r.complaints);
        lowmem.take(60).for_each(|c| text.push_str(&format!("\n  ~ {c}")));
        match &self.ours {
            Err(e) => text.push_str(&format!("\n  + refused: {e}")),
            Ok(report) => {
                let wanted = |f: &&Finding| f.severity() != Severity::Note;
                for f in report.findings.iter().filter(wanted).take(60) {
                    let mark = if f.follow_up { "(" } else { "" };
                    let place = format!("{:?} {:?} {:?}", f.tree, f.key, f.address);
                    text.push_str(&format!("\n  + {mark}{}: {place}: {}", f.kind, f.what));
                }
            }
        }
        text
    }
    fn keep(&self) {
        if let Some(dir) = std::env::var_os("LARDER_KEEP_STATES") {
            let path = std::path::Path::new(&dir).join(format!("{}.img", self.name));
            self.wounded
                .image
                .write_sparse(&path)
                .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
}

#[test]
fn ours_reports_wherever_theirs_does() {
    if !need(&[Need::BtrfsProgs]) {
        return;
    }
    const EACH: u64 = 6;
    let scale = number_from("LARDER_SCALE", 1);
    let first = number_from("LARDER_SEED", 1);
    let mut patients = patients(scale > 1);
    if let Ok(wanted) = std::env::var("LARDER_IMAGES") {
        patients.retain(|(name, _)| wanted.split(',').any(|part| name.contains(part)));
        assert!(!patients.is_empty(), "no image has one of {wanted} in its name");
    }
    let log = PanicLog::start();
    let all: Vec<(u64, &(String, Patient))> = (first..first + EACH * scale)
        .flat_map(|number| patients.iter().map(move |patient| (number, patient)))
        .collect();
    let wound = |(number, (name, patient)): (u64, &(String, Patient))| {
        // Not the same to each of them.
        let wounded = patient.wound(number * 100 + name.bytes().map(u64::from).sum::<u64>() % 100);
        (format!("{name}-{number}"), wounded)
    };
    let verbose = scale > 1;
    let mut tally = Tally::default();
    for chunk in all.chunks(64) {
        let wounded: Vec<_> = chunk.par_iter().copied().map(wound).collect();
        // Ours one by one, to know what one takes: a thread that waits for a check would begin
        // another meanwhile.
        let ours: Vec<_> = wounded.iter().map(|(_, w)| tally.measure(w)).collect();
        let theirs: Vec<_> = wounded.par_iter().map(|(_, w)| theirs(&w.image, verbose)).collect();
        for (((name, wounded), ours), (theirs, lowmem)) in wounded.into_iter().zip(ours).zip(theirs)
        {
            tally.add(&Case { name, wounded, ours, theirs, lowmem }, verbose);
        }
    }
    if verbose {
        tally.print();
    }
    let panics = log.take();
    assert!(panics.is_empty(), "{panics:#?}");
    tally.judge(all.len());
}

/// What came of all cases.
#[derive(Default)]
struct Tally {
    /// Most bytes on the heap that one check took.
    took: usize,
    /// By class of damage: tried, found by ours, by theirs, only by theirs.
    classes: BTreeMap<&'static str, [u32; 4]>,
    /// What only ours found: how often, and an example.
    kinds: BTreeMap<Vec<Kind>, (u32, String)>,
    /// What only theirs found.
    missed: Vec<String>,
}

impl Tally {
    fn measure(&mut self, wounded: &Wounded) -> Ours {
        limits::reset_peak();
        let before = limits::live();
        let report = ours(&wounded.image);
        self.took = self.took.max(limits::peak() - before);
        report
    }

    fn add(&mut self, case: &Case, verbose: bool) {
        if verbose {
            println!("{}", case.all());
        }
        let counts = self.classes.entry(case.wounded.class).or_default();
        counts[0] += 1;
        counts[1] += u32::from(case.ours_errs());
        counts[2] += u32::from(!case.theirs.is_clean());
        if case.only_theirs() {
            counts[3] += 1;
            case.keep();
            self.missed.push(case.describe());
        } else if case.theirs.is_clean() && case.ours_errs() {
            let own: Vec<Kind> = case.ours.as_ref().map_or(Vec::new(), |r| {
                let is_error = |k: &&Kind| k.severity() == Severity::Error;
                r.counts.keys().filter(is_error).copied().collect()
            });
            let entry = self.kinds.entry(own).or_insert_with(|| (0, case.describe()));
            entry.0 += 1;
            if entry.0 == 1 && verbose {
                case.keep();
            }
        }
    }

    fn print(&self) {
        println!("at most {} MiB on the heap", self.took >> 20);
        println!("damage: tried, ours finds, theirs finds, only theirs");
        for (class, [tried, ours, theirs, only]) in &self.classes {
            println!("{class:28} {tried:6} {ours:6} {theirs:6} {only:6}");
        }
        println!("found by ours alone:");
        for (kinds, (count, example)) in &self.kinds {
            println!("{count:5} {kinds:?}: {}", example.lines().next().unwrap_or_default());
        }
    }

    /// Judges the result of so many cases.
    fn judge(&self, of: usize) {
        assert!(self.took < HEAP, "{} MiB of memory", self.took >> 20);
        // Other versions of btrfs-progs see a little more or less.
        let asked = btrfs(&["--version"]).is_ok_and(|v| v.contains("v6.14"));
        let allowed = if asked { 0 } else { of / 20 };
        let missed = &self.missed;
        let count = missed.len();
        assert!(count <= allowed, "{count} of {of} were missed:\n{}", missed.join("\n"));
        let found: u32 = self.classes.values().map(|c| c[1]).sum();
        assert!(found as usize > of / 2, "only {found} of {of} were noticed at all");
    }
}
