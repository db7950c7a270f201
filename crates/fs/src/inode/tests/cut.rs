//! What cutting a file writes.

use super::*;
use crate::SetAttr;
use crate::XattrMode;
use larder_format::KeyType;

/// Keys and contents of a file's extents, as the tree has them.
fn extents(w: &World, id: InodeId) -> Vec<(Key, Vec<u8>)> {
    let of_file = |key: &Key| key.objectid == ObjectId(id.ino) && key.kind == KeyType::EXTENT_DATA;
    w.items().into_iter().filter(|(key, _)| of_file(key)).collect()
}

/// A file whose packed bytes lie in its leaf has to leave it if they do not fit there unpacked:
/// zeros behind the new end make its sector be written again. While the cut waits to delay these
/// zeros, the file's own delayed data may be written back. Then the file is in no leaf any more,
/// and what is behind the end stays there.
#[test]
fn zeros_are_delayed_only_for_a_file_that_leaves_its_leaf() {
    for delayed in [false, true] {
        let mkfs_options = MkfsOptions { nodesize: Some(4096), ..MkfsOptions::default() };
        let device = Memory::new(256 << 20);
        mkfs(&*device, &mkfs_options).unwrap();
        let small = OpenOptions { cache_size: 8 << 20, ..options() };
        let fs = Filesystem::open(device.clone(), small).unwrap();
        let w = World { device, fs };
        let core = &w.fs.core;
        // Delayed data is written back by the caller that finds no room for more, and not before.
        core.data.stop();
        let (f, others) = (w.file(w.root(), "f"), w.file(w.root(), "others"));
        w.fs.setxattr(f, b"btrfs.compression", b"zlib", XattrMode::Set).unwrap();
        w.fs.write(f, 0, &[b'a'; PAGE]).unwrap();
        w.fs.sync().unwrap();
        assert!(extents(&w, f)[0].1.len() < 200, "packed, in its leaf");
        if delayed {
            w.fs.write(f, PAGE as u64, b"b").unwrap();
            let mut at = 0;
            while core.data.memory() + PAGE as u64 <= core.budget().data {
                w.fs.write(others, at, b"c").unwrap();
                at += PAGE as u64;
            }
            // A file that is shorter than what the cut may delay.
            while core.data.memory() < core.budget().data {
                w.fs.write(others, at, b"c").unwrap();
                at += PAGE as u64;
            }
        }
        w.fs.setattr(f, &SetAttr { size: Some(4000), ..SetAttr::default() }).unwrap();
        let inode = core.inode(f).unwrap();
        assert_eq!(inode.data.is_clean(), delayed, "{delayed}");
        let before = extents(&w, f);
        w.fs.sync().unwrap();
        if delayed {
            assert_eq!(extents(&w, f), before, "nothing was written for the cut");
        }
        let mut back = vec![0; PAGE];
        assert_eq!(w.fs.read(f, 0, &mut back).unwrap(), 4000);
        assert!(back[..4000].iter().all(|b| *b == b'a'));
        w.fs.setattr(f, &SetAttr { size: Some(PAGE as u64), ..SetAttr::default() }).unwrap();
        assert_eq!(w.fs.read(f, 0, &mut back).unwrap(), PAGE);
        assert!(back[4000..].iter().all(|b| *b == 0), "nothing comes back");
        w.check();
    }
}
