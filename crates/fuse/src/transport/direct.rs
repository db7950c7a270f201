//! Requests as bytes, answered in place: the transport without a kernel.
//!
//! A message is handled as it is over `/dev/fuse`: the same code parses it, then tries it in a
//! context that must not wait, then in one that may. But it stays on the caller's thread and needs
//! no descriptor. Tests and fuzzers use this, because no kernel would send them nonsense.

use super::dispatch::Dispatch;
use super::parse;
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Handler};
use crate::proto::InHeader;
use crate::proto::init::MAX_WRITE;
use crate::stats::Stats;
use std::sync::{Arc, mpsc};
use zerocopy::FromBytes;

/// A handler that gets its messages directly.
#[derive(Debug)]
pub struct Direct<H> {
    dispatch: Arc<Dispatch<H>>,
    out: Vec<u8>,
}

impl<H: Handler> Direct<H> {
    /// Sends messages to this handler, and counts as a mount does, panics of the handler included.
    #[must_use]
    pub fn new(handler: Arc<H>, stats: Arc<Stats>) -> Self {
        let dispatch = Arc::new(Dispatch::new(handler, stats));
        Self { dispatch, out: vec![0; MAX_WRITE as usize] }
    }

    /// The answer to a message: the body of the reply, or an errno. `None` if it has no reply, or
    /// is shorter than any message.
    pub fn message(&mut self, message: &[u8]) -> Option<Result<&[u8], i32>> {
        let (header, _) = InHeader::read_from_prefix(message).ok()?;
        self.dispatch.arrived(&header);
        if let Some(forgotten) = self.dispatch.parse_forgets(message, &header) {
            self.dispatch.forget(&forgotten);
            return None;
        }
        let raw = parse(message)?;
        let mut context = ExecContext::Queue;
        loop {
            if self.dispatch.defers_reply(&header, context) {
                let (send, answer) = mpsc::channel();
                self.dispatch.answer_deferred(raw, move |outcome| {
                    // The receiver is below.
                    let _ = send.send(outcome);
                });
                let answer = answer.recv().unwrap_or(Err(Errno::IO));
                return Some(answer.map(|()| &[][..]).map_err(|e| e.0));
            }
            match self.dispatch.answer(raw, &mut self.out, context) {
                Ok(len) => return Some(Ok(&self.out[..len])),
                Err(Failure::Errno(e)) => return Some(Err(e.0)),
                Err(Failure::Wait) => context = ExecContext::Worker,
                Err(Failure::WaitForKernel) => context = ExecContext::MayWaitForKernel,
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
    use crate::proto::{NodeId, Opcode};
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use zerocopy::IntoBytes;

    /// Replies with the name, on a worker only; counts what is forgotten.
    #[derive(Default)]
    struct Echo(AtomicU64);

    impl Handler for Echo {
        fn handle(
            &self,
            request: &Request<'_>,
            reply: &mut Reply<'_>,
            context: ExecContext,
        ) -> Outcome {
            match context {
                ExecContext::Queue => Err(Failure::Wait),
                _ => reply.bytes(request.name()?),
            }
        }
        fn forget(&self, node: NodeId, lookups: u64) {
            self.0.fetch_add(node.0 * lookups, Relaxed);
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
