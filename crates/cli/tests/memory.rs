//! The daemon's memory stays within what it was given, whatever is done with the mount.

mod common;

use common::{command, command_in, larder};
use larder_simtest::oracle::{
    MemoryCgroup, Need, btrfs_check, enter_private_namespace, need, scratch,
};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

const MIB: u64 = 1 << 20;
/// Blocks of which a few bytes are written each.
const SCATTERED: u64 = 20_000;
/// Most that one batch of write-back needs beside the data.
const WRITE_BACK: u64 = 24 << 20;

/// A mount whose daemon is a child of the test.
struct Daemon {
    child: Child,
    point: PathBuf,
    /// Largest anonymous memory seen.
    peak: u64,
}

impl Daemon {
    fn start(
        image: &Path,
        point: &Path,
        cache_mib: u64,
        compress: &str,
        group: Option<&MemoryCgroup>,
    ) -> Self {
        let mut command = command_in(group);
        command.args([
            "mount",
            "--foreground",
            "--cache-size",
            &format!("{cache_mib}M"),
            "-o",
            compress,
        ]);
        command.arg(image).arg(point).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the daemon starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("is mounted on"), "{line}");
        Self { child, point: point.to_owned(), peak: 0 }
    }
    fn look(&mut self) {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line =
            status.lines().find_map(|l| l.strip_prefix("RssAnon:")).expect("the daemon lives");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        self.peak = self.peak.max(kib << 10);
    }
    fn unmount(mut self) {
        larder(args!["umount", &self.point]).ok();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = command().args(["umount", "--lazy"]).arg(&self.point).output();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn block(n: u64) -> Vec<u8> {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(512)
}

/// What is done with a mount, and with how much memory.
struct Scenario {
    cache_mib: u64,
    stream_mib: u64,
    files: u64,
    compress: &'static str,
    /// Of the memory cgroup, in bytes.
    limit: Option<u64>,
}

/// Blocks of the stream that are written a second time.
const REWRITTEN: u64 = 8000;

impl Scenario {
    /// A stream, blocks written here and there, many small files, and a look at all of it.
    fn run(&self) {
        enter_private_namespace().unwrap();
        let group = self.limit.map(|bytes| MemoryCgroup::new(bytes).unwrap());
        // On a disk: what tmpfs holds would count as the daemon's.
        let dir = match self.limit {
            Some(_) => tempfile::tempdir_in("/var/tmp").unwrap(),
            None => scratch(),
        };
        let (image, point) = (dir.path().join("img"), dir.path().join("mnt"));
        fs::create_dir(&point).unwrap();
        larder(args!["mkfs", "--size", "3G", &image]).ok();
        let start = || Daemon::start(&image, &point, self.cache_mib, self.compress, group.as_ref());

        let mut daemon = start();
        let stream = self.write_stream(&mut daemon);
        write_scattered(&mut daemon);
        self.write_files(&mut daemon);
        self.budgets_are_kept(&point);
        daemon.look();
        let peak = daemon.peak;
        drop(stream);
        daemon.unmount();

        let mut daemon = start();
        self.read_files(&mut daemon);
        self.read_stream(&mut daemon);
        read_scattered(&daemon);
        fs::remove_dir_all(point.join("d0")).unwrap();
        daemon.look();
        let peak = peak.max(daemon.peak);
        daemon.unmount();
        let said = format!(
            "{} MiB of anonymous memory at most, with a cache of {}",
            peak >> 20,
            self.cache_mib
        );
        println!("{said}");
        // The rings of the transport have up to 64 MiB of their own.
        assert!(peak <= (self.cache_mib + 96) * MIB, "{said}");
        if let Some(group) = group {
            assert_eq!(group.kills().unwrap(), 0);
        }
        let report = btrfs_check(&image, false);
        assert!(report.is_clean(), "{report}");
    }

    /// Blocks from one that is written a second time to the next.
    fn stride(&self) -> u64 {
        self.stream_mib * 256 / REWRITTEN
    }

    fn write_stream(&self, daemon: &mut Daemon) -> File {
        let piece = block(1).repeat(256);
        let stream = File::create(daemon.point.join("stream")).unwrap();
        for m in 0..self.stream_mib {
            stream.write_all_at(&piece, m * MIB).unwrap();
            if m % 16 == 0 {
                daemon.look();
            }
        }
        for n in 0..REWRITTEN {
            // 7 and 8000 have no common divisor: each once, not in order.
            let at = (n * 7 % REWRITTEN) * self.stride();
            stream.write_all_at(&block(at), at * 4096).unwrap();
            if n % 500 == 0 {
                daemon.look();
            }
        }
        stream
    }

    fn read_stream(&self, daemon: &mut Daemon) {
        let stream = File::open(daemon.point.join("stream")).unwrap();
        let (mut buffer, plain) = (vec![0; MIB as usize], block(1));
        for m in 0..self.stream_mib {
            stream.read_exact_at(&mut buffer, m * MIB).unwrap();
            for (n, found) in (m * 256..).zip(buffer.chunks_exact(4096)) {
                let rewritten = n.is_multiple_of(self.stride()) && n / self.stride() < REWRITTEN;
                assert!(found == if rewritten { block(n) } else { plain.clone() }, "block {n}");
            }
            if m % 16 == 0 {
                daemon.look();
            }
        }
    }

    fn write_files(&self, daemon: &mut Daemon) {
        for n in 0..self.files {
            let sub = daemon.point.join(format!("d{}", n / 200));
            if n % 200 == 0 {
                fs::create_dir(&sub).unwrap();
            }
            fs::write(sub.join(format!("file-{n}")), content(n)).unwrap();
            if n % 500 == 0 {
                daemon.look();
            }
        }
    }

    fn read_files(&self, daemon: &mut Daemon) {
        let mut found = 0;
        let all = fs::read_dir(&daemon.point).unwrap().map(Result::unwrap);
        for sub in all.filter(|e| e.path().is_dir()) {
            for entry in fs::read_dir(sub.path()).unwrap() {
                let entry = entry.unwrap();
                let n: u64 = entry.file_name().to_str().unwrap()[5..].parse().unwrap();
                assert_eq!(entry.metadata().unwrap().len(), n * 37 % 4096);
                if n.is_multiple_of(100) {
                    assert!(fs::read(entry.path()).unwrap() == content(n));
                    daemon.look();
                }
                found += 1;
            }
        }
        assert_eq!(found, self.files);
    }

    fn budgets_are_kept(&self, point: &Path) {
        let stats = larder(args!["stats", "--json", point]).ok().json();
        for name in ["delayed_data", "write_back", "clean_nodes", "transaction"] {
            let part = &stats["engine"]["memory"][name];
            let (held, budget) = (part["held"].as_u64().unwrap(), part["budget"].as_u64().unwrap());
            // A batch that needs more than there is of its part waits until it is alone.
            let most = if name == "write_back" { budget.max(WRITE_BACK) } else { budget };
            assert!(held <= most && budget < self.cache_mib * MIB, "{stats}");
        }
    }
}

/// What the small file of this number holds.
fn content(n: u64) -> Vec<u8> {
    let mut bytes = block(n);
    bytes.truncate((n as usize * 37) % 4096);
    bytes
}

/// A few bytes in each of many blocks: most of what is written back has to be made up.
fn write_scattered(daemon: &mut Daemon) {
    let scattered = File::create(daemon.point.join("scattered")).unwrap();
    for n in 0..SCATTERED {
        scattered.write_all_at(&block(n)[..100], n * 4096 + n % 3 * 1000).unwrap();
        if n % 1000 == 0 {
            daemon.look();
        }
    }
    scattered.set_len(SCATTERED * 4096).unwrap();
}

fn read_scattered(daemon: &Daemon) {
    let scattered = File::open(daemon.point.join("scattered")).unwrap();
    let mut found = vec![0; 4096];
    for n in 0..SCATTERED {
        scattered.read_exact_at(&mut found, n * 4096).unwrap();
        let mut expected = vec![0; 4096];
        let at = (n % 3 * 1000) as usize;
        expected[at..at + 100].copy_from_slice(&block(n)[..100]);
        assert!(found == expected, "block {n}");
    }
}

#[test]
fn data_of_twenty_times_the_cache_size_takes_no_more_memory() {
    if need(&[Need::Fuse, Need::Root, Need::BtrfsProgs]) {
        Scenario {
            cache_mib: 32,
            stream_mib: 640,
            files: 4000,
            compress: "compress=none",
            limit: None,
        }
        .run();
    }
}

#[test]
fn a_mount_lives_in_a_memory_cgroup() {
    if need(&[Need::Fuse, Need::Root, Need::BtrfsProgs, Need::MemoryCgroup]) {
        for (files, compress) in [(12_000, "compress=none"), (4000, "compress-force=zstd:9")] {
            let limit = Some(256 * MIB);
            Scenario { cache_mib: 128, stream_mib: 400, files, compress, limit }.run();
        }
    }
}
