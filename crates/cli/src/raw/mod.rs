//! An image read without the engine, for commands that show it even if it is damaged.
//!
//! They go on after what they cannot read. [`Problems`] collects it, and [`with_reader`] ends with
//! it, so that no answer with gaps looks like a whole one.

pub(crate) mod groups;
pub(crate) mod log;

use crate::failure::Advise;
use crate::image::{self, advise_content};
use crate::print;
use anyhow::bail;
use larder_format::items::{BlockGroupFlags, Profile};
use larder_restore::{Gap, Loss, Observer, Options, Reader, Trees, When, points};
use larder_volume::Device;
use std::sync::{Arc, Mutex, PoisonError};

/// Collects what could not be read, in words.
#[derive(Debug, Default)]
pub(crate) struct Problems(Mutex<Vec<String>>);

/// Problems that are kept; more are counted.
const MOST_PROBLEMS: usize = 1000;

impl Observer for Problems {
    fn note(&self, text: &str) {
        self.add(text.to_owned());
    }
    fn loss(&self, loss: &Loss) {
        self.add(loss.what.clone());
    }
}

impl Problems {
    pub(crate) fn add(&self, text: String) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The same node is often needed more than once.
        if all.len() < MOST_PROBLEMS && !all.contains(&text) {
            all.push(text);
        }
    }

    pub(crate) fn gaps(&self, gaps: Vec<Gap>) {
        for gap in gaps {
            self.add(gap.why);
        }
    }

    /// Says what could not be read.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        let all = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for p in &all {
            print::say(&format!("larder: {}", print::harmless(p)));
        }
        match all.len() {
            0 => Ok(()),
            n => bail!("{}: what is shown is not everything", print::number(n as u64, "problem")),
        }
    }
}

/// An image, read without the engine.
pub(crate) struct Session<'a> {
    pub(crate) reader: &'a Reader<'a>,
    pub(crate) trees: Trees,
    pub(crate) problems: &'a Problems,
}

/// Opens an image, asks, and ends with what could not be read.
pub(crate) fn session(
    devices: Vec<Arc<dyn Device>>,
    ask: impl FnOnce(&Session<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    with_reader(devices, |reader, problems| ask(&open_trees(reader, problems)?))
}

/// As [`session`], without looking at any tree but that of the chunks.
pub(crate) fn with_reader(
    devices: Vec<Arc<dyn Device>>,
    ask: impl FnOnce(&Reader<'_>, &Problems) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let problems = Problems::default();
    let options = Options { super_copy: None, scan: false };
    let first = Arc::clone(&devices[0]);
    let opened = Reader::open_devices(devices, options, &problems).could_not_run();
    let reader = advise_content(opened, &*first)?;
    if reader.superblock().metadata_dump().is_some() {
        image::note_dump(&reader.device().name());
    }
    ask(&reader, &problems)?;
    drop(reader);
    problems.finish()
}

/// Reads the root tree.
pub(crate) fn open_trees<'a>(
    reader: &'a Reader<'a>,
    problems: &'a Problems,
) -> anyhow::Result<Session<'a>> {
    let point = points::choose(reader, When::Newest).could_not_run()?;
    let mut trees = Trees::open(reader, point, point.generation, false);
    problems.gaps(std::mem::take(&mut trees.gaps));
    Ok(Session { reader, trees, problems })
}

/// `Metadata dup` and the like.
pub(crate) fn type_text(kind: u64) -> String {
    let flags = BlockGroupFlags::from_bits_retain(kind);
    let profile = flags.profile().map_or("unknown profile", Profile::name);
    format!("{} {profile}", flags.type_name())
}
