//! Larder called as `btrfs`, beside the real one: the same commands on a mount of the kernel and on
//! a Larder mount of a copy of the image, and what both print.
//!
//! Both run in the root of their mount, so the paths in the command lines are the same.

mod common;

use common::{Run, is_mounted, larder};
use larder_format::ObjectId;
use larder_format::items::{BalanceItem, DevReplace};
use larder_simtest::damage::Damage;
use larder_simtest::image::Image;
use larder_simtest::oracle::{
    Aspects, KernelMount, Need, StdTree, btrfs_check, compare_sources, copy_image, mkfs_btrfs,
    need, scratch,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const NEEDS: [Need; 5] =
    [Need::Root, Need::Fuse, Need::KernelBtrfs, Need::MkfsBtrfs, Need::BtrfsProgs];

/// One of the two programs, with the directory that it runs in and the device below that.
struct Side {
    program: PathBuf,
    dir: PathBuf,
    device: String,
}

impl Side {
    fn run(&self, line: &str) -> Run {
        let mut c = Command::new(&self.program);
        c.args(line.split_whitespace()).current_dir(&self.dir);
        c.env("TZ", "UTC").env_remove("SOURCE_DATE_EPOCH").stdin(Stdio::null());
        c.output().unwrap().into()
    }

    /// Standard output, without what is this side's own.
    fn out(&self, run: &Run) -> String {
        let dir = self.dir.to_str().unwrap();
        run.text().replace(dir, "MOUNT").replace(&self.device, "DEVICE")
    }
}

/// The real program on a kernel mount, and Larder on a Larder mount of the same image.
struct Both {
    theirs: Side,
    ours: Side,
    kernel: Option<KernelMount>,
    image: PathBuf,
    _dir: tempfile::TempDir,
}

/// The program under the other name.
fn link(dir: &Path) -> PathBuf {
    let link = dir.join("btrfs");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_larder"), &link).unwrap();
    link
}

/// What both begin with.
fn fill(mount: &Path) {
    let script = "
        btrfs subvolume create home && btrfs subvolume create home/nested && mkdir snaps plain
        echo hello > home/a && head -c 3000000 /dev/urandom > home/b
        cp --reflink=always home/b home/c && btrfs property set home/a compression zstd
        btrfs subvolume snapshot -r home snaps/one && btrfs subvolume snapshot home snaps/two
        echo x > home/new && sync";
    let run = Command::new("sh").args(["-ec", script]).current_dir(mount).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

impl Both {
    fn new() -> Option<Self> {
        if !need(&NEEDS) {
            return None;
        }
        let scratch = scratch();
        let dir = scratch.path().canonicalize().unwrap();
        let (first, image) = (dir.join("k.img"), dir.join("l.img"));
        mkfs_btrfs(&first, 512 << 20, &["-L", "data"]).unwrap();
        let mount = KernelMount::image(&first, "").unwrap();
        fill(mount.path());
        mount.unmount_clean().unwrap();
        copy_image(&first, &image).unwrap();
        let kernel = KernelMount::image(&first, "").unwrap();
        let mnt = dir.join("mnt");
        fs::create_dir(&mnt).unwrap();
        larder(args!["mount", &image, &mnt]).ok();
        let source = |point: &Path| {
            let run = Command::new("findmnt").args(["-no", "SOURCE"]).arg(point).output().unwrap();
            String::from_utf8(run.stdout).unwrap().trim().to_owned()
        };
        let theirs = Side {
            program: "btrfs".into(),
            dir: kernel.path().canonicalize().unwrap(),
            device: source(kernel.path()),
        };
        let ours = Side { program: link(&dir), device: source(&mnt), dir: mnt };
        Some(Self { theirs, ours, kernel: Some(kernel), image, _dir: scratch })
    }

    /// Runs a line on both sides. The exit codes must be the same, and a failure says why.
    #[track_caller]
    fn run(&self, line: &str) -> (String, String) {
        let (theirs, ours) = (self.theirs.run(line), self.ours.run(line));
        assert_eq!(ours.code, theirs.code, "{line}: {}\n{}", ours.err, theirs.err);
        assert!(ours.code == 0 || !ours.err.is_empty(), "{line}: nothing is said");
        (self.ours.out(&ours), self.theirs.out(&theirs))
    }

    #[track_caller]
    fn same(&self, line: &str) {
        let (ours, theirs) = self.run(line);
        assert_eq!(ours, theirs, "{line}");
    }

    /// The same but for numbers, times and widths.
    #[track_caller]
    fn same_shape(&self, line: &str) {
        let (ours, theirs) = self.run(line);
        assert_eq!(shape(&ours), shape(&theirs), "{line}");
    }
}

impl Drop for Both {
    fn drop(&mut self) {
        if is_mounted(&self.ours.dir) {
            let _ = common::command().args(["umount", "--lazy"]).arg(&self.ours.dir).output();
        }
    }
}

/// A text with `#` in the place of each number with its unit, and one blank in that of several.
fn shape(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_ascii_digit() {
            while chars.next_if(|c| c.is_ascii_digit() || *c == '.').is_some() {}
            while chars.next_if(|c| "kKMGTiB".contains(*c)).is_some() {}
            out.push('#');
        } else if !(matches!(c, ' ' | '-') && out.ends_with(c)) {
            out.push(c);
        }
    }
    out
}

#[test]
fn what_it_shows_is_what_the_other_shows() {
    let Some(both) = Both::new() else { return };
    for line in [
        "subvolume list .",
        "subvolume list -t .",
        "subvolume list -apcguqR home",
        "subvolume list -apcguqR .",
        "subvolume list -t -puqRcg .",
        "subvolume list -t -s .",
        "subvolume list -o .",
        "subvolume list -o home",
        "subvolume list -s .",
        "subvolume list -r .",
        "subvolume list --sort=-rootid .",
        "subvolume list -G +10 .",
        "subvolume list -C 9 .",
        "subv l .",
        "subvolume get-default .",
        "subvolume sync .",
        "subvolume sync . 999",
        "filesystem label .",
        "filesystem sync .",
        "filesystem du -s --raw home snaps",
        "device stats .",
        "device stats -c .",
        "--format json device stats .",
        "balance status .",
        "replace status .",
        "property list .",
        "property list home",
        "property list home/a",
        "property list plain",
        "property get .",
        "property get home",
        "property get home ro",
        "property get snaps/one",
        "property get home/a",
        "property get home/a compression",
        "property get -t i . compression",
        "property get . label",
        "inspect-internal rootid home/a",
        "inspect-internal rootid home/nested",
        "inspect-internal inode-resolve 258 home",
        "inspect-internal subvolid-resolve 257 .",
        "inspect-internal subvolid-resolve 5 .",
    ] {
        both.same(line);
    }
    let sorted = |text: String| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    // The address of the first data, in an image that was just made.
    for line in [
        "filesystem du home",
        "inspect-internal logical-resolve 13631488 .",
        "inspect-internal logical-resolve -P 13635584 .",
        "inspect-internal logical-resolve -o -P 13631488 home",
    ] {
        let (ours, theirs) = both.run(line);
        assert_eq!(sorted(ours), sorted(theirs), "{line}");
    }
    for line in [
        "subvolume find-new home 1",
        "subvolume find-new home 99",
        "subvolume show home",
        "subvolume show .",
        "subvolume show snaps/one",
        "subvolume show -r 256 .",
        "filesystem df .",
        "filesystem df -b .",
        "filesystem df -k .",
        "filesystem df --si .",
        "--format json filesystem df .",
        "filesystem usage .",
        "filesystem usage -b .",
        "filesystem usage -T .",
        "filesystem usage -b -T .",
        "filesystem show .",
        "filesystem show --raw data",
        "device stats -T .",
        "device usage .",
        "device usage -b .",
        "scrub status .",
    ] {
        both.same_shape(line);
    }
}

/// What programs ask that is wrong, or that Larder does not have: the same exit codes.
#[test]
fn what_fails_there_fails_here() {
    let Some(both) = Both::new() else { return };
    for line in [
        "",
        "bogus",
        "subvolume",
        "subvolume bogus",
        "subvolume list",
        "subvolume list --bogus .",
        "subvolume list missing",
        "subvolume list home/a",
        "subvolume show plain",
        "subvolume show missing",
        "subvolume create home",
        "subvolume create missing/x",
        "subvolume delete missing",
        "subvolume delete plain",
        "subvolume delete home",
        "subvolume delete -i 9999 .",
        "subvolume snapshot plain x",
        "subvolume snapshot missing x",
        "subvolume snapshot home snaps/one/x",
        "subvolume get-default missing",
        "subvolume sync -s 0 .",
        "filesystem df missing",
        "filesystem label missing",
        "filesystem sync missing",
        "filesystem show missing",
        "filesystem du missing",
        "property get missing",
        "property get home nothing",
        "property set home ro maybe",
        "property set home/a compression bogus",
        "property set home label x",
        "device stats missing",
        "balance pause .",
        "balance cancel .",
        "balance resume .",
        "scrub cancel .",
        "qgroup show .",
        "inspect-internal inode-resolve 99999 home",
        "inspect-internal logical-resolve 1 .",
        "inspect-internal subvolid-resolve 9999 .",
        "--format json subvolume list .",
        "--format bogus filesystem df .",
        "subvolume list /proc",
        "filesystem df /proc",
        "property get /proc",
        "check missing",
        "check /dev/null",
        "inspect-internal dump-super missing",
    ] {
        both.run(line);
    }
    for line in ["--help", "subvolume --help", "subvolume delete --help", "--version", "version"] {
        let (ours, theirs) = both.run(line);
        assert!(!ours.is_empty() && !theirs.is_empty(), "{line}");
    }
    assert!(both.ours.run("--version").ok().text().starts_with("btrfs-progs v6.14"));
}

#[test]
fn what_it_changes_is_what_the_other_changes() {
    let Some(mut both) = Both::new() else { return };
    for line in [
        "subvolume create home/x home/y",
        "-q subvolume create quiet",
        "subvolume create z",
        "subvolume create -p dd/ee/x",
        "subvolume snapshot home snaps",
        "subvolume snapshot -r home snaps/ro",
        "subvolume snapshot home/ snaps/slash",
        "subvolume set-default 256 .",
        "subvolume set-default .",
        "subvolume set-default snaps/two",
        "property set snaps/one ro false",
        "property get snaps/one ro",
        "property set home/b compression lzo",
        "property get home/b",
        "filesystem label . newlabel",
        "filesystem label .",
        "subvolume delete home/y",
        "subvolume delete -c dd/ee/x z",
        "subvolume delete -C quiet",
        "--dry-run subvolume delete snaps/ro",
        "subvolume delete -R home",
    ] {
        both.same(line);
    }
    // The kernel's cleaner takes its time.
    both.ours.run("subvolume sync . 256").ok();
    both.same_shape("subvolume list .");
    both.same_shape("subvolume get-default .");
    let (ours, theirs) = both.run("subvolume delete -i 258 .");
    assert!(ours.contains("Delete subvolume 258 (no-commit): "), "{ours}\n{theirs}");
    both.same_shape("subvolume list .");
    larder(args!["umount", &both.ours.dir]).ok();
    both.kernel.take().unwrap().unmount_clean().unwrap();
    btrfs_check(&both.image, true).assert_clean("after the commands");
}

/// Images in the place of devices.
#[test]
fn images_are_shown_as_the_other_shows_them() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let dir = dir.path().canonicalize().unwrap();
    let side = |program: PathBuf| Side { program, dir: dir.clone(), device: "/dev/none".into() };
    let (theirs, ours) = (side("btrfs".into()), side(link(&dir)));
    let forms: [&[&str]; 3] = [
        &["-L", "data"],
        &["--csum", "xxhash", "-m", "single", "-n", "32k"],
        &["-M", "-O", "^no-holes,^free-space-tree"],
    ];
    for form in forms {
        mkfs_btrfs(&dir.join("x.img"), 512 << 20, form).unwrap();
        for line in [
            "inspect-internal dump-super x.img",
            "inspect-internal dump-super -f x.img",
            "inspect-internal dump-super -fa x.img",
            "inspect-internal dump-super -s 1 x.img",
            "inspect-internal dump-super --bytenr 65536 x.img",
            "inspect-internal dump-tree --csum-headers x.img",
            "filesystem show x.img",
            "filesystem label x.img",
            "rescue zero-log x.img",
            "filesystem label x.img other",
            "filesystem label x.img",
        ] {
            let (expected, run) = (theirs.run(line), ours.run(line));
            assert_eq!(run.code, expected.code, "{line}: {}\n{}", run.err, expected.err);
            let (ours, theirs) = (run.text(), expected.text());
            let differs = ours.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs);
            assert_eq!((differs, ours.len()), (None, theirs.len()), "{line}");
        }
        for line in ["check x.img", "check --check-data-csum --readonly -p --mode lowmem x.img"] {
            theirs.run(line).ok();
            assert!(ours.run(line).ok().err.contains("no error found"));
        }
        ours.run("check --repair x.img").fails(1, "larder restore");
    }
    // A tree's first block is gone, in both copies.
    mkfs_btrfs(&dir.join("x.img"), 512 << 20, &["-m", "single"]).unwrap();
    let mut bytes = fs::read(dir.join("x.img")).unwrap();
    let root = u64::from_le_bytes(*bytes[65536 + 0x50..].first_chunk().unwrap()) as usize;
    bytes[root + 4000..root + 4100].fill(0x55);
    bytes[root..root + 4].fill(0);
    fs::write(dir.join("x.img"), bytes).unwrap();
    for line in ["check x.img", "filesystem show x.img"] {
        let expected = theirs.run(line);
        if line.starts_with("check") {
            ours.run(line).fails(expected.code, "ERROR");
        }
    }
    // A superblock with a wrong checksum is shown as it is.
    let file = fs::OpenOptions::new().write(true).open(dir.join("x.img")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7], 65536 + 200).unwrap();
    let line = "inspect-internal dump-super -f x.img";
    assert_eq!(ours.run(line).ok().text(), theirs.run(line).ok().text());
}

/// Streams in files: what both say, and what each makes of the other's.
#[test]
fn what_one_sends_the_other_receives() {
    let Some(mut both) = Both::new() else { return };
    both.same("subvolume snapshot -r home snaps/three");
    let dir = both.image.parent().unwrap().to_owned();
    let stream = |by: &str, n: usize| dir.join(format!("{by}{n}")).to_str().unwrap().to_owned();
    let says = |theirs: Run, ours: Run| {
        assert_eq!((ours.text(), &ours.err), (theirs.text(), &theirs.err));
        assert_eq!((ours.code, theirs.code), (0, 0), "{}", ours.err);
    };
    for (n, line) in [
        "send snaps/one",
        "send -p snaps/one snaps/three",
        "send -e snaps/one snaps/three",
        "send --proto 2 --compressed-data -c snaps/one -c snaps/one snaps/three",
        "send --no-data -p snaps/one snaps/three",
        "-q send -p snaps/one snaps/three",
    ]
    .iter()
    .enumerate()
    {
        let to = |by| format!("{line} -f {}", stream(by, n));
        says(both.theirs.run(&to("theirs")), both.ours.run(&to("ours")));
        both.same(&format!("receive --dump -f {}", stream("ours", n)));
    }
    for to in ["to", "joined", "again"] {
        for side in [&both.theirs, &both.ours] {
            fs::create_dir(side.dir.join(to)).unwrap();
        }
    }
    for (to, options, n) in
        [("to", "", 0), ("to", "", 1), ("joined", "-e ", 2), ("again", "-q ", 0), ("again", "", 3)]
    {
        let from = |by| format!("receive {options}-f {} {to}", stream(by, n));
        let (theirs, ours) = (both.theirs.run(&from("ours")), both.ours.run(&from("theirs")));
        if to == "joined" {
            // Here the second subvolume is sent as what differs from the first.
            theirs.ok();
            ours.ok();
        } else {
            says(theirs, ours);
        }
    }
    for name in ["to/one", "to/three", "joined/one", "joined/three", "again/three"] {
        let [theirs, ours] = [&both.theirs, &both.ours].map(|side| side.dir.join(name));
        let found = compare_sources(&StdTree::new(&theirs), &StdTree::new(&ours), Aspects::copy());
        let found = found.unwrap();
        assert!(found.is_empty(), "{name}: {found:?}");
    }
    let first = stream("theirs", 0);
    for line in [
        "send home",
        "send snaps/two",
        "send plain",
        "send missing",
        "send /proc",
        "send -p home snaps/one",
        "send --proto 1 --compressed-data snaps/one",
        "receive to",
        "receive missing",
        &format!("receive -f {first} to"),
        &format!("receive -f {first} /proc"),
    ] {
        both.run(line);
    }
    // The other program's code depends on which of its threads fails first: 1, or that of an error.
    for side in [&both.theirs, &both.ours] {
        assert_ne!(side.run("send --proto 9 snaps/one").code, 0);
    }
    larder(args!["umount", &both.ours.dir]).ok();
    both.kernel.take().unwrap().unmount_clean().unwrap();
    btrfs_check(&both.image, true).assert_clean("after receiving");
}

/// Trees of an image with most kinds of items, and of one with a log.
#[test]
fn trees_are_shown_as_the_other_shows_them() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let dir = dir.path().canonicalize().unwrap();
    let side = |program: PathBuf| Side { program, dir: dir.clone(), device: "/dev/none".into() };
    let (theirs, ours) = (side("btrfs".into()), side(link(&dir)));
    mkfs_btrfs(&dir.join("x.img"), 512 << 20, &["-n", "4k"]).unwrap();
    let mount = KernelMount::image(&dir.join("x.img"), "").unwrap();
    fill(mount.path());
    let script = "
        cd home && mkdir names && mknod dev c 5 6 && ln -s target link && truncate -s 1M holes
        for n in $(seq 150); do
            echo $n > \"names/a name $n\"; ln a \"another-name-of-the-file-$n\"
        done
        setfattr -n user.x -v 'some value' a && fallocate -l 100000 reserved && chattr +i holes
        printf x | tee \"$(printf 'odd\\nname')\" && chattr -i holes && sync
        echo more >> a && sync a";
    let run = Command::new("sh").args(["-ec", script]).current_dir(mount.path()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    copy_image(&dir.join("x.img"), &dir.join("log.img")).unwrap();
    mount.unmount_clean().unwrap();
    for image in ["x.img", "log.img"] {
        let roots = theirs.run(&format!("inspect-internal dump-tree -r {image}")).ok().text();
        let root = roots.split("root tree: ").nth(1).unwrap().split(' ').next().unwrap();
        for options in [
            "",
            "--dfs",
            "-t fs",
            "-t 256 --hide-names",
            "--csum-headers --csum-items -t csum",
            "-e",
            "-d",
            "-u",
            "-r",
            "-R",
            "-t 999",
            "-t chunk",
            &format!("-b {root}"),
            &format!("-b {root} --follow"),
        ] {
            let line = format!("inspect-internal dump-tree {options} {image}");
            let (ours, theirs) = (ours.run(&line).ok().text(), theirs.run(&line).ok().text());
            let differs = ours.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs);
            assert_eq!(differs, None, "{line}");
            assert_eq!(ours.len(), theirs.len(), "{line}");
        }
    }
    assert!(theirs.run("inspect-internal dump-tree log.img").text().contains("log tree key"));
    for line in ["-t bogus x.img", "missing", "/dev/null"] {
        assert_ne!(ours.run(&format!("inspect-internal dump-tree {line}")).code, 0, "{line}");
    }
}

/// Items of work on devices and chunks that is under way, or has ended.
#[test]
fn items_of_long_work_are_shown_as_the_other_shows_them() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let dir = dir.path().canonicalize().unwrap();
    let side = |program: PathBuf| Side { program, dir: dir.clone(), device: "/dev/none".into() };
    let (theirs, ours) = (side("btrfs".into()), side(link(&dir)));
    mkfs_btrfs::<&str>(&dir.join("x.img"), 512 << 20, &[]).unwrap();
    let image = Image::from_file(&dir.join("x.img")).unwrap();
    let balance: Vec<u8> = (0..56u64).flat_map(|n| (n * 0x1_0000_0003).to_le_bytes()).collect();
    for state in 0..5u64 {
        // btrfs-progs shows the beginning in the place of the end.
        let item = [7, 1 << 20, 2 << 20, state % 2, state, 1_795_674_718, 1_795_674_718, 3, 4];
        let replace: Vec<u8> = item.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        let mut damage = Damage::on(&image).unwrap();
        damage.insert(ObjectId::DEV_TREE, DevReplace::key(), &replace).unwrap();
        if state == 0 {
            // Flags and filters that are known, of nothing.
            let of_nothing = [&[0; 8], &balance[8..]].concat();
            damage.insert(ObjectId::ROOT_TREE, BalanceItem::key(), &of_nothing).unwrap();
        }
        damage.into_image().write_sparse(&dir.join("x.img")).unwrap();
        for tree in ["dev", "root"] {
            let line = format!("inspect-internal dump-tree -t {tree} x.img");
            let (ours, theirs) = (ours.run(&line).ok().text(), theirs.run(&line).ok().text());
            let differs = ours.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs);
            assert_eq!(differs, None, "{line}, state {state}");
            assert_eq!(ours.len(), theirs.len(), "{line}");
        }
    }
}

/// Other file systems, and what Larder does under another name.
#[test]
fn what_it_does_not_do_is_refused_by_name() {
    let Some(both) = Both::new() else { return };
    let kernel = both.theirs.dir.to_str().unwrap();
    for line in ["subvolume list", "subvolume create", "filesystem df", "property get"] {
        let line = match line {
            "subvolume create" => format!("{line} {kernel}/x"),
            _ => format!("{line} {kernel}"),
        };
        both.ours.run(&line).fails(1, "not a Larder mount").fails(1, "btrfs of the kernel");
    }
    for (line, says) in [
        ("filesystem defragment -r .", "larder map"),
        ("quota enable .", "no quota groups"),
        ("subvolume create -i 1/0 x", "no quota groups"),
        ("subvolume list -d .", "larder stats"),
        ("restore a b", "larder restore"),
    ] {
        both.ours.run(line).fails(1, says);
    }
}
