//! Tests of the volume with files, and with a device that fails.

use super::*;
use crate::assembly::Found;
use crate::file::{FileDevice, OpenMode};
use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{HistoryId, SUPER_OFFSETS, Superblock};
use smallvec::smallvec;
use std::fs::File;
use std::io::{self, IoSlice};

const MIB: u64 = 1 << 20;

fn volume(dir: &tempfile::TempDir, size: u64) -> Volume {
    let path = dir.path().join("img");
    File::create(&path).unwrap().set_len(size).unwrap();
    let device = Arc::new(FileDevice::open(&path, OpenMode::Write).unwrap());
    Volume::new(vec![(DeviceId(1), device)]).unwrap()
}

fn stripe(at: u64) -> Stripe {
    Stripe { device: DeviceId(1), at: Physical(at) }
}

/// Data chunk 16..24 MiB single, then metadata chunk 24..28 MiB in two copies.
fn with_chunks(dir: &tempfile::TempDir) -> Volume {
    let v = volume(dir, 80 * MIB);
    let data = MappedChunk {
        start: Logical(16 * MIB),
        length: 8 * MIB,
        kind: 1,
        stripes: smallvec![stripe(60 * MIB)],
    };
    let meta = MappedChunk {
        start: Logical(24 * MIB),
        length: 4 * MIB,
        kind: 4 | 0x20,
        stripes: smallvec![stripe(40 * MIB), stripe(50 * MIB)],
    };
    v.add_chunk(data).unwrap();
    v.add_chunk(meta).unwrap();
    v
}

#[test]
fn what_was_just_written_can_be_read_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let v = with_chunks(&dir);
    let at = Logical(25 * MIB);
    v.write(at, &[7u8; 16384]).unwrap();
    let mut back = vec![0; 16384];
    // A host that cannot say may always answer no.
    if v.read_at_once(at, &mut back) {
        assert!(back.iter().all(|b| *b == 7));
    }
    assert!(!v.read_at_once(Logical(28 * MIB - 4096), &mut back), "beyond the chunk");
    assert!(!v.read_at_once(Logical(0), &mut back), "in no chunk");
}

#[test]
fn writes_reach_every_copy_and_repairs_one() {
    let dir = tempfile::tempdir().unwrap();
    let v = with_chunks(&dir);
    let block = vec![7u8; 16384];
    let at = Logical(25 * MIB);
    v.write(at, &block).unwrap();
    let mut back = vec![0; 16384];
    for copy in 0..v.copies(at).unwrap() {
        v.read_block(at, &mut back, copy).unwrap();
        assert_eq!(back, block);
    }
    v.write_one_copy(at, &vec![9; 16384], 1).unwrap();
    v.read_block(at, &mut back, 0).unwrap();
    assert_eq!(back, block);
    v.read_block(at, &mut back, 1).unwrap();
    assert_eq!(back, vec![9; 16384]);
    assert!(matches!(v.read_block(at, &mut back, 2), Err(VolumeError::Unmapped { .. })));
    v.flush().unwrap();
    let stats = v.stats()[0].1;
    assert_eq!((stats.writes, stats.written_bytes, stats.flushes), (3, 3 * 16384, 1));
    assert_eq!((stats.reads, stats.read_bytes), (4, 4 * 16384));
}

#[test]
fn data_goes_on_in_the_next_chunk_but_blocks_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let v = with_chunks(&dir);
    let at = Logical(24 * MIB - 8192);
    let data: Vec<u8> = (0..16384u32).map(|i| (i / 64) as u8).collect();
    let (a, b) = data.split_at(5000);
    v.write_vectored(at, &[IoSlice::new(a), IoSlice::new(b)]).unwrap();
    for copy in [0, 1, 5] {
        let mut back = vec![0; data.len()];
        v.read(at, &mut back, copy).unwrap();
        assert_eq!(back, data);
    }
    let mut back = vec![0; data.len()];
    assert!(matches!(v.read_block(at, &mut back, 0), Err(VolumeError::Unmapped { .. })));
    assert!(v.write_one_copy(at, &data, 0).is_err());
    // Within a chunk, one vectored write is one transfer per copy.
    let before = v.stats()[0].1.writes;
    v.write_vectored(Logical(24 * MIB), &[IoSlice::new(a), IoSlice::new(b)]).unwrap();
    assert_eq!(v.stats()[0].1.writes - before, 2);
    assert!(matches!(v.write(Logical(28 * MIB - 4096), &data), Err(VolumeError::Unmapped { .. })));
}

#[test]
fn chunks_must_lie_on_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let v = volume(&dir, 80 * MIB);
    let chunk = |device, at| MappedChunk {
        start: Logical(16 * MIB),
        length: 8 * MIB,
        kind: 1,
        stripes: smallvec![Stripe { device: DeviceId(device), at: Physical(at) }],
    };
    assert!(matches!(v.add_chunk(chunk(2, MIB)), Err(VolumeError::Corrupt { .. })));
    assert!(matches!(v.add_chunk(chunk(1, 73 * MIB)), Err(VolumeError::Corrupt { .. })));
    assert!(matches!(v.add_chunk(chunk(1, u64::MAX - 4095)), Err(VolumeError::Corrupt { .. })));
    v.add_chunk(chunk(1, 72 * MIB)).unwrap();
    assert!(Volume::new(vec![]).is_err());
    let d = v.device(DeviceId(1)).unwrap();
    assert!(Volume::new(vec![(DeviceId(1), d.clone()), (DeviceId(1), d.clone())]).is_err());
}

#[test]
fn a_discard_spares_the_superblocks() {
    let dir = tempfile::tempdir().unwrap();
    let v = with_chunks(&dir);
    let device = v.device(DeviceId(1)).unwrap().clone();
    let mark = [0xabu8; 4096];
    device.write_at(SUPER_OFFSETS[1], &mark).unwrap();
    v.write(Logical(16 * MIB), &vec![1; (8 * MIB) as usize]).unwrap();
    device.write_at(SUPER_OFFSETS[1], &mark).unwrap();
    v.discard(Logical(16 * MIB), 8 * MIB).unwrap();
    let mut back = [0; 4096];
    device.read_at(SUPER_OFFSETS[1], &mut back).unwrap();
    assert_eq!(back, mark);
    let outside = |range: Range<u64>| -> Vec<Range<u64>> {
        let parts = outside_superblocks(Physical(range.start)..Physical(range.end));
        parts.map(|part| part.start.0..part.end.0).collect()
    };
    let parts = outside(0..1 << 40);
    assert_eq!(parts.len(), 4);
    assert_eq!(parts.iter().map(|p| p.end - p.start).sum::<u64>(), (1 << 40) - 3 * 4096);
    assert!(outside(65536..69632).is_empty());
    let rest = outside(66000..70000);
    assert_eq!((rest.len(), rest[0].clone()), (1, 69632..70000));
}

#[test]
fn a_volume_is_opened_by_its_superblock() {
    use larder_format::items::block_group::BlockGroupFlags;
    use larder_format::items::chunk::{Chunk, Stripe, encode_sys_array};
    use zerocopy::FromZeros;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("img");
    let device = || Arc::new(FileDevice::create(&path, 80 * MIB).unwrap());
    let stripe = |at| Stripe { devid: DeviceId(1), offset: Physical(at), dev_uuid: [0; 16] };
    let mut sb = Superblock::new_zeroed();
    sb.dev_item.devid.set(1);
    let flags = BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP;
    let system = Chunk::new(8 * MIB, flags, vec![stripe(20 * MIB), stripe(40 * MIB)]);
    let key = larder_format::items::keys::chunk_key(Logical(16 * MIB));
    sb.set_sys_chunk_bytes(&encode_sys_array([(key, &system)]).unwrap()).unwrap();
    let assembly = |sb: &Superblock| {
        let (id, uuid) = (sb.device_id(), uuid::Uuid::nil());
        let generation = sb.generation();
        let (written, history) = (generation, HistoryId::default());
        let (is_stale, seed, device) = (false, None, device());
        let found = Found { id, uuid, generation, written, history, is_stale, seed, device };
        Assembly::new(Box::new(*sb), vec![found])
    };
    let v = Volume::open(assembly(&sb), false).unwrap();
    assert_eq!((v.map().len(), v.copies(Logical(20 * MIB)).unwrap()), (1, 2));
    drop(v);
    let n = sb.sys_chunk_bytes().len();
    sb.sys_chunk_array_size.set(n as u32 - 1);
    assert!(matches!(Volume::open(assembly(&sb), false), Err(VolumeError::Corrupt { .. })));
}

/// Fails as it is told to.
#[derive(Debug)]
struct Failing;
impl Device for Failing {
    fn name(&self) -> String {
        "failing".into()
    }
    fn size(&self) -> u64 {
        1 << 30
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, _: Physical, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("bad sector"))
    }
    fn write_at(&self, _: Physical, _: &[u8]) -> io::Result<()> {
        Err(io::Error::other("bad sector"))
    }
    fn flush(&self) -> io::Result<()> {
        Err(io::Error::other("cable pulled"))
    }
}

#[test]
fn what_waits_for_a_flush_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let v = with_chunks(&dir);
    assert_eq!(v.unflushed(), 0);
    v.write(Logical(16 * MIB), &[1; 8192]).unwrap();
    // Two copies, and across two chunks.
    v.write_vectored(Logical(25 * MIB), &[IoSlice::new(&[1; 4096])]).unwrap();
    v.write_vectored(Logical(24 * MIB - 4096), &[IoSlice::new(&[1; 8192])]).unwrap();
    assert_eq!(v.unflushed(), 8192 + 2 * 4096 + 4096 + 2 * 4096);
    v.flush().unwrap();
    assert_eq!(v.unflushed(), 0);
    v.write(Logical(16 * MIB), &[1; 4096]).unwrap();
    assert_eq!(v.unflushed(), 4096);

    let v = Volume::new(vec![(DeviceId(1), Arc::new(Failing))]).unwrap();
    v.completed.store(5, Relaxed);
    assert!(v.flush().is_err());
    assert_eq!(v.unflushed(), 5, "a flush that failed has made nothing durable");
}

#[test]
fn errors_name_device_and_place() {
    let v = Volume::new(vec![(DeviceId(1), Arc::new(Failing))]).unwrap();
    let chunk = MappedChunk {
        start: Logical(MIB),
        length: MIB,
        kind: 1,
        stripes: smallvec![stripe(2 * MIB)],
    };
    v.add_chunk(chunk).unwrap();
    let text = v.read(Logical(MIB + 4096), &mut [0; 512], 0).unwrap_err().to_string();
    assert_eq!(text, "failing: read of 512 bytes at 2101248 failed: bad sector");
    assert!(v.write(Logical(MIB), &[0; 512]).is_err());
    assert!(v.write_vectored(Logical(MIB), &[IoSlice::new(&[0; 512])]).is_err());
    assert!(v.flush().unwrap_err().to_string().contains("cable pulled"));
    let s = v.stats()[0].1;
    assert_eq!((s.read_errors, s.write_errors, s.flush_errors), (1, 2, 1));
}

#[test]
fn mirrors_have_their_turns() {
    let dir = tempfile::tempdir().unwrap();
    let device = |n: u64| -> (DeviceId, Arc<dyn Device>) {
        let path = dir.path().join(n.to_string());
        (DeviceId(n), Arc::new(FileDevice::create(&path, 400 * MIB).unwrap()))
    };
    let mut v = Volume::new(vec![device(1), device(2)]).unwrap();
    v.spread = true;
    let on = |n| Stripe { device: DeviceId(n), at: Physical(MIB) };
    let stripes = smallvec![on(1), on(2)];
    let chunk = MappedChunk { start: Logical(64 * MIB), length: 256 * MIB, kind: 0x11, stripes };
    v.add_chunk(chunk).unwrap();
    let reads = |v: &Volume| v.stats().iter().map(|(_, s)| s.reads).collect::<Vec<_>>();
    // A read that goes on in the other's turn is cut there.
    v.read(Logical(128 * MIB - 4096), &mut [0; 8192], 0).unwrap();
    assert_eq!(reads(&v), [1, 1]);
    for at in (64..320).step_by(64) {
        v.read(Logical(at * MIB), &mut [0; 4096], 0).unwrap();
    }
    assert_eq!(reads(&v), [3, 3]);
    // One that has failed has none.
    v.members.all()[0].failed.store(true, Relaxed);
    v.uneven.store(true, Relaxed);
    for at in (64..320).step_by(64) {
        v.read(Logical(at * MIB), &mut [0; 4096], 0).unwrap();
    }
    assert_eq!(reads(&v), [3, 7]);
}

/// Four files as devices with one chunk, and what it holds.
fn spread_over_files(dir: &tempfile::TempDir, profile: Profile) -> (Volume, Vec<u8>) {
    const ROWS: u64 = 40;
    let device = |n: u64| -> (DeviceId, Arc<dyn Device>) {
        let path = dir.path().join(format!("{}-{n}", profile.name()));
        (DeviceId(n), Arc::new(FileDevice::create(&path, 4 * MIB).unwrap()))
    };
    let mut v = Volume::new((1..=4).map(device).collect()).unwrap();
    v.spread = true;
    v.make_rings();
    let stripes = if profile == Profile::Raid1 { 2 } else { 4 };
    let length = ROWS * STRIPE_LEN * u64::from(profile.data_stripes(stripes));
    let on = |n| Stripe { device: DeviceId(n), at: Physical(MIB) };
    let kind = (BlockGroupFlags::DATA | profile.flag()).bits();
    let stripes = (1..=u64::from(stripes)).map(on).collect();
    v.add_chunk(MappedChunk { start: Logical(MIB), length, kind, stripes }).unwrap();
    let mut data = vec![0; usize::try_from(length).unwrap()];
    fastrand::Rng::with_seed(length).fill(&mut data);
    (v, data)
}

/// Reads parts of a chunk in memory that is aligned and in memory that is not, and compares.
fn long_reads_agree(v: &Volume, data: &[u8]) {
    let mut memory = vec![0u8; data.len() + 8192];
    let aligned = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
    for (from, len) in
        [(0, data.len()), (4096, 300 << 10), (200 << 10, 1 << 20), (76 << 10, 257 << 10)]
    {
        for into in [aligned, aligned + 8] {
            let buf = &mut memory[into..into + len];
            buf.fill(0);
            v.read(Logical(MIB + from as u64), buf, 0).unwrap();
            assert!(buf == &data[from..from + len], "{len} bytes from {from}");
        }
    }
}

#[test]
fn long_reads_and_writes_use_all_devices() {
    let dir = tempfile::tempdir().unwrap();
    for profile in [Profile::Raid0, Profile::Raid1, Profile::Raid10, Profile::Raid5, Profile::Raid6]
    {
        let (v, data) = spread_over_files(&dir, profile);
        // In pieces of every size: each path to a device has its turn.
        let mut at = 0;
        for len in [4096, 64 << 10, 192 << 10, 1 << 20, data.len()] {
            let end = data.len().min(at + len);
            v.write(Logical(MIB + at as u64), &data[at..end]).unwrap();
            at = end;
        }
        v.flush().unwrap();
        assert_eq!(v.unflushed(), 0);
        long_reads_agree(&v, &data);
        assert!(v.stats().iter().take(if profile == Profile::Raid1 { 2 } else { 4 }).all(
            |(_, s)| { s.writes > 0 && s.read_errors + s.write_errors == 0 && s.flushes == 1 }
        ));
    }
}

/// What is lost is worked out within a long read, in which most of what it takes is wanted anyway.
#[test]
fn long_reads_do_without_lost_devices() {
    let dir = tempfile::tempdir().unwrap();
    for (profile, lost) in [
        (Profile::Raid1, &[1][..]),
        (Profile::Raid10, &[2, 3]),
        (Profile::Raid5, &[1]),
        (Profile::Raid5, &[4]),
        (Profile::Raid6, &[2]),
        (Profile::Raid6, &[1, 3]),
        (Profile::Raid6, &[3, 4]),
    ] {
        let (v, data) = spread_over_files(&dir, profile);
        v.write(Logical(MIB), &data).unwrap();
        let chunk = v.map.chunks().remove(0);
        let members = v.members.all();
        let left = members.iter().filter(|m| !lost.contains(&m.id.0));
        let left = left.map(|m| (m.id, m.device.clone())).collect();
        let mut degraded = Volume::new(left).unwrap().with_missing();
        degraded.spread = true;
        degraded.uneven = AtomicBool::new(true);
        degraded.add_chunk(chunk).unwrap();
        long_reads_agree(&degraded, &data);
        let most = data.len() as u64 * 8;
        let read: u64 = degraded.stats().iter().map(|(_, s)| s.read_bytes).sum();
        assert!(read < most, "{}: {read} bytes read for {}", profile.name(), data.len());
    }
}
