//! Ratios between file systems, round by round.
//!
//! A small virtual machine changes its speed by half within minutes, so only runs of the same round
//! are compared, and what is quoted is the median of the rounds' ratios with their range. A ratio
//! is the other's time over ours: above 1, the first named is faster.

use crate::measure::median;
use crate::target::Target;
use crate::workload::Step;
use serde::Serialize;
use std::fmt;

/// Who is compared with whom, in the order of the report.
pub(crate) const PAIRS: [(Target, Target); 14] = [
    (Target::Larder, Target::Kernel),
    (Target::LarderDirect, Target::KernelDirect),
    (Target::LarderLoop, Target::Kernel),
    (Target::KernelAgain, Target::Kernel),
    (Target::Larder, Target::Ceiling),
    (Target::LarderSlowFlush, Target::KernelSlowFlush),
    (Target::Larder, Target::LarderWholeInodes),
    (Target::Larder, Target::LarderLockedCopies),
    (Target::Larder, Target::LarderLogWaits),
    (Target::Larder, Target::LarderLogAlone),
    (Target::Larder, Target::LarderNoSandbox),
    (Target::LarderWriteback, Target::Kernel),
    (Target::LarderWriteback, Target::Larder),
    (Target::LarderWriteback, Target::CeilingWriteback),
];

/// Median and range of ratios.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Ratio {
    fn of(mut values: Vec<f64>) -> Option<Self> {
        let median = (!values.is_empty()).then(|| median(&mut values))?;
        Some(Self { median, low: values[0], high: values[values.len() - 1] })
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "**{:.2}** ({:.2}–{:.2})", self.median, self.low, self.high)
    }
}

/// All steps of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results<'a>(pub(crate) &'a [Step]);

impl<'a> Results<'a> {
    /// Names of the steps, in the order they were run.
    pub(crate) fn steps(self) -> Vec<&'a str> {
        let mut names = Vec::new();
        for s in self.0 {
            if !names.contains(&&*s.step) {
                names.push(&s.step);
            }
        }
        names
    }

    pub(crate) fn has(self, target: Target) -> bool {
        self.0.iter().any(|s| s.target == target)
    }

    /// The pairs of which both took part.
    pub(crate) fn pairs(self) -> impl Iterator<Item = (Target, Target)> {
        PAIRS.into_iter().filter(move |(a, b)| self.has(*a) && self.has(*b))
    }

    fn of(self, target: Target, step: &str) -> impl Iterator<Item = &'a Step> {
        self.0.iter().filter(move |s| s.target == target && s.step == step)
    }

    /// Median over the rounds of something measured.
    pub(crate) fn median_of(
        self,
        target: Target,
        step: &str,
        field: impl Fn(&Step) -> Option<f64>,
    ) -> Option<f64> {
        let mut values: Vec<f64> = self.of(target, step).filter_map(field).collect();
        (!values.is_empty()).then(|| median(&mut values))
    }

    /// The largest value of any round and step.
    pub(crate) fn peak(self, target: Target, field: impl Fn(&Step) -> f64) -> Option<f64> {
        self.0.iter().filter(|s| s.target == target).map(field).max_by(f64::total_cmp)
    }

    /// What `base` needed over what `target` needed, round by round.
    pub(crate) fn ratio_of(
        self,
        target: Target,
        base: Target,
        step: &str,
        field: impl Fn(&Step) -> f64,
    ) -> Option<Ratio> {
        let ratios = self.of(target, step).filter_map(|s| {
            let other = self.of(base, step).find(|o| o.round == s.round)?;
            Some(field(other) / field(s)).filter(|r| r.is_finite())
        });
        Ratio::of(ratios.collect())
    }

    /// The same for the time.
    pub(crate) fn ratio(self, target: Target, base: Target, step: &str) -> Option<Ratio> {
        self.ratio_of(target, base, step, |s| s.seconds)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn step(target: Target, round: usize, seconds: f64) -> Step {
        Step {
            target,
            round,
            step: "unpack".into(),
            seconds,
            cpu_seconds: 1.0,
            stolen_seconds: 0.0,
            daemon_cpu_seconds: None,
            memory_mib: 2.0,
            requests: None,
            stats: None,
            fsync: None,
        }
    }

    #[test]
    fn ratios_pair_rounds() {
        let steps = [
            step(Target::Kernel, 0, 2.0),
            step(Target::Larder, 0, 1.0),
            step(Target::Larder, 1, 8.0),
            step(Target::Kernel, 1, 4.0),
            // A round that only one of them has does not count.
            step(Target::Larder, 2, 1.0),
        ];
        let results = Results(&steps);
        let r = results.ratio(Target::Larder, Target::Kernel, "unpack").unwrap();
        assert_eq!(r, Ratio { median: 1.25, low: 0.5, high: 2.0 });
        assert_eq!(results.ratio(Target::Ceiling, Target::Kernel, "unpack"), None);
        assert_eq!(results.ratio(Target::Larder, Target::Kernel, "other"), None);
        assert_eq!(results.pairs().collect::<Vec<_>>(), [(Target::Larder, Target::Kernel)]);
        assert_eq!(results.peak(Target::Larder, |s| s.seconds), Some(8.0));
    }

    #[test]
    fn no_ratio_of_nothing() {
        let steps = [step(Target::Kernel, 0, 1.0), step(Target::Larder, 0, 0.0)];
        assert_eq!(Results(&steps).ratio(Target::Larder, Target::Kernel, "unpack"), None);
    }
}
