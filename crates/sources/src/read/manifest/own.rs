//! Our own language: a line for a path.
//!
//! ```text
//! dir      /var/log         mode=0755 uid=0 gid=0
//! file     /etc/hostname    contents=hostname mode=0644
//! symlink  /bin             target=usr/bin
//! hardlink /usr/bin/vi      target=/usr/bin/vim
//! char     /dev/console     device=5:1 mode=0600
//! set      /usr/bin/ping    xattr.security.capability=\001\000\000\002…
//! remove   /usr/share/doc
//! ```
//!
//! `block`, `fifo` and `socket` are as `char`. `set` changes what earlier sources have, and so do
//! `dir` and `file` without `contents`. `mtime` is in seconds, `flags` as of chattr by name
//! (`nocow`), and `noxattr=NAME` removes an attribute. `contents` begins at the manifest's
//! directory.

use super::{Description, What, Word, file, id, inode_flags, mode, path, target};
use crate::Kind;
use crate::change::Change;
use crate::entry::device_numbers;
use crate::error::shown;
use crate::overlay::Expected;
use crate::rules::{check_xattr_name, decimal_time};

/// What a line says.
pub(super) fn parse(line: &[Word]) -> Result<Description, String> {
    let [what, at, rest @ ..] = line else {
        return Err("a line has a type and a path".to_owned());
    };
    let mut said = Said::default();
    for word in rest {
        let (key, value) = word.key_and_value();
        let value = value.ok_or_else(|| format!("{} has no value", shown(key)))?;
        said.take(key, value)?;
    }
    let used = said.what(&what.text)?;
    Ok(Description { path: path(&at.text)?, what: used, changes: said.changes })
}

#[derive(Debug, Default)]
struct Said {
    changes: Vec<Change>,
    contents: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    device: Option<(u32, u32)>,
}

impl Said {
    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        match key {
            b"uid" => self.changes.push(Change::Uid(id(key, value)?)),
            b"gid" => self.changes.push(Change::Gid(id(key, value)?)),
            b"mode" => self.changes.extend(mode(value)?),
            b"flags" => self.changes.push(inode_flags(value)?),
            b"mtime" => {
                let time = decimal_time(value);
                let time = time.ok_or_else(|| format!("mtime={} is no time", shown(value)))?;
                self.changes.push(Change::Modified(time));
            }
            b"contents" => self.contents = Some(value.to_vec()),
            b"target" => self.target = Some(value.to_vec()),
            b"device" => self.device = Some(device(value)?),
            b"noxattr" => {
                check_xattr_name(value)?;
                self.changes.push(Change::NoXattr(value.to_vec()));
            }
            _ => {
                let name = key.strip_prefix(b"xattr.");
                let name = name.ok_or_else(|| format!("{} is not known", shown(key)))?;
                check_xattr_name(name)?;
                self.changes.push(Change::Xattr(name.to_vec(), value.to_vec()));
            }
        }
        Ok(())
    }

    /// What a type means with what was said.
    fn what(&mut self, what: &[u8]) -> Result<What, String> {
        let contents = self.contents.take();
        let link = self.target.take();
        let device = self.device.take();
        let taken = match (what, contents, link, device) {
            (b"dir", None, None, None) => What::Directory,
            (b"file", Some(contents), None, None) => What::File(file(&contents)),
            (b"file", None, None, None) => What::There(Expected::File),
            (b"symlink", None, Some(to), None) => What::Other(target(&to)?),
            (b"hardlink", None, Some(to), None) if self.changes.is_empty() => {
                What::Link(path(&to)?)
            }
            (b"char", None, None, Some((major, minor))) => {
                What::Other(Kind::CharDevice { major, minor })
            }
            (b"block", None, None, Some((major, minor))) => {
                What::Other(Kind::BlockDevice { major, minor })
            }
            (b"fifo", None, None, None) => What::Other(Kind::Fifo),
            (b"socket", None, None, None) => What::Other(Kind::Socket),
            (b"set", None, None, None) => What::There(Expected::Any),
            (b"remove", None, None, None) if self.changes.is_empty() => What::Removed,
            (
                b"dir" | b"file" | b"symlink" | b"hardlink" | b"char" | b"block" | b"fifo"
                | b"socket" | b"set" | b"remove",
                ..,
            ) => {
                return Err(format!("`{}` has a key too many, or lacks one", shown(what)));
            }
            _ => return Err(format!("`{}` is no type", shown(what))),
        };
        Ok(taken)
    }
}

fn device(text: &[u8]) -> Result<(u32, u32), String> {
    let numbers = str::from_utf8(text).ok().and_then(|text| {
        let (major, minor) = text.split_once([':', ','])?;
        device_numbers((major.parse().ok()?, minor.parse().ok()?))
    });
    numbers.ok_or_else(|| format!("device={} is not MAJOR:MINOR, up to 4095:1048575", shown(text)))
}
