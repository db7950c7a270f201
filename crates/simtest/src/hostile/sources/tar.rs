//! A program that makes a tar archive, so that what follows a header is reached.
//!
//! Members are put together of words that readers know: types, paths, extended records, maps of
//! sparse files. Checksums and lengths are right, unless the program says otherwise. The first
//! choice says how the archive is packed, and whether a byte of that is wrong. One of its values
//! means that the rest of the input is the archive itself.

use crate::hostile::choices::Choices;
use std::io::Write;

const BLOCK: usize = 512;
/// An archive of so many bytes is long enough, whatever the program says.
const LONG: usize = 1 << 20;
/// Types of members.
const KINDS: &[u8] = b"05120346xgLKSVD7M\0XAz";
const NAMES: &[&[u8]] = &[
    b"a",
    b"b",
    b"c",
    b"d",
    b"e.o",
    b"..",
    b".",
    b"",
    b"bin",
    b"usr",
    b".wh.a",
    b".wh..wh..opq",
    b".wh..wh.plnk",
    b".wh.",
    b"\xff\x1b[2J",
    b"x\ny",
    &[b'n'; 255],
    &[b'm'; 256],
];
const KEYWORDS: &[&[u8]] = &[
    b"path",
    b"linkpath",
    b"size",
    b"uid",
    b"gid",
    b"mtime",
    b"atime",
    b"ctime",
    b"GNU.sparse.major",
    b"GNU.sparse.minor",
    b"GNU.sparse.name",
    b"GNU.sparse.realsize",
    b"GNU.sparse.size",
    b"GNU.sparse.map",
    b"GNU.sparse.offset",
    b"GNU.sparse.numbytes",
    b"SCHILY.xattr.user.a",
    b"SCHILY.xattr.user.%3D%253D",
    b"SCHILY.xattr.security.capability",
    b"SCHILY.xattr.system.posix_acl_access",
    b"SCHILY.xattr.com.apple",
    b"SCHILY.acl.access",
    b"SCHILY.acl.default",
    b"SCHILY.fflags",
    b"LIBARCHIVE.creationtime",
    b"RHT.security.selinux",
];
const VALUES: &[&[u8]] = &[
    b"",
    b"0",
    b"1",
    b"2",
    b"512",
    b"1024",
    b"4294967294",
    b"4294967295",
    b"9223372036854775807",
    b"18446744073709551615",
    b"-1",
    b"-0.5",
    b"-9223372036854775808.5",
    b"1700000000.123456789",
    b"a",
    b"a/b",
    b"../a",
    b"a\0b",
    b"0,1,512,1",
    b"0,512,4096,512",
    b"nodump,schg",
    b"nocow,x",
    b"user::rwx,group::r-x,other::r-x",
    b"user::rwx,user:7:rw-,group::r-x,mask::rwx,other::---",
    b"user::rwx,user:lisa:r-x:1001,group::r-x,mask::r-x,other::---",
    b"user:root:x",
    b"\x02\0\0\0",
    b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x07\0\x05\0\0\0",
];
const TEXTS: &[&[u8]] = &[
    b"2\n0\n512\n4096\n512\n",
    b"1\n0\n5\n",
    b"0\n",
    b"2\n0\n5\n1000\n0\n",
    b"1\n512\n512\n",
    b"-",
    b"99999999\n",
    b"123456789012345678901\n",
    b"1\n0\n18446744073709551615\n",
];

/// The archive that a program makes.
pub(super) fn archive(program: &[u8]) -> Vec<u8> {
    let mut choices = Choices::new(program);
    let how = choices.byte();
    if how == 0xff {
        return choices.rest().to_vec();
    }
    let damage = (how & 0x10 != 0).then(|| (choices.word(), choices.byte()));
    let mut maker = Maker { choices, out: Vec::new() };
    while !maker.choices.is_empty() && maker.out.len() < LONG {
        maker.step();
    }
    if how & 0x20 == 0 {
        maker.out.extend([0; 2 * BLOCK]);
    }
    packed(how, &maker.out, damage)
}

/// A tree with an entry of each type, for what changes a tree.
pub(super) fn everything() -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, name, target) in [
        (b'5', &b"a"[..], &b""[..]),
        (b'0', b"a/b", b""),
        (b'1', b"a/c", b"a/b"),
        (b'2', b"bin", b"usr/bin"),
        (b'5', b"usr/bin", b""),
        (b'3', b"c", b""),
        (b'6', b"d", b""),
        (b'0', b"usr/bin/f", b""),
        (b'2', b"usr/up", b".."),
    ] {
        let data: &[u8] = if kind == b'0' { b"contents" } else { b"" };
        member(&mut out, kind, name, target, data);
    }
    out.extend([0; 2 * BLOCK]);
    out
}

/// Adds a plain member.
pub(super) fn member(out: &mut Vec<u8>, kind: u8, name: &[u8], target: &[u8], data: &[u8]) {
    let mut header = header(kind, name, target, data.len());
    put(&mut header, 257, b"ustar\x0000");
    finish(&mut header);
    out.extend(header);
    out.extend(data);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
}

/// Packs by the lowest bits of `how`, and makes one byte of it wrong.
pub(super) fn packed(how: u8, bytes: &[u8], damage: Option<(u16, u8)>) -> Vec<u8> {
    let mut packed = match how & 3 {
        0 => bytes.to_vec(),
        1 => {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            out.write_all(bytes).and_then(|()| out.finish()).expect("memory")
        }
        2 => zstd::encode_all(bytes, 1).expect("memory"),
        _ => {
            let mut out = liblzma::write::XzEncoder::new(Vec::new(), 0);
            out.write_all(bytes).and_then(|()| out.finish()).expect("memory")
        }
    };
    if let Some((at, with)) = damage {
        let at = usize::from(at) % packed.len().max(1);
        packed.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= with);
    }
    packed
}

fn put(header: &mut [u8; BLOCK], at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
}

fn header(kind: u8, name: &[u8], target: &[u8], size: usize) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    put(&mut header, 0, &name[..name.len().min(100)]);
    put(&mut header, 100, b"0000644\0");
    put(&mut header, 124, format!("{size:011o}").as_bytes());
    put(&mut header, 136, b"00000001750");
    header[156] = kind;
    put(&mut header, 157, &target[..target.len().min(100)]);
    header
}

fn finish(header: &mut [u8; BLOCK]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    put(header, 148, format!("{sum:06o}\0").as_bytes());
}

struct Maker<'a> {
    choices: Choices<'a>,
    out: Vec<u8>,
}

impl Maker<'_> {
    /// Adds a member, as often as the program says.
    fn step(&mut self) {
        let before = self.out.len();
        let shape = self.choices.byte();
        let kind = KINDS[self.choices.below(KINDS.len())];
        let name = self.path();
        let target = if matches!(kind, b'1' | b'2') { self.path() } else { Vec::new() };
        if shape & 1 != 0 {
            self.extended(b'x');
        }
        let data = self.data(kind);
        let mut made = header(kind, &name, &target, data.len());
        match shape >> 1 & 3 {
            0 => put(&mut made, 257, b"ustar\x0000"),
            1 => put(&mut made, 257, b"ustar  \0"),
            2 => put(&mut made, 508, b"tar\0"),
            _ => {}
        }
        if kind == b'S' {
            self.map(&mut made, 386);
        }
        if shape & 8 != 0 {
            self.odd(&mut made);
        }
        if shape & 16 == 0 {
            finish(&mut made);
        }
        self.out.extend(made);
        if kind == b'S' && shape & 32 != 0 {
            let mut more = [0; BLOCK];
            self.map(&mut more, 0);
            self.out.extend(more);
        }
        self.out.extend(data);
        self.out.resize(self.out.len().next_multiple_of(BLOCK), 0);
        if shape & 0xc0 == 0xc0 {
            let again = self.out[before..].to_vec();
            for _ in 0..self.choices.byte() {
                self.out.extend(&again);
            }
        }
    }

    fn path(&mut self) -> Vec<u8> {
        let shape = self.choices.byte();
        let mut path = if shape & 0x80 != 0 { vec![b'/'] } else { Vec::new() };
        for n in 0..=shape & 3 {
            if n > 0 {
                path.push(b'/');
            }
            path.extend(NAMES[self.choices.below(NAMES.len())]);
        }
        if shape & 0x40 != 0 {
            path.push(b'/');
        }
        path
    }

    /// A header of records in front of a member.
    fn extended(&mut self, kind: u8) {
        let records = self.records();
        let mut made = header(kind, b"records", b"", records.len());
        put(&mut made, 257, b"ustar\x0000");
        finish(&mut made);
        self.out.extend(made);
        self.out.extend(records);
        self.out.resize(self.out.len().next_multiple_of(BLOCK), 0);
    }

    fn records(&mut self) -> Vec<u8> {
        let shape = self.choices.byte();
        let mut records = Vec::new();
        for _ in 0..=shape & 7 {
            let keyword = KEYWORDS[self.choices.below(KEYWORDS.len())];
            let value = match self.choices.byte() {
                0 => {
                    let len = usize::from(self.choices.byte());
                    self.choices.bytes(len).to_vec()
                }
                1 => self.path(),
                n => VALUES[usize::from(n) % VALUES.len()].to_vec(),
            };
            record(&mut records, keyword, &value);
        }
        if shape & 0xc0 == 0xc0 {
            // Different keywords, as many as one likes.
            for n in 0..64 * u32::from(self.choices.byte()) {
                record(&mut records, format!("SCHILY.xattr.user.{n}").as_bytes(), b"v");
            }
        }
        if shape & 0x20 != 0 {
            let len = usize::from(self.choices.byte());
            records.extend(self.choices.bytes(len));
        }
        records
    }

    fn data(&mut self, kind: u8) -> Vec<u8> {
        if matches!(kind, b'x' | b'g' | b'X') {
            return self.records();
        }
        if matches!(kind, b'L' | b'K') {
            return self.path();
        }
        if !matches!(kind, b'0' | b'7' | b'S' | 0) {
            return Vec::new();
        }
        match self.choices.byte() {
            0 => Vec::new(),
            1 => {
                let len = usize::from(self.choices.byte());
                self.choices.bytes(len).to_vec()
            }
            2 => vec![b'x'; usize::from(self.choices.byte()) * BLOCK],
            3 => vec![0; usize::from(self.choices.byte()) * 1000],
            n => {
                let mut data = TEXTS[usize::from(n) % TEXTS.len()].to_vec();
                data.resize(BLOCK, 0);
                data.resize(BLOCK + usize::from(self.choices.byte()) * 8, b'd');
                data
            }
        }
    }

    /// The map of a sparse file in GNU's old form: two or more pieces, and the file's size.
    fn map(&mut self, block: &mut [u8; BLOCK], at: usize) {
        for n in 0..self.choices.below(5) {
            let (offset, len) = (self.choices.word(), self.choices.byte());
            let piece = format!("{offset:011o}\0{len:011o}\0");
            put(block, at + n * 24, piece.as_bytes());
        }
        let more = self.choices.byte() & 1;
        if at == 0 {
            block[504] = more;
        } else {
            block[482] = more;
            put(block, 483, format!("{:011o}", self.choices.word()).as_bytes());
        }
    }

    /// Some bytes of a header as the program has them.
    fn odd(&mut self, header: &mut [u8; BLOCK]) {
        const PLACES: [usize; 10] = [0, 100, 108, 116, 124, 136, 257, 329, 337, 345];
        let at = PLACES[self.choices.below(PLACES.len())];
        let len = self.choices.below(13);
        let bytes = self.choices.bytes(len).to_vec();
        put(header, at, &bytes);
    }
}

/// Adds `LENGTH KEYWORD=VALUE` and a newline.
fn record(out: &mut Vec<u8>, keyword: &[u8], value: &[u8]) {
    let rest = keyword.len() + value.len() + 3;
    let mut len = rest;
    while rest + len.to_string().len() != len {
        len = rest + len.to_string().len();
    }
    out.extend(format!("{len} ").as_bytes());
    out.extend(keyword);
    out.push(b'=');
    out.extend(value);
    out.push(b'\n');
}
