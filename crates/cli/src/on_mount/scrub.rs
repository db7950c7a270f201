//! Scrubs of what is mounted, which the daemon of the mount does.
//!
//! Hidden here is where it is kept how far a scrub is: in a file of the user that asks, by the file
//! system's id. So a scrub survives its mount, its daemon and the machine's next start. The file is
//! opened here and handed over, since the daemon opens none.

use super::{Pauses, Served};
use crate::interrupt::Interrupt;
use crate::jobs::{Job, ScrubOrder};
use crate::print;
use anyhow::{Context, anyhow};
use larder_fs::{ScrubState, ScrubStatus};
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A scrub was to be started beside another one.
pub(crate) const IS_RUNNING: &str = "a scrub is running already";
/// There is no scrub to change.
pub(crate) const NOT_RUNNING: &str = "no scrub is running";
/// There is no scrub to go on with.
pub(crate) const NOTHING_TO_RESUME: &str = "there is no scrub that could be resumed";

/// Longest state that is read.
const MOST_BYTES: u64 = 16 << 20;

/// The daemon behind a path.
#[derive(Debug)]
pub(crate) struct Scrubbed(Served);

/// What a file has, if it has the state of a scrub. What stands behind is of an earlier one.
pub(crate) fn read(kept: &File) -> Option<ScrubState> {
    let mut text = Vec::new();
    let mut at = 0;
    let mut piece = vec![0; 64 << 10];
    while at < MOST_BYTES {
        let n = kept.read_at(&mut piece, at).ok().filter(|n| *n > 0);
        let Some(n) = n else { break };
        text.extend_from_slice(&piece[..n]);
        at += n as u64;
    }
    serde_json::Deserializer::from_slice(&text).into_iter().next()?.ok()
}

impl Scrubbed {
    /// # Errors
    /// The path is not on a Larder mount.
    pub(crate) fn behind(path: &Path) -> anyhow::Result<Self> {
        Ok(Self(Served::behind(path)?))
    }

    /// The file system.
    pub(crate) fn fsid(&self) -> &str {
        self.0.fsid()
    }

    /// The process of the daemon, if it is known here.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.0.daemon()
    }

    /// Starts or resumes a scrub, and says how far it is.
    ///
    /// # Errors
    /// One runs already; there is none to resume; the daemon cannot be asked.
    pub(crate) fn begin(&self, order: ScrubOrder) -> anyhow::Result<ScrubState> {
        let path = kept_file(self.0.fsid())?;
        let shown = || format!("{}: how far the scrub is cannot be kept", print::path(&path));
        if let Some(dir) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).with_context(shown)?;
        }
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(&path).with_context(shown)?;
        let state = self.ask(order, Some(&file))?;
        state.with_context(|| format!("{}: the daemon did not say", print::path(self.0.path())))
    }

    /// How far the scrub is that runs or ran last. `None`: there was none.
    ///
    /// # Errors
    /// The daemon cannot be asked.
    pub(crate) fn status(&self) -> anyhow::Result<Option<ScrubState>> {
        if let Some(state) = self.ask(ScrubOrder::Status, None)? {
            return Ok(Some(state));
        }
        let file = kept_file(self.0.fsid()).ok().and_then(|path| File::open(path).ok());
        let mut state = file.as_ref().and_then(read);
        if let Some(state) = state.as_mut().filter(|s| s.status == ScrubStatus::Running) {
            // Its daemon is gone.
            state.status = ScrubStatus::Interrupted;
        }
        Ok(state)
    }

    /// Waits for the end of the scrub, and has its state told to `each` now and then. A signal
    /// cancels it.
    ///
    /// # Errors
    /// The daemon cannot be asked; a signal has come.
    pub(crate) fn wait_for_the_end(
        &self,
        mut state: ScrubState,
        each: &dyn Fn(&ScrubState),
    ) -> anyhow::Result<ScrubState> {
        let (interrupt, pauses) = (Interrupt::watch(), Pauses::begin());
        while state.status == ScrubStatus::Running {
            each(&state);
            if let Err(asked) = interrupt.wait(pauses.next()) {
                self.change(ScrubOrder::Cancel)?;
                return Err(asked.into());
            }
            state = self.status()?.ok_or_else(|| anyhow!("the daemon has forgotten the scrub"))?;
        }
        Ok(state)
    }

    /// Ends the scrub, or changes its limit.
    ///
    /// # Errors
    /// None runs; the daemon cannot be asked.
    pub(crate) fn change(&self, order: ScrubOrder) -> anyhow::Result<()> {
        self.ask(order, None).map(drop)
    }

    /// A state, or nothing if there never was a scrub.
    fn ask(&self, order: ScrubOrder, kept: Option<&File>) -> anyhow::Result<Option<ScrubState>> {
        let kept = kept.map(AsFd::as_fd);
        let text = self.0.answer(Job::Scrub(order), kept.as_slice())?;
        Ok(serde_json::from_slice(&text)?)
    }
}

/// Where it is kept how far a scrub is.
fn kept_file(fsid: &str) -> anyhow::Result<PathBuf> {
    Ok(directory()?.join(format!("scrub.{fsid}")))
}

fn directory() -> anyhow::Result<PathBuf> {
    let of = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|d| d.is_absolute());
    if let Some(state) = of("XDG_STATE_HOME") {
        return Ok(state.join("larder"));
    }
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from("/var/lib/larder"));
    }
    let home = of("HOME").context("there is no HOME, in which it is kept how far a scrub is")?;
    Ok(home.join(".local/state/larder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_longer_state_is_passed_over() {
        let file = tempfile::tempfile().unwrap();
        assert!(read(&file).is_none());
        let mut state = ScrubState { fsid: "a".repeat(500), ..ScrubState::default() };
        file.write_all_at(&serde_json::to_vec(&state).unwrap(), 0).unwrap();
        state.fsid = "b".into();
        let mut text = serde_json::to_vec(&state).unwrap();
        text.push(b'\n');
        file.write_all_at(&text, 0).unwrap();
        assert_eq!(read(&file).unwrap().fsid, "b");
        file.write_all_at(b"no json", 0).unwrap();
        assert!(read(&file).is_none());
    }
}
