//! A source as the command line names it: `SOURCE[:PATH]`.
//!
//! `PATH` is where the source is placed in the image. The last part behind a colon is a place if it
//! begins with a slash. A colon that belongs to a name is written `\:`.
//!
//! Without a prefix the source itself tells what it is: a directory, an image of btrfs, or an
//! archive. With one, further parts may follow the file:
//!
//! | | |
//! |---|---|
//! | `dir:DIRECTORY`, `tar:FILE` | what there is without a prefix, too |
//! | `-`, `tar:-` | an archive from standard input |
//! | `image:FILE[:SUBVOLUME]` | a subvolume by its path from the top level; else the default one |
//! | `oci:DIRECTORY[:TAG]`, `oci-archive:FILE[:TAG]` | an OCI layout; `TAG@linux/arm64` for one platform of several |
//! | `docker-archive:FILE[:NAME:TAG]` | what `docker save` writes |
//! | `mtree:FILE`, `manifest:FILE` | a manifest of BSD's mtree, or in our own language |
//!
//! So `image:old.img:/srv:/data` takes the subvolume `/srv` and places it at `/data`;
//! `image:old.img::/data` takes the default one; and `old.img:/data` says the same.

use crate::TreePath;
use crate::error::{Error, Result, shown};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// A source, and where it is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpec {
    /// What it is.
    pub sort: Sort,
    /// Where it is placed.
    pub place: TreePath,
    given: Vec<u8>,
}

/// What sort of source it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Sort {
    /// Its contents tell.
    Detect(PathBuf),
    Directory(PathBuf),
    Tar(PathBuf),
    StandardInput,
    Image {
        file: PathBuf,
        subvolume: Option<Vec<u8>>,
    },
    Oci {
        layout: PathBuf,
        reference: String,
    },
    OciArchive {
        file: PathBuf,
        reference: String,
    },
    DockerArchive {
        file: PathBuf,
        reference: String,
    },
    Mtree(PathBuf),
    Manifest(PathBuf),
}

impl SourceSpec {
    /// Reads a source from the command line.
    ///
    /// # Errors
    /// [`Error::Argument`] if it has no such form.
    pub fn parse(given: &OsStr) -> Result<Self> {
        let bytes = given.as_bytes();
        let mut parts = parts(bytes);
        let prefix = (parts.len() > 1).then(|| Prefix::of(&parts[0])).flatten();
        if prefix.is_some() {
            parts.remove(0);
        }
        let place = match parts.last() {
            Some(last) if parts.len() > 1 && last.starts_with(b"/") => parts.pop(),
            _ => None,
        };
        // Of an image the first part that follows the file is the subvolume.
        let (place, parts) = match place {
            Some(last) if prefix == Some(Prefix::Image) && parts.len() == 1 => {
                parts.push(last);
                (None, parts)
            }
            place => (place, parts),
        };
        let wrong = |what: &str| Error::argument(bytes, what);
        let place = TreePath::new(&place.unwrap_or_default())
            .ok_or_else(|| wrong("the place in the image has `..`, which leads out of it"))?;
        let sort = match prefix {
            None => Sort::Detect(path(&parts.join(&b':'))),
            Some(prefix) => prefix.sort(parts).map_err(wrong)?,
        };
        let sort = match sort {
            Sort::Detect(file) | Sort::Tar(file) if file.as_os_str() == "-" => Sort::StandardInput,
            sort => sort,
        };
        Ok(Self { sort, place, given: bytes.to_vec() })
    }
}

impl fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.given))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefix {
    Directory,
    Tar,
    Image,
    Oci,
    OciArchive,
    DockerArchive,
    Mtree,
    Manifest,
}

impl Prefix {
    fn of(part: &[u8]) -> Option<Self> {
        Some(match part {
            b"dir" => Self::Directory,
            b"tar" => Self::Tar,
            b"image" => Self::Image,
            b"oci" => Self::Oci,
            b"oci-archive" => Self::OciArchive,
            b"docker-archive" => Self::DockerArchive,
            b"mtree" => Self::Mtree,
            b"manifest" => Self::Manifest,
            _ => return None,
        })
    }

    fn sort(self, mut parts: Vec<Vec<u8>>) -> Result<Sort, &'static str> {
        let rest = parts.split_off(1);
        let file = path(&parts[0]);
        if file.as_os_str().is_empty() {
            return Err("no file is named behind the prefix");
        }
        let reference =
            || String::from_utf8(rest.join(&b':')).map_err(|_| "a name that is no text");
        Ok(match self {
            Self::Oci => Sort::Oci { layout: file, reference: reference()? },
            Self::OciArchive => Sort::OciArchive { file, reference: reference()? },
            Self::DockerArchive => Sort::DockerArchive { file, reference: reference()? },
            Self::Image if rest.len() > 1 => return Err("more parts than FILE:SUBVOLUME:/PATH"),
            Self::Image => {
                let subvolume = rest.into_iter().next().filter(|path| !path.is_empty());
                Sort::Image { file, subvolume }
            }
            _ if !rest.is_empty() => {
                return Err("a place begins with a slash; a colon of a name is written `\\:`");
            }
            Self::Directory => Sort::Directory(file),
            Self::Tar => Sort::Tar(file),
            Self::Mtree => Sort::Mtree(file),
            Self::Manifest => Sort::Manifest(file),
        })
    }
}

/// The parts between colons, without the backslashes before colons.
fn parts(given: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut rest = given;
    while let [first, tail @ ..] = rest {
        let last = parts.last_mut().expect("there is one");
        rest = match (first, tail) {
            (b'\\', [b':', tail @ ..]) => {
                last.push(b':');
                tail
            }
            (b':', _) => {
                parts.push(Vec::new());
                tail
            }
            (byte, _) => {
                last.push(*byte);
                tail
            }
        };
    }
    parts
}

fn path(bytes: &[u8]) -> PathBuf {
    OsString::from_vec(bytes.to_vec()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(given: &str) -> (Sort, String) {
        let spec = SourceSpec::parse(OsStr::new(given)).unwrap();
        assert_eq!(spec.to_string(), given);
        (spec.sort, String::from_utf8(spec.place.as_bytes().to_vec()).unwrap())
    }

    #[test]
    fn each_form_is_read() {
        let image = |subvolume: Option<&str>| Sort::Image {
            file: "a.img".into(),
            subvolume: subvolume.map(|s| s.as_bytes().to_vec()),
        };
        let oci = |reference: &str| Sort::Oci { layout: "/l".into(), reference: reference.into() };
        let docker = |reference: &str| Sort::DockerArchive {
            file: "d.tar".into(),
            reference: reference.into(),
        };
        for (given, sort, place) in [
            ("rootfs", Sort::Detect("rootfs".into()), ""),
            ("rootfs:/srv/x", Sort::Detect("rootfs".into()), "srv/x"),
            ("/abs", Sort::Detect("/abs".into()), ""),
            ("a:b", Sort::Detect("a:b".into()), ""),
            ("a:b:/c", Sort::Detect("a:b".into()), "c"),
            ("a\\:/b", Sort::Detect("a:/b".into()), ""),
            ("./oci:x", Sort::Detect("./oci:x".into()), ""),
            ("oci", Sort::Detect("oci".into()), ""),
            ("-", Sort::StandardInput, ""),
            ("-:/x", Sort::StandardInput, "x"),
            ("tar:-", Sort::StandardInput, ""),
            ("dir:/d", Sort::Directory("/d".into()), ""),
            ("dir:d:/", Sort::Directory("d".into()), ""),
            ("tar:a.tar:/x", Sort::Tar("a.tar".into()), "x"),
            ("mtree:m", Sort::Mtree("m".into()), ""),
            ("manifest:m:/etc", Sort::Manifest("m".into()), "etc"),
            ("image:a.img", image(None), ""),
            ("image:a.img:/home", image(Some("/home")), ""),
            ("image:a.img:@home:/home", image(Some("@home")), "home"),
            ("image:a.img:/home:/x", image(Some("/home")), "x"),
            ("image:a.img::/x", image(None), "x"),
            ("oci:/l", oci(""), ""),
            ("oci:/l:latest", oci("latest"), ""),
            ("oci:/l:/x", oci(""), "x"),
            ("oci:/l:latest@linux/arm64:/x", oci("latest@linux/arm64"), "x"),
            ("docker-archive:d.tar:busybox:1.2", docker("busybox:1.2"), ""),
            ("docker-archive:d.tar:busybox:1.2:/x", docker("busybox:1.2"), "x"),
        ] {
            assert_eq!(parsed(given), (sort, place.to_owned()), "{given}");
        }
    }

    #[test]
    fn wrong_forms_are_refused() {
        for given in ["a:/../b", "dir:", "dir:a:b", "image:a:b:c:/d", "image:"] {
            assert!(SourceSpec::parse(OsStr::new(given)).is_err(), "{given}");
        }
    }
}
