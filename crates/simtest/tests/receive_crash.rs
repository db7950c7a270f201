//! Receiving that is interrupted: by the user after each command, and by power cuts at every
//! operation of the device. What is left is sound, and going on ends with the same trees.
//!
//! `LARDER_SCALE=20` has twenty times as many random histories, from `LARDER_SEED` on.

use larder_check::{Kind, Severity};
use larder_format::items::Timespec;
use larder_format::{Generation, ObjectId};
use larder_fs::{Filesystem, OpenOptions, SubvolChoice, Tuning};
use larder_receive::{Error, ImageDir, Observer, Options, Summary, Taken, receive};
use larder_send::{Source, send};
use larder_simtest::by_hand;
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::SimDevice;
use larder_simtest::lineage::Lineage;
use larder_simtest::oracle::{Aspects, EngineTree, Manifest, manifest};
use larder_simtest::runner::Config;
use larder_stream::{Command, Protocol, StreamWriter};
use std::collections::BTreeSet;
use std::io::Cursor;
use std::sync::Arc;

const FIRST: ([u8; 16], Generation) = ([1; 16], Generation(7));
const SECOND: ([u8; 16], Generation) = ([2; 16], Generation(9));

/// A stream, and the subvolumes that it makes.
struct Story {
    stream: Vec<u8>,
    names: Vec<String>,
}

impl Story {
    /// The one that is told here.
    fn told() -> Self {
        Self { stream: stream(), names: ["one", "two"].map(str::to_owned).to_vec() }
    }

    /// A random history: all of a subvolume, and then what changed.
    fn random(seed: u64, config: &Config) -> Self {
        let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
        let fs = open(&device, &config.options, "");
        let mut lineage = Lineage::begin(&fs, "work", seed).expect("a subvolume");
        let protocol = if seed.is_multiple_of(2) { Protocol::V1 } else { Protocol::V2 };
        let mut writer = StreamWriter::new(Vec::new(), protocol);
        let (mut names, mut sent) = (Vec::new(), Vec::new());
        for (generation, changes) in [25, 12].into_iter().enumerate() {
            lineage.change(&fs, changes).expect("changes");
            let name = format!("s{seed}-{generation}");
            let id = lineage.snapshot(&fs, &name).expect("a snapshot");
            let new = fs.frozen(id).expect("read-only");
            let (parent, subvolume) = (sent.last(), &new);
            let source = Source { subvolume, name: name.as_bytes(), parent, clones: &[] };
            let options = larder_send::Options { compressed_data: false, no_data: false };
            send(&source, options, &mut writer, &mut |_| ()).expect("sent");
            sent.push(new);
            names.push(name);
        }
        drop(sent);
        fs.close().expect("close");
        Self { stream: writer.into_inner(), names }
    }
}

/// Two subvolumes: a whole one, and what changed since.
fn stream() -> Vec<u8> {
    let mut writer = StreamWriter::new(Vec::new(), Protocol::V2);
    let mut put = |command: Command<'_>| writer.write(&command).expect("a command");
    let ino = Some(ObjectId(257));
    let data: Vec<u8> = (0..40_000u32).map(|n| (n / 7 % 251) as u8).collect();
    let t = Timespec::new(1_700_000_000, 5);
    let utimes = |path| Command::Utimes { path, atime: t, mtime: t, ctime: t, otime: Some(t) };
    put(Command::Subvol { path: b"one", uuid: FIRST.0, ctransid: FIRST.1 });
    put(Command::Chmod { path: b"", mode: 0o750 });
    put(Command::Mkdir { path: b"o257-7-0", ino });
    put(Command::Rename { path: b"o257-7-0", to: b"dir" });
    for (name, offset) in [(&b"dir/a"[..], 0), (b"dir/b", 8192), (b"c", 0)] {
        put(Command::Mkfile { path: b"o258-7-0", ino });
        put(Command::Rename { path: b"o258-7-0", to: name });
        put(Command::Write { path: name, offset, data: &data });
        put(Command::SetXattr { path: name, name: b"user.x", value: name });
        put(Command::Chown { path: name, uid: 1000, gid: 100 });
        put(Command::Chmod { path: name, mode: 0o640 });
        put(utimes(name));
    }
    put(Command::Link { path: b"dir/l", target: b"c" });
    put(Command::Symlink { path: b"s", ino, target: b"../../etc" });
    put(Command::Mkfifo { path: b"fifo", ino, rdev: Some(0), mode: Some(0o600) });
    put(Command::Mkfile { path: b"shares", ino });
    put(Command::Clone {
        offset: 0,
        len: 36_864,
        path: b"shares",
        from_uuid: FIRST.0,
        from_ctransid: FIRST.1,
        from_path: b"dir/a",
        from_offset: 0,
    });
    // Last, as a sender has it: everything before changes times.
    for path in [&b"c"[..], b"s", b"fifo", b"shares", b"dir", b""] {
        put(utimes(path));
    }
    put(Command::End {});
    put(Command::Snapshot {
        path: b"two",
        uuid: SECOND.0,
        ctransid: SECOND.1,
        parent_uuid: FIRST.0,
        parent_ctransid: FIRST.1,
    });
    put(Command::Rename { path: b"dir/a", to: b"o300-9-0" });
    put(Command::Rename { path: b"dir/b", to: b"dir/a" });
    put(Command::Rename { path: b"o300-9-0", to: b"dir/b" });
    put(Command::Unlink { path: b"c" });
    put(Command::Rename { path: b"dir", to: b"moved" });
    put(Command::Fallocate { path: b"moved/a", mode: 3, offset: 4096, size: 8192 });
    put(Command::Write { path: b"moved/l", offset: 10, data: b"changed" });
    put(Command::Truncate { path: b"shares", size: 5000 });
    put(Command::Unlink { path: b"fifo" });
    for path in [&b"moved/a"[..], b"moved/b", b"moved/l", b"shares", b"moved", b""] {
        put(utimes(path));
    }
    put(Command::End {});
    writer.into_inner()
}

/// Ends receiving after some commands.
struct StopAfter {
    left: u64,
    /// Where the last command ended.
    at: u64,
}
impl Observer for StopAfter {
    fn at(&mut self, offset: u64) {
        if offset > self.at {
            self.left -= 1;
            self.at = offset;
        }
    }
    fn stop(&self) -> bool {
        self.left == 0
    }
}
fn after(commands: u64) -> StopAfter {
    StopAfter { left: commands, at: 0 }
}
fn to_the_end() -> StopAfter {
    after(u64::MAX)
}

fn config() -> Config {
    Config::new(3).expect("a new file system")
}

fn open(device: &Arc<SimDevice>, options: &OpenOptions, subvol: &str) -> Arc<Filesystem> {
    let subvol = SubvolChoice::Path(subvol.as_bytes().to_vec());
    Filesystem::open(device.clone(), OpenOptions { subvol, ..options.clone() }).expect("open")
}

fn run(
    fs: &Filesystem,
    story: &Story,
    options: &Options,
    watcher: &mut StopAfter,
) -> Result<Summary, Error> {
    let mut to = ImageDir::new(fs, fs.root(), (0, 0));
    receive(Cursor::new(story.stream.clone()), &mut to, options, watcher)
}

fn resume() -> Options {
    Options { resume: true, ..Options::default() }
}

/// The trees, each of a subvolume that is complete.
fn trees(device: &Arc<SimDevice>, options: &OpenOptions, story: &Story) -> Vec<Manifest> {
    let of = |name: &String| {
        let fs = open(device, options, name);
        let info = fs.subvolume(fs.root().subvol).expect("facts");
        assert!(info.read_only && info.received_uuid != [0; 16], "{name} is complete");
        let tree = manifest(&EngineTree(&fs)).expect("the tree");
        fs.close().expect("close");
        tree
    };
    story.names.iter().map(of).collect()
}

fn assert_same(now: &[Manifest], wanted: &[Manifest], what: &str) {
    for (now, wanted) in now.iter().zip(wanted) {
        let differences = now.differences(wanted, Aspects { ctime: true, ..Aspects::copy() });
        assert!(differences.is_empty(), "{what}: {differences:#?}");
    }
}

/// What the target directory has.
fn names(fs: &Filesystem) -> Vec<String> {
    let mut names = Vec::new();
    fs.readdir(fs.root(), 0, &mut |e| {
        if !matches!(e.name, b"." | b"..") {
            names.push(String::from_utf8_lossy(e.name).into_owned());
        }
        true
    })
    .expect("list");
    names.sort_unstable();
    names
}

fn complaints(device: &Arc<SimDevice>) -> Result<(), String> {
    by_hand::complaints(&[device.clone() as _], |f| {
        f.severity() != Severity::Note && f.kind != Kind::SuperMirrorGeneration
    })
}

fn wanted(config: &Config, story: &Story) -> Vec<Manifest> {
    let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
    let fs = open(&device, &config.options, "");
    let done = run(&fs, story, &Options::default(), &mut to_the_end()).expect("receive");
    assert_eq!(done.subvolumes.len(), 2);
    assert_eq!(names(&fs), story.names);
    fs.close().expect("close");
    trees(&device, &config.options, story)
}

#[test]
fn stopped_after_each_command_it_goes_on() {
    let config = config();
    let story = Story::told();
    let wanted = wanted(&config, &story);
    let mut all = BTreeSet::new();
    for commands in 1..100 {
        let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
        let fs = open(&device, &config.options, "");
        let stopped = run(&fs, &story, &Options::default(), &mut after(commands));
        if stopped.is_ok() {
            assert!(commands > 30 && all.len() == 1, "{commands} commands; in all {all:?}");
            return;
        }
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        let again =
            run(&fs, &story, &Options::default(), &mut to_the_end()).expect_err("it is there");
        assert!(
            matches!(again, Error::Taken { why: Taken::Partly | Taken::Received, .. }),
            "{again}"
        );
        let done = run(&fs, &story, &resume(), &mut to_the_end()).expect("it goes on");
        let (applied, skipped) =
            done.subvolumes.iter().fold((0, 0), |sum, s| (sum.0 + s.applied, sum.1 + s.skipped));
        // The commands that begin and end a subvolume are not counted.
        assert!(skipped <= commands && skipped + 4 >= commands, "{skipped} of {commands} skipped");
        all.insert(applied + skipped);
        assert_eq!(names(&fs), story.names);
        fs.close().expect("close");
        let found = trees(&device, &config.options, &story);
        assert_same(&found, &wanted, &format!("{commands} commands"));
    }
    panic!("the stream has fewer commands");
}

#[test]
fn another_stream_does_not_go_on() {
    let (config, story) = (config(), Story::told());
    let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
    let fs = open(&device, &config.options, "");
    run(&fs, &story, &Options::default(), &mut after(9)).expect_err("stopped");
    let mut writer = StreamWriter::new(Vec::new(), Protocol::V2);
    let begin = Command::Subvol { path: b"one", uuid: FIRST.0, ctransid: FIRST.1 };
    writer.write(&begin).expect("a command");
    for _ in 0..20 {
        writer.write(&Command::Chmod { path: b"", mode: 0o700 }).expect("a command");
    }
    writer.write(&Command::End {}).expect("the end");
    let bytes = writer.into_inner();
    let mut to = ImageDir::new(&fs, fs.root(), (0, 0));
    let refused = receive(Cursor::new(bytes), &mut to, &resume(), &mut to_the_end());
    assert!(matches!(refused, Err(Error::Taken { why: Taken::OtherStream, .. })), "{refused:?}");
    // The right one still does.
    run(&fs, &story, &resume(), &mut to_the_end()).expect("it goes on");
    fs.close().expect("close");
}

/// Receives, and looks at every state that a power cut leaves. Returns how many subvolumes went on
/// with what they had.
fn cut(config: &Config, story: &Story, options: &Options) -> usize {
    let wanted = wanted(config, story);
    let tuning = Tuning { fake_clock: true, commit_steps: true, ..Tuning::default() };
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = open(&device, &OpenOptions { tuning, ..config.options.clone() }, "");
    run(&fs, story, options, &mut to_the_end()).expect("receive");
    fs.close().expect("close");
    let limits = Limits { samples: 1, per_epoch: 4, ..Limits::default() };
    let crashes = Crashes::of(&device.recording(), &limits);
    assert!(crashes.states.len() > 20, "{} states", crashes.states.len());
    let mut skipped = 0;
    for state in &crashes.states {
        let device = Arc::new(SimDevice::new(crashes.image(state)).unrecorded());
        let what = crashes.describe(state);
        complaints(&device).unwrap_or_else(|e| panic!("{what}: {e}"));
        let fs = open(&device, &config.options, "");
        let done = run(&fs, story, &resume(), &mut to_the_end());
        let done = done.unwrap_or_else(|e| panic!("{what}: {e}: {:?}", names(&fs)));
        skipped += done.subvolumes.iter().filter(|s| s.skipped > 0).count();
        assert_eq!(names(&fs), story.names, "{what}");
        fs.wait_for_drops().expect("drops");
        fs.close().expect("close");
        assert_same(&trees(&device, &config.options, story), &wanted, &what);
        complaints(&device).unwrap_or_else(|e| panic!("{what}, after it went on: {e}"));
    }
    skipped
}

#[test]
fn power_cuts_leave_what_goes_on() {
    let config = config();
    let often = Options { checkpoint_commands: Some(9), ..Options::default() };
    let story = Story::told();
    assert!(cut(&config, &story, &often) > 0, "some went on from a checkpoint");
    cut(&config, &story, &Options::default());
    let number =
        |name: &str, or: u64| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(or);
    let first = number("LARDER_SEED", 1);
    for seed in first..first + number("LARDER_SCALE", 1) {
        eprintln!("LARDER_SEED={seed}");
        cut(&config, &Story::random(seed, &config), &often);
    }
}

/// Streams with changed bytes and right checksums: an error or not, and nothing outside.
#[test]
fn changed_streams_do_no_harm() {
    let config = config();
    let sound = stream();
    let mut rng = fastrand::Rng::with_seed(5);
    for _ in 0..200 {
        let bytes = changed(&sound, &mut rng);
        let device = Arc::new(SimDevice::new(config.base.clone()).unrecorded());
        let fs = open(&device, &config.options, "");
        let options = Options { max_errors: 0, ..Options::default() };
        let mut to = ImageDir::new(&fs, fs.root(), (0, 0));
        let _ = receive(Cursor::new(bytes), &mut to, &options, &mut to_the_end());
        fs.close().expect("close");
        complaints(&device).expect("sound");
    }
}

/// Some bytes of some commands are others, with checksums put right.
fn changed(sound: &[u8], rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < sound.len() {
        if sound[at..].starts_with(b"btrfs-stream\0") {
            out.extend_from_slice(&sound[at..at + 17]);
            at += 17;
        }
        let len = u32::from_le_bytes(sound[at..at + 4].try_into().unwrap()) as usize;
        let mut command = sound[at..at + 10 + len].to_vec();
        at += 10 + len;
        for _ in 0..rng.usize(..3) {
            // Mostly where types, lengths and paths are.
            let most = command.len().min(if rng.bool() { 60 } else { usize::MAX });
            if rng.u8(..8) == 0 && most > 10 {
                let which = rng.usize(10..most);
                command[which] = if rng.bool() { rng.u8(..) } else { b"./\0"[rng.usize(..3)] };
            }
        }
        command[6..10].fill(0);
        let crc = larder_format::csum::crc32c_raw(0, &command);
        command[6..10].copy_from_slice(&crc.to_le_bytes());
        for _ in 0..match rng.u8(..20) {
            0 => 0,
            1 => 2,
            _ => 1,
        } {
            out.extend_from_slice(&command);
        }
    }
    out
}
