//! Manifests: text that says what is where, for owners, modes and devices that the builder's own
//! files cannot have.
//!
//! There are two languages: [`mtree`], which BSD and libarchive write, and [`own`], in which a
//! person writes a few lines. Both come down to a [`Description`] of one path. What both share is
//! here: lines, words, escapes, and what a description does to the tree. Owners are numbers, since
//! a name means another number on the next machine.
//!
//! A backslash begins an escape: three octal digits for any byte, `\s` for a blank, and `\n`, `\t`,
//! `\r`, `\\`, `\#` and a few more as in C. At a line's end it joins the next line.

mod mtree;
mod own;
#[cfg(test)]
mod tests;

use super::LONGEST_TARGET;
use super::bytes::Bytes;
use super::directory;
use crate::change::Change;
use crate::error::{Error, Result, shown};
use crate::overlay::{Collector, Expected, Node, Patch, implicit_time};
use crate::{Attributes, Kind, Locator, SourceNumber, TreePath, flags, rules};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes of one manifest, which is read whole.
const MOST_TEXT: u64 = 1 << 30;

/// In which language a manifest is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Mtree,
    Own,
}

/// Tells the collector what a manifest says. Contents are files below `base`.
pub(crate) fn read(
    collector: &mut Collector,
    bytes: &Bytes,
    language: Language,
    base: &Path,
    source: SourceNumber,
) -> Result<()> {
    let text = bytes.read_all(MOST_TEXT)?;
    let mut reading = Reading { collector, name: bytes.name(), base, source };
    let mut mtree = mtree::State::default();
    for (number, line) in lines(&text) {
        let words = words(&line).map_err(|what| reading.wrong(number, what))?;
        if words.is_empty() {
            continue;
        }
        let taken = match language {
            Language::Mtree => mtree.take(&words),
            Language::Own => own::parse(&words).map(Some),
        };
        if let Some(description) = taken.map_err(|what| reading.wrong(number, what))? {
            reading.take(number, description)?;
        }
    }
    Ok(())
}

/// What a line says about a path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Description {
    path: TreePath,
    what: What,
    changes: Vec<Change>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    /// Earlier sources have it.
    There(Expected),
    /// A file with the contents of another.
    File(PathBuf),
    /// Anything but a file or a directory.
    Other(Kind),
    Directory,
    Link(TreePath),
    Removed,
}

struct Reading<'a> {
    collector: &'a mut Collector,
    name: &'a str,
    base: &'a Path,
    source: SourceNumber,
}

impl Reading<'_> {
    fn wrong(&self, line: usize, what: impl Into<String>) -> Error {
        Error::refused(self.name, format!("line {line}").as_bytes(), what)
    }

    fn take(&mut self, line: usize, description: Description) -> Result<()> {
        let Description { path, what, changes } = description;
        let (kind, permissions) = match what {
            What::There(expected) => {
                return self.collector.patch(&path, Patch { expected, changes });
            }
            What::Directory => {
                let expected = Expected::Directory;
                return self.collector.patch(&path, Patch { expected, changes });
            }
            What::Link(target) => return self.collector.link(&path, &target),
            What::Removed => return self.collector.remove(&path),
            What::File(file) => (self.file(line, &file)?, 0o644),
            What::Other(kind @ Kind::Symlink(_)) => (kind, 0o777),
            What::Other(kind) => (kind, 0o644),
        };
        let modified = implicit_time(self.collector.options());
        let mut attributes = Attributes { permissions, modified, ..Attributes::default() };
        changes.iter().for_each(|change| change.apply(&mut attributes, &kind));
        self.collector.put(&path, Node { attributes, kind, links: None })
    }

    fn file(&self, line: usize, file: &Path) -> Result<Kind> {
        let key = directory::key_of(self.base, file);
        let (size, key) = key.map_err(|e| {
            let full = self.base.join(file);
            self.wrong(line, format!("{}: {e}", shown(full.as_os_str().as_bytes())))
        })?;
        let contents = (size > 0).then_some(Locator { source: self.source, key });
        Ok(Kind::File { size, contents })
    }
}

/// Lines with their numbers, joined where a backslash ends them, without comments.
fn lines(text: &[u8]) -> Vec<(usize, Vec<u8>)> {
    let mut lines: Vec<(usize, Vec<u8>)> = Vec::new();
    let mut goes_on = false;
    for (number, line) in (1..).zip(text.split(|&b| b == b'\n')) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let backslashes = line.iter().rev().take_while(|&&b| b == b'\\').count();
        let joined = backslashes % 2 == 1;
        let part = if joined { &line[..line.len() - 1] } else { line };
        match lines.last_mut() {
            Some((_, last)) if goes_on => last.extend_from_slice(part),
            _ if part.trim_ascii_start().starts_with(b"#") => continue,
            _ => lines.push((number, part.to_vec())),
        }
        goes_on = joined;
    }
    lines
}

/// A word, and where it has its first `=`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Word {
    text: Vec<u8>,
    equals: Option<usize>,
}

impl Word {
    /// What stands before the first `=`, and what behind it.
    fn key_and_value(&self) -> (&[u8], Option<&[u8]>) {
        match self.equals {
            Some(at) => (&self.text[..at], Some(&self.text[at + 1..])),
            None => (&self.text, None),
        }
    }
}

/// The words of a line, without escapes.
fn words(line: &[u8]) -> Result<Vec<Word>, String> {
    let mut words = Vec::new();
    for raw in line.split(|b| b" \t".contains(b)).filter(|raw| !raw.is_empty()) {
        let mut word = Word { text: Vec::new(), equals: None };
        let mut rest = raw;
        while let [first, tail @ ..] = rest {
            rest = tail;
            match first {
                b'\\' => {
                    let (byte, used) = escape(tail)
                        .ok_or_else(|| format!("an escape that is not known: {}", shown(raw)))?;
                    word.text.push(byte);
                    rest = &tail[used..];
                }
                b'=' if word.equals.is_none() => {
                    word.equals = Some(word.text.len());
                    word.text.push(b'=');
                }
                byte => word.text.push(*byte),
            }
        }
        words.push(word);
    }
    Ok(words)
}

/// The byte that is meant by what follows a backslash, and how long that is.
fn escape(text: &[u8]) -> Option<(u8, usize)> {
    if let [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] = text {
        return Some(((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'), 3));
    }
    let byte = match text.first()? {
        b's' => b' ',
        b'n' => b'\n',
        b't' => b'\t',
        b'r' => b'\r',
        b'a' => 7,
        b'b' => 8,
        b'v' => 11,
        b'f' => 12,
        b'0' => 0,
        other @ (b'\\' | b'#' | b'=' | b'"' | b'\'') => *other,
        _ => return None,
    };
    Some((byte, 1))
}

/// A path below the root.
fn path(text: &[u8]) -> Result<TreePath, String> {
    if text.len() > super::LONGEST_PATH {
        return Err(format!("a path of {} bytes", text.len()));
    }
    TreePath::new(text).ok_or_else(|| format!("{} leads out of the tree", shown(text)))
}

fn number<T: std::str::FromStr>(key: &[u8], text: &[u8]) -> Result<T, String> {
    let number = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| format!("{}={} is no number", shown(key), shown(text)))
}

/// A user or a group. The highest number means "none" to Linux.
fn id(key: &[u8], text: &[u8]) -> Result<u32, String> {
    let id = number(key, text)?;
    let nobody = || format!("{}={id} is nobody", shown(key));
    if id == u32::MAX { Err(nobody()) } else { Ok(id) }
}

fn mode(text: &[u8]) -> Result<Vec<Change>, String> {
    let text = str::from_utf8(text).map_err(|_| "a mode that is not text".to_owned())?;
    rules::parse_mode(text).map_err(str::to_owned)
}

fn inode_flags(text: &[u8]) -> Result<Change, String> {
    let (flags, unknown) = flags::from_names(text);
    match unknown.first() {
        None => Ok(Change::InodeFlags(flags)),
        Some(name) => Err(format!("btrfs has no flag {name:?}")),
    }
}

fn target(text: &[u8]) -> Result<Kind, String> {
    if text.is_empty() || text.contains(&0) || text.len() > LONGEST_TARGET {
        return Err("a symbolic link whose target Linux cannot have".to_owned());
    }
    Ok(Kind::Symlink(text.to_vec()))
}

fn file(text: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(text))
}
