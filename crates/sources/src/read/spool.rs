//! From a compressed archive, or one that comes through a pipe, to bytes that can be read anywhere.
//!
//! Entries leave in another order than that of an archive, so what cannot be read at any offset is
//! unpacked to a temporary file first. The file has no name, and blocks of zeros are holes in it.
//! How something is compressed is seen from its first bytes, never from its name.
//!
//! Compressed input is hostile. What it unpacks to is bounded, and so is the memory that unpacking
//! takes: zstd's default window, and 256 MiB for xz, which is more than `xz -9` needs. Checksums at
//! the end are verified, since all of it is read. xz is unpacked by `liblzma`, the maintained
//! successor of the crate `xz2`.

use super::bytes::Bytes;
use crate::Options;
use crate::error::{Error, Result};
use sha2::{Digest, Sha256, Sha512};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;

/// Memory for unpacking xz.
const MOST_XZ_MEMORY: u64 = 256 << 20;
/// What is read, and made a hole if it is zeros.
const BLOCK: usize = 64 << 10;

/// How bytes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packed {
    Not,
    Gzip,
    Zstd,
    Xz,
    /// In a way that is known, but not to us.
    Unknown(&'static str),
}

impl Packed {
    /// What begins with these bytes.
    pub(crate) fn of(start: &[u8]) -> Self {
        const MAGICS: [(&[u8], Packed); 8] = [
            (&[0x1f, 0x8b], Packed::Gzip),
            (&[0x28, 0xb5, 0x2f, 0xfd], Packed::Zstd),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Packed::Xz),
            (b"BZh", Packed::Unknown("bzip2")),
            (b"LZIP", Packed::Unknown("lzip")),
            (&[0x04, 0x22, 0x4d, 0x18], Packed::Unknown("lz4")),
            (b"PK\x03\x04", Packed::Unknown("zip")),
            (&[0x1f, 0x9d], Packed::Unknown("compress")),
        ];
        // A frame that zstd skips.
        if start.len() > 3 && start[0] & 0xf0 == 0x50 && start[1..4] == [0x2a, 0x4d, 0x18] {
            return Self::Zstd;
        }
        let found = MAGICS.iter().find(|(magic, _)| start.starts_with(magic));
        found.map_or(Self::Not, |(_, packed)| *packed)
    }
}

/// The digest that bytes must have: `sha256:…` or `sha512:…`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ExpectedDigest(String);

impl ExpectedDigest {
    /// `None` if it is of another form. What it has is fit for a path.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (algorithm, hex) = text.split_once(':')?;
        let len = match algorithm {
            "sha256" => 64,
            "sha512" => 128,
            _ => return None,
        };
        let is_hex = hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        (hex.len() == len && is_hex).then(|| Self(text.to_owned()))
    }

    /// The algorithm, and the digest in hexadecimal digits.
    pub(crate) fn parts(&self) -> (&str, &str) {
        self.0.split_once(':').expect("it was parsed")
    }

    fn hasher(&self) -> Hasher {
        match self.parts().0 {
            "sha256" => Hasher::Sha256(Box::default()),
            _ => Hasher::Sha512(Box::default()),
        }
    }

    fn check(&self, hasher: Hasher, name: &str) -> Result<()> {
        let found = hasher.finish();
        if found == self.parts().1 {
            return Ok(());
        }
        let what = format!("its digest is {found}, and must be {}", self.parts().1);
        Err(Error::damaged(name, what))
    }

    /// Checks bytes that are read as they are.
    pub(crate) fn verify(&self, bytes: &Bytes) -> Result<()> {
        let mut hasher = self.hasher();
        let mut reader = bytes.reader();
        let mut block = vec![0; BLOCK];
        loop {
            let len = reader.read(&mut block).map_err(Error::io(bytes.name()))?;
            if len == 0 {
                return self.check(hasher, bytes.name());
            }
            hasher.update(&block[..len]);
        }
    }
}

#[derive(Debug)]
enum Hasher {
    Sha256(Box<Sha256>),
    Sha512(Box<Sha512>),
}

impl Hasher {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Sha512(hasher) => hasher.update(bytes),
        }
    }

    fn finish(self) -> String {
        let digest = match self {
            Self::Sha256(hasher) => hasher.finalize().to_vec(),
            Self::Sha512(hasher) => hasher.finalize().to_vec(),
        };
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Bytes as they are if they are not packed, and unpacked otherwise.
pub(crate) fn unpacked(bytes: Bytes, options: &Options) -> Result<Bytes> {
    let mut start = [0; 8];
    let len = bytes.len().min(8) as usize;
    bytes.read_exact_at(&mut start[..len], 0).map_err(Error::io(bytes.name()))?;
    if Packed::of(&start[..len]) == Packed::Not {
        return Ok(bytes);
    }
    let name = bytes.name().to_owned();
    spool(bytes.reader(), &name, options)
}

/// All that a stream gives, unpacked.
pub(crate) fn spool(from: impl Read, name: &str, options: &Options) -> Result<Bytes> {
    let dir = &options.temporary;
    let failed = |e| Error::io(format!("a temporary file in {}", dir.display()))(e);
    let file = tempfile::tempfile_in(dir).map_err(failed)?;
    let mut from = unpack(BufReader::with_capacity(BLOCK, from), name)?;
    let mut at = 0;
    let mut block = vec![0; BLOCK];
    loop {
        let len = fill(&mut *from, &mut block).map_err(|e| cannot_unpack(name, &e))?;
        if len == 0 {
            break;
        }
        if at + len as u64 > options.most_unpacked {
            let what = format!("it unpacks to more than {} bytes", options.most_unpacked);
            return Err(Error::damaged(name, what));
        }
        if block[..len].iter().any(|&b| b != 0) {
            file.write_all_at(&block[..len], at).map_err(failed)?;
        }
        at += len as u64;
    }
    file.set_len(at).map_err(failed)?;
    Ok(Bytes::own(file, at, name))
}

/// Reads as many bytes as there are, up to the length of `buf`.
fn fill(from: &mut dyn Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buf.len() {
        match from.read(&mut buf[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}

fn cannot_unpack(name: &str, error: &io::Error) -> Error {
    Error::damaged(name, format!("it cannot be unpacked: {error}"))
}

/// A stream that unpacks another one, by its first bytes.
fn unpack<'a>(mut from: impl BufRead + 'a, name: &str) -> Result<Box<dyn Read + 'a>> {
    let start = from.fill_buf().map_err(Error::io(name))?;
    Ok(match Packed::of(start) {
        Packed::Not => Box::new(from),
        Packed::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(from)),
        Packed::Zstd => {
            let decoder = zstd::stream::read::Decoder::with_buffer(from);
            Box::new(decoder.map_err(|e| cannot_unpack(name, &e))?)
        }
        Packed::Xz => {
            let flags = liblzma::stream::CONCATENATED;
            let stream = liblzma::stream::Stream::new_stream_decoder(MOST_XZ_MEMORY, flags);
            let stream = stream.map_err(|e| cannot_unpack(name, &e.into()))?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(from, stream))
        }
        Packed::Unknown(how) => {
            let what = format!("it is packed with {how}; unpack it first, or pack it with zstd");
            return Err(Error::damaged(name, what));
        }
    })
}

/// A stream that comes from standard input.
pub(crate) fn standard_input(options: &Options) -> Result<Bytes> {
    let name = "standard input";
    let stdin = rustix::stdio::stdin().try_clone_to_owned().map_err(Error::io(name))?;
    let file = File::from(stdin);
    // A file that stands at its beginning needs no copy.
    let mut position = &file;
    if file.metadata().is_ok_and(|meta| meta.is_file())
        && io::Seek::stream_position(&mut position).is_ok_and(|at| at == 0)
    {
        return unpacked(Bytes::of_file(file, name)?, options);
    }
    spool(file, name, options)
}

/// The beginning of a file, which shows what the file is.
pub(crate) fn first_bytes(bytes: &Bytes, most: usize) -> Result<Vec<u8>> {
    let len = usize::try_from(bytes.len()).unwrap_or(usize::MAX).min(most);
    let mut start = vec![0; len];
    bytes.read_exact_at(&mut start, 0).map_err(Error::io(bytes.name()))?;
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn packed(how: Packed, data: &[u8]) -> Vec<u8> {
        match how {
            Packed::Gzip => {
                let mut out = flate2::write::GzEncoder::new(Vec::new(), Default::default());
                out.write_all(data).unwrap();
                out.finish().unwrap()
            }
            Packed::Zstd => zstd::encode_all(data, 1).unwrap(),
            Packed::Xz => {
                let mut out = liblzma::write::XzEncoder::new(Vec::new(), 0);
                out.write_all(data).unwrap();
                out.finish().unwrap()
            }
            Packed::Not | Packed::Unknown(_) => data.to_vec(),
        }
    }

    #[test]
    fn each_way_of_packing_is_unpacked() {
        let mut data = vec![0; 300_000];
        data[200_000..200_005].copy_from_slice(b"hello");
        data.extend(b"end");
        for how in [Packed::Not, Packed::Gzip, Packed::Zstd, Packed::Xz] {
            // Two pieces, one after the other, are one.
            let mut bytes = packed(how, &data[..250_000]);
            bytes.extend(packed(how, &data[250_000..]));
            assert_eq!(Packed::of(&bytes), how);
            let spooled = spool(&bytes[..], "test", &Options::default()).unwrap();
            assert!(spooled.read_all(1 << 20).unwrap() == data, "{how:?}");
            if how != Packed::Not {
                let cut = spool(&bytes[..bytes.len() - 3], "test", &Options::default());
                assert!(cut.unwrap_err().to_string().contains("unpacked"), "{how:?}");
            }
        }
    }

    #[test]
    fn a_bomb_is_bounded() {
        let options = Options { most_unpacked: 1 << 20, ..Options::default() };
        let bomb = packed(Packed::Zstd, &vec![0; 2 << 20]);
        let error = spool(&bomb[..], "bomb", &options).unwrap_err();
        assert_eq!(error.to_string(), "bomb: it unpacks to more than 1048576 bytes");
    }

    #[test]
    fn unknown_packing_is_named() {
        let error = spool(&b"BZh91AY&SY"[..], "a.tar.bz2", &Options::default()).unwrap_err();
        assert!(error.to_string().contains("bzip2"), "{error}");
    }

    #[test]
    fn digests_are_checked() {
        let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = ExpectedDigest::parse(abc).unwrap();
        let spooled = |text: &[u8]| spool(text, "test", &Options::default()).unwrap();
        digest.verify(&spooled(b"abc")).unwrap();
        assert!(digest.verify(&spooled(b"abd")).is_err());
        for wrong in ["", "sha256:", "md5:00", "sha256:../../../etc", &abc.to_uppercase()] {
            assert!(ExpectedDigest::parse(wrong).is_none(), "{wrong}");
        }
    }
}
