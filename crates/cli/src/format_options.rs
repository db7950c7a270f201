//! How a new file system is laid out: the options that `larder mkfs` and `larder build` share.

use crate::failure::{Advise, usage};
use crate::{print, size};
use clap::ValueEnum;
use larder_format::CsumType;
use larder_fs::mkfs::{Features, Profile};

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct FormatOptions {
    /// Name of the file system, up to 255 bytes
    #[arg(long, short = 'L', default_value = "", hide_default_value = true)]
    pub(crate) label: String,
    /// Uuid of the file system (default: a random one)
    #[arg(long, short = 'U')]
    pub(crate) uuid: Option<uuid::Uuid>,
    /// Profile of metadata: single, dup, or with several devices raid0, raid1, raid1c3, raid1c4,
    /// raid10, raid5, raid6 (default: dup, on several devices raid1, with --mixed single)
    #[arg(long, short = 'm', value_name = "PROFILE", value_parser = profile)]
    metadata: Option<Profile>,
    /// Profile of data, as of metadata (default: single)
    #[arg(long, short = 'd', value_name = "PROFILE", value_parser = profile)]
    data: Option<Profile>,
    /// Checksum of metadata and data
    #[arg(long, value_name = "TYPE", default_value = "crc32c")]
    csum: CsumArg,
    /// Bytes of a tree node: 4K to 64K (default 16K, with --mixed 4K)
    #[arg(long, short = 'n', value_name = "N", value_parser = size::parse)]
    nodesize: Option<u64>,
    /// Keep data and metadata together, for small devices: 4K nodes, equal profiles
    #[arg(long, short = 'M')]
    mixed: bool,
    /// Features to turn on, or off with ^: extref, skinny-metadata, no-holes, free-space-tree,
    /// block-group-tree (which goes with either of the two before it)
    #[arg(short = 'O', long = "features", value_name = "LIST")]
    features: Vec<String>,
}

/// What the options say, in the engine's words.
#[derive(Clone, Debug)]
pub(crate) struct Format {
    pub(crate) label: Vec<u8>,
    pub(crate) uuid: Option<[u8; 16]>,
    pub(crate) metadata: Option<Profile>,
    pub(crate) data: Option<Profile>,
    pub(crate) csum: CsumType,
    pub(crate) nodesize: Option<u32>,
    pub(crate) features: Features,
}

impl FormatOptions {
    /// What was chosen. A default that had to give way is said on standard error.
    pub(crate) fn chosen(&self) -> anyhow::Result<Format> {
        let lists = self.features.iter().map(String::as_str);
        let (mut features, notes) = Features::chosen(lists).could_not_run()?;
        features.mixed |= self.mixed;
        for note in notes {
            print::say(&format!("larder: note: {note}"));
        }
        let nodesize = match self.nodesize.map(u32::try_from) {
            None => None,
            Some(Ok(n)) => Some(n),
            Some(Err(_)) => return usage("--nodesize is too large: at most 64K"),
        };
        Ok(Format {
            label: self.label.clone().into_bytes(),
            uuid: self.uuid.map(uuid::Uuid::into_bytes),
            metadata: self.metadata,
            data: self.data,
            csum: self.csum.into(),
            nodesize,
            features,
        })
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CsumArg {
    Crc32c,
    #[value(alias = "xxhash64")]
    Xxhash,
    Sha256,
    #[value(alias = "blake2b")]
    Blake2,
}

/// A profile by its name, in whatever case.
pub(crate) fn profile(text: &str) -> Result<Profile, String> {
    let name = text.to_ascii_lowercase();
    let found = Profile::ALL.into_iter().find(|profile| profile.name() == name);
    found.ok_or_else(|| format!("none of {}", Profile::ALL.map(Profile::name).join(", ")))
}

impl From<CsumArg> for CsumType {
    fn from(c: CsumArg) -> Self {
        match c {
            CsumArg::Crc32c => Self::Crc32c,
            CsumArg::Xxhash => Self::XxHash64,
            CsumArg::Sha256 => Self::Sha256,
            CsumArg::Blake2 => Self::Blake2b,
        }
    }
}

/// Two numbers with a colon between them. `u32::MAX` stands for nobody in the system's own calls.
pub(crate) fn owner(text: &str) -> Result<(u32, u32), String> {
    let number = |s: &str| s.parse().ok().filter(|n| *n != u32::MAX);
    let both = text.split_once(':').and_then(|(uid, gid)| Some((number(uid)?, number(gid)?)));
    both.ok_or_else(|| "not two numbers like 1000:1000".to_owned())
}
