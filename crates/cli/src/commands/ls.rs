//! `larder ls`: names in an image.

use crate::image::Image;
use crate::target::Target;
use crate::{mount_options, print};
use anyhow::Context;
use larder_fs::{Attr, FileKind, InodeId};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::Write;

/// List files in an image.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  larder ls disk.img\n  larder ls -lR disk.img:/etc\n  larder ls \
        --json disk.img:/bin"
)]
pub(crate) struct Args {
    /// Show type, permissions, links, owner, size and time
    #[arg(short, long)]
    long: bool,
    /// Go into directories
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Print JSON, with names escaped as \xNN where they are not UTF-8
    #[arg(long)]
    json: bool,
    /// Number of the subvolume that PATH starts in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Read the image even if it is in use
    #[arg(long)]
    force: bool,
    /// Image, and perhaps a path in it
    #[arg(value_name = "IMAGE[:PATH]")]
    target: OsString,
}

struct Row {
    name: Vec<u8>,
    attr: Attr,
    link: Option<Vec<u8>>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = Target::parse(&args.target);
    let image = Image::open_metadata(&target.image, args.force, args.subvolid)?;
    let attr = image.resolve(&target.path, !args.long || target.path.ends_with(b"/"))?;
    if args.json {
        print::json(&tree(&image, &target.path, attr, args.recursive)?)?;
        return image.close();
    }
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if attr.kind == FileKind::Directory {
        let mut todo = vec![(trimmed(&target.path).to_vec(), attr.id)];
        let mut first = true;
        while let Some((path, dir)) = todo.pop() {
            if args.recursive {
                let blank = if first { "" } else { "\n" };
                writeln!(out, "{blank}/{}:", print::name(&path)).context(print::STDOUT)?;
            }
            first = false;
            let rows = rows(&image, dir)?;
            write_rows(&mut out, &rows, args.long)?;
            if args.recursive {
                todo.extend(below(&path, &rows));
            }
        }
    } else {
        let name = target.path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
        let link = link_of(&image, &attr)?;
        write_rows(&mut out, &[Row { name, attr, link }], args.long)?;
    }
    out.flush().context(print::STDOUT)?;
    drop(out);
    image.close()
}

/// Directories among the rows, the last first, so that a stack visits them in order.
fn below(path: &[u8], rows: &[Row]) -> Vec<(Vec<u8>, InodeId)> {
    let dirs = rows.iter().filter(|r| r.attr.kind == FileKind::Directory).rev();
    dirs.map(|r| (join(path, &r.name), r.attr.id)).collect()
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}

fn trimmed(path: &[u8]) -> &[u8] {
    let start = path.iter().position(|b| *b != b'/').unwrap_or(path.len());
    let end = path.iter().rposition(|b| *b != b'/').map_or(start, |i| i + 1);
    &path[start..end]
}

/// Entries of a directory by name, without `.` and `..`.
fn rows(image: &Image, dir: InodeId) -> anyhow::Result<Vec<Row>> {
    let mut names = image.entries(dir)?;
    names.sort();
    names
        .into_iter()
        .map(|(name, id)| {
            let attr = image.fs.getattr(id)?;
            let link = link_of(image, &attr)?;
            Ok(Row { name, attr, link })
        })
        .collect()
}

fn link_of(image: &Image, attr: &Attr) -> anyhow::Result<Option<Vec<u8>>> {
    // A metadata dump has zeros where the target was.
    let is_there = attr.kind == FileKind::Symlink && !image.fs.info().metadata_dump;
    is_there.then(|| Ok(image.fs.readlink(attr.id)?)).transpose()
}

fn write_rows(out: &mut impl Write, rows: &[Row], long: bool) -> anyhow::Result<()> {
    if !long {
        for r in rows {
            writeln!(out, "{}", print::name(&r.name)).context(print::STDOUT)?;
        }
        return Ok(());
    }
    let cells: Vec<[String; 4]> = rows
        .iter()
        .map(|r| {
            let a = &r.attr;
            let size = match a.kind {
                FileKind::CharDevice | FileKind::BlockDevice => {
                    format!("{}, {}", a.rdev >> 20, a.rdev & 0xf_ffff)
                }
                _ => a.size.to_string(),
            };
            [a.nlink.to_string(), a.uid.to_string(), a.gid.to_string(), size]
        })
        .collect();
    let width = |i: usize| cells.iter().map(|c| c[i].len()).max().unwrap_or(0);
    let (links, users, groups, sizes) = (width(0), width(1), width(2), width(3));
    for (r, [link, uid, gid, size]) in rows.iter().zip(&cells) {
        let target =
            r.link.as_deref().map(|l| format!(" -> {}", print::name(l))).unwrap_or_default();
        writeln!(
            out,
            "{} {link:>links$} {uid:>users$} {gid:>groups$} {size:>sizes$} {} {}{target}",
            mode_text(r.attr.kind, r.attr.perm),
            print::time(r.attr.mtime.sec),
            print::name(&r.name),
        )
        .context(print::STDOUT)?;
    }
    Ok(())
}

fn mode_text(kind: FileKind, perm: u32) -> String {
    let letter = match kind {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
    };
    let bit = |mask: u32, c: char| if perm & mask != 0 { c } else { '-' };
    let exec = |mask: u32, special: u32, both: char, only: char| match (
        perm & mask != 0,
        perm & special != 0,
    ) {
        (true, true) => both,
        (false, true) => only,
        (true, false) => 'x',
        (false, false) => '-',
    };
    [
        letter,
        bit(0o400, 'r'),
        bit(0o200, 'w'),
        exec(0o100, 0o4000, 's', 'S'),
        bit(0o040, 'r'),
        bit(0o020, 'w'),
        exec(0o010, 0o2000, 's', 'S'),
        bit(0o004, 'r'),
        bit(0o002, 'w'),
        exec(0o001, 0o1000, 't', 'T'),
    ]
    .iter()
    .collect()
}

fn tree(image: &Image, path: &[u8], attr: Attr, recursive: bool) -> anyhow::Result<Vec<Value>> {
    if attr.kind != FileKind::Directory {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
        let link = link_of(image, &attr)?;
        return Ok(vec![value(&Row { name, attr, link }, trimmed(path))]);
    }
    let mut out = Vec::new();
    let mut todo = vec![(trimmed(path).to_vec(), attr.id)];
    while let Some((path, dir)) = todo.pop() {
        let rows = rows(image, dir)?;
        out.extend(rows.iter().map(|r| value(r, &join(&path, &r.name))));
        if recursive {
            todo.extend(below(&path, &rows));
        }
    }
    Ok(out)
}

fn value(r: &Row, path: &[u8]) -> Value {
    let a = &r.attr;
    json!({
        "name": print::name(&r.name),
        "path": format!("/{}", print::name(path)),
        "kind": format!("{:?}", a.kind).to_lowercase(),
        "inode": a.id.ino,
        "subvolume": a.id.subvol.0,
        "mode": format!("{:04o}", a.perm),
        "links": a.nlink,
        "uid": a.uid,
        "gid": a.gid,
        "size": a.size,
        "allocated": a.bytes,
        "mtime": a.mtime.sec,
        "mtime_nsec": a.mtime.nsec,
        "target": r.link.as_deref().map(print::name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_around_paths_go() {
        assert_eq!(trimmed(b"//a/b//"), b"a/b");
        assert_eq!(trimmed(b"///"), b"");
        assert_eq!(trimmed(b""), b"");
    }

    #[test]
    fn modes_look_as_ls_shows_them() {
        assert_eq!(mode_text(FileKind::Regular, 0o4755), "-rwsr-xr-x");
        assert_eq!(mode_text(FileKind::Directory, 0o1777), "drwxrwxrwt");
        assert_eq!(mode_text(FileKind::Fifo, 0o2640), "prw-r-S---");
    }
}
