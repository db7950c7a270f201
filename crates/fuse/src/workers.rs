//! Threads for requests that have to wait.
//!
//! A pool grows with the requests that are waiting at the same time, and shrinks when they are
//! gone. It is bounded, and so is its line of jobs: a caller that finds the line full runs its job
//! itself. So memory stays bounded, too.
//!
//! Of the idle threads the one that worked last gets the next job: its stack and the data that it
//! has used are still in the caches. The others stay idle and end.

use crate::priority;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

/// An idle thread ends after this time.
const IDLE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct PoolState {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Idle threads; the one that worked last is the last.
    idle: Vec<Arc<Condvar>>,
    closed: bool,
}

struct Shared {
    state: Mutex<PoolState>,
    gone: Condvar,
    /// Of its threads.
    name: &'static str,
    max_threads: usize,
    max_jobs: usize,
}

/// The pool. [`finish`](Workers::finish) it before it goes.
#[derive(Clone)]
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let s = self.shared.state.lock();
        f.debug_struct("Workers").field("threads", &s.threads).field("jobs", &s.jobs.len()).finish()
    }
}

impl Workers {
    /// A pool of up to `max_threads` threads, none of which is started yet, with up to `max_jobs`
    /// in line.
    pub(crate) fn new(name: &'static str, max_threads: usize, max_jobs: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                gone: Condvar::new(),
                name,
                max_threads,
                max_jobs,
            }),
        }
    }

    /// Runs `job` on a thread of the pool, or at once on this thread if the line is full.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let state = self.shared.state.lock();
        if state.closed || state.jobs.len() >= self.shared.max_jobs {
            drop(state);
            return job();
        }
        self.push(state, Box::new(job));
    }

    /// Runs `job` on another thread, however long the line is: for callers that must not wait. Only
    /// after the pool's last thread has ended does it run on this one.
    pub(crate) fn run_elsewhere(&self, job: impl FnOnce() + Send + 'static) {
        let state = self.shared.state.lock();
        if state.closed && state.threads == 0 {
            drop(state);
            return job();
        }
        self.push(state, Box::new(job));
    }

    fn push(&self, mut state: MutexGuard<'_, PoolState>, job: Job) {
        state.jobs.push_back(job);
        if let Some(idle) = state.idle.pop() {
            drop(state);
            idle.notify_one();
            return;
        }
        if state.threads >= self.shared.max_threads {
            return;
        }
        state.threads += 1;
        let shared = Arc::clone(&self.shared);
        let started =
            std::thread::Builder::new().name(self.shared.name.into()).spawn(move || work(&shared));
        if started.is_err() {
            // No thread can be started. The jobs wait for those that exist; if there is none, they
            // run here.
            state.threads -= 1;
            if state.threads == 0
                && let Some(job) = state.jobs.pop_back()
            {
                drop(state);
                job();
            }
        }
    }
}

fn work(shared: &Shared) {
    // A queue's thread often starts this one, which inherits its nice value.
    priority::give_up();
    let me = Arc::new(Condvar::new());
    let mut state = shared.state.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            parking_lot::MutexGuard::unlocked(&mut state, job);
            continue;
        }
        if state.closed {
            break;
        }
        state.idle.push(Arc::clone(&me));
        let timed_out = me.wait_for(&mut state, IDLE).timed_out();
        // A thread that is woken for a job has been taken off the list.
        if let Some(at) = state.idle.iter().rposition(|idle| Arc::ptr_eq(idle, &me)) {
            state.idle.remove(at);
            if timed_out && state.jobs.is_empty() {
                break;
            }
        }
    }
    state.threads -= 1;
    shared.gone.notify_all();
}

impl Workers {
    /// Waits for every job and ends the threads. Later jobs run at once on their caller's thread.
    pub(crate) fn finish(&self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        for idle in std::mem::take(&mut state.idle) {
            idle.notify_one();
        }
        while state.threads > 0 {
            self.shared.gone.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn runs_everything_and_waits_at_the_end() {
        let done = Arc::new(AtomicUsize::new(0));
        let pool = Workers::new("test", 4, 4);
        for _ in 0..1000 {
            let done = Arc::clone(&done);
            pool.run(move || {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        pool.finish();
        assert_eq!(done.load(Ordering::Relaxed), 1000);
    }

    /// A job that runs while the pool is being finished may hold what the last job waits for.
    #[test]
    fn elsewhere_is_elsewhere_to_the_end() {
        let pool = Workers::new("test", 8, 8);
        let (out, threads) = mpsc::channel();
        let mine = pool.clone();
        pool.run(move || {
            while !mine.shared.state.lock().closed {
                std::thread::yield_now();
            }
            let (done, last) = mpsc::channel();
            mine.run_elsewhere(move || done.send(std::thread::current().id()).unwrap());
            out.send((std::thread::current().id(), last.recv().unwrap())).unwrap();
        });
        pool.finish();
        let (first, last) = threads.recv().unwrap();
        assert_ne!(first, last);
    }

    #[test]
    fn waiting_jobs_do_not_hold_up_others() {
        let pool = Workers::new("test", 8, 8);
        let (release, wait) = mpsc::channel::<()>();
        let (out, results) = mpsc::channel();
        let first = out.clone();
        pool.run(move || {
            wait.recv().unwrap();
            first.send("waited").unwrap();
        });
        pool.run(move || out.send("quick").unwrap());
        assert_eq!(results.recv().unwrap(), "quick");
        release.send(()).unwrap();
        assert_eq!(results.recv().unwrap(), "waited");
        pool.finish();
    }
}
