//! Filters as people write them: `usage=10..50,profiles=single|dup,convert=raid1,soft`.
//!
//! The words are those of btrfs-progs. A set is written as it is read, so the words also carry it
//! from one process to another.

use super::filters::{Convert, Filters, Span};
use larder_format::items::Profile;
use larder_format::{DeviceId, Logical, Physical};
use std::fmt::{self, Display};
use std::str::FromStr;

impl FromStr for Filters {
    type Err = String;

    /// # Errors
    /// A word that is not known, or a value that it cannot have.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut set = Self::default();
        let mut soft = false;
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').map_or((word, None), |(n, v)| (n, Some(v)));
            match (name, value) {
                ("soft", None) => soft = true,
                (_, Some(value)) => set.read(name, value)?,
                (_, None) => return Err(format!("`{name}` is not a filter, or lacks its value")),
            }
        }
        match &mut set.convert {
            Some(convert) => convert.soft = soft,
            None if soft => return Err("`soft` is only for `convert=PROFILE`".into()),
            None => {}
        }
        if set.device_range.is_some() && set.device.is_none() {
            return Err("`drange` needs the device, `devid=ID`".into());
        }
        Ok(set)
    }
}

impl Filters {
    fn read(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "profiles" => {
                let list = value.split('|').map(profile).collect::<Result<_, _>>()?;
                self.profiles = Some(list);
            }
            "usage" => self.usage = Some(percents(value)?),
            "devid" => self.device = Some(DeviceId(number(value)?)),
            "drange" => {
                let span = places(value)?;
                let (from, to) = (Physical(span.from), Physical(span.to));
                self.device_range = Some(Span { from, to });
            }
            "vrange" => {
                let span = places(value)?;
                self.address_range = Some(Span { from: Logical(span.from), to: Logical(span.to) });
            }
            "stripes" => self.stripes = Some(counts(value)?),
            "limit" => self.limit = Some(counts(value)?),
            "convert" => {
                self.convert = Some(Convert { profile: profile(value)?, soft: false });
            }
            _ => {
                return Err(format!(
                    "`{name}` is not a filter; there are profiles, usage, devid, drange, vrange, \
                     stripes, limit, convert and soft"
                ));
            }
        }
        Ok(())
    }
}

fn profile(name: &str) -> Result<Profile, String> {
    let found = Profile::ALL.into_iter().find(|p| p.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        let all: Vec<&str> = Profile::ALL.iter().map(|p| p.name()).collect();
        format!("`{name}` is not a profile; there are {}", all.join(", "))
    })
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

/// `5..10`, and without one of the ends. `None` for a number alone.
fn range(text: &str) -> Result<Option<Span<u64>>, String> {
    let Some((from, to)) = text.split_once("..") else { return Ok(None) };
    if from.is_empty() && to.is_empty() {
        return Err(format!("`{text}` is not a range, such as 5..10"));
    }
    let from = if from.is_empty() { 0 } else { number(from)? };
    let to = if to.is_empty() { u64::MAX } else { number(to)? };
    if from > to {
        return Err(format!("`{text}` is not a range: it ends before it begins"));
    }
    Ok(Some(Span { from, to }))
}

/// A range that is not empty.
fn places(text: &str) -> Result<Span<u64>, String> {
    let span = range(text)?.ok_or_else(|| format!("`{text}` is not a range, such as 0..4096"))?;
    if span.from == span.to {
        return Err(format!("`{text}` is empty"));
    }
    Ok(span)
}

/// A number as the most of a range that begins at 0, or a range, of 32 bits each.
fn counts(text: &str) -> Result<Span<u32>, String> {
    let span = range(text)?.map_or_else(|| number(text).map(|to| Span { from: 0, to }), Ok)?;
    let short = |n: u64| u32::try_from(n);
    match (short(span.from), short(span.to)) {
        (Ok(from), Ok(to)) => Ok(Span { from, to }),
        (Ok(from), Err(_)) if span.to == u64::MAX => Ok(Span { from, to: u32::MAX }),
        _ => Err(format!("`{text}`: the number is too large")),
    }
}

fn percents(text: &str) -> Result<Span<u32>, String> {
    let mut span = counts(text)?;
    if span.to == u32::MAX {
        span.to = 100;
    }
    if span.from > 100 || span.to > 100 {
        return Err(format!("`{text}`: a percentage is 0 to 100"));
    }
    Ok(span)
}

impl Display for Filters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        if let Some(profiles) = &self.profiles {
            let names: Vec<&str> = profiles.iter().map(|p| p.name()).collect();
            words.push(format!("profiles={}", names.join("|")));
        }
        let short = |name: &str, span: Span<u32>| match span.from {
            0 => format!("{name}={}", span.to),
            from => format!("{name}={from}..{}", span.to),
        };
        words.extend(self.usage.map(|span| short("usage", span)));
        words.extend(self.device.map(|id| format!("devid={id}")));
        words.extend(self.device_range.map(|s| format!("drange={}..{}", s.from.0, s.to.0)));
        words.extend(self.address_range.map(|s| format!("vrange={}..{}", s.from.0, s.to.0)));
        words.extend(self.stripes.map(|s| format!("stripes={}..{}", s.from, s.to)));
        if let Some(convert) = self.convert {
            words.push(format!("convert={}", convert.profile.name()));
            words.extend(convert.soft.then(|| "soft".to_owned()));
        }
        words.extend(self.limit.map(|span| short("limit", span)));
        f.write_str(&words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Filters {
        text.parse().unwrap()
    }

    #[test]
    fn a_set_is_written_as_it_is_read() {
        for text in [
            "",
            "usage=50",
            "usage=10..50",
            "profiles=single|raid1c4,devid=3,drange=0..4096,vrange=5..10",
            "stripes=1..3,convert=raid1,soft,limit=2..9",
            "convert=single,limit=7",
        ] {
            assert_eq!(read(text).to_string(), text);
        }
    }

    #[test]
    fn ends_may_be_left_out() {
        assert_eq!(read("usage=..30"), read("usage=30"));
        assert_eq!(read("usage=30..").usage, Some(Span { from: 30, to: 100 }));
        assert_eq!(read("limit=2..").limit, Some(Span { from: 2, to: u32::MAX }));
        assert_eq!(read("convert=RAID1"), read("convert=raid1"));
        let whole = read("vrange=7..").address_range.unwrap();
        assert_eq!((whole.from.0, whole.to.0), (7, u64::MAX));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (text, named) in [
            ("usage=101", "101"),
            ("usage=9..3", "ends before"),
            ("usage", "usage"),
            ("use=3", "use"),
            ("convert=raid7", "raid7"),
            ("profiles=single|x", "`x`"),
            ("soft", "convert"),
            ("drange=0..5", "devid"),
            ("vrange=5", "range"),
            ("vrange=5..5", "empty"),
            ("limit=..", "range"),
            ("stripes=1..99999999999", "large"),
        ] {
            let said = text.parse::<Filters>().unwrap_err();
            assert!(said.contains(named), "{text}: {said}");
        }
    }
}
