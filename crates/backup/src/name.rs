//! Names of snapshots that a backup makes: `PREFIX.20261125T045817Z`.
//!
//! The time is UTC to the second, so names sort as the snapshots were made, and are the same on
//! both sides wherever these are. A name of another form belongs to another program, and is not
//! touched.

use crate::calendar::{self, Date};

/// The name of a snapshot. Names on disk are bytes, in any encoding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// What all snapshots of one source have in common.
    pub prefix: Vec<u8>,
    /// When it was made, in seconds since 1970.
    pub time: i64,
}

impl Name {
    /// Takes a name apart; `None` if no backup made it.
    #[must_use]
    pub fn parse(name: &[u8]) -> Option<Self> {
        let dot = name.iter().rposition(|b| *b == b'.')?;
        let (prefix, stamp) = (&name[..dot], &name[dot + 1..]);
        let number = |from: usize, to: usize| {
            let digits = stamp.get(from..to)?.iter();
            digits
                .map(|b| b.is_ascii_digit().then(|| i64::from(b - b'0')))
                .try_fold(0, |n, digit| Some(n * 10 + digit?))
        };
        let (hour, minute, second) = (number(9, 11)?, number(11, 13)?, number(13, 15)?);
        let date = Date {
            year: number(0, 4)?,
            month: number(4, 6)?,
            day: number(6, 8)?,
            second: (hour * 60 + minute) * 60 + second,
        };
        let parsed = Self { prefix: prefix.to_vec(), time: calendar::seconds(date) };
        // Days that there are not, and letters in the wrong place, do not come back as they were.
        (!prefix.is_empty() && parsed.bytes() == name).then_some(parsed)
    }

    /// As it is on disk.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let Date { year, month, day, second } = calendar::date(self.time);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let stamp = format!(".{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z");
        [&self.prefix, stamp.as_bytes()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_form() {
        let name = Name { prefix: b"home.of.\xfc".to_vec(), time: 1_795_274_902 };
        assert_eq!(name.bytes(), b"home.of.\xfc.20261121T152822Z");
        assert_eq!(Name::parse(&name.bytes()), Some(name));
        for other in [
            "home",
            "home.20261121T152822",
            ".20261121T152822Z",
            "home.20260231T000000Z",
            "home.20261121T252822Z",
            "home.20261121T+52822Z",
            "home.20261121t152822Z",
            "home.20261121T1528226Z",
            "home.äöüäöüäö",
        ] {
            assert_eq!(Name::parse(other.as_bytes()), None, "{other}");
        }
    }
}
