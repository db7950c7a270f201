//! A queue's thread has a lower nice value than the threads whose requests it answers, so that
//! these stay on its CPU.
//!
//! A request is answered on the CPU that it was made on. When the caller is woken, the queue's
//! thread still runs there, and the scheduler would take an idle CPU instead. It does not look for
//! one if the caller has had more than its share compared to the queue's thread. With [`STEPS`]
//! that nearly always holds: 9,000 interrupts in unpacking a source tree instead of 180,000, and 13
//! seconds instead of 22. `docs/FUSE.md` ("Callers stay on their CPU") has the whole reason.
//!
//! A lower nice value takes a right that the daemon gives up before it reads an image. So the
//! daemon takes the nice value before that ([`take`]), starts a thread that inherits it
//! ([`pass_on`]), and goes back. That thread starts the queues' threads, and they inherit the value
//! in turn. Threads that these start go back, too ([`give_up`]). Without the right everything works
//! as before.

use parking_lot::Mutex;
use rustix::process::{getpriority_process, setpriority_process};
use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

/// How many nice levels a queue's thread is above the others: 2.4 times the weight. More gains
/// nothing.
const STEPS: i32 = 4;

/// The nice value of the other threads.
static USUAL: OnceLock<i32> = OnceLock::new();
/// The thread that keeps the lower nice value and starts others with it.
static STARTER: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);

type Job = Box<dyn FnOnce() + Send>;

/// A thread that has the usual nice value must call this first.
fn usual() -> i32 {
    *USUAL.get_or_init(|| getpriority_process(None).unwrap_or(0))
}

/// On Linux the nice value is the calling thread's, not the process's.
fn set(nice: i32) -> bool {
    let done = setpriority_process(None, nice);
    if let Err(error) = done {
        tracing::debug!(nice, %error, "the nice value stays as it is");
    }
    done.is_ok()
}

/// Gives this thread the lower nice value if it has the right; threads that it starts inherit it.
/// True if it worked.
pub(crate) fn take() -> bool {
    set((usual() - STEPS).max(-20))
}

/// Starts a thread that keeps the lower nice value for [`spawn`], and gives it up in this one. To
/// be called once, after [`take`] succeeded.
pub(crate) fn pass_on() {
    let (sender, jobs) = mpsc::channel::<Job>();
    let started =
        Builder::new().name("larder-starter".into()).stack_size(128 << 10).spawn(move || {
            for job in jobs {
                job();
            }
        });
    match started {
        Ok(_) => *STARTER.lock() = Some(sender),
        Err(error) => tracing::debug!(%error, "no thread keeps the lower nice value"),
    }
    give_up();
}

/// Returns this thread to the usual nice value. For threads that were started by one with the lower
/// value.
pub(crate) fn give_up() {
    set(usual());
}

/// Ends the thread that [`pass_on`] started: no more queues will be made.
pub(crate) fn end() {
    *STARTER.lock() = None;
}

/// Starts a thread with the lower nice value, if there is the right.
///
/// # Errors
/// No thread can be started.
pub(super) fn spawn(
    name: String,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    usual();
    let start = move || {
        Builder::new().name(name).spawn(move || {
            take();
            body();
        })
    };
    let starter = STARTER.lock().clone();
    let Some(starter) = starter else { return start() };
    let (done, wait) = mpsc::sync_channel(1);
    let job = Box::new(move || drop(done.send(start())));
    let ended = |_| io::Error::other("the thread that starts the queues has ended");
    starter.send(job).map_err(ended)?;
    wait.recv().map_err(io::Error::other)?
}
