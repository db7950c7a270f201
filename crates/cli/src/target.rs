//! `IMAGE:PATH`: which part of an argument is the image?
//!
//! Colons occur in file names, so the answer depends on what exists: the longest existing file in
//! front of a colon is the image (or the longest list of them, with commas between), and what
//! follows is the path inside. An argument that exists as a
//! whole is an image without a path (or, where both are possible, a path of the host).

use crate::devices;
use crate::failure::{Advise, usage};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// An image and a path inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) image: PathBuf,
    /// Names from the subvolume's root on, without empty ones and `.`; the raw text is kept for
    /// messages.
    pub(crate) path: Vec<u8>,
}

/// Either side of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host(PathBuf),
    Image(Target),
}

impl Target {
    /// Takes `IMAGE[:PATH]` apart. Where nothing in it exists, the part before the first colon is
    /// taken for the image, so that opening it will say what is missing.
    pub(crate) fn parse(text: &OsStr) -> Self {
        split(text).unwrap_or_else(|| {
            let bytes = text.as_bytes();
            let (image, path) = match bytes.iter().position(|b| *b == b':') {
                Some(i) if i > 0 && !Path::new(text).exists() => (&bytes[..i], &bytes[i + 1..]),
                _ => (bytes, &[][..]),
            };
            Self { image: PathBuf::from(OsStr::from_bytes(image)), path: path.to_vec() }
        })
    }

    /// For messages.
    pub(crate) fn display(&self) -> String {
        let path = crate::print::name(&self.path);
        format!("{}:/{}", crate::print::path(&self.image), path.trim_start_matches('/'))
    }
}

impl Place {
    /// A side of a copy: an image and path if there is an image in front of a colon, else a path of
    /// the host.
    pub(crate) fn parse(text: &OsStr) -> Self {
        match split(text) {
            Some(t) if t.image.as_os_str() != text => Self::Image(t),
            _ => Self::Host(PathBuf::from(text)),
        }
    }

    /// The same, where an image that does not exist is an error.
    pub(crate) fn parse_existing(text: &OsStr) -> anyhow::Result<Self> {
        if text.is_empty() {
            return usage("an argument is empty where a path was expected");
        }
        match no_image(text) {
            Some(error) => Err(error).could_not_run(),
            None => Ok(Self::parse(text)),
        }
    }
}

/// The longest existing image, if there is one: first the whole, then what stands before each colon
/// from the last on.
fn split(text: &OsStr) -> Option<Target> {
    let bytes = text.as_bytes();
    if is_image(Path::new(text)) {
        return Some(Target { image: PathBuf::from(text), path: Vec::new() });
    }
    let colons = bytes.iter().enumerate().rev().filter(|(_, b)| **b == b':').map(|(i, _)| i);
    colons.filter(|i| *i > 0).find_map(|i| {
        let image = PathBuf::from(OsString::from_vec(bytes[..i].to_vec()));
        is_image(&image).then(|| Target { image, path: bytes[i + 1..].to_vec() })
    })
}

/// What is wrong with an argument that can only mean `IMAGE:PATH`, but has no image in front of any
/// colon. A name with a colon in a directory that exists is a path of the host, whether it exists
/// or not.
pub(crate) fn no_image(text: &OsStr) -> Option<anyhow::Error> {
    let colon = text.as_bytes().iter().position(|b| *b == b':').filter(|i| *i > 0)?;
    let above =
        Path::new(text).parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if split(text).is_some() || above.is_dir() {
        return None;
    }
    let image = Path::new(OsStr::from_bytes(&text.as_bytes()[..colon]));
    let shown = crate::print::path(image);
    Some(match image.metadata() {
        Ok(_) => {
            anyhow::anyhow!("{shown} is a directory, not an image: a path on a mount has no colon")
        }
        Err(e) => anyhow::Error::new(e).context(format!("there is no image {shown}")),
    })
}

fn is_image(path: &Path) -> bool {
    devices::are_there(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(dir: &Path, text: &str) -> (String, String) {
        let t = Target::parse(dir.join(text).as_os_str());
        let image = t.image.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
        (image, String::from_utf8(t.path).unwrap())
    }

    #[test]
    fn the_longest_existing_file_before_a_colon_is_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        for name in ["a", "a:b", "x:y"] {
            std::fs::write(dir.join(name), b"").unwrap();
        }
        std::fs::create_dir(dir.join("d")).unwrap();
        for (text, image, path) in [
            ("a", "a", ""),
            ("a:", "a", ""),
            ("a:/", "a", "/"),
            ("a:/etc/motd", "a", "/etc/motd"),
            ("a:b", "a:b", ""),
            ("a:b:c", "a:b", "c"),
            ("a:c:b", "a", "c:b"),
            ("x:y:/z", "x:y", "/z"),
            ("missing:/z", "missing", "/z"),
            ("missing", "missing", ""),
            ("d", "d", ""),
            ("d:/x", "d", "/x"),
            ("missing,a:/x", "missing,a", "/x"),
        ] {
            assert_eq!(parse(dir, text), (image.into(), path.into()), "{text}");
        }
    }

    #[test]
    fn an_image_that_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        std::fs::write(dir.join("img"), b"").unwrap();
        std::fs::write(dir.join("odd:name"), b"").unwrap();
        std::fs::create_dir(dir.join("d")).unwrap();
        let said = |t: &str| no_image(dir.join(t).as_os_str()).map(|e| format!("{e:#}"));
        for fine in ["img", "img:/x", "odd:name", "d", "nothing", "d/new:name"] {
            assert_eq!(said(fine), None, "{fine}");
        }
        assert!(said("nothing:/x").unwrap().contains("there is no image"));
        assert!(said("img/x:/x").unwrap().contains("there is no image"));
        assert!(said("d:/x").unwrap().contains("is a directory, not an image"));
    }

    #[test]
    fn sides_of_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        std::fs::write(dir.join("img"), b"").unwrap();
        let place = |t: &str| Place::parse(dir.join(t).as_os_str());
        assert_eq!(
            place("img"),
            Place::Host(dir.join("img")),
            "a file itself is copied, not looked into"
        );
        assert_eq!(
            place("img:/x"),
            Place::Image(Target { image: dir.join("img"), path: b"/x".to_vec() })
        );
        assert_eq!(
            place("img:"),
            Place::Image(Target { image: dir.join("img"), path: Vec::new() })
        );
        assert_eq!(place("other:thing"), Place::Host(dir.join("other:thing")));
        std::fs::write(dir.join("img:x"), b"").unwrap();
        assert_eq!(place("img:x"), Place::Host(dir.join("img:x")));
    }
}
