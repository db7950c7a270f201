//! Sound programs reach what they are for, and sound sources pass the judges.

use super::*;

#[test]
fn an_archive_of_everything_passes() {
    let held = Held::new(&tar::everything());
    for choice in 0..32 {
        let read = stream::read(&[held.path()], &options(choice)).expect("a sound archive");
        assert!(read.entries.len() > 8, "{:?}", read.entries);
        again::again(&read);
        for how in [0, 1, 6, 0x82, 0x5b, 0xff] {
            built::built(&read, how ^ choice);
        }
    }
}

#[test]
fn each_packing_is_unpacked() {
    for how in 0..4 {
        let held = Held::new(&tar::packed(how, &tar::everything(), None));
        assert!(stream::read(&[held.path()], &options(0)).is_some(), "{how}");
    }
}

#[test]
fn containers_have_right_digests() {
    // Two layers of a directory each.
    let layer = |name: u8| [4, 0, 0, 1, 0, name, 0];
    for kind in [0, 1] {
        let program = [&[kind, 0, 2][..], &layer(0), &layer(1)].concat();
        let made = container::container(&mut Choices::new(&program));
        let held = Held::new(&made.archive);
        let source = format!("{}:{}", made.prefix, held.path());
        let read = stream::read(&[source], &options(0)).expect("a sound image");
        assert_eq!(read.sources.layers().len(), 2, "{}", made.prefix);
    }
}

#[test]
fn manifests_change_what_is_below() {
    let beside = Beside::new(b"dir /x mode=0700\nfile /x/f contents=d/f\nremove /a\n");
    let below = Held::new(&tar::everything());
    let sources = [below.path().to_owned(), format!("manifest:{}", beside.path())];
    let read = stream::read(&sources, &options(0)).expect("a sound manifest");
    assert!(read.entries.iter().any(|entry| entry.path.as_bytes() == b"x/f"));
    assert!(read.entries.iter().all(|entry| entry.path.as_bytes() != b"a/b"));
}
