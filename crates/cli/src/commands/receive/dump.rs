//! The commands of a stream for people, in the lines of `btrfs receive --dump`.
//!
//! Scripts read these lines, so columns, names and escapes are the same. Times are in UTC; there,
//! they are in the zone of the user.

use crate::print;
use larder_format::items::Timespec;
use larder_stream::{Command, Frame, StreamReader};
use std::fmt::Write as _;
use std::io::Read;

/// Prints all commands.
pub(crate) fn show(mut reader: StreamReader<impl Read>) -> anyhow::Result<()> {
    let mut frame = Frame::default();
    let mut subvolume = Vec::new();
    while reader.read(&mut frame)? {
        let command = frame.command()?;
        if let Command::Subvol { path, .. } | Command::Snapshot { path, .. } = command {
            subvolume = path.to_vec();
        }
        if !matches!(command, Command::End {}) {
            print::line(&line(&command, &subvolume))?;
        }
    }
    Ok(())
}

fn line(command: &Command<'_>, subvolume: &[u8]) -> String {
    let path = match command {
        Command::Subvol { path, .. } | Command::Snapshot { path, .. } => escaped(&below(path, b"")),
        other => full(subvolume, other.path().unwrap_or_default()),
    };
    let details = details(command, subvolume);
    if details.is_empty() {
        return format!("{:<16}{path}", command.name());
    }
    format!("{:<16}{path:<31} {details}", command.name())
}

/// A path below a subvolume, as it is shown.
fn full(subvolume: &[u8], path: &[u8]) -> String {
    escaped(&below(subvolume, &[b"/", path].concat()))
}

fn below(subvolume: &[u8], rest: &[u8]) -> Vec<u8> {
    [b"./", subvolume, rest].concat()
}

fn details(command: &Command<'_>, subvolume: &[u8]) -> String {
    match *command {
        Command::Subvol { uuid, ctransid, .. } => {
            format!("uuid={} transid={}", print::uuid(uuid), ctransid.0)
        }
        Command::Snapshot { uuid, ctransid, parent_uuid, parent_ctransid, .. } => format!(
            "uuid={} transid={} parent_uuid={} parent_transid={}",
            print::uuid(uuid),
            ctransid.0,
            print::uuid(parent_uuid),
            parent_ctransid.0
        ),
        Command::Mknod { mode, rdev, .. } => format!("mode={mode:o} dev=0x{rdev:x}"),
        Command::Symlink { target, .. } | Command::Link { target, .. } => {
            format!("dest={}", escaped(target))
        }
        Command::Rename { to, .. } => format!("dest={}", full(subvolume, to)),
        Command::SetXattr { name, value, .. } => {
            format!("name={} {} len={}", escaped(name), escaped_value(value), value.len())
        }
        Command::RemoveXattr { name, .. } => format!("name={}", escaped(name)),
        Command::Write { offset, data, .. } => format!("offset={offset} len={}", data.len()),
        Command::Clone { offset, len, from_path, from_offset, .. } => format!(
            "offset={offset} len={len} from={} clone_offset={from_offset}",
            full(subvolume, from_path)
        ),
        Command::Truncate { size, .. } => format!("size={size}"),
        Command::Chmod { mode, .. } => format!("mode={mode:o}"),
        Command::Chown { uid, gid, .. } => format!("gid={gid} uid={uid}"),
        Command::Utimes { atime, mtime, ctime, .. } => {
            format!("atime={} mtime={} ctime={}", time(atime), time(mtime), time(ctime))
        }
        Command::UpdateExtent { offset, size, .. } => format!("offset={offset} len={size}"),
        Command::Fallocate { mode, offset, size, .. } => {
            format!("mode={mode} offset={offset} len={size}")
        }
        Command::Fileattr { attr, .. } => format!("fileattr=0x{attr:x}"),
        Command::EncodedWrite {
            offset,
            unencoded_file_len,
            unencoded_len,
            unencoded_offset,
            compression,
            encryption,
            data,
            ..
        } => format!(
            "offset={offset} len={} unencoded_file_len={unencoded_file_len} \
             unencoded_len={unencoded_len} unencoded_offset={unencoded_offset} compression={} \
             encryption={}",
            data.len(),
            compression.unwrap_or(0),
            encryption.unwrap_or(0)
        ),
        _ => String::new(),
    }
}

fn time(t: Timespec) -> String {
    format!("{}+0000", print::time(t.sec.get()).replacen(' ', "T", 1))
}

/// A name, with the escapes that a shell or C would read.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            7 => out.push_str("\\a"),
            8 => out.push_str("\\b"),
            0x1b => out.push_str("\\e"),
            0x0c => out.push_str("\\f"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            0x0b => out.push_str("\\v"),
            b' ' | b'\\' => {
                out.push('\\');
                out.push(char::from(*byte));
            }
            b'!'..=b'~' => out.push(char::from(*byte)),
            _ => {
                let _ = write!(out, "\\{byte:03o}");
            }
        }
    }
    out
}

/// The value of an attribute, of which the end may be left out.
fn escaped_value(value: &[u8]) -> String {
    escaped(value)
}
