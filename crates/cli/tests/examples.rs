//! Every command line that the README, the manual and the help texts show does what a person
//! expects of it: it works, as root and as an ordinary user.
//!
//! A shell runs each of them in a directory that has what they name: `disk.img`, `mnt`, `home`,
//! `rootfs`, each as it was at the start. What cannot be there is replaced: devices by files,
//! addresses by those of this image.

mod common;

use common::{Run, command, is_mounted};
use larder_simtest::oracle::{Need, enter_private_namespace, need, required, scratch};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const NOBODY: u32 = 65534;

/// Where examples mount.
const PLACES: [&str; 2] = ["mnt", "home"];

/// The directory that replaces a user's own.
struct Playground {
    dir: tempfile::TempDir,
    user: u32,
    /// Address of a node of the image.
    node: String,
}

/// The image that every example begins with, made on a mount that discards nothing: the commit
/// before the last can be read.
const TEMPLATE: &str = "
    set -e
    mkdir -p mnt home tree rootfs/etc
    echo NAME=Demo | tee tree/file > rootfs/etc/os-release
    mkdir -p rootfs/home rootfs/var overlay
    echo overlay > overlay/hostname
    tar -C rootfs -cf - . | zstd -q > rootfs.tar.zst
    larder mkfs --size 128M template.img
    larder mount -o nodiscard template.img mnt
    mkdir -p mnt/etc mnt/bin mnt/usr mnt/opt mnt/vms mnt/snapshots mnt/var/log mnt/var/cache \
    mnt/tree
    for name in hostname passwd motd os-release; do echo $name > mnt/etc/$name; done
    head -c 2000000 /dev/urandom > mnt/vm.raw
    for name in disk.raw a b vms/1 vms/2 usr/x opt/x; do cat mnt/vm.raw > mnt/$name; done
    larder subvolume create mnt/home mnt/system
    mkdir mnt/home/me
    echo text > mnt/home/me/thesis
    larder subvolume snapshot -r mnt/home mnt/home-monday
    larder sync mnt
    echo later > mnt/home/me/later
    larder subvolume snapshot -r mnt/home mnt/home-tuesday
    larder umount mnt
";

/// `ssh` to another machine, which is this one.
const SSH: &str = "#!/bin/sh
while :; do
    case $1 in
        -p) shift 2 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
shift
exec sh -c \"$*\"
";

/// What `btrfs send` wrote elsewhere.
const STREAM: &[u8] = include_bytes!("../../stream/tests/linux/full.v2");

/// Back to the start. A loop over names keeps it to what there is.
const RESET: &str = "
    rm -rf rescued yesterday sdb1.img other.img full.img root.img root.tar.zst layout unpacked
    rm -rf sdc1.img disk-1.img disk-2.img disk-3.img disk-9.img b.img c.img container.img srv
    rm -rf backup.img thesis base.img
    for name in disk old new broken; do cp --sparse=always template.img $name.img; done
";

impl Playground {
    /// `None` where this user cannot mount.
    fn new(user: u32) -> Option<Self> {
        let dir = scratch();
        let mut here = Self { dir, user, node: String::new() };
        std::os::unix::fs::chown(here.path(), Some(user), Some(user)).unwrap();
        // The command may lie where only root can look. Not copied by this process: see the tests
        // of mounts.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_larder"))
            .arg(here.path().join("larder"))
            .status();
        assert!(copied.unwrap().success());
        let ssh = here.path().join("ssh");
        std::fs::write(&ssh, SSH).unwrap();
        std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).unwrap();
        let stream = here.path().join("monday.stream");
        std::fs::write(&stream, STREAM).unwrap();
        std::os::unix::fs::chown(&stream, Some(user), Some(user)).unwrap();
        let made = here.sh(TEMPLATE);
        if made.code != 0
            && user != 0
            && ["fusermount3", "/dev/fuse"].iter().any(|w| made.err.contains(w))
        {
            assert!(!required(), "{}", made.err);
            eprintln!("skipped: needs fusermount3 and /dev/fuse for ordinary users: {}", made.err);
            return None;
        }
        made.ok();
        let supers = here.sh("larder inspect super --json template.img").ok().json();
        here.node = supers[0]["root"].to_string();
        Some(here)
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn sh(&self, script: &str) -> Run {
        let path =
            format!("{}:{}", self.path().display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).current_dir(self.path()).env("PATH", path).stdin(Stdio::null());
        shell
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("LARDER_LOG")
            .env_remove("SOURCE_DATE_EPOCH")
            .env_remove("XDG_STATE_HOME")
            .env("HOME", self.path());
        if self.user != 0 {
            shell.uid(self.user).gid(self.user);
        }
        shell.output().unwrap().into()
    }

    fn unmount(&self) {
        for place in PLACES.into_iter().filter(|place| is_mounted(&self.path().join(place))) {
            self.sh(&format!("larder umount {place}")).ok();
        }
    }

    /// Runs a command line as it stands there, from the start.
    fn tries(&self, example: &str) {
        let line = self.here(example);
        self.sh(RESET).ok();
        self.sh(preparation(&line)).ok();
        if line.contains("mnt") && !line.contains("larder mount") {
            self.sh("larder mount disk.img mnt").ok();
            if line.contains("mnt/home mnt/home-monday") && line.contains("snapshot") {
                self.sh("larder subvolume delete mnt/home-monday").ok();
            }
            // These are of use while a scrub runs, so it has to take long.
            if ["cancel", "limit", "resume"].iter().any(|w| line.contains(&format!("scrub {w}"))) {
                self.sh("larder scrub start --limit 4K mnt").ok();
            }
            if line.starts_with("larder scrub resume") {
                self.sh("larder scrub cancel mnt").ok();
            }
        }
        let line = match line.contains("--foreground") {
            // Until it is asked to end.
            true => format!(
                "{line} & p=$!; until larder sync mnt 2>/dev/null; do :; done; kill $p; wait $p"
            ),
            false => line,
        };
        let run = self.sh(&line);
        assert_eq!(run.code, 0, "{example}, run as {line}: {}", run.err);
        self.unmount();
    }

    /// The same with what this directory has.
    fn here(&self, example: &str) -> String {
        example
            .replace("30441472", &self.node)
            .replace("/dev/sdb1", "sdb1.img")
            .replace("/dev/sdc1", "sdc1.img")
            .replace("/mnt/rescued", "rescued")
            .replace(" /mnt", " mnt")
            .replace("/srv/", &format!("{}/srv/", self.path().display()))
            .replace("fallocate -l 8G", "fallocate -l 128M")
            .replace("a.img", "other.img")
    }
}

impl Drop for Playground {
    fn drop(&mut self) {
        for place in
            PLACES.map(|place| self.path().join(place)).into_iter().filter(|p| is_mounted(p))
        {
            let _ = command().args(["umount", "--lazy"]).arg(place).output();
        }
    }
}

/// What the examples presuppose.
fn preparation(line: &str) -> &'static str {
    if line.contains("backup.img") && line.contains("mkfs") {
        "mkdir srv"
    } else if line.contains("backup.img") {
        "set -e
        mkdir srv
        larder mkfs --size 128M srv/backup.img
        ln -s srv/backup.img backup.img
        larder mkdir disk.img:/.snapshots
        larder subvolume snapshot -r disk.img:/home disk.img:/.snapshots/home.20251118T040000Z
        larder backup disk.img:/home backup.img:/"
    } else if line.contains("seed on") {
        "larder mkfs --size 128M base.img"
    } else if line.contains("seed off") {
        "larder mkfs --size 128M base.img
        larder seed on base.img"
    } else if line.contains("device replace") {
        "set -e
        rm new.img
        truncate -s 256M new.img
        larder mkfs --size 128M -d raid1 -m raid1 disk-1.img disk-2.img"
    } else if line.contains("device add") && line.contains("disk-1.img") {
        "larder mkfs --size 128M -d raid1 -m raid1 disk-1.img disk-2.img
        truncate -s 128M sdc1.img"
    } else if line.contains("device remove missing") {
        "larder mkfs --size 256M -d raid1 -m raid1 disk-1.img disk-2.img disk-3.img
        rm disk-3.img"
    } else if line.contains("device remove") && line.contains("disk-1.img") {
        "larder mkfs --size 256M -d raid1 -m raid1 disk-1.img disk-2.img disk-3.img"
    } else if line.contains("device remove") {
        "larder device add --size 1G disk-9.img disk.img"
    } else if line.contains("disk-1.img") && !line.contains("mkfs") {
        "larder mkfs --size 128M -d raid1 -m raid1 disk-1.img disk-2.img"
    // A new image, or one that is made over.
    } else if line.contains("mkfs") && line.contains("sdb1.img") {
        "truncate -s 128M sdb1.img sdc1.img"
    } else if line.contains("mkfs --nodiscard full.img") {
        "fallocate -l 128M full.img"
    } else if line.contains("mkfs") {
        "rm disk.img"
    } else if line.contains("sdb1.img") {
        "cp --sparse=always template.img sdb1.img"
    } else if line.contains("oci:layout") {
        "larder extract disk.img:/etc --oci layout:v1"
    } else if line.contains("subvolume create") {
        "larder subvolume delete disk.img:/home-monday disk.img:/home"
    } else {
        "true"
    }
}

/// A document of the repository.
fn document(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Command lines in blocks of a document that lie between two marks, without their comments.
fn in_blocks(document: &str, begin: &str, end: &str) -> Vec<String> {
    let blocks = document.split(begin).skip(1).filter_map(|rest| rest.split(end).next());
    let lines = blocks.flat_map(str::lines).map(|line| line.split(" #").next().unwrap_or_default());
    let is_ours = |line: &&str| line.starts_with("larder ") || line.starts_with("ssh nas larder ");
    lines.map(str::trim).filter(is_ours).map(str::to_owned).collect()
}

/// Command lines that the README and the manual show, each once.
fn of_the_documents() -> Vec<String> {
    let mut lines = in_blocks(&document("README.md"), "```sh\n", "```");
    lines.extend(in_blocks(&document("docs/man/larder.8"), ".Bd -literal", ".Ed"));
    let mut seen = std::collections::HashSet::new();
    lines.retain(|line| seen.insert(line.clone()));
    lines
}

/// Examples of a help text and of those of its subcommands.
fn of_the_help(of: &[&str], out: &mut Vec<String>) {
    let text = Run::from(command().args(of).arg("--help").output().unwrap()).ok().text();
    let examples = text.lines().skip_while(|line| !line.starts_with("Example")).skip(1);
    out.extend(
        examples.take_while(|line| line.starts_with("  ")).map(|line| line.trim().to_owned()),
    );
    let Some(commands) = text.split("\nCommands:\n").nth(1) else { return };
    for line in commands.lines().take_while(|line| !line.is_empty()) {
        // Others go on with what the one before does.
        let name = line
            .strip_prefix("  ")
            .and_then(|l| l.split(' ').next())
            .filter(|name| !name.is_empty());
        if let Some(name) = name.filter(|name| *name != "help") {
            of_the_help(&[of, &[name]].concat(), out);
        }
    }
}

fn all_work(user: u32, examples: &[String]) {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    enter_private_namespace().unwrap();
    let Some(here) = Playground::new(user) else { return };
    examples.iter().for_each(|example| here.tries(example));
}

#[test]
fn what_the_documents_show_works() {
    let examples = of_the_documents();
    assert!(examples.len() >= 40, "{examples:#?}");
    all_work(0, &examples);
}

#[test]
fn what_the_documents_show_works_for_ordinary_users() {
    all_work(NOBODY, &of_the_documents());
}

#[test]
fn what_the_help_shows_works() {
    let mut examples = Vec::new();
    of_the_help(&[], &mut examples);
    assert!(examples.len() >= 60, "{examples:#?}");
    all_work(0, &examples);
}
