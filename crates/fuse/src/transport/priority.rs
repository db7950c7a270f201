//! Precedence: a queue's thread gets more of its CPU than those whose requests it answers, so that
//! they stay there.
//!
//! A request is answered on the CPU that it was made on. The caller goes to sleep, the queue's
//! thread answers, wakes it, and goes to sleep in its turn. Where the caller goes on is decided
//! when it is woken, and at that moment the queue's thread still runs: to a scheduler that looks
//! for an idle CPU, another one looks better. Taking it costs an interrupt from CPU to CPU and 25
//! µs until that has left its halt, again for the next request's thread there, and both find cold
//! caches.
//!
//! Linux's scheduler (EEVDF) does not look where the sleeper never left: since 6.12 a thread that
//! goes to sleep after having had more than its share stays in its run queue until its share has
//! caught up ("delayed dequeue"), and when it is woken before, it just goes on. So callers stay
//! where they are as long as they have had more than the queue's thread, in proportion to the
//! weights of both. With equal weights that depends on a microsecond in the time that an answer
//! takes: with the in-memory server one more made an unpacked source tree 3.4 seconds slower, four
//! times the added time. With [`STEPS`], callers nearly always stay: 9,000 interrupts in unpacking
//! a source tree instead of 180,000, and 13 seconds instead of 22.
//!
//! Shares are compared within one scheduling group: a control group with the `cpu` controller or,
//! with `kernel.sched_autogroup_enabled` (Linux's default), a session. A caller that is alone in
//! its group always leaves. That is why the daemon stays in the session that it was started from.
//! For those of other sessions nothing is won.
//!
//! A lower nice value takes a right: root has it, others if `RLIMIT_NICE` says so. Without, all
//! works as before. The daemon gives the right up with all others before it reads an image. So it
//! takes the nice value itself before ([`take`]), starts a thread that inherits it ([`pass_on`]),
//! and goes back; that thread starts the queues' threads, which inherit it in their turn. What
//! these start goes back, too ([`give_up`]): a higher nice value takes no right.

use parking_lot::Mutex;
use rustix::process::{getpriority_process, setpriority_process};
use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

/// How many nice levels a queue's thread is above the others: 2.4 times the weight. More wins
/// nothing.
const STEPS: i32 = 4;

/// The nice value of the other threads.
static USUAL: OnceLock<i32> = OnceLock::new();
/// The thread that has precedence and starts others.
static STARTER: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);

type Job = Box<dyn FnOnce() + Send>;

/// To be asked for the first time by a thread that has the usual nice value.
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

/// Gives this thread precedence, if it may; those that it starts inherit it. Whether it did.
pub(crate) fn take() -> bool {
    set((usual() - STEPS).max(-20))
}

/// Takes precedence from this thread, which keeps it for [`spawn`]. To be called once after
/// [`take`] succeeded.
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
        Err(error) => tracing::debug!(%error, "no thread keeps the right to precedence"),
    }
    give_up();
}

/// Takes precedence from this thread: whoever was started by one that has it.
pub(crate) fn give_up() {
    set(usual());
}

/// Ends the thread that [`pass_on`] started: no more queues come.
pub(crate) fn end() {
    *STARTER.lock() = None;
}

/// Starts a thread that has precedence, if that is to be had.
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
