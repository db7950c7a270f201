//! Sizes as people write and read them.

/// Parses `4096`, `512K`, `8G`, `1.5G`, `2TiB`: powers of 1024, whatever the case; the unit may be
/// followed by `iB` or `B`.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let bad = || {
        format!("{text:?} is not a size: use a number with K, M, G or T behind it, such as 512M")
    };
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start().to_ascii_lowercase();
    let letter = unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b')).unwrap_or(&unit);
    let shift = match letter {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return Err(bad()),
    };
    if unit == "ib" {
        return Err(bad());
    }
    let (whole, fraction) = number.split_once('.').map_or((number, ""), |(w, f)| (w, f));
    if whole.is_empty()
        || number.contains('.') && (fraction.is_empty() || fraction.len() > 9 || shift == 0)
    {
        return Err(bad());
    }
    let too_large = || format!("{text:?} is too large");
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let mut bytes = u128::from(whole) << shift;
    if !fraction.is_empty() {
        let digits: u128 = fraction.parse().map_err(|_| bad())?;
        bytes += (digits << shift) / 10u128.pow(u32::try_from(fraction.len()).map_err(|_| bad())?);
    }
    u64::try_from(bytes).ok().filter(|b| *b <= i64::MAX.cast_unsigned()).ok_or_else(too_large)
}

/// `1.50GiB`, `640.00KiB`, `17B`.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes}B");
    }
    let unit = (bytes.ilog2() / 10) as usize;
    #[allow(clippy::cast_precision_loss)]
    let value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    format!("{value:.2}{}", UNITS[unit - 1])
}

/// A part of a whole, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) part: u64,
    pub(crate) whole: u64,
}

impl Share {
    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn percent(self) -> f64 {
        if self.whole == 0 { 0.0 } else { self.part as f64 / self.whole as f64 * 100.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512K", 512 << 10),
            ("512kib", 512 << 10),
            ("8G", 8 << 30),
            ("8 GB", 8 << 30),
            ("1.5G", 3 << 29),
            ("0.1k", 102),
            ("2T", 2 << 40),
            ("17B", 17),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "G",
            "1X",
            "-1",
            "1.5",
            ".5G",
            "1.G",
            "1..5G",
            "8Gi B",
            "1ib",
            "99999999999999T",
            "18446744073709551616",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1.00KiB"),
            (3 << 29, "1.50GiB"),
            (u64::MAX, "16.00EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
