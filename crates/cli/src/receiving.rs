//! Receiving a stream into an image or onto a mount, for the commands that do it.
//!
//! Hidden here is what people see meanwhile (bytes of the stream and the rate on a terminal, and
//! which subvolume), how a signal ends it, and what is said of its end: what is half received, and
//! how it goes on. What the stream does is `larder_receive`'s.

use crate::failure::Advise;
use crate::image::Image;
use crate::interrupt::Interrupt;
use crate::mounted::mounted;
use crate::print;
use crate::subvolumes::in_image_for_stream;
use crate::target::Target;
use anyhow::anyhow;
use indicatif::ProgressBar;
use larder_fs::FileKind;
use larder_receive::destination::Destination;
use larder_receive::{
    Error, Failure, ImageDir, MountedDir, Observer, Options, Summary, Taken, receive,
};
use std::io::Read;
use std::path::Path;

/// What is shown while a stream is received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    /// How far it is, if standard error is a terminal.
    pub(crate) progress: bool,
    /// Which subvolume begins.
    pub(crate) names: bool,
}

/// Receives into a directory of an image.
pub(crate) fn into_image(
    target: &Target,
    input: impl Read + Send + 'static,
    options: &Options,
    shown: Shown,
) -> anyhow::Result<Summary> {
    in_image_for_stream(target, |image| {
        let mut to = directory(image, &target.path)?;
        apply(input, &mut to, options, (&Interrupt::watch(), shown))
    })
}

/// A directory of an image that receives. New inodes belong to this user first.
pub(crate) fn directory<'i>(image: &'i Image, path: &[u8]) -> anyhow::Result<ImageDir<'i>> {
    let dir = image.resolve(path, true)?;
    if dir.kind != FileKind::Directory {
        return Err(anyhow!("{} is not a directory", image.show(path))).could_not_run();
    }
    let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Ok(ImageDir::new(&image.fs, dir.id, owner))
}

/// Receives into a directory of a mount.
pub(crate) fn onto_mount(
    path: &Path,
    input: impl Read + Send + 'static,
    options: &Options,
    shown: Shown,
) -> anyhow::Result<Summary> {
    let mut to = mounted(path, MountedDir::open)?;
    apply(input, &mut to, options, (&Interrupt::watch(), shown))
}

/// Receives into an open destination.
pub(crate) fn apply(
    input: impl Read + Send + 'static,
    to: &mut impl Destination,
    options: &Options,
    (interrupt, shown): (&Interrupt, Shown),
) -> anyhow::Result<Summary> {
    let mut watcher = Watcher::new(interrupt.clone(), shown);
    let done = receive(input, to, options, &mut watcher);
    watcher.bar.finish_and_clear();
    if let Err(Error::Interrupted) = done {
        interrupt.check()?;
    }
    advise(done, watcher.partly)
}

/// Adds what helps.
fn advise(done: Result<Summary, Error>, left_a_part: bool) -> anyhow::Result<Summary> {
    let hint = match &done {
        Err(Error::Taken { why: Taken::Partly, .. }) => {
            "--resume goes on with it; or delete it (`larder subvolume delete`) to begin again"
        }
        Err(Error::Taken { why: Taken::Received, .. }) => {
            "nothing was done; --resume skips what is complete"
        }
        Err(Error::Taken { why: Taken::Foreign | Taken::OtherStream, .. }) => {
            "move it away or delete it (`larder subvolume delete`), or receive into another \
             directory"
        }
        Err(Error::Stream(_) | Error::Command(_)) if left_a_part => {
            "what was received in part stays: --resume goes on with it"
        }
        _ => return Ok(done?),
    };
    done.hint(hint)
}

/// Tells people, and ends when they ask for it.
#[derive(Debug)]
struct Watcher {
    bar: ProgressBar,
    interrupt: Interrupt,
    /// Say which subvolume begins.
    names: bool,
    /// A subvolume has a part of what it is to have.
    partly: bool,
}

impl Watcher {
    fn new(interrupt: Interrupt, shown: Shown) -> Self {
        let bar = if shown.progress { print::progress_of_bytes() } else { ProgressBar::hidden() };
        Self { bar, interrupt, names: shown.names, partly: false }
    }
}

impl Observer for Watcher {
    fn begins(&mut self, name: &[u8], resumed: bool) {
        self.partly = true;
        if self.names {
            let what = if resumed { "Going on with" } else { "Receiving" };
            self.bar.suspend(|| print::say(&format!("{what} {}", print::name(name))));
        }
    }

    fn completed(&mut self, _name: &[u8]) {
        self.partly = false;
    }

    fn at(&mut self, offset: u64) {
        self.bar.set_position(offset);
    }

    fn failed(&mut self, failure: &Failure) {
        let text = print::harmless(&failure.to_string());
        self.bar.suspend(|| print::say(&format!("larder: {text}")));
    }

    fn stop(&self) -> bool {
        self.interrupt.is_asked()
    }
}
