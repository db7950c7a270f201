//! Balances of what is mounted, which the daemon of the mount does.
//!
//! How far a balance is, the daemon knows. That there is one, the file system remembers. What both
//! say travels in the types here.

use super::{Pauses, Served};
use crate::interrupt::Interrupt;
use crate::jobs::{BalanceOrder, Job};
use crate::print;
use anyhow::anyhow;
use larder_fs::{BalancePlan, BalanceState, BalanceStatus, BalanceWish, Filesystem};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A balance was to be started beside another one.
pub(crate) const IS_RUNNING: &str = "a balance is running already";
/// There is no balance to pause or to cancel.
pub(crate) const NOT_RUNNING: &str = "no balance is running or paused";

/// Sets of filters in words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sets {
    pub(crate) data: Option<String>,
    pub(crate) metadata: Option<String>,
    pub(crate) system: Option<String>,
}

impl Sets {
    pub(crate) fn of(wish: &BalanceWish) -> Self {
        let words = |set: &Option<larder_fs::Filters>| set.as_ref().map(ToString::to_string);
        Self {
            data: words(&wish.data),
            metadata: words(&wish.metadata),
            system: words(&wish.system),
        }
    }
}

/// What is known of balances.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    /// The one that runs, or ran last since the file system was mounted.
    pub(crate) state: Option<BalanceState>,
    /// The one that runs or is paused, as the file system remembers it.
    pub(crate) unfinished: Option<Sets>,
}

impl Told {
    /// How far the balance is that runs.
    pub(crate) fn running(&self) -> Option<&BalanceState> {
        self.state.as_ref().filter(|state| state.status == BalanceStatus::Running)
    }
}

/// What a balance could free, and the filters that do it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) frees: u64,
    pub(crate) plan: BalancePlan,
    pub(crate) sets: Option<Sets>,
}

impl Plan {
    pub(crate) fn of(fs: &Filesystem) -> Self {
        let (plan, mixed) = (fs.balance_plan(), fs.space_usage().mixed);
        Self { frees: plan.frees(), plan, sets: plan.wish(mixed).as_ref().map(Sets::of) }
    }
}

/// The daemon behind a path.
#[derive(Debug)]
pub(crate) struct Balanced(Served);

impl Balanced {
    /// # Errors
    /// The path is not on a Larder mount.
    pub(crate) fn behind(path: &Path) -> anyhow::Result<Self> {
        Ok(Self(Served::behind(path)?))
    }

    /// Has something done, and learns how far the balance is afterwards.
    ///
    /// # Errors
    /// It is refused; the daemon cannot be asked.
    pub(crate) fn ask(&self, order: BalanceOrder) -> anyhow::Result<Told> {
        Ok(serde_json::from_slice(&self.answer(order)?)?)
    }

    /// What a balance could free.
    ///
    /// # Errors
    /// The daemon cannot be asked.
    pub(crate) fn plan(&self) -> anyhow::Result<Plan> {
        Ok(serde_json::from_slice(&self.answer(BalanceOrder::Plan)?)?)
    }

    /// Waits for the end of the balance, and has its state told to `each` now and then. A signal
    /// pauses it.
    ///
    /// # Errors
    /// The daemon cannot be asked; a signal has come.
    pub(crate) fn wait_for_the_end(
        &self,
        mut told: Told,
        each: &dyn Fn(&BalanceState),
    ) -> anyhow::Result<BalanceState> {
        let (interrupt, pauses) = (Interrupt::watch(), Pauses::begin());
        while let Some(state) = told.running() {
            each(state);
            if let Err(asked) = interrupt.wait(pauses.next()) {
                self.ask(BalanceOrder::Pause)?;
                print::say(
                    "larder: the balance is paused: `larder balance resume` goes on with it",
                );
                return Err(asked.into());
            }
            told = self.ask(BalanceOrder::Status)?;
        }
        told.state.ok_or_else(|| anyhow!("the daemon has forgotten the balance"))
    }

    fn answer(&self, order: BalanceOrder) -> anyhow::Result<Vec<u8>> {
        self.0.answer(Job::Balance(order), &[])
    }
}
