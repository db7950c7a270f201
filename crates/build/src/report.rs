//! What callers learn: progress while it runs, and in the end what took the space.

use serde::Serialize;
use std::collections::HashMap;

/// What a build is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Entries are read, contents stored.
    Contents,
    /// Trees are written.
    Trees,
    /// What was written is made durable.
    Sync,
}

/// Told of the progress, from any thread.
pub trait Progress: Sync {
    /// A stage begins.
    fn stage(&self, stage: Stage) {
        let _ = stage;
    }
    /// So many more entries have a place.
    fn entries(&self, more: u64) {
        let _ = more;
    }
    /// So many more bytes of contents have been read.
    fn bytes(&self, more: u64) {
        let _ = more;
    }
    /// Is the build to stop? Then it ends with [`crate::Error::Interrupted`].
    fn cancelled(&self) -> bool {
        false
    }
}

/// Reports to nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}

/// Counts of inodes by their type. Hard links count once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Inodes {
    pub files: u64,
    pub directories: u64,
    pub symlinks: u64,
    pub devices: u64,
    /// Fifos and sockets.
    pub others: u64,
}

/// What a group of files holds and takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    /// Files.
    pub files: u64,
    /// Sum of their sizes.
    pub size: u64,
    /// Bytes that were given to them on the device, each copy counted once. What is shared counts
    /// with the first file.
    pub stored: u64,
    /// Bytes in the tree instead.
    pub inline: u64,
}

/// Bytes before and after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Compressed {
    /// Bytes of contents that were compressed.
    pub from: u64,
    /// Bytes that they take.
    pub to: u64,
}

/// What was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Uuid of the file system.
    pub uuid: [u8; 16],
    /// Bytes of the image.
    pub size: u64,
    /// Smallest size at which everything has its place.
    pub end: u64,
    /// Bytes of a node.
    pub nodesize: u32,
    /// Bytes of all nodes, each copy counted once.
    pub metadata: u64,
    /// Bytes of all data extents, each copy counted once.
    pub data: u64,
    /// Subvolumes, the top one included.
    pub subvolumes: u64,
    /// Names below the roots.
    pub names: u64,
    /// Inodes.
    pub inodes: Inodes,
    /// All files.
    pub total: Share,
    /// Bytes in compressed extents.
    pub compressed: Compressed,
    /// Bytes of contents that refer to an extent which another file, or another place of the same
    /// file, had first.
    pub shared: u64,
    /// By the first component of the path, largest first. Files at the top are under "".
    pub directories: Vec<(String, Share)>,
    /// By what follows the last dot of the name, largest first. Files without are under "".
    pub extensions: Vec<(String, Share)>,
}

/// Longer ends of names are no extensions, but parts of a name with dots.
const LONGEST_EXTENSION: usize = 12;
/// Extensions that are told apart; a tree can have any number.
const MOST_EXTENSIONS: usize = 4096;

/// Which shares a file adds to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    directory: u32,
    extension: u32,
}

/// Numbers for names, in the order in which they come.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    directories: Names,
    extensions: Names,
}

#[derive(Debug, Default)]
struct Names {
    numbers: HashMap<Vec<u8>, u32>,
    names: Vec<Vec<u8>>,
}

impl Names {
    fn number(&mut self, name: &[u8], most: usize) -> u32 {
        if let Some(n) = self.numbers.get(name) {
            return *n;
        }
        let name = if self.names.len() < most { name } else { b"" };
        if let Some(n) = self.numbers.get(name) {
            return *n;
        }
        let n = u32::try_from(self.names.len()).expect("bounded, or one for each directory");
        self.numbers.insert(name.to_vec(), n);
        self.names.push(name.to_vec());
        n
    }

    fn into_shares(self, shares: &[Share]) -> Vec<(String, Share)> {
        let mut out: Vec<_> = self
            .names
            .into_iter()
            .zip(shares.iter().copied())
            .map(|(name, share)| (name.escape_ascii().to_string(), share))
            .collect();
        out.sort_by(|(a, x), (b, y)| {
            (y.stored + y.inline).cmp(&(x.stored + x.inline)).then_with(|| a.cmp(b))
        });
        out
    }
}

impl Tallies {
    /// Where a file with this path counts.
    pub(crate) fn of(&mut self, path: &[u8]) -> Tally {
        let (top, name) = match path.iter().position(|b| *b == b'/') {
            Some(at) => (&path[..at], path.rsplit(|b| *b == b'/').next().unwrap_or(path)),
            None => (&path[..0], path),
        };
        // A dot at the start makes no extension, and nothing long is one.
        let extension = match name.iter().rposition(|b| *b == b'.') {
            Some(at) if at > 0 && name.len() - at - 1 <= LONGEST_EXTENSION => &name[at + 1..],
            _ => &name[..0],
        };
        Tally {
            directory: self.directories.number(top, usize::MAX),
            extension: self.extensions.number(extension, MOST_EXTENSIONS),
        }
    }
}

/// The shares, by number.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    pub(crate) total: Share,
    directories: Vec<Share>,
    extensions: Vec<Share>,
}

impl Shares {
    /// Counts a file.
    pub(crate) fn add(&mut self, tally: Tally, share: Share) {
        let add = |to: &mut Share| {
            to.files += share.files;
            to.size += share.size;
            to.stored += share.stored;
            to.inline += share.inline;
        };
        let slot = |of: &mut Vec<Share>, n: u32| {
            let n = n as usize;
            if of.len() <= n {
                of.resize(n + 1, Share::default());
            }
            n
        };
        add(&mut self.total);
        let n = slot(&mut self.directories, tally.directory);
        add(&mut self.directories[n]);
        let n = slot(&mut self.extensions, tally.extension);
        add(&mut self.extensions[n]);
    }

    /// Fills the lists of a report in.
    pub(crate) fn fill(self, mut tallies: Tallies, report: &mut Report) {
        let Self { total, mut directories, mut extensions } = self;
        directories.resize(tallies.directories.names.len(), Share::default());
        extensions.resize(tallies.extensions.names.len(), Share::default());
        report.total = total;
        report.directories = std::mem::take(&mut tallies.directories).into_shares(&directories);
        report.extensions = std::mem::take(&mut tallies.extensions).into_shares(&extensions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_count_under_their_directory_and_extension() {
        let (mut tallies, mut shares) = (Tallies::default(), Shares::default());
        let files: [(&[u8], u64); 5] = [
            (b"a/b/x.c", 10),
            (b"a/y.c", 5),
            (b".profile", 1),
            (b"z.h", 30),
            (b"b/k.org_main_list", 2),
        ];
        for (path, size) in files {
            let share = Share { files: 1, size, stored: size, inline: 0 };
            shares.add(tallies.of(path), share);
        }
        let mut report = Report::default();
        shares.fill(tallies, &mut report);
        let short = |list: &[(String, Share)]| {
            list.iter().map(|(n, s)| (n.clone(), s.files, s.size)).collect::<Vec<_>>()
        };
        let want = |list: &[(&str, u64, u64)]| {
            list.iter().map(|(n, f, s)| ((*n).to_owned(), *f, *s)).collect::<Vec<_>>()
        };
        assert_eq!(short(&report.directories), want(&[("", 2, 31), ("a", 2, 15), ("b", 1, 2)]));
        assert_eq!(short(&report.extensions), want(&[("h", 1, 30), ("c", 2, 15), ("", 2, 3)]));
        assert_eq!((report.total.files, report.total.size), (5, 48));
    }
}
