//! The order of things: what is loaded, walked and compared when.

use crate::chunks;
use crate::coverage::{Coverage, Flaw};
use crate::data::{Bad, Data};
use crate::dump::Dump;
use crate::extents::{Closer, Extents};
use crate::files::Files;
use crate::finding::{Finding, Findings, Kind};
use crate::free_space;
use crate::links::{LinkSink, Totals};
use crate::log;
use crate::lost::Lost;
use crate::names::{self, SUBVOLUMES};
use crate::owners::Owners;
use crate::plain::Plain;
use crate::progress::{Meter, Phase, Watcher};
use crate::quotas;
use crate::refs::{self, Collected, Refs, Sink};
use crate::report::{Error, Options, Report, Stats};
use crate::roots::{self, Roots, has_inodes};
use crate::sets::{Hashing, Ledger, SectorSet};
use crate::source::{Edge, Source};
use crate::space_cache;
use crate::sums::Sums;
use crate::supers;
use crate::tables;
use crate::walk::{Memory, Visit, Walk, scan};
use crate::world::{Counts, Pass, World};
use larder_format::items::keys::csum_key;
use larder_format::items::{BlockGroupFlags, BlockGroupItem};
use larder_format::{CompatRo, Key, KeyType, Logical, LogicalRange, ObjectId};
use larder_volume::{Device, Volume, unflattened};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use zerocopy::FromBytes;

/// Pages of [`Coverage`] in one window, each of 2 KiB for 16 MiB of data: 128 MiB of memory, 1 TiB
/// of data.
const WINDOW: usize = 1 << 16;
/// Groups of addresses that are looked at closely, and facts about them.
const UNEVEN_ADDRESSES: usize = 4096;
const RECORDS: usize = 500_000;
/// Most block groups or device extents: enough for some PiB.
const TABLE: usize = 4 << 20;
/// Ranges with flaws of one sort that are listed.
const FLAWS: usize = 1000;

type Items = Vec<(Key, Vec<u8>)>;

pub(crate) fn run(
    devices: &[Arc<dyn Device>],
    options: &Options,
    watcher: Watcher<'_>,
) -> Result<Report, Error> {
    let findings = Findings::new(options.keep);
    let meter = Meter::new(watcher);
    meter.phase(Phase::Opening);
    let devices: Vec<_> = devices.iter().cloned().map(unflattened).collect();
    let (counts, dump) = check_image(&devices, options, &findings, &meter)?;
    let stats = Stats {
        nodes: counts.nodes.load(Relaxed),
        extents: counts.extents.load(Relaxed),
        inodes: counts.inodes.load(Relaxed),
        names: counts.names.load(Relaxed),
        file_extents: counts.file_extents.load(Relaxed),
        data_bytes: counts.data_bytes.load(Relaxed),
        bytes_read: meter.bytes.load(Relaxed),
        elapsed: meter.elapsed(),
    };
    let (findings, counts) = findings.finish();
    Ok(Report { findings, counts, stats, dump })
}

fn check_image(
    devices: &[Arc<dyn Device>],
    options: &Options,
    findings: &Findings,
    meter: &Meter<'_>,
) -> Result<(Counts, Option<Dump>), Error> {
    let Some(opened) = supers::open(devices, findings)? else {
        findings
            .add(Finding::new(Kind::NotChecked, "without a superblock nothing else can be found"));
        return Ok((Counts::default(), None));
    };
    if !supers::understand(&opened.superblock, findings)? {
        return Ok((Counts::default(), None));
    }
    let superblock = opened.superblock;
    supers::backups(&superblock, findings);
    let several = superblock.num_devices() > 1;
    let volume = Volume::new(opened.devices)?;
    let volume = if several { volume.with_missing() } else { volume };
    let source = Source::new(volume, &superblock, opened.behind, &opened.seeds, findings, meter);
    let array = chunks::system_chunks(&superblock, &source)?;
    supers::suffice(&superblock, &source.volume)?;
    let loaded = chunks::load(&superblock, &source)?;
    chunks::compare_system_chunks(&array, &loaded, findings);
    let dump = Dump::of(&superblock, &source, &loaded.dev_items);
    source.hide_names(dump.is_some_and(|d| d.names_hidden));
    let world = World {
        source,
        findings,
        meter,
        superblock,
        dev_items: opened.dev_items,
        seeds: opened.seeds,
        dump,
        chunks: loaded.chunks,
        hashing: Hashing::default(),
        lost: Lost::default(),
        full_backref: SectorSet::new(),
        last_snapshot: AtomicU64::new(0),
        features: AtomicU64::new(0),
        counts: Counts::default(),
    };
    if world.chunks.0.is_empty() {
        walk_plain(&Pass::silent(&world).reporting(), &Edge::chunk_tree(&world.superblock));
        let what = "without chunks nothing else can be found";
        world.add(Finding::new(Kind::NotChecked, what).tree(ObjectId::CHUNK_TREE));
        return Ok((world.counts, world.dump));
    }
    let roots = roots::load(&world.superblock, &world.source);
    check_trees(&world, &roots, &loaded.dev_items, options.data && dump.is_none());
    Ok((world.counts, world.dump))
}

/// What a pass over the subvolumes gives.
#[derive(Default)]
struct Walked {
    block_groups: Items,
    /// For each tree with inodes, its place among the roots.
    totals: Vec<(usize, Totals)>,
    uneven_dirs: Vec<(Edge, ObjectId)>,
}

fn check_trees(world: &World<'_>, roots: &Roots, dev_items: &Items, with_data: bool) {
    let last_snapshot = roots.trees.iter().map(|r| r.item.last_snapshot.get()).max().unwrap_or(0);
    world.last_snapshot.store(last_snapshot, Relaxed);
    expect_work(world, roots, with_data);

    let ledger = Ledger::new();
    let coverage = Coverage::new(Logical(0), WINDOW);
    let data = Data::new();
    let pass = Pass {
        refs: Refs { hashing: &world.hashing, sink: Sink::Sums(&ledger) },
        coverage: Some(&coverage),
        data: with_data.then_some(&data),
        ..Pass::silent(world).reporting()
    };
    let walked = walk_all(&pass, roots);
    log::check(&pass, roots.edge(ObjectId::EXTENT_TREE).as_ref());
    drop(pass);

    world.meter.phase(Phase::Comparing);
    roots.check(world);
    compare_tables(world, roots, dev_items, &walked);
    compare_names(world, roots, &walked);
    let flaws = all_flaws(world, roots, coverage);
    look_closer(world, roots, &ledger, &flaws, &data);
    quotas::check(world, roots);
    world.counts.data_bytes.store(data.compared(), Relaxed);
}

/// Tells the meter how much there is to read.
fn expect_work(world: &World<'_>, roots: &Roots, data: bool) {
    let count = |key: Key, bytes: &[u8]| {
        let (Some(chunk), Ok(item)) = (
            world.chunks.starting_at(Logical(key.objectid.0)),
            BlockGroupItem::ref_from_bytes(bytes),
        ) else {
            return;
        };
        let is_data = chunk.flags.contains(BlockGroupFlags::DATA);
        if data || !is_data || chunk.flags.contains(BlockGroupFlags::METADATA) {
            let copies = world.source.volume.copies_to_check(chunk.start);
            let copies = copies.map_or(1, |(stored, _)| stored.len()) as u64;
            world.meter.expect(item.used.get().min(chunk.len).saturating_mul(copies));
        }
    };
    if let Some(tree) = roots.edge(ObjectId::BLOCK_GROUP_TREE) {
        scan(&world.source, &tree, Key::MIN, Key::MAX, &mut |key, bytes| {
            count(key, bytes);
            ControlFlow::Continue(())
        });
    } else if let Some(tree) = roots.edge(ObjectId::EXTENT_TREE) {
        for chunk in &world.chunks.0 {
            let key = |offset| Key::new(chunk.start, KeyType::BLOCK_GROUP_ITEM, offset);
            scan(&world.source, &tree, key(0), key(u64::MAX), &mut |key, bytes| {
                count(key, bytes);
                ControlFlow::Break(())
            });
        }
    }
}

fn walk_with<V: Visit>(
    pass: &Pass<'_>,
    memory: &Memory<V::Piece>,
    visitor: &V,
    edge: &Edge,
) -> V::Piece {
    let walk =
        Walk { source: &pass.world.source, seen: &pass.seen, memory, visitor, report: pass.first };
    walk.tree(edge, None)
}

fn walk_plain(pass: &Pass<'_>, edge: &Edge) {
    pass.uses_root(edge);
    walk_with(pass, &Memory::new(), &Plain { pass }, edge);
}

/// Walks every tree.
fn walk_all(pass: &Pass<'_>, roots: &Roots) -> Walked {
    let world = pass.world;
    let mut walked = Walked::default();
    walk_plain(pass, &Edge::chunk_tree(&world.superblock));
    walk_plain(pass, &Edge::root_tree(&world.superblock));
    world.meter.phase(Phase::Extents);
    // First of all, for it says which leaves are referred to by address.
    if let Some(edge) = roots.edge(ObjectId::EXTENT_TREE) {
        pass.uses_root(&edge);
        let visitor = Extents { pass, block_groups: Mutex::default() };
        walk_with(pass, &Memory::new(), &visitor, &edge).finish(&mut Closer(pass));
        walked.block_groups = visitor.block_groups.into_inner();
        walked.block_groups.sort_unstable_by_key(|(key, _)| *key);
    } else if pass.first {
        world.lost.add_tree(ObjectId::EXTENT_TREE);
    }
    world.meter.phase(Phase::Checksums);
    if let Some(edge) = roots.edge(ObjectId::CSUM_TREE) {
        pass.uses_root(&edge);
        walk_with(pass, &Memory::new(), &Sums { pass }, &edge);
    } else if pass.first {
        world.lost.add_tree(ObjectId::CSUM_TREE);
    }
    world.meter.phase(Phase::Files);
    let special = |tree| matches!(tree, ObjectId::EXTENT_TREE | ObjectId::CSUM_TREE);
    for root in roots.trees.iter().filter(|r| !r.edge.tree.holds_files() && !special(r.edge.tree)) {
        walk_plain(pass, &root.edge);
    }
    walk_files(pass, roots, &mut walked);
    walked
}

/// Walks everything that holds files: what is alive first, for the rest may have lost parts of what
/// it shares.
fn walk_files(pass: &Pass<'_>, roots: &Roots, walked: &mut Walked) {
    let memory = Memory::new();
    let uneven_dirs = Mutex::default();
    let live = |root: &roots::Root| has_inodes(root.edge.tree) && root.is_live();
    let order = roots.trees.iter().enumerate().filter(|(_, r)| live(r));
    let rest =
        roots.trees.iter().enumerate().filter(|(_, r)| r.edge.tree.holds_files() && !live(r));
    for (n, root) in order.chain(rest) {
        let whole = live(root);
        let visitor = Files {
            pass,
            root: root.edge,
            links: LinkSink::Sum,
            whole,
            uneven_dirs: &uneven_dirs,
            looked_up: Mutex::default(),
            extent_root: roots.edge(ObjectId::EXTENT_TREE),
            owners_asked: AtomicUsize::new(0),
        };
        pass.uses_root(&root.edge);
        let walk = Walk {
            source: &pass.world.source,
            seen: &pass.seen,
            memory: &memory,
            visitor: &visitor,
            report: pass.first,
        };
        let totals = walk.tree(&root.edge, root.dropped()).finish(&visitor);
        if whole {
            walked.totals.push((n, totals));
        }
    }
    walked.uneven_dirs = uneven_dirs.into_inner();
}

/// Everything that a tree holds; its nodes have been judged already.
fn collect(world: &World<'_>, edge: Option<Edge>) -> Items {
    let mut items = Items::new();
    if let Some(edge) = edge {
        scan(&world.source, &edge, Key::MIN, Key::MAX, &mut |key, data| {
            items.push((key, data.to_vec()));
            if items.len() < TABLE { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        if items.len() >= TABLE {
            world.lost.add_tree(edge.tree);
            let what = "there are more items than a file system can need: only the first ones are \
                looked at";
            world.add(Finding::new(Kind::NotChecked, what).tree(edge.tree));
        }
    }
    items
}

/// Chunks, block groups, devices, free space, uuids.
fn compare_tables(world: &World<'_>, roots: &Roots, dev_items: &Items, walked: &Walked) {
    let edges: Vec<Edge> = roots.trees.iter().map(|r| r.edge).collect();
    let compat_ro = world.superblock.compat_ro();
    let by_tree = roots
        .edge(ObjectId::BLOCK_GROUP_TREE)
        .filter(|_| compat_ro.contains(CompatRo::BLOCK_GROUP_TREE));
    match by_tree {
        Some(edge) => {
            let items = collect(world, Some(edge));
            tables::block_groups(world, ObjectId::BLOCK_GROUP_TREE, &items);
        }
        None => tables::block_groups(world, ObjectId::EXTENT_TREE, &walked.block_groups),
    }
    if roots.edge(ObjectId::DEV_TREE).is_none() {
        world.lost.add_tree(ObjectId::DEV_TREE);
    }
    let dev_tree = collect(world, roots.edge(ObjectId::DEV_TREE));
    tables::devices(world, dev_items, &dev_tree);
    tables::bytes_used(world, &edges);
    supers::features(world, &edges);
    if let Some(edge) = roots.edge(ObjectId::FREE_SPACE_TREE) {
        if compat_ro.contains(CompatRo::FREE_SPACE_TREE_VALID) {
            free_space::check(world, &edge, roots.edge(ObjectId::EXTENT_TREE).as_ref());
        } else {
            let what = "the superblock does not say that the free-space tree is valid";
            world.add(Finding::new(Kind::FreeSpaceNotValid, what).tree(ObjectId::FREE_SPACE_TREE));
        }
    }
    if !world.is_rewritten() {
        space_cache::check(world, roots.edge(ObjectId::EXTENT_TREE).as_ref());
    }
    if let Some(edge) = roots.edge(ObjectId::UUID_TREE) {
        roots.check_uuids(world, &edge);
    }
}

/// Names, entries and inodes of each subvolume; subvolumes among each other.
fn compare_names(world: &World<'_>, roots: &Roots, walked: &Walked) {
    // Snapshots that share damage have the same sum.
    let mut by_sum: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    let mut searched = 0;
    for (n, totals) in &walked.totals {
        let root = &roots.trees[*n];
        if !totals.has_top {
            let what = format!("subvolume {} has no top directory", root.edge.tree);
            let finding = Finding::new(Kind::RootDirectory, what).tree(root.edge.tree);
            let key = Key::new(ObjectId::FIRST_FREE, KeyType::INODE_ITEM, 0);
            world.add(finding.key(key).follow_up_if(totals.broken));
        }
        if totals.links != 0 {
            by_sum.entry(totals.links).or_default().push(*n);
        }
        if let Some(from) = roots.doubtful_entries(world, root, totals) {
            searched += 1;
            if searched <= SUBVOLUMES {
                roots.report_stray_entries(world, root, from);
            }
        }
    }
    if searched > SUBVOLUMES {
        let more = searched - SUBVOLUMES;
        let what = format!(
            "entries of subvolumes are doubtful in {more} more subvolumes, not looked at closely"
        );
        world.add(Finding::new(Kind::NotChecked, what));
    }
    let broken = |n: usize| walked.totals.iter().any(|(k, t)| *k == n && t.broken);
    for same in by_sum.values().take(SUBVOLUMES) {
        if let Some(first) = same.first() {
            names::explain(world, &roots.trees[*first].edge, broken(*first));
        }
    }
    if by_sum.len() > SUBVOLUMES {
        let what = format!(
            "names are wrong in {} more subvolumes, not looked at closely",
            by_sum.len() - SUBVOLUMES
        );
        world.add(Finding::new(Kind::NotChecked, what));
    }
    for (edge, dir) in &walked.uneven_dirs {
        let tree = roots.trees.iter().position(|r| r.edge.tree == edge.tree);
        names::explain_directory(world, edge, *dir, tree.is_some_and(broken));
    }
}

/// Flaws of all windows; for each window but the first the trees are walked again.
fn all_flaws(world: &World<'_>, roots: &Roots, first: Coverage) -> Vec<(Flaw, LogicalRange)> {
    let mut next = first.next_window();
    let (mut flaws, _) = first.flaws(FLAWS);
    while let Some(from) = next {
        let coverage = Coverage::new(from, WINDOW);
        expect_work(world, roots, false);
        walk_all(&Pass { coverage: Some(&coverage), ..Pass::silent(world) }, roots);
        next = coverage.next_window();
        flaws.extend(coverage.flaws(FLAWS).0);
    }
    flaws
}

/// Another pass, if sums or sectors disagree: it finds out what each finding is about.
fn look_closer(
    world: &World<'_>,
    roots: &Roots,
    ledger: &Ledger,
    flaws: &[(Flaw, LogicalRange)],
    data: &Data,
) {
    let bad = data.take_bad();
    let ranges = flaws.iter().map(|(_, range)| *range).chain(bad.iter().map(|bad| bad.range));
    let owners = Owners::new(ranges);
    let mut uneven = ledger.uneven();
    if let Some(uneven) = &mut uneven
        && uneven.limit(UNEVEN_ADDRESSES)
    {
        let what = "references are wrong in more places than were looked at closely";
        world.add(Finding::new(Kind::NotChecked, what).tree(ObjectId::EXTENT_TREE));
    }
    let collected = Collected::new(RECORDS);
    if uneven.is_some() || !owners.is_empty() {
        let sink = uneven.as_ref().map_or(Sink::None, |u| Sink::Records(u, &collected));
        let refs = Refs { hashing: &world.hashing, sink };
        expect_work(world, roots, false);
        walk_all(&Pass { refs, owners: Some(&owners), ..Pass::silent(world) }, roots);
    }
    if uneven.is_some() {
        refs::explain(collected, &world.lost, world.findings);
    }
    for (flaw, range) in flaws {
        report_flaw(world, &owners, *flaw, *range);
    }
    for bad in bad {
        report_bad(world, &owners, &bad);
    }
}

fn report_flaw(world: &World<'_>, owners: &Owners, flaw: Flaw, range: LogicalRange) {
    let (at, len) = (range.start, range.len());
    let (kind, what, follows) = match flaw {
        Flaw::Missing => {
            let what = format!("{len} bytes at {at} are in use and have no checksums");
            (Kind::ChecksumMissing, what, world.lost.part_of(ObjectId::CSUM_TREE))
        }
        Flaw::Unexpected => {
            let what = format!(
                "{len} bytes at {at} have checksums, but belong to a file without, or are \
                    preallocated"
            );
            (Kind::ChecksumUnexpected, what, false)
        }
        Flaw::WithoutData => {
            let what =
                format!("there are checksums for {len} bytes at {at}, where nothing is allocated");
            (Kind::ChecksumWithoutExtent, what, world.lost.extents_at(at))
        }
    };
    let mut finding = Finding::new(kind, what).tree(ObjectId::CSUM_TREE).address(at);
    finding.key = Some(csum_key(at));
    if let Some((tree, key)) = owners.of(at) {
        (finding.tree, finding.key) = (Some(tree), Some(key));
    }
    world.add(finding.follow_up_if(follows));
}

fn report_bad(world: &World<'_>, owners: &Owners, bad: &Bad) {
    let (at, len) = (bad.range.start, bad.range.len());
    let found = world.source.volume.map().lookup(at, len);
    let by_parity = found.as_ref().is_ok_and(|found| bad.copy >= found.stripes.len());
    let copy = match bad.copies {
        _ if by_parity => format!("by parity, copy {} of {}: ", bad.copy, bad.copies),
        0 | 1 => String::new(),
        _ => format!("copy {} of {}: ", bad.copy, bad.copies),
    };
    let (kind, what) = match &bad.error {
        Some(error) => (Kind::DataUnreadable, format!("{copy}{error}")),
        None => {
            let what = format!("{copy}{len} bytes at {at} are not what was written");
            (Kind::DataChecksum, what)
        }
    };
    let mut finding = Finding::new(kind, what).address(at);
    let place = found.ok().and_then(|found| found.stripes.get(bad.copy).copied());
    finding.device = place.map(|stripe| (stripe.device, stripe.at));
    finding.follow_up = world.source.is_behind(place.map(|stripe| stripe.device));
    if let Some((tree, key)) = owners.of(at) {
        (finding.tree, finding.key) = (Some(tree), Some(key));
    }
    world.add(finding);
}
