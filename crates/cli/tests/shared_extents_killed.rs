//! Files that share extents of the running transaction, `fsync`, and a daemon that is killed: after
//! the log was replayed, by Larder and by Linux, no checksum is missing, none is there twice, and
//! every block is as it was acknowledged or was written later.
//!
//! `LARDER_SCALE=20` kills at 20 different points.

mod common;

use common::crash::{Acknowledged, KillPoints, Stage, ready};
use common::larder;
use fastrand::Rng;
use larder_fuse::sharing::{FileAt, clone};
use larder_simtest::oracle::dump_tree;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const BLOCK: u64 = 4096;
/// Blocks of each file.
const BLOCKS: u64 = 400;
const FILES: u64 = 8;

fn name(file: u64) -> String {
    format!("file-{file}")
}

/// A range of blocks: mostly short, sometimes long enough that its extent would be joined with what
/// is before it.
fn range(dice: &mut Rng) -> (u64, u64) {
    let len = if dice.u64(..4) == 0 { 64 + dice.u64(..100) } else { 1 + dice.u64(..12) };
    (dice.u64(..BLOCKS - len), len)
}

/// What one block may hold.
#[derive(Clone, Default)]
struct Block {
    now: u64,
    /// What it held when its file was synced last, and what it has been given since.
    possible: BTreeSet<u64>,
    /// The daemon died during the write: the content is unknown.
    unknown: bool,
}

/// A file: each block is one number, over and over.
struct Model {
    number: u64,
    file: File,
    blocks: Vec<Block>,
}

impl Model {
    fn open(stage: &Stage, number: u64) -> Self {
        let file = File::options().read(true).write(true).open(stage.at(&name(number))).unwrap();
        let first =
            Block { now: number + 1, possible: BTreeSet::from([number + 1]), unknown: false };
        Self { number, file, blocks: vec![first; BLOCKS as usize] }
    }
    fn part(&mut self, (at, len): (u64, u64)) -> &mut [Block] {
        &mut self.blocks[at as usize..][..len as usize]
    }
    /// Gives each block of a range another number.
    fn write(&mut self, (at, len): (u64, u64), first: u64) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (block, number) in self.part((at, len)).iter_mut().zip(first..) {
            block.now = number;
            block.possible.insert(number);
            bytes.extend(number.to_le_bytes().repeat(BLOCK as usize / 8));
        }
        self.file.write_all_at(&bytes, at * BLOCK)
    }
    /// Gets a range from another file, which others may be changing.
    fn get(&mut self, from: &File, at: u64, (to, len): (u64, u64)) -> io::Result<()> {
        self.part((to, len)).iter_mut().for_each(|b| b.unknown = true);
        clone(
            FileAt { file: from, offset: at * BLOCK },
            FileAt { file: &self.file, offset: to * BLOCK },
            len * BLOCK,
        )?;
        let mut bytes = vec![0; (len * BLOCK) as usize];
        self.file.read_exact_at(&mut bytes, to * BLOCK)?;
        for (block, found) in
            self.part((to, len)).iter_mut().zip(bytes.chunks_exact(BLOCK as usize))
        {
            let number = number_of(found).expect("a block is of one piece");
            *block = Block {
                now: number,
                unknown: false,
                possible: std::mem::take(&mut block.possible),
            };
            block.possible.insert(number);
        }
        Ok(())
    }
    fn sync(&mut self, acknowledged: &Acknowledged<'_>) -> io::Result<()> {
        self.file.sync_all()?;
        for block in &mut self.blocks {
            block.possible = BTreeSet::from([block.now]);
        }
        acknowledged.one();
        Ok(())
    }
    fn compare(&self, top: &Path) {
        let bytes = fs::read(top.join(name(self.number))).unwrap();
        assert_eq!(bytes.len() as u64, BLOCKS * BLOCK);
        for (n, (block, found)) in
            self.blocks.iter().zip(bytes.chunks_exact(BLOCK as usize)).enumerate()
        {
            let place = || format!("block {n} of {}", name(self.number));
            let number = number_of(found).unwrap_or_else(|| panic!("{} is of two pieces", place()));
            let fits = block.unknown || block.possible.contains(&number);
            assert!(fits, "{} is {number}, not one of {:?}", place(), block.possible);
        }
    }
}

fn number_of(block: &[u8]) -> Option<u64> {
    let first: &[u8; 8] = block.first_chunk()?;
    block.chunks_exact(8).all(|c| c == first).then(|| u64::from_le_bytes(*first))
}

/// Checksum items of one tree do not overlap, in the log or outside of it.
fn checksums_do_not_overlap(image: &Path) {
    let text = dump_tree(image, &[]).unwrap();
    let (mut reached, mut count) = (0, 0);
    for line in text.lines().map(str::trim) {
        if line.contains(" tree key (") {
            reached = 0;
        }
        if let Some(range) = line.strip_prefix("range start ") {
            let mut words = range.split(' ');
            let start: u64 = words.next().unwrap().parse().unwrap();
            let end = words.nth(1).unwrap().parse().unwrap();
            assert!(start >= reached, "checksums from {start} on come again:\n{text}");
            (reached, count) = (end, count + 1);
        }
    }
    assert!(count > 0, "{text}");
}

/// Threads write to their files, give them ranges of others', and sync; then the daemon dies.
fn share(threads: usize, at: u64) {
    let mut stage = Stage::new("512M");
    for number in 0..FILES {
        let bytes = (number + 1).to_le_bytes().repeat((BLOCKS * BLOCK / 8) as usize);
        fs::write(stage.at(&name(number)), bytes).unwrap();
    }
    larder(args!["sync", stage.point()]).ok();
    let death = stage.death();
    let halfway = || {
        let log = stage.log_stats();
        assert!(log["fsyncs_logged"].as_u64() > Some(0), "{log}");
        assert!(log["csum_ranges_searched"].as_u64() > Some(0), "{log}");
        println!("{log}");
    };
    let acknowledged = Acknowledged::new(at, &halfway, &death);
    let models: Vec<Model> = std::thread::scope(|scope| {
        let work = |thread: u64| {
            let (stage, acknowledged) = (&stage, &acknowledged);
            move || {
                let mut own: Vec<Model> = (0..FILES)
                    .filter(|n| n % threads as u64 == thread)
                    .map(|n| Model::open(stage, n))
                    .collect();
                let all: Vec<File> = (0..FILES).map(|n| Model::open(stage, n).file).collect();
                let mut dice = Rng::with_seed(at * 1000 + thread);
                acknowledged.until_the_end(|step| {
                    let count = own.len() as u64;
                    let mine = dice.u64(..count) as usize;
                    let other = (own[mine].number + 1 + dice.u64(..FILES - 1)) % FILES;
                    if dice.bool() {
                        let range = range(&mut dice);
                        own[mine].write(range, (thread + 1) << 40 | step << 10)?;
                    }
                    if dice.bool() {
                        let (from, len) = range(&mut dice);
                        let to = dice.u64(..BLOCKS - len);
                        own[mine].get(&all[other as usize], from, (to, len))?;
                    }
                    // The source, too, in either order, where it is this thread's.
                    let source = own.iter().position(|m| m.number == other);
                    let mut synced: Vec<usize> = source.into_iter().chain([mine]).collect();
                    if step % 2 == 0 {
                        synced.reverse();
                    }
                    if dice.u64(..3) > 0 {
                        synced.into_iter().try_for_each(|n| own[n].sync(acknowledged))?;
                    }
                    Ok(())
                });
                own
            }
        };
        let running: Vec<_> = (0..threads as u64).map(|t| scope.spawn(work(t))).collect();
        running.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    println!("{threads} threads, killed after {at}, {} acknowledged", acknowledged.count());
    stage.bury();
    checksums_do_not_overlap(&stage.image());
    stage.afterwards(&|top| models.iter().for_each(|m| m.compare(top)));
}

#[test]
fn one_after_the_other() {
    if ready(&[]) {
        KillPoints { first: 60, step: 23 }.all().for_each(|at| share(1, at));
    }
}

#[test]
fn eight_threads_at_once() {
    if ready(&[]) {
        KillPoints { first: 160, step: 61 }.all().for_each(|at| share(FILES as usize, at));
    }
}
