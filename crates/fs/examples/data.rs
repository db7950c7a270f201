//! How fast data is written and read: `data IMAGE FILES MIB THREADS`. Makes a file system on IMAGE;
//! then FILES files with the sizes of a source tree, and one of MIB MiB, are written and read back.

use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions};
use larder_volume::{FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const NEW: NewInode<'static> = NewInode {
    kind: FileKind::Regular,
    perm: 0o644,
    uid: 0,
    gid: 0,
    rdev: 0,
    target: b"",
    xattrs: &[],
};

fn open(image: &Path) -> Arc<Filesystem> {
    let device = Arc::new(FileDevice::open(image, OpenMode::Write).unwrap());
    Filesystem::open(device, OpenOptions::default()).unwrap()
}

/// Sizes spread like those of a kernel tree: median 5 KiB, mean 15 KiB.
fn size(n: u64) -> usize {
    let x = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let unit = x as f64 / (1u64 << 24) as f64;
    (((unit - 0.5) * 5.5).exp() * 5000.0) as usize
}

fn cpu() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = text.rsplit(')').next().unwrap_or_default();
    let ticks = |i: usize| {
        after.split_whitespace().nth(i).and_then(|t| t.parse::<f64>().ok()).unwrap_or(0.0)
    };
    (ticks(11) + ticks(12)) / 100.0
}

/// How much is done: so many things, of so many bytes together.
struct Amount {
    count: u64,
    bytes: u64,
}

fn timed<T>(what: &str, amount: Amount, f: impl FnOnce() -> T) -> T {
    let Amount { count, bytes } = amount;
    let (since, before) = (Instant::now(), cpu());
    let out = f();
    let s = since.elapsed().as_secs_f64();
    let mib = bytes as f64 / 1_048_576.0 / s;
    let each = s / count as f64 * 1e6;
    println!(
        "{what:12} {s:6.2} s, cpu {:6.2} s, {each:8.1} µs each, {mib:7.0} MiB/s",
        cpu() - before
    );
    out
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let image = Path::new(&args[1]);
    let n = |i: usize| args[i].parse::<u64>().unwrap();
    let (files, mib, threads) = (n(2), n(3), n(4));
    let device = FileDevice::create(image, 8 << 30).unwrap();
    mkfs(&device, &MkfsOptions { force: true, ..MkfsOptions::default() }).unwrap();
    drop(device);
    let fs = open(image);
    let source: Vec<u8> =
        (0..4 << 20u32).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let total: u64 = (0..files).map(|n| size(n) as u64).sum();
    let dirs: Vec<InodeId> = (0..threads)
        .map(|t| {
            let new = NewInode { kind: FileKind::Directory, perm: 0o755, ..NEW };
            fs.create(fs.root(), format!("d{t}").as_bytes(), &new).unwrap().id
        })
        .collect();
    let each = |f: &(dyn Fn(u64, u64) + Sync)| {
        std::thread::scope(|s| {
            for t in 0..threads {
                s.spawn(move || (t..files).step_by(threads as usize).for_each(|n| f(t, n)));
            }
        });
    };
    if files > 0 {
        timed("create+write", Amount { count: files, bytes: total }, || {
            each(&|t, n| {
                let id =
                    fs.create(dirs[t as usize], format!("file{n}").as_bytes(), &NEW).unwrap().id;
                let mut at = 0;
                // As tar writes them.
                for piece in source[..size(n)].chunks(10 << 10) {
                    fs.write(id, at, piece).unwrap();
                    at += piece.len() as u64;
                }
            });
        });
        timed("sync", Amount { count: files, bytes: total }, || fs.sync().unwrap());
    }
    let big = fs.create(fs.root(), b"big", &NEW).unwrap().id;
    let bytes = mib << 20;
    if mib > 0 {
        timed("seq write", Amount { count: mib, bytes }, || {
            for i in 0..mib {
                fs.write(big, i << 20, &source[..1 << 20]).unwrap();
            }
        });
        timed("sync", Amount { count: mib, bytes }, || fs.sync().unwrap());
    }
    let stats = fs.stats();
    fs.close().unwrap();
    drop(fs);
    let fs = open(image);
    if files > 0 {
        let dirs: Vec<_> = (0..threads)
            .map(|t| fs.lookup(fs.root(), format!("d{t}").as_bytes()).unwrap().id)
            .collect();
        timed("read files", Amount { count: files, bytes: total }, || {
            each(&|t, n| {
                let id = fs.lookup(dirs[t as usize], format!("file{n}").as_bytes()).unwrap().id;
                let mut buf = vec![0; size(n)];
                assert_eq!(fs.read(id, 0, &mut buf).unwrap(), buf.len());
                assert!(buf == source[..buf.len()]);
            });
        });
    }
    if mib > 0 {
        let mut buf = vec![0; 1 << 20];
        for _ in 0..2 {
            timed("seq read", Amount { count: mib, bytes }, || {
                for i in 0..mib {
                    assert_eq!(fs.read(big, i << 20, &mut buf).unwrap(), 1 << 20);
                }
            });
        }
        timed("read 128k", Amount { count: mib * 8, bytes }, || {
            for i in 0..mib * 8 {
                fs.read(big, i << 17, &mut buf[..128 << 10]).unwrap();
            }
        });
    }
    fs.close().unwrap();
    println!("{stats:#?}");
}
