//! How threads work on contents while the order is kept.
//!
//! Jobs are numbered as they are submitted. Any thread takes the next one. Results are handed out
//! in the order of the jobs. At most a window of jobs lies between the last that was submitted and
//! the last whose result was handed out. So memory is bounded, however fast the source or slow one
//! job is. The end of any part, also by an error or a panic, ends the waits of all others
//! ([`Pipeline::stop`]).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Jobs in, results out.
#[derive(Debug)]
pub(crate) struct Pipeline<J, R> {
    state: Mutex<State<J, R>>,
    changed: Condvar,
    window: u64,
}

#[derive(Debug)]
struct State<J, R> {
    waiting: VecDeque<(u64, J)>,
    done: BTreeMap<u64, R>,
    submitted: u64,
    taken: u64,
    /// No more jobs come.
    complete: bool,
    stopped: bool,
}

/// The pipeline was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

impl<J, R> Pipeline<J, R> {
    /// A pipeline with at most `window` jobs on their way.
    pub(crate) fn new(window: u64) -> Self {
        let state = State {
            waiting: VecDeque::new(),
            done: BTreeMap::new(),
            submitted: 0,
            taken: 0,
            complete: false,
            stopped: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), window: window.max(1) }
    }

    fn lock(&self) -> MutexGuard<'_, State<J, R>> {
        // A panic elsewhere stops the pipeline; what it holds is consistent all the same.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State<J, R>>) -> MutexGuard<'a, State<J, R>> {
        self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Hands a job in. Waits while the window is full.
    pub(crate) fn submit(&self, job: J) -> Result<(), Stopped> {
        let mut state = self.lock();
        while !state.stopped && state.submitted - state.taken >= self.window {
            state = self.wait(state);
        }
        if state.stopped {
            return Err(Stopped);
        }
        let number = state.submitted;
        state.submitted += 1;
        state.waiting.push_back((number, job));
        self.changed.notify_all();
        Ok(())
    }

    /// No more jobs come.
    pub(crate) fn complete(&self) {
        self.lock().complete = true;
        self.changed.notify_all();
    }

    /// Ends all waits, now and later.
    pub(crate) fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Does jobs until there are no more.
    pub(crate) fn work(&self, mut one: impl FnMut(J) -> R) {
        let mut state = self.lock();
        loop {
            if state.stopped {
                return;
            }
            if let Some((number, job)) = state.waiting.pop_front() {
                drop(state);
                let result = one(job);
                state = self.lock();
                state.done.insert(number, result);
                self.changed.notify_all();
            } else if state.complete {
                return;
            } else {
                state = self.wait(state);
            }
        }
    }

    /// The result of the next job in order; `None` behind the last, or when stopped.
    pub(crate) fn take(&self) -> Option<R> {
        let mut state = self.lock();
        loop {
            if state.stopped {
                return None;
            }
            let next = state.taken;
            if let Some(result) = state.done.remove(&next) {
                state.taken += 1;
                self.changed.notify_all();
                return Some(result);
            }
            if state.complete && next == state.submitted {
                return None;
            }
            state = self.wait(state);
        }
    }
}

/// Stops a pipeline when it is dropped, unless all went well.
#[derive(Debug)]
pub(crate) struct StopGuard<'a, J, R>(pub(crate) Option<&'a Pipeline<J, R>>);

impl<J, R> StopGuard<'_, J, R> {
    /// All went well.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl<J, R> Drop for StopGuard<'_, J, R> {
    fn drop(&mut self) {
        if let Some(pipeline) = self.0 {
            pipeline.stop();
        }
    }
}

/// Buffers that are used again: memory from the system is costly to touch for the first time.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// A buffer of at least `len` bytes with anything in it.
    pub(crate) fn take(&self, len: usize) -> Vec<u8> {
        let mut buffers = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut buffer = buffers.pop().unwrap_or_default();
        drop(buffers);
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        buffer
    }

    /// Takes a buffer back.
    pub(crate) fn give(&self, buffer: Vec<u8>) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn results_come_in_order_and_the_window_holds() {
        let pipeline = Pipeline::new(7);
        let running = AtomicU64::new(0);
        let out = std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    pipeline.work(|n: u64| {
                        assert!(running.fetch_add(1, Ordering::Relaxed) < 7);
                        for _ in 0..(n * 7919) % 1000 {
                            std::hint::spin_loop();
                        }
                        running.fetch_sub(1, Ordering::Relaxed);
                        n * 2
                    });
                });
            }
            let taker = s.spawn(|| std::iter::from_fn(|| pipeline.take()).collect::<Vec<_>>());
            for n in 0..2000 {
                pipeline.submit(n).unwrap();
            }
            pipeline.complete();
            taker.join().unwrap()
        });
        assert_eq!(out, (0..2000).map(|n| n * 2).collect::<Vec<_>>());
    }

    #[test]
    fn a_stop_ends_every_wait() {
        let pipeline: Pipeline<u64, u64> = Pipeline::new(1);
        std::thread::scope(|s| {
            s.spawn(|| pipeline.work(|n| n));
            s.spawn(|| while pipeline.submit(1).is_ok() {});
            s.spawn(|| {
                let guard = StopGuard(Some(&pipeline));
                assert_eq!(pipeline.take(), Some(1));
                drop(guard);
            });
        });
        assert_eq!((pipeline.take(), pipeline.submit(2)), (None, Err(Stopped)));
    }
}
