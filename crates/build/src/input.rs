//! What a build is given: subvolumes, where they hang, and the streams that they come in.

use crate::error::{BoxError, Error, Result};
use larder_sources::{Contents, Entry, Locator, TreePath};
use std::collections::BTreeMap;

/// Opens what a locator names. Called from several threads.
pub type OpenContents<'a> = dyn Fn(&Locator) -> SourceResult<Box<dyn Contents>> + Sync + 'a;

/// What a source gives.
pub type SourceResult<T> = std::result::Result<T, BoxError>;

/// A subvolume, from a stream of its own.
pub struct TreeInput<'a> {
    /// Where it hangs.
    pub place: Place,
    /// It cannot be changed.
    pub read_only: bool,
    /// A mount that names no subvolume shows it.
    pub default: bool,
    /// Number of the input that it appears to be a snapshot of. The two share contents as any
    /// inputs do.
    pub snapshot_of: Option<usize>,
    /// Directories of the stream that are subvolumes of their own. One that does not come is made,
    /// empty.
    pub inner: Vec<InnerSubvolume>,
    /// What it holds, in the order of paths. The first one may be the top itself.
    pub entries: Box<dyn Iterator<Item = SourceResult<Entry>> + 'a>,
}

impl std::fmt::Debug for TreeInput<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TreeInput").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Where a subvolume hangs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is the top of the file system. There is exactly one.
    Top,
    /// In another input, where the stream has a directory or nothing.
    Below {
        /// Number of the other input.
        parent: usize,
        /// Path in its stream.
        path: TreePath,
    },
}

/// A directory that is a subvolume of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InnerSubvolume {
    /// Path in the stream.
    pub path: TreePath,
    /// It cannot be changed.
    pub read_only: bool,
    /// A mount that names no subvolume shows it.
    pub default: bool,
}

/// A subvolume that is being made.
#[derive(Clone, Debug)]
pub(crate) struct Subvolume {
    pub(crate) id: u64,
    /// It comes in the stream around it.
    pub(crate) inner: bool,
    pub(crate) read_only: bool,
    pub(crate) default: bool,
    /// Place in the list of subvolumes.
    pub(crate) snapshot_of: Option<u32>,
    pub(crate) hang: Option<Hang>,
}

/// The entry of a subvolume.
#[derive(Clone, Debug)]
pub(crate) struct Hang {
    /// Number of the subvolume that has it.
    pub(crate) parent: u64,
    pub(crate) directory: u64,
    pub(crate) index: u64,
    pub(crate) name: Vec<u8>,
}

pub(crate) type Stream<'a> = Box<dyn Iterator<Item = SourceResult<Entry>> + 'a>;

/// All subvolumes, and the streams that they come in.
pub(crate) struct Forest<'a> {
    pub(crate) subvolumes: Vec<Subvolume>,
    /// The subvolume that a stream is, those that hang in it, and the stream.
    pub(crate) streams: Vec<(u32, BTreeMap<TreePath, u32>, Stream<'a>)>,
}

impl<'a> Forest<'a> {
    pub(crate) fn new(trees: Vec<TreeInput<'a>>) -> Result<Self> {
        let refuse = |what: &str| Err(Error::Unsupported(what.to_owned()));
        if trees.iter().filter(|t| t.place == Place::Top).count() != 1 {
            return refuse("exactly one tree is the top of a file system");
        }
        let mut subvolumes = Vec::new();
        let mut streams: Vec<(u32, BTreeMap<TreePath, u32>, Stream<'a>)> = Vec::new();
        let mut places = Vec::new();
        let mut next = 256;
        for (n, tree) in trees.into_iter().enumerate() {
            let own = small(subvolumes.len());
            let top = tree.place == Place::Top;
            let id = if top { 5 } else { next };
            next += u64::from(!top);
            let snapshot_of = match tree.snapshot_of {
                Some(of) if of >= n => {
                    return refuse("a snapshot is listed before the tree that it is a snapshot of");
                }
                of => of.map(|of| streams[of].0),
            };
            let (read_only, default) = (tree.read_only, tree.default);
            if top && read_only {
                return refuse("the top subvolume cannot be read-only");
            }
            subvolumes.push(Subvolume {
                id,
                inner: false,
                read_only,
                default,
                snapshot_of,
                hang: None,
            });
            let mut within = BTreeMap::new();
            let mut inner = tree.inner;
            inner.sort_by(|a, b| a.path.cmp(&b.path));
            for InnerSubvolume { path, read_only, default } in inner {
                within.insert(path, small(subvolumes.len()));
                let (id, inner, snapshot_of) = (next, true, None);
                subvolumes.push(Subvolume {
                    id,
                    inner,
                    read_only,
                    default,
                    snapshot_of,
                    hang: None,
                });
                next += 1;
            }
            places.push(tree.place);
            streams.push((own, within, tree.entries));
        }
        let mut parents = vec![None; places.len()];
        for (n, place) in places.into_iter().enumerate() {
            let Place::Below { parent, path } = place else { continue };
            let own = streams[n].0;
            if parent == n || parent >= streams.len() || path.is_root() {
                return refuse("a subvolume hangs in another tree, below its top");
            }
            if streams[parent].1.insert(path, own).is_some() {
                return refuse("two subvolumes have the same place");
            }
            parents[n] = Some(parent);
        }
        if circle(&parents) {
            return refuse("subvolumes hang in each other, in a circle");
        }
        if subvolumes.iter().filter(|s| s.default).count() > 1 {
            return refuse("only one subvolume can be the default");
        }
        Ok(Self { subvolumes, streams })
    }
}

/// Is there a subvolume from which the way up never ends?
fn circle(parents: &[Option<usize>]) -> bool {
    (0..parents.len()).any(|start| {
        let up = std::iter::successors(Some(start), |n| parents[*n]);
        up.take(parents.len() + 1).count() > parents.len()
    })
}

fn small(n: usize) -> u32 {
    u32::try_from(n).expect("fewer subvolumes")
}
