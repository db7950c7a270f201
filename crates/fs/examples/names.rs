//! How fast names are made and removed: `names IMAGE FILES THREADS`. Makes a file system on IMAGE
//! first.

use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_volume::FileDevice;
use std::sync::Arc;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (image, files, threads) =
        (&args[1], args[2].parse::<u64>().unwrap(), args[3].parse::<u64>().unwrap());
    let device = Arc::new(FileDevice::create(image, 4 << 30).unwrap());
    mkfs(device.as_ref(), &MkfsOptions { force: true, ..MkfsOptions::default() }).unwrap();
    let fs = Filesystem::open(device, OpenOptions::default()).unwrap();
    let new =
        |kind| NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] };
    let dirs: Vec<_> = (0..threads)
        .map(|t| {
            fs.create(fs.root(), format!("d{t}").as_bytes(), &new(FileKind::Directory)).unwrap().id
        })
        .collect();
    let timed = |what: &str, f: &(dyn Fn(u64) + Sync)| {
        let since = Instant::now();
        std::thread::scope(|s| {
            for t in 0..threads {
                s.spawn(move || f(t));
            }
        });
        let each = since.elapsed().as_secs_f64() / (files * threads) as f64;
        println!("{what}: {:.2} µs", each * 1e6);
    };
    timed("create", &|t| {
        for n in 0..files {
            fs.create(dirs[t as usize], format!("file-{n}").as_bytes(), &new(FileKind::Regular))
                .unwrap();
        }
    });
    timed("lookup", &|t| {
        for n in 0..files {
            fs.lookup(dirs[t as usize], format!("file-{n}").as_bytes()).unwrap();
        }
    });
    let since = Instant::now();
    fs.sync().unwrap();
    println!("sync: {:.1} ms", since.elapsed().as_secs_f64() * 1e3);
    timed("unlink", &|t| {
        for n in 0..files {
            fs.unlink(dirs[t as usize], format!("file-{n}").as_bytes()).unwrap();
        }
    });
    fs.close().unwrap();
    println!("{:#?}", fs.stats());
}
