//! Where the nodes of a log lie.
//!
//! They lie in block groups that are known to the superblock on which the log hangs. They are in no
//! extent tree, but only taken in the allocator's map. A node that a later batch has replaced may
//! be used again as soon as a superblock without it is durable. All nodes are free once the
//! transaction to which the log belongs is published.
//!
//! Where there is parity, nodes that are written together have rows of their own. So the place of a
//! node that was replaced goes back to the allocator, which knows when its row is free.

use super::{Cause, NotLogged, Result};
use crate::engine::Core;
use crate::space::groups::ClusterUser;
use crate::space::stripes::Unit;
use crate::space::{Run, SpaceKind};
use larder_format::{Generation, Logical};
use std::collections::BTreeSet;

/// Addresses of a log's nodes.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// All addresses that were taken.
    taken: BTreeSet<Logical>,
    /// Those of them to which nothing durable leads.
    unused: Vec<Logical>,
    /// Those whose nodes were replaced in memory since the last [`Self::take_replaced`].
    replaced: Vec<Logical>,
    /// What is written together now.
    step: Option<Unit>,
    /// For tests that break the engine: replaced nodes are overwritten at once.
    pub(super) overwrites: bool,
}

impl Blocks {
    /// Nodes that get their places from now on are written together.
    pub(super) fn begin_step(&mut self, core: &Core) {
        self.step = Some(core.space.groups.next_log_step());
    }
    /// An address for a node of the log of `generation`. Never waits.
    ///
    /// # Errors
    /// The log has to be given up, because there is no space that it may use.
    pub(super) fn take(&mut self, core: &Core, generation: Generation) -> Result<Logical> {
        if let Some(at) = self.unused.pop() {
            return Ok(at);
        }
        let accounts = &core.space.accounts;
        let bytes = u64::from(core.nodesize());
        let mut space = accounts
            .try_reserve(SpaceKind::Metadata, bytes)
            .ok_or(NotLogged::Commit(Cause::NoSpace))?;
        let known = Generation(generation.0 - 1);
        let groups = &core.space.groups;
        let step = *self.step.get_or_insert_with(|| groups.next_log_step());
        let got = groups.allocate_block((ClusterUser::Running, step), known, &mut space);
        let at = got.map_err(|_| NotLogged::Commit(Cause::NewChunk))?;
        self.taken.insert(at);
        Ok(at)
    }
    /// The node at this address was written, but is no part of the log any more.
    pub(super) fn replace(&mut self, at: Logical) {
        if self.overwrites {
            self.unused.push(at);
            return;
        }
        self.replaced.push(at);
    }
    /// The addresses of replaced nodes. They are given to [`Self::reuse`] once a superblock without
    /// these nodes is durable.
    pub(super) fn take_replaced(&mut self) -> Vec<Logical> {
        std::mem::take(&mut self.replaced)
    }
    /// Nothing durable leads to these addresses any more.
    pub(super) fn reuse(&mut self, core: &Core, some: Vec<Logical>) {
        let groups = &core.space.groups;
        for at in some {
            if groups.find(at).is_some_and(|g| g.stripes().is_some()) {
                if self.taken.remove(&at) {
                    groups.give_back(Run::new(at, u64::from(core.nodesize())), None);
                }
            } else {
                self.unused.push(at);
            }
        }
    }
    /// The log has ended: returns all its space, pinned until its transaction is published.
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
