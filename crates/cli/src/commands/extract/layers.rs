//! Container images with a layer for each of several subvolumes.
//!
//! Which subvolumes those are is either said, or follows from the image: a snapshot knows of what
//! it is one. A writable one at the end of such a chain, as `larder build --layers` makes it,
//! becomes a layer only if it was changed since. `larder-archive` compares each subvolume with the
//! one below, and this module brings both to it.

use super::archive::{OciName, container};
use super::{Extracted, Job};
use crate::failure::Advise;
use crate::interrupt::Interrupt;
use crate::{print, size};
use anyhow::{Context, anyhow};
use larder_archive::{
    Compression, Difference, Layer, LayerCounts, LayerError, Layout, Style, Surroundings, TarError,
    TarWriter,
};
use larder_format::ObjectId;
use larder_fs::{SubvolChoice, SubvolInfo};
use larder_sources::{Options, Sources, Stop};
use serde_json::{Value, json};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Memory for sorting.
const MEMORY: usize = 64 << 20;

/// A layer, and the subvolume of which it was made.
#[derive(Debug)]
pub(super) struct WrittenLayer {
    subvolume: String,
    counts: LayerCounts,
    size: u64,
}

impl WrittenLayer {
    pub(super) fn json(&self) -> Value {
        json!({
            "subvolume": self.subvolume,
            "entries": self.counts.entries,
            "bytes": self.counts.bytes,
            "whiteouts": self.counts.whiteouts,
            "size": self.size,
        })
    }
}

/// Writes a container image with a layer for each subvolume.
pub(super) fn oci(job: &Job<'_>, name: &OciName) -> anyhow::Result<Extracted> {
    let chosen = if job.args.layers { descent(job)? } else { named(job)? };
    container(job, name, |layout, how| layers(job, &chosen, layout, how))
}

/// A subvolume that is to become a layer.
struct Chosen {
    info: SubvolInfo,
    path: String,
    /// It is no layer if nothing in it differs from the one below.
    only_if_changed: bool,
}

/// The subvolume at the start, and below it the snapshots from which it descends.
fn descent(job: &Job<'_>) -> anyhow::Result<Vec<Chosen>> {
    if job.start.id.ino != ObjectId::FIRST_FREE.0 {
        return Err(anyhow!("{} is not a subvolume", job.shown))
            .hint("`larder subvolume list` shows the subvolumes")
            .could_not_run();
    }
    let all = job.image.fs.subvolumes()?;
    let mut chain = vec![job.image.fs.subvolume(job.start.id.subvol)?];
    while let Some(last) = chain.last()
        && last.parent_uuid != [0; 16]
        && let Some(below) = all.iter().find(|other| other.uuid == last.parent_uuid)
        // An image may say that a snapshot descends from itself.
        && chain.iter().all(|other| other.id != below.id)
    {
        chain.push(below.clone());
    }
    let several = chain.len() > 1;
    let chosen = chain.into_iter().enumerate().map(|(from_top, info)| {
        let only_if_changed = from_top == 0 && several && !info.read_only;
        chosen(job, info, only_if_changed)
    });
    let mut chosen = chosen.collect::<anyhow::Result<Vec<_>>>()?;
    chosen.reverse();
    Ok(chosen)
}

/// The subvolumes that the command line names.
fn named(job: &Job<'_>) -> anyhow::Result<Vec<Chosen>> {
    let find = |path: &[u8]| -> anyhow::Result<Chosen> {
        let found = job.image.fs.another(&SubvolChoice::Path(path.to_vec()));
        let found = found.with_context(|| format!("--layer {}", print::name(path)));
        let found = found.hint("`larder subvolume list` shows the subvolumes").could_not_run()?;
        let info = job.image.fs.subvolume(found.root().subvol)?;
        found.leave();
        chosen(job, info, false)
    };
    job.args.layer.iter().map(|path| find(path.as_bytes())).collect()
}

fn chosen(job: &Job<'_>, info: SubvolInfo, only_if_changed: bool) -> anyhow::Result<Chosen> {
    let path = print::name(&job.image.fs.subvolume_path(info.id)?);
    Ok(Chosen { info, path, only_if_changed })
}

fn layers(
    job: &Job<'_>,
    chosen: &[Chosen],
    layout: &Layout,
    how: Compression,
) -> anyhow::Result<(Extracted, Vec<Layer>)> {
    let (progress, interrupt) = (print::progress(), Interrupt::watch());
    let moved = AtomicU64::new(0);
    let goes_on = |more| {
        if more > 0 {
            let bytes = moved.fetch_add(more, Relaxed) + more;
            progress.set_message(size::human(bytes));
        }
        !interrupt.is_asked()
    };
    let stop = interrupt.clone();
    let options = Options { stop: Stop::when(move || stop.is_asked()), ..Options::default() };
    let around = Surroundings { memory: MEMORY, temporary: &options.temporary, goes_on: &goes_on };
    let (mut extracted, mut layers) = (Extracted::default(), Vec::new());
    let mut below: Option<Sources> = None;
    for one in chosen {
        let made = sources(job, one, &options).and_then(|sources| {
            let made = layer(below.as_ref(), &sources, one, layout, how, &around)?;
            Ok((made, sources))
        });
        let (made, sources) = made.map_err(|e| match interrupt.check() {
            Err(interrupted) => interrupted.into(),
            Ok(()) => e.context(format!("{}: {}", job.shown, one.path)),
        })?;
        if let Some((layer, counts)) = made {
            extracted.entries += counts.entries;
            extracted.bytes += counts.bytes;
            let (subvolume, size) = (one.path.clone(), layer.size());
            extracted.layers.push(WrittenLayer { subvolume, counts, size });
            layers.push(layer);
        }
        below = Some(sources);
    }
    progress.finish_and_clear();
    Ok((extracted, layers))
}

/// What a subvolume holds.
fn sources(job: &Job<'_>, one: &Chosen, options: &Options) -> anyhow::Result<Sources> {
    let fs = job.image.fs.another(&SubvolChoice::Id(one.info.id.0))?;
    Ok(Sources::of_filesystem(&one.path, fs, options)?)
}

/// Makes the layer of one subvolume. `None`: it needs none.
fn layer(
    below: Option<&Sources>,
    sources: &Sources,
    one: &Chosen,
    layout: &Layout,
    how: Compression,
    around: &Surroundings<'_>,
) -> anyhow::Result<Option<(Layer, LayerCounts)>> {
    let difference = Difference::between(below, sources, around)?;
    if one.only_if_changed && difference.is_empty() {
        return Ok(None);
    }
    let mut tar = TarWriter::new(layout.layer(how).could_not_run()?, Style::Layer);
    let counts = match difference.write(&mut tar, around) {
        Err(e @ LayerError::Entry { error: TarError::Whiteout, .. }) => {
            return Err(e).hint("rename it, or extract a tar");
        }
        counts => counts?,
    };
    let layer = tar.finish().context("writing the layer")?.finish()?;
    Ok(Some((layer, counts)))
}
