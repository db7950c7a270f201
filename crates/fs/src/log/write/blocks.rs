//! Where the nodes of a log lie.
//!
//! In block groups that the superblock knows on which the log hangs, and in no extent tree: they
//! are taken in the allocator's map alone. A node that a later batch has replaced may be used again
//! as soon as a superblock without it is durable; all of them are free once the transaction that
//! the log belongs to is published.

use super::{Cause, Result, Stop};
use crate::engine::Core;
use crate::space::groups::ClusterUser;
use crate::space::{Run, SpaceKind};
use larder_format::{Generation, Logical};
use std::collections::BTreeSet;

/// Addresses of a log's nodes.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// All that were taken.
    taken: BTreeSet<Logical>,
    /// Those of them that nothing durable leads to.
    unused: Vec<Logical>,
    /// Those that the nodes in memory have replaced, since [`Self::take_replaced`].
    replaced: Vec<Logical>,
    /// For tests that break the engine: what is replaced is used at once.
    pub(super) overwrites: bool,
}

impl Blocks {
    /// An address for a node of the log of `generation`. Never waits.
    ///
    /// # Errors
    /// The log has to be given up: no space that it may use.
    pub(super) fn take(&mut self, core: &Core, generation: Generation) -> Result<Logical> {
        if let Some(at) = self.unused.pop() {
            return Ok(at);
        }
        let accounts = &core.space.accounts;
        let bytes = u64::from(core.nodesize());
        let mut space =
            accounts.try_reserve(SpaceKind::Metadata, bytes).ok_or(Stop::Commit(Cause::NoSpace))?;
        let known = Generation(generation.0 - 1);
        let got = core.space.groups.allocate_block(ClusterUser::Running, known, &mut space);
        let at = got.map_err(|_| Stop::Commit(Cause::NewChunk))?;
        self.taken.insert(at);
        Ok(at)
    }
    /// The node there was written, and is not any more what the log is to have.
    pub(super) fn replace(&mut self, at: Logical) {
        if self.overwrites {
            self.unused.push(at);
            return;
        }
        self.replaced.push(at);
    }
    /// What was replaced: to be given to [`Self::reuse`] once a superblock without it is durable.
    pub(super) fn take_replaced(&mut self) -> Vec<Logical> {
        std::mem::take(&mut self.replaced)
    }
    /// Nothing durable leads there any more.
    pub(super) fn reuse(&mut self, some: Vec<Logical>) {
        self.unused.extend(some);
    }
    /// The log is no more: all its space, pinned until its transaction is published.
    ///
    /// # Errors
    /// Broken accounts.
    pub(super) fn retire(&mut self, core: &Core) -> crate::error::Result<Vec<Run>> {
        let nodesize = u64::from(core.nodesize());
        let runs: Vec<Run> =
            std::mem::take(&mut self.taken).into_iter().map(|at| Run::new(at, nodesize)).collect();
        for run in &runs {
            core.space.groups.pin(*run)?;
        }
        self.unused.clear();
        self.replaced.clear();
        Ok(runs)
    }
    /// How many nodes there are.
    pub(super) fn len(&self) -> usize {
        self.taken.len()
    }
}
