//! Compressed streams: gzip, zstd and xz behind one writer.
//!
//! The streams have no times and no names of files in them, so equal bytes compress to equal bytes.

use flate2::write::GzEncoder;
use liblzma::write::XzEncoder;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;

/// A form of compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Method {
    #[default]
    None,
    Gzip,
    Zstd,
    Xz,
}

/// A form of compression, and how much effort goes into it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compression {
    /// The form.
    pub method: Method,
    /// `None`: what the form's own program does.
    pub level: Option<u32>,
}

/// A text that names no compression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not none, gzip[:0..9], zstd[:1..22] or xz[:0..9]")]
pub struct CompressionError(String);

impl Method {
    fn levels(self) -> std::ops::RangeInclusive<u32> {
        match self {
            Self::None => 0..=0,
            Self::Gzip | Self::Xz => 0..=9,
            Self::Zstd => 1..=22,
        }
    }

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Compression {
    /// The form that the name of a file asks for.
    #[must_use]
    pub fn of_file(path: &Path) -> Self {
        let method = match path.extension().and_then(|e| e.to_str()) {
            Some("gz" | "tgz") => Method::Gzip,
            Some("zst" | "zstd" | "tzst") => Method::Zstd,
            Some("xz" | "txz") => Method::Xz,
            _ => Method::None,
        };
        Self { method, level: None }
    }
}

impl FromStr for Compression {
    type Err = CompressionError;

    fn from_str(text: &str) -> Result<Self, CompressionError> {
        let bad = || CompressionError(text.to_owned());
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level.parse::<u32>().map_err(|_| bad())?)),
            None => (text, None),
        };
        let all = [Method::None, Method::Gzip, Method::Zstd, Method::Xz];
        let method = all.into_iter().find(|m| m.name() == name).ok_or_else(bad)?;
        if level.is_some_and(|l| method == Method::None || !method.levels().contains(&l)) {
            return Err(bad());
        }
        Ok(Self { method, level })
    }
}

/// A writer that compresses what goes through it.
#[allow(missing_debug_implementations)] // The encoders have none.
pub enum Compressor<W: Write> {
    /// Nothing is compressed.
    Plain(W),
    /// gzip.
    Gzip(GzEncoder<W>),
    /// zstd.
    Zstd(zstd::Encoder<'static, W>),
    /// xz.
    Xz(XzEncoder<W>),
}

impl<W: Write> Compressor<W> {
    /// Writes to `out`.
    ///
    /// # Errors
    /// There is no memory for the compressor.
    pub fn new(out: W, how: Compression) -> io::Result<Self> {
        let level = |default| how.level.unwrap_or(default);
        Ok(match how.method {
            Method::None => Self::Plain(out),
            Method::Gzip => Self::Gzip(GzEncoder::new(out, flate2::Compression::new(level(6)))),
            Method::Zstd => {
                let level = i32::try_from(level(3)).map_err(io::Error::other)?;
                let mut encoder = zstd::Encoder::new(out, level)?;
                encoder.include_checksum(true)?;
                Self::Zstd(encoder)
            }
            Method::Xz => Self::Xz(XzEncoder::new(out, level(6))),
        })
    }

    /// Ends the stream, and gives back what it went to.
    ///
    /// # Errors
    /// The end cannot be written.
    pub fn finish(self) -> io::Result<W> {
        match self {
            Self::Plain(out) => Ok(out),
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
            Self::Xz(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(out) => out.write(buf),
            Self::Gzip(encoder) => encoder.write(buf),
            Self::Zstd(encoder) => encoder.write(buf),
            Self::Xz(encoder) => encoder.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.flush(),
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
            Self::Xz(encoder) => encoder.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_say_how_they_are_compressed() {
        for (name, method) in [
            ("a.tar", Method::None),
            ("a.tar.gz", Method::Gzip),
            ("a.tgz", Method::Gzip),
            ("d.gz/a.tar.zst", Method::Zstd),
            ("a.txz", Method::Xz),
            ("-", Method::None),
        ] {
            assert_eq!(Compression::of_file(Path::new(name)).method, method, "{name}");
        }
    }

    #[test]
    fn words_say_it_too() {
        let parse = str::parse::<Compression>;
        assert_eq!(parse("zstd:19").unwrap().level, Some(19));
        assert_eq!(parse("none").unwrap(), Compression::default());
        for bad in ["", "lz4", "zstd:", "zstd:0", "gzip:10", "xz:-1", "none:1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_goes_in_comes_out_by_the_usual_programs() {
        let data: Vec<u8> = (0..200_000u32).flat_map(|i| (i / 7).to_le_bytes()).collect();
        for (word, program) in [("gzip:9", "gzip"), ("zstd", "zstd"), ("xz:1", "xz")] {
            let pack = || {
                let mut c = Compressor::new(Vec::new(), word.parse().unwrap()).unwrap();
                c.write_all(&data).unwrap();
                c.finish().unwrap()
            };
            let packed = pack();
            assert!(packed.len() < data.len() / 2 && packed == pack());
            assert!(unpacked_by(program, &packed).is_none_or(|out| out == data), "{word}");
        }
    }

    /// `None` if there is no such program.
    fn unpacked_by(program: &str, packed: &[u8]) -> Option<Vec<u8>> {
        use std::process::{Command, Stdio};
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(packed).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        let run = Command::new(program).arg("-dc").stdin(Stdio::from(file)).output();
        let Ok(run) = run else {
            eprintln!("skipped: needs {program}");
            return None;
        };
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        Some(run.stdout)
    }
}
