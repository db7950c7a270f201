//! What the commit needs to remove checksums.

use super::World;

/// Files whose extents alternate lose their checksums out of the middle of large items. Each
/// deletion makes a leaf and drops one. A full disk does not have room for as many blocks as there
/// are deletions.
#[test]
fn leaves_made_and_dropped_by_a_commit_are_taken_again() {
    const FILES: usize = 2000;
    let w = World::new();
    let mut drop = Vec::new();
    for i in 0..FILES {
        for name in [format!("kept{i}"), format!("dropped{i}")] {
            let id = w.file(w.root(), &name);
            w.fs.write(id, 0, &[7; 5000]).unwrap();
        }
        drop.push(format!("dropped{i}"));
    }
    w.fs.sync().unwrap();
    for name in drop {
        w.fs.unlink(w.root(), name.as_bytes()).unwrap();
    }
    // Keeps what the commit frees from being used again, so that it can be counted.
    let reader = w.fs.core.epochs.enter();
    w.fs.sync().unwrap();
    let blocks = w.fs.stats().metadata_pinned / u64::from(w.fs.core.nodesize());
    std::mem::drop(reader);
    assert!(blocks < FILES as u64 / 4, "{blocks} blocks for {FILES} deletions");
    w.check();
}
