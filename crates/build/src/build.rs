//! The order of things: options, contents, trees, superblock, name.

use crate::content::{self, Batch, File, Opened, What, Worker, sectors, to_usize};
use crate::content::{BATCH, BATCH_FILES, SECTOR};
use crate::error::{Error, Result};
use crate::global::{self, World};
use crate::input::{Forest, OpenContents, Stream, TreeInput};
use crate::links::Links;
use crate::merge::{self, Records};
use crate::names::Names;
use crate::nodes::Nodes;
use crate::options::{BuildOptions, ImageSize, Plan};
use crate::output::{Output, Sink};
use crate::pipeline::{Buffers, Pipeline, StopGuard};
use crate::report::{Progress, Report, Stage, go_on};
use crate::sort::Sorter;
use crate::space::{Fit, Space};
use crate::spool::Scratch;
use crate::store::{Contents, Store};
use larder_format::ObjectId;
use larder_sources::TreePath;
use larder_volume::superblock::copies_within;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Makes an image that holds `trees`.
///
/// # Errors
/// A source fails, or has what no image can hold; the options do not go together; the output cannot
/// be written. No image has come into being then. What was written in place is no file system.
pub fn build(
    output: &Output,
    trees: Vec<TreeInput<'_>>,
    open: &OpenContents<'_>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Report> {
    let plan = Plan::new(options)?;
    let forest = Forest::new(trees)?;
    let sink = Sink::open(output, options.size)?;
    let limit = limit(&sink, options)?;
    let scratch = Scratch::new(options.scratch.as_deref().unwrap_or(sink.directory()));
    let fit = match options.size {
        ImageSize::Shrink { .. } => Fit::tight(plan.nodesize),
        _ => Fit::roomy(plan.nodesize),
    };
    let space = Space::new(limit, fit, plan.system_flags())?;
    let size = |end: u64| image_size(options.size, limit, end);
    let run = Run { plan: &plan, sink: &sink, scratch: &scratch, open, progress };

    progress.stage(Stage::Contents);
    let (names, contents) = run.contents(forest, space)?;
    progress.stage(Stage::Trees);
    let mut report = Report { names: names.names, inodes: names.inodes, ..Report::default() };
    let subvolumes = names.subvolumes;
    report.subvolumes = subvolumes.len() as u64;
    contents.shares.fill(names.tallies, &mut report);
    report.compressed = contents.compressed;
    report.shared = contents.shared;

    let named = names.items.finish()?;
    let mut nodes = Nodes::new(&plan, progress, contents.space, Some(&sink));
    let mut roots = BTreeMap::new();
    let mut records = Records::new(named.read()?, contents.items.read()?);
    for (tree, subvolume) in (0..).zip(&subvolumes) {
        run.go_on()?;
        let id = ObjectId(subvolume.id);
        roots.insert(id, merge::subvolume(&plan, &mut nodes, &mut records, tree, id)?);
    }
    drop(records);
    roots.insert(ObjectId::DATA_RELOC_TREE, global::data_reloc(&plan, &mut nodes)?);
    roots.insert(ObjectId::UUID_TREE, global::uuids(&plan, &mut nodes, &subvolumes)?);
    roots.insert(ObjectId::CSUM_TREE, global::checksums(&plan, &mut nodes, &contents.sums)?);
    let mut methods = contents.methods;
    methods.extend(names.methods);
    let world = World {
        plan: &plan,
        refs: &contents.refs,
        subvolumes: &subvolumes,
        roots,
        methods,
        size: &size,
    };
    let done = world.finish(nodes)?;

    progress.stage(Stage::Sync);
    run.go_on()?;
    report.uuid = plan.fsid;
    report.nodesize = plan.nodesize;
    report.metadata = done.nodes * u64::from(plan.nodesize);
    report.end = done.space.end();
    report.size = size(report.end);
    if let Some(room) = limit.filter(|room| *room < report.size) {
        return Err(Error::Unsupported(format!(
            "the output has {room} bytes, which is less than the {} that are needed",
            report.size
        )));
    }
    report.data = done.space.used_bytes() - report.metadata;
    let mut superblock = world.superblock(&done)?;
    sink.flush(progress)?;
    for at in copies_within(report.size) {
        sink.write(at.0, &superblock.seal(at))?;
    }
    sink.finish(report.size)?;
    Ok(report)
}

/// Bytes of the image, where they are given.
fn limit(sink: &Sink, options: &BuildOptions) -> Result<Option<u64>> {
    let asked = match options.size {
        ImageSize::Exactly(size) => Some(size),
        _ => None,
    };
    match (sink.size(), asked) {
        (Some(there), Some(asked)) if asked > there => Err(Error::Unsupported(format!(
            "the output has {there} bytes, which is less than the {asked} that were asked for"
        ))),
        (there, asked) => Ok(asked.or(there)),
    }
}

/// Bytes of an image whose last chunk ends at `end`, in an output of `limit` bytes. A device may be
/// larger than the file system on it, if that was asked for.
fn image_size(size: ImageSize, limit: Option<u64>, end: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    let whole = |limit: u64| limit & !(SECTOR - 1);
    match (size, limit) {
        (ImageSize::Shrink { align }, None) => end.next_multiple_of(align),
        (ImageSize::Shrink { align }, Some(limit)) => end.next_multiple_of(align).min(whole(limit)),
        (ImageSize::Free(free), _) => end.saturating_add(free).next_multiple_of(MIB),
        (ImageSize::Exactly(_) | ImageSize::Auto | ImageSize::AtLeast(_), Some(limit)) => {
            whole(limit)
        }
        (ImageSize::Exactly(size), None) => size,
        (ImageSize::AtLeast(size), None) => end.next_multiple_of(MIB).max(whole(size)),
        // A tenth, at least as much as Linux needs to make a chunk of each type.
        (ImageSize::Auto, None) => (end + (end / 10).max(64 * MIB)).next_multiple_of(MIB),
    }
}

/// What all parts of a build share.
struct Run<'a> {
    plan: &'a Plan,
    sink: &'a Sink,
    scratch: &'a Scratch,
    open: &'a OpenContents<'a>,
    progress: &'a dyn Progress,
}

impl<'a> Run<'a> {
    fn go_on(&self) -> Result<()> {
        go_on(self.progress)
    }

    /// Reads all entries, and gives their contents places.
    fn contents(&self, forest: Forest<'_>, space: Space) -> Result<(Names<'a>, Contents)> {
        let plan = self.plan;
        // A batch and what it becomes, twice.
        let most = (plan.memory as u64 / 4 / (4 * BATCH)).max(1);
        let window = most.min(8 * plan.threads as u64).max(2);
        let pipeline = Pipeline::new(window);
        let buffers = Buffers::default();
        let identities = forest.streams.len() > 1;
        let share = plan.memory / 16;
        let sorter = Sorter::new(self.scratch, share * 3);
        let links = Links::new(self.scratch, share);
        let names = Names::new(plan, sorter, links, forest.subvolumes, identities);
        std::thread::scope(|scope| {
            for _ in 0..plan.threads {
                scope.spawn(|| {
                    let guard = StopGuard(Some(&pipeline));
                    let mut worker = Worker::new(plan, self.open, &buffers, self.progress);
                    pipeline.work(|batch| worker.run(batch));
                    guard.disarm();
                });
            }
            let writer = scope.spawn(|| -> Result<Contents> {
                let guard = StopGuard(Some(&pipeline));
                let mut store = Store::new(plan, self.sink, space, self.scratch, self.progress);
                while let Some(done) = pipeline.take() {
                    self.go_on()?;
                    buffers.give(store.take(done)?);
                }
                guard.disarm();
                store.finish()
            });
            let guard = StopGuard(Some(&pipeline));
            let named = self.entries(names, forest.streams, &pipeline);
            if named.is_ok() {
                guard.disarm();
            } else {
                drop(guard);
            }
            let contents = match writer.join() {
                Ok(contents) => contents,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            match (named, contents) {
                // The pipeline stopped because the contents failed.
                (Err(Error::Interrupted), Err(e)) => Err(e),
                (named, contents) => {
                    let (names, contents) = (named?, contents?);
                    self.go_on()?;
                    Ok((names, contents))
                }
            }
        })
    }

    fn entries<'n>(
        &self,
        mut names: Names<'n>,
        streams: Vec<(u32, BTreeMap<TreePath, u32>, Stream<'_>)>,
        pipeline: &Pipeline<Batch, content::Done>,
    ) -> Result<Names<'n>> {
        let mut batches = Batches::new(self, pipeline);
        let mut untold = 0;
        for (tree, within, stream) in streams {
            names.begin(tree, within);
            for entry in stream {
                names.entry(entry.map_err(Error::Source)?, &mut |file| batches.file(file))?;
                untold += 1;
                if untold == 64 {
                    self.progress.entries(untold);
                    untold = 0;
                    self.go_on()?;
                }
            }
            names.finish()?;
        }
        self.progress.entries(untold);
        batches.submit()?;
        pipeline.complete();
        Ok(names)
    }
}

/// Gathers files into batches.
struct Batches<'a> {
    run: &'a Run<'a>,
    pipeline: &'a Pipeline<Batch, content::Done>,
    batch: Batch,
    /// Contents that have been seen.
    seen: HashSet<u128>,
    most_seen: usize,
}

impl<'a> Batches<'a> {
    fn new(run: &'a Run<'a>, pipeline: &'a Pipeline<Batch, content::Done>) -> Self {
        let (batch, seen) = (Batch::default(), HashSet::new());
        // Here and in the store, about 128 bytes for each.
        Self { run, pipeline, batch, seen, most_seen: run.plan.memory / 8 / 128 }
    }

    fn file(&mut self, mut file: Arc<File>) -> Result<()> {
        if let Some(identity) = file.identity {
            if self.seen.contains(&identity) {
                return self.add(file, What::Again, 0);
            }
            if self.seen.len() < self.most_seen {
                self.seen.insert(identity);
            } else if let Some(file) = Arc::get_mut(&mut file) {
                file.identity = None;
            }
        }
        let room = match &file.contents {
            Some(_) => file.size.next_multiple_of(SECTOR),
            None => 0,
        };
        if room <= BATCH {
            return self.add(file, What::Whole, room);
        }
        self.large(&file)
    }

    /// A file of several batches: it is opened here, so that its parts are known.
    fn large(&mut self, file: &Arc<File>) -> Result<()> {
        let locator = file.contents.as_ref().expect("it has contents");
        let mut contents = (self.run.open)(locator).map_err(|e| file.failed(e))?;
        let parts = content::parts(sectors(file, &mut *contents)?);
        let opened = Opened::new(contents);
        let last = parts.len().saturating_sub(1);
        if parts.is_empty() {
            let (opened, ranges) = (opened, Vec::new());
            return self.add(file.clone(), What::Part { opened, ranges, last: true }, 0);
        }
        for (n, ranges) in parts.into_iter().enumerate() {
            let room = ranges.iter().map(|r| r.end - r.start).sum();
            let what = What::Part { opened: opened.clone(), ranges, last: n == last };
            self.add(file.clone(), what, room)?;
        }
        Ok(())
    }

    fn add(&mut self, file: Arc<File>, what: What, room: u64) -> Result<()> {
        let room = to_usize(room);
        if self.batch.room + room > to_usize(BATCH) {
            self.submit()?;
        }
        self.batch.room += room;
        self.batch.files.push((file, what));
        if self.batch.files.len() == BATCH_FILES { self.submit() } else { Ok(()) }
    }

    fn submit(&mut self) -> Result<()> {
        if self.batch.files.is_empty() {
            return Ok(());
        }
        self.run.go_on()?;
        let batch = std::mem::take(&mut self.batch);
        // It stopped because of an error that the others know.
        self.pipeline.submit(batch).map_err(|_| Error::Interrupted)
    }
}
