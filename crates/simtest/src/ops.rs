//! The operations that workloads are made of, and the notation they are written in.
//!
//! The notation is that of the log scenarios in `docs/LOG.md`: `mk A; new A/f; A/f[0,12K)=a; F
//! A/f`. Every operation prints in it and every printed operation parses, so that a failing
//! workload is reported as a line that can be run again. Small additions: `mode f 640` sets
//! permission bits, `fifo p`, `sock p` and `dev p` make special files, `mv= a b` swaps, `mv! a b`
//! leaves a whiteout, `copy s[a,b)>t@o` copies a range, `open f h` and `tmp h` give a handle on a
//! file (`h` then stands for it as `@h`), `close h` takes it away. `alloc f[a,b)`, `zero f[a,b)`
//! and `punch f[a,b)` are fallocate's, the first two with `=` at the end of the word where the size
//! stays; `nocow f` has an empty file overwritten in place from then on. `dedupe s[a,b)>t@o` shares
//! what is the same, `sub p` makes a subvolume, `snap s>p` and `snap= s>p` snapshots of one, the
//! second read-only, `sub- p` deletes one, `default p` has it mounted where none is named.
//!
//! What is written is never constant: each byte depends on the letter given *and* on its place, so
//! that a block which turns up in the wrong place or the wrong file is noticed. Small letters give
//! bytes that compress well, capitals such that do not.

use larder_fs::Fallocate;
use std::fmt;

/// A path below the root, components separated by `/`; empty for the root itself. `@h` names a
/// handle.
pub type Path = String;

/// Half-open range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Bytes {
    pub from: u64,
    pub to: u64,
}

/// What a rename does beyond moving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Move {
    Replace,
    Exchange,
    Whiteout,
}

/// A special file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Special {
    Fifo,
    Socket,
    Device,
}

/// What fallocate does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Alloc {
    Reserve,
    ReserveKeepSize,
    Zero,
    ZeroKeepSize,
    Punch,
}

impl Alloc {
    /// Each with its word in the notation.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::Reserve, "alloc"),
        (Self::ReserveKeepSize, "alloc="),
        (Self::Zero, "zero"),
        (Self::ZeroKeepSize, "zero="),
        (Self::Punch, "punch"),
    ];
    /// May it make the file grow?
    #[must_use]
    pub(crate) fn grows(self) -> bool {
        matches!(self, Self::Reserve | Self::Zero)
    }
    /// Does what was in the range become zero?
    #[must_use]
    pub fn clears(self) -> bool {
        matches!(self, Self::Zero | Self::ZeroKeepSize | Self::Punch)
    }
    /// In the engine's words.
    #[must_use]
    pub fn engine(self) -> Fallocate {
        match self {
            Self::Reserve | Self::ReserveKeepSize => {
                Fallocate::Allocate { keep_size: !self.grows() }
            }
            Self::Zero | Self::ZeroKeepSize => Fallocate::Zero { keep_size: !self.grows() },
            Self::Punch => Fallocate::Punch,
        }
    }
    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(how, _)| *how == self).map_or("", |(_, word)| word)
    }
}

/// An operation of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Op {
    Create(Path),
    Mkdir(Path),
    Mknod(Special, Path),
    Symlink { target: String, path: Path },
    Link { from: Path, to: Path },
    Unlink(Path),
    Rmdir(Path),
    Rename { from: Path, to: Path, mode: Move },
    Write { path: Path, range: Bytes, fill: u8 },
    Append { path: Path, len: u64, fill: u8 },
    Truncate { path: Path, size: u64 },
    Allocate { path: Path, how: Alloc, range: Bytes },
    NoCow(Path),
    SetXattr { path: Path, name: String, value: String },
    RemoveXattr { path: Path, name: String },
    Chmod { path: Path, perm: u32 },
    Copy { from: Path, range: Bytes, to: Path, at: u64 },
    Dedupe { from: Path, range: Bytes, to: Path, at: u64 },
    Subvolume(Path),
    Snapshot { from: Path, to: Path, read_only: bool },
    DeleteSubvolume(Path),
    DefaultSubvolume(Path),
    Fsync(Path),
    Fdatasync(Path),
    Sync,
    Open { path: Path, handle: String },
    Unnamed { handle: String },
    Close { handle: String },
}

impl Op {
    /// Does it promise that something is durable when it returns?
    #[must_use]
    pub fn is_sync(&self) -> bool {
        matches!(self, Self::Fsync(_) | Self::Fdatasync(_) | Self::Sync)
    }

    /// Does it change what is in a file?
    #[must_use]
    pub fn is_data(&self) -> bool {
        matches!(
            self,
            Self::Write { .. }
                | Self::Append { .. }
                | Self::Truncate { .. }
                | Self::Allocate { .. }
                | Self::NoCow(_)
                | Self::Copy { .. }
        )
    }

    /// The paths it names, changed by `rename`.
    #[must_use]
    pub(crate) fn map_paths(&self, rename: &impl Fn(&str) -> String) -> Self {
        let mut op = self.clone();
        match &mut op {
            Self::Create(p)
            | Self::Mkdir(p)
            | Self::Mknod(_, p)
            | Self::Symlink { path: p, .. }
            | Self::Unlink(p)
            | Self::Rmdir(p)
            | Self::Write { path: p, .. }
            | Self::Append { path: p, .. }
            | Self::Truncate { path: p, .. }
            | Self::Allocate { path: p, .. }
            | Self::NoCow(p)
            | Self::SetXattr { path: p, .. }
            | Self::RemoveXattr { path: p, .. }
            | Self::Chmod { path: p, .. }
            | Self::Fsync(p)
            | Self::Fdatasync(p)
            | Self::Subvolume(p)
            | Self::DeleteSubvolume(p)
            | Self::DefaultSubvolume(p)
            | Self::Open { path: p, .. } => *p = rename(p),
            Self::Link { from, to }
            | Self::Rename { from, to, .. }
            | Self::Copy { from, to, .. }
            | Self::Dedupe { from, to, .. }
            | Self::Snapshot { from, to, .. } => {
                *from = rename(from);
                *to = rename(to);
            }
            Self::Sync | Self::Unnamed { .. } | Self::Close { .. } => {}
        }
        op
    }
}

/// The byte that a write with this letter puts at this offset; never zero.
#[must_use]
pub fn pattern(fill: u8, offset: u64) -> u8 {
    if fill.is_ascii_uppercase() {
        let x = (offset + (u64::from(fill) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        return ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56) as u8 | 1;
    }
    let x = u64::from(fill) * 37 + (offset / 4096) * 101 + offset % 4096 * 7 + offset % 4096 / 255;
    (x % 255) as u8 + 1
}

/// The bytes that a write puts into a range.
#[must_use]
pub fn filled(fill: u8, range: Bytes) -> Vec<u8> {
    (range.from..range.to).map(|o| pattern(fill, o)).collect()
}

struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n > 0 && n.is_multiple_of(1 << 20) => write!(f, "{}M", n >> 20),
            n if n > 0 && n.is_multiple_of(1 << 10) => write!(f, "{}K", n >> 10),
            n => write!(f, "{n}"),
        }
    }
}

struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "/" } else { self.0 })
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(p) => write!(f, "new {p}"),
            Self::Mkdir(p) => write!(f, "mk {p}"),
            Self::Mknod(Special::Fifo, p) => write!(f, "fifo {p}"),
            Self::Mknod(Special::Socket, p) => write!(f, "sock {p}"),
            Self::Mknod(Special::Device, p) => write!(f, "dev {p}"),
            Self::Symlink { target, path } => write!(f, "sym {target} {path}"),
            Self::Link { from, to } => write!(f, "ln {from} {to}"),
            Self::Unlink(p) => write!(f, "rm {p}"),
            Self::Rmdir(p) => write!(f, "rmdir {p}"),
            Self::Rename { from, to, mode: Move::Replace } => write!(f, "mv {from} {to}"),
            Self::Rename { from, to, mode: Move::Exchange } => write!(f, "mv= {from} {to}"),
            Self::Rename { from, to, mode: Move::Whiteout } => write!(f, "mv! {from} {to}"),
            Self::Write { path, range, fill } => {
                write!(f, "{path}[{},{})={}", Size(range.from), Size(range.to), char::from(*fill))
            }
            Self::Append { path, len, fill } => {
                write!(f, "{path}+{}={}", Size(*len), char::from(*fill))
            }
            Self::Truncate { path, size } => write!(f, "trunc {path} {}", Size(*size)),
            Self::Allocate { path, how, range } => {
                write!(f, "{} {path}[{},{})", how.word(), Size(range.from), Size(range.to))
            }
            Self::NoCow(p) => write!(f, "nocow {p}"),
            Self::SetXattr { path, name, value } => write!(f, "xa {} {name}={value}", Shown(path)),
            Self::RemoveXattr { path, name } => write!(f, "xa- {} {name}", Shown(path)),
            Self::Chmod { path, perm } => write!(f, "mode {} {perm:o}", Shown(path)),
            Self::Copy { from, range, to, at } => {
                write!(f, "copy {from}[{},{})>{to}@{}", Size(range.from), Size(range.to), Size(*at))
            }
            Self::Dedupe { from, range, to, at } => {
                write!(
                    f,
                    "dedupe {from}[{},{})>{to}@{}",
                    Size(range.from),
                    Size(range.to),
                    Size(*at)
                )
            }
            Self::Subvolume(p) => write!(f, "sub {p}"),
            Self::Snapshot { from, to, read_only: false } => write!(f, "snap {}>{to}", Shown(from)),
            Self::Snapshot { from, to, read_only: true } => write!(f, "snap= {}>{to}", Shown(from)),
            Self::DeleteSubvolume(p) => write!(f, "sub- {p}"),
            Self::DefaultSubvolume(p) => write!(f, "default {}", Shown(p)),
            Self::Fsync(p) => write!(f, "F {}", Shown(p)),
            Self::Fdatasync(p) => write!(f, "FD {}", Shown(p)),
            Self::Sync => write!(f, "COMMIT"),
            Self::Open { path, handle } => write!(f, "open {path} {handle}"),
            Self::Unnamed { handle } => write!(f, "tmp {handle}"),
            Self::Close { handle } => write!(f, "close {handle}"),
        }
    }
}

/// Operations as one line.
#[must_use]
pub fn line(ops: &[Op]) -> String {
    ops.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M') => (&text[..text.len() - 1], 1 << 20),
        Some(b'G') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    digits.parse::<u64>().map(|n| n * unit).map_err(|_| format!("not a size: {text:?}"))
}

fn path(text: &str) -> Path {
    text.trim().trim_matches('/').to_owned()
}

/// `f[a,b)` as path, range and the rest.
fn ranged(text: &str) -> Option<Result<(Path, Bytes, &str), String>> {
    let (file, rest) = text.split_once('[')?;
    let (range, rest) = rest.split_once(')')?;
    let (from, to) = range.split_once(',')?;
    let bytes = size(from).and_then(|from| size(to).map(|to| Bytes { from, to }));
    Some(bytes.map(|b| (path(file), b, rest)))
}

fn letter(text: &str) -> Result<u8, String> {
    text.trim().bytes().next().ok_or_else(|| "no letter to write".to_owned())
}

fn one(text: &str) -> Result<Option<Op>, String> {
    let text = text.trim();
    let words: Vec<&str> = text.split_whitespace().collect();
    let op = match words[..] {
        [] => return Ok(None),
        // What only hints at something that may happen anyway.
        ["evict"] | ["wb", _] => return Ok(None),
        ["COMMIT"] => Op::Sync,
        ["new", p] => Op::Create(path(p)),
        ["mk", p] => Op::Mkdir(path(p)),
        ["fifo", p] => Op::Mknod(Special::Fifo, path(p)),
        ["sock", p] => Op::Mknod(Special::Socket, path(p)),
        ["dev", p] => Op::Mknod(Special::Device, path(p)),
        ["sym", target, p] => Op::Symlink { target: target.to_owned(), path: path(p) },
        ["ln", from, to] => Op::Link { from: path(from), to: path(to) },
        ["mv", from, to] => Op::Rename { from: path(from), to: path(to), mode: Move::Replace },
        ["mv=", from, to] => Op::Rename { from: path(from), to: path(to), mode: Move::Exchange },
        ["mv!", from, to] => Op::Rename { from: path(from), to: path(to), mode: Move::Whiteout },
        ["rm", p] => Op::Unlink(path(p)),
        ["rmdir", p] => Op::Rmdir(path(p)),
        ["trunc", p, n] => Op::Truncate { path: path(p), size: size(n)? },
        ["mode", p, m] => Op::Chmod {
            path: path(p),
            perm: u32::from_str_radix(m, 8).map_err(|_| format!("not an octal mode: {m:?}"))?,
        },
        ["xa", p, pair] => {
            let (name, value) = pair.split_once('=').ok_or("xa needs name=value")?;
            Op::SetXattr { path: path(p), name: name.to_owned(), value: value.to_owned() }
        }
        ["xa-", p, name] => Op::RemoveXattr { path: path(p), name: name.to_owned() },
        ["F", p] => Op::Fsync(path(p)),
        ["FD", p] => Op::Fdatasync(path(p)),
        ["open", p, h] => Op::Open { path: path(p), handle: h.to_owned() },
        ["tmp", h] => Op::Unnamed { handle: h.to_owned() },
        ["close", h] => Op::Close { handle: h.to_owned() },
        ["nocow", p] => Op::NoCow(path(p)),
        [word, what] if Alloc::ALL.iter().any(|(_, w)| *w == word) => {
            let (how, _) = Alloc::ALL.into_iter().find(|(_, w)| *w == word).expect("just found");
            let (path, range, _) = ranged(what).ok_or("it needs f[a,b)")??;
            Op::Allocate { path, how, range }
        }
        [word @ ("copy" | "dedupe"), what] => {
            let (from, range, rest) = ranged(what).ok_or("it needs s[a,b)>t@o")??;
            let (to, at) = rest.trim_start_matches('>').rsplit_once('@').ok_or("it needs >t@o")?;
            let (to, at) = (path(to), size(at)?);
            if word == "copy" {
                Op::Copy { from, range, to, at }
            } else {
                Op::Dedupe { from, range, to, at }
            }
        }
        ["sub", p] => Op::Subvolume(path(p)),
        ["sub-", p] => Op::DeleteSubvolume(path(p)),
        ["default", p] => Op::DefaultSubvolume(path(p)),
        [word @ ("snap" | "snap="), what] => {
            let (from, to) = what.split_once('>').ok_or("a snapshot needs s>p")?;
            Op::Snapshot { from: path(from), to: path(to), read_only: word == "snap=" }
        }
        [_] => {
            if let Some(write) = ranged(text) {
                let (path, range, rest) = write?;
                Op::Write { path, range, fill: letter(rest.trim_start_matches('='))? }
            } else if let Some((p, rest)) = text.split_once('+') {
                let (n, fill) = rest.split_once('=').ok_or("append needs f+n=x")?;
                Op::Append { path: path(p), len: size(n)?, fill: letter(fill)? }
            } else {
                return Err(format!("unknown operation: {text:?}"));
            }
        }
        _ => return Err(format!("unknown operation: {text:?}")),
    };
    Ok(Some(op))
}

/// Reads a workload. `✂` (also written `CUT`) ends a segment; `replay` after it, which opens the
/// next one, may be left out. Segments run one after the other, each on a disk that the power cut
/// after the one before has left.
///
/// # Errors
/// The part that is not understood.
pub fn parse(text: &str) -> Result<Vec<Vec<Op>>, String> {
    let mut segments = vec![Vec::new()];
    for part in text.replace('✂', ";CUT;").replace("replay", ";").split(';') {
        if part.trim() == "CUT" {
            segments.push(Vec::new());
        } else if let Some(op) = one(part)? {
            segments.last_mut().expect("never empty").push(op);
        }
    }
    if segments.len() > 1 && segments.last().is_some_and(Vec::is_empty) {
        segments.pop();
    }
    Ok(segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_parses_to_the_same() {
        let text = "mk A; new A/f; A/f[0,12K)=a; A/f+100=b; trunc A/f 3000; ln A/f g; mv g h; mv= \
            h A/f; mv! h i; sym A/f l; fifo p; sock s; dev d; xa h user.k=v; xa- h user.k; mode / \
            711; copy A/f[0,4K)>h@8K; open h x; rm h; F @x; close x; tmp y; F /; FD A/f; COMMIT; \
            rm i; rmdir A; nocow q; alloc q[0,4K); alloc= q[1,2); zero q[5,8K); zero= q[5,9); \
            punch q[0,1M); sub S; snap S>T; snap= />S/U; default T; default /; dedupe \
            q[0,4K)>h@8K; sub- S";
        let ops = parse(text).unwrap();
        assert_eq!(ops.len(), 1);
        assert_eq!(ops[0].len(), 40);
        assert_eq!(parse(&line(&ops[0])).unwrap(), ops);
        assert_eq!(line(&ops[0]), text.split_whitespace().collect::<Vec<_>>().join(" "));
    }

    #[test]
    fn cuts_make_segments_and_nonsense_is_named() {
        let segments = parse("new f; F f; ✂ replay; new g; evict; wb f[0,4K)").unwrap();
        assert_eq!(segments.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        assert!(parse("new f; frobnicate f").unwrap_err().contains("frobnicate"));
        assert!(parse("f[0,4K)=").is_err());
        assert!(parse("trunc f 12Q").is_err());
    }

    #[test]
    fn written_bytes_are_never_zero_and_tell_their_place() {
        let a = filled(b'a', Bytes { from: 0, to: 16384 });
        assert!(!a.contains(&0));
        assert_ne!(a[..4096], a[4096..8192]);
        assert_ne!(a, filled(b'b', Bytes { from: 0, to: 16384 }));
        assert_eq!(a[5000..6000], filled(b'a', Bytes { from: 5000, to: 6000 }));
    }
}
