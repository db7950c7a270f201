//! Replies that no thread waits for.
//!
//! A request that waits keeps a thread, which is put to sleep and woken only to send the reply. A
//! handler may know which part of the engine will have the answer. Then it gives that part the
//! [`DeferredReply`] of the request, and its thread goes on with other work.

use crate::errno::Errno;
use crate::stats::Stats;
use crate::workers::Workers;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

type Sender = Box<dyn FnOnce(Result<(), Errno>) + Send>;

/// The reply that a request has not got yet: success without a body, or an errno. Dropping it
/// answers `EIO`.
///
/// Only requests that sync something are answered like this, so its time counts as the time of a
/// sync.
pub struct DeferredReply {
    send: Option<Sender>,
    workers: Workers,
    stats: Arc<Stats>,
    since: Instant,
}

impl std::fmt::Debug for DeferredReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeferredReply").field("owed", &self.send.is_some()).finish_non_exhaustive()
    }
}

impl DeferredReply {
    /// `send` hands the answer to the transport: on any thread, without waiting.
    pub(crate) fn new(
        workers: &Workers,
        stats: &Arc<Stats>,
        send: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) -> Self {
        let (workers, stats) = (workers.clone(), Arc::clone(stats));
        Self { send: Some(Box::new(send)), workers, stats, since: Instant::now() }
    }

    /// Answers, without waiting.
    pub fn answer(mut self, outcome: Result<(), Errno>) {
        self.send(outcome);
    }

    /// Goes on with the request by `begin`, on a thread that may wait.
    pub(crate) fn on_worker(self, begin: impl FnOnce(Self) + Send + 'static) {
        let (workers, stats) = (self.workers.clone(), Arc::clone(&self.stats));
        workers.run_elsewhere(move || {
            // If this panics, the reply is dropped, which answers `EIO`.
            if catch_unwind(AssertUnwindSafe(|| begin(self))).is_err() {
                stats.panic();
                tracing::error!("internal error while going on with a request");
            }
        });
    }

    fn send(&mut self, outcome: Result<(), Errno>) {
        if let Some(send) = self.send.take() {
            if outcome.is_err() {
                self.stats.error();
            }
            self.stats.synced(self.since.elapsed());
            send(outcome);
        }
    }
}

impl Drop for DeferredReply {
    fn drop(&mut self) {
        self.send(Err(Errno::IO));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn deferred(
        workers: &Workers,
        stats: &Arc<Stats>,
    ) -> (DeferredReply, mpsc::Receiver<Result<(), Errno>>) {
        let (out, answers) = mpsc::channel();
        (DeferredReply::new(workers, stats, move |outcome| out.send(outcome).unwrap()), answers)
    }

    #[test]
    fn every_request_is_answered_once() {
        let (workers, stats) = (Workers::new("test", 2, 2), Arc::default());
        let (at_once, answers) = deferred(&workers, &stats);
        at_once.answer(Ok(()));
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Ok(())]);
        let (forgotten, answers) = deferred(&workers, &stats);
        drop(forgotten);
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::IO)]);
        let (worked, answers) = deferred(&workers, &stats);
        let here = std::thread::current().id();
        worked.on_worker(move |reply| {
            reply.answer(if std::thread::current().id() == here {
                Ok(())
            } else {
                Err(Errno::NOENT)
            });
        });
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::NOENT)], "on another thread");
        let (panicking, answers) = deferred(&workers, &stats);
        panicking.on_worker(|_reply| panic!("as a test"));
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::IO)]);
        workers.finish();
        assert_eq!((stats.errors(), stats.panics()), (3, 1));
    }
}
