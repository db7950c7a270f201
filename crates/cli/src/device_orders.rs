//! What is to be done with devices, as it is written on the command line and sent to a daemon.

use crate::size;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::str::FromStr;

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Order {
    /// A device joins: the one that comes along.
    Add,
    /// A device leaves.
    Remove(Which),
    /// A device gets another size.
    Resize(Place),
    /// How small can a device be?
    Smallest(Option<u64>),
}

/// A device of a file system, as people name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Which {
    Id(u64),
    /// The first one that is not there.
    Missing,
    Path(PathBuf),
}

/// `[DEVID:]SIZE|+N|-N|max|min`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The first device, if it is not said.
    pub(crate) device: Option<u64>,
    pub(crate) size: NewSize,
}

/// The size that a device is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NewSize {
    Bytes(u64),
    More(u64),
    Less(u64),
    Max,
    Min,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Told {
    Done,
    Stopped,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) outcome: Told,
    /// Number of the device.
    pub(crate) device: u64,
    /// Its name, if it has one.
    pub(crate) name: Option<String>,
    /// Bytes that it had before, if it was there.
    pub(crate) before: u64,
    /// Bytes that it has now; 0 if it has left.
    pub(crate) size: u64,
    /// How small it can be, if that was the question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) smallest: Option<serde_json::Value>,
}

impl FromStr for Which {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.parse() {
            Ok(id) => Self::Id(id),
            Err(_) if text == "missing" => Self::Missing,
            Err(_) => Self::Path(PathBuf::from(text)),
        })
    }
}

impl Which {
    /// With a path that any process understands.
    pub(crate) fn whole(self) -> Self {
        match self {
            Self::Path(path) => Self::Path(path.canonicalize().unwrap_or(path)),
            other => other,
        }
    }
}

impl FromStr for Place {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (device, size) = match text.split_once(':') {
            Some((id, size)) => {
                let id = id.parse().map_err(|_| format!("{id:?} is no number of a device"))?;
                (Some(id), size)
            }
            None => (None, text),
        };
        Ok(Self { device, size: size.parse()? })
    }
}

impl FromStr for NewSize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "max" => Self::Max,
            "min" => Self::Min,
            _ if text.starts_with('+') => Self::More(size::parse(&text[1..])?),
            _ if text.starts_with('-') => Self::Less(size::parse(&text[1..])?),
            _ => Self::Bytes(size::parse(text)?),
        })
    }
}

/// Bytes of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Those that the file system uses.
    pub(crate) now: u64,
    /// Those that it has.
    pub(crate) there: u64,
}

impl NewSize {
    /// In bytes, for a device of which so many are used, and so many there. `None`: as small as it
    /// can be.
    pub(crate) fn bytes(self, Sizes { now, there }: Sizes) -> Option<u64> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::More(more) => Some(now.saturating_add(more)),
            Self::Less(less) => Some(now.saturating_sub(less)),
            Self::Max => Some(there),
            Self::Min => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        let parse = |text: &str| text.parse::<Place>();
        let of = |device, size| Ok(Place { device, size });
        assert_eq!(parse("2:+1G"), of(Some(2), NewSize::More(1 << 30)));
        assert_eq!(parse("-5M"), of(None, NewSize::Less(5 << 20)));
        assert_eq!(parse("max"), of(None, NewSize::Max));
        assert_eq!(parse("3:min"), of(Some(3), NewSize::Min));
        assert_eq!(parse("300M"), of(None, NewSize::Bytes(300 << 20)));
        assert!(parse("x:max").is_err() && parse("1:").is_err() && parse("cancel").is_err());
        assert_eq!(NewSize::Less(9).bytes(Sizes { now: 5, there: 7 }), Some(0));
        assert_eq!(NewSize::Max.bytes(Sizes { now: 5, there: 7 }), Some(7));
    }

    #[test]
    fn devices_have_several_names() {
        let parse = |text: &str| text.parse::<Which>().unwrap();
        assert_eq!(parse("3"), Which::Id(3));
        assert_eq!(parse("missing"), Which::Missing);
        assert_eq!(parse("./3"), Which::Path("./3".into()));
    }
}
