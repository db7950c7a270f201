//! Random operations on names, compared with a map that says what the results must be.
//!
//! The model knows directories, files with several names, and holds. The operations choose from few
//! names, some of them with equal hashes, so that they meet. Results must agree after every
//! operation. From time to time everything is committed and checked item by item, or the file
//! system is reopened or crashes.

use super::{World, new};
use crate::{Error, FileKind, InodeId, RenameMode};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Op {
    Create(usize, usize, FileKind),
    Unnamed(usize),
    Link(usize, usize, usize),
    Unlink(usize, usize),
    Rmdir(usize, usize),
    Rename(usize, usize, usize, usize, RenameMode),
    Hold(usize),
    Release(usize),
    Check,
    Reopen,
    Crash,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let dir = 0usize..6;
    let name = 0usize..8;
    let kind = prop_oneof![
        3 => Just(FileKind::Directory),
        3 => Just(FileKind::Regular),
        1 => Just(FileKind::Symlink),
    ];
    let mode = prop_oneof![
        4 => Just(RenameMode::Replace),
        1 => Just(RenameMode::NoReplace),
        2 => Just(RenameMode::Exchange),
        1 => Just(RenameMode::Whiteout { uid: 1, gid: 2 }),
    ];
    let op = prop_oneof![
        8 => (dir.clone(), name.clone(), kind).prop_map(|(d, n, k)| Op::Create(d, n, k)),
        1 => dir.clone().prop_map(Op::Unnamed),
        3 => (0usize..12, dir.clone(), name.clone()).prop_map(|(i, d, n)| Op::Link(i, d, n)),
        4 => (dir.clone(), name.clone()).prop_map(|(d, n)| Op::Unlink(d, n)),
        2 => (dir.clone(), name.clone()).prop_map(|(d, n)| Op::Rmdir(d, n)),
        8 => (dir.clone(), name.clone(), dir, name, mode)
            .prop_map(|(d, n, e, m, mode)| Op::Rename(d, n, e, m, mode)),
        2 => (0usize..12).prop_map(Op::Hold),
        2 => (0usize..12).prop_map(Op::Release),
        1 => Just(Op::Check),
        1 => Just(Op::Reopen),
        1 => Just(Op::Crash),
    ];
    prop::collection::vec(op, 1..120)
}

fn names() -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = super::colliding_names(2).collect();
    names.extend([b"a".to_vec(), b"b".to_vec(), vec![b'l'; 255], vec![0xff, b'\n']]);
    names
}

/// An inode of the model.
#[derive(Clone, Debug)]
struct Node {
    kind: FileKind,
    nlink: u32,
    holds: u64,
    linkable: bool,
    entries: BTreeMap<Vec<u8>, InodeId>,
    /// For a directory: the directory that it is in.
    parent: Option<InodeId>,
}

#[derive(Debug)]
struct Model {
    root: InodeId,
    nodes: BTreeMap<InodeId, Node>,
    /// Everything that was ever made, in order. Operations choose from it.
    made: Vec<InodeId>,
}

type Answer = Result<(), &'static str>;

impl Model {
    fn new(root: InodeId) -> Self {
        let node = Node {
            kind: FileKind::Directory,
            nlink: 1,
            holds: 0,
            linkable: false,
            entries: BTreeMap::new(),
            parent: None,
        };
        Self { root, nodes: [(root, node)].into(), made: vec![root] }
    }
    fn pick(&self, n: usize) -> InodeId {
        self.made[n % self.made.len()]
    }
    fn is_dir(&self, id: InodeId) -> bool {
        self.nodes[&id].kind == FileKind::Directory
    }
    fn directory(&self, id: InodeId) -> Result<&Node, &'static str> {
        let node = self.nodes.get(&id).ok_or("NotFound")?;
        if node.kind == FileKind::Directory { Ok(node) } else { Err("NotDirectory") }
    }
    fn takes_names(&self, dir: InodeId) -> Answer {
        if self.directory(dir)?.nlink == 0 { Err("NotFound") } else { Ok(()) }
    }
    fn add(&mut self, dir: InodeId, name: &[u8], id: InodeId) {
        self.nodes.get_mut(&dir).unwrap().entries.insert(name.to_vec(), id);
        let node = self.nodes.get_mut(&id).unwrap();
        if node.kind == FileKind::Directory {
            node.parent = Some(dir);
        }
    }
    fn make(&mut self, id: InodeId, kind: FileKind, nlink: u32) {
        let node = Node {
            kind,
            nlink,
            holds: 0,
            linkable: nlink == 0,
            entries: BTreeMap::new(),
            parent: None,
        };
        assert!(self.nodes.insert(id, node).is_none(), "number given out twice");
        self.made.push(id);
    }
    fn lose(&mut self, id: InodeId) {
        let node = self.nodes.get_mut(&id).unwrap();
        node.nlink -= 1;
        self.collect(id);
    }
    fn collect(&mut self, id: InodeId) {
        let node = &self.nodes[&id];
        if node.nlink == 0 && node.holds == 0 {
            self.nodes.remove(&id);
        }
    }
    fn can_create(&self, dir: InodeId, name: &[u8]) -> Answer {
        self.directory(dir)?;
        self.takes_names(dir)?;
        if self.nodes[&dir].entries.contains_key(name) { Err("Exists") } else { Ok(()) }
    }
    fn link(&mut self, id: InodeId, dir: InodeId, name: &[u8]) -> Answer {
        let node = self.nodes.get(&id).ok_or("NotFound")?;
        self.directory(dir)?;
        if node.kind == FileKind::Directory {
            return Err("NotPermitted");
        }
        self.can_create(dir, name)?;
        if node.nlink == 0 && !node.linkable {
            return Err("NotFound");
        }
        let node = self.nodes.get_mut(&id).unwrap();
        node.nlink += 1;
        node.linkable = false;
        self.add(dir, name, id);
        Ok(())
    }
    fn remove(&mut self, dir: InodeId, name: &[u8], directory: bool) -> Answer {
        let id = *self.directory(dir)?.entries.get(name).ok_or("NotFound")?;
        match (directory, self.is_dir(id)) {
            (true, false) => return Err("NotDirectory"),
            (false, true) => return Err("IsDirectory"),
            (true, true) if !self.nodes[&id].entries.is_empty() => return Err("NotEmpty"),
            _ => {}
        }
        self.nodes.get_mut(&dir).unwrap().entries.remove(name);
        self.lose(id);
        Ok(())
    }
    fn within(&self, dir: InodeId, ancestor: InodeId) -> bool {
        let mut at = Some(dir);
        while let Some(id) = at {
            if id == ancestor {
                return true;
            }
            at = self.nodes[&id].parent;
        }
        false
    }
    /// Returns whether a whiteout has to appear.
    fn rename(
        &mut self,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<bool, &'static str> {
        let (Some(_), Some(_)) = (self.nodes.get(&from.0), self.nodes.get(&to.0)) else {
            return Err("NotFound");
        };
        let a = self.directory(from.0)?;
        let b = self.directory(to.0)?;
        let source = *a.entries.get(from.1).ok_or("NotFound")?;
        let target = b.entries.get(to.1).copied();
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err("Exists"),
            (RenameMode::Exchange, None) => return Err("NotFound"),
            (_, Some(t)) if t == source => return Ok(false),
            _ => {}
        }
        self.takes_names(to.0)?;
        if self.is_dir(source) && self.within(to.0, source) {
            return Err("Invalid");
        }
        if mode == RenameMode::Exchange {
            let target = target.unwrap();
            if self.is_dir(target) && self.within(from.0, target) {
                return Err("Invalid");
            }
            self.add(to.0, to.1, source);
            self.add(from.0, from.1, target);
            return Ok(false);
        }
        if let Some(t) = target {
            match (self.is_dir(source), self.is_dir(t)) {
                (true, false) => return Err("NotDirectory"),
                (false, true) => return Err("IsDirectory"),
                (true, true) if !self.nodes[&t].entries.is_empty() => return Err("NotEmpty"),
                _ => {}
            }
        }
        self.nodes.get_mut(&from.0).unwrap().entries.remove(from.1);
        self.add(to.0, to.1, source);
        if let Some(t) = target {
            self.lose(t);
        }
        Ok(matches!(mode, RenameMode::Whiteout { .. }))
    }
    /// Holds end, and with them what only they kept.
    fn closed(&mut self) {
        for node in self.nodes.values_mut() {
            node.holds = 0;
        }
        self.nodes.retain(|_, n| n.nlink > 0);
    }
    fn agrees_with(&self, w: &World) {
        for id in &self.made {
            let Some(node) = self.nodes.get(id) else {
                assert!(matches!(w.fs.getattr(*id), Err(Error::NotFound)), "{id:?} should be gone");
                continue;
            };
            let attr = w.attr(*id);
            assert_eq!((attr.kind, attr.nlink), (node.kind, node.nlink), "{id:?}");
            if node.kind != FileKind::Directory {
                continue;
            }
            let mut listed = BTreeMap::new();
            w.fs.readdir(*id, 2, &mut |e| {
                assert_eq!(e.kind, self.nodes[&e.id].kind);
                assert_eq!(listed.insert(e.name.to_vec(), e.id), None);
                true
            })
            .unwrap();
            assert_eq!(listed, node.entries, "entries of {id:?}");
            for (name, child) in &node.entries {
                assert_eq!(w.find(*id, name).unwrap().id, *child);
            }
            if let (Some(parent), 1..) = (node.parent, node.nlink) {
                assert_eq!(w.find(*id, "..").unwrap().id, parent);
            }
        }
    }
}

fn same(engine: crate::Result<()>, model: Answer, what: &Op) {
    let engine = engine.map_err(|e| format!("{e:?}").split('(').next().unwrap().to_owned());
    assert_eq!(engine, model.map_err(str::to_owned), "{what:?}");
}

/// Runs an operation on a thread that must not wait. If it would have to wait, runs it again on one
/// that may: the first attempt must have left no trace.
fn patient<T>(waits: &mut u32, mut op: impl FnMut() -> crate::Result<T>) -> crate::Result<T> {
    match crate::api::no_wait(&mut op) {
        Err(Error::WouldBlock) => {
            *waits += 1;
            op()
        }
        done => done,
    }
}

/// An engine and its model.
struct Pair {
    w: World,
    m: Model,
    names: Vec<Vec<u8>>,
    waits: u32,
}

impl Pair {
    fn new() -> Self {
        let w = World::new();
        let m = Model::new(w.root());
        Self { w, m, names: names(), waits: 0 }
    }
    fn apply(mut self, op: &Op) -> Self {
        match op {
            Op::Create(..) | Op::Unnamed(_) => self.make(op),
            Op::Rename(..) => self.rename(op),
            Op::Hold(_) | Op::Release(_) => self.hold(op),
            Op::Check => self.w.check(),
            Op::Reopen | Op::Crash => self = self.open_again(matches!(op, Op::Crash)),
            Op::Link(i, d, n) => {
                let (w, m, name) = (&self.w, &mut self.m, &self.names[*n]);
                let (id, dir) = (m.pick(*i), m.pick(*d));
                let got = patient(&mut self.waits, || w.fs.link(id, dir, name)).map(drop);
                same(got, m.link(id, dir, name), op);
            }
            Op::Unlink(d, n) => {
                let (w, m, name) = (&self.w, &mut self.m, &self.names[*n]);
                let dir = m.pick(*d);
                let got = patient(&mut self.waits, || w.fs.unlink(dir, name));
                same(got, m.remove(dir, name, false), op);
            }
            Op::Rmdir(d, n) => {
                let (w, m, name) = (&self.w, &mut self.m, &self.names[*n]);
                let dir = m.pick(*d);
                let got = patient(&mut self.waits, || w.fs.rmdir(dir, name));
                same(got, m.remove(dir, name, true), op);
            }
        }
        assert_eq!(self.m.root, self.w.root());
        self
    }
    fn make(&mut self, op: &Op) {
        let (w, m) = (&self.w, &mut self.m);
        match op {
            Op::Create(d, n, kind) => {
                let (dir, name) = (m.pick(*d), &self.names[*n]);
                let want = m.can_create(dir, name);
                let got = patient(&mut self.waits, || w.fs.create(dir, name, &new(*kind)));
                if let (Ok(attr), Ok(())) = (&got, &want) {
                    m.make(attr.id, *kind, 1);
                    m.add(dir, name, attr.id);
                }
                same(got.map(drop), want, op);
            }
            Op::Unnamed(d) => {
                let dir = m.pick(*d);
                let want = m.directory(dir).map(drop);
                let file = new(FileKind::Regular);
                let got = patient(&mut self.waits, || w.fs.create_unnamed(dir, &file));
                if let (Ok(attr), Ok(())) = (&got, &want) {
                    m.make(attr.id, FileKind::Regular, 0);
                    m.nodes.get_mut(&attr.id).unwrap().holds = 1;
                }
                same(got.map(drop), want, op);
            }
            _ => unreachable!("{op:?} makes nothing"),
        }
    }
    fn rename(&mut self, op: &Op) {
        let Op::Rename(d, n, e, k, mode) = op else { unreachable!("{op:?} renames nothing") };
        let (w, m) = (&self.w, &mut self.m);
        let (from, to) = (m.pick(*d), m.pick(*e));
        let (name, to_name) = (&self.names[*n], &self.names[*k]);
        let want = m.rename((from, name), (to, to_name), *mode);
        let got = patient(&mut self.waits, || w.fs.rename(from, name, to, to_name, *mode));
        same(got, want.map(drop), op);
        if want == Ok(true) {
            let white = w.find(from, name).unwrap();
            m.make(white.id, FileKind::CharDevice, 1);
            m.add(from, name, white.id);
        }
    }
    fn hold(&mut self, op: &Op) {
        let (w, m) = (&self.w, &mut self.m);
        match op {
            Op::Hold(i) => {
                let id = m.pick(*i);
                if let Some(node) = m.nodes.get_mut(&id) {
                    node.holds += 1;
                    w.fs.hold(id);
                }
            }
            Op::Release(i) => {
                let id = m.pick(*i);
                if let Some(node) = m.nodes.get_mut(&id).filter(|n| n.holds > 0) {
                    node.holds -= 1;
                    w.fs.release(id, 1);
                    m.collect(id);
                }
            }
            _ => unreachable!("{op:?} holds nothing"),
        }
    }
    fn open_again(self, crash: bool) -> Self {
        let w = if crash { self.w.crash() } else { self.w.reopen() };
        let mut m = self.m;
        m.closed();
        // The highest numbers may be given out again.
        m.made.retain(|id| m.nodes.contains_key(id));
        Self { w, m, ..self }
    }
}

fn run(ops: &[Op]) {
    let pair = ops.iter().fold(Pair::new(), Pair::apply);
    pair.m.agrees_with(&pair.w);
    pair.w.check();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    })]
    #[test]
    fn names_behave_like_a_map(ops in ops()) {
        run(&ops);
    }
}

#[test]
fn with_a_cold_cache_the_first_attempt_leaves_no_trace() {
    let w = World::new();
    let name = |n: u32| format!("{n:0100}").into_bytes();
    let file = new(FileKind::Regular);
    for n in 0..3000 {
        w.fs.create(w.root(), &name(n), &file).unwrap();
    }
    let w = w.reopen();
    let (fs, root) = (&w.fs, w.root());
    let mut waits = [0; 7];
    for n in (0..3000).step_by(60) {
        // Each has leaves of its own: for the entry, for its index, for the inode.
        let id = patient(&mut waits[0], || fs.lookup(root, &name(n))).unwrap().id;
        patient(&mut waits[1], || fs.link(id, root, &name(n + 10_000))).unwrap();
        patient(&mut waits[2], || {
            fs.rename(root, &name(n + 10), root, &name(n + 20_000), RenameMode::NoReplace)
        })
        .unwrap();
        patient(&mut waits[3], || {
            fs.rename(root, &name(n + 20), root, &name(n + 21), RenameMode::Replace)
        })
        .unwrap();
        patient(&mut waits[4], || {
            fs.rename(root, &name(n + 30), root, &name(n + 31), RenameMode::Exchange)
        })
        .unwrap();
        patient(&mut waits[5], || fs.unlink(root, &name(n + 40))).unwrap();
        patient(&mut waits[6], || fs.create(root, &name(n + 30_000), &file)).unwrap();
    }
    assert!(
        waits[..6].iter().all(|w| *w > 0),
        "operations that did not have to wait prove nothing: {waits:?}"
    );
    w.check();
    // Each link and creation adds one, each replacement and removal takes one away.
    assert_eq!(w.names(root).len(), 3000);
}
