//! What can be wrong with sources, with the source's name and what to do next.
//!
//! The text of an error says what is wrong, and where. [`Error::advice`] says what to do. Names
//! come from archives that strangers made, so [`shown`] makes them safe for a terminal.

use std::io;

/// Result of reading sources.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with a source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument of the command line has a form that it cannot have.
    #[error("{given}: {what}")]
    Argument {
        /// As it was given.
        given: String,
        /// What is wrong.
        what: String,
    },
    /// A file, directory or image cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// What was to be read.
        path: String,
        /// Why it failed.
        error: io::Error,
    },
    /// Something within a source cannot be taken into an image.
    #[error("{source_name}: {entry}: {what}")]
    Refused {
        /// The source.
        source_name: String,
        /// The entry, line or member.
        entry: String,
        /// What is wrong with it.
        what: String,
    },
    /// A source is cut off, or is not what it must be.
    #[error("{source_name}: {what}")]
    Damaged {
        /// The source.
        source_name: String,
        /// What is wrong with it.
        what: String,
    },
    /// A choice is missing: which image of several, which platform.
    #[error("{source_name}: {what}")]
    Choice {
        /// The source.
        source_name: String,
        /// What there is to choose from.
        what: String,
        /// How it is chosen.
        how: String,
    },
    /// An image of a source cannot be opened or read.
    #[error("{path}: {error}")]
    Image {
        /// The image.
        path: String,
        /// Why it failed.
        error: Box<larder_fs::Error>,
    },
    /// The caller wants no more.
    #[error("interrupted")]
    Stopped,
    /// Sorting failed.
    #[error(transparent)]
    Spill(#[from] io::Error),
}

impl Error {
    /// What the person can do next.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::Io { error, .. } => match error.kind() {
                io::ErrorKind::NotFound => "name a directory, an archive, an image or a manifest",
                io::ErrorKind::PermissionDenied => {
                    "run the command as a user that may read it, or leave it out with --exclude"
                }
                io::ErrorKind::StorageFull => "name a directory with more room in TMPDIR",
                _ => return None,
            },
            Self::Refused { .. } => {
                "leave the entry out when the source is made, or unpack the source and build from \
                 the directory"
            }
            Self::Damaged { .. } => "get or make the source again",
            Self::Choice { how, .. } => return Some(how.clone()),
            Self::Spill(_) => "name a directory with more room in TMPDIR",
            Self::Argument { .. } | Self::Image { .. } | Self::Stopped => return None,
        };
        Some(advice.to_owned())
    }

    /// An error of reading `path`.
    pub(crate) fn io(path: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::Io { path, error }
    }

    /// An entry that cannot be taken.
    pub(crate) fn refused(source: &str, entry: &[u8], what: impl Into<String>) -> Self {
        Self::Refused { source_name: source.to_owned(), entry: shown(entry), what: what.into() }
    }

    /// A source that is not what it must be.
    pub(crate) fn damaged(source: &str, what: impl Into<String>) -> Self {
        Self::Damaged { source_name: source.to_owned(), what: what.into() }
    }

    /// An argument with a wrong form.
    pub(crate) fn argument(given: &[u8], what: impl Into<String>) -> Self {
        Self::Argument { given: shown(given), what: what.into() }
    }
}

/// A name as it is shown to people: without characters that a terminal would obey.
pub(crate) fn shown(name: &[u8]) -> String {
    if name.is_empty() {
        return "/".to_owned();
    }
    let mut shown = String::new();
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() { shown.extend(c.escape_default()) } else { shown.push(c) }
        }
        shown.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_has_nothing_to_obey() {
        assert_eq!(shown("käse\x1b[2J".as_bytes()), "käse\\u{1b}[2J");
        assert_eq!(shown(b"a\xffb"), "a\\xffb");
    }
}
