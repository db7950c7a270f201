//! How long something takes, counted so that percentiles can be reported.
//!
//! Times fall into classes, four to each doubling from 1 µs on. So a percentile is known to a fifth
//! of its value, and every time is counted by three relaxed atomic additions. Nothing is ever
//! removed: the counters cover the whole life of a mount.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Classes for each doubling, as bits.
const FINE: u32 = 2;
/// Enough for half an hour and more; what is longer counts as that.
const CLASSES: usize = 128;

/// Times so far.
#[derive(Debug)]
pub(crate) struct Latency {
    classes: [AtomicU64; CLASSES],
    total_us: AtomicU64,
    longest_us: AtomicU64,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            classes: std::array::from_fn(|_| AtomicU64::new(0)),
            total_us: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
        }
    }
}

impl Latency {
    pub(crate) fn count(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.classes[class(us)].fetch_add(1, Relaxed);
        self.total_us.fetch_add(us, Relaxed);
        self.longest_us.fetch_max(us, Relaxed);
    }

    /// As JSON, in microseconds; percentiles are the ends of their classes.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let counts: Vec<u64> = self.classes.iter().map(|c| c.load(Relaxed)).collect();
        let number: u64 = counts.iter().sum();
        let longest = self.longest_us.load(Relaxed);
        let within = |hundredths: u64| {
            let rank = (number * hundredths).div_ceil(100);
            let mut seen = 0;
            let found = counts.iter().position(|n| {
                seen += n;
                seen >= rank
            });
            found.map_or(0, end).min(longest)
        };
        serde_json::json!({
            "count": number,
            "mean_us": self.total_us.load(Relaxed).checked_div(number).unwrap_or(0),
            "p50_us": within(50),
            "p99_us": within(99),
            "max_us": longest,
        })
    }
}

/// The class of a time.
fn class(us: u64) -> usize {
    let us = us.max(1);
    let doublings = us.ilog2();
    // The bits behind the first one, of which small numbers have fewer.
    let rest = (us << FINE >> doublings) as usize & ((1 << FINE) - 1);
    ((doublings << FINE) as usize + rest).min(CLASSES - 1)
}

/// The longest time of a class.
fn end(class: usize) -> u64 {
    let next = class as u64 + 1;
    let (doublings, rest) = (next >> FINE, next & ((1 << FINE) - 1));
    (((1 << FINE) + rest) << doublings).div_ceil(1 << FINE) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_classes_that_hold_them() {
        for us in (0..5000).chain([1 << 20, (1 << 20) + 1, 3_000_000_000]) {
            let class = class(us);
            assert!(end(class) >= us, "{us} is beyond class {class}");
            assert!(
                end(class) <= us.max(1) * 5 / 4,
                "class {class} is too wide for {us}: {}",
                end(class)
            );
        }
        assert_eq!(class(u64::MAX >> FINE), CLASSES - 1);
    }

    #[test]
    fn percentiles_are_told() {
        let latency = Latency::default();
        assert_eq!(latency.to_json()["p99_us"], 0);
        for ms in 1..=100 {
            latency.count(Duration::from_millis(ms));
        }
        let told = latency.to_json();
        let near = |key: &str, ms: u64| {
            let us = told[key].as_u64().unwrap();
            assert!((ms * 1000..=ms * 1250).contains(&us), "{key} is {us}");
        };
        near("p50_us", 50);
        near("p99_us", 99);
        assert_eq!(told["max_us"], 100_000);
        assert_eq!(told["mean_us"], 50_500);
        assert_eq!(told["count"], 100);
    }
}
