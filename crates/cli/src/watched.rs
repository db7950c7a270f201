//! Long work of this process: a line shows how far it is, and a signal ends it in order.

use crate::interrupt::Interrupt;
use indicatif::ProgressBar;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How often the line is drawn anew.
const TICK: Duration = Duration::from_millis(200);

/// Does the work while `show` says on `bar` how far it is. When a signal comes, `end` tells the
/// work to end, and its result counts no more.
///
/// # Errors
/// A signal has come.
pub(crate) fn watched<T: Send>(
    bar: &ProgressBar,
    work: impl FnOnce() -> T + Send,
    show: impl Fn(&ProgressBar),
    end: impl FnOnce(),
) -> anyhow::Result<T> {
    let interrupt = Interrupt::watch();
    // The worker's half is closed when the work is over, which wakes the watcher.
    let (over, running) = UnixStream::pair()?;
    let (result, asked) = std::thread::scope(|threads| {
        let worker = threads.spawn(move || {
            let _running = running;
            work()
        });
        let mut asked = Ok(());
        while asked.is_ok() && !worker.is_finished() {
            show(bar);
            asked = interrupt.wait_beside(TICK, Some(&over));
        }
        if asked.is_err() {
            end();
        }
        (worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), asked)
    });
    bar.finish_and_clear();
    asked?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn the_end_of_the_work_is_the_end_of_waiting() {
        let begin = Instant::now();
        for n in 0..20 {
            assert_eq!(watched(&ProgressBar::hidden(), || n, |_| (), || ()).unwrap(), n);
        }
        assert!(begin.elapsed() < 10 * TICK, "{:?}", begin.elapsed());
    }
}
