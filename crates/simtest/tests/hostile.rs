//! Every input that fuzzing has kept goes through its target once more.
//!
//! The inputs lie in `fuzz/corpus/TARGET`, one file each; an input that found something has a name
//! that says what. A fixed number of images is made here besides, so that the bodies are tried on
//! the engine as it is even if the corpus was collected on an older one.

use larder_simtest::damage::random::Patient;
use larder_simtest::hostile::limits::{self, CountingAllocator, PanicLog};
use larder_simtest::hostile::{self, TARGETS, exercise, mutate, seeds, tools};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

/// Heap, time and panics are the process's: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// Runs a body; the panics that it caused, in whatever thread.
fn panics(log: &PanicLog, body: impl FnOnce() + std::panic::UnwindSafe) -> Vec<String> {
    let outcome = std::panic::catch_unwind(body);
    let panics = log.take();
    assert!(outcome.is_ok() || !panics.is_empty(), "a panic without a message");
    panics
}

fn replay(target: &str) {
    let _alone = alone();
    let log = PanicLog::start();
    let (_, body) = TARGETS.into_iter().find(|(name, _)| *name == target).expect("a target");
    let mut inputs: Vec<PathBuf> = std::fs::read_dir(corpus().join(target))
        .unwrap_or_else(|e| panic!("the corpus of {target}: {e}"))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "only {} inputs are kept for {target}", inputs.len());
    for path in inputs {
        let input = std::fs::read(&path).expect("an input");
        let found = panics(&log, || body(&input));
        assert!(found.is_empty(), "{}: {found:#?}", path.display());
    }
}

#[test]
fn kept_superblocks() {
    replay("superblock");
}

#[test]
fn kept_system_chunks() {
    replay("sys_chunks");
}

#[test]
fn kept_nodes() {
    replay("node");
}

#[test]
fn kept_items() {
    replay("item");
}

#[test]
fn kept_compressed_extents() {
    replay("compressed");
}

#[test]
fn kept_images() {
    replay("image");
}

#[test]
fn kept_images_are_checked() {
    replay("check");
}

#[test]
fn kept_images_are_restored() {
    replay("restore");
}

#[test]
fn kept_messages() {
    replay("requests");
}

#[test]
fn kept_tars() {
    replay("tar");
}

#[test]
fn kept_container_images() {
    replay("container");
}

#[test]
fn kept_manifests() {
    replay("manifest");
}

#[test]
fn kept_words_of_sources() {
    replay("source_words");
}

#[test]
fn kept_sources_become_images() {
    replay("built_image");
}

#[test]
fn kept_streams() {
    replay("stream");
}

/// Without a change every seed is read and written without an error: what the exercise asks reaches
/// the engine.
#[test]
fn sound_images_are_exercised_to_the_end() {
    let _alone = alone();
    let log = PanicLog::start();
    for (number, name) in seeds::NAMES.into_iter().enumerate() {
        let mut outcome = exercise::Outcome::default();
        let found = panics(
            &log,
            std::panic::AssertUnwindSafe(|| {
                outcome = exercise::exercise_seed(seeds::seed(number));
            }),
        );
        assert!(found.is_empty(), "{name}: {found:#?}");
        assert!(outcome.opened, "{name}: {outcome:?}");
        assert!(outcome.inodes > 30 && outcome.bytes > 20_000, "{name}: {outcome:?}");
        // Three have a log, which is replayed before anything is written.
        assert!(outcome.writable && outcome.done > 500, "{name}: {outcome:?}");
    }
}

/// Images made up on the spot.
#[test]
fn made_up_images_do_no_harm() {
    let _alone = alone();
    let log = PanicLog::start();
    let mut rng = fastrand::Rng::with_seed(20_260_917);
    for round in 0..500u32 {
        // All seeds alike; those that came later are chosen by high numbers.
        let mut input = vec![(round * 101) as u8, rng.u8(..)];
        // Few changes leave most of the image within reach, many meet in the same place.
        let steps = if round.is_multiple_of(3) { 8 + rng.usize(..60) } else { 4 + rng.usize(..8) };
        input.extend((0..steps).map(|_| rng.u8(..)));
        let found = panics(&log, || hostile::image(&input));
        assert!(found.is_empty(), "{:?} of {input:?}: {found:#?}", mutate::mutate(&input).steps);
    }
    assert!(limits::requests() > 10_000, "{} requests", limits::requests());
}

/// Images with one thing wrong, which go unnoticed longer than those with many: mounted, changed,
/// checked and restored. `LARDER_SCALE=50` tries 50 times as many.
#[test]
fn wounded_images_do_no_harm() {
    let _alone = alone();
    let log = PanicLog::start();
    let scale: u64 = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let (mut opened, mut tried) = (0, 0);
    for (seed, name) in seeds::NAMES.into_iter().enumerate() {
        let patient = Patient::new(seeds::seed(seed).image.clone()).expect("a sound seed");
        for number in 0..12 * scale {
            let wounded = patient.wound(number * 9 + seed as u64);
            let (image, script) = (&wounded.image, (number * 37 + seed as u64 * 11) as u8);
            let body = std::panic::AssertUnwindSafe(|| {
                opened += usize::from(exercise::exercise(image, script, number as u8).opened);
                let _ = tools::check(image, script);
                let _ = tools::salvage(image, script);
            });
            let found = panics(&log, body);
            assert!(found.is_empty(), "{name}, {number}: {}: {found:#?}", wounded.what);
            tried += 1;
        }
    }
    assert!(opened > tried / 2, "{opened} of {tried} could be mounted");
}

/// Every interior block in turn contains every block of its tree at its first place, itself
/// included.
#[test]
fn trees_that_contain_themselves_are_refused() {
    let _alone = alone();
    let log = PanicLog::start();
    let survey = seeds::seed(1);
    let mut loops = 0;
    for (number, block) in survey.blocks.iter().enumerate().filter(|(_, b)| b.level > 0) {
        let image = mutate::point(1, number, 0, number);
        let found = panics(&log, || drop(exercise::exercise(&image, 0, 0)));
        assert!(found.is_empty(), "block {} of tree {}: {found:#?}", block.at, block.tree);
        loops += 1;
    }
    assert!(loops >= 3, "{loops} interior blocks");
}
