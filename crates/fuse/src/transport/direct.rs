//! Requests as bytes, answered in place: the transport without a kernel.
//!
//! A message takes the way that it takes through `/dev/fuse` — taken apart by the same code, tried
//! by a thread that must not wait, then by one that may — but on the caller's thread and without a
//! descriptor. It exists for tests and fuzzers, which have no kernel that would send them nonsense.

use super::{Dispatch, parse};
use crate::errno::Errno;
use crate::handler::{Failure, Handler, Patience};
use crate::proto::InHeader;
use crate::proto::init::MAX_WRITE;
use crate::stats::Stats;
use std::sync::{Arc, mpsc};
use zerocopy::FromBytes;

/// A handler that is spoken to directly.
#[derive(Debug)]
pub struct Direct<H> {
    dispatch: Arc<Dispatch<H>>,
    out: Vec<u8>,
}

impl<H: Handler> Direct<H> {
    /// Speaks to this handler, and counts as a mount does: a handler that panics is in the
    /// counters, too.
    #[must_use]
    pub fn new(handler: Arc<H>, stats: Arc<Stats>) -> Self {
        let dispatch = Arc::new(Dispatch::new(handler, stats));
        Self { dispatch, out: vec![0; MAX_WRITE as usize] }
    }

    /// The answer to a message: the body of the reply, or an errno. `None` for what has no reply,
    /// and for what is too short to have come from anybody.
    pub fn message(&mut self, message: &[u8]) -> Option<Result<&[u8], i32>> {
        let (header, _) = InHeader::read_from_prefix(message).ok()?;
        self.dispatch.arrived(&header);
        if let Some(forgotten) = self.dispatch.silent(message, &header) {
            self.dispatch.forget(&forgotten);
            return None;
        }
        let raw = parse(message)?;
        let mut patience = Patience::Queue;
        loop {
            if self.dispatch.answers_later(&header, patience) {
                let (send, answer) = mpsc::channel();
                self.dispatch.answer_later(raw, move |outcome| {
                    // Whoever waits for it is below.
                    let _ = send.send(outcome);
                });
                let answer = answer.recv().unwrap_or(Err(Errno::IO));
                return Some(answer.map(|()| &[][..]).map_err(|e| e.0));
            }
            match self.dispatch.answer(raw, &mut self.out, patience) {
                Ok(len) => return Some(Ok(&self.out[..len])),
                Err(Failure::Errno(e)) => return Some(Err(e.0)),
                Err(Failure::Wait) => patience = Patience::Worker,
                Err(Failure::WaitForKernel) => patience = Patience::Kernel,
            }
        }
    }
}

impl<H> Drop for Direct<H> {
    fn drop(&mut self) {
        self.dispatch.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::{Outcome, Reply, Request};
    use crate::proto::Opcode;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use zerocopy::IntoBytes;

    /// Gives back names, on a worker only; counts what is forgotten.
    #[derive(Default)]
    struct Echo(AtomicU64);

    impl Handler for Echo {
        fn handle(
            &self,
            request: &Request<'_>,
            reply: &mut Reply<'_>,
            patience: Patience,
        ) -> Outcome {
            match patience {
                Patience::Queue => Err(Failure::Wait),
                _ => reply.bytes(request.name()?),
            }
        }
        fn forget(&self, node: u64, count: u64) {
            self.0.fetch_add(node * count, Relaxed);
        }
    }

    #[test]
    fn messages_are_answered_as_through_a_descriptor() {
        let echo = Arc::new(Echo::default());
        let mut direct = Direct::new(echo.clone(), Arc::default());
        let message = |opcode: Opcode, rest: &[u8]| {
            let header = InHeader { opcode: opcode as u32, nodeid: 7, ..InHeader::default() };
            [header.as_bytes(), rest].concat()
        };
        assert_eq!(direct.message(&message(Opcode::Lookup, b"name\0")), Some(Ok(&b"name"[..])));
        assert_eq!(direct.message(&message(Opcode::Lookup, b"name")), Some(Err(Errno::INVAL.0)));
        assert_eq!(direct.message(&message(Opcode::Lookup, b"name\0")[..39]), None);
        assert_eq!(direct.message(&message(Opcode::Forget, &3u64.to_ne_bytes())), None);
        assert_eq!(echo.0.load(Relaxed), 21);
    }
}
