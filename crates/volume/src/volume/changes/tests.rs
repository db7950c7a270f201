//! Tests of devices that come and go, also beneath transfers.

use super::super::write::{self, Transfer};
use super::*;
use crate::superblock::SuperCopies;
use larder_format::{Logical, Physical, Superblock};
use smallvec::smallvec;
use std::borrow::Cow;
use std::io::{self, IoSlice};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;
use zerocopy::FromZeros;

const MIB: u64 = 1 << 20;

/// A device in memory, on which a read can be made to wait.
#[derive(Debug)]
struct Memory {
    name: &'static str,
    bytes: Mutex<Vec<u8>>,
    /// Told when a read has begun; it goes on when the other is told.
    gate: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Memory {
    fn new(name: &'static str, mib: u64) -> Arc<Self> {
        let bytes = Mutex::new(vec![0; usize::try_from(mib * MIB).unwrap()]);
        Arc::new(Self { name, bytes, gate: Mutex::new(None) })
    }
}

impl Device for Memory {
    fn name(&self) -> String {
        self.name.into()
    }
    fn size(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        if let Some((begun, go_on)) = self.gate.lock().unwrap().take() {
            begun.send(()).unwrap();
            go_on.recv().unwrap();
        }
        let at = usize::try_from(at.0).unwrap();
        buf.copy_from_slice(&self.bytes.lock().unwrap()[at..][..buf.len()]);
        Ok(())
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        let at = usize::try_from(at.0).unwrap();
        self.bytes.lock().unwrap()[at..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

fn chunk(start: u64, on: DeviceId) -> MappedChunk {
    MappedChunk {
        start: Logical(start * MIB),
        length: MIB,
        kind: 1,
        stripes: smallvec![Stripe { device: on, at: Physical(2 * MIB) }],
    }
}

fn ids(volume: &Volume) -> Vec<u64> {
    volume.devices().map(|(id, _)| id.0).collect()
}

#[test]
fn a_device_that_was_added_takes_chunks_and_goes_when_they_have_gone() {
    let v = Volume::new(vec![(DeviceId(5), Memory::new("a", 4))]).unwrap();
    assert!(v.add_chunk(chunk(16, DeviceId(2))).is_err());
    v.add_device(DeviceId(2), Memory::new("b", 4)).unwrap();
    assert_eq!((ids(&v), v.behind()), (vec![2, 5], vec![]));
    assert!(!v.takes_chunks(DeviceId(2)) && v.devices_for_chunks() == 1);
    v.set_closed(DeviceId(2), false);
    assert!(v.takes_chunks(DeviceId(2)) && v.devices_for_chunks() == 2);
    v.add_chunk(chunk(16, DeviceId(2))).unwrap();
    v.write(Logical(16 * MIB), &[7; 4096]).unwrap();

    let text = v.add_device(DeviceId(2), Memory::new("c", 4)).unwrap_err().to_string();
    assert_eq!(text, "c is in use: device 2 of the file system is b");
    let text = v.remove_device(DeviceId(2)).unwrap_err().to_string();
    assert_eq!(text, "b is in use: the chunk at 16777216 lies on it");
    v.map().remove(Logical(16 * MIB));
    let gone = v.remove_device(DeviceId(2)).unwrap();
    let mut back = [0; 1];
    gone.read_at(Physical(2 * MIB), &mut back).unwrap();
    assert_eq!((gone.name(), back), ("b".into(), [7]));

    assert!(matches!(v.remove_device(DeviceId(2)), Err(VolumeError::Missing { .. })));
    let text = v.remove_device(DeviceId(5)).unwrap_err().to_string();
    assert!(text.contains("a is in use: the file system has no other device"), "{text}");
    assert_eq!(ids(&v), [5]);
}

#[test]
fn a_device_that_was_missing_is_behind_when_it_comes() {
    let v = Volume::new(vec![(DeviceId(1), Memory::new("a", 4))]).unwrap().with_missing();
    v.add_chunk(chunk(16, DeviceId(2))).unwrap();
    assert!(matches!(
        v.add_device(DeviceId(2), Memory::new("short", 2)),
        Err(VolumeError::Corrupt { .. })
    ));
    v.add_device(DeviceId(2), Memory::new("b", 4)).unwrap();
    assert_eq!(v.behind(), [DeviceId(2)]);
    v.set_current(DeviceId(2));
    assert!(v.read(Logical(16 * MIB), &mut [0; 512], 0).is_ok());
}

#[test]
fn a_device_that_goes_is_in_use_until_its_transfers_have_ended() {
    for swap in [false, true] {
        let (old, new) = (Memory::new("old", 4), Memory::new("new", 4));
        let devices: Vec<(DeviceId, Arc<dyn Device>)> =
            vec![(DeviceId(1), Memory::new("a", 4)), (DeviceId(2), old.clone())];
        let v = Volume::new(devices).unwrap();
        v.add_chunk(chunk(16, DeviceId(2))).unwrap();
        v.write(Logical(16 * MIB), &[7; 512]).unwrap();
        if swap {
            v.set_target(DeviceId(2), new.clone()).unwrap();
        }
        let ((begun, began), (go_on, waits)) = (channel(), channel());
        *old.gate.lock().unwrap() = Some((begun, waits));
        let has_gone = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut back = [0; 512];
                v.read(Logical(16 * MIB), &mut back, 0).unwrap();
                back[0]
            });
            began.recv().unwrap();
            let change = scope.spawn(|| {
                let gone = if swap {
                    v.promote_target().unwrap().unwrap()
                } else {
                    v.map().remove(Logical(16 * MIB));
                    v.remove_device(DeviceId(2)).unwrap()
                };
                has_gone.store(true, Relaxed);
                gone.name()
            });
            // The list is the new one at once, and the call still waits.
            while v.device(DeviceId(2)).is_some_and(|d| d.name() == "old") {
                thread::yield_now();
            }
            if swap {
                v.write(Logical(16 * MIB), &[9; 512]).unwrap();
                v.read(Logical(16 * MIB), &mut [0; 512], 0).unwrap();
            }
            // No proof that it would wait for ever, but it had the time to be wrong.
            assert!(began.recv_timeout(Duration::from_millis(20)).is_err());
            assert!(!has_gone.load(Relaxed), "it did not wait for the read");
            go_on.send(()).unwrap();
            assert_eq!(reader.join().unwrap(), 7);
            assert_eq!(change.join().unwrap(), "old");
        });
        let first = |d: &Memory| d.bytes.lock().unwrap()[usize::try_from(2 * MIB).unwrap()];
        assert_eq!((first(&old), first(&new)), (7, if swap { 9 } else { 0 }));
    }
}

#[test]
fn a_device_that_is_too_short_takes_no_place() {
    let v = Volume::new(vec![(DeviceId(1), Memory::new("a", 4))]).unwrap();
    v.add_chunk(chunk(16, DeviceId(1))).unwrap();
    let target = |mib| v.set_target(DeviceId(1), Memory::new("b", mib));
    assert!(matches!(target(2), Err(VolumeError::Corrupt { .. })));
    assert!(matches!(v.promote_target(), Err(VolumeError::Missing { .. })));
    target(3).unwrap();
    assert_eq!(v.promote_target().unwrap().unwrap().name(), "a");
}

#[test]
fn transfers_go_on_while_the_list_changes() {
    let v = Volume::new(vec![(DeviceId(1), Memory::new("a", 4))]).unwrap();
    v.add_chunk(chunk(16, DeviceId(1))).unwrap();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for n in 0..2u8 {
            let (v, stop, done) = (&v, &stop, &done);
            scope.spawn(move || {
                let at = Logical(16 * MIB + u64::from(n) * 4096);
                let mut back = [0; 4096];
                while !stop.load(Relaxed) {
                    let byte = n + 1;
                    v.write(at, &[byte; 4096]).unwrap();
                    v.read(at, &mut back, 0).unwrap();
                    assert_eq!(back, [byte; 4096]);
                    done.fetch_add(1, Relaxed);
                }
            });
        }
        for id in 2..200 {
            v.add_device(DeviceId(id), Memory::new("b", 1)).unwrap();
            v.flush().unwrap();
            assert_eq!(v.remove_device(DeviceId(id)).unwrap().name(), "b");
        }
        while done.load(Relaxed) < 10 {
            thread::yield_now();
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(ids(&v), [1]);
}

#[test]
fn a_device_without_a_superblock_of_its_own_gets_none() {
    let (a, b) = (Memory::new("a", 4), Memory::new("b", 4));
    let v = Volume::new(vec![(DeviceId(1), a.clone())]).unwrap();
    v.add_device(DeviceId(2), b.clone()).unwrap();
    let of = |id| {
        let mut superblock = Box::new(Superblock::new_zeroed());
        superblock.dev_item.total_bytes.set(4 * MIB);
        superblock.magic = larder_format::superblock::MAGIC;
        (id == DeviceId(1)).then_some(superblock)
    };
    v.write_superblocks(&of, SuperCopies::All).unwrap();
    let is_empty = |d: &Memory| d.bytes.lock().unwrap().iter().all(|byte| *byte == 0);
    assert_eq!((is_empty(&a), is_empty(&b)), (false, true));
}

#[test]
fn a_write_goes_by_the_members_of_its_beginning() {
    let devices = ["source", "target", "next"].map(|name| Memory::new(name, 4));
    let [source, target, next] = devices.clone();
    for is_missing in [false, true] {
        let v = match is_missing {
            false => {
                Volume::new(vec![(DeviceId(1), source.clone()), (DeviceId(2), source.clone())])
            }
            true => Volume::new(vec![(DeviceId(1), source.clone())]).map(Volume::with_missing),
        };
        let v = v.unwrap();
        v.add_chunk(chunk(16, DeviceId(2))).unwrap();
        v.set_target(DeviceId(2), target.clone()).unwrap();
        let to = v.written();
        let (mut transfers, stripe) = (Vec::new(), v.map().chunks()[0].stripes[0]);
        let bytes = [7 + u8::from(is_missing); 4096];
        let data = Cow::Owned(vec![IoSlice::new(&bytes)]);
        let chunk = v.map().chunks()[0].start;
        let transfer = Transfer { chunk, stripe, of: 0, data };
        write::push(&to, transfer, is_missing, &mut transfers).unwrap();
        thread::scope(|scope| {
            let promoted = scope.spawn(|| v.promote_target().unwrap());
            // Then only the write that has begun keeps it from its end.
            while v.target().is_some() {
                thread::yield_now();
            }
            v.set_target(DeviceId(2), next.clone()).unwrap();
            assert!(v.transfer(&to, &transfers).is_empty());
            drop(to);
            assert_eq!(promoted.join().unwrap().is_some(), !is_missing);
        });
        let has = |device: &Memory| device.bytes.lock().unwrap()[2 << 20] == bytes[0];
        assert_eq!((has(&target), has(&next)), (true, false));
    }
}
