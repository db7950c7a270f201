//! `mount.fuse.larder` and `umount.fuse.larder`: what mount(8) and umount(8) call.
//!
//! With them, `mount -t fuse.larder IMAGE DIR`, `mount -o remount,ro DIR` and lines of fstab work,
//! and a plain `umount` waits for the daemon. Arguments and exit codes are those of mount(8): 0
//! success, 1 wrong invocation, 2 system error, 32 failure.

use crate::commands::{mount, umount};
use crate::failure::{self, Advise};
use crate::mount_options::MountWishes;
use crate::mount_table::{self, Mount};
use crate::mounted::mounted;
use crate::print;
use crate::state::Watch;
use anyhow::{Context, anyhow, bail};
use larder_fuse::control;
use rustix::mount::MountFlags;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const WRONG_INVOCATION: u8 = 1;
const SYSTEM_ERROR: u8 = 2;
const FAILURE: u8 = 32;

/// Arguments in mount(8)'s order: places first or in between, `-o` lists, flags alone or together.
#[derive(Debug, Default, PartialEq, Eq)]
struct Invocation {
    places: Vec<PathBuf>,
    options: Vec<String>,
    flags: Vec<u8>,
}

impl Invocation {
    /// Flags that take a value besides `-o`: namespace and type.
    const WITH_VALUE: [u8; 2] = [b'N', b't'];

    fn parse(args: Vec<OsString>, known: &[u8]) -> Result<Self, String> {
        let mut out = Self::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let text =
                arg.to_str().filter(|t| t.len() > 1 && t.starts_with('-')).map(str::to_owned);
            let Some(text) = text else {
                out.places.push(arg.into());
                continue;
            };
            for (i, letter) in text[1..].bytes().enumerate() {
                if letter == b'o' || Self::WITH_VALUE.contains(&letter) {
                    let rest = &text[i + 2..];
                    let value = if rest.is_empty() { args.next() } else { Some(rest.into()) };
                    let value = value.and_then(|v| v.into_string().ok());
                    let value =
                        value.ok_or_else(|| format!("-{} needs a value", char::from(letter)))?;
                    if letter == b'o' {
                        out.options.push(value);
                    }
                    break;
                }
                if !known.contains(&letter) {
                    return Err(format!("unknown flag -{}", char::from(letter)));
                }
                out.flags.push(letter);
            }
        }
        Ok(out)
    }

    fn has(&self, flag: u8) -> bool {
        self.flags.contains(&flag)
    }
}

/// `mount.fuse.larder IMAGE DIR [-sfnv] [-N namespace] [-o options] [-t type]`
pub(crate) fn mount(args: Vec<OsString>) -> ExitCode {
    let wrong = |what: String| {
        print::say(&format!("mount.fuse.larder: {what}"));
        ExitCode::from(WRONG_INVOCATION)
    };
    let mut call = match Invocation::parse(args, b"sfnvwri") {
        Ok(c) => c,
        Err(e) => return wrong(e),
    };
    if call.has(b'r') {
        call.options.push("ro".into());
    }
    if call.has(b's') {
        // Sloppy: unknown options are to be tolerated.
        let unknown = |o: &str| MountWishes::parse([o]).is_err_and(|e| e.starts_with("unknown"));
        call.options = call
            .options
            .iter()
            .flat_map(|l| l.split(','))
            .filter(|o| !unknown(o))
            .map(str::to_owned)
            .collect();
    }
    let [source, point] = &call.places[..] else {
        return wrong(
            "usage: mount.fuse.larder IMAGE|DEVICE DIRECTORY [-sfnv] [-o options]".into(),
        );
    };
    let words: Vec<&str> = call.options.iter().flat_map(|l| l.split(',')).collect();
    if words.contains(&"remount") {
        return match Remount::parse(&words) {
            Err(e) => wrong(e),
            Ok(_) if call.has(b'f') => ExitCode::SUCCESS,
            Ok(wanted) => exit(wanted.carry_out(point), SYSTEM_ERROR),
        };
    }
    if let Err(e) = MountWishes::parse(call.options.iter().map(String::as_str)) {
        return wrong(e);
    }
    if call.has(b'f') {
        return ExitCode::SUCCESS;
    }
    let mut arguments: Vec<OsString> = vec!["mount".into(), "--daemon".into()];
    for list in &call.options {
        arguments.extend(["-o".into(), list.into()]);
    }
    arguments.extend(["--".into(), source.into(), point.into()]);
    match mount::start_daemon(&arguments) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(FAILURE),
        Err(e) => {
            print::say(&failure::text(&e));
            ExitCode::from(SYSTEM_ERROR)
        }
    }
}

/// `umount.fuse.larder DIR [-flnrv] [-N namespace] [-t type]`
pub(crate) fn umount(args: Vec<OsString>) -> ExitCode {
    let wrong = |what: String| {
        print::say(&format!("umount.fuse.larder: {what}"));
        ExitCode::from(WRONG_INVOCATION)
    };
    let call = match Invocation::parse(args, b"flnrvidc") {
        Ok(c) => c,
        Err(e) => return wrong(e),
    };
    let [point] = &call.places[..] else {
        return wrong("usage: umount.fuse.larder DIRECTORY [-flnrv]".into());
    };
    // A lazy unmount is one that does not wait.
    let lazy = call.has(b'l');
    exit(umount::unmount(point, lazy, !lazy), FAILURE)
}

fn exit(result: anyhow::Result<()>, failed: u8) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            print::say(&failure::text(&e));
            ExitCode::from(failed)
        }
    }
}

/// `mount -o remount,…`: what the kernel can change by itself about a mount. Larder's own options
/// stay as they are.
#[derive(Debug, PartialEq, Eq)]
struct Remount {
    flags: MountFlags,
    /// Words that ask for a change which a remount cannot make.
    in_vain: Vec<String>,
}

impl Remount {
    /// Reads the words as mount(8) passes them: those of fstab, those of the mount table, then the
    /// new ones. Later words win.
    fn parse(words: &[&str]) -> Result<Self, String> {
        let shown = |word: &str| {
            let name = word.split('=').next().unwrap_or_default();
            matches!(
                name,
                "remount"
                    | "user_id"
                    | "group_id"
                    | "rootmode"
                    | "fd"
                    | "blksize"
                    | "max_read"
                    | ""
            )
        };
        let rest: Vec<&str> = words.iter().copied().filter(|w| !shown(w)).collect();
        let wanted = MountWishes::parse(rest.iter().copied())?;
        let mut flags = MountFlags::NOATIME;
        for (set, flag) in [
            (wanted.read_only, MountFlags::RDONLY),
            (wanted.nosuid, MountFlags::NOSUID),
            (wanted.nodev, MountFlags::NODEV),
            (wanted.noexec, MountFlags::NOEXEC),
            (wanted.dirsync, MountFlags::DIRSYNC),
            (wanted.synchronous, MountFlags::SYNCHRONOUS),
        ] {
            if set {
                flags |= flag;
            }
        }
        // The kernel can change these; it shows the first two itself, and the others are flags.
        let own = |word: &&&str| {
            MountWishes::parse([**word]).is_ok_and(|alone| {
                let kernels = MountWishes {
                    allow_other: alone.allow_other,
                    default_permissions: alone.default_permissions,
                    read_only: alone.read_only,
                    nosuid: alone.nosuid,
                    nodev: alone.nodev,
                    noexec: alone.noexec,
                    dirsync: alone.dirsync,
                    synchronous: alone.synchronous,
                    ..MountWishes::default()
                };
                alone != kernels
            })
        };
        let in_vain = rest.iter().filter(|w| own(w)).map(|w| (*w).to_owned()).collect();
        Ok(Self { flags, in_vain })
    }

    fn carry_out(&self, point: &Path) -> anyhow::Result<()> {
        let point = mount_table::absolute(point)?;
        let Some(mount) = mount_table::on(&point)?.filter(Mount::is_larder) else {
            bail!("{} is not a Larder mount", point.display());
        };
        let read_only = self.flags.contains(MountFlags::RDONLY);
        let opened = Watch::find(&point, mount.user)?.and_then(|mut watch| watch.record().ok());
        if !read_only && opened.is_some_and(|record| record.read_only) {
            return Err(anyhow!("{}: it was opened for reading only", point.display()))
                .hint("unmount it and mount it again");
        }
        if !self.in_vain.is_empty() {
            print::say(&format!(
                "larder: note: a remount leaves {} as it was; unmount and mount again to change it",
                self.in_vain.join(",")
            ));
        }
        rustix::mount::mount_remount(&point, self.flags, "")
            .with_context(|| point.display().to_string())?;
        if read_only {
            // The kernel has written its pages back, and takes no further changes.
            mounted(&point, control::sync)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Invocation, String> {
        Invocation::parse(args.iter().map(Into::into).collect(), b"sfnv")
    }

    #[test]
    fn a_remount_changes_what_the_kernel_can() {
        let parse = |words: &str| Remount::parse(&words.split(',').collect::<Vec<_>>());
        // As mount(8) calls: what the table shows, then what was asked for.
        let r = parse(
            "rw,noatime,user_id=0,group_id=0,default_permissions,allow_other,\
             uhelper=fuse.larder,remount,ro",
        );
        let flags = MountFlags::NOATIME | MountFlags::RDONLY;
        assert_eq!(r, Ok(Remount { flags, in_vain: Vec::new() }));
        let r =
            parse("ro,blksize=4096,nosuid,noexec,commit=30,remount,rw,exec,dirsync,compress=zstd")
                .unwrap();
        assert_eq!(r.flags, MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::DIRSYNC);
        assert_eq!(r.in_vain, ["commit=30", "compress=zstd"]);
        assert!(parse("remount,compres=zstd").unwrap_err().contains("unknown"));
    }

    #[test]
    fn mount_calls_with_its_own_order() {
        let c = parse(&["a.img", "/mnt", "-o", "rw,noauto", "-vn", "-t", "fuse.larder"]).unwrap();
        assert_eq!(c.places, [PathBuf::from("a.img"), "/mnt".into()]);
        assert_eq!((c.options, c.flags), (vec!["rw,noauto".to_owned()], b"vn".to_vec()));
        let c = parse(&["-sorw,ro", "x", "-N/proc/1/ns/mnt", "y"]).unwrap();
        assert_eq!((c.options, c.flags), (vec!["rw,ro".to_owned()], b"s".to_vec()));
        assert_eq!(c.places.len(), 2);
        assert!(parse(&["-o"]).is_err());
        assert!(parse(&["-q"]).is_err());
    }
}
