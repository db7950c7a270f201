//! Several mounts that show the same files: what one of them changes, the others see.

mod common;

use common::larder;
use common::places::{Places, errno, names};
use rustix::fs::{AtFlags, CWD, StatxFlags, XattrFlags, statx};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// A page of a file, mapped.
struct Mapped(*mut u8);

impl Mapped {
    fn of(file: &File, writable: bool) -> Self {
        let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at.cast())
    }
    fn text(&self, len: usize) -> String {
        // SAFETY: within the page, which is mapped as long as this lives; each byte is read once.
        let byte = |n| unsafe { self.0.add(n).read_volatile() };
        String::from_utf8((0..len).map(byte).collect()).unwrap()
    }
    fn store(&self, at: usize, text: &str) {
        for (n, byte) in text.bytes().enumerate() {
            // SAFETY: as above.
            unsafe { self.0.add(at + n).write_volatile(byte) };
        }
        // SAFETY: the range is the mapping.
        assert_eq!(unsafe { libc::msync(self.0.cast(), 4096, libc::MS_SYNC) }, 0);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and nobody else has it.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}

fn xattr(path: &Path, name: &str) -> Option<String> {
    let mut value = [0; 64];
    let len = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
    Some(String::from_utf8(value[..len].to_vec()).unwrap())
}

/// Everything that is changed in `here` is seen in `there`, the same directory on another mount, at
/// once; after `there` had looked at what was before.
fn sees(here: &Path, there: &Path) {
    sees_names(here, there);
    let open = sees_content(here, there);
    sees_attributes(here, there);
    sees_links(here, there);
    sees_directories_that_move(here, there);
    sees_replacements(here, there, &open);
    sees_ranges(here, there);
    fs::remove_file(here.join("f")).unwrap();
    fs::remove_dir_all(here.join("e")).unwrap();
    assert_eq!(names(there), [""; 0]);
}

fn gone(path: &Path) {
    assert_eq!(errno(fs::metadata(path)), libc::ENOENT);
}

/// Names, and absent ones.
fn sees_names(here: &Path, there: &Path) {
    let (f, g) = (here.join("f"), there.join("f"));
    gone(&g);
    assert_eq!(names(there), [""; 0]);
    fs::write(&f, "one").unwrap();
    assert_eq!(fs::read_to_string(&g).unwrap(), "one");
    assert_eq!(names(there), ["f"]);
}

/// Contents and sizes, also of a file that is open or mapped. Returns the file, open in `there`.
fn sees_content(here: &Path, there: &Path) -> File {
    let (f, g) = (here.join("f"), there.join("f"));
    let open = File::options().read(true).append(true).open(&g).unwrap();
    let mapped = Mapped::of(&open, false);
    assert_eq!(mapped.text(3), "one");
    let mut write = File::options().read(true).write(true).open(&f).unwrap();
    for text in ["two", "six"] {
        write.write_all_at(text.as_bytes(), 0).unwrap();
        assert_eq!(
            (mapped.text(3), fs::read_to_string(&g).unwrap().as_str()),
            (text.to_owned(), text)
        );
    }
    write.write_all_at(b" and longer", 3).unwrap();
    assert_eq!(
        (open.metadata().unwrap().len(), mapped.text(14)),
        (14, "six and longer".to_owned())
    );
    (&open).write_all(b", appended").unwrap();
    assert_eq!(fs::read_to_string(&f).unwrap(), "six and longer, appended");
    write.set_len(3).unwrap();
    assert_eq!(
        (open.metadata().unwrap().len(), fs::read_to_string(&g).unwrap().as_str()),
        (3, "six")
    );
    write.write_all(b"ten").unwrap();
    let by_mapping = Mapped::of(&write, true);
    by_mapping.store(1, "OO");
    assert_eq!(
        (mapped.text(3), fs::read_to_string(&g).unwrap().as_str()),
        ("tOO".to_owned(), "tOO")
    );
    drop(by_mapping);
    // Stored in one place and written in the other, within a page.
    let theirs = File::options().read(true).write(true).open(&g).unwrap();
    let theirs = Mapped::of(&theirs, true);
    write.write_all_at(b"written", 3).unwrap();
    theirs.store(1, "oo");
    assert_eq!(fs::read_to_string(&f).unwrap(), "toowritten");
    drop((theirs, mapped));
    open
}

fn sees_attributes(here: &Path, there: &Path) {
    let (f, g) = (here.join("f"), there.join("f"));
    let meta = fs::metadata(&g).unwrap();
    fs::set_permissions(&f, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(&f, Some(7), Some(8)).unwrap();
    let now = fs::metadata(&g).unwrap();
    assert_eq!((now.mode() & 0o777, now.uid(), now.gid()), (0o640, 7, 8));
    assert!((now.ctime(), now.ctime_nsec()) > (meta.ctime(), meta.ctime_nsec()));
    assert_eq!(now.mtime(), meta.mtime());
    assert_eq!(xattr(&g, "user.x"), None);
    rustix::fs::setxattr(&f, "user.x", b"value", XattrFlags::empty()).unwrap();
    assert_eq!(xattr(&g, "user.x").as_deref(), Some("value"));
    rustix::fs::removexattr(&f, "user.x").unwrap();
    assert_eq!(xattr(&g, "user.x"), None);
}

/// Links, renames, removals.
fn sees_links(here: &Path, there: &Path) {
    let (f, g) = (here.join("f"), there.join("f"));
    fs::hard_link(&f, here.join("link")).unwrap();
    assert_eq!(
        (fs::metadata(&g).unwrap().nlink(), names(there)),
        (2, vec!["f".into(), "link".to_owned()])
    );
    gone(&there.join("new"));
    fs::rename(here.join("link"), here.join("new")).unwrap();
    gone(&there.join("link"));
    assert_eq!(fs::read_to_string(there.join("new")).unwrap(), "toowritten");
    fs::write(here.join("other"), "replaced").unwrap();
    assert_eq!(fs::read_to_string(there.join("other")).unwrap(), "replaced");
    fs::rename(here.join("other"), here.join("new")).unwrap();
    assert_eq!(fs::read_to_string(there.join("new")).unwrap(), "replaced");
    assert_eq!(fs::metadata(&g).unwrap().nlink(), 1);
    fs::remove_file(here.join("new")).unwrap();
    gone(&there.join("new"));
}

/// Directories that move while a file in them is open.
fn sees_directories_that_move(here: &Path, there: &Path) {
    fs::create_dir_all(here.join("d/deep")).unwrap();
    fs::write(here.join("d/deep/leaf"), "leaf").unwrap();
    let inside = File::open(there.join("d/deep")).unwrap();
    fs::create_dir(here.join("e")).unwrap();
    assert_eq!(names(&there.join("e")), [""; 0]);
    fs::rename(here.join("d/deep"), here.join("e/moved")).unwrap();
    gone(&there.join("d/deep"));
    assert_eq!(fs::read_to_string(there.join("e/moved/leaf")).unwrap(), "leaf");
    let seen = rustix::fs::statat(&inside, "leaf", AtFlags::empty()).unwrap();
    assert_eq!(seen.st_ino, fs::metadata(there.join("e/moved/leaf")).unwrap().ino());
    assert_eq!(names(&there.join("d")), [""; 0]);
    fs::remove_dir(here.join("d")).unwrap();
    gone(&there.join("d"));
}

/// A file that is open in `there` is removed in `here`, and others get its name.
fn sees_replacements(here: &Path, there: &Path, open: &File) {
    let (f, g) = (here.join("f"), there.join("f"));
    fs::remove_file(&f).unwrap();
    gone(&g);
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    // The same name, another file; a symlink in its place.
    fs::write(&f, "another").unwrap();
    assert_eq!(fs::read_to_string(&g).unwrap(), "another");
    fs::remove_file(&f).unwrap();
    std::os::unix::fs::symlink("e/moved/leaf", &f).unwrap();
    assert_eq!(fs::read_to_string(&g).unwrap(), "leaf");
}

/// Ranges that are preallocated, punched, copied.
fn sees_ranges(here: &Path, there: &Path) {
    let target = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(here.join("t"))
        .unwrap();
    target.write_all_at(&[9; 8192], 0).unwrap();
    assert_eq!(fs::read(there.join("t")).unwrap(), [9; 8192]);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&target, punch, 0, 4096).unwrap();
    assert_eq!(fs::read(there.join("t")).unwrap(), [[0; 4096], [9; 4096]].concat());
    let (mut from, mut to) = (4096, 0);
    assert_eq!(
        rustix::fs::copy_file_range(&target, Some(&mut from), &target, Some(&mut to), 4096)
            .unwrap(),
        4096
    );
    assert_eq!(fs::read(there.join("t")).unwrap(), [9; 8192]);
    fs::remove_file(here.join("t")).unwrap();
}

#[test]
fn what_one_mount_changes_the_others_see() {
    let Some(p) = Places::new() else { return };
    // The top level, a subvolume in it, and that subvolume once more by another transport.
    let top = p.mount(0, "subvolid=5");
    // What the first mount has cached while it was alone.
    fs::create_dir(top.join("@/d")).unwrap();
    fs::write(top.join("@/early"), "while alone").unwrap();
    let early = File::open(top.join("@/early")).unwrap();
    let page = Mapped::of(&early, false);
    assert_eq!((page.text(11).as_str(), names(&top.join("@")).len()), ("while alone", 2));
    assert_eq!(errno(fs::metadata(top.join("@/late"))), libc::ENOENT);
    let sub = p.mount(1, "subvol=@");
    fs::write(sub.join("late"), "").unwrap();
    fs::write(sub.join("early"), "in company").unwrap();
    fs::hard_link(sub.join("early"), sub.join("more")).unwrap();
    assert_eq!((page.text(10).as_str(), early.metadata().unwrap().nlink()), ("in company", 2));
    assert_eq!(names(&top.join("@")), ["d", "early", "late", "more"]);
    assert_eq!(fs::metadata(top.join("@/late")).unwrap().len(), 0);
    drop((page, early));
    ["early", "late", "more"]
        .into_iter()
        .for_each(|name| fs::remove_file(top.join("@").join(name)).unwrap());
    assert_eq!(names(sub), ["d"]);
    p.mount(2, "subvol=@,transport=dev,default_permissions");
    let in_top = top.join("@/d");
    let places = [in_top, sub.join("d"), p.at(2, "d")];
    for (here, there) in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)] {
        sees(&places[here], &places[there]);
    }
    // Subvolumes come and go by ioctls.
    let made = sub.join("d/snap");
    assert!(!places[2].join("snap").exists() && !places[0].join("snap").exists());
    larder(args!["subvolume", "create", &made]).ok();
    assert!(places[2].join("snap").is_dir() && places[0].join("snap").is_dir());
    larder(args!["subvolume", "delete", places[0].join("snap")]).ok();
    assert!(!made.exists() && !places[2].join("snap").exists());
    p.assert_undisturbed(1);
    // One alone is as before.
    p.umount(1);
    p.umount(2);
    fs::write(places[0].join("last"), "x").unwrap();
    let lookups = || {
        larder(args!["stats", "--json", top]).ok().json()["requests"]["by_kind"]["lookup"].clone()
    };
    fs::metadata(places[0].join("last")).unwrap();
    let before = lookups();
    (0..10).for_each(|_| assert!(places[0].join("last").exists()));
    assert_eq!(lookups(), before, "names are believed again");
    p.umount(0);
    p.assert_sound();
}

/// A file that four workers write, and each worker's own files.
const FILES: usize = 150;

/// Makes a link. A kernel that gets a file's attributes while a name of it is being removed counts
/// that name off twice. Until it asks again it takes the file for one without names.
fn hard_link(file: &Path, link: &Path) {
    for _ in 0..1000 {
        match fs::hard_link(file, link) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let now = AtFlags::STATX_FORCE_SYNC;
                statx(CWD, file, now, StatxFlags::NLINK).unwrap();
            }
            other => return other.unwrap(),
        }
    }
    panic!("{} has no names any more", file.display());
}

/// What one worker does in `dir`, one of the two mounts' view of the same directory.
fn change(dir: &Path, mine: usize, with_links: bool) {
    let shared = File::options().read(true).write(true).open(dir.join("shared")).unwrap();
    for n in 0..FILES {
        let name = dir.join(format!("{mine}-{n}"));
        fs::write(&name, format!("{mine} {n}")).unwrap();
        // Parts of the same pages.
        let record = format!("<{mine}:{n:03}>");
        let at = (n % 100) * 64 + mine * 16;
        shared.write_all_at(record.as_bytes(), at as u64).unwrap();
        fs::rename(&name, dir.join(format!("{mine}+{n}"))).unwrap();
        if n % 3 == 0 {
            fs::remove_file(dir.join(format!("{mine}+{n}"))).unwrap();
        }
        // Locks of directories and files, one after the other: across directories and back, and of
        // a file that others sync.
        if with_links {
            let link = dir.join(format!("l{mine}"));
            let moved = dir.join(format!("sub/m{mine}"));
            hard_link(&dir.join("shared"), &link);
            fs::rename(&link, &moved).unwrap();
            fs::rename(&moved, &link).unwrap();
            fs::remove_file(&link).unwrap();
        }
        if n % 5 == 0 {
            shared.sync_all().unwrap();
        }
    }
}

/// Changes of the same directory and the same files through two mounts at the same time: nobody
/// waits for ever, and nothing is lost.
#[test]
fn two_mounts_change_the_same_things_at_the_same_time() {
    let Some(p) = Places::new() else { return };
    let (top, sub) = (p.mount(0, "subvolid=5").join("@"), p.mount(1, "subvol=@"));
    fs::write(top.join("shared"), vec![b'.'; 64 * 100]).unwrap();
    fs::create_dir(top.join("sub")).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let workers: Vec<_> = [&*top, sub]
            .into_iter()
            .enumerate()
            .flat_map(|(side, dir)| (0..2).map(move |worker| (side, worker, dir)))
            .map(|(side, worker, dir)| {
                // Links by one thread of each mount: in a kernel that asks for attributes while
                // another removes a name, the count of links is wrong for a moment.
                threads.spawn(move || change(dir, 2 * side + worker, worker == 0))
            })
            .collect();
        // A reader lists and maps meanwhile.
        let reader = threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for dir in [&*top, sub] {
                    names(dir);
                    Mapped::of(&File::open(dir.join("shared")).unwrap(), false).text(64);
                }
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        ended.into_iter().for_each(|end| end.unwrap());
    });
    assert_eq!(names(&top), names(sub));
    assert_eq!(names(sub).len(), 2 + 4 * (FILES - FILES / 3));
    assert_eq!(fs::metadata(sub.join("shared")).unwrap().nlink(), 1);
    for dir in [&*top, sub] {
        File::open(dir.join("shared")).unwrap().sync_all().unwrap();
    }
    let shared = fs::read_to_string(top.join("shared")).unwrap();
    assert_eq!(fs::read_to_string(sub.join("shared")).unwrap(), shared);
    for mine in 0..4 {
        for n in FILES - 100..FILES {
            let at = (n % 100) * 64 + mine * 16;
            assert_eq!(shared[at..at + 7], format!("<{mine}:{n:03}>"));
        }
    }
    p.assert_undisturbed(0);
    p.umount(1);
    p.umount(0);
    p.assert_sound();
}
