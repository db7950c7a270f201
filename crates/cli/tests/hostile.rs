//! What commands print of images that were made to hurt them: the inputs that fuzzing kept (`fuzz/corpus/printers`), and some
//! more made up here.

use larder_simtest::hostile::limits::PanicLog;
use larder_simtest::hostile::{noise, printers::printers};
use std::path::Path;

/// Sends what is printed nowhere until it is dropped: commands write past the test harness.
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

fn print(log: &PanicLog, input: &[u8]) -> Vec<String> {
    let _silence = Silence::new();
    let run = || printers(input, &mut |argv| larder_cli::run(argv)).expect("a file in memory");
    let outcome = std::panic::catch_unwind(run);
    let panics = log.take();
    assert!(outcome.is_ok() || !panics.is_empty(), "a panic without a message");
    panics
}

/// One test, for panics are the process's.
#[test]
fn printing_hostile_images_does_no_harm() {
    let log = PanicLog::start();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/printers");
    let mut inputs: Vec<_> = std::fs::read_dir(corpus).unwrap().map(|e| e.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "only {} inputs are kept", inputs.len());
    for path in inputs {
        let found = print(&log, &std::fs::read(&path).unwrap());
        assert!(found.is_empty(), "{}: {found:#?}", path.display());
    }
    let mut rng = noise(26);
    for round in 0..60u32 {
        let mut input = vec![(round * 101) as u8, rng() as u8];
        input.extend((0..4 + rng() % 12).map(|_| rng() as u8));
        let found = print(&log, &input);
        assert!(found.is_empty(), "{input:?}: {found:#?}");
    }
}
