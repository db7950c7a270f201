//! Amounts that a person gives in mebibytes.

use serde::Serialize;
use std::fmt;
use std::num::ParseIntError;
use std::ops::Div;
use std::str::FromStr;

/// A number of mebibytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub(crate) struct Mib(pub(crate) u64);

impl Mib {
    pub(crate) fn bytes(self) -> u64 {
        self.0 << 20
    }
    /// Twice as many.
    pub(crate) fn doubled(self) -> Self {
        Self(self.0 * 2)
    }
}

impl Div<u64> for Mib {
    type Output = Self;
    fn div(self, parts: u64) -> Self {
        Self(self.0 / parts)
    }
}

impl FromStr for Mib {
    type Err = ParseIntError;
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_gives() {
        assert_eq!("4".parse(), Ok(Mib(4)));
        assert_eq!((Mib(4).bytes(), Mib(4).doubled(), Mib(4) / 2), (4 << 20, Mib(8), Mib(2)));
        assert_eq!(Mib(4).to_string(), "4");
        assert!("4M".parse::<Mib>().is_err());
    }
}
