//! Metadata dumps without chunks, shown as the device that they were made of.
//!
//! `btrfs-image` restores a dump in one of two forms. In the newer one addresses lead through
//! chunks, as in any image. In the older one every node lies at its logical address, whatever the
//! chunk tree says, and one system chunk in the superblock maps everything to itself. The decision
//! hidden here is that the layers above need not know: [`unflattened`] gives a device on which each
//! node lies where the chunk tree says, in every copy, and whose superblock lists the system chunks
//! of that tree.
//!
//! What the dump does not have reads as zeros: data, and the superblock's copies. Such a device is
//! read-only.

use crate::device::Device;
use crate::superblock::read_superblock;
use larder_format::items::chunk::encode_sys_array;
use larder_format::items::{BlockGroupFlags, Chunk};
use larder_format::node::NodeView;
use larder_format::superblock::MetadataDump;
use larder_format::{
    Key, KeyType, Logical, MAX_LEVEL, Physical, SUPER_OFFSETS, SUPER_SIZE, Superblock,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Most nodes of a chunk tree that are read: enough for some millions of chunks.
const NODES: usize = 1 << 16;
/// Longest device that is believed.
const LONGEST: u64 = 1 << 60;

/// The device, or what it is a dump of in the older form.
#[must_use]
pub fn unflattened(device: Arc<dyn Device>) -> Arc<dyn Device> {
    match read_superblock(&*device) {
        Ok(sb) if sb.metadata_dump() == Some(MetadataDump::Flat) => {
            Arc::new(Unflattened::new(device, *sb))
        }
        _ => device,
    }
}

/// A range of the device, and where the dump has it.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u64,
    end: u64,
    from: Logical,
}

#[derive(Debug)]
struct Unflattened {
    dump: Arc<dyn Device>,
    size: u64,
    superblock: Vec<u8>,
    /// By place on the device.
    runs: BTreeMap<u64, Run>,
}

impl Unflattened {
    fn new(dump: Arc<dyn Device>, mut sb: Superblock) -> Self {
        let chunks = chunks(&*dump, &sb);
        let system = chunks
            .iter()
            .filter(|(_, c)| c.flags.contains(BlockGroupFlags::SYSTEM))
            .map(|(k, c)| (*k, c));
        // Without a system chunk the superblock stays as it is: what is missing is for others to
        // report.
        if let Ok(bytes) = encode_sys_array(system) {
            let _ = sb.set_sys_chunk_bytes(&bytes);
        }
        let mut runs = BTreeMap::new();
        for (key, chunk) in &chunks {
            for stripe in
                chunk.stripes.iter().filter(|s| s.devid == sb.device_id() && chunk.length > 0)
            {
                let start = stripe.offset.0;
                let end = start.saturating_add(chunk.length);
                runs.entry(start).or_insert(Run { start, end, from: Logical(key.offset) });
            }
        }
        let total = sb.dev_item.total_bytes.get();
        let size = if total > LONGEST { dump.size() } else { total };
        let superblock = sb.seal(SUPER_OFFSETS[0]).to_vec();
        Self { dump, size, superblock, runs }
    }

    /// The run that a place lies in or that comes next.
    fn run_at(&self, at: u64) -> Option<Run> {
        let before = self.runs.range(..=at).next_back().map(|(_, run)| *run);
        let here = before.filter(|run| at < run.end);
        here.or_else(|| self.runs.range(at..).next().map(|(_, run)| *run))
    }

    /// Reads what lies in one run, as far as the dump goes; the rest of the buffer is zeros
    /// already.
    fn read_run(&self, from: Logical, buf: &mut [u8]) -> io::Result<()> {
        let room = self.dump.size().saturating_sub(from.0).min(buf.len() as u64);
        let room = usize::try_from(room).unwrap_or(buf.len());
        if room == 0 { Ok(()) } else { self.dump.read_at(Physical(from.0), &mut buf[..room]) }
    }
}

impl Device for Unflattened {
    fn name(&self) -> String {
        self.dump.name()
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn is_read_only(&self) -> bool {
        true
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        let end = at.0.checked_add(buf.len() as u64).filter(|end| *end <= self.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.fill(0);
        let mut here = at.0;
        while here < end
            && let Some(run) = self.run_at(here).filter(|run| run.start < end)
        {
            let (from, to) = (here.max(run.start), run.end.min(end));
            #[allow(clippy::cast_possible_truncation)]
            let piece = &mut buf[(from - at.0) as usize..(to - at.0) as usize];
            self.read_run(run.from.plus(from - run.start), piece)?;
            here = to;
        }
        let first = SUPER_OFFSETS[0].0;
        let (from, to) = (at.0.max(first), end.min(first + SUPER_SIZE as u64));
        if from < to {
            #[allow(clippy::cast_possible_truncation)]
            let (target, source) = (
                (from - at.0) as usize..(to - at.0) as usize,
                (from - first) as usize..(to - first) as usize,
            );
            buf[target].copy_from_slice(&self.superblock[source]);
        }
        Ok(())
    }
    fn write_at(&self, _: Physical, _: &[u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a metadata dump is not written"))
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn can_discard(&self) -> bool {
        false
    }
    fn data_from(&self, at: Physical) -> Physical {
        let mut here = at.0;
        while let Some(run) = self.run_at(here) {
            let within = here.max(run.start);
            let from = run.from.plus(within - run.start);
            let data = if from.0 < self.dump.size() {
                self.dump.data_from(Physical(from.0)).0
            } else {
                u64::MAX
            };
            let data = within.saturating_add(data.saturating_sub(from.0));
            if data < run.end {
                return Physical(data);
            }
            here = run.end;
        }
        Physical(here.max(self.size))
    }
}

/// What the chunk tree holds, as far as it can be read.
fn chunks(dump: &dyn Device, sb: &Superblock) -> Vec<(Key, Chunk)> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let mut todo = vec![(sb.chunk_root(), sb.chunk_root_level)];
    while let Some((at, level)) = todo.pop() {
        let mut bytes = vec![0; sb.nodesize() as usize];
        let end = at.0.checked_add(bytes.len() as u64);
        if seen.len() >= NODES || !seen.insert(at) || end.is_none_or(|end| end > dump.size()) {
            continue;
        }
        if dump.read_at(Physical(at.0), &mut bytes).is_err() {
            continue;
        }
        let view = NodeView(&bytes);
        let right = view.bytenr() == at && view.level() == level && level < MAX_LEVEL;
        if !right || !view.csum_matches(sb.csum_type()) {
            continue;
        }
        if let Some(below) = level.checked_sub(1) {
            todo.extend(view.pointers().iter().map(|p| (Logical(p.blockptr.get()), below)));
            continue;
        }
        for slot in 0..view.items().len() {
            let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
            if key.kind == KeyType::CHUNK_ITEM
                && let Ok(chunk) = Chunk::parse(data)
                && key.offset.checked_add(chunk.length).is_some()
            {
                found.push((key, chunk));
            }
        }
    }
    found.sort_unstable_by_key(|(key, _)| *key);
    found
}
