//! Options: what is left out, and what is changed by pattern.
//!
//! A [`Pattern`] is a glob, as in a shell. If it has a slash before its last character, it is
//! compared with the whole path from the root of the image; a leading slash changes nothing.
//! Otherwise it is compared with the name alone, at any depth. `*` and `?` stop at a slash, `**`
//! does not. A slash at its end limits it to directories. Nothing else has a meaning: `!` and `\`
//! at the beginning are not those of gitignore.
//!
//! Patterns and rules work on the tree that the sources make together, so paths are those in the
//! image.

use crate::change::Change;
use crate::{Error, Kind, Result, Stop, Time, TreePath};
use globset::{GlobBuilder, GlobMatcher};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What is done with sources, and with how much memory and space.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for sorting, in bytes.
    pub memory: usize,
    /// Where temporary files are made: records that memory does not hold, and unpacked archives.
    pub temporary: PathBuf,
    /// What is left out.
    pub exclude: Vec<Pattern>,
    /// Changes by pattern, the later ones over the earlier.
    pub rules: Vec<Rule>,
    /// User and group of everything but what a manifest describes.
    pub owner: Option<(u32, u32)>,
    /// The time of everything but what a manifest describes.
    pub modified: Option<Time>,
    /// No time is later than this (`SOURCE_DATE_EPOCH`).
    pub latest: Option<Time>,
    /// Device and inode of the image: a directory that is a source may hold it, and it is no part
    /// of what it holds.
    pub image: Option<(u64, u64)>,
    /// Ends the streaming of entries early, and the reading of an image.
    pub stop: Stop,
    /// The most bytes that one archive may have when it is unpacked.
    pub most_unpacked: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory: 64 << 20,
            temporary: std::env::temp_dir(),
            exclude: Vec::new(),
            rules: Vec::new(),
            owner: None,
            modified: None,
            latest: None,
            image: None,
            stop: Stop::default(),
            most_unpacked: 1 << 40,
        }
    }
}

/// Which paths are meant.
#[derive(Clone, Debug)]
pub struct Pattern {
    glob: GlobMatcher,
    whole_path: bool,
    directories_only: bool,
}

impl Pattern {
    /// The longest pattern, in bytes: as long as the longest path.
    pub const LONGEST: usize = 4096;

    /// Reads a pattern.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is none.
    pub fn new(text: &str) -> Result<Self> {
        let wrong = |what: String| Error::argument(text.as_bytes(), what);
        let directories_only = text.len() > 1 && text.ends_with('/');
        let trimmed = text.trim_end_matches('/');
        let whole_path = trimmed.contains('/');
        let trimmed = trimmed.trim_start_matches('/');
        if trimmed.is_empty() {
            return Err(wrong("the pattern means the root, which cannot be meant".to_owned()));
        }
        // The library would panic where the pattern becomes too large a machine.
        if trimmed.len() > Self::LONGEST {
            let most = Self::LONGEST;
            let what = format!("a pattern of {} bytes; at most {most}", trimmed.len());
            return Err(Error::argument(&text.as_bytes()[..100], what));
        }
        let glob = GlobBuilder::new(trimmed)
            .literal_separator(true)
            .backslash_escape(true)
            .build()
            .map_err(|e| wrong(format!("not a pattern: {}", e.kind())))?
            .compile_matcher();
        Ok(Self { glob, whole_path, directories_only })
    }

    /// Is this path meant?
    #[must_use]
    pub fn matches(&self, path: &TreePath, kind: &Kind) -> bool {
        if self.directories_only && *kind != Kind::Directory {
            return false;
        }
        let Some((_, name)) = path.split() else { return false };
        let compared = if self.whole_path { path.as_bytes() } else { name };
        self.glob.is_match(Path::new(OsStr::from_bytes(compared)))
    }
}

/// Changes of all paths that a pattern means.
#[derive(Clone, Debug)]
pub struct Rule {
    pattern: Pattern,
    pub(crate) changes: Vec<Change>,
}

impl Rule {
    /// `PATTERN=MODE`: an octal number, or what chmod takes (`u+x,go-w`, `a=rX`).
    ///
    /// # Errors
    /// [`Error::Argument`] if it is nothing of that form.
    pub fn chmod(text: &str) -> Result<Self> {
        let (pattern, mode) = divided(text)?;
        Ok(Self { pattern, changes: parse_mode(mode).map_err(|what| wrong(text, what))? })
    }

    /// `PATTERN=USER[:GROUP]` or `PATTERN=:GROUP`, as numbers.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is nothing of that form.
    pub fn chown(text: &str) -> Result<Self> {
        let (pattern, owner) = divided(text)?;
        let (user, group) = owner.split_once(':').unwrap_or((owner, ""));
        let mut changes = Vec::new();
        if !user.is_empty() {
            changes.push(Change::Uid(id(text, user)?));
        }
        if !group.is_empty() {
            changes.push(Change::Gid(id(text, group)?));
        }
        if changes.is_empty() {
            return Err(wrong(text, "neither a user nor a group"));
        }
        Ok(Self { pattern, changes })
    }

    /// `PATTERN=NAME=VALUE` sets an extended attribute, `PATTERN=NAME` removes it. A value is text;
    /// `0x` and hexadecimal digits give bytes, as with setfattr.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is nothing of that form.
    pub fn xattr(text: &str) -> Result<Self> {
        let (pattern, rest) = divided(text)?;
        let (name, value) = match rest.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (rest, None),
        };
        check_xattr_name(name.as_bytes()).map_err(|what| wrong(text, what))?;
        let name = name.as_bytes().to_vec();
        let change = match value {
            None => Change::NoXattr(name),
            Some(value) => Change::Xattr(name, xattr_value(value).map_err(|w| wrong(text, w))?),
        };
        Ok(Self { pattern, changes: vec![change] })
    }

    /// Is this path meant?
    pub(crate) fn applies(&self, path: &TreePath, kind: &Kind) -> bool {
        self.pattern.matches(path, kind)
    }
}

/// `USER:GROUP` of `--owner`, as numbers. Without a group, the group has the user's number.
///
/// # Errors
/// [`Error::Argument`] if it is nothing of that form.
pub fn parse_owner(text: &str) -> Result<(u32, u32)> {
    let (user, group) = text.split_once(':').unwrap_or((text, text));
    Ok((id(text, user)?, id(text, group)?))
}

/// Seconds since 1970, with a fraction if there is one: `1700000000`, `1700000000.25`.
///
/// # Errors
/// [`Error::Argument`] if it is nothing of that form.
pub fn parse_time(text: &str) -> Result<Time> {
    decimal_time(text.strip_prefix('@').unwrap_or(text).as_bytes())
        .ok_or_else(|| wrong(text, "not a number of seconds since 1970"))
}

/// A decimal number of seconds. The fraction beyond nanoseconds is dropped.
pub(crate) fn decimal_time(text: &[u8]) -> Option<Time> {
    let text = str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if fraction.is_empty() || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let seconds: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().ok()?;
    // The fraction of a negative number leads further into the past.
    if whole.starts_with('-') && nanoseconds > 0 {
        let nanoseconds = 1_000_000_000 - nanoseconds;
        return Some(Time { seconds: seconds.checked_sub(1)?, nanoseconds });
    }
    Some(Time { seconds, nanoseconds })
}

/// A mode in octal, or symbolic as chmod takes it.
pub(crate) fn parse_mode(text: &str) -> Result<Vec<Change>, &'static str> {
    if let Ok(mode) = u32::from_str_radix(text, 8) {
        let what = "a mode has at most four octal digits";
        return if mode <= 0o7777 {
            Ok(vec![Change::Permissions { clear: 0o7777, set: mode }])
        } else {
            Err(what)
        };
    }
    let clauses: Result<Vec<_>, _> = text.split(',').map(mode_clause).collect();
    Ok(clauses?.concat())
}

/// `[ugoa]*[+-=][rwxXst]*`, the operator and permissions as often as one likes. Without any of
/// `ugoa` all are meant, whatever the umask.
fn mode_clause(text: &str) -> Result<Vec<Change>, &'static str> {
    const FORM: &str = "not a mode: 0644 or u+x,go=rX is one";
    let at = text.find(['+', '-', '=']).ok_or(FORM)?;
    let (classes, mut rest) = text.split_at(at);
    let mut mask = 0;
    for class in classes.chars() {
        mask |= match class {
            'u' => 0o4700,
            'g' => 0o2070,
            'o' => 0o1007,
            'a' => 0o7777,
            _ => return Err(FORM),
        };
    }
    if classes.is_empty() {
        mask = 0o7777;
    }
    let mut changes = Vec::new();
    while let Some(operator) = rest.chars().next() {
        let end = rest[1..].find(['+', '-', '=']).map_or(rest.len(), |at| at + 1);
        let (bits, execute) = permissions(&rest[1..end], mask, FORM)?;
        match operator {
            '+' => changes.push(Change::Permissions { clear: 0, set: bits }),
            '-' => changes.push(Change::Permissions { clear: bits | execute, set: 0 }),
            _ => {
                // As chmod: set-id bits of others stay.
                changes.push(Change::Permissions { clear: mask & !bits & !execute, set: bits });
            }
        }
        if execute != 0 && operator != '-' {
            changes.push(Change::ExecuteIfAny(execute));
        }
        rest = &rest[end..];
    }
    Ok(changes)
}

/// The bits of `rwxst`, and those of `X`.
fn permissions(letters: &str, mask: u32, form: &'static str) -> Result<(u32, u32), &'static str> {
    let (mut bits, mut execute) = (0, 0);
    for letter in letters.chars() {
        match letter {
            'r' => bits |= 0o444,
            'w' => bits |= 0o222,
            'x' => bits |= 0o111,
            'X' => execute |= 0o111,
            's' => bits |= 0o6000,
            't' => bits |= 0o1000,
            _ => return Err(form),
        }
    }
    Ok((bits & mask, execute & mask))
}

/// The name of an extended attribute, as Linux takes it.
pub(crate) fn check_xattr_name(name: &[u8]) -> Result<(), &'static str> {
    let known = [&b"user."[..], b"trusted.", b"security.", b"system.", b"btrfs."];
    if !known.iter().any(|prefix| name.len() > prefix.len() && name.starts_with(prefix)) {
        return Err(
            "an attribute's name begins with user., trusted., security., system. or btrfs.",
        );
    }
    if name.len() > 255 { Err("an attribute's name has at most 255 bytes") } else { Ok(()) }
}

fn xattr_value(text: &str) -> Result<Vec<u8>, &'static str> {
    let Some(digits) = text.strip_prefix("0x") else { return Ok(text.as_bytes().to_vec()) };
    if digits.len() % 2 != 0 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err("0x is not followed by pairs of hexadecimal digits");
    }
    let pairs = digits.as_bytes().chunks(2);
    Ok(pairs.map(|p| (nibble(p[0]) << 4) | nibble(p[1])).collect())
}

/// The value of a hexadecimal digit.
fn nibble(digit: u8) -> u8 {
    char::from(digit).to_digit(16).map_or(0, |n| n as u8)
}

/// The pattern before the first `=` that is not written `\=`.
fn divided(text: &str) -> Result<(Pattern, &str)> {
    let mut from = 0;
    while let Some(at) = text[from..].find('=').map(|at| from + at) {
        if !text[..at].ends_with('\\') {
            return Ok((Pattern::new(&text[..at])?, &text[at + 1..]));
        }
        from = at + 1;
    }
    Err(wrong(text, "there is no `=` behind the pattern"))
}

fn id(text: &str, number: &str) -> Result<u32> {
    // The highest number means "none" to Linux.
    let id = number.parse().ok().filter(|&id| id != u32::MAX);
    id.ok_or_else(|| wrong(text, "a user or a group is a number"))
}

fn wrong(text: &str, what: impl Into<String>) -> Error {
    Error::argument(text.as_bytes(), what)
}

/// Leaves out what patterns mean, with all that is below.
#[derive(Debug)]
pub(crate) struct Exclusion {
    patterns: Vec<Pattern>,
    below: Option<TreePath>,
}

impl Exclusion {
    pub(crate) fn new(patterns: &[Pattern]) -> Self {
        Self { patterns: patterns.to_vec(), below: None }
    }

    /// Paths come in order.
    pub(crate) fn leaves_out(&mut self, path: &TreePath, kind: &Kind) -> bool {
        if let Some(below) = &self.below {
            let rest = path.as_bytes().strip_prefix(below.as_bytes());
            if rest.is_some_and(|rest| rest.starts_with(b"/")) {
                return true;
            }
            self.below = None;
        }
        let out = self.patterns.iter().any(|pattern| pattern.matches(path, kind));
        if out {
            self.below = Some(path.clone());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Attributes;

    fn matches(pattern: &str, path: &str) -> bool {
        let kind = if path.ends_with('/') { Kind::Directory } else { Kind::Fifo };
        Pattern::new(pattern).unwrap().matches(&TreePath::new(path.as_bytes()).unwrap(), &kind)
    }

    #[test]
    fn patterns_mean_names_or_paths() {
        for (pattern, path, expected) in [
            ("*.o", "a/b/c.o", true),
            ("*.o", "a.o/b", false),
            ("/a/*", "a/b", true),
            ("a/*", "a/b/c", false),
            ("a/**", "a/b/c", true),
            ("/a", "a", true),
            ("a", "b/a", true),
            ("b/a", "c/b/a", false),
            ("**/b/a", "c/b/a", true),
            ("cache/", "var/cache/", true),
            ("cache/", "var/cache", false),
            ("[a-c]?", "b1", true),
            ("a\\*", "a*", true),
            ("a\\*", "ab", false),
            ("{a,b}", "b", true),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
        for wrong in ["", "/", "[a"] {
            assert!(Pattern::new(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_pattern_that_is_too_large_is_refused() {
        for part in ["[!a]", "?", "{a,b}", "{?,[b-y]*}", "*", "**/", "a"] {
            let text = part.repeat((128 << 10) / part.len() - 1) + "x";
            let error = Pattern::new(&text).expect_err(part).to_string();
            assert!(error.len() < 1000 && error.contains("at most 4096"), "{error}");
            let most = &text[text.len() % part.len()..][..4096 / part.len() * part.len()];
            // It may be a pattern or not, and is no harm.
            let _ = Pattern::new(most);
        }
    }

    #[test]
    fn a_leading_slash_ties_a_name_to_the_root() {
        assert!(!matches("/a", "b/a"));
    }

    #[test]
    fn modes_are_those_of_chmod() {
        for (text, before, is_directory, after) in [
            ("0640", 0o4755, false, 0o640),
            ("u+x", 0o644, false, 0o744),
            ("go-w", 0o666, false, 0o644),
            ("a=rX", 0o750, false, 0o555),
            ("a=rX", 0o640, false, 0o444),
            ("a=rX", 0o640, true, 0o555),
            ("u=rwx,g=rx,o=", 0o777, false, 0o750),
            ("u+s,+t", 0o755, false, 0o5755),
            ("g+s", 0o755, true, 0o2755),
            ("u-rwx+r", 0o755, false, 0o455),
            ("o-X", 0o755, false, 0o754),
        ] {
            let kind = if is_directory { Kind::Directory } else { Kind::Fifo };
            let mut attributes = Attributes { permissions: before, ..Attributes::default() };
            for change in parse_mode(text).unwrap() {
                change.apply(&mut attributes, &kind);
            }
            assert_eq!(attributes.permissions, after, "{text} on {before:o}");
        }
        for wrong in ["", "8", "17777", "u", "z+x", "u+q"] {
            assert!(parse_mode(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rules_are_read() {
        let changes = |rule: Result<Rule>| rule.unwrap().changes;
        assert_eq!(changes(Rule::chown("a=1:2")), [Change::Uid(1), Change::Gid(2)]);
        assert_eq!(changes(Rule::chown("a=:2")), [Change::Gid(2)]);
        assert_eq!(
            changes(Rule::xattr("a\\=b=user.x=0x00ff")),
            [Change::Xattr(b"user.x".to_vec(), vec![0, 255])]
        );
        assert_eq!(changes(Rule::xattr("a=user.x")), [Change::NoXattr(b"user.x".to_vec())]);
        for wrong in ["a", "a=", "a=:", "a=root", "a=4294967295"] {
            assert!(Rule::chown(wrong).is_err(), "{wrong}");
        }
        for wrong in ["a=x=y", "a=user.=y", "a=user.x=0x0"] {
            assert!(Rule::xattr(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_owner("5").unwrap(), (5, 5));
        assert_eq!(parse_owner("5:6").unwrap(), (5, 6));
    }

    #[test]
    fn times_are_exact() {
        for (text, seconds, nanoseconds) in [
            ("0", 0, 0),
            ("@12.5", 12, 500_000_000),
            ("1.0000000019", 1, 1),
            ("-1.25", -2, 750_000_000),
            ("-0.25", -1, 750_000_000),
        ] {
            assert_eq!(parse_time(text).unwrap(), Time { seconds, nanoseconds }, "{text}");
        }
        for wrong in ["", ".", "1.", "1.x", "yesterday", "99999999999999999999"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
