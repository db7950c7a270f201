//! Ratios between file systems, round by round.
//!
//! A small virtual machine changes its speed by half within minutes. So only runs of the same round
//! are compared, and the report has the median of the rounds' ratios, with their range. A ratio is
//! the second one's time over the first one's: above 1, the first is faster. Both are of the same
//! case: a hot image is compared with a hot one.

use crate::case::Case;
use crate::measure::median;
use crate::target::Target;
use crate::workload::Step;
use serde::Serialize;
use std::fmt;

/// The pairs that are compared, in the order of the report.
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

/// A step in a case: it has a row of its own in the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row<'a> {
    pub(crate) step: &'a str,
    pub(crate) case: Case,
}

/// The default case.
impl<'a> From<&'a str> for Row<'a> {
    fn from(step: &'a str) -> Self {
        Self { step, case: Case::default() }
    }
}

impl fmt::Display for Row<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.step, self.case)
    }
}

/// All steps of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results<'a>(pub(crate) &'a [Step]);

impl<'a> Results<'a> {
    /// The steps in the order they were run, the cases of each together.
    pub(crate) fn rows(self) -> Vec<Row<'a>> {
        let mut rows: Vec<Row<'a>> = Vec::new();
        for s in self.0 {
            let row = Row { step: &s.step, case: s.case };
            if !rows.contains(&row) {
                let last_of_step = rows.iter().rposition(|r| r.step == row.step);
                rows.insert(last_of_step.map_or(rows.len(), |at| at + 1), row);
            }
        }
        rows
    }

    pub(crate) fn has(self, target: Target) -> bool {
        self.0.iter().any(|s| s.target == target)
    }

    /// The pairs of which both took part.
    pub(crate) fn pairs(self) -> impl Iterator<Item = (Target, Target)> {
        PAIRS.into_iter().filter(move |(a, b)| self.has(*a) && self.has(*b))
    }

    fn of(self, target: Target, row: Row<'_>) -> impl Iterator<Item = &'a Step> {
        self.0
            .iter()
            .filter(move |s| s.target == target && s.step == row.step && s.case == row.case)
    }

    /// Median over the rounds of something measured.
    pub(crate) fn median_of<'r>(
        self,
        target: Target,
        row: impl Into<Row<'r>>,
        field: impl Fn(&Step) -> Option<f64>,
    ) -> Option<f64> {
        let mut values: Vec<f64> = self.of(target, row.into()).filter_map(field).collect();
        (!values.is_empty()).then(|| median(&mut values))
    }

    /// The largest value of any round and step.
    pub(crate) fn peak(self, target: Target, field: impl Fn(&Step) -> f64) -> Option<f64> {
        self.0.iter().filter(|s| s.target == target).map(field).max_by(f64::total_cmp)
    }

    /// What `base` needed, divided by what `target` needed, round by round.
    pub(crate) fn ratio_of<'r>(
        self,
        target: Target,
        base: Target,
        row: impl Into<Row<'r>>,
        field: impl Fn(&Step) -> f64,
    ) -> Option<Ratio> {
        let row = row.into();
        let ratios = self.of(target, row).filter_map(|s| {
            let other = self.of(base, row).find(|o| o.round == s.round)?;
            Some(field(other) / field(s)).filter(|r| r.is_finite())
        });
        Ratio::of(ratios.collect())
    }

    /// The same for the time.
    pub(crate) fn ratio<'r>(
        self,
        target: Target,
        base: Target,
        row: impl Into<Row<'r>>,
    ) -> Option<Ratio> {
        self.ratio_of(target, base, row, |s| s.seconds)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::case::{Mkfs, Pages};

    pub(crate) fn step(target: Target, round: usize, seconds: f64) -> Step {
        Step {
            target,
            round,
            case: Case::default(),
            step: "unpack".into(),
            seconds,
            cpu_seconds: 1.0,
            stolen_seconds: 0.0,
            daemon_cpu_seconds: None,
            memory_mib: 2.0,
            page_cache_mib: None,
            image_cached_mib: None,
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
    fn ratios_pair_cases() {
        let hot = Case { pages: Pages::Hot, ..Case::default() };
        let by_larder = Case { mkfs: Mkfs::Larder, ..Case::default() };
        let of = |case, target, seconds| Step { case, ..step(target, 0, seconds) };
        let mut steps = vec![
            of(hot, Target::Kernel, 8.0),
            of(Case::default(), Target::Kernel, 2.0),
            Step { step: "rm -rf".into(), ..step(Target::Kernel, 0, 1.0) },
            of(Case::default(), Target::Larder, 1.0),
            of(hot, Target::Larder, 2.0),
            // A case that only one of them has does not count.
            of(by_larder, Target::Larder, 1.0),
        ];
        let ratio = |steps: &[Step], case| {
            let row = Row { step: "unpack", case };
            Results(steps).ratio(Target::Larder, Target::Kernel, row).map(|r| r.median)
        };
        assert_eq!(ratio(&steps, hot), Some(4.0));
        assert_eq!(ratio(&steps, Case::default()), Some(2.0));
        assert_eq!(ratio(&steps, by_larder), None);
        let rows: Vec<String> = Results(&steps).rows().iter().map(Row::to_string).collect();
        assert_eq!(rows, ["unpack (hot)", "unpack", "unpack (larder mkfs)", "rm -rf"]);
        // Reports from before there were cases are of the default one.
        let mut old = serde_json::to_value(&steps[1]).unwrap();
        old.as_object_mut().unwrap().remove("case");
        steps[1] = serde_json::from_value(old).unwrap();
        assert_eq!(ratio(&steps, Case::default()), Some(2.0));
    }

    #[test]
    fn no_ratio_of_nothing() {
        let steps = [step(Target::Kernel, 0, 1.0), step(Target::Larder, 0, 0.0)];
        assert_eq!(Results(&steps).ratio(Target::Larder, Target::Kernel, "unpack"), None);
    }
}
