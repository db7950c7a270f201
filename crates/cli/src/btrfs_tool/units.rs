//! Sizes as btrfs-progs prints them, and the options that choose how.
//!
//! A size for people is divided by its unit step by step, and each step drops what is below one.
//! So 3145728 bytes are 3.00MiB, and with --si 3.14MB. Programs compare such texts, so the same is
//! done here.

/// Options of commands that also have letters for units.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Units {
    /// Numbers in bytes
    #[arg(short = 'b', long)]
    raw: bool,
    /// Sizes for people, base 1024 (default)
    #[arg(short = 'h', long)]
    human_readable: bool,
    /// Sizes for people, base 1000
    #[arg(short = 'H')]
    human_decimal: bool,
    /// Base 1024: KiB, MiB, GiB, TiB
    #[arg(long)]
    iec: bool,
    /// Base 1000: kB, MB, GB, TB
    #[arg(long)]
    si: bool,
    /// Sizes in KiB, or kB with --si
    #[arg(short = 'k', long)]
    kbytes: bool,
    /// Sizes in MiB, or MB with --si
    #[arg(short = 'm', long)]
    mbytes: bool,
    /// Sizes in GiB, or GB with --si
    #[arg(short = 'g', long)]
    gbytes: bool,
    /// Sizes in TiB, or TB with --si
    #[arg(short = 't', long)]
    tbytes: bool,
}

/// The same for commands whose letters mean something else.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(super) struct LongUnits {
    /// Numbers in bytes
    #[arg(long)]
    raw: bool,
    /// Sizes for people, base 1024 (default)
    #[arg(long)]
    human_readable: bool,
    /// Base 1024: KiB, MiB, GiB, TiB
    #[arg(long)]
    iec: bool,
    /// Base 1000: kB, MB, GB, TB
    #[arg(long)]
    si: bool,
    /// Sizes in KiB, or kB with --si
    #[arg(long)]
    kbytes: bool,
    /// Sizes in MiB, or MB with --si
    #[arg(long)]
    mbytes: bool,
    /// Sizes in GiB, or GB with --si
    #[arg(long)]
    gbytes: bool,
    /// Sizes in TiB, or TB with --si
    #[arg(long)]
    tbytes: bool,
}

impl From<LongUnits> for Units {
    fn from(long: LongUnits) -> Self {
        let LongUnits { raw, human_readable, iec, si, kbytes, mbytes, gbytes, tbytes } = long;
        let human_decimal = false;
        Self { raw, human_readable, human_decimal, iec, si, kbytes, mbytes, gbytes, tbytes }
    }
}

impl Units {
    fn is_decimal(&self) -> bool {
        self.si || self.human_decimal
    }

    /// The power of the unit that is asked for.
    fn fixed(&self) -> Option<usize> {
        [self.kbytes, self.mbytes, self.gbytes, self.tbytes].iter().rposition(|f| *f).map(|n| n + 1)
    }

    /// Neither bytes, nor a unit, nor a base is asked for.
    pub(super) fn are_default(&self) -> bool {
        !self.raw && !self.is_decimal() && self.fixed().is_none()
    }

    #[allow(clippy::cast_precision_loss)]
    pub(super) fn text(&self, bytes: u64) -> String {
        const BINARY: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        const DECIMAL: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
        if self.raw {
            return bytes.to_string();
        }
        let (base, names) = if self.is_decimal() { (1000, DECIMAL) } else { (1024, BINARY) };
        if let Some(power) = self.fixed() {
            let unit = (base as f64).powi(i32::try_from(power).unwrap_or(0));
            return format!("{:.2}{}", bytes as f64 / unit, names[power]);
        }
        let (mut whole, mut above, mut power) = (bytes, bytes, 0);
        while whole >= base {
            (above, whole, power) = (whole, whole / base, power + 1);
        }
        let shown = if power == 0 { bytes as f32 } else { above as f32 / base as f32 };
        format!("{shown:.2}{}", names[power])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    #[command(disable_help_flag = true)]
    struct Line {
        #[command(flatten)]
        units: Units,
    }

    #[test]
    fn sizes_are_those_of_btrfs_progs() {
        for (line, bytes, text) in [
            ("", 0, "0.00B"),
            ("", 1023, "1023.00B"),
            ("", 16384, "16.00KiB"),
            ("", 3_424_256, "3.27MiB"),
            ("", u64::MAX, "16.00EiB"),
            ("-b", 3_424_256, "3424256"),
            ("--si", 16384, "16.38kB"),
            ("-H", 3_145_728, "3.14MB"),
            ("--si", 33_554_432, "33.55MB"),
            ("-k", 8 << 20, "8192.00KiB"),
            ("-g", 92_274_688, "0.09GiB"),
            ("-m --si", 92_274_688, "92.27MB"),
        ] {
            let words = std::iter::once("x").chain(line.split_whitespace());
            let units = Line::parse_from(words).units;
            assert_eq!(units.text(bytes), text, "{line} {bytes}");
            assert_eq!(units.are_default(), line.is_empty());
        }
    }
}
