//! One run, from what is there to a table of what is there then.
//!
//! Each step leaves both sides such that a run that begins anew goes on: nothing is remembered
//! elsewhere. The order matters. What was received in part is finished first, from the parent that
//! it was begun with. Otherwise a policy that keeps little would drop it for a newer snapshot, and
//! a long first transfer that is interrupted each night would never end. Only when everything is
//! sent are snapshots deleted.
//!
//! Which snapshots are sent and deleted is decided by [`larder_backup::plan`].

use super::flow::{self, Sink};
use super::held::{self, Held, Parent, Ready, State};
use super::source::Source;
use super::table::{Report, Row};
use super::target::Target;
use crate::failure::Advise;
use crate::interrupt::Interrupt;
use crate::print;
use anyhow::{Context, anyhow};
use larder_backup::{Keep, Name, Snapshot, plan};
use larder_receive::destination::Sent;
use std::collections::{HashMap, HashSet};
use std::io::Write;

/// How far a clock may have been set back since the last run.
const HOUR: i64 = 3600;
/// The uuid of a snapshot that is not made.
const PRETENDED: [u8; 16] = [0xff; 16];

/// What the user asks for.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    /// What the names of the snapshots begin with.
    pub(super) prefix: Vec<u8>,
    pub(super) keep: Keep,
    /// Bytes for each second.
    pub(super) rate: Option<u64>,
    /// Begin with everything, though the target has snapshots that the source does not have.
    pub(super) full: bool,
    pub(super) dry_run: bool,
    pub(super) quiet: bool,
    /// Now, in seconds since 1970.
    pub(super) now: i64,
}

/// A run.
pub(super) struct Run<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) target: &'a mut dyn Target,
    pub(super) wish: &'a Wish,
    pub(super) interrupt: &'a Interrupt,
}

/// What both sides have.
struct Sides {
    source: Vec<Ready>,
    target: Vec<(Name, Sent)>,
    /// The rest of the target.
    others: Vec<Held>,
    /// The last name that is taken on either side.
    newest: Option<Name>,
}

impl Sides {
    fn at_source(&self, id: [u8; 16]) -> Option<&Ready> {
        self.source.iter().find(|ready| ready.sent.uuid == id)
    }

    fn at_target(&self, id: [u8; 16]) -> Option<&Sent> {
        self.target.iter().map(|(_, sent)| sent).find(|sent| sent.uuid == id)
    }

    /// The name at the source of a snapshot that both have.
    fn common(&self, id: [u8; 16]) -> Option<&Name> {
        self.at_source(id).filter(|_| self.at_target(id).is_some()).map(|ready| &ready.name)
    }

    /// The snapshot at the source of which the target has a part.
    fn source_of(&self, part: &Held) -> Option<&Ready> {
        let State::Part { sent, .. } = part.state else { return None };
        self.source.iter().find(|ready| ready.sent == sent && ready.name == part.name)
    }

    /// The newest snapshot before this time that both have.
    fn common_before(&self, time: i64) -> Option<&Name> {
        let earlier = self.source.iter().rev().filter(|ready| ready.name.time < time);
        earlier.into_iter().find_map(|ready| self.common(ready.sent.uuid))
    }
}

impl Run<'_> {
    pub(super) fn run(mut self) -> anyhow::Result<Report> {
        self.note_nested()?;
        let mut sides = self.look()?;
        self.check_related(&sides)?;
        self.finish_parts(&mut sides)?;
        let made = self.snapshot(&mut sides)?;
        let snapshot = |name: &Name, sent: &Sent| Snapshot { time: name.time, id: sent.uuid };
        let source: Vec<_> = sides.source.iter().map(|r| snapshot(&r.name, &r.sent)).collect();
        let target: Vec<_> = sides.target.iter().map(|(name, sent)| snapshot(name, sent)).collect();
        let plan = plan(&source, &target, &self.wish.keep);
        if !self.wish.dry_run {
            self.send(&sides, &plan)?;
            self.prune(&sides, &plan)?;
        }
        let row = |row| Row::new(row, &self.wish.prefix, &plan, &made);
        let rows = plan.rows.iter().map(row).collect();
        Ok(Report { made, rows, dry_run: self.wish.dry_run })
    }

    fn say(&self, text: &str) {
        if !self.wish.quiet {
            print::say(text);
        }
    }

    fn note_nested(&self) -> anyhow::Result<()> {
        let nested = self.source.nested()?;
        if !nested.is_empty() {
            print::say(&format!(
                "larder: note: a snapshot has no subvolumes that are in the source; back these up \
                 each on its own: {}",
                nested.join(", ")
            ));
        }
        Ok(())
    }

    /// What there is.
    fn look(&mut self) -> anyhow::Result<Sides> {
        let prefix = &self.wish.prefix;
        let (source, target) = (self.source.list()?, self.target.list()?);
        let mut sides = Sides {
            source: held::to_send(&source, prefix),
            target: Vec::new(),
            others: Vec::new(),
            newest: held::newest(&source, prefix).max(held::newest(&target, prefix)),
        };
        for held in held::received(&target, prefix) {
            let twice = |sent: &Sent| sides.target.iter().any(|(_, s)| s.uuid == sent.uuid);
            match held.state {
                State::Complete(sent) if twice(&sent) => {
                    self.leave_alone(&held.name, "is a copy of an earlier one");
                    sides.others.push(held);
                }
                State::Complete(sent) => {
                    sides.target.push((held.name.clone(), sent));
                    if !held.checkpoints.is_empty() {
                        sides.others.push(held);
                    }
                }
                State::Part { .. } | State::Begun => sides.others.push(held),
                State::Foreign => {
                    self.leave_alone(&held.name, "was not received by a backup");
                    sides.others.push(held);
                }
            }
        }
        self.leave_changed_alone(&mut sides);
        Ok(sides)
    }

    /// What is not what it was when it was sent is neither a parent nor deleted. Nor does the same
    /// uuid stand for two snapshots of the source.
    fn leave_changed_alone(&self, sides: &mut Sides) {
        let (mut changed, mut copies) = (HashSet::new(), HashSet::new());
        let mut seen = HashSet::new();
        for Ready { name, sent, received } in &sides.source {
            let other = sides.at_target(sent.uuid).filter(|other| !received && *other != sent);
            if other.is_some() {
                self.leave_alone(name, "was changed on one side after it was sent");
                changed.insert(sent.uuid);
            } else if !seen.insert(sent.uuid) {
                self.leave_alone(name, "is a copy of an earlier one");
                copies.insert(name.clone());
            }
        }
        let stays =
            |ready: &Ready| !changed.contains(&ready.sent.uuid) && !copies.contains(&ready.name);
        sides.source.retain(stays);
        sides.target.retain(|(_, sent)| !changed.contains(&sent.uuid));
    }

    fn leave_alone(&self, name: &Name, why: &str) {
        let name = print::name(&name.bytes());
        print::say(&format!("larder: note: {name} {why}, and is left alone"));
    }

    /// Finishes what was received in part, and deletes what cannot be finished.
    fn finish_parts(&mut self, sides: &mut Sides) -> anyhow::Result<()> {
        let mut done = Vec::new();
        for held in &sides.others {
            self.interrupt.check()?;
            let State::Part { sent, parent } = held.state else {
                self.clean_up(held)?;
                continue;
            };
            let shown = print::name(&held.name.bytes());
            let parent = match parent {
                Parent::Whole => Some(None),
                Parent::From(parent) => sides.common(parent.uuid).cloned().map(Some),
                Parent::Any => Some(sides.common_before(held.name.time).cloned()),
            };
            match (sides.source_of(held), parent) {
                (Some(Ready { name, .. }), Some(parent)) => {
                    if !self.wish.dry_run {
                        self.go_on(name, parent.as_ref())?;
                    }
                    done.push((name.clone(), sent));
                }
                _ if self.wish.dry_run => {}
                _ => {
                    self.say(&format!("Deleting {shown} in the target: it cannot be completed"));
                    self.target.delete(&held.everything())?;
                }
            }
        }
        sides.target.extend(done);
        sides.target.sort_by_key(|(name, _)| name.time);
        Ok(())
    }

    /// Deletes what a run that ended early left, and what nothing can go on from.
    fn clean_up(&mut self, held: &Held) -> anyhow::Result<()> {
        let left = match held.state {
            State::Complete(_) => held.checkpoints.clone(),
            State::Begun => held.everything(),
            State::Part { .. } | State::Foreign => Vec::new(),
        };
        if left.is_empty() || self.wish.dry_run { Ok(()) } else { self.target.delete(&left) }
    }

    /// Finishes what was received in part.
    fn go_on(&mut self, name: &Name, parent: Option<&Name>) -> anyhow::Result<()> {
        let done = self.send_one(name, parent, "Going on with");
        // It will go on once more.
        self.interrupt.check()?;
        let shown = print::name(&name.bytes());
        done.hint(format!(
            "if it cannot go on, delete {shown} in the target (`larder subvolume delete`); the \
             next run begins with it again"
        ))
    }

    /// Two sources with one name would delete each other's snapshots, and each other's parts.
    fn check_related(&self, sides: &Sides) -> anyhow::Result<()> {
        let related = sides.source.iter().any(|r| sides.common(r.sent.uuid).is_some())
            || sides.others.iter().any(|part| sides.source_of(part).is_some());
        let is_part = |held: &&Held| matches!(held.state, State::Part { .. } | State::Begun);
        let parts = sides.others.iter().filter(is_part);
        let names = sides.target.iter().map(|(name, _)| name).chain(parts.map(|part| &part.name));
        let Some(last) = names.max().filter(|_| !related && !self.wish.full) else {
            return Ok(());
        };
        Err(anyhow!(
            "the target has {}, and the source has no snapshot that the target has, too",
            print::name(&last.bytes())
        ))
        .hint(
            "if it belongs to another source, give this one another name (--name) or another \
             directory; if it is an older backup of this source, --full sends everything again",
        )
        .could_not_run()
    }

    /// Makes the snapshot of this run.
    fn snapshot(&mut self, sides: &mut Sides) -> anyhow::Result<Name> {
        self.interrupt.check()?;
        let time = moment(self.wish.now, sides.newest.as_ref())?;
        let name = Name { prefix: self.wish.prefix.clone(), time };
        let sent = if self.wish.dry_run {
            Sent { uuid: PRETENDED, ctransid: larder_format::Generation(0) }
        } else {
            self.source.snapshot(&name.bytes())?
        };
        sides.source.push(Ready { name: name.clone(), sent, received: false });
        Ok(name)
    }

    fn send(&mut self, sides: &Sides, plan: &larder_backup::Plan) -> anyhow::Result<()> {
        let names: HashMap<[u8; 16], &Name> =
            sides.source.iter().map(|ready| (ready.sent.uuid, &ready.name)).collect();
        for send in &plan.send {
            let parent = send.parent.map(|parent| names[&parent]);
            self.send_one(names[&send.id], parent, "Sending")?;
        }
        Ok(())
    }

    fn send_one(&mut self, name: &Name, parent: Option<&Name>, what: &str) -> anyhow::Result<()> {
        self.interrupt.check()?;
        let (name, parent) = (name.bytes(), parent.map(Name::bytes));
        let shown = print::name(&name);
        let from = match &parent {
            Some(parent) => format!("what changed since {}", print::name(parent)),
            None => "everything".to_owned(),
        };
        self.say(&format!("{what} {shown}: {from}"));
        let (source, interrupt, rate) = (self.source, self.interrupt, self.wish.rate);
        let bar = flow::bar(self.wish.quiet);
        let mut send = |out: &mut dyn Write| {
            let mut out = Sink::new(out, rate, interrupt, &bar);
            source.send(&name, parent.as_deref(), &mut out)?;
            out.flush().context("writing the stream")
        };
        let done = self.target.receive(&mut send);
        bar.finish_and_clear();
        // The signal is the cause of whatever failed.
        interrupt.check()?;
        done.with_context(|| shown)
    }

    /// Deletes what the policy does not keep. What cannot be deleted does not keep the rest.
    fn prune(&mut self, sides: &Sides, plan: &larder_backup::Plan) -> anyhow::Result<()> {
        let mut failed = Vec::new();
        for Ready { name, sent, .. } in &sides.source {
            if plan.prune_source.contains(&sent.uuid) {
                self.interrupt.check()?;
                let name = name.bytes();
                self.say(&format!("Deleting {} in the source", print::name(&name)));
                failed.extend(self.source.delete(&name).err());
            }
        }
        let gone = sides.target.iter().filter(|(_, sent)| plan.prune_target.contains(&sent.uuid));
        let gone: Vec<Vec<u8>> = gone.map(|(name, _)| name.bytes()).collect();
        for name in &gone {
            self.say(&format!("Deleting {} in the target", print::name(name)));
        }
        self.interrupt.check()?;
        failed.extend(self.target.delete(&gone).err());
        failed.extend(self.source.finish().err());
        failed.extend(self.target.finish().err());
        match failed.into_iter().next() {
            Some(error) => {
                Err(error.context("everything was sent, but not everything was deleted"))
            }
            None => Ok(()),
        }
    }
}

/// The time that a new snapshot is called by: later than all that there are, so that names sort as
/// snapshots were made. Two runs can be in one second, and clocks are set.
fn moment(now: i64, newest: Option<&Name>) -> anyhow::Result<i64> {
    match newest {
        Some(name) if name.time > now.saturating_add(HOUR) => Err(anyhow!(
            "{} is from the future: it is {} UTC here",
            print::name(&name.bytes()),
            print::time(now)
        ))
        .hint("set the clock; or, if that snapshot was made with a wrong clock, delete it")
        .could_not_run(),
        Some(name) => Ok(now.max(name.time + 1)),
        None => Ok(now),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_snapshots_were_made() {
        let name = |time| Name { prefix: b"home".to_vec(), time };
        assert_eq!(moment(1000, None).unwrap(), 1000);
        assert_eq!(moment(1000, Some(&name(10))).unwrap(), 1000);
        assert_eq!(moment(1000, Some(&name(1000))).unwrap(), 1001, "two runs in one second");
        assert_eq!(moment(1000, Some(&name(1300))).unwrap(), 1301, "the clock was set back");
        let error = format!("{:#}", moment(1000, Some(&name(100_000))).unwrap_err());
        assert!(error.contains("home.19700102T034640Z is from the future"), "{error}");
    }
}
