//! The scrub of a daemon: one at a time, on the thread that got the request.
//!
//! The daemon opens no files. So the file in which it keeps how far the scrub is comes along with
//! the request. It is written every few seconds and at the end, in one piece from its beginning: a
//! daemon that is killed leaves a state from which the next one goes on. Before the file system is
//! closed the scrub is interrupted, and has let go of it.

use crate::attach::{ScrubOrder, ScrubRequest};
use crate::conduit::{Ended, Outlet};
use crate::{failure, print, scrub_on_mount};
use anyhow::anyhow;
use larder_fs::{Filesystem, ScrubControl, ScrubOptions, ScrubState, ScrubStatus};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The scrub that runs, or ran last.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    current: Mutex<Current>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Current {
    control: Option<Arc<ScrubControl>>,
    runs: bool,
    /// No more may begin.
    ended: bool,
}

/// A scrub that is to run.
struct Begun {
    control: Arc<ScrubControl>,
    options: ScrubOptions,
}

impl Scrubs {
    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what is wanted, and says how far the scrub is. One that begins runs on this thread.
    pub(super) fn serve(
        &self,
        open: impl FnOnce() -> Option<Arc<Filesystem>>,
        wanted: &ScrubRequest,
        kept: Option<File>,
        outlet: &Outlet,
    ) {
        let Some(fs) = open() else {
            return outlet.conclude(&refused(&anyhow!("the image is being unmounted")));
        };
        let begun = is_meant(&fs, wanted).and_then(|()| self.obey(&fs, wanted.order, &kept));
        match &begun {
            Ok(_) => {
                let state = self.current().control.as_ref().map(|control| control.state());
                let text =
                    state.map_or_else(Vec::new, |s| serde_json::to_vec(&s).unwrap_or_default());
                let mut out = outlet;
                // A requester that has gone needs no answer.
                let _ = out.write_all(&text);
                outlet.conclude(&Ended::Complete { summary: serde_json::Value::Null });
            }
            Err(error) => outlet.conclude(&refused(error)),
        }
        if let Ok(Some(begun)) = begun {
            run(&fs, &begun, kept.as_ref());
            drop(fs);
            self.current().runs = false;
            self.changed.notify_all();
        }
    }

    fn obey(
        &self,
        fs: &Filesystem,
        order: ScrubOrder,
        kept: &Option<File>,
    ) -> anyhow::Result<Option<Begun>> {
        let mut current = self.current();
        let running = current.control.clone().filter(|_| current.runs);
        let state = match (order, running) {
            (ScrubOrder::Status, _) => return Ok(None),
            (ScrubOrder::Cancel, Some(control)) => {
                control.cancel();
                while current.runs {
                    current = self.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
                }
                return Ok(None);
            }
            (ScrubOrder::Limit { limit }, Some(control)) => {
                control.set_limit(limit);
                return Ok(None);
            }
            (ScrubOrder::Cancel | ScrubOrder::Limit { .. }, None) => {
                return Err(anyhow!(scrub_on_mount::NOT_RUNNING));
            }
            (_, Some(_)) => return Err(anyhow!(scrub_on_mount::IS_RUNNING)),
            (ScrubOrder::Start { read_only, limit }, None) => {
                ScrubState { read_only, limit, ..ScrubState::default() }
            }
            (ScrubOrder::Resume { limit }, None) => {
                let state = kept.as_ref().and_then(scrub_on_mount::read);
                let state = state.filter(ScrubState::can_resume);
                let mut state = state.ok_or_else(|| anyhow!(scrub_on_mount::NOTHING_TO_RESUME))?;
                state.limit = limit.unwrap_or(state.limit);
                // It is asked about before its thread has begun.
                state.status = ScrubStatus::Running;
                state
            }
        };
        if current.ended {
            return Err(anyhow!("the image is being unmounted"));
        }
        if fs.is_opened_read_only() && !state.read_only {
            return Err(anyhow!(
                "it is mounted read-only, so a scrub cannot repair anything: -r only looks"
            ));
        }
        let options = ScrubOptions { read_only: state.read_only };
        let control = Arc::new(ScrubControl::new(state));
        (current.control, current.runs) = (Some(Arc::clone(&control)), true);
        Ok(Some(Begun { control, options }))
    }

    /// Interrupts the scrub, and waits until nothing of the file system is in use by it.
    pub(super) fn end(&self) {
        let mut current = self.current();
        current.ended = true;
        if let Some(control) = &current.control {
            control.interrupt();
        }
        while current.runs {
            current = self.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Is the file system the one that the requester sees?
fn is_meant(fs: &Filesystem, wanted: &ScrubRequest) -> anyhow::Result<()> {
    let here = wanted.fsid == print::uuid(fs.info().fsid)
        && wanted.daemon.is_none_or(|pid| pid == std::process::id());
    if here {
        Ok(())
    } else {
        Err(anyhow!("the image of the mount is not the one that has its path"))
    }
}

fn run(fs: &Filesystem, begun: &Begun, kept: Option<&File>) {
    let keep = |state: &ScrubState| {
        if let Some(kept) = kept
            && let Err(e) = write(kept, state)
        {
            tracing::warn!("how far the scrub is cannot be kept: {e}");
        }
    };
    if let Err(e) = fs.scrub(begun.options, &begun.control, &keep) {
        tracing::info!("the scrub has ended: {e}");
    }
    let sum = begun.control.state().sum();
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

fn refused(error: &anyhow::Error) -> Ended {
    let said = failure::text(error);
    let why = said.strip_prefix("larder: ").unwrap_or(&said).to_owned();
    Ended::Refused { why, hint: None, could_not_run: true }
}
