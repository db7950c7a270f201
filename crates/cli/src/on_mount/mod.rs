//! What the daemon of a mount does for a program: it sends, scrubs, balances, replaces a device and
//! makes other changes of devices.
//!
//! The daemon has the image, so it does the work. It is asked at its [attach socket](crate::attach),
//! which `served` finds. Each kind of work has a module that knows what a request brings along,
//! how often a waiter asks, and what a signal means.

pub(crate) mod balance;
pub(crate) mod devices;
pub(crate) mod replace;
pub(crate) mod scrub;
pub(crate) mod send;
mod served;

use served::Served;
use std::time::{Duration, Instant};

/// How long a waiter waits at most before it asks how far a job is, or looks whether a signal has
/// come.
const TICK: Duration = Duration::from_millis(200);
/// And how long at least.
const SHORTEST: Duration = Duration::from_millis(5);

/// Pauses between two questions how far a job is. The end of a job is noticed a thirtieth of its
/// time late at most, so short ones are asked about more often.
struct Pauses(Instant);

impl Pauses {
    fn begin() -> Self {
        Self(Instant::now())
    }

    fn next(&self) -> Duration {
        (self.0.elapsed() / 30).clamp(SHORTEST, TICK)
    }
}
