//! Files that share extents made in the running transaction, and logs: whatever a log has of one of
//! them, it has their checksums, and nothing in it contradicts what it has of the others.
//!
//! Each operation is one transaction's here as on a mount: the simulation's habit of committing
//! between the steps of a clone would leave nothing new to share. `LARDER_SCALE=20` judges 20 times
//! as many states.

use larder_check::{Kind, Options, Severity};
use larder_fs::{FileKind, Filesystem, InodeId, LogStats, NewInode, OpenOptions, Tuning};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{Seq, SimDevice};
use larder_simtest::image::Image;
use larder_simtest::judge::Depth;
use larder_simtest::oracle::{KernelMount, Need, dump_tree, need, scratch};
use larder_simtest::runner::{Config, Outcome, run};
use larder_simtest::workload::Workload;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// A data chunk that the last commit has: without one every `fsync` of data commits.
const BEGIN: &str = "new z; z[0,64K)=Z; COMMIT; ";

/// How many states of each workload are judged.
fn states(some: usize) -> usize {
    std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1) * some
}

fn config() -> Config {
    let mut config = Config::new(1).expect("a new file system");
    let tuning = Tuning { commit_steps: false, seal_ahead: None, ..config.options.tuning };
    config.options = OpenOptions { tuning, ..config.options };
    config.limits = Limits { samples: 8, per_epoch: states(40), seed: 1, ..Limits::default() };
    config.max_states = states(25);
    config.depth = Depth { emptied: 0.1, recovered: 0.1, ours: 0.0, checked: 0.15, kernel: 0.1 };
    if !need(&[Need::BtrfsProgs, Need::KernelBtrfs]) {
        config.depth = Depth { checked: 0.0, kernel: 0.0, ..config.depth };
    }
    config
}

/// Clones of what has just been written, synced on either side, in every order.
const SEQUENTIAL: &[(&str, &str)] = &[
    ("both", "new f; new g; f[0,1M)=A; copy f[0,1M)>g@0; F f; F g"),
    ("target first", "new f; new g; f[0,1M)=A; copy f[64K,256K)>g@1M; F g; F f"),
    (
        "one by one",
        "new f; new g; f[0,256K)=A; F f; copy f[0,256K)>g@0; F g; f[64K,128K)=B; F f; copy \
            f[0,256K)>g@0; F g",
    ),
    // Extents that were written back together, and belong to other files one by one.
    (
        "a part",
        "new f; new g; new h; f[0,4K)=A; f[8K,12K)=B; copy f[0,12K)>h@0; copy f[8K,12K)>g@0; F g",
    ),
    (
        "what is left",
        "new f; new h; f[0,4K)=A; f[8K,12K)=B; copy f[0,12K)>h@0; rm h; f[0,4K)=C; F f",
    ),
    (
        "what is left, punched",
        "new f; new h; f[0,4K)=A; f[8K,12K)=B; copy f[0,12K)>h@0; punch f[0,4K); F f; F h",
    ),
    // Extents that could grow, had a log not been told of them.
    ("grown", "new f; new g; f[0,512K)=A; F f; f[512K,1M)=B; copy f[0,1M)>g@0; F g"),
    (
        "grown, both",
        "new f; new g; f[0,512K)=A; F f; f[512K,1M)=B; copy f[0,1M)>g@0; F g; F f; rm f; F g",
    ),
    (
        "grown when alone again",
        "new f; new g; f[0,512K)=A; copy f[0,512K)>g@0; F g; rm g; f[512K,1M)=B; F f; f[1M,2M)=C; \
            F f",
    ),
    (
        "grown in the target",
        "new f; new g; f[0,512K)=A; copy f[0,512K)>g@0; F f; rm f; g[512K,1M)=B; F g",
    ),
    // What was reserved: in a log as such, then written in place, and shared.
    ("reserved", "new f; new g; alloc f[0,64K); F f; f[0,16K)=B; copy f[0,64K)>g@0; F g"),
    (
        "reserved before",
        "new f; new g; alloc f[0,64K); COMMIT; copy f[0,64K)>g@0; F g; f[0,16K)=B; F f; F g",
    ),
    (
        "reserved, alone again",
        "new f; new g; alloc f[0,64K); copy f[0,64K)>g@0; F g; rm g; f[0,16K)=B; F f",
    ),
    (
        "reserved before, alone again",
        "new f; new g; alloc f[0,64K); copy f[0,64K)>g@0; COMMIT; rm g; f[0,16K)=B; F f",
    ),
    // Written in place, but not what a commit or a log gave to another file, although that one is
    // gone since.
    (
        "in place",
        "new f; nocow f; new g; nocow g; f[0,64K)=a; copy f[0,64K)>g@0; COMMIT; rm g; f[0,64K)=b; \
            F f",
    ),
    (
        "in place, logged",
        "new f; nocow f; new g; nocow g; f[0,64K)=a; copy f[0,64K)>g@0; F g; rm g; f[0,64K)=b; F f",
    ),
    (
        "in place, both logged",
        "new f; nocow f; new g; nocow g; f[0,64K)=a; F f; copy f[0,64K)>g@0; F g; g[0,64K)=c; \
            f[0,64K)=b; F f",
    ),
    (
        "in place, the target",
        "new f; nocow f; new g; nocow g; f[0,64K)=a; F f; copy f[0,64K)>g@0; F f; rm f; \
            g[0,64K)=b; F g",
    ),
];

#[test]
fn what_is_cloned_and_synced_is_whole_after_every_cut() {
    let config = config();
    let mut outcome = Outcome::default();
    for (name, text) in SEQUENTIAL {
        let one =
            run(&config, &Workload::script(*name, &format!("{BEGIN}{text}")).expect("a workload"));
        println!("{name}: {one}");
        outcome.add(one);
    }
    outcome.assert_sound();
}

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 300;
const THREADS: u64 = 8;

/// Something that a thread did to its file, in the order in which it did it.
enum Step {
    /// Blocks from here on became these numbers, at the earliest from then on.
    Changed(Seq, u64, Vec<u64>),
    /// Everything up to here was durable by then.
    Synced(Seq),
}

/// A file of one thread: each block is one number, over and over.
struct Shared {
    name: String,
    id: InodeId,
    steps: Vec<Step>,
}

impl Shared {
    fn new(fs: &Filesystem, thread: u64) -> Self {
        let name = format!("file-{thread}");
        let new = NewInode {
            kind: FileKind::Regular,
            perm: 0o644,
            uid: 0,
            gid: 0,
            rdev: 0,
            target: b"",
            xattrs: &[],
        };
        let id = fs.create(fs.root(), name.as_bytes(), &new).expect("create").id;
        let mut file = Self { name, id, steps: Vec::new() };
        file.write(fs, Seq(0), 0, vec![thread + 1; BLOCKS as usize]);
        file
    }
    fn write(&mut self, fs: &Filesystem, begin: Seq, at: u64, numbers: Vec<u64>) {
        let bytes: Vec<u8> =
            numbers.iter().flat_map(|n| n.to_le_bytes().repeat(BLOCK as usize / 8)).collect();
        fs.write(self.id, at * BLOCK, &bytes).expect("write");
        self.steps.push(Step::Changed(begin, at, numbers));
    }
    /// Writes, gets ranges of others, syncs.
    fn work(&mut self, fs: &Filesystem, device: &SimDevice, others: &[InodeId], thread: u64) {
        const STEPS: u64 = 12;
        let mut rng = StdRng::seed_from_u64(thread);
        for step in 0..STEPS {
            let mut range = || {
                let len = if rng.random_ratio(1, 4) {
                    rng.random_range(64..150)
                } else {
                    rng.random_range(1..9)
                };
                (rng.random_range(0..BLOCKS - len), len)
            };
            let (at, len) = range();
            let first = (thread + 1) << 40 | step << 10;
            self.write(fs, device.mark(), at, (first..first + len).collect());
            let (from, len) = range();
            let to = rng.random_range(0..BLOCKS - len);
            let source = others[((thread + rng.random_range(1..THREADS)) % THREADS) as usize];
            let begin = device.mark();
            fs.clone_range(source.at(from * BLOCK), self.id.at(to * BLOCK), len * BLOCK)
                .expect("clone");
            let numbers = numbers(fs, self.id, to..to + len);
            self.steps.push(Step::Changed(begin, to, numbers));
            if rng.random_ratio(2, 3) {
                fs.fsync(self.id, false).expect("fsync");
                self.steps.push(Step::Synced(device.mark()));
            }
        }
    }
    /// What is wrong with it after a cut in between these.
    fn judge(&self, fs: &Filesystem, earliest: Seq, latest: Seq) -> Result<(), String> {
        let id = fs
            .lookup(fs.root(), self.name.as_bytes())
            .map_err(|e| format!("{}: {e}", self.name))?
            .id;
        let synced = |step: &Step| matches!(step, Step::Synced(by) if *by <= earliest);
        let durable = self.steps.iter().rposition(synced).unwrap_or(0);
        let mut possible = vec![BTreeSet::new(); BLOCKS as usize];
        for (n, step) in self.steps.iter().enumerate() {
            let Step::Changed(begin, at, numbers) = step else { continue };
            for (block, number) in possible[*at as usize..].iter_mut().zip(numbers) {
                if n < durable {
                    block.clear();
                }
                if *begin <= latest {
                    block.insert(*number);
                }
            }
        }
        let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
        fs.read(id, 0, &mut bytes).map_err(|e| format!("reading {}: {e}", self.name))?;
        for (n, (block, possible)) in bytes.chunks_exact(BLOCK as usize).zip(&possible).enumerate()
        {
            if !number(block).is_some_and(|n| possible.contains(&n)) {
                return Err(format!(
                    "block {n} of {} is {:?}, not of {possible:?}",
                    self.name,
                    number(block)
                ));
            }
        }
        Ok(())
    }
}

fn number(block: &[u8]) -> Option<u64> {
    let first: &[u8; 8] = block.first_chunk()?;
    block.chunks_exact(8).all(|c| c == first).then(|| u64::from_le_bytes(*first))
}

/// What blocks of a file hold.
fn numbers(fs: &Filesystem, id: InodeId, blocks: Range<u64>) -> Vec<u64> {
    let mut bytes = vec![0; ((blocks.end - blocks.start) * BLOCK) as usize];
    fs.read(id, blocks.start * BLOCK, &mut bytes).expect("read");
    bytes
        .chunks_exact(BLOCK as usize)
        .map(|b| number(b).expect("a block is of one piece"))
        .collect()
}

/// Checksum items of a tree, of the log's too, do not overlap; how many there are in the log.
fn checksums_of_the_log(image: &Image) -> usize {
    let dir = scratch();
    let path = dir.path().join("img");
    image.write_sparse(&path).expect("written");
    let text = dump_tree(&path, &[]).expect("a dump");
    let (mut reached, mut in_log, mut count) = (0, false, 0);
    for line in text.lines().map(str::trim) {
        if line.contains(" tree key (") {
            (reached, in_log) = (0, line.contains("TREE_LOG"));
        }
        if let Some(range) = line.strip_prefix("range start ") {
            let mut words =
                range.split(' ').step_by(2).map(|w| w.parse::<u64>().expect("a number"));
            let (start, end) = (words.next().expect("start"), words.next().expect("end"));
            assert!(start >= reached, "checksums from {start} on come again:\n{text}");
            reached = end;
            count += usize::from(in_log);
        }
    }
    // Linux replays it, too, and has nothing to say.
    KernelMount::image(&path, "").expect("mounted").unmount_clean().expect("unmounted");
    count
}

/// Opens what a cut has left, compares, and checks everything.
fn judge(
    files: &[Shared],
    image: Image,
    options: &OpenOptions,
    earliest: Seq,
    latest: Seq,
) -> Result<(), String> {
    let device = Arc::new(SimDevice::new(image));
    let fs = Filesystem::open(device.clone(), options.clone()).map_err(|e| format!("open: {e}"))?;
    files.iter().try_for_each(|f| f.judge(&fs, earliest, latest))?;
    fs.close().map_err(|e| format!("close: {e}"))?;
    let options = Options { data: true, ..Options::default() };
    let report =
        larder_check::check(&[device as _], &options, &|_| ()).map_err(|e| e.to_string())?;
    let found = report
        .findings
        .iter()
        .find(|f| f.severity() != Severity::Note && f.kind != Kind::SuperMirrorGeneration);
    found
        .map_or(Ok(()), |f| Err(format!("check: {}: {:?} {:?}: {}", f.kind, f.tree, f.key, f.what)))
}

#[test]
fn eight_threads_share_and_sync_and_every_cut_leaves_what_was_synced() {
    let config = config();
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let mut files: Vec<Shared> = (0..THREADS).map(|thread| Shared::new(&fs, thread)).collect();
    fs.sync().expect("sync");
    let begin = device.mark();
    files.iter_mut().for_each(|f| f.steps.push(Step::Synced(begin)));
    let ids: Vec<InodeId> = files.iter().map(|f| f.id).collect();
    std::thread::scope(|scope| {
        for (thread, file) in (0..).zip(&mut files) {
            let (fs, device, ids) = (&fs, &device, &ids);
            scope.spawn(move || file.work(fs, device, ids, thread));
        }
    });
    let LogStats { fsyncs_logged, csum_items, csum_ranges_searched, csum_ranges_present, .. } =
        fs.stats().log;
    println!(
        "{fsyncs_logged} logged, checksums: {csum_items} items, {csum_ranges_searched} searched, \
            {csum_ranges_present} present"
    );
    assert!(fsyncs_logged > 0 && csum_ranges_searched > 0 && csum_ranges_present > 0);
    let end = device.mark();
    // Before it is closed, which commits.
    let crashes = Crashes::of(&device.recording(), &config.limits);
    fs.close().expect("close");
    let mut order: Vec<_> =
        crashes.states.iter().filter(|s| s.earliest >= begin && s.earliest <= end).collect();
    order.shuffle(&mut StdRng::seed_from_u64(1));
    let tools = need(&[Need::BtrfsProgs, Need::KernelBtrfs]);
    let mut in_logs = 0;
    for (n, state) in order.iter().take(states(25)).enumerate() {
        let image = crashes.image(state);
        if tools && n % 5 == 0 {
            in_logs += checksums_of_the_log(&image);
        }
        if let Err(what) = judge(&files, image, &config.options, state.earliest, state.latest) {
            panic!(
                "{what}\n{}cut in {:?}",
                crashes.describe(state),
                (state.earliest, state.latest)
            );
        }
    }
    println!(
        "{} states of {}, {in_logs} items of checksums in some of their logs",
        order.len().min(states(25)),
        order.len()
    );
    assert!(!tools || in_logs > 0);
}
