//! One block of 512 bytes that begins a member of a tar archive, in any of its dialects.
//!
//! The dialects agree on the first 257 bytes and differ behind them: the old form has nothing, the
//! form of POSIX has a prefix of the name, that of GNU has the map of a sparse file, and star has a
//! shorter prefix. Numbers are octal digits, or bytes of two's complement if the first bit is set.

/// Bytes of a block, the unit of everything.
pub(crate) const BLOCK: usize = 512;

/// A header block.
#[derive(Clone, Debug)]
pub(crate) struct Header([u8; BLOCK]);

/// A piece of a sparse file: where it is in the file, and how long.
pub(crate) type Piece = (u64, u64);

impl Header {
    /// A block of which the checksum is right.
    pub(crate) fn new(block: &[u8; BLOCK]) -> Option<Self> {
        let header = Self(*block);
        let stated = number(header.field(148, 8))?;
        let is_sum = |byte: fn(u8) -> i64| {
            let sum: i64 = block
                .iter()
                .enumerate()
                .map(|(at, &b)| if (148..156).contains(&at) { i64::from(b' ') } else { byte(b) })
                .sum();
            sum == stated
        };
        // Some old programs added signed bytes.
        (is_sum(i64::from) || is_sum(|b| i64::from(b.cast_signed()))).then_some(header)
    }

    fn field(&self, at: usize, len: usize) -> &[u8] {
        &self.0[at..at + len]
    }

    fn text(&self, at: usize, len: usize) -> &[u8] {
        until_nul(self.field(at, len))
    }

    fn is_posix(&self) -> bool {
        self.field(257, 6) == b"ustar\0"
    }

    fn is_gnu(&self) -> bool {
        self.field(257, 8) == b"ustar  \0"
    }

    /// The name, with its prefix.
    pub(crate) fn name(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        let is_star = self.field(508, 4) == b"tar\0";
        let prefix = self.text(345, if is_star { 131 } else { 155 });
        if !self.is_posix() || prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, name].join(&b'/')
    }

    pub(crate) fn link_name(&self) -> &[u8] {
        self.text(157, 100)
    }

    /// What the member is. The old form has NUL for a file.
    pub(crate) fn kind(&self) -> u8 {
        self.0[156]
    }

    pub(crate) fn mode(&self) -> Option<i64> {
        number(self.field(100, 8))
    }

    pub(crate) fn uid(&self) -> Option<i64> {
        number(self.field(108, 8))
    }

    pub(crate) fn gid(&self) -> Option<i64> {
        number(self.field(116, 8))
    }

    pub(crate) fn size(&self) -> Option<i64> {
        number(self.field(124, 12))
    }

    pub(crate) fn modified(&self) -> Option<i64> {
        number(self.field(136, 12))
    }

    /// Major and minor number.
    pub(crate) fn device(&self) -> Option<(i64, i64)> {
        if !self.is_posix() && !self.is_gnu() {
            return Some((0, 0));
        }
        Some((number(self.field(329, 8))?, number(self.field(337, 8))?))
    }

    /// The first pieces of a sparse file in GNU's old form, whether blocks with more of them
    /// follow, and the size of the file.
    pub(crate) fn sparse(&self) -> Option<(Vec<Piece>, bool, u64)> {
        let size = u64::try_from(number(self.field(483, 12))?).ok()?;
        Some((pieces(self.field(386, 96))?, self.0[482] != 0, size))
    }
}

/// Pieces in a block that follows a header in GNU's old form, and whether one more follows.
pub(crate) fn more_pieces(block: &[u8; BLOCK]) -> Option<(Vec<Piece>, bool)> {
    Some((pieces(&block[..504])?, block[504] != 0))
}

/// Pairs of an offset and a length. An empty one ends them.
fn pieces(fields: &[u8]) -> Option<Vec<Piece>> {
    let used = fields.chunks_exact(24).take_while(|pair| pair[0] != 0);
    let positive = |field: &[u8]| u64::try_from(number(field)?).ok();
    used.map(|pair| Some((positive(&pair[..12])?, positive(&pair[12..])?))).collect()
}

/// What comes before the first NUL.
pub(crate) fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|&b| b == 0).next().unwrap_or_default()
}

/// A number of a header. An empty field is 0. `None` if it is none, or too large.
fn number(field: &[u8]) -> Option<i64> {
    match field.first() {
        Some(first) if first & 0x80 != 0 => binary(field),
        _ => octal(field),
    }
}

fn octal(field: &[u8]) -> Option<i64> {
    let blank = |b: &u8| matches!(b, b' ' | 0);
    let start = field.iter().position(|b| !blank(b)).unwrap_or(field.len());
    let field = &field[start..];
    let digits = field.iter().position(blank).unwrap_or(field.len());
    if !field[digits..].iter().all(blank) {
        return None;
    }
    field[..digits].iter().try_fold(0i64, |n, b| {
        let digit = b.checked_sub(b'0').filter(|&digit| digit < 8)?;
        n.checked_mul(8)?.checked_add(digit.into())
    })
}

/// Two's complement, but for the first bit, which only says so.
fn binary(field: &[u8]) -> Option<i64> {
    let negative = field[0] & 0x40 != 0;
    let first = if negative { field[0] } else { field[0] & 0x7f };
    let fill = if negative { 0xff } else { 0 };
    let mut bytes = field.to_vec();
    bytes[0] = first;
    let (high, low) = bytes.split_at(bytes.len().saturating_sub(8));
    if !high.iter().all(|&b| b == fill) {
        return None;
    }
    let n = low.iter().fold(if negative { -1 } else { 0 }, |n: i64, &b| (n << 8) | i64::from(b));
    ((n < 0) == negative).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_two_forms() {
        for (field, expected) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"77777777", Some(0o77_777_777)),
            (b"0000648\0", None),
            (b"64 4\0\0\0\0", None),
            (b"-1\0\0\0\0\0\0", None),
            (b"\x80\0\0\0\0\0\x01\0", Some(256)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xfe", Some(-2)),
            (b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff", Some(i64::MAX)),
            (b"\x80\0\0\0\x80\0\0\0\0\0\0\0", None),
            (b"\x80\0\0\x01\0\0\0\0\0\0\0\0", None),
            (b"\xff\xff\xff\xff\x80\0\0\0\0\0\0\0", Some(i64::MIN)),
        ] {
            assert_eq!(number(field), expected, "{field:02x?}");
        }
    }

    #[test]
    fn a_wrong_checksum_is_no_header() {
        assert!(Header::new(&[0; BLOCK]).is_none());
        assert!(Header::new(&[b'a'; BLOCK]).is_none());
    }
}
