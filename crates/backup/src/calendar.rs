//! Seconds since 1970 as dates of UTC, and back. No zone: a clock that is set back for winter would
//! give two snapshots the same name.

/// A moment, to the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Date {
    pub(crate) year: i64,
    pub(crate) month: i64,
    pub(crate) day: i64,
    /// Since midnight.
    pub(crate) second: i64,
}

const DAY: i64 = 86400;
/// Days of 400 years, after which the calendar repeats.
const ERA: i64 = 146_097;
/// Days from 1 March of the year 0 to 1 January 1970.
const TO_1970: i64 = 719_468;

/// Years begin in March here, so that the leap day is their last one.
pub(crate) fn date(seconds: i64) -> Date {
    let days = seconds.div_euclid(DAY) + TO_1970;
    let (era, in_era) = (days.div_euclid(ERA), days.rem_euclid(ERA));
    let year = (in_era - in_era / 1460 + in_era / 36524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year + year / 4 - year / 100);
    let month = (5 * in_year + 2) / 153;
    let day = in_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    Date { year, month, day, second: seconds.rem_euclid(DAY) }
}

pub(crate) fn seconds(date: Date) -> i64 {
    let year = date.year - i64::from(date.month <= 2);
    let (era, in_era) = (year.div_euclid(400), year.rem_euclid(400));
    let month = if date.month > 2 { date.month - 3 } else { date.month + 9 };
    let in_year = (153 * month + 2) / 5 + date.day - 1;
    let days = era * ERA + in_era * 365 + in_era / 4 - in_era / 100 + in_year;
    (days - TO_1970) * DAY + date.second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_days() {
        let at = |year, month, day, second| Date { year, month, day, second };
        for (seconds, expected) in [
            (0, at(1970, 1, 1, 0)),
            (-1, at(1969, 12, 31, 86399)),
            (951_782_400, at(2000, 2, 29, 0)),
            (1_795_274_902, at(2026, 11, 21, 55702)),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn there_and_back() {
        fastrand::seed(1);
        for _ in 0..10_000 {
            let at = fastrand::i64(-100_000_000_000..100_000_000_000);
            assert_eq!(seconds(date(at)), at);
        }
    }
}
