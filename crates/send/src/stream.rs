//! One stream: the changes of two subvolumes, inode by inode, as commands.
//!
//! A comparison yields the items that differ, by rising inode number. Each inode has its turn, in
//! three stages: its names, then its data, then its attributes. So what comes with a higher number
//! may clone from those below. The end is for what has to wait: directories that go, and what
//! changes as long as directories do.

use crate::attributes::{self, Change};
use crate::clones::{Clones, name_of};
use crate::contents::{File, How, Sending};
use crate::error::{Error, Result};
use crate::output::{Output, Summary};
use crate::pair::{Pair, kind_of};
use crate::places::Places;
use larder_format::items::{FileExtent, FileType, InodeItem};
use larder_format::{Key, KeyType, ObjectId};
use larder_fs::{Comparison, Frozen, ItemChange};
use larder_stream::{Command, Protocol, StreamWriter};
use std::io::Write;
use std::ops::Range;

/// What a stream is made of.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// What is sent.
    pub subvolume: &'a Frozen,
    /// Its name at the receiver.
    pub name: &'a [u8],
    /// What the receiver has, and what only differences are sent from.
    pub parent: Option<&'a Frozen>,
    /// What else the receiver has, and may be cloned from.
    pub clones: &'a [&'a Frozen],
}

/// How a stream is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Packed extents go as they are. The protocol has to have a word for it, or nothing comes of
    /// it.
    pub compressed_data: bool,
    /// Say which ranges of files differ, instead of sending them.
    pub no_data: bool,
}

/// Writes one stream, from its first command to `end`. `watch` sees each command counted.
///
/// # Errors
/// Reading, corruption; the output does not take it; a parent that cannot be one.
pub fn send<W: Write>(
    source: &Source<'_>,
    options: Options,
    writer: &mut StreamWriter<W>,
    watch: &mut dyn FnMut(&Summary),
) -> Result<Summary> {
    if source.parent.is_some_and(|parent| parent.id() == source.subvolume.id()) {
        return Err(Error::OwnParent);
    }
    let pair = Pair::new(source.parent, source.subvolume);
    let packed = options.compressed_data && writer.protocol() >= Protocol::V2;
    let mut stream = Stream {
        pair: &pair,
        places: Places::new(&pair),
        clones: Clones::new(&pair, source.clones),
        out: Output::new(writer, watch),
        how: How { packed, no_data: options.no_data },
    };
    stream.begin(source)?;
    stream.inodes()?;
    stream.end()?;
    Ok(stream.out.summary)
}

struct Stream<'a, 'c> {
    pair: &'a Pair<'a>,
    places: Places<'a>,
    clones: Clones<'a>,
    out: Output<'c>,
    how: How,
}

/// An inode number that has something that differs.
struct Turn {
    ino: ObjectId,
    old: Option<InodeItem>,
    new: Option<InodeItem>,
    same: bool,
    names: bool,
    xattrs: bool,
    /// From the second stage on, the file whose contents are sent, if it is a regular one.
    file: Option<File>,
    path: Option<Vec<u8>>,
    /// Extents that differ, not looked at yet.
    differs: Option<Range<u64>>,
}

impl<'a, 'c> Stream<'a, 'c> {
    fn begin(&mut self, source: &Source<'_>) -> Result<()> {
        let (uuid, ctransid) = name_of(source.subvolume);
        let path = source.name;
        self.out.write(&match source.parent.map(name_of) {
            None => Command::Subvol { path, uuid, ctransid },
            Some((parent_uuid, parent_ctransid)) => {
                Command::Snapshot { path, uuid, ctransid, parent_uuid, parent_ctransid }
            }
        })
    }

    fn end(&mut self) -> Result<()> {
        self.places.begin(ObjectId(u64::MAX));
        self.places.delete_directories(&mut self.out)?;
        attributes::finish_directories(&mut self.places, self.pair, &mut self.out)?;
        self.out.write(&Command::End {})
    }

    fn inodes(&mut self) -> Result<()> {
        let mut comparison = Comparison::new(self.pair.old, self.pair.new);
        let mut turn: Option<Turn> = None;
        while let Some(changes) = comparison.step()? {
            for change in changes {
                let ino = change.key.objectid;
                if turn.as_ref().is_none_or(|turn| turn.ino != ino) {
                    if let Some(done) = turn.take() {
                        self.finish(done)?;
                    }
                    turn = Some(self.turn(ino)?);
                }
                let turn = turn.as_mut().expect("it has just been made");
                self.change(turn, &change)?;
            }
        }
        turn.map_or(Ok(()), |turn| self.finish(turn))
    }

    fn turn(&mut self, ino: ObjectId) -> Result<Turn> {
        self.places.begin(ino);
        self.out.summary.inodes += 1;
        let (old, new) = (self.pair.old_inode(ino)?, self.pair.new.inode(ino)?);
        let same = new.is_some() && self.pair.is_same(ino)?;
        Ok(Turn {
            ino,
            old,
            new,
            same,
            names: false,
            xattrs: false,
            file: None,
            path: None,
            differs: None,
        })
    }

    fn change(&mut self, turn: &mut Turn, change: &ItemChange) -> Result<()> {
        match change.key.kind {
            KeyType::INODE_REF | KeyType::INODE_EXTREF => turn.names = true,
            KeyType::XATTR_ITEM => turn.xattrs = true,
            // All extents of a new file differ.
            KeyType::EXTENT_DATA if turn.same => {
                self.names_are_known(turn)?;
                let range = range_of(change)?;
                self.extent(turn, range)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// The first stage, and what comes before the data.
    fn names_are_known(&mut self, turn: &mut Turn) -> Result<()> {
        if turn.path.is_some() {
            return Ok(());
        }
        let (ino, out) = (turn.ino, &mut self.out);
        if let Some(old) = turn.old.as_ref().filter(|_| !turn.same) {
            self.places.delete(out, ino, old)?;
        }
        let Some(new) = turn.new else {
            turn.path = Some(Vec::new());
            return Ok(());
        };
        if !turn.same {
            self.places.create(out, ino, &new)?;
        } else if turn.names && ino != self.pair.root() {
            self.places.rename(out, ino, &new)?;
        }
        let path = self.places.path(out, ino)?;
        attributes::before_data(self.pair, out, &path, &turn.as_change(new))?;
        if kind_of(&new)? == FileType::Regular {
            let old_size = turn.old.filter(|_| turn.same).map(|old| old.size.get());
            let mut file = File::new(ino, path.clone(), old_size, new.size.get());
            self.sending().shorten(&mut file)?;
            turn.file = Some(file);
        }
        turn.path = Some(path);
        Ok(())
    }

    /// Extents that differ are gathered as long as they are neighbours.
    fn extent(&mut self, turn: &mut Turn, range: Range<u64>) -> Result<()> {
        match &mut turn.differs {
            Some(before) if range.start <= before.end => before.end = before.end.max(range.end),
            _ => {
                self.gathered(turn)?;
                turn.differs = Some(range);
            }
        }
        Ok(())
    }

    /// Sends what was gathered, up to where a file has grown.
    fn gathered(&mut self, turn: &mut Turn) -> Result<()> {
        let (Some(range), Some(file)) = (turn.differs.take(), &mut turn.file) else {
            return Ok(());
        };
        let end = range.end.min(file.grows_from().unwrap_or(u64::MAX));
        self.sending().range(file, range.start..end)
    }

    /// The rest of the second stage, and the third.
    fn finish(&mut self, mut turn: Turn) -> Result<()> {
        self.names_are_known(&mut turn)?;
        let Some(new) = turn.new else { return Ok(()) };
        self.gathered(&mut turn)?;
        let mut wrote = false;
        if let Some(file) = &mut turn.file {
            let mut sending = self.sending();
            if let Some(from) = file.grows_from() {
                sending.range(file, from..file.size)?;
            }
            sending.finish(file)?;
            wrote = file.wrote;
        }
        // A clone may have moved directories.
        let path = self.places.path(&mut self.out, turn.ino)?;
        let change = turn.as_change(new);
        attributes::after_data(&mut self.places, self.pair, &mut self.out, &path, &change, wrote)
    }

    fn sending(&mut self) -> Sending<'a, '_, 'c> {
        Sending {
            pair: self.pair,
            places: &mut self.places,
            clones: &mut self.clones,
            out: &mut self.out,
            how: self.how,
        }
    }
}

impl Turn {
    fn as_change(&self, new: InodeItem) -> Change {
        let old = self.old.filter(|_| self.same);
        Change { ino: self.ino, old, new, xattrs: self.xattrs }
    }
}

/// Which bytes of its file an item is about, on either side.
fn range_of(change: &ItemChange) -> Result<Range<u64>> {
    let start = change.key.offset;
    let mut end = start;
    for item in [&change.old, &change.new].into_iter().flatten() {
        let extent = FileExtent::parse(item).map_err(|e| corrupt(change.key, e.0))?;
        end = end.max(start.saturating_add(extent.len()));
    }
    Ok(start..end)
}

fn corrupt(key: Key, what: String) -> Error {
    let place = larder_fs::error::Place { key: Some(key), ..Default::default() };
    Error::Read(larder_fs::Error::Corrupt { place, what })
}
