//! Streams there and back, streams that Linux wrote, and streams that were damaged.

use larder_format::items::Timespec;
use larder_format::{Generation, ObjectId};
use larder_stream::{
    Command, Frame, Protocol, StreamError, StreamReader, StreamWriter, Trouble, WriteError,
};
use proptest::prelude::*;

/// What `btrfs send` of Linux 6.18 wrote: `tests/linux/README.md` says of what.
const BY_LINUX: &[(&str, &[u8])] = &[
    ("full.v2", include_bytes!("linux/full.v2")),
    ("increment.v1", include_bytes!("linux/increment.v1")),
    ("increment.v2", include_bytes!("linux/increment.v2")),
    ("removed.v1", include_bytes!("linux/removed.v1")),
    ("two-without-data.v1", include_bytes!("linux/two-without-data.v1")),
];

/// Reads `bytes` to the end and writes what was read.
fn again(bytes: &[u8]) -> Result<(Vec<u8>, Vec<&'static str>), StreamError> {
    let mut reader = StreamReader::new(bytes);
    let mut frame = Frame::default();
    let mut writer: Option<StreamWriter<Vec<u8>>> = None;
    let mut names = Vec::new();
    while reader.read(&mut frame)? {
        let command = frame.command()?;
        names.push(command.name());
        writer
            .get_or_insert_with(|| StreamWriter::new(Vec::new(), frame.protocol()))
            .write(&command)
            .expect("what was read can be written");
    }
    Ok((writer.map(StreamWriter::into_inner).unwrap_or_default(), names))
}

#[test]
fn what_linux_wrote_comes_out_as_the_same_bytes() {
    for (name, bytes) in BY_LINUX {
        let (out, commands) = again(bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(out == *bytes, "{name} differs");
        assert_eq!(commands.last(), Some(&"end"), "{name}");
    }
}

#[test]
fn every_command_that_linux_writes_is_in_a_kept_stream() {
    let mut all: Vec<_> = BY_LINUX.iter().flat_map(|(_, b)| again(b).expect("sound").1).collect();
    all.sort_unstable();
    all.dedup();
    let wanted = [
        "chmod",
        "chown",
        "clone",
        "encoded_write",
        "end",
        "fallocate",
        "link",
        "mkdir",
        "mkfifo",
        "mkfile",
        "mknod",
        "mksock",
        "remove_xattr",
        "rename",
        "rmdir",
        "set_xattr",
        "snapshot",
        "subvol",
        "symlink",
        "truncate",
        "unlink",
        "update_extent",
        "utimes",
        "write",
    ];
    assert_eq!(all, wanted);
}

#[test]
fn streams_in_a_row_are_read_and_written_as_such() {
    let one = BY_LINUX[1].1;
    let (out, commands) = again(&[one, one].concat()).expect("two streams");
    assert_eq!(out, [one, one].concat());
    assert_eq!(commands.iter().filter(|c| **c == "end").count(), 2);
}

#[test]
fn a_stream_that_ends_anywhere_else_is_cut_off() {
    let (_, bytes) = BY_LINUX[3];
    for len in 1..bytes.len() {
        match again(&bytes[..len]) {
            Err(StreamError::CutOff { offset }) => assert_eq!(offset, len as u64),
            other => panic!("cut at {len}: {other:?}"),
        }
    }
    assert!(matches!(again(&[]), Err(StreamError::Empty)));
}

#[test]
fn every_changed_byte_is_noticed() {
    let (_, bytes) = BY_LINUX[3];
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1 << bit;
            let error = again(&changed).expect_err("a changed byte");
            let said = match &error {
                StreamError::NotAStream { offset }
                | StreamError::Protocol { offset, .. }
                | StreamError::CutOff { offset }
                | StreamError::Command { offset, .. } => *offset,
                other => panic!("byte {at}: {other}"),
            };
            assert!(said <= bytes.len() as u64, "byte {at}: {error}");
        }
    }
}

#[test]
fn a_length_is_believed_only_up_to_the_limit() {
    for (protocol, limit) in [(1u32, (64 << 10) - 10), (2, (1 << 20) - 10)] {
        let mut bytes = b"btrfs-stream\0".to_vec();
        bytes.extend(protocol.to_le_bytes());
        bytes.extend(u32::MAX.to_le_bytes());
        bytes.extend([15, 0, 0, 0, 0, 0]);
        let error = again(&bytes).expect_err("too long");
        let trouble = Trouble::TooLong { len: u32::MAX.into(), limit };
        assert!(
            matches!(&error, StreamError::Command { offset: 17, trouble: t, .. } if *t == trouble),
            "{error:?}"
        );
    }
}

/// The bytes of a stream with one command, whose checksum is right.
fn stream_of(protocol: u32, number: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"btrfs-stream\0".to_vec();
    bytes.extend(protocol.to_le_bytes());
    let at = bytes.len();
    bytes.extend(u32::try_from(body.len()).expect("short").to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    let crc = larder_format::csum::crc32c_raw(0, &bytes[at..]);
    bytes[at + 6..at + 10].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn trouble_of(bytes: &[u8]) -> String {
    again(bytes).expect_err("a wrong command").to_string()
}

#[test]
fn what_is_unknown_or_malformed_is_named_with_its_place() {
    let cases: &[(u32, u16, &[u8], &str)] = &[
        (1, 99, b"", "at byte 17 of the stream: command 99: protocol 1 has no such command"),
        (1, 23, b"", "at byte 17 of the stream: `fallocate`: protocol 1 has no such command"),
        (2, 26, b"", "at byte 17 of the stream: command 26: protocol 2 has no such command"),
        (1, 11, b"\x63\0\0\0", "`unlink`: it has an attribute of the unknown type 99"),
        (1, 11, b"\x0f\0\x05\0abc", "`unlink`: its attribute `path` is too long"),
        (1, 11, b"\x0f\0\x05", "`unlink`: it ends within an attribute"),
        (1, 11, b"", "`unlink`: it has no attribute `path`"),
        (1, 11, b"\x0f\0\x01\0a\x0f\0\x01\0b", "`unlink`: it has the attribute `path` twice"),
        (1, 17, b"\x0f\0\x01\0a\x04\0\x01\0b", "its attribute `size` has 1 bytes"),
    ];
    for (protocol, number, body, message) in cases {
        let said = trouble_of(&stream_of(*protocol, *number, body));
        assert!(said.contains(message), "{said}");
    }
    assert!(trouble_of(b"btrfs-stream\0\x03\0\0\0").contains("protocol 3"));
    assert!(trouble_of(b"a tar, perhaps, or something else").contains("no btrfs send stream"));
}

#[test]
fn a_command_that_the_protocol_does_not_have_is_not_written() {
    let mut writer = StreamWriter::new(Vec::new(), Protocol::V1);
    let hole = Command::Fallocate { path: b"a", mode: 3, offset: 0, size: 4096 };
    assert!(matches!(writer.write(&hole), Err(WriteError::Unsayable { .. })));
    let long = Command::Write { path: b"a", offset: 0, data: &[0; 65_536] };
    assert!(matches!(writer.write(&long), Err(WriteError::Unsayable { .. })));
    writer.write(&Command::End {}).expect("an empty stream");
    let (out, names) = again(&writer.into_inner()).expect("only what was written");
    assert_eq!((out.len(), names), (27, vec!["end"]));
}

/// A command of any kind, made from owned parts by [`command_of`].
#[derive(Clone, Debug)]
struct Parts {
    kind: u8,
    bytes: [Vec<u8>; 3],
    uuids: [[u8; 16]; 2],
    numbers: [u64; 4],
    times: [(i64, u32); 4],
    optional: bool,
}

fn parts() -> impl Strategy<Value = Parts> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..300);
    (
        1u8..=25,
        [bytes(), bytes(), bytes()],
        any::<[[u8; 16]; 2]>(),
        any::<[u64; 4]>(),
        any::<[(i64, u32); 4]>(),
        any::<bool>(),
    )
        .prop_map(|(kind, bytes, uuids, numbers, times, optional)| Parts {
            kind,
            bytes,
            uuids,
            numbers,
            times,
            optional,
        })
}

fn command_of(p: &Parts) -> Command<'_> {
    let [path, to, data] = p.bytes.each_ref().map(Vec::as_slice);
    let [uuid, parent_uuid] = p.uuids;
    let [a, b, c, d] = p.numbers;
    let [atime, mtime, ctime, otime] = p.times.map(|(sec, nsec)| Timespec::new(sec, nsec));
    let ino = p.optional.then_some(ObjectId(a));
    #[allow(clippy::cast_possible_truncation)]
    let (mode, compression) = (d as u32, p.optional.then_some(d as u32));
    match p.kind {
        1 => Command::Subvol { path, uuid, ctransid: Generation(a) },
        2 => Command::Snapshot {
            path,
            uuid,
            ctransid: Generation(a),
            parent_uuid,
            parent_ctransid: Generation(b),
        },
        3 => Command::Mkfile { path, ino },
        4 => Command::Mkdir { path, ino },
        5 => Command::Mknod { path, ino, rdev: b, mode: c },
        6 => Command::Mkfifo { path, ino, rdev: ino.map(|i| i.0), mode: Some(c) },
        7 => Command::Mksock { path, ino, rdev: Some(b), mode: ino.map(|i| i.0) },
        8 => Command::Symlink { path, ino, target: to },
        9 => Command::Rename { path, to },
        10 => Command::Link { path, target: to },
        11 => Command::Unlink { path },
        12 => Command::Rmdir { path },
        13 => Command::SetXattr { path, name: to, value: data },
        14 => Command::RemoveXattr { path, name: to },
        16 => Command::Clone {
            offset: a,
            len: b,
            path,
            from_uuid: uuid,
            from_ctransid: Generation(c),
            from_path: to,
            from_offset: d,
        },
        17 => Command::Truncate { path, size: a },
        18 => Command::Chmod { path, mode: a },
        19 => Command::Chown { path, uid: a, gid: b },
        20 => Command::Utimes { path, atime, mtime, ctime, otime: p.optional.then_some(otime) },
        22 => Command::UpdateExtent { path, offset: a, size: b },
        23 => Command::Fallocate { path, mode, offset: a, size: b },
        24 => Command::Fileattr { path, attr: a },
        25 => Command::EncodedWrite {
            path,
            offset: a,
            unencoded_file_len: b,
            unencoded_len: c,
            unencoded_offset: d,
            compression,
            encryption: None,
            data,
        },
        _ => Command::Write { path, offset: a, data },
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(all in prop::collection::vec(parts(), 0..20), v2: bool) {
        let protocol = if v2 { Protocol::V2 } else { Protocol::V1 };
        let mut writer = StreamWriter::new(Vec::new(), protocol);
        let commands: Vec<_> =
            all.iter().map(command_of).filter(|c| c.since() <= protocol).collect();
        for command in &commands {
            writer.write(command).expect("short enough");
        }
        writer.write(&Command::End {}).expect("the end");
        let bytes = writer.into_inner();
        let mut reader = StreamReader::new(&bytes[..]);
        for command in &commands {
            prop_assert_eq!(reader.next_command().expect("sound"), Some(*command));
        }
        prop_assert_eq!(reader.next_command().expect("sound"), Some(Command::End {}));
        prop_assert_eq!(reader.next_command().expect("sound"), None);
        prop_assert_eq!(reader.offset(), bytes.len() as u64);
    }

    /// Bodies that have their right checksums, but were changed: an error or a command, no panic.
    #[test]
    fn damage_with_right_checksums_does_no_harm(
        which in 0..BY_LINUX.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut reader = StreamReader::new(BY_LINUX[which].1);
        let mut frame = Frame::default();
        while reader.read(&mut frame).expect("sound") {
            let from = usize::try_from(frame.offset()).expect("small");
            let to = from + usize::try_from(frame.bytes()).expect("small");
            let bytes = &BY_LINUX[which].1[from..to];
            let mut body = bytes[10..].to_vec();
            let number = u16::from_le_bytes([bytes[4], bytes[5]]);
            for (at, to) in &changes {
                if !body.is_empty() {
                    let at = at.index(body.len());
                    body[at] = *to;
                }
            }
            let _ = again(&stream_of(frame.protocol().number(), number, &body));
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = again(&[b"btrfs-stream\0\x02\0\0\0".as_slice(), &bytes].concat());
        let _ = again(&bytes);
    }
}
