//! The same on several devices at the same time.
//!
//! What devices have to do that can do it so ([`Device::file_for`](crate::Device::file_for)) is put
//! on one ring of the kernel, and one thread waits for all of them. Starting a thread for each
//! would take longer than a short write takes. That is what the other devices get.

use super::Member;
use crate::device::{Device, Read, Work, Write, read_in_turn};
use crate::file::overlap::{Ended, Rings};
use smallvec::SmallVec;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread;

/// What one device has to write.
pub(super) struct Share<'v, 'w> {
    pub(super) member: &'v Member,
    pub(super) writes: Vec<Write<'w>>,
}

/// What one device has to read.
pub(super) struct Reads<'b> {
    pub(super) member: Arc<Member>,
    pub(super) reads: Vec<Read<'b>>,
}

/// A write up to this length takes a call of its own if it is alone.
const SHORT: u64 = 1 << 20;

/// Has all devices write their shares; for each a result for each of its writes. Where a volume has
/// one device only, there are no `rings` for it.
pub(super) fn write(rings: Option<&Rings>, shares: &[Share<'_, '_>]) -> Vec<Vec<io::Result<()>>> {
    if let [Share { member, writes: one }] = shares
        && one.len() < 2
        && one.iter().all(|write| write.len() <= SHORT)
    {
        return vec![member.write_all(one)];
    }
    on_ring(
        shares,
        |share| rings.and(share.member.device.file_for(&Work::Write(&share.writes))),
        |batch, meanwhile| {
            let transfers: Vec<_> = batch.iter().map(|(s, file)| (*file, &s.writes[..])).collect();
            let ended = rings?.write(&transfers, meanwhile)?;
            Some(batch.iter().zip(ended).map(|((share, _), ended)| settle(share, ended)).collect())
        },
        |share| share.member.write_all(&share.writes),
    )
}

/// Does again what was interrupted.
fn settle(share: &Share<'_, '_>, ended: Vec<Ended>) -> Vec<io::Result<()>> {
    let result = |(write, ended): (&Write<'_>, Ended)| match ended {
        Ended::Whole => Ok(()),
        Ended::Failed(error) => Err(error),
        Ended::InPart => share.member.device.write_vectored_at(write.at, write.data),
    };
    share.writes.iter().zip(ended).map(result).collect()
}

/// Flushes all devices, and returns a result for each.
pub(super) fn flush(rings: Option<&Rings>, members: &[&Member]) -> Vec<io::Result<()>> {
    let last = members.last().map(|member| member.id);
    on_ring(
        members,
        // The last one is flushed by this thread, which has nothing else to do meanwhile.
        |member| {
            let others = rings.filter(|_| Some(member.id) != last);
            others.and(member.device.file_for(&Work::Flush))
        },
        |batch, meanwhile| {
            let files: Vec<&File> = batch.iter().map(|(_, file)| *file).collect();
            rings?.flush(&files, meanwhile)
        },
        |member| member.device.flush(),
    )
}

/// Has all devices read their shares; for each a result for each of its reads.
pub(super) fn read(rings: Option<&Rings>, shares: &mut [Reads<'_>]) -> Vec<Vec<io::Result<()>>> {
    let (mut batch, mut rest, mut is_in_batch) = (Vec::new(), Vec::new(), Vec::new());
    for Reads { member, reads } in shares {
        let file = rings.and(member.device.file_for(&Work::Read(reads)));
        is_in_batch.push(file.is_some());
        match file {
            Some(file) => batch.push((&*member.device, (file, &mut reads[..]))),
            None => rest.push((&*member.device, &mut reads[..])),
        }
    }
    let (devices, mut transfers): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    let mut others = Vec::new();
    let mut meanwhile = || others = rest.iter_mut().map(|(d, r)| read_alone(*d, r)).collect();
    let ended = match rings {
        Some(rings) if !transfers.is_empty() => rings.read(&mut transfers, Some(&mut meanwhile)),
        _ => None,
    };
    if ended.is_none() {
        meanwhile();
    }
    let done = devices.into_iter().zip(transfers);
    let mut done: Vec<_> = match ended {
        None => done.map(|(device, (_, reads))| read_alone(device, reads)).collect(),
        Some(ended) => {
            done.zip(ended).map(|((device, (_, reads)), e)| read_rest(device, reads, e)).collect()
        }
    };
    let (mut done, mut others) = (done.drain(..), others.into_iter());
    is_in_batch.iter().filter_map(|b| if *b { done.next() } else { others.next() }).collect()
}

/// What is read by itself goes through the machine's page cache, and need not stay there.
fn read_alone(device: &dyn Device, reads: &mut [Read<'_>]) -> Vec<io::Result<()>> {
    let read = |read: &mut Read<'_>| {
        read_in_turn(device, read)?;
        device.passed(read.at, read.len());
        Ok(())
    };
    reads.iter_mut().map(read).collect()
}

/// Does again what was interrupted.
fn read_rest(
    device: &dyn Device,
    reads: &mut [Read<'_>],
    ended: Vec<Ended>,
) -> Vec<io::Result<()>> {
    let result = |(read, ended): (&mut Read<'_>, Ended)| match ended {
        Ended::Whole => Ok(()),
        Ended::Failed(error) => Err(error),
        Ended::InPart => read_in_turn(device, read),
    };
    reads.iter_mut().zip(ended).map(result).collect()
}

/// Has a ring do what has a file, all of it together, and the others meanwhile what is left, each
/// `alone`. If the ring does nothing, all of them do it alone.
fn on_ring<'s, S: Sync, T: Send>(
    shares: &'s [S],
    file: impl Fn(&'s S) -> Option<&'s File>,
    ring: impl FnOnce(&[(&'s S, &'s File)], Option<&mut dyn FnMut()>) -> Option<Vec<T>>,
    alone: impl Fn(&'s S) -> T + Sync,
) -> Vec<T> {
    let files: SmallVec<[Option<&File>; 4]> = shares.iter().map(file).collect();
    let (mut batch, mut rest) = (Vec::new(), Vec::new());
    for (share, file) in shares.iter().zip(&files) {
        match file {
            Some(file) => batch.push((share, *file)),
            None => rest.push(share),
        }
    }
    let mut others = SmallVec::new();
    let mut meanwhile = || others = at_once(&rest, &alone);
    let meanwhile = if rest.is_empty() { None } else { Some(&mut meanwhile as &mut dyn FnMut()) };
    let done = if batch.is_empty() { None } else { ring(&batch, meanwhile) };
    let Some(done) = done else {
        let all: Vec<&S> = shares.iter().collect();
        return at_once(&all, alone).into_vec();
    };
    let (mut done, mut others) = (done.into_iter(), others.into_iter());
    let in_order = |file: &Option<&File>| if file.is_some() { done.next() } else { others.next() };
    files.iter().filter_map(in_order).collect()
}

/// Does something with each, with all of them at the same time, on threads.
pub(super) fn at_once<'m, M: Sync, T: Send>(
    each: &[&'m M],
    what: impl Fn(&'m M) -> T + Sync,
) -> SmallVec<[T; 4]> {
    let Some((first, others)) = each.split_first() else { return SmallVec::new() };
    if others.is_empty() {
        return SmallVec::from_iter([what(first)]);
    }
    thread::scope(|scope| {
        let what = &what;
        let start = |one: &&'m M| {
            let one = *one;
            let thread = thread::Builder::new().name("larder-device".into());
            // Without a thread it is done afterwards.
            thread.spawn_scoped(scope, move || what(one)).map_err(|_| one)
        };
        let started: SmallVec<[_; 4]> = others.iter().map(start).collect();
        let mut results = SmallVec::from_iter([what(first)]);
        for thread in started {
            results.push(match thread {
                Ok(thread) => {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }
                Err(one) => what(one),
            });
        }
        results
    })
}
