//! How long trees are locked: what is known about it, and what is not waited for meanwhile.

use super::World;
use crate::transaction::sharing::KnownRefs;
use crate::tree::{EditStop, Need};
use larder_format::{Logical, ObjectId};

#[test]
fn the_longest_hold_of_a_tree_has_a_name() {
    let w = World::new();
    let by = || w.fs.stats().tree_lock_holds.longest.by;
    assert!(["", "other", "commit", "seal"].contains(&by()), "{}", by());
    // One of these takes longer than all before, because there are so many.
    for i in 0..2000 {
        w.file(w.root(), format!("file{i}"));
    }
    let stats = w.fs.stats();
    let longest = stats.tree_lock_holds.longest;
    assert_eq!((longest.us, longest.tree > 0), (stats.tree_lock_max_us, true));
    assert!(
        ["create", "commit", "seal", "items before the seal", "write-back"].contains(&longest.by),
        "{longest:?}"
    );
}

/// The thread that has locked the notes may have lost its processor for milliseconds. An edit
/// releases its tree meanwhile.
#[test]
fn an_edit_does_not_wait_for_the_notes_with_its_tree_locked() {
    let w = World::new();
    w.file(w.root(), "first");
    w.fs.sync().unwrap();
    let core = &w.fs.core;
    let root = core.subvol(ObjectId::FS_TREE).unwrap().tree.root().node.unwrap();
    let txn = core.txns.running();
    let free = Logical(1 << 40);
    // On another thread, because the one with the notes must not take them again.
    let copy = |shared| {
        let known = KnownRefs::default();
        let copies = || core.note_copied(&txn, &known, ObjectId::FS_TREE, &root, free, shared);
        std::thread::scope(|s| s.spawn(copies).join().unwrap())
    };
    let notes = txn.refs.lock();
    assert!(matches!(copy(false), Err(EditStop::Need(Need::Notes))));
    let known_first = copy(true);
    assert!(matches!(known_first, Err(EditStop::Need(Need::Refs(..)))), "{known_first:?}");

    // The edit ends once the notes are unlocked.
    std::thread::scope(|s| {
        let creates = s.spawn(|| w.file(w.root(), "second"));
        std::thread::yield_now();
        drop(notes);
        creates.join().unwrap();
    });
    w.fs.sync().unwrap();
    w.find(w.root(), "second").unwrap();
    w.check();
}

#[test]
fn an_edit_does_not_wait_for_a_view_that_changes() {
    let w = World::new();
    let waits = w.fs.core.txns.while_view_changes(|| w.fs.core.txns.with_view_at_once(|_| Ok(())));
    assert!(matches!(waits, Err(EditStop::Need(Need::Notes))));
    w.fs.core.txns.with_view_at_once(|_| Ok(())).unwrap();
}
