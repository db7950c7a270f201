//! The balance of a daemon.
//!
//! The file system itself remembers a balance that is not complete. So nothing is kept here but how
//! far the last one came. Before the file system is closed the balance is paused, and the next
//! mount goes on with it.

use super::{LongJob, Running, tell};
use crate::conduit::Outlet;
use crate::jobs::BalanceOrder;
use crate::on_mount::balance::{IS_RUNNING, NOT_RUNNING, Plan, Sets, Told};
use anyhow::{anyhow, bail};
use larder_fs::{BalanceControl, BalanceStatus, BalanceWish, DataMay, Filesystem, Filters};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct Balances(Arc<LongJob<BalanceControl>>);

/// What a balance begins with.
enum Begin {
    Start(Box<BalanceWish>, DataMay),
    Resume,
}

impl Balances {
    /// Does what is wanted, and says how far the balance is. One that begins runs here.
    ///
    /// # Errors
    /// What is refused.
    pub(super) fn obey(
        &self,
        fs: &Filesystem,
        order: &BalanceOrder,
        outlet: &Outlet,
    ) -> anyhow::Result<()> {
        match order {
            BalanceOrder::Plan => {
                tell(outlet, &Plan::of(fs));
                return Ok(());
            }
            BalanceOrder::Status => {}
            BalanceOrder::Pause => self.0.stop(BalanceControl::pause, NOT_RUNNING)?,
            BalanceOrder::Cancel if self.0.running().is_some() => {
                self.0.stop(BalanceControl::cancel, NOT_RUNNING)?;
            }
            BalanceOrder::Cancel => cancel_paused(fs)?,
            BalanceOrder::Resume => return self.begin(fs, Begin::Resume, outlet),
            BalanceOrder::Start { data, metadata, system, force, as_linux } => {
                let (data, metadata, system) = (read(data)?, read(metadata)?, read(system)?);
                let wish = BalanceWish { data, metadata, system, force: *force };
                let may = if *as_linux { DataMay::LoseRedundancy } else { DataMay::KeepRedundancy };
                return self.begin(fs, Begin::Start(Box::new(wish), may), outlet);
            }
        }
        tell(outlet, &self.told(fs));
        Ok(())
    }

    /// Balances, and answers as soon as it is known whether it begins.
    fn begin(&self, fs: &Filesystem, begin: Begin, outlet: &Outlet) -> anyhow::Result<()> {
        let running = self.0.begin(BalanceControl::default(), IS_RUNNING)?;
        let refused = std::thread::scope(|threads| {
            let answer = threads.spawn(|| {
                running.wait_for_the_beginning();
                let state = running.state();
                let refused = state.why.filter(|_| state.status == BalanceStatus::Failed);
                if refused.is_none() {
                    tell(outlet, &self.told(fs));
                }
                refused
            });
            run(fs, begin, &running);
            answer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        self.has_ended(running);
        refused.map_or(Ok(()), |why| Err(anyhow!(why)))
    }

    /// Goes on with a balance that is paused, if there is one.
    pub(super) fn go_on(&self, fs: &Filesystem) {
        let is_paused = fs.unfinished_balance().is_ok_and(|wish| wish.is_some());
        if is_paused && let Ok(running) = self.0.begin(BalanceControl::default(), IS_RUNNING) {
            tracing::info!("a balance that was interrupted goes on");
            run(fs, Begin::Resume, &running);
            self.has_ended(running);
        }
    }

    /// What was refused leaves nothing to tell.
    fn has_ended(&self, running: Running<BalanceControl>) {
        if !running.has_begun() {
            running.forget();
        }
    }

    fn told(&self, fs: &Filesystem) -> Told {
        let state = self.0.control().map(|control| control.state());
        let unfinished = fs.unfinished_balance().ok().flatten();
        Told { state, unfinished: unfinished.as_ref().map(Sets::of) }
    }

    /// Pauses the balance.
    pub(super) fn end(&self) {
        self.0.end(BalanceControl::pause);
    }
}

fn cancel_paused(fs: &Filesystem) -> anyhow::Result<()> {
    if fs.unfinished_balance()?.is_none() {
        bail!(NOT_RUNNING);
    }
    Ok(fs.cancel_paused_balance()?)
}

/// A set of filters in words.
fn read(set: &Option<String>) -> anyhow::Result<Option<Filters>> {
    set.as_ref().map(|set| set.parse().map_err(|why: String| anyhow!(why))).transpose()
}

fn run(fs: &Filesystem, begin: Begin, control: &BalanceControl) {
    let result = match begin {
        Begin::Start(wish, may) => fs.balance(&wish, may, control),
        Begin::Resume => fs.resume_balance(control),
    };
    if let Err(e) = result {
        tracing::warn!("the balance has ended: {e}");
    }
}
