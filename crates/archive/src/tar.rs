//! Tars: entries as headers of 512 bytes with contents behind them.
//!
//! A header is that of POSIX.1-1988 (`ustar`). What does not fit there goes into a PAX header in
//! front of it, and only that: long names, large numbers, parts of seconds, extended attributes,
//! flags, and times that are not that of the last modification, for which that one stands where
//! nothing is said. The words are those of POSIX, star and libarchive. A file with holes is written
//! in the PAX form 1.0 of GNU tar: a list of its parts comes first.
//!
//! The root is `./`, and so its attributes are kept. Further names of a file are hard links to its
//! first one. There is no entry for a socket, because tars have none.

use crate::acl;
use larder_format::acl::{ACCESS, DEFAULT};
use larder_sources::{Attributes, Contents, Entry, Kind, LinkGroup, Time, TreePath, flag_names};
use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;

/// Bytes of a block.
const BLOCK: usize = 512;
/// What begins a name that hides another one, in layers.
const WHITEOUT: &[u8] = b".wh.";
/// What follows it, where all names of the directory are hidden.
const OPAQUE: &[u8] = b".wh..opq";
/// Bytes of contents that are moved at once.
const PIECE: usize = 256 << 10;

/// What readers of the tar understand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Programs such as GNU tar and bsdtar: files may have holes, ACLs are text, and all times are
    /// kept.
    Archive,
    /// Programs that unpack layers of container images. The specification asks for files without
    /// holes, ACLs are extended attributes as any other, and only the time of the last modification
    /// is kept.
    Layer,
}

/// Why an entry could not be written.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// It could not be read. Nothing of it is in the tar, and others can follow.
    #[error(transparent)]
    Unreadable(io::Error),
    /// It could not be read to its end. A part of it is in the tar, which is of no use now.
    #[error(transparent)]
    Torn(io::Error),
    /// The tar cannot be written.
    #[error(transparent)]
    Output(io::Error),
    /// It is a socket.
    #[error("a tar cannot hold sockets")]
    Socket,
    /// Its name means something else in a layer. Nothing of it is in the tar.
    #[error("in a layer of a container image, a name that begins with .wh. hides another one")]
    Whiteout,
}

/// Writes a tar.
#[derive(Debug)]
pub struct TarWriter<W> {
    out: W,
    style: Style,
    /// The first names of files that have several.
    first_names: HashMap<LinkGroup, TreePath>,
    buf: Vec<u8>,
}

impl<W: Write> TarWriter<W> {
    /// A tar that goes to `out`.
    pub fn new(out: W, style: Style) -> Self {
        Self { out, style, first_names: HashMap::new(), buf: vec![0; PIECE] }
    }

    /// Adds an entry. `contents` are those of a regular file with a size.
    ///
    /// # Errors
    /// [`TarError`] says whether others can follow.
    pub fn entry(
        &mut self,
        entry: &Entry,
        contents: Option<&mut dyn Contents>,
    ) -> Result<(), TarError> {
        if entry.kind == Kind::Socket {
            return Err(TarError::Socket);
        }
        if self.style == Style::Layer && last_name(entry.path.as_bytes()).starts_with(WHITEOUT) {
            return Err(TarError::Whiteout);
        }
        let first = entry.links.and_then(|group| self.first_names.get(&group)).cloned();
        if let Some(first) = first {
            return self.hard_link(entry, &first);
        }
        match (&entry.kind, contents) {
            (Kind::File { size, .. }, Some(contents)) if *size > 0 => {
                self.file(entry, *size, contents)?;
            }
            _ => self.header_only(entry)?,
        }
        self.first_names.extend(entry.links.map(|group| (group, entry.path.clone())));
        Ok(())
    }

    /// Hides a name of the layers below, with all that is there; or all names of a directory, if
    /// none is given.
    ///
    /// # Errors
    /// The tar cannot be written.
    pub fn whiteout(&mut self, directory: &TreePath, name: Option<&[u8]>) -> io::Result<()> {
        let mut path = directory.clone();
        path.push(&[WHITEOUT, name.unwrap_or(OPAQUE)].concat());
        let kind = Kind::File { size: 0, contents: None };
        let entry = Entry { path, attributes: Attributes::default(), kind, links: None };
        let mut records = Records::default();
        let header = Header::of(&entry, &mut records);
        self.headers(&header, &records)
    }

    /// Ends the tar, and gives back what it went to.
    ///
    /// # Errors
    /// The end cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        Ok(self.out)
    }

    fn hard_link(&mut self, entry: &Entry, first: &TreePath) -> Result<(), TarError> {
        let mut records = Records::default();
        let mut header = Header::of(entry, &mut records);
        header.kind(b'1');
        header.target(first.as_bytes(), &mut records);
        self.headers(&header, &records).map_err(TarError::Output)
    }

    fn header_only(&mut self, entry: &Entry) -> Result<(), TarError> {
        let mut records = Records::default();
        let mut header = Header::of(entry, &mut records);
        self.attributes(&entry.attributes, &mut records);
        match &entry.kind {
            Kind::Symlink(target) => header.target(target, &mut records),
            Kind::CharDevice { major, minor } | Kind::BlockDevice { major, minor } => {
                header.device(*major, *minor);
            }
            _ => {}
        }
        self.headers(&header, &records).map_err(TarError::Output)
    }

    fn file(
        &mut self,
        entry: &Entry,
        size: u64,
        contents: &mut dyn Contents,
    ) -> Result<(), TarError> {
        let mut parts = contents.data().map_err(TarError::Unreadable)?;
        let stored: u64 = parts.iter().map(|part| part.end - part.start).sum();
        if stored < size && self.style == Style::Archive {
            return self.sparse_file(entry, size, &parts, stored, contents);
        }
        if stored < size {
            // Holes read as zeros.
            parts.clear();
            parts.push(0..size);
        }
        let mut records = Records::default();
        let mut header = Header::of(entry, &mut records);
        self.attributes(&entry.attributes, &mut records);
        header.size(size, &mut records);
        self.headers(&header, &records).map_err(TarError::Output)?;
        self.parts(&parts, size, contents)
    }

    /// A file of which only parts follow. A reader that does not know the form sees a file with
    /// another name, which begins with the list of parts.
    fn sparse_file(
        &mut self,
        entry: &Entry,
        size: u64,
        parts: &[Range<u64>],
        stored: u64,
        contents: &mut dyn Contents,
    ) -> Result<(), TarError> {
        let map = map_of_parts(parts, size);
        let mut name = [b"GNUSparseFile/", last_name(entry.path.as_bytes())].concat();
        name.truncate(field::NAME.len());
        let mut records = Records::default();
        let mut header = Header::named(&name, entry, &mut records);
        self.attributes(&entry.attributes, &mut records);
        records.add(b"GNU.sparse.major", b"1");
        records.add(b"GNU.sparse.minor", b"0");
        records.add(b"GNU.sparse.name", entry.path.as_bytes());
        records.add(b"GNU.sparse.realsize", size.to_string().as_bytes());
        header.size(map.len() as u64 + stored, &mut records);
        self.headers(&header, &records).map_err(TarError::Output)?;
        self.out.write_all(&map).map_err(TarError::Output)?;
        self.parts(parts, stored, contents)
    }

    /// Writes the parts of a file one after the other, and fills the last block.
    fn parts(
        &mut self,
        parts: &[Range<u64>],
        stored: u64,
        contents: &mut dyn Contents,
    ) -> Result<(), TarError> {
        for part in parts {
            let mut at = part.start;
            while at < part.end {
                let len = self.buf.len().min(usize::try_from(part.end - at).unwrap_or(usize::MAX));
                let piece = &mut self.buf[..len];
                contents.read_exact_at(piece, at).map_err(TarError::Torn)?;
                self.out.write_all(piece).map_err(TarError::Output)?;
                at += len as u64;
            }
        }
        self.out.write_all(padding(stored)).map_err(TarError::Output)
    }

    /// Records for what no header has: times, flags, extended attributes.
    fn attributes(&self, attributes: &Attributes, records: &mut Records) {
        let times = [
            ("atime", attributes.accessed),
            ("ctime", attributes.changed),
            ("LIBARCHIVE.creationtime", attributes.created),
        ];
        for (key, time) in times {
            if self.style == Style::Archive
                && let Some(time) = time.filter(|time| *time != attributes.modified)
            {
                records.add(key.as_bytes(), decimal(time).as_bytes());
            }
        }
        let flags = flag_names(attributes.inode_flags);
        if !flags.is_empty() {
            records.add(b"SCHILY.fflags", flags.as_bytes());
        }
        for (name, value) in &attributes.xattrs {
            let acl = match &name[..] {
                ACCESS => Some("SCHILY.acl.access"),
                DEFAULT => Some("SCHILY.acl.default"),
                _ => None,
            };
            let as_text = acl.filter(|_| self.style == Style::Archive).zip(acl::text(value));
            match as_text {
                Some((key, text)) => records.add(key.as_bytes(), text.as_bytes()),
                None => records.add(&[b"SCHILY.xattr.", &escaped(name)[..]].concat(), value),
            }
        }
    }

    /// Writes a header, behind a PAX header if there are records.
    fn headers(&mut self, header: &Header, records: &Records) -> io::Result<()> {
        if !records.0.is_empty() {
            let pax = Header::of_records(header, records.0.len() as u64);
            self.out.write_all(&pax.finished())?;
            self.out.write_all(&records.0)?;
            self.out.write_all(padding(records.0.len() as u64))?;
        }
        self.out.write_all(&header.finished())
    }
}

/// The name of an attribute as a part of a keyword, which ends at the first `=`. GNU tar writes and
/// reads `%3D`, and `%25` for what would be taken for one of the two. Any other `%` is itself.
fn escaped(name: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(name.len());
    for (at, byte) in name.iter().enumerate() {
        match byte {
            b'=' => escaped.extend(b"%3D"),
            b'%' if name[at..].starts_with(b"%3D") || name[at..].starts_with(b"%25") => {
                escaped.extend(b"%25");
            }
            byte => escaped.push(*byte),
        }
    }
    escaped
}

/// What fills the last block of so many bytes.
fn padding(stored: u64) -> &'static [u8] {
    const ZEROS: [u8; BLOCK] = [0; BLOCK];
    let over = usize::try_from(stored % BLOCK as u64).expect("less than a block");
    if over == 0 { &[] } else { &ZEROS[over..] }
}

/// The list of parts, as GNU tar's form 1.0 has it: their number, then place and size of each, as
/// lines of decimal digits, filled to whole blocks. An empty part stands for a hole at the end.
fn map_of_parts(parts: &[Range<u64>], size: u64) -> Vec<u8> {
    let ends_with_hole = parts.last().is_none_or(|part| part.end < size);
    let mut map = format!("{}\n", parts.len() + usize::from(ends_with_hole));
    for part in parts {
        map += &format!("{}\n{}\n", part.start, part.end - part.start);
    }
    if ends_with_hole {
        map += &format!("{size}\n0\n");
    }
    let mut map = map.into_bytes();
    map.extend_from_slice(padding(map.len() as u64));
    map
}

/// Records of a PAX header.
#[derive(Debug, Default)]
struct Records(Vec<u8>);

impl Records {
    /// `LENGTH key=value` and a newline. The length counts its own digits.
    fn add(&mut self, key: &[u8], value: &[u8]) {
        // A space, an equals sign and a newline.
        let rest = key.len() + value.len() + 3;
        let mut len = rest + 1;
        while len != rest + digits(len) {
            len = rest + digits(len);
        }
        self.0.extend_from_slice(len.to_string().as_bytes());
        self.0.push(b' ');
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }
}

fn digits(n: usize) -> usize {
    n.checked_ilog10().map_or(1, |n| n as usize + 1)
}

fn last_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

/// Seconds as PAX writes them: decimal, with no more digits than are needed.
fn decimal(time: Time) -> String {
    let nanoseconds = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let sign = if nanoseconds < 0 { "-" } else { "" };
    let (whole, part) = (nanoseconds.abs() / 1_000_000_000, nanoseconds.abs() % 1_000_000_000);
    let text = format!("{sign}{whole}.{part:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Places of the fields of a header.
mod field {
    use std::ops::Range;
    pub(super) const NAME: Range<usize> = 0..100;
    pub(super) const MODE: Range<usize> = 100..108;
    pub(super) const UID: Range<usize> = 108..116;
    pub(super) const GID: Range<usize> = 116..124;
    pub(super) const SIZE: Range<usize> = 124..136;
    pub(super) const MTIME: Range<usize> = 136..148;
    pub(super) const SUM: Range<usize> = 148..156;
    pub(super) const KIND: usize = 156;
    pub(super) const TARGET: Range<usize> = 157..257;
    pub(super) const MAGIC: Range<usize> = 257..265;
    pub(super) const MAJOR: Range<usize> = 329..337;
    pub(super) const MINOR: Range<usize> = 337..345;
    pub(super) const PREFIX: Range<usize> = 345..500;
}

/// A header in the making.
#[derive(Debug)]
struct Header([u8; BLOCK]);

impl Header {
    fn empty() -> Self {
        let mut header = Self([0; BLOCK]);
        header.0[field::MAGIC].copy_from_slice(b"ustar\x0000");
        for number in [field::SIZE, field::MTIME, field::UID, field::GID] {
            header.octal(number, 0);
        }
        header
    }

    /// Everything but sizes, targets and device numbers. What does not fit becomes a record.
    fn of(entry: &Entry, records: &mut Records) -> Self {
        let name = match (&entry.kind, entry.path.as_bytes()) {
            (_, b"") => b"./".to_vec(),
            (Kind::Directory, path) => [path, b"/"].concat(),
            (_, path) => path.to_vec(),
        };
        Self::named(&name, entry, records)
    }

    /// The same under another name.
    fn named(name: &[u8], entry: &Entry, records: &mut Records) -> Self {
        let mut header = Self::empty();
        header.name(name, records);
        header.kind(match &entry.kind {
            Kind::Symlink(_) => b'2',
            Kind::CharDevice { .. } => b'3',
            Kind::BlockDevice { .. } => b'4',
            Kind::Directory => b'5',
            Kind::Fifo => b'6',
            Kind::File { .. } | Kind::Socket => b'0',
        });
        let a = &entry.attributes;
        header.octal(field::MODE, u64::from(a.permissions & 0o7777));
        header.number(field::UID, u64::from(a.uid), "uid", records);
        header.number(field::GID, u64::from(a.gid), "gid", records);
        header.modified(a.modified, records);
        header
    }

    /// The header of the records that belong to another one.
    fn of_records(of: &Self, len: u64) -> Self {
        let mut header = Self::empty();
        let end = of.0[field::NAME].iter().position(|b| *b == 0).unwrap_or(field::NAME.len());
        let name = &of.0[..end];
        let name = [b"PaxHeaders/", last_name(name.strip_suffix(b"/").unwrap_or(name))].concat();
        let len_of_name = name.len().min(field::NAME.len());
        header.0[..len_of_name].copy_from_slice(&name[..len_of_name]);
        header.kind(b'x');
        header.octal(field::MODE, 0o644);
        header.0[field::MTIME].copy_from_slice(&of.0[field::MTIME]);
        header.octal(field::SIZE, len);
        header
    }

    fn kind(&mut self, kind: u8) {
        self.0[field::KIND] = kind;
    }

    /// A name of up to 100 bytes, or of up to 255 if a slash is at the right place. Others are
    /// records, and the header has their beginning.
    fn name(&mut self, name: &[u8], records: &mut Records) {
        let put = |field: &mut [u8], bytes: &[u8]| field[..bytes.len()].copy_from_slice(bytes);
        if name.len() <= field::NAME.len() {
            return put(&mut self.0[field::NAME], name);
        }
        // A slash at the end belongs to the name.
        let slashes = name[..name.len() - 1].iter().enumerate().filter(|(_, b)| **b == b'/');
        let fits = |at: &usize| {
            (1..=field::PREFIX.len()).contains(at) && name.len() - at - 1 <= field::NAME.len()
        };
        match slashes.map(|(at, _)| at).find(fits) {
            Some(at) => {
                put(&mut self.0[field::PREFIX], &name[..at]);
                put(&mut self.0[field::NAME], &name[at + 1..]);
            }
            None => {
                put(&mut self.0[field::NAME], &name[..field::NAME.len()]);
                records.add(b"path", name);
            }
        }
    }

    fn target(&mut self, target: &[u8], records: &mut Records) {
        let len = target.len().min(field::TARGET.len());
        self.0[field::TARGET][..len].copy_from_slice(&target[..len]);
        if len < target.len() {
            records.add(b"linkpath", target);
        }
    }

    fn device(&mut self, major: u32, minor: u32) {
        self.octal(field::MAJOR, u64::from(major));
        self.octal(field::MINOR, u64::from(minor));
    }

    fn size(&mut self, size: u64, records: &mut Records) {
        self.number(field::SIZE, size, "size", records);
    }

    fn modified(&mut self, time: Time, records: &mut Records) {
        let seconds = u64::try_from(time.seconds).unwrap_or(0);
        if !self.octal(field::MTIME, seconds) || time.seconds < 0 || time.nanoseconds > 0 {
            records.add(b"mtime", decimal(time).as_bytes());
        }
    }

    /// A number that becomes a record if it is too large.
    fn number(&mut self, at: Range<usize>, value: u64, key: &str, records: &mut Records) {
        if !self.octal(at, value) {
            records.add(key.as_bytes(), value.to_string().as_bytes());
        }
    }

    /// Octal digits and a NUL. If there is no room for them, the field is zero, and the answer no.
    fn octal(&mut self, at: Range<usize>, value: u64) -> bool {
        let digits = at.len() - 1;
        let fits = value.checked_ilog2().is_none_or(|bits| (bits as usize) < 3 * digits);
        let text = format!("{:0digits$o}\0", if fits { value } else { 0 });
        self.0[at].copy_from_slice(text.as_bytes());
        fits
    }

    /// The bytes, with their checksum: the sum of all, where the field of the sum is spaces.
    fn finished(&self) -> [u8; BLOCK] {
        let mut bytes = self.0;
        bytes[field::SUM].fill(b' ');
        let sum: u32 = bytes.iter().map(|b| u32::from(*b)).sum();
        bytes[field::SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_count_their_own_digits() {
        for (value, expected) in [
            (&b"x"[..], &b"6 k=x\n"[..]),
            (&[b'y'; 4], b"9 k=yyyy\n"),
            // One more digit makes the record longer, too.
            (&[b'y'; 5], b"11 k=yyyyy\n"),
        ] {
            let mut records = Records::default();
            records.add(b"k", value);
            assert_eq!(records.0, expected);
        }
        for len in [90, 91, 92, 93, 94, 95, 96, 990, 991, 992, 993, 994] {
            let mut records = Records::default();
            records.add(b"key", &vec![b'v'; len]);
            let text = String::from_utf8(records.0).unwrap();
            let (said, _) = text.split_once(' ').unwrap();
            assert_eq!(said.parse::<usize>().unwrap(), text.len());
        }
    }

    #[test]
    fn names_of_attributes_are_escaped_where_they_must() {
        for (name, expected) in [
            (&b"user.a"[..], &b"user.a"[..]),
            (b"user.a=b", b"user.a%3Db"),
            (b"user.100%", b"user.100%"),
            (b"user.%3D%25%3", b"user.%253D%2525%3"),
        ] {
            assert_eq!(escaped(name), expected);
        }
    }

    #[test]
    fn times_have_the_digits_that_they_need() {
        let time = |seconds, nanoseconds| decimal(Time { seconds, nanoseconds });
        assert_eq!(time(1_700_000_000, 0), "1700000000");
        assert_eq!(time(1, 500_000_000), "1.5");
        assert_eq!(time(0, 1), "0.000000001");
        assert_eq!(time(-1, 500_000_000), "-0.5");
        assert_eq!(time(-2, 0), "-2");
        assert_eq!(time(100, 0), "100");
    }

    #[test]
    fn long_names_are_split_at_a_slash_or_become_records() {
        let header = |name: &str| {
            let (mut header, mut records) = (Header::empty(), Records::default());
            header.name(name.as_bytes(), &mut records);
            let text = |field: Range<usize>| {
                String::from_utf8(header.0[field].to_vec())
                    .unwrap()
                    .trim_end_matches('\0')
                    .to_owned()
            };
            (text(field::PREFIX), text(field::NAME), !records.0.is_empty())
        };
        let (d, n) = ("d".repeat(150), "n".repeat(100));
        assert_eq!(header(&n), (String::new(), n.clone(), false));
        assert_eq!(header(&format!("{d}/{n}")), (d.clone(), n.clone(), false));
        let long = format!("{n}n");
        assert_eq!(header(&long), (String::new(), n.clone(), true));
        assert!(header(&format!("{d}{d}/x")).2);
        // The slash at the end of a directory's name is part of it.
        let directory = format!("{d}/{}/", &n[1..]);
        assert_eq!(header(&directory), (d, format!("{}/", &n[1..]), false));
    }

    #[test]
    fn large_numbers_become_records() {
        let (mut header, mut records) = (Header::empty(), Records::default());
        header.number(field::UID, 0o7_777_777, "uid", &mut records);
        assert!(records.0.is_empty() && &header.0[field::UID] == b"7777777\0");
        header.number(field::UID, 0o10_000_000, "uid", &mut records);
        assert_eq!(records.0, b"15 uid=2097152\n");
        header.size(0o77_777_777_777, &mut records);
        assert_eq!(&header.0[field::SIZE], b"77777777777\0");
    }

    #[test]
    fn the_list_of_parts_fills_blocks_and_tells_of_a_hole_at_the_end() {
        let map = map_of_parts(&[0..4096, 8192..12288], 12288);
        assert!(map.starts_with(b"2\n0\n4096\n8192\n4096\n\0") && map.len() == 512);
        let map = map_of_parts(&[], 10);
        assert!(map.starts_with(b"1\n10\n0\n\0"));
        assert!(padding(1024).is_empty() && padding(1).len() == 511);
    }
}
