//! Tools on a hostile image: it is checked, and restored.
//!
//! Both tools are meant for broken images, so they see more that is hostile than the engine, which
//! refuses early. They never give up, so what counts is that they come to an end, and that no field
//! of the image decides how much memory they take.

use super::device::HostileDevice;
use super::limits::{self, HEAP};
use crate::image::Image;
use larder_check::Report;
use larder_format::Generation;
use larder_restore::{
    Entry, Loss, Observer, Options, Reader, Request, Step, Target, Trees, When, points, restore,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Reads of the device that a tool may make on one of the seeds. The largest has 32,768 sectors, of
/// which few are in use; but a checker reads each data sector once for each copy, and what refers
/// to a sector may do so many times.
const READS: u64 = 400_000;
/// Memory that restoring keeps nodes in.
const NODES: usize = 64 << 20;

/// One call of a tool under the limits: `room` bytes of memory beyond [`HEAP`].
pub(super) fn ask<T>(what: &'static str, room: usize, request: impl FnOnce() -> T) -> T {
    let base = limits::live();
    limits::reset_peak();
    let answer = limits::timed(what, request);
    let peak = limits::peak();
    assert!(
        peak <= base + room + HEAP,
        "hostile: {what} took {} MiB of memory",
        (peak - base) >> 20
    );
    answer
}

fn device(image: &Image) -> Arc<HostileDevice> {
    Arc::new(HostileDevice::new(image.clone()).allowing(READS))
}

/// Checks an image, its data as well, and reads the report. `None`: it was refused.
///
/// # Panics
/// If a limit is broken, or the report contradicts itself.
pub fn check(image: &Image, script: u8) -> Option<Report> {
    // A report of a few findings must count like one of many.
    let keep = if script & 1 == 0 { 50 } else { 2 };
    let options = larder_check::Options { data: script & 2 == 0, threads: 2, keep };
    let report =
        ask("check", 0, || larder_check::check(&[device(image)], &options, &|_| ())).ok()?;
    let all: u64 = report.counts.values().map(|c| c.found + c.follow_ups).sum();
    assert!(report.findings.len() as u64 <= all, "hostile: more findings than were counted");
    assert!(
        report.findings.iter().all(|f| report.counts.contains_key(&f.kind)),
        "hostile: not counted"
    );
    for finding in &report.findings {
        let _ = format!("{finding:?} {} {:?}", finding.kind, finding.key.map(|k| k.to_string()));
    }
    Some(report)
}

/// Counts what it hears.
#[derive(Debug, Default)]
struct Ears {
    entries: AtomicU64,
    words: AtomicU64,
}

impl Observer for Ears {
    fn progress(&self, _: Step, done: u64, total: Option<u64>) {
        let beyond = total.is_some_and(|total| total > 0 && done > total);
        self.words.fetch_add(u64::from(beyond), Relaxed);
    }
    fn note(&self, text: &str) {
        self.words.fetch_add(text.len() as u64, Relaxed);
    }
    fn loss(&self, loss: &Loss) {
        self.words.fetch_add(format!("{loss:?}").len() as u64, Relaxed);
    }
    fn entry(&self, entry: Entry<'_>) {
        assert!(
            entry.path.split(|b| *b == b'/').all(|name| name != b".." && name != b"."),
            "hostile: {:?} leads elsewhere",
            String::from_utf8_lossy(entry.path)
        );
        self.entries.fetch_add(1, Relaxed);
    }
}

/// Lists the moments that an image can be restored at and reads everything of one of them. Gives
/// how many entries there were.
///
/// # Panics
/// If a limit is broken, or an entry's path would lead out of the destination.
pub fn salvage(image: &Image, script: u8) -> u64 {
    let ears = Ears::default();
    let options = Options {
        super_copy: [None, None, None, Some(0), Some(1)][usize::from(script % 5)],
        // Without a search only what is linked is met; with one, everything on the device.
        scan: script & 8 == 0,
    };
    let opened = ask("restore: open", NODES, || Reader::open(device(image), options, &ears));
    let Ok(reader) = opened else { return 0 };
    ask("restore: list", NODES, || {
        for point in points::points(&reader, script & 16 == 0).into_iter().take(6) {
            let generation = point.generation;
            let trees = Trees::open(&reader, point, generation, script & 32 == 0);
            let _ = format!("{:?} {}", trees.subvolumes, trees.gaps.len());
        }
    });
    let when = match script >> 6 {
        0 | 1 => When::Newest,
        2 => When::Older(1 + usize::from(script & 1)),
        _ => When::Generation(Generation(reader.superblock().generation().0.wrapping_sub(1))),
    };
    let request = Request {
        when,
        subvolume: None,
        path: None,
        snapshots: script & 4 == 0,
        skip_bad: script & 2 != 0,
        target: Target::DryRun,
    };
    let _ = ask("restore", NODES, || restore(&reader, &request));
    ears.entries.load(Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::seeds;

    #[test]
    fn tools_see_all_of_a_sound_seed() {
        for (number, name) in seeds::NAMES.into_iter().enumerate() {
            let image = &seeds::seed(number).image;
            let report = check(image, 0).expect("it can be checked");
            assert!(report.is_clean(), "{name}: {:#?}", report.findings);
            assert!(report.stats.inodes > 30, "{name}: {:?}", report.stats);
            // All data of one is preallocated or lies in leaves: nothing has a checksum of its own.
            assert_eq!(report.stats.data_bytes > 0, name != "small", "{name}: {:?}", report.stats);
            assert!(salvage(image, 0) > 30, "{name}");
        }
    }
}
