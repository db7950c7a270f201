//! The seeds: small real images, unpacked and surveyed when first asked for.
//!
//! Those that Linux made lie packed in `fuzz/seeds` (`make.sh` there makes them). One more is made
//! here by the engine, so that its present layout is attacked, too. Only inputs that chose this
//! seed depend on that layout.

use super::device::HostileDevice;
use super::survey::Survey;
use crate::image::{Image, PAGE, Page};
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{
    Fallocate, FileKind, Filesystem, NewInode, OpenOptions, Timestamp, Tuning, XattrMode,
};
use std::io::Read;
use std::sync::{Arc, OnceLock};

/// Names of the seeds. Inputs choose by position ([`choose`]): append only.
pub const NAMES: [&str; 9] =
    ["bgt", "small", "mixed", "old", "bitmaps", "log", "larder", "cut", "cut_old"];

/// Position of the seed that is not packed.
const MADE: usize = 6;

static PACKED: [&[u8]; 8] = [
    include_bytes!("../../../../fuzz/seeds/bgt.img.zst"),
    include_bytes!("../../../../fuzz/seeds/small.img.zst"),
    include_bytes!("../../../../fuzz/seeds/mixed.img.zst"),
    include_bytes!("../../../../fuzz/seeds/old.img.zst"),
    include_bytes!("../../../../fuzz/seeds/bitmaps.img.zst"),
    include_bytes!("../../../../fuzz/seeds/log.img.zst"),
    include_bytes!("../../../../fuzz/seeds/cut.img.zst"),
    include_bytes!("../../../../fuzz/seeds/cut_old.img.zst"),
];

/// The seed that a byte of an input chooses, and what is left of the byte for other choices. The
/// seeds that came later have a share at the end of what a byte can say, so that most inputs still
/// mean what they meant.
#[must_use]
pub fn choose(byte: u8) -> (usize, u8) {
    const FIRST: usize = 7;
    const SHARE: u8 = 160;
    match byte.checked_sub(SHARE) {
        None => (usize::from(byte) % FIRST, byte / FIRST as u8),
        Some(rest) => {
            let later = NAMES.len() - FIRST;
            (FIRST + usize::from(rest) % later, rest / later as u8)
        }
    }
}

/// The seed with this position in [`NAMES`] (taken modulo their number).
///
/// # Panics
/// If a seed is not sound.
#[must_use]
pub fn seed(number: usize) -> &'static Survey {
    static SEEDS: [OnceLock<Survey>; NAMES.len()] = [const { OnceLock::new() }; NAMES.len()];
    let number = number % NAMES.len();
    SEEDS[number].get_or_init(|| {
        let image = match number {
            MADE => made_by_the_engine(),
            _ => unpack(PACKED[number - usize::from(number > MADE)]),
        };
        Survey::new(image).unwrap_or_else(|e| panic!("seed {}: {e}", NAMES[number]))
    })
}

fn unpack(packed: &[u8]) -> Image {
    let mut reader = zstd::stream::read::Decoder::new(packed).expect("a zstd stream");
    reader.window_log_max(27).expect("a window that zstd knows");
    let mut pages = Vec::new();
    let mut page = [0; PAGE];
    let mut number = 0u64;
    while reader.read_exact(&mut page).is_ok() {
        if page.iter().any(|b| *b != 0) {
            pages.push((number, Page::new(page)));
        }
        number += 1;
    }
    let mut image = Image::zeroed(number * PAGE as u64);
    for (number, page) in pages {
        image.set_page(number, page);
    }
    image.freeze();
    image
}

/// A file system made and filled by the engine, the same each time.
fn made_by_the_engine() -> Image {
    let device = Arc::new(HostileDevice::new(Image::zeroed(128 << 20)));
    let time = Timestamp { sec: 1_700_000_000, nsec: 0 };
    let options = MkfsOptions { uuid: Some([7; 16]), time: Some(time), ..MkfsOptions::default() };
    mkfs(&*device, &options).expect("mkfs");
    let options = OpenOptions {
        commit_interval: None,
        tuning: Tuning { fake_clock: true, ..Tuning::default() },
        ..OpenOptions::default()
    };
    let fs = Filesystem::open(device.clone(), options).expect("open");
    let new =
        |kind| NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    let root = fs.root();
    let make = |dir, name: &str, kind| fs.create(dir, name.as_bytes(), &new(kind)).expect(name).id;
    let dir = make(root, "dir", FileKind::Directory);
    for i in 0..80u32 {
        device.begin();
        let file = make(dir, &format!("file with a name of some length {i}"), FileKind::Regular);
        fs.write(file, 0, &vec![i as u8; (i as usize * 97) % 9000]).expect("write");
        fs.setxattr(file, b"user.number", format!("{i}").as_bytes(), XattrMode::Set)
            .expect("setxattr");
        fs.link(file, root, format!("link {i}").as_bytes()).expect("link");
    }
    let symlink = NewInode { target: b"dir/somewhere", ..new(FileKind::Symlink) };
    fs.create(root, b"symlink", &symlink).expect("symlink");
    let sparse = make(root, "sparse", FileKind::Regular);
    fs.write(sparse, 1 << 30, b"end").expect("write");
    fs.sync().expect("sync");
    let sub = fs.create_subvolume(root, b"sub", &new(FileKind::Directory)).expect("a subvolume").id;
    for method in ["zlib", "lzo", "zstd"] {
        device.begin();
        let file = make(sub, method, FileKind::Regular);
        fs.setxattr(file, b"btrfs.compression", method.as_bytes(), XattrMode::Set)
            .expect("setxattr");
        let text: Vec<u8> = (0..90_000u32).map(|i| (i / 300 % 251) as u8).collect();
        fs.write(file, 0, &text).expect("write");
    }
    let plain = make(sub, "plain", FileKind::Regular);
    fs.write(plain, 0, &[5; 60_000]).expect("write");
    fs.fallocate(plain.at(70_000), 50_000, Fallocate::Allocate { keep_size: true })
        .expect("fallocate");
    fs.create_subvolume(sub, b"nested", &new(FileKind::Directory)).expect("a subvolume");
    for (name, read_only) in [("snapshot", true), ("writable", false)] {
        device.begin();
        fs.snapshot(sub.subvol, root, name.as_bytes(), read_only).expect("a snapshot");
    }
    fs.write(plain, 8192, b"changed").expect("write");
    fs.fallocate(plain.at(20_000), 20_000, Fallocate::Punch).expect("fallocate");
    for i in (0..80).step_by(3) {
        fs.unlink(root, format!("link {i}").as_bytes()).expect("unlink");
    }
    // An orphan: without a name, but held, when the power goes.
    let orphan = make(root, "orphan", FileKind::Regular);
    fs.write(orphan, 0, &[9; 30_000]).expect("write");
    fs.hold(orphan);
    fs.unlink(root, b"orphan").expect("unlink");
    fs.sync().expect("sync");
    drop(fs);
    device.image()
}
