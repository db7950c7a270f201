//! Counters of requests: how many of each kind, and what became of them.
//!
//! Requests per operation explain more of a mount's speed than times do, so they are always
//! counted. Every counter is a relaxed atomic: each is exact, but together they are no snapshot.

use crate::latency::Latency;
use crate::proto::Opcode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SLOTS: usize = 64;

/// Counters of one mount.
#[derive(Debug)]
pub struct Stats {
    by_opcode: [AtomicU64; SLOTS],
    total: AtomicU64,
    errors: AtomicU64,
    deferred: AtomicU64,
    panics: AtomicU64,
    forgotten: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    /// When counting began: with the mount.
    since: Instant,
    syncs: Latency,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            by_opcode: std::array::from_fn(|_| AtomicU64::new(0)),
            total: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            deferred: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            since: Instant::now(),
            syncs: Latency::default(),
        }
    }
}

impl Stats {
    pub(crate) fn request(&self, opcode: u32) {
        self.total.fetch_add(1, Relaxed);
        if let Some(slot) = self.by_opcode.get(opcode as usize) {
            slot.fetch_add(1, Relaxed);
        }
    }
    pub(crate) fn error(&self) {
        self.errors.fetch_add(1, Relaxed);
    }
    pub(crate) fn deferral(&self) {
        self.deferred.fetch_add(1, Relaxed);
    }
    pub(crate) fn panic(&self) {
        self.panics.fetch_add(1, Relaxed);
    }
    pub(crate) fn forget(&self, inodes: u64) {
        self.forgotten.fetch_add(inodes, Relaxed);
    }
    pub(crate) fn read_bytes(&self, n: usize) {
        self.read_bytes.fetch_add(n as u64, Relaxed);
    }
    pub(crate) fn written_bytes(&self, n: usize) {
        self.written_bytes.fetch_add(n as u64, Relaxed);
    }
    /// A sync of a file or directory has ended, with success or not.
    pub(crate) fn synced(&self, took: Duration) {
        self.syncs.count(took);
    }

    /// Time since counting began.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }
    /// All requests so far, FORGET included.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total.load(Relaxed)
    }
    /// Requests of one kind.
    #[must_use]
    pub fn of(&self, opcode: Opcode) -> u64 {
        self.by_opcode[opcode as usize].load(Relaxed)
    }
    /// Requests that left their queue's thread because they had to wait.
    #[must_use]
    pub fn deferred(&self) -> u64 {
        self.deferred.load(Relaxed)
    }
    /// Requests answered with an errno (an absent file is one).
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Relaxed)
    }
    /// Requests whose handler panicked (answered with EIO).
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.panics.load(Relaxed)
    }
    /// As JSON: totals, and the kinds that occurred.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let by_kind: serde_json::Map<String, serde_json::Value> = Opcode::ALL
            .iter()
            .filter(|op| self.of(**op) > 0)
            .map(|op| (op.name().to_owned(), self.of(*op).into()))
            .collect();
        serde_json::json!({
            "total": self.total(),
            "errors": self.errors(),
            "deferred": self.deferred(),
            "panics": self.panics(),
            "forgotten_inodes": self.forgotten.load(Relaxed),
            "read_bytes": self.read_bytes.load(Relaxed),
            "written_bytes": self.written_bytes.load(Relaxed),
            "fsync_latency": self.syncs.to_json(),
            "by_kind": by_kind,
        })
    }
}

const _: () = {
    let mut i = 0;
    while i < Opcode::ALL.len() {
        assert!((Opcode::ALL[i] as usize) < SLOTS);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_kind() {
        let stats = Stats::default();
        stats.request(Opcode::Lookup as u32);
        stats.request(Opcode::Lookup as u32);
        stats.request(Opcode::Write as u32);
        stats.request(4096);
        stats.written_bytes(10);
        assert_eq!(stats.total(), 4);
        assert_eq!(stats.of(Opcode::Lookup), 2);
        let json = stats.to_json();
        assert_eq!(json["by_kind"]["write"], 1);
        assert_eq!(json["by_kind"].get("read"), None);
        assert_eq!(json["written_bytes"], 10);
    }
}
