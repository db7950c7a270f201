//! The commands of a stream for programs: one JSON object on each line.

use crate::print;
use larder_format::items::Timespec;
use larder_stream::{Command, Frame, StreamReader};
use serde_json::{Map, Value, json};
use std::io::Read;

/// Prints all commands.
pub(super) fn show(mut reader: StreamReader<impl Read>) -> anyhow::Result<()> {
    let mut frame = Frame::default();
    while reader.read(&mut frame)? {
        let command = frame.command()?;
        let mut object = Map::new();
        object.insert("offset".into(), frame.offset().into());
        object.insert("command".into(), command.name().into());
        if let Some(path) = command.path() {
            object.insert("path".into(), print::name(path).into());
        }
        if let Value::Object(details) = details(&command) {
            object.extend(details);
        }
        print::line(&Value::Object(object).to_string())?;
    }
    Ok(())
}

fn details(command: &Command<'_>) -> Value {
    let name = print::name;
    match *command {
        Command::Subvol { uuid, ctransid, .. } => {
            json!({ "uuid": print::uuid(uuid), "transid": ctransid.0 })
        }
        Command::Snapshot { uuid, ctransid, parent_uuid, parent_ctransid, .. } => json!({
            "uuid": print::uuid(uuid), "transid": ctransid.0,
            "parent_uuid": print::uuid(parent_uuid), "parent_transid": parent_ctransid.0,
        }),
        Command::Mkfile { ino, .. } | Command::Mkdir { ino, .. } => {
            json!({ "inode": ino.map(|i| i.0) })
        }
        Command::Mknod { ino, rdev, mode, .. } => {
            json!({ "inode": ino.map(|i| i.0), "device": rdev, "mode": mode })
        }
        Command::Mkfifo { ino, mode, .. } | Command::Mksock { ino, mode, .. } => {
            json!({ "inode": ino.map(|i| i.0), "mode": mode })
        }
        Command::Symlink { ino, target, .. } => {
            json!({ "inode": ino.map(|i| i.0), "target": name(target) })
        }
        Command::Rename { to, .. } => json!({ "to": name(to) }),
        Command::Link { target, .. } => json!({ "target": name(target) }),
        Command::SetXattr { name: attribute, value, .. } => {
            json!({ "name": name(attribute), "value": name(value), "length": value.len() })
        }
        Command::RemoveXattr { name: attribute, .. } => json!({ "name": name(attribute) }),
        Command::Write { offset, data, .. } => json!({ "at": offset, "length": data.len() }),
        Command::Clone {
            offset, len, from_uuid, from_ctransid, from_path, from_offset, ..
        } => json!({
            "at": offset, "length": len, "from_uuid": print::uuid(from_uuid),
            "from_transid": from_ctransid.0, "from_path": name(from_path), "from_at": from_offset,
        }),
        Command::Truncate { size, .. } => json!({ "size": size }),
        Command::Chmod { mode, .. } => json!({ "mode": mode }),
        Command::Chown { uid, gid, .. } => json!({ "uid": uid, "gid": gid }),
        Command::Utimes { atime, mtime, ctime, otime, .. } => json!({
            "accessed": time(atime), "modified": time(mtime), "changed": time(ctime),
            "created": otime.map(time),
        }),
        Command::UpdateExtent { offset, size, .. } => json!({ "at": offset, "length": size }),
        Command::Fallocate { mode, offset, size, .. } => {
            json!({ "mode": mode, "at": offset, "length": size })
        }
        Command::Fileattr { attr, .. } => json!({ "flags": attr }),
        Command::EncodedWrite {
            offset,
            unencoded_file_len,
            unencoded_len,
            unencoded_offset,
            compression,
            encryption,
            data,
            ..
        } => json!({
            "at": offset, "length": data.len(), "file_length": unencoded_file_len,
            "unpacked_length": unencoded_len, "unpacked_at": unencoded_offset,
            "compression": compression, "encryption": encryption,
        }),
        Command::Unlink { .. } | Command::Rmdir { .. } | Command::End {} => Value::Null,
    }
}

/// Seconds and nanoseconds.
fn time(t: Timespec) -> Value {
    json!([t.sec.get(), t.nsec.get()])
}
