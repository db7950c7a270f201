//! Commands that print hostile images: the inputs that fuzzing kept (`fuzz/corpus/printers`), and
//! some more that are made here.

use larder_simtest::damage::random::Patient;
use larder_simtest::hostile::limits::PanicLog;
use larder_simtest::hostile::printers::{Run, print_some, printers};
use larder_simtest::hostile::seeds;
use std::path::Path;

/// Discards standard output until it is dropped: commands write past the test harness.
struct Silence(std::os::fd::OwnedFd);

impl Silence {
    fn new() -> Self {
        let before = rustix::io::dup(std::io::stdout()).unwrap();
        let nowhere = std::fs::File::options().write(true).open("/dev/null").unwrap();
        rustix::stdio::dup2_stdout(&nowhere).unwrap();
        Self(before)
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        let _ = rustix::stdio::dup2_stdout(&self.0);
    }
}

/// Runs the commands that print, and returns their panics.
fn print(log: &PanicLog, body: impl FnOnce(Run<'_>) -> std::io::Result<()>) -> Vec<String> {
    let _silence = Silence::new();
    let run = || body(&mut |argv| larder_cli::run(argv)).expect("a file in memory");
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    let panics = log.take();
    assert!(outcome.is_ok() || !panics.is_empty(), "a panic without a message");
    panics
}

/// One test, because the panic hook belongs to the process.
#[test]
fn printing_hostile_images_does_no_harm() {
    let log = PanicLog::start();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/printers");
    let mut inputs: Vec<_> =
        std::fs::read_dir(corpus).unwrap().map(|e| e.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "only {} inputs are kept", inputs.len());
    for path in inputs {
        let input = std::fs::read(&path).unwrap();
        let found = print(&log, |run| printers(&input, run));
        assert!(found.is_empty(), "{}: {found:#?}", path.display());
    }
    let mut rng = fastrand::Rng::with_seed(26);
    for round in 0..60u32 {
        let mut input = vec![(round * 101) as u8, rng.u8(..)];
        input.extend((0..4 + rng.usize(..12)).map(|_| rng.u8(..)));
        let found = print(&log, |run| printers(&input, run));
        assert!(found.is_empty(), "{input:?}: {found:#?}");
    }
    // With one thing wrong; `LARDER_SCALE=50` for 50 times as many.
    let scale: u64 = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for seed in 0..seeds::NAMES.len() {
        let survey = seeds::seed(seed);
        let patient = Patient::new(survey.image.clone()).expect("a sound seed");
        for number in 0..5 * scale {
            let wounded = patient.wound(number * 9 + seed as u64);
            let choices = [number as u8, rng.u8(..), rng.u8(..)];
            let found = print(&log, |run| print_some(&wounded.image, survey, choices, run));
            assert!(
                found.is_empty(),
                "{}, {number}: {}: {found:#?}",
                seeds::NAMES[seed],
                wounded.what
            );
        }
    }
}
