//! Random trees with random options: both checkers find nothing, and Linux shows what went in.

mod common;

use common::{Data, Source, assert_linux_agrees, assert_sound, noise, options, text};
use larder_build::{BuildOptions, Compress, ImageSize};
use larder_fs::mkfs::{Features, Profile};
use larder_sources::Kind;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Node {
    File { size: usize, noisy: bool, seed: u64 },
    Sparse { parts: Vec<(u16, u16)>, tail: u16 },
    Link(u8),
    Symlink(usize),
    Directory(Vec<(String, Node)>),
}

fn node() -> impl Strategy<Value = Node> {
    let size = prop_oneof![
        0..5000usize,
        Just(4096),
        Just(2048),
        100_000..400_000usize,
        1_000_000..2_500_000usize
    ];
    let leaf = prop_oneof![
        6 => (size, any::<bool>(), 0..4u64)
            .prop_map(|(size, noisy, seed)| Node::File { size, noisy, seed }),
        1 => (prop::collection::vec((1..600u16, 1..9000u16), 0..12), 0..9000u16)
            .prop_map(|(parts, tail)| Node::Sparse { parts, tail }),
        2 => any::<u8>().prop_map(Node::Link),
        1 => (1..2000usize).prop_map(Node::Symlink),
    ];
    leaf.prop_recursive(4, 60, 12, |inner| {
        prop::collection::vec(("[a-z!]{1,9}", inner), 0..12).prop_map(Node::Directory)
    })
}

fn plant(source: &mut Source, at: &str, node: &Node, files: &mut Vec<String>) {
    match node {
        Node::File { size, noisy, seed } => {
            let data = if *noisy { noise(*size, *seed) } else { text(*size, *seed) };
            source.file(at, data);
            files.push(at.to_owned());
        }
        Node::Sparse { parts, tail } => {
            let (mut end, mut data) = (0u64, Vec::new());
            for (gap, len) in parts {
                let start = end + u64::from(*gap) * 100;
                data.push((start, noise(usize::from(*len), start)));
                end = start + u64::from(*len);
            }
            source.sparse(at, end + u64::from(*tail), Data(data));
        }
        Node::Link(n) if !files.is_empty() => {
            let n = usize::from(*n) % files.len();
            source.link(at, files[n].clone(), n as u64);
        }
        Node::Link(_) => {
            source.add(at, Kind::Fifo, 0o600);
        }
        Node::Symlink(n) => {
            source.add(at, Kind::Symlink(vec![b'l'; *n]), 0o777);
        }
        Node::Directory(children) => {
            source.dir(at);
            for (name, child) in children {
                let path = format!("{at}/{name}");
                // The same name may come twice.
                if !source.entries.contains_key(&common::path(&path)) {
                    plant(source, &path, child, files);
                }
            }
        }
    }
}

fn any_options() -> impl Strategy<Value = BuildOptions> {
    let nodesize = prop_oneof![Just(None), Just(Some(4096)), Just(Some(32768))];
    const LISTS: [&str; 4] = ["", "mixed-bg", "^bgt", "^bgt,^fst,^no-holes"];
    let compress = prop_oneof![
        Just(None),
        Just(Some(("zstd:1", false))),
        Just(Some(("lzo", true))),
        Just(Some(("zlib", false)))
    ];
    let size = prop_oneof![Just(ImageSize::Auto), Just(ImageSize::Free(200 << 20))];
    let profile = prop_oneof![Just(Profile::Single), Just(Profile::Dup)];
    (nodesize, prop::sample::select(&LISTS[..]), compress, size, profile, any::<bool>()).prop_map(
        |(nodesize, list, compress, size, metadata, dedupe)| {
            let mut features = Features::default();
            features.apply(list).unwrap();
            let compress =
                compress.map(|(p, force)| Compress { packing: p.parse().unwrap(), force });
            let nodesize = nodesize.filter(|_| !features.mixed);
            let metadata = Some(metadata);
            BuildOptions { nodesize, features, compress, size, metadata, dedupe, ..options() }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]
    #[test]
    fn what_goes_in_comes_out(
        nodes in prop::collection::vec(("[a-z]{1,9}", node()), 0..20),
        options in any_options(),
    ) {
        let dir = larder_simtest::oracle::scratch();
        let image = dir.path().join("img");
        let mut source = Source::new();
        let mut files = Vec::new();
        for (name, node) in &nodes {
            if !source.entries.contains_key(&common::path(name)) {
                plant(&mut source, name, node, &mut files);
            }
        }
        source.build(&image, &options).unwrap();
        assert_sound(&image, "a random tree");
        assert_linux_agrees(&image, &[("", &source)], "a random tree");
    }
}
