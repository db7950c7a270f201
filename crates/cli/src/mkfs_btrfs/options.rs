//! The command line of mkfs.btrfs, as btrfs-progs 6.14 has it, with two later options.
//!
//! Values are parsed here, and the same words are refused as there. What mkfs.btrfs knows and
//! Larder does not is refused by name.

use super::Refused;
use crate::format_options;
use clap::Parser;
use larder_format::CsumType;
use larder_fs::Packing;
use larder_fs::mkfs::{Features, Profile};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Arguments as they were given. Later ones override earlier ones, and long names may be cut short.
#[derive(Debug, Parser)]
#[command(
    name = "mkfs.btrfs",
    disable_help_flag = true,
    disable_version_flag = true,
    args_override_self = true,
    infer_long_args = true
)]
pub(super) struct Arguments {
    #[arg(short = 'd', long)]
    data: Option<String>,
    #[arg(short = 'm', long)]
    metadata: Option<String>,
    #[arg(short = 'M', long)]
    mixed: bool,
    #[arg(long, alias = "checksum")]
    csum: Option<String>,
    #[arg(short = 'n', long)]
    nodesize: Option<String>,
    #[arg(short = 's', long)]
    sectorsize: Option<String>,
    #[arg(short = 'O', long)]
    features: Vec<String>,
    #[arg(short = 'R', long)]
    runtime_features: Vec<String>,
    #[arg(short = 'L', long)]
    label: Option<OsString>,
    #[arg(short = 'U', long)]
    uuid: Option<String>,
    #[arg(long)]
    device_uuid: Option<String>,
    #[arg(short = 'b', long)]
    byte_count: Option<String>,
    #[arg(short = 'r', long)]
    rootdir: Option<PathBuf>,
    #[arg(long)]
    compress: Option<String>,
    #[arg(short = 'u', long)]
    subvol: Vec<OsString>,
    #[arg(long)]
    inode_flags: Vec<OsString>,
    #[arg(long)]
    reflink: bool,
    #[arg(long)]
    shrink: bool,
    #[arg(short = 'K', long)]
    nodiscard: bool,
    #[arg(short = 'f', long)]
    force: bool,
    #[arg(short = 'q', long)]
    quiet: bool,
    #[arg(short = 'v', long, action = clap::ArgAction::Count)]
    verbose: u8,
    #[arg(short = 'V', long)]
    pub(super) version: bool,
    #[arg(long)]
    pub(super) help: bool,
    devices: Vec<PathBuf>,
}

/// What is to be made.
#[derive(Debug)]
pub(super) struct Options {
    /// One at least.
    pub(super) devices: Vec<PathBuf>,
    pub(super) label: Vec<u8>,
    pub(super) uuid: Option<[u8; 16]>,
    pub(super) device_uuid: Option<[u8; 16]>,
    pub(super) bytes: Option<u64>,
    pub(super) data: Option<Profile>,
    pub(super) metadata: Option<Profile>,
    pub(super) csum: CsumType,
    pub(super) nodesize: Option<u32>,
    pub(super) features: Features,
    pub(super) discard: bool,
    pub(super) force: bool,
    pub(super) quiet: bool,
    pub(super) content: Option<Content>,
}

/// What the file system is to hold.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) from: PathBuf,
    pub(super) compress: Option<Packing>,
    /// The same, as it was given.
    pub(super) compress_word: String,
    pub(super) subvolumes: Vec<Subvolume>,
    pub(super) flags: Vec<InodeFlags>,
    pub(super) shrink: bool,
    /// The extents of the directory's files were to be shared.
    pub(super) reflink: bool,
}

/// A directory that becomes a subvolume.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Subvolume {
    /// As it was given.
    pub(super) path: PathBuf,
    pub(super) read_only: bool,
    pub(super) default: bool,
}

impl Subvolume {
    /// Do both mean one directory, however the path is written?
    fn names_the_same(&self, other: &Self) -> bool {
        let parts = |path: &Path| -> Vec<_> {
            let all = path.components();
            all.filter(|part| !matches!(part, Component::CurDir | Component::RootDir))
                .map(|part| part.as_os_str().to_owned())
                .collect()
        };
        parts(&self.path) == parts(&other.path)
    }
}

/// Flags for the inode at a path, and for what is made below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InodeFlags {
    pub(super) path: PathBuf,
    pub(super) no_data_cow: bool,
    pub(super) no_data_sum: bool,
}

/// What the arguments ask for.
#[derive(Debug)]
pub(super) enum Wish {
    Make(Box<Options>),
    ListFeatures,
}

impl Arguments {
    pub(super) fn wish(self) -> Result<Wish, Refused> {
        let lists =
            || self.features.iter().chain(&self.runtime_features).flat_map(|l| l.split(','));
        if lists().any(|word| word.trim() == "list-all") {
            return Ok(Wish::ListFeatures);
        }
        if self.devices.is_empty() {
            return Err(Refused::Usage("no device or image file was named".into()));
        }
        if self.devices.len() > 1 && self.rootdir.is_some() {
            return Err(Refused::because("the option -r is limited to a single device".into()));
        }
        let mut features = Features { block_group_tree: false, ..Features::default() };
        for list in self.features.iter().chain(&self.runtime_features) {
            features.apply(list).map_err(|e| Refused::because(e.to_string()))?;
        }
        features.mixed |= self.mixed;
        features.check().map_err(|e| Refused::because(e.to_string()))?;
        if let Some(text) = &self.sectorsize
            && size(text)? != 4096
        {
            return Err(Refused::because(format!("sector size {text} is not supported by Larder")));
        }
        let content = self.content()?;
        Ok(Wish::Make(Box::new(Options {
            devices: self.devices,
            label: label(self.label)?,
            uuid: self.uuid.as_deref().map_or(Ok(None), uuid)?,
            device_uuid: self.device_uuid.as_deref().map_or(Ok(None), uuid)?,
            bytes: self.byte_count.as_deref().map_or(Ok(None), some_size)?,
            data: self.data.as_deref().map(profile).transpose()?,
            metadata: self.metadata.as_deref().map(profile).transpose()?,
            csum: self.csum.as_deref().map_or(Ok(CsumType::Crc32c), csum)?,
            nodesize: self.nodesize.as_deref().map_or(Ok(None), nodesize)?,
            features,
            discard: !self.nodiscard,
            force: self.force,
            quiet: self.quiet && self.verbose == 0,
            content,
        })))
    }

    fn content(&self) -> Result<Option<Content>, Refused> {
        let Some(from) = self.rootdir.clone() else { return self.nothing_needs_rootdir() };
        let compress = self.compress.as_deref().map_or(Ok(None), compress)?;
        if self.reflink && compress.is_some() {
            return Err(Refused::because("--reflink and --compress exclude each other".into()));
        }
        let mut subvolumes: Vec<Subvolume> = Vec::new();
        for text in &self.subvol {
            let new = subvolume(text);
            if subvolumes.iter().any(|s| s.names_the_same(&new)) {
                let shown = new.path.display();
                return Err(Refused::because(format!(
                    "subvolume specified more than once: {shown}"
                )));
            }
            if new.default && subvolumes.iter().any(|s| s.default) {
                return Err(Refused::because("only one subvolume can be the default".into()));
            }
            subvolumes.push(new);
        }
        let flags = self.inode_flags.iter().map(inode_flags).collect::<Result<_, _>>()?;
        let (shrink, reflink) = (self.shrink, self.reflink);
        let compress_word = self.compress.clone().unwrap_or_else(|| "no".to_owned());
        Ok(Some(Content { from, compress, compress_word, subvolumes, flags, shrink, reflink }))
    }

    fn nothing_needs_rootdir(&self) -> Result<Option<Content>, Refused> {
        let given = [
            ("--shrink", self.shrink),
            ("--subvol", !self.subvol.is_empty()),
            ("--compress", self.compress.as_ref().is_some_and(|word| word != "no")),
            ("--inode-flags", !self.inode_flags.is_empty()),
            ("--reflink", self.reflink),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                Err(Refused::because(format!("option {name} must be used with --rootdir")))
            }
            None => Ok(None),
        }
    }
}

/// A number with one of the letters k, m, g, t, p, e, and no more.
fn size(text: &str) -> Result<u64, Refused> {
    let bad = || {
        let what = "is not a valid numeric value with supported size suffixes";
        Refused::because(format!("{text} {what}"))
    };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        "e" => 60,
        _ => return Err(bad()),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// A size, where 0 means that none was chosen.
fn some_size(text: &str) -> Result<Option<u64>, Refused> {
    Ok(Some(size(text)?).filter(|bytes| *bytes > 0))
}

fn label(text: Option<OsString>) -> Result<Vec<u8>, Refused> {
    let label = text.map(std::os::unix::ffi::OsStringExt::into_vec).unwrap_or_default();
    if label.len() > 255 {
        let shown = crate::print::name(&label);
        return Err(Refused::because(format!("label {shown} is too long (max 255)")));
    }
    if label.contains(&b'\n') {
        return Err(Refused::because("a label must not contain a newline".into()));
    }
    Ok(label)
}

/// A uuid in its one form with hyphens. An empty word chooses none.
fn uuid(text: &str) -> Result<Option<[u8; 16]>, Refused> {
    if text.is_empty() {
        return Ok(None);
    }
    let parsed = uuid::Uuid::try_parse(text).ok().filter(|_| text.len() == 36);
    let parsed = parsed.map(|uuid| Some(uuid.into_bytes()));
    parsed.ok_or_else(|| Refused::because(format!("could not parse UUID: {text}")))
}

fn profile(text: &str) -> Result<Profile, Refused> {
    let found = format_options::profile(text);
    found.map_err(|_| Refused::because(format!("unknown profile {text}")))
}

fn csum(text: &str) -> Result<CsumType, Refused> {
    match text.to_ascii_lowercase().as_str() {
        "crc32c" => Ok(CsumType::Crc32c),
        "xxhash" | "xxhash64" => Ok(CsumType::XxHash64),
        "sha256" => Ok(CsumType::Sha256),
        "blake2" | "blake2b" => Ok(CsumType::Blake2b),
        _ => Err(Refused::because(format!("unknown csum type {text}"))),
    }
}

fn nodesize(text: &str) -> Result<Option<u32>, Refused> {
    let bytes = some_size(text)?;
    let bytes = bytes.map(|bytes| {
        u32::try_from(bytes).map_err(|_| Refused::because(format!("illegal nodesize {bytes}")))
    });
    bytes.transpose()
}

/// `no`, or a method and a level. Here zstd's levels end at 15, and a level that is empty or 0 is
/// the default, as in mkfs.btrfs; Larder's own options take others, too.
fn compress(text: &str) -> Result<Option<Packing>, Refused> {
    if text == "no" {
        return Ok(None);
    }
    let bad = || Refused::because(format!("unrecognized compression type or level: {text}"));
    let (method, level) = text.split_once(':').unwrap_or((text, ""));
    let most = match method {
        "zstd" => 15,
        "zlib" => 9,
        "lzo" => 1,
        _ => return Err(bad()),
    };
    let level: u32 = if level.is_empty() { 0 } else { level.parse().map_err(|_| bad())? };
    if level > most {
        return Err(bad());
    }
    let chosen =
        if level == 0 || method == "lzo" { method.to_owned() } else { format!("{method}:{level}") };
    chosen.parse().map(Some).map_err(|_| bad())
}

/// `[TYPE:]PATH`. If the word before the colon is no type, the colon belongs to the path.
fn subvolume(text: &OsString) -> Subvolume {
    let (kind, path) = before_colon(text);
    let (read_only, default) = match kind {
        Some(b"rw") => (false, false),
        Some(b"ro") => (true, false),
        Some(b"default") => (false, true),
        Some(b"default-ro") => (true, true),
        _ => return Subvolume { path: text.into(), read_only: false, default: false },
    };
    Subvolume { path, read_only, default }
}

/// `FLAG[,FLAG]:PATH`.
fn inode_flags(text: &OsString) -> Result<InodeFlags, Refused> {
    let (Some(words), path) = before_colon(text) else {
        let shown = text.display();
        return Err(Refused::because(format!("--inode-flags {shown}: no flags before a colon")));
    };
    let mut flags = InodeFlags { path, no_data_cow: false, no_data_sum: false };
    for word in words.split(|b| *b == b',') {
        match word {
            b"nodatacow" => flags.no_data_cow = true,
            b"nodatasum" => flags.no_data_sum = true,
            other => {
                let shown = crate::print::name(other);
                return Err(Refused::because(format!("unknown inode flag: {shown}")));
            }
        }
    }
    Ok(flags)
}

fn before_colon(text: &OsString) -> (Option<&[u8]>, PathBuf) {
    use std::os::unix::ffi::OsStrExt;
    let bytes = text.as_bytes();
    match bytes.iter().position(|b| *b == b':') {
        Some(at) => {
            let path = std::ffi::OsStr::from_bytes(&bytes[at + 1..]);
            (Some(&bytes[..at]), PathBuf::from(path))
        }
        None => (None, PathBuf::from(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(line: &str) -> Result<Wish, Refused> {
        let words = std::iter::once("mkfs.btrfs").chain(line.split_whitespace());
        match Arguments::try_parse_from(words) {
            Ok(arguments) => arguments.wish(),
            Err(e) => Err(Refused::Usage(e.to_string())),
        }
    }

    fn made(line: &str) -> Options {
        match wish(line) {
            Ok(Wish::Make(options)) => *options,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn why(line: &str) -> String {
        match wish(line) {
            Err(Refused::Because(lines)) => lines.join(" "),
            Err(Refused::Usage(why)) => why,
            Ok(_) => panic!("{line} was taken"),
        }
    }

    /// What the manual page of mkfs.btrfs 6.14 says of each option.
    #[test]
    fn each_option_of_the_manual_is_understood() {
        assert_eq!(made("-b 150m x").bytes, Some(150 << 20));
        assert_eq!(made("--byte-count 1g x").bytes, Some(1 << 30));
        for (word, csum) in [
            ("crc32c", CsumType::Crc32c),
            ("XXHASH", CsumType::XxHash64),
            ("sha256", CsumType::Sha256),
            ("blake2", CsumType::Blake2b),
        ] {
            assert_eq!(made(&format!("--csum {word} x")).csum, csum);
            assert_eq!(made(&format!("--checksum={word} x")).csum, csum);
        }
        assert_eq!(made("-d SINGLE -m dup x").metadata, Some(Profile::Dup));
        assert_eq!(made("--data dup --metadata single x").data, Some(Profile::Dup));
        assert!(made("-M x").features.mixed && made("--mixed x").features.mixed);
        assert_eq!(made("-n 32k x").nodesize, Some(32768));
        assert_eq!(made("--nodesize 4096 x").nodesize, Some(4096));
        made("-s 4k x");
        made("--sectorsize 4096 x");
        assert_eq!(made("-L data x").label, b"data");
        assert!(!made("-K x").discard && !made("--nodiscard x").discard && made("x").discard);
        assert!(made("-f x").force && made("--force x").force);
        assert!(made("-q x").quiet && made("--quiet x").quiet && !made("-q -v x").quiet);
        let id = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
        assert!(made(&format!("-U {id} --device-uuid {id} x")).device_uuid.is_some());
        assert!(made("-r d x").content.is_some());
        let content = made("--rootdir d --compress zstd:15 --shrink -u ro:a -u default:b x");
        let content = content.content.unwrap();
        assert_eq!(content.compress.unwrap().to_string(), "zstd:15");
        assert!(content.shrink && content.subvolumes[0].read_only);
        assert!(content.subvolumes[1].default && !content.subvolumes[1].read_only);
        let flags = made("-r d --inode-flags nodatacow,nodatasum:a:b x").content.unwrap().flags;
        assert_eq!(flags[0].path, PathBuf::from("a:b"));
        assert!(flags[0].no_data_cow && flags[0].no_data_sum);
        assert!(made("-r d --reflink x").content.unwrap().reflink);
        assert!(matches!(wish("-O list-all"), Ok(Wish::ListFeatures)));
    }

    #[test]
    fn defaults_are_those_of_6_14() {
        let options = made("x");
        let on = ["extref", "skinny-metadata", "no-holes", "free-space-tree"];
        assert_eq!(options.features.names(), on);
        assert_eq!(made("-O bgt x").features.names().len(), 5);
        assert_eq!(made("-O ^no-holes -R ^free-space-tree x").features.names().len(), 2);
        assert_eq!((options.csum, options.nodesize), (CsumType::Crc32c, None));
        let chosen = made("-b 0 -n 0 --uuid= x");
        assert_eq!((chosen.bytes, chosen.nodesize, chosen.uuid), (None, None, None));
        for level in ["zstd", "zstd:", "zstd:0"] {
            let content = made(&format!("-r d --compress {level} x")).content.unwrap();
            assert_eq!(content.compress, "zstd".parse().ok());
        }
    }

    #[test]
    fn arguments_are_taken_as_getopt_takes_them() {
        assert_eq!(made("x -fqL foo").label, b"foo");
        assert_eq!(made("-Lfoo x").label, b"foo");
        assert_eq!(made("--lab a --label=b x").label, b"b");
        assert_eq!(made("-- -x").devices, [PathBuf::from("-x")]);
        assert!(made("-f -f x").force);
    }

    #[test]
    fn what_there_is_not_is_refused_by_name() {
        for (line, says) in [
            ("", "no device"),
            ("--bogus x", "--bogus"),
            ("-r d a b", "limited to a single device"),
            ("-d nonsense x", "nonsense"),
            ("-O zoned x", "zoned"),
            ("-O quota x", "quota"),
            ("-O foo x", "foo"),
            ("-O bgt,^fst x", "free-space-tree"),
            ("-s 8192 x", "8192"),
            ("-n 1x x", "1x"),
            ("-b 150MiB x", "150MiB"),
            ("-U xx x", "could not parse UUID"),
            ("--csum md5 x", "md5"),
            ("--shrink x", "--shrink must be used with --rootdir"),
            ("--subvol a x", "--subvol must be used with --rootdir"),
            ("--compress zstd x", "--compress must be used with --rootdir"),
            ("-r d --compress lz4 x", "lz4"),
            ("-r d --compress zstd:99 x", "zstd:99"),
            ("-r d --compress lzo:2 x", "lzo:2"),
            ("-r d --compress zstd:-1 x", "zstd:-1"),
            ("-r d -u a -u ./a/ x", "more than once"),
            ("-U 6ba7b8109dad11d180b400c04fd430c8 x", "could not parse UUID"),
            ("-r d --compress zstd --reflink x", "exclude each other"),
            ("-r d -u default:a -u default-ro:b x", "only one"),
            ("-r d --inode-flags a x", "before a colon"),
            ("-r d --inode-flags immutable:a x", "immutable"),
        ] {
            assert!(why(line).contains(says), "{line}: {}", why(line));
        }
        let long = format!("-L {} x", "l".repeat(256));
        assert!(why(&long).contains("too long (max 255)"));
    }

    #[test]
    fn a_word_that_is_no_type_is_a_part_of_the_path() {
        let path = |text: &str| subvolume(&text.into()).path;
        assert_eq!(path("ro:a:b"), PathBuf::from("a:b"));
        assert_eq!(path("./ro:a"), PathBuf::from("./ro:a"));
        assert_eq!(path("a"), PathBuf::from("a"));
    }
}
