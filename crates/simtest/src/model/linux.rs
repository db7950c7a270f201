//! Promises of the model that Linux's own btrfs is known not to keep. No replay, by Linux or by
//! Larder, can add what the log lacks.
//!
//! Three things, each as narrow as what was seen, and only while no commit has the operation:
//!
//! - **Renames.** Until the inode that was moved is synced itself, a log may have its old name as
//!   well: in the old directory when the new one is synced, and that of a directory when a file
//!   below it is. Where it has taken another one's place, that name may be free for as long as
//!   neither the inode nor its new directory is synced.
//! - **Zeros.** A file that is cut, or that grows by a clone, while it has data in memory gets its
//!   new size without them. So does a file that a write makes longer, if another thread commits
//!   meanwhile: without items for holes the size on the disk is that in memory as soon as one
//!   extent of several has been written. No sync has covered them: a byte that a sync promised is
//!   never excused.

use super::{Bounds, Content, Domain, Done, History, Seq, World, weak};
use crate::ops::{Move, Op};
use crate::world::{Body, Ino};
use std::sync::Arc;

impl History {
    /// As [`History::verify`] with logs, for a file system that Linux wrote: the complaint, where
    /// it is about something that Linux is known not to keep.
    ///
    /// # Errors
    /// What is not allowed, in words.
    pub fn verify_linux(&self, found: &World, at: Seq) -> Result<Option<String>, String> {
        self.no_strangers(found)?;
        let mut excused = None;
        for domain in &self.domains {
            let bounds = self.bounds(domain, at);
            if let Err(complaint) = weak(domain, &bounds, self.is_alone(domain), found) {
                let beside = self.domains.len() > 1;
                let known = Complaint::parse(&complaint)
                    .is_some_and(|c| c.is_known(domain, &bounds, beside));
                if !known {
                    return Err(format!(
                        "{complaint}\n  (operations {}..{} must / may be there)",
                        bounds.lo, bounds.hi
                    ));
                }
                excused = Some(complaint);
            }
        }
        Ok(excused)
    }
}

/// What the model says is wrong.
#[derive(Debug, PartialEq, Eq)]
enum Complaint {
    /// A directory's entry leads somewhere.
    Entry { dir: Ino, name: String, to: Option<Ino> },
    /// An inode has one name too many.
    Links { ino: Ino },
    /// A byte is zero.
    Zero { ino: Ino, at: u64 },
}

impl Complaint {
    fn parse(text: &str) -> Option<Self> {
        if let Some(rest) = text.strip_prefix("entry ") {
            let (name, rest) = rest.split_once(" of inode ")?;
            let (dir, rest) = rest.split_once(" leads to ")?;
            let (to, _) = rest.split_once(", which ")?;
            let to = match to {
                "None" => None,
                some => Some(some.trim_start_matches("Some(").trim_end_matches(')').parse().ok()?),
            };
            return Some(Self::Entry { dir: dir.parse().ok()?, name: name.into(), to });
        }
        let rest = text.strip_prefix("inode ")?;
        if let Some((ino, rest)) = rest.split_once(": byte ") {
            let (at, _) = rest.split_once(" is 0x00, ")?;
            return Some(Self::Zero { ino: ino.parse().ok()?, at: at.parse().ok()? });
        }
        let (ino, counts) = rest.split_once(" has link count ")?;
        let (has, rest) = counts.split_once(", not ")?;
        let (wanted, _) = rest.split_once(", which ")?;
        let (has, wanted): (u32, u32) = (has.parse().ok()?, wanted.parse().ok()?);
        (has == wanted + 1).then_some(Self::Links { ino: ino.parse().ok()? })
    }

    /// `beside`: other threads commit at any time.
    fn is_known(&self, domain: &Domain, bounds: &Bounds, beside: bool) -> bool {
        let since = |ino: &Ino| bounds.data.get(ino).copied().unwrap_or(0).max(bounds.all);
        let may = |from: usize| (from..bounds.hi.max(from)).map(|k| (k, &domain.done[k]));
        let mut renames = may(bounds.all).filter_map(|(k, done)| Rename::of(done).map(|r| (k, r)));
        match self {
            Self::Entry { dir, name, to: Some(to) } => renames
                .any(|(k, r)| r.moved == *to && r.from == (*dir, name.as_str()) && since(to) <= k),
            Self::Entry { dir, name, to: None } => renames.any(|(k, r)| {
                r.replaces
                    && r.to == (*dir, name.as_str())
                    && since(dir) <= k
                    && since(&r.moved) <= k
            }),
            Self::Links { ino } => renames.any(|(k, r)| r.moved == *ino && since(ino) <= k),
            Self::Zero { ino, at } => {
                let contents = |k: usize| content(&domain.worlds[k], *ino);
                let byte = |k: usize| contents(k).map_or(0, |c| byte(&c, *at));
                let resizes = |(k, d): (usize, &Done)| match d.op {
                    Op::Truncate { .. } | Op::Copy { .. } => byte(k) != 0,
                    Op::Write { .. } => beside && contents(k).is_some_and(|c| c.size <= *at),
                    _ => false,
                };
                let since = since(ino);
                byte(since) == 0
                    && may(since).any(|(k, d)| d.touched.inodes.contains(ino) && resizes((k, d)))
            }
        }
    }
}

fn content(world: &World, ino: Ino) -> Option<Arc<Content>> {
    match &world.node(ino)?.body {
        Body::File(content) => Some(content.clone()),
        _ => None,
    }
}

fn byte(content: &Content, at: u64) -> u8 {
    if at < content.size {
        content.page(at / 4096).map_or(0, |page| page[(at % 4096) as usize])
    } else {
        0
    }
}

/// A rename that was done, but not an exchange.
struct Rename<'a> {
    moved: Ino,
    from: (Ino, &'a str),
    to: (Ino, &'a str),
    replaces: bool,
}

impl<'a> Rename<'a> {
    fn of(done: &'a Done) -> Option<Self> {
        let Op::Rename { from, to, mode } = &done.op else { return None };
        let (moved, [from_dir, to_dir]) =
            (*done.touched.inodes.first()?, done.touched.dirs[..].try_into().ok()?);
        let name = |path: &'a str| path.rsplit_once('/').map_or(path, |(_, name)| name);
        let replaces = *mode == Move::Replace && done.touched.inodes.len() == 2;
        (*mode != Move::Exchange).then_some(Self {
            moved,
            from: (from_dir, name(from)),
            to: (to_dir, name(to)),
            replaces,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::history;
    use crate::ops::{Bytes, filled};

    fn world(h: &History, k: usize) -> World {
        h.domains[0].worlds[k].clone()
    }

    /// A world in which an inode has its old name, too.
    fn both(h: &History, k: usize, inode: &str, old: (&str, &str)) -> World {
        let mut w = world(h, k);
        let (ino, dir) = (w.resolve(inode).unwrap(), w.resolve(old.0).unwrap());
        w.insert(dir, old.1, Some(ino), || unreachable!());
        w.node_mut(ino).nlink += 1;
        w
    }

    #[test]
    fn an_old_name_is_excused_until_its_inode_is_synced() {
        let h = history("mk A; new A/f; COMMIT; mv A/f f; F /; F f");
        let w = both(&h, 5, "f", ("A", "f"));
        assert!(h.verify_linux(&w, Seq(50)).unwrap().unwrap().contains("link count 2, not 1"));
        assert!(h.verify_linux(&w, Seq(60)).is_err(), "the file itself is synced");
        assert_eq!(h.verify_linux(&world(&h, 5), Seq(60)), Ok(None));
        let h = history("mk A; new A/f; COMMIT; F A/f");
        assert!(
            h.verify_linux(&both(&h, 4, "A/f", ("", "f")), Seq(40)).is_err(),
            "nobody moved it"
        );
        let h = history("mk D; new D/f; F D/f; mv D E; F E/f; F E");
        assert!(h.verify_linux(&world(&h, 3), Seq(50)).unwrap().is_some());
        assert!(h.verify_linux(&world(&h, 3), Seq(60)).is_err(), "the directory itself is synced");
    }

    #[test]
    fn a_name_that_was_taken_over_is_excused_until_either_side_is_synced() {
        let h = history("mk A; new A/f; F A/f; mk B; new B/f; mv B/f A/f; new A/g; F A/g; F A");
        let mut w = world(&h, 7);
        w.apply(&Op::Unlink("A/f".into())).unwrap();
        assert!(h.verify_linux(&w, Seq(80)).unwrap().is_some());
        assert!(h.verify_linux(&w, Seq(90)).is_err());
    }

    #[test]
    fn zeros_are_excused_where_nothing_was_synced() {
        let zeros = |text: &str, at: u64| {
            let h = history(text);
            let mut w = world(&h, h.domains[0].done.len());
            let f = w.resolve("f").unwrap();
            let Body::File(content) = &mut w.node_mut(f).body else { panic!() };
            Arc::make_mut(content).clear(Bytes { from: at, to: at + 100 });
            h.verify_linux(&w, Seq(1000))
        };
        assert!(zeros("new f; f[0,8K)=a; trunc f 6000; new g; F g", 100).unwrap().is_some());
        assert!(
            zeros("new f; new g; g[0,8K)=a; f[0,4K)=b; copy g[0,8K)>f@4K; F g", 100)
                .unwrap()
                .is_some()
        );
        assert!(zeros("new f; f[0,8K)=a; F f; trunc f 6000; new g; F g", 100).is_err(), "synced");
        assert!(zeros("new f; f[0,8K)=a; new g; F g", 100).is_err(), "nothing was cut");
        let h = history("new f; f[0,8K)=a; new g; F g");
        let f = world(&h, 4).resolve("f").unwrap();
        let bounds = h.bounds(&h.domains[0], Seq(1000));
        let zero = Complaint::Zero { ino: f, at: 5000 };
        assert!(zero.is_known(&h.domains[0], &bounds, true), "a commit came while it was written");
        assert!(!zero.is_known(&h.domains[0], &bounds, false));
        let h = history("new f; f[0,8K)=a; trunc f 6000; new g; F g");
        let mut w = world(&h, 4);
        let f = w.resolve("f").unwrap();
        let Body::File(content) = &mut w.node_mut(f).body else { panic!() };
        Arc::make_mut(content).write(0, &filled(b'z', Bytes { from: 0, to: 100 }));
        assert!(h.verify_linux(&w, Seq(1000)).is_err(), "bytes of others are no zeros");
    }
}
