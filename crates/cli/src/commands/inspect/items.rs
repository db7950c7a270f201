//! What an item holds, as named values.
//!
//! Kinds that have no structure worth naming (checksums, bitmaps) give nothing, and are shown as
//! bytes. An item that cannot be parsed says why.

use crate::print;
use crate::raw::type_text;
use larder_format::items::{
    BlockGroupItem, Chunk, DevExtent, DirEntries, ExtRefs, ExtentItem, ExtentKind, ExtentRef,
    FileExtent, FreeSpaceInfo, InodeItem, InodeRefs, RootItem, RootRef, Stripe, parse_keyed_refs,
};
use larder_format::{FormatError, Key, KeyType};
use serde_json::{Map, Value, json};

type Parsed = Result<Value, FormatError>;

/// The item's values; `None` for kinds without any.
pub(super) fn value(key: Key, data: &[u8]) -> Option<Value> {
    let parsed = match key.kind {
        KeyType::INODE_ITEM => inode(data),
        KeyType::INODE_REF => InodeRefs::new(data)
            .map(|r| r.map(|r| json!({ "index": r.index, "name": print::name(r.name) })))
            .collect::<Result<_, _>>()
            .map(|names: Vec<Value>| json!({ "names": names })),
        KeyType::INODE_EXTREF => ExtRefs::new(data)
            .map(|r| r.map(|r| name_in(r.parent.0, r.index, r.name)))
            .collect::<Result<_, _>>()
            .map(|names: Vec<Value>| json!({ "names": names })),
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => entries(data),
        KeyType::EXTENT_DATA => FileExtent::parse(data).map(|e| file_extent(&e)),
        KeyType::ROOT_ITEM => root(data),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => {
            RootRef::parse(data).map(|r| name_in(r.dirid.0, r.sequence, r.name))
        }
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extent(key, data),
        KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::SHARED_DATA_REF => {
            parse_keyed_refs(&key, data).map(|r| json!({ "refs": refs(&r) }))
        }
        KeyType::BLOCK_GROUP_ITEM => BlockGroupItem::parse(key.offset, data)
            .map(|g| json!({ "used": g.used.get(), "type": type_text(g.flags.get()) })),
        KeyType::CHUNK_ITEM => Chunk::parse(data).map(|c| {
            let kind = type_text(c.flags.bits());
            json!({ "length": c.length, "type": kind, "stripes": stripes(&c) })
        }),
        KeyType::DEV_EXTENT => {
            let value =
                |e: &DevExtent| json!({ "chunk": e.chunk_offset.get(), "length": e.length.get() });
            DevExtent::parse(data).map(value)
        }
        KeyType::FREE_SPACE_INFO => FreeSpaceInfo::parse(data)
            .map(|i| json!({ "extents": i.extent_count.get(), "flags": i.flags.get() })),
        _ => return None,
    };
    Some(parsed.unwrap_or_else(|e| json!({ "error": e.to_string() })))
}

/// A name in a directory, with the index by which the directory lists it.
fn name_in(directory: u64, index: impl Into<Value>, name: &[u8]) -> Value {
    json!({ "directory": directory, "index": index.into(), "name": print::name(name) })
}

/// Where the copies of a chunk lie.
pub(super) fn stripes(chunk: &Chunk) -> Vec<Value> {
    let one = |s: &Stripe| json!({ "devid": s.devid.0, "offset": s.offset.0 });
    chunk.stripes.iter().map(one).collect()
}

/// The same on one line.
pub(super) fn text(key: Key, data: &[u8]) -> Option<String> {
    Some(flat(&value(key, data)?))
}

fn flat(value: &Value) -> String {
    match value {
        Value::Object(o) => {
            let parts: Vec<String> = o.iter().map(|(k, v)| format!("{k} {}", flat(v))).collect();
            parts.join(", ")
        }
        Value::Array(a) => {
            let parts: Vec<String> = a.iter().map(|v| format!("[{}]", flat(v))).collect();
            parts.join(" ")
        }
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

fn inode(data: &[u8]) -> Parsed {
    let i = InodeItem::parse(data)?;
    let time = |t: larder_format::items::Timespec| {
        format!("{}.{:09}", print::time(t.sec.get()), t.nsec.get())
    };
    Ok(json!({
        "generation": i.generation.get(),
        "transid": i.transid.get(),
        "size": i.size.get(),
        "nbytes": i.nbytes.get(),
        "nlink": i.nlink.get(),
        "uid": i.uid.get(),
        "gid": i.gid.get(),
        "mode": format!("{:o}", i.mode.get()),
        "flags": flag_names(i),
        "mtime": time(i.mtime),
        "ctime": time(i.ctime),
        "otime": time(i.otime),
    }))
}

fn flag_names(i: &InodeItem) -> String {
    let flags = i.inode_flags();
    let names: Vec<&str> = flags.iter_names().map(|(n, _)| n).collect();
    if names.is_empty() { "none".into() } else { names.join("|") }
}

fn entries(data: &[u8]) -> Parsed {
    let all: Result<Vec<Value>, FormatError> = DirEntries::new(data)
        .map(|e| {
            e.map(|e| {
                let mut o = Map::new();
                o.insert("name".into(), print::name(e.name).into());
                if e.kind == larder_format::items::FileType::Xattr {
                    o.insert("value".into(), print::name(e.data).into());
                } else {
                    o.insert("leads_to".into(), e.location.to_string().into());
                    o.insert("kind".into(), format!("{:?}", e.kind).to_lowercase().into());
                }
                Value::Object(o)
            })
        })
        .collect();
    Ok(json!({ "entries": all? }))
}

/// A file extent.
pub(super) fn file_extent(extent: &FileExtent<'_>) -> Value {
    match extent {
        FileExtent::Inline(i) => json!({
            "kind": "inline",
            "generation": i.generation.0,
            "length": i.ram_bytes,
            "compression": i.compression.name(),
            "stored": i.data.len(),
        }),
        FileExtent::Stored(r) => {
            let kind = match r.kind {
                _ if r.is_hole() => "hole",
                ExtentKind::Regular => "regular",
                ExtentKind::Prealloc => "prealloc",
            };
            json!({
                "kind": kind,
                "generation": r.generation.0,
                "length": r.num_bytes,
                "compression": r.compression.name(),
                "extent": r.disk_bytenr.0,
                "extent_length": r.disk_num_bytes,
                "offset": r.offset,
            })
        }
    }
}

fn root(data: &[u8]) -> Parsed {
    let r = RootItem::parse(data)?;
    Ok(json!({
        "root": r.bytenr.get(),
        "level": r.level,
        "generation": r.generation.get(),
        "refs": r.refs.get(),
        "last_snapshot": r.last_snapshot.get(),
        "flags": r.root_flags().iter_names().map(|(n, _)| n).collect::<Vec<_>>().join("|"),
        "uuid": print::uuid(r.uuid),
        "parent_uuid": print::uuid(r.parent_uuid),
    }))
}

fn extent(key: Key, data: &[u8]) -> Parsed {
    let e = ExtentItem::parse(key.kind, data)?;
    let names: Vec<&str> = e.flags.iter_names().map(|(n, _)| n).collect();
    Ok(json!({
        "refs": e.refs,
        "generation": e.generation.0,
        "flags": names.join("|"),
        "inline": refs(&e.inline),
    }))
}

/// References with their counts.
pub(super) fn refs(all: &[(ExtentRef, u32)]) -> Vec<Value> {
    all.iter().map(|(r, count)| reference(r, *count)).collect()
}

/// A reference with its count.
pub(super) fn reference(r: &ExtentRef, count: u32) -> Value {
    match r {
        ExtentRef::TreeBlock { root } => json!({ "tree": root.0.cast_signed() }),
        ExtentRef::SharedBlock { parent } => json!({ "parent": parent.0 }),
        ExtentRef::Data { root, objectid, offset } => json!({
            "tree": root.0.cast_signed(),
            "inode": objectid.0,
            "offset": offset.0.cast_signed(),
            "count": count,
        }),
        ExtentRef::SharedData { parent } => json!({ "parent": parent.0, "count": count }),
        ExtentRef::Owner { root } => json!({ "owner": root.0 }),
    }
}
