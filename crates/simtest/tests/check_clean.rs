//! `larder check` finds nothing in sound images: of every kind that Linux makes, populated, with
//! snapshots, and in an unfinished state (a deleted subvolume half removed, a file without a name,
//! a log that waits to be replayed).
//!
//! A checker with false alarms is not believed. Where the image is at rest, `btrfs check` has to
//! agree.

use anyhow::{Context, Result};
use larder_check::{Kind, Options, Report, Severity};
use larder_fs::mkfs::{Features, MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, btrfs, btrfs_check, copy_image, kernel_images, mkfs_btrfs, need,
    populate, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

fn check(image: &Path) -> Report {
    let device: Arc<dyn Device> =
        Arc::new(FileDevice::open(image, OpenMode::Read).expect("an image"));
    larder_check::check(&[device], &Options { data: true, ..Options::default() }, &|_| ())
        .expect("it can be checked")
}

/// No errors and no warnings; notes are allowed.
#[track_caller]
fn assert_sound(report: &Report, what: &str) {
    let said: Vec<String> = report
        .findings
        .iter()
        .filter(|f| f.severity() != Severity::Note)
        .map(|f| format!("{}: {:?} {:?}: {}", f.kind, f.tree, f.key, f.what))
        .collect();
    assert!(said.is_empty(), "{what}: {said:#?}");
    assert!(report.is_clean());
}

fn needs_linux() -> bool {
    need(&[Need::MkfsBtrfs, Need::KernelBtrfs])
}

fn subvolume(args: &[&str], paths: &[&Path]) -> Result<()> {
    let mut all: Vec<&std::ffi::OsStr> = vec!["subvolume".as_ref()];
    all.extend(args.iter().map(|a| std::ffi::OsStr::new(*a)));
    all.extend(paths.iter().map(|p| p.as_os_str()));
    btrfs(&all).map(drop)
}

fn freeze(top: &Path, what: &str) {
    let done = std::process::Command::new("fsfreeze")
        .arg(what)
        .arg(top)
        .status()
        .expect("fsfreeze of util-linux");
    assert!(done.success(), "fsfreeze {what}");
}

/// Every kind of image that Linux makes, with everything that the format can hold.
#[test]
fn images_of_linux_are_sound() {
    if !needs_linux() {
        return;
    }
    let few = Fixture { entries: 60, large_file: 1 << 20, fragments: 300, links: 40 };
    for (n, variant) in kernel_images().into_iter().enumerate() {
        let dir = scratch();
        let image = dir.path().join("image");
        variant.make(&image, 256 << 20).unwrap();
        let empty = check(&image);
        assert_sound(&empty, &format!("{} empty", variant.name));
        let compress = ["", "compress=zstd", "compress-force=lzo", "compress=zlib"][n % 4];
        let options = [variant.mount.as_str(), compress].join(",");
        let mount = KernelMount::image(&image, options.trim_matches(',')).unwrap();
        populate(mount.path(), &few).unwrap();
        mount.unmount_clean().unwrap();
        let report = check(&image);
        assert_sound(&report, &variant.name);
        let s = report.stats;
        assert!(
            s.inodes > 100 && s.extents > 100 && s.data_bytes > 1 << 20,
            "{}: {s:?}",
            variant.name
        );
    }
}

/// Snapshots of snapshots with changes on every side, a deleted one among them, quotas on.
#[test]
fn snapshots_and_quotas() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    mkfs_btrfs(&image, 512 << 20, &["-n", "4096"]).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    let top = mount.path();
    btrfs(&["quota".as_ref(), "enable".as_ref(), top.as_os_str()]).unwrap();
    subvolume(&["create"], &[&top.join("s0")]).unwrap();
    for n in 0..600 {
        std::fs::write(top.join(format!("s0/file-{n:04}")), vec![b'x'; n * 37]).unwrap();
    }
    for generation in 1..12usize {
        let (from, to) =
            (top.join(format!("s{}", generation / 2)), top.join(format!("s{generation}")));
        subvolume(&["snapshot"], &[&from, &to]).unwrap();
        for n in 0..30 {
            let name = format!("file-{:04}", (n * 19 + generation * 7) % 600);
            let _ = std::fs::remove_file(from.join(&name));
            std::fs::write(to.join(&name), format!("{generation} {n}").repeat(n * 20)).unwrap();
            std::fs::hard_link(to.join(&name), to.join(format!("{name}-{generation}-{n}")))
                .unwrap();
        }
    }
    mount.sync().unwrap();
    for gone in [3, 7] {
        subvolume(&["delete"], &[&top.join(format!("s{gone}"))]).unwrap();
    }
    mount.unmount_clean().unwrap();
    let report = check(&image);
    assert_sound(&report, "snapshots");
    assert!(!report.found(Kind::QuotasOutOfDate), "nothing was compared: {:?}", report.counts);
    btrfs_check(&image, true).assert_clean("snapshots");
}

/// Linux keeps a version 1 cache of large block groups only.
#[test]
fn a_space_cache_is_compared() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    mkfs_btrfs(&image, 4 << 30, &["-O", "^free-space-tree,^block-group-tree"]).unwrap();
    let mount = KernelMount::image(&image, "space_cache=v1").unwrap();
    std::fs::write(mount.join("file"), vec![b'x'; 100_000]).unwrap();
    mount.unmount_clean().unwrap();
    let report = check(&image);
    assert_sound(&report, "with a space cache");
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

/// Images copied from under the kernel, as a power cut would leave them.
#[test]
fn images_in_the_midst_of_things() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let (image, copy) = (dir.path().join("image"), dir.path().join("copy"));
    mkfs_btrfs(&image, 512 << 20, &["-n", "4096"]).unwrap();
    let mount = KernelMount::image(&image, "commit=300").unwrap();
    let top = mount.path();
    subvolume(&["create"], &[&top.join("doomed")]).unwrap();
    for n in 0..3000 {
        std::fs::write(top.join(format!("doomed/{n}")), vec![b'd'; 3000]).unwrap();
    }
    subvolume(&["snapshot"], &[&top.join("doomed"), &top.join("alive")]).unwrap();
    std::fs::write(top.join("kept"), b"kept").unwrap();
    std::fs::write(top.join("nameless"), vec![b'n'; 100_000]).unwrap();
    mount.sync().unwrap();
    // A file without a name that is still open has an orphan item.
    let nameless = File::open(top.join("nameless")).unwrap();
    std::fs::remove_file(top.join("nameless")).unwrap();
    subvolume(&["delete", "-c"], &[&top.join("doomed")]).unwrap();
    // A log: several files, a rename, an unlink, data.
    for n in 0..40 {
        let mut file = File::create(top.join(format!("logged-{n}"))).unwrap();
        file.write_all(&vec![b'l'; n * 1000]).unwrap();
        file.sync_all().unwrap();
    }
    std::fs::rename(top.join("logged-1"), top.join("renamed")).unwrap();
    File::open(top.join("renamed")).unwrap().sync_all().unwrap();
    copy_image(&image, &copy).unwrap();
    let report = check(&copy);
    assert_sound(&report, "with a log");
    assert!(report.found(Kind::LogPresent), "{:?}", report.counts);
    drop(nameless);
    mount.unmount_clean().unwrap();
    assert_sound(&check(&image), "afterwards");

    // While the cleaner is at work: a frozen file system is at rest between two of its steps.
    let mount = KernelMount::image(&image, "commit=1").unwrap();
    subvolume(&["delete", "-c"], &[&mount.join("alive")]).unwrap();
    for _ in 0..10 {
        freeze(mount.path(), "--freeze");
        let copied = copy_image(&image, &copy);
        freeze(mount.path(), "--unfreeze");
        copied.unwrap();
        assert_sound(&check(&copy), "while a subvolume is dropped");
    }
    mount.unmount_clean().unwrap();
    assert_sound(&check(&image), "at the end");
}

/// Power cuts while Linux moves everything: relocation trees, half-moved block groups. The image
/// lies on a file system that can clone it, so each copy is what was there in one moment.
#[test]
fn interrupted_balances_are_sound() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let outer = dir.path().join("outer");
    mkfs_btrfs(&outer, 2 << 30, &["-q"]).unwrap();
    let outer = KernelMount::image(&outer, "nodatasum").unwrap();
    let image = outer.join("image");
    let mut relocating = 0;
    for features in ["", "^block-group-tree,^free-space-tree,^no-holes"] {
        let mut options = vec!["-n", "4096"];
        if !features.is_empty() {
            options.extend(["-O", features]);
        }
        mkfs_btrfs(&image, 512 << 20, &options).unwrap();
        let mount = KernelMount::image(&image, "commit=1").unwrap();
        let first = mount.join("s0");
        subvolume(&["create"], &[&first]).unwrap();
        for n in 0..4000 {
            std::fs::write(first.join(format!("file-{n}")), vec![b'x'; 200 + n % 900]).unwrap();
        }
        for n in 0..20u32 {
            let noise: Vec<u8> =
                (0..300_000u32).map(|i| (i.wrapping_mul(n + 77) >> 7) as u8).collect();
            std::fs::write(first.join(format!("large-{n}")), noise).unwrap();
        }
        for n in 1..6 {
            subvolume(&["snapshot"], &[&first, &mount.join(format!("s{n}"))]).unwrap();
            for k in (n..600).step_by(7) {
                std::fs::write(first.join(format!("file-{k}")), b"changed").unwrap();
            }
        }
        mount.sync().unwrap();
        for (what, n) in [("-m", 0), ("-d", 1), ("--full-balance", 2)] {
            let balance = || {
                std::process::Command::new("btrfs")
                    .args(["balance", "start", what])
                    .arg(mount.path())
                    .stderr(std::process::Stdio::null())
                    .spawn()
            };
            let mut balance = balance().unwrap();
            let mut copies = Vec::new();
            while copies.len() < 15 && balance.try_wait().unwrap().is_none() {
                let copy = outer.join(format!("copy-{n}-{}", copies.len()));
                let (from, to) = (File::open(&image).unwrap(), File::create_new(&copy).unwrap());
                rustix::fs::ioctl_ficlone(&to, &from).unwrap();
                copies.push(copy);
            }
            // It may have ended by itself.
            let _ = btrfs(&["balance".as_ref(), "cancel".as_ref(), mount.path().as_os_str()]);
            balance.wait().unwrap();
            for copy in copies {
                let mut report = check(&copy);
                // A power cut between two copies of the superblock is what that warning is for.
                report.findings.retain(|f| f.kind != Kind::SuperMirrorGeneration);
                assert_sound(&report, &format!("{}, balance {what}", copy.display()));
                let judged = relocating < 3 && report.found(Kind::RelocationInterrupted);
                if judged {
                    btrfs_check(&copy, true).assert_clean("in the midst of a balance");
                }
                relocating += usize::from(report.found(Kind::RelocationInterrupted));
                std::fs::remove_file(&copy).unwrap();
            }
        }
        mount.unmount_clean().unwrap();
        assert_sound(&check(&image), "after the balances");
        std::fs::remove_file(&image).unwrap();
    }
    assert!(relocating > 0, "no copy was made while something was moved");
    outer.unmount_clean().unwrap();
}

/// Several devices: what cannot be checked is refused by name, and what is given whole is either
/// checked or refused.
#[test]
fn several_devices_are_refused_by_name_or_checked() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let open = |n: u32| -> Arc<dyn Device> {
        Arc::new(FileDevice::open(dir.path().join(format!("device-{n}")), OpenMode::Read).unwrap())
    };
    let check = |devices: &[Arc<dyn Device>]| {
        larder_check::check(devices, &Options { data: true, ..Options::default() }, &|_| ())
    };
    for (n, profiles) in
        [["single", "raid1"], ["raid1", "raid1"], ["raid0", "raid0"], ["single", "single"]]
            .into_iter()
            .enumerate()
    {
        let (a, b) = (2 * n as u32, 2 * n as u32 + 1);
        let paths = [a, b].map(|n| dir.path().join(format!("device-{n}")));
        for path in &paths {
            File::create_new(path).unwrap().set_len(300 << 20).unwrap();
        }
        let made = std::process::Command::new("mkfs.btrfs")
            .args(["-q", "-d", profiles[0], "-m", profiles[1]])
            .args(&paths)
            .status();
        assert!(made.unwrap().success());
        for one in [a, b] {
            match check(&[open(one)]) {
                Err(e) => assert!(e.to_string().contains("2 devices"), "{profiles:?}: {e}"),
                Ok(report) => {
                    assert!(!report.is_clean(), "{profiles:?}: half of it is not all of it");
                    let named = [Kind::DeviceMissing, Kind::SuperNumDevices]
                        .iter()
                        .any(|k| report.found(*k));
                    assert!(named, "{profiles:?}: {:?}", report.counts);
                }
            }
        }
        match check(&[open(a), open(b)]) {
            Err(e) => assert!(
                e.to_string().contains("profile") || e.to_string().contains("devices"),
                "{e}"
            ),
            Ok(report) => assert_sound(&report, &format!("{profiles:?}")),
        }
    }
}

/// What Larder makes itself.
#[test]
fn images_of_larder_are_sound() {
    let dir = scratch();
    for (nodesize, mixed) in [(4096, false), (4096, true), (16384, false), (65536, false)] {
        let image = dir.path().join(format!("image-{nodesize}-{mixed}"));
        make_with_larder(&image, nodesize, mixed).unwrap();
        let report = check(&image);
        assert_sound(&report, &format!("nodes of {nodesize}, mixed {mixed}"));
        assert!(
            report.stats.inodes >= 700 && report.stats.data_bytes > 1 << 20,
            "{:?}",
            report.stats
        );
    }
}

fn make_with_larder(image: &Path, nodesize: u32, mixed: bool) -> Result<()> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::create(image, 256 << 20)?);
    let features = Features { mixed, ..Features::default() };
    let options = MkfsOptions { nodesize: Some(nodesize), features, ..MkfsOptions::default() };
    mkfs(&*device, &options).context("mkfs")?;
    let fs = Filesystem::open(device, OpenOptions::default())?;
    let root = fs.root();
    let new =
        |kind, target| NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target, xattrs: &[] };
    for n in 0..20u32 {
        let name = format!("directory-{n}");
        let dir = fs.create(root, name.as_bytes(), &new(FileKind::Directory, b""))?.id;
        for k in 0..40u32 {
            let name = format!("file-{k}");
            let file = fs.create(dir, name.as_bytes(), &new(FileKind::Regular, b""))?.id;
            fs.write(file, u64::from(k % 3) * 5000, &vec![b'a'; (n * k * 13) as usize])?;
            if k % 5 == 0 {
                fs.link(file, dir, format!("link-{k}").as_bytes())?;
            }
            if k % 7 == 0 {
                fs.unlink(dir, name.as_bytes())?;
            }
        }
    }
    fs.close()?;
    Ok(())
}

/// One byte of data changed: found with the data read, not without.
#[test]
fn data_is_read_only_when_asked_for() {
    if !needs_linux() {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("image");
    mkfs_btrfs(&image, 256 << 20, &["-m", "single", "-d", "single"]).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    let pattern: Vec<u8> = b"a pattern that is nowhere else ".repeat(1000);
    std::fs::write(mount.join("file"), &pattern).unwrap();
    mount.unmount_clean().unwrap();
    let bytes = std::fs::read(&image).unwrap();
    let at =
        bytes.windows(31).position(|w| w == &pattern[..31]).expect("the data in the image") as u64;
    File::options().write(true).open(&image).unwrap().write_all_at(b"B", at + 5000).unwrap();
    let report = check(&image);
    assert!(report.found(Kind::DataChecksum) && report.errors() == 1, "{:?}", report.counts);
    let finding = report.findings.iter().find(|f| f.kind == Kind::DataChecksum).unwrap();
    assert_eq!(finding.tree.map(|t| t.0), Some(5));
    assert_eq!(finding.device.map(|(_, at)| at.0), Some(at + 4096));
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, OpenMode::Read).unwrap());
    assert!(larder_check::check(&[device], &Options::default(), &|_| ()).unwrap().is_clean());
}
