//! The scrub of a daemon.
//!
//! The daemon opens no files. So the file in which it keeps how far the scrub is comes along with
//! the request. It is written every few seconds and at the end, in one piece from its beginning: a
//! daemon that is killed leaves a state from which the next one goes on.

use super::{LongJob, Running, tell};
use crate::conduit::Outlet;
use crate::jobs::ScrubOrder;
use crate::on_mount::scrub::{IS_RUNNING, NOT_RUNNING, NOTHING_TO_RESUME, read};
use anyhow::{anyhow, bail};
use larder_fs::{Filesystem, ScrubControl, ScrubOptions, ScrubState, ScrubStatus};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct Scrubs(Arc<LongJob<ScrubControl>>);

impl Scrubs {
    /// Does what is wanted, and says how far the scrub is. One that begins runs here.
    ///
    /// # Errors
    /// What is refused.
    pub(super) fn obey(
        &self,
        fs: &Filesystem,
        order: ScrubOrder,
        files: Vec<OwnedFd>,
        outlet: &Outlet,
    ) -> anyhow::Result<()> {
        let kept = files.into_iter().next().map(File::from);
        let begun = self.change(fs, order, kept.as_ref())?;
        tell(outlet, &self.0.control().map(|control| control.state()));
        if let Some(begun) = begun {
            run(fs, &begun, kept.as_ref());
        }
        Ok(())
    }

    fn change(
        &self,
        fs: &Filesystem,
        order: ScrubOrder,
        kept: Option<&File>,
    ) -> anyhow::Result<Option<Running<ScrubControl>>> {
        let state = match order {
            ScrubOrder::Status => return Ok(None),
            ScrubOrder::Cancel => {
                return self.0.stop(ScrubControl::cancel, NOT_RUNNING).map(|()| None);
            }
            ScrubOrder::Limit { limit } => {
                let running = self.0.running().ok_or_else(|| anyhow!(NOT_RUNNING))?;
                running.set_limit(limit);
                return Ok(None);
            }
            ScrubOrder::Start { read_only, limit } => {
                ScrubState { read_only, limit, ..ScrubState::default() }
            }
            // What is kept is that of the one that runs.
            ScrubOrder::Resume { .. } if self.0.running().is_some() => bail!(IS_RUNNING),
            ScrubOrder::Resume { limit } => {
                let state = kept.and_then(read).filter(ScrubState::can_resume);
                let mut state = state.ok_or_else(|| anyhow!(NOTHING_TO_RESUME))?;
                state.limit = limit.unwrap_or(state.limit);
                // It is asked about before its thread has begun.
                state.status = ScrubStatus::Running;
                state
            }
        };
        if fs.is_opened_read_only() && !state.read_only {
            bail!("it is mounted read-only, so a scrub cannot repair anything: -r only looks");
        }
        self.0.begin(ScrubControl::new(state), IS_RUNNING).map(Some)
    }

    /// Interrupts the scrub.
    pub(super) fn end(&self) {
        self.0.end(ScrubControl::interrupt);
    }
}

fn run(fs: &Filesystem, control: &ScrubControl, kept: Option<&File>) {
    let keep = |state: &ScrubState| {
        if let Some(kept) = kept
            && let Err(e) = write(kept, state)
        {
            tracing::warn!("how far the scrub is cannot be kept: {e}");
        }
    };
    let options = ScrubOptions { read_only: control.state().read_only };
    if let Err(e) = fs.scrub(options, control, &keep) {
        tracing::info!("the scrub has ended: {e}");
    }
    let sum = control.state().sum();
    if sum.uncorrectable > 0 {
        tracing::error!(
            "the scrub has found damage that it could not repair in {} places: `larder scrub \
             status` lists it",
            sum.uncorrectable
        );
    }
}

/// Writes a state over the one before. What is left of a longer one stands behind it.
fn write(kept: &File, state: &ScrubState) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(state)?;
    text.push(b'\n');
    Ok(kept.write_all_at(&text, 0)?)
}
