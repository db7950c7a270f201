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
use std::time::Duration;

/// How often a waiter asks how far a job is, or looks whether a signal has come.
const TICK: Duration = Duration::from_millis(200);
