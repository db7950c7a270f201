//! What the options of a build mean to the readers of sources and to the loader.

use super::Args;
use crate::failure::{Advise, usage};
use crate::size;
use crate::source_date::source_date;
use larder_build::{BoxError, BuildOptions, Compress, ImageSize, InnerSubvolume, Place, TreeInput};
use larder_sources::{
    Attributes, Entry, Kind, Options, Pattern, Rule, SourceSpec, Sources, Time, TreePath,
    parse_owner, parse_time,
};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A directory that becomes a subvolume.
#[derive(Clone, Debug)]
pub(crate) struct SubvolumeArg {
    path: TreePath,
    read_only: bool,
    default: bool,
}

/// `PATH[=ro|rw|default|default-ro]`.
pub(super) fn subvolume(text: &str) -> Result<SubvolumeArg, String> {
    let (path, kind) = text.rsplit_once('=').unwrap_or((text, "rw"));
    let (read_only, default) = match kind {
        "rw" => (false, false),
        "ro" => (true, false),
        "default" => (false, true),
        "default-ro" => (true, true),
        _ => return Err(format!("{kind:?} is not ro, rw, default or default-ro")),
    };
    match TreePath::new(path.as_bytes()) {
        Some(path) if !path.is_root() => Ok(SubvolumeArg { path, read_only, default }),
        _ => Err("not a path below the top".to_owned()),
    }
}

pub(super) fn specs(args: &Args) -> anyhow::Result<Vec<SourceSpec>> {
    let specs: Result<Vec<_>, _> = args.sources.iter().map(|s| SourceSpec::parse(s)).collect();
    specs.could_not_run()
}

/// Memory is shared by the sorters of the sources and those of the loader.
const SOURCES_SHARE: u64 = 4;

pub(super) fn source_options(args: &Args) -> anyhow::Result<Options> {
    let rules = |texts: &[String], rule: fn(&str) -> larder_sources::Result<Rule>| {
        texts.iter().map(|text| rule(text)).collect::<Result<Vec<_>, _>>()
    };
    let mut all = rules(&args.chmod, Rule::chmod).could_not_run()?;
    all.extend(rules(&args.chown, Rule::chown).could_not_run()?);
    all.extend(rules(&args.xattr, Rule::xattr).could_not_run()?);
    let exclude: Result<Vec<_>, _> = args.exclude.iter().map(|p| Pattern::new(p)).collect();
    let latest = source_date()?.map(|t| Time { seconds: t.sec, nanoseconds: t.nsec });
    Ok(Options {
        memory: usize::try_from(args.memory / SOURCES_SHARE).unwrap_or(usize::MAX),
        exclude: exclude.could_not_run()?,
        rules: all,
        owner: args.owner.as_deref().map(parse_owner).transpose().could_not_run()?,
        modified: args.mtime.as_deref().map(parse_time).transpose().could_not_run()?,
        latest,
        image: identity(&args.image),
        ..Options::default()
    })
}

/// Device and inode of a file.
fn identity(file: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(file).ok().filter(std::fs::Metadata::is_file)?;
    Some((meta.dev(), meta.ino()))
}

pub(super) fn build_options(args: &Args) -> anyhow::Result<BuildOptions> {
    let format = args.format.chosen()?;
    let compress = match (args.compress, args.compress_force) {
        (_, Some(packing)) => Some(Compress { packing, force: true }),
        (Some(packing), None) => Some(Compress { packing, force: false }),
        (None, None) => None,
    };
    if args.subvol.iter().filter(|s| s.default).count() > 1 {
        return usage("only one subvolume can be the default");
    }
    Ok(BuildOptions {
        label: format.label,
        uuid: format.uuid,
        metadata: format.metadata,
        data: format.data,
        csum: format.csum,
        nodesize: format.nodesize,
        features: format.features,
        time: source_date()?,
        compress,
        dedupe: args.dedupe,
        size: image_size(args)?,
        memory: args.memory - args.memory / SOURCES_SHARE,
        threads: args.threads,
        ..BuildOptions::default()
    })
}

fn image_size(args: &Args) -> anyhow::Result<ImageSize> {
    match (&args.size, args.free, args.shrink) {
        (_, _, true) => Ok(ImageSize::Shrink { align: args.align }),
        (_, Some(free), _) => Ok(ImageSize::Free(free)),
        (None, None, _) => Ok(ImageSize::Auto),
        (Some(size), None, _) if size == "auto" => Ok(ImageSize::Auto),
        (Some(size), None, _) => match size::parse(size) {
            Ok(bytes) => Ok(ImageSize::Exactly(bytes)),
            Err(why) => usage(format!("--size: {why}")),
        },
    }
}

/// What each subvolume of the image holds.
pub(super) fn trees<'a>(args: &Args, sources: &'a Sources) -> anyhow::Result<Vec<TreeInput<'a>>> {
    if args.layers {
        return layers(sources);
    }
    let inner = args.subvol.iter().map(|s| InnerSubvolume {
        path: s.path.clone(),
        read_only: s.read_only,
        default: s.default,
    });
    Ok(vec![TreeInput {
        place: Place::Top,
        read_only: false,
        default: !args.subvol.iter().any(|s| s.default),
        snapshot_of: None,
        inner: inner.collect(),
        entries: stream(sources.entries()?),
    }])
}

type Stream<'a> = Box<dyn Iterator<Item = Result<Entry, BoxError>> + 'a>;

fn stream<'a>(entries: impl Iterator<Item = larder_sources::Result<Entry>> + 'a) -> Stream<'a> {
    Box::new(entries.map(|entry| entry.map_err(BoxError::from)))
}

/// Names of the subvolumes of layers, and of all of them together.
const LAYER: &str = "layer-";
const WHOLE: &str = "root";

/// A subvolume for each layer, and one that is a writable snapshot of the last. The top holds
/// nothing else.
fn layers<'a>(sources: &'a Sources) -> anyhow::Result<Vec<TreeInput<'a>>> {
    let count = sources.layers().len();
    let directory = Entry {
        path: TreePath::root(),
        attributes: Attributes {
            permissions: 0o755,
            modified: source_date()?
                .map_or_else(Time::default, |t| Time { seconds: t.sec, nanoseconds: t.nsec }),
            ..Attributes::default()
        },
        kind: Kind::Directory,
        links: None,
    };
    let mut trees = vec![TreeInput {
        place: Place::Top,
        read_only: false,
        default: false,
        snapshot_of: None,
        inner: Vec::new(),
        entries: Box::new(std::iter::once(Ok(directory))),
    }];
    let named = |name: String| {
        let path = TreePath::new(name.as_bytes()).expect("a plain name");
        Place::Below { parent: 0, path }
    };
    for layer in 1..=count {
        trees.push(TreeInput {
            place: named(format!("{LAYER}{layer}")),
            read_only: true,
            default: false,
            // The first input is the top.
            snapshot_of: (layer > 1).then_some(layer - 1),
            inner: Vec::new(),
            entries: stream(sources.first_layers(layer)?),
        });
    }
    trees.push(TreeInput {
        place: named(WHOLE.to_owned()),
        read_only: false,
        default: true,
        snapshot_of: (count > 0).then_some(count),
        inner: Vec::new(),
        entries: stream(sources.entries()?),
    });
    Ok(trees)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subvolumes_have_a_path_and_a_kind() {
        let parsed = |text: &str| subvolume(text).map(|s| (s.path, s.read_only, s.default));
        let home = TreePath::new(b"home").unwrap();
        assert_eq!(parsed("/home"), Ok((home.clone(), false, false)));
        assert_eq!(parsed("home=ro"), Ok((home.clone(), true, false)));
        assert_eq!(parsed("home/=default-ro"), Ok((home, true, true)));
        for bad in ["home=yes", "", "/", "../x=ro"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
