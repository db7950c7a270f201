//! The replacement of a device that a daemon makes.
//!
//! The target comes along with the request, opened and locked, since the daemon opens nothing. How
//! far a replacement is stands in the file system. So a daemon that is killed leaves what the next
//! one goes on with, and one that ends suspends it.

use super::{LongJob, Running, tell};
use crate::conduit::Outlet;
use crate::jobs::ReplaceOrder;
use crate::on_mount::replace::{IS_RUNNING, NOT_RUNNING, NOTHING_TO_RESUME};
use anyhow::{anyhow, bail};
use larder_format::DeviceId;
use larder_fs::{
    Filesystem, ReplaceControl, ReplaceOptions, ReplaceSource, ReplaceStatus, Replacing,
};
use larder_volume::FileDevice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct Replaces(Arc<LongJob<ReplaceControl>>);

/// What a replacement begins with.
enum Begin {
    Start(ReplaceOptions, FileDevice),
    Resume,
}

impl Replaces {
    /// Does what is wanted, and says how far the replacement is. One that begins runs here.
    ///
    /// # Errors
    /// What is refused.
    pub(super) fn obey(
        &self,
        fs: &Filesystem,
        order: &ReplaceOrder,
        target: Vec<OwnedFd>,
        outlet: &Outlet,
    ) -> anyhow::Result<()> {
        let begin = match order {
            ReplaceOrder::Status => None,
            ReplaceOrder::Suspend => {
                self.0.stop(ReplaceControl::suspend, NOT_RUNNING)?;
                None
            }
            ReplaceOrder::Cancel => {
                self.cancel(fs)?;
                None
            }
            ReplaceOrder::Resume => Some(Begin::Resume),
            ReplaceOrder::Start { source, avoid, target: handed } => {
                let device = handed.device(target);
                let device = device.ok_or_else(|| anyhow!("the target did not come along"))?;
                let read = if *avoid { ReplaceSource::Avoid } else { ReplaceSource::Use };
                let options = ReplaceOptions { source: DeviceId(*source), read };
                Some(Begin::Start(options, device))
            }
        };
        let running = begin.as_ref().map(|begin| self.begin(fs, begin)).transpose()?;
        tell(outlet, &self.state(fs));
        if let (Some(begin), Some(running)) = (begin, running) {
            run(fs, begin, &running);
        }
        Ok(())
    }

    fn cancel(&self, fs: &Filesystem) -> anyhow::Result<()> {
        if self.0.running().is_some() {
            return self.0.stop(ReplaceControl::cancel, NOT_RUNNING);
        }
        self.0.forget_last();
        match fs.cancel_replacement() {
            Err(larder_fs::Error::NotFound) => bail!(NOT_RUNNING),
            done => Ok(done?),
        }
    }

    fn begin(&self, fs: &Filesystem, begin: &Begin) -> anyhow::Result<Running<ReplaceControl>> {
        if fs.is_opened_read_only() {
            bail!("it is mounted read-only");
        }
        let running = self.0.begin(ReplaceControl::default(), IS_RUNNING)?;
        let is_left = fs.replacement().status == ReplaceStatus::Suspended;
        if matches!(begin, Begin::Resume) && !is_left {
            running.forget();
            bail!(NOTHING_TO_RESUME);
        }
        Ok(running)
    }

    /// What the last mount has left, if it may go on.
    pub(super) fn claim(&self, fs: &Filesystem) -> Option<Running<ReplaceControl>> {
        let is_left = fs.replacement().status == ReplaceStatus::Suspended;
        if fs.is_opened_read_only() || !is_left {
            return None;
        }
        self.begin(fs, &Begin::Resume).ok()
    }

    /// How far it is.
    fn state(&self, fs: &Filesystem) -> Replacing {
        let state = self.0.control().map(|control| control.state());
        match state {
            Some(state) if state.status != ReplaceStatus::Never => state,
            Some(_) if self.0.running().is_some() => {
                Replacing { status: ReplaceStatus::Running, ..fs.replacement() }
            }
            _ => fs.replacement(),
        }
    }

    /// Suspends the replacement.
    pub(super) fn end(&self) {
        self.0.end(ReplaceControl::suspend);
    }
}

/// Goes on with what the last mount has left.
pub(super) fn go_on(fs: &Filesystem, begun: Running<ReplaceControl>) {
    run(fs, Begin::Resume, &begun);
}

fn run(fs: &Filesystem, begin: Begin, control: &ReplaceControl) {
    let done = match begin {
        Begin::Start(options, target) => fs.replace_device(options, Arc::new(target), control),
        Begin::Resume => fs.resume_replacement(control),
    };
    if let Err(e) = done {
        tracing::info!("the replacement of a device has ended: {e}");
    }
}
