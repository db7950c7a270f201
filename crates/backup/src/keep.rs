//! `--keep hourly=24,daily=7`: which snapshots stay.
//!
//! A rule divides time into hours, days, weeks, months or years of UTC, and keeps one snapshot of
//! each of the latest so many that have any. A snapshot stays if any rule keeps it. The newest one
//! always stays, because the next increment begins with it.
//!
//! Of an hour, a day and so on the *oldest* snapshot stays. So a snapshot that stands for its week
//! stands for its day and its hour, too, and goes on doing so when later ones come. So it makes no
//! difference how often a backup prunes: pruning now, and again after more snapshots, leaves the
//! same as pruning once at the end.

use crate::calendar;
use std::fmt;
use std::str::FromStr;

/// What time is divided into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Rule {
    Last,
    Hourly,
    Daily,
    Weekly,
    Monthly,
    Yearly,
}

impl Rule {
    /// All of them, from the finest on.
    pub const ALL: [Self; 6] =
        [Self::Last, Self::Hourly, Self::Daily, Self::Weekly, Self::Monthly, Self::Yearly];

    /// The word of the option.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Hourly => "hourly",
            Self::Daily => "daily",
            Self::Weekly => "weekly",
            Self::Monthly => "monthly",
            Self::Yearly => "yearly",
        }
    }

    /// The number of the hour, day … that a time is in. Weeks begin on Monday.
    fn period(self, time: i64) -> i64 {
        const HOUR: i64 = 3600;
        const DAY: i64 = 24 * HOUR;
        match self {
            Self::Last => time,
            Self::Hourly => time.div_euclid(HOUR),
            Self::Daily => time.div_euclid(DAY),
            // The first of January 1970 was a Thursday.
            Self::Weekly => (time.div_euclid(DAY) + 3).div_euclid(7),
            Self::Monthly => {
                let date = calendar::date(time);
                date.year * 12 + date.month
            }
            Self::Yearly => calendar::date(time).year,
        }
    }
}

/// The policy: how many of each rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// `None`: all that there are.
    rules: Vec<(Rule, Option<u32>)>,
}

/// The rules by which a snapshot stays; none if it goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasons {
    /// The next increment begins with it.
    pub newest: bool,
    /// In the order of [`Rule::ALL`].
    pub rules: Vec<Rule>,
}

impl Reasons {
    /// Does it stay?
    #[must_use]
    pub fn stays(&self) -> bool {
        self.newest || !self.rules.is_empty()
    }
}

impl Keep {
    /// For each of these times, in any order, why it stays. Equal times are the same snapshot.
    #[must_use]
    pub fn reasons(&self, times: &[i64]) -> Vec<Reasons> {
        let mut sorted: Vec<i64> = times.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let mut why = vec![Reasons::default(); sorted.len()];
        for (rule, count) in &self.rules {
            // From a period's first snapshot on, the latest periods first.
            let first = (0..sorted.len())
                .filter(|i| *i == 0 || rule.period(sorted[*i]) != rule.period(sorted[*i - 1]));
            let most = count.map_or(usize::MAX, |count| count as usize);
            for i in first.rev().take(most) {
                why[i].rules.push(*rule);
            }
        }
        if let Some(last) = why.last_mut() {
            last.newest = true;
        }
        let at = |time| sorted.binary_search(time).expect("it is one of these times");
        times.iter().map(|time| why[at(time)].clone()).collect()
    }
}

/// What is wrong with a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeepError(String);

impl fmt::Display for KeepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = Rule::ALL.iter().map(|rule| rule.name()).collect();
        let names = names.join(", ");
        write!(f, "{}: give RULE=COUNT, with commas between; rules are {names}", self.0)?;
        write!(f, "; the count is a number from 1 on, or `all`")
    }
}

impl std::error::Error for KeepError {}

impl FromStr for Keep {
    type Err = KeepError;

    fn from_str(text: &str) -> Result<Self, KeepError> {
        let mut rules: Vec<(Rule, Option<u32>)> = Vec::new();
        for part in text.split(',') {
            let wrong = |why: &str| KeepError(format!("{part:?} {why}"));
            let (name, count) = part.split_once('=').ok_or_else(|| wrong("has no ="))?;
            let rule = Rule::ALL.into_iter().find(|rule| rule.name() == name);
            let rule = rule.ok_or_else(|| wrong("is no rule"))?;
            let count = match count {
                "all" => None,
                digits => match digits.parse() {
                    Ok(count @ 1..) => Some(count),
                    _ => return Err(wrong("has no count")),
                },
            };
            if rules.iter().any(|(other, _)| *other == rule) {
                return Err(wrong("is there twice"));
            }
            rules.push((rule, count));
        }
        rules.sort_unstable_by_key(|(rule, _)| *rule);
        Ok(Self { rules })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3600;
    const DAY: i64 = 24 * HOUR;

    fn keep(text: &str) -> Keep {
        text.parse().unwrap()
    }

    fn stay(policy: &Keep, times: &[i64]) -> Vec<i64> {
        let why = policy.reasons(times);
        let mut out: Vec<i64> =
            times.iter().zip(why).filter(|(_, why)| why.stays()).map(|(time, _)| *time).collect();
        out.sort_unstable();
        out.dedup();
        out
    }

    fn any_policy() -> Keep {
        let mut parts = Vec::new();
        for rule in Rule::ALL {
            if fastrand::bool() {
                parts.push(match fastrand::u32(0..6) {
                    0 => format!("{}=all", rule.name()),
                    n => format!("{}={n}", rule.name()),
                });
            }
        }
        if parts.is_empty() { keep("last=1") } else { keep(&parts.join(",")) }
    }

    fn some_times(from: i64) -> Vec<i64> {
        let step = [60, HOUR, DAY, 20 * DAY][fastrand::usize(0..4)];
        let mut time = from;
        (0..fastrand::usize(0..60))
            .map(|_| {
                time += fastrand::i64(1..=step);
                time
            })
            .collect()
    }

    #[test]
    fn one_of_each_of_the_latest_days_stays() {
        let times: Vec<i64> = (0..100).map(|n| n * 6 * HOUR).collect();
        let newest = 99 * 6 * HOUR;
        assert_eq!(stay(&keep("daily=3"), &times), [22 * DAY, 23 * DAY, 24 * DAY, newest]);
        assert_eq!(stay(&keep("last=2"), &times), [98 * 6 * HOUR, newest]);
        assert_eq!(stay(&keep("yearly=all"), &times), [0, newest]);
        // The first Monday was the fifth of January.
        assert_eq!(stay(&keep("weekly=2"), &times), [11 * DAY, 18 * DAY, newest]);
        assert_eq!(stay(&keep("hourly=1"), &[]), []);
    }

    #[test]
    fn the_newest_stays_and_nothing_is_made_up() {
        fastrand::seed(1);
        for _ in 0..2000 {
            let (policy, times) = (any_policy(), some_times(fastrand::i64(0..3 * 365) * DAY));
            let left = stay(&policy, &times);
            assert_eq!(left.last(), times.last());
            assert!(left.iter().all(|time| times.contains(time)));
            assert_eq!(stay(&policy, &left), left, "pruning again removes nothing");
        }
    }

    #[test]
    fn the_order_of_the_list_is_no_matter() {
        fastrand::seed(1);
        for _ in 0..500 {
            let (policy, mut times) = (any_policy(), some_times(0));
            let left = stay(&policy, &times);
            fastrand::shuffle(&mut times);
            assert_eq!(stay(&policy, &times), left);
        }
    }

    #[test]
    fn it_is_no_matter_how_often_is_pruned() {
        fastrand::seed(1);
        for _ in 0..2000 {
            let (policy, before) = (any_policy(), some_times(0));
            let later = some_times(before.last().map_or(0, |last| *last));
            let all = [&before[..], &later].concat();
            let twice = stay(&policy, &[stay(&policy, &before), later].concat());
            assert_eq!(twice, stay(&policy, &all), "{policy:?} {all:?}");
        }
    }

    #[test]
    fn each_rule_keeps_as_many_as_it_says() {
        fastrand::seed(1);
        for _ in 0..1000 {
            let times = some_times(0);
            for rule in Rule::ALL {
                let why = keep(&format!("{}=3", rule.name())).reasons(&times);
                let kept = why.iter().filter(|why| why.rules == [rule]).count();
                let mut periods: Vec<i64> = times.iter().map(|time| rule.period(*time)).collect();
                periods.dedup();
                assert_eq!(kept, periods.len().min(3), "{rule:?} {times:?}");
            }
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [
            ("", "\"\" has no ="),
            ("daily", "\"daily\" has no ="),
            ("dayly=7", "\"dayly=7\" is no rule"),
            ("daily=0", "\"daily=0\" has no count"),
            ("daily=-1", "has no count"),
            ("daily=7,weekly", "\"weekly\" has no ="),
            ("daily=7,daily=8", "\"daily=8\" is there twice"),
        ] {
            let error = text.parse::<Keep>().unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("hourly"), "{error}");
        }
    }
}
