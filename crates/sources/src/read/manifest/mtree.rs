//! The language of mtree(5), as BSD's mtree and libarchive write it.
//!
//! A name without a slash lies in the directory at hand, which a line with `type=dir` enters and
//! `..` leaves. A name with a slash begins at the root. `/set` gives defaults for what follows.
//!
//! A file is one that earlier sources have, and the line changes its attributes. With `contents=`
//! it is made. Directories, links and devices are made where they are missing. Digests and sizes
//! are not compared: what is built is what the sources have.

use super::{Description, What, Word, file, id, inode_flags, mode, path, target};
use crate::change::Change;
use crate::entry;
use crate::error::shown;
use crate::overlay::Expected;
use crate::{Kind, Time, TreePath};
use std::collections::BTreeMap;

/// Keywords that say nothing about an image, or nothing that is used.
const IGNORED: [&str; 22] = [
    "cksum",
    "gname",
    "ignore",
    "inode",
    "md5",
    "md5digest",
    "nlink",
    "nochange",
    "optional",
    "resdevice",
    "ripemd160digest",
    "rmd160",
    "rmd160digest",
    "sha1",
    "sha1digest",
    "sha256",
    "sha256digest",
    "sha384digest",
    "sha512",
    "sha512digest",
    "size",
    "uname",
];

/// The longest keyword and value of `/set`: a path or the target of a link fits.
const LONGEST_DEFAULT: usize = super::super::LONGEST_PATH + 64;

type Keywords = BTreeMap<Vec<u8>, Vec<u8>>;

/// Where the reader stands.
#[derive(Debug, Default)]
pub(super) struct State {
    directory: TreePath,
    defaults: Keywords,
}

impl State {
    /// Takes a line. `None` if it says nothing about a path.
    pub(super) fn take(&mut self, line: &[Word]) -> Result<Option<Description>, String> {
        let (first, rest) = line.split_first().expect("a line has words");
        match &first.text[..] {
            b"/set" => {
                for word in rest {
                    let (key, value) = keyword(word);
                    // Each line that follows has them all.
                    if word.text.len() > LONGEST_DEFAULT {
                        return Err(format!("{}= has {} bytes", shown(&key), value.len()));
                    }
                    self.defaults.insert(key, value);
                }
            }
            b"/unset" => {
                for word in rest {
                    match &word.text[..] {
                        b"all" => self.defaults.clear(),
                        name => {
                            self.defaults.remove(name);
                        }
                    }
                }
            }
            b".." => {
                let up = self.directory.split().map(|(up, _)| up);
                self.directory = up.ok_or("`..` leads out of the tree")?;
            }
            name => {
                let mut keywords = self.defaults.clone();
                keywords.extend(rest.iter().map(keyword));
                return self.describe(name, &keywords).map(Some);
            }
        }
        Ok(None)
    }

    fn describe(&mut self, name: &[u8], keywords: &Keywords) -> Result<Description, String> {
        let is_relative = !name.contains(&b'/') && name != b".";
        let mut at = path(name)?;
        if is_relative {
            let mut below = self.directory.clone();
            at.components().for_each(|name| below.push(name));
            at = path(below.as_bytes())?;
        }
        let what = what(keywords)?;
        if what == What::Directory && (is_relative || name == b".") {
            self.directory = at.clone();
        }
        Ok(Description { path: at, what, changes: changes(keywords)? })
    }
}

fn keyword(word: &Word) -> (Vec<u8>, Vec<u8>) {
    let (key, value) = word.key_and_value();
    (key.to_vec(), value.unwrap_or_default().to_vec())
}

fn what(keywords: &Keywords) -> Result<What, String> {
    let get = |key: &str| keywords.get(key.as_bytes()).map(|value| &value[..]);
    let device = || {
        let value = get("device").ok_or("a device without device=")?;
        device_numbers(value).ok_or_else(|| format!("device={} is not known", shown(value)))
    };
    Ok(match get("type") {
        None => What::There(Expected::Any),
        Some(b"file") => match get("contents") {
            Some(contents) => What::File(file(contents)),
            None if get("optional").is_some() => What::There(Expected::Optional),
            None => What::There(Expected::File),
        },
        Some(b"dir") => What::Directory,
        Some(b"link") => What::Other(target(get("link").ok_or("a symbolic link without link=")?)?),
        Some(b"char") => {
            let (major, minor) = device()?;
            What::Other(Kind::CharDevice { major, minor })
        }
        Some(b"block") => {
            let (major, minor) = device()?;
            What::Other(Kind::BlockDevice { major, minor })
        }
        Some(b"fifo") => What::Other(Kind::Fifo),
        Some(b"socket") => What::Other(Kind::Socket),
        Some(other) => return Err(format!("type={} is not known", shown(other))),
    })
}

/// `FORMAT,MAJOR,MINOR`, or one number as Linux has it.
fn device_numbers(text: &[u8]) -> Option<(u32, u32)> {
    let text = str::from_utf8(text).ok()?;
    let parts: Vec<_> = text.split(',').collect();
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    match parts[..] {
        ["native" | "linux", major, minor] => {
            entry::device_numbers((number(major)?, number(minor)?))
        }
        [one] => {
            let n = u32::try_from(number(one)?).ok()?;
            Some(((n >> 8) & 0xfff, (n & 0xff) | ((n >> 12) & 0xf_ff00)))
        }
        _ => None,
    }
}

fn changes(keywords: &Keywords) -> Result<Vec<Change>, String> {
    let mut changes = Vec::new();
    for (key, value) in keywords {
        match &key[..] {
            b"uid" => changes.push(Change::Uid(id(key, value)?)),
            b"gid" => changes.push(Change::Gid(id(key, value)?)),
            b"mode" => changes.extend(mode(value)?),
            b"time" => changes.push(Change::Modified(time(value)?)),
            b"flags" => changes.push(inode_flags(value)?),
            b"uname" if !keywords.contains_key(&b"uid"[..]) => {
                changes.push(Change::Uid(id_of(key, value)?));
            }
            b"gname" if !keywords.contains_key(&b"gid"[..]) => {
                changes.push(Change::Gid(id_of(key, value)?));
            }
            b"type" | b"link" | b"device" | b"contents" | b"tags" => {}
            other if IGNORED.iter().any(|ignored| ignored.as_bytes() == other) => {}
            other => return Err(format!("the keyword {} is not known", shown(other))),
        }
    }
    Ok(changes)
}

/// Names that have the same number everywhere.
fn id_of(key: &[u8], name: &[u8]) -> Result<u32, String> {
    if matches!(name, b"root" | b"wheel") {
        return Ok(0);
    }
    let (key, name) = (shown(key), shown(name));
    Err(format!("{key}={name} without a number; let mtree write uid and gid"))
}

/// Seconds, and nanoseconds behind the point: `1.5` is 5 nanoseconds, and so mtree reads it.
fn time(text: &[u8]) -> Result<Time, String> {
    let time = str::from_utf8(text).ok().and_then(|text| {
        let (seconds, nanoseconds) = text.split_once('.').unwrap_or((text, "0"));
        let nanoseconds = nanoseconds.parse().ok().filter(|&n: &u32| n < 1_000_000_000)?;
        Some(Time { seconds: seconds.parse().ok()?, nanoseconds })
    });
    time.ok_or_else(|| format!("time={} is no time", shown(text)))
}
