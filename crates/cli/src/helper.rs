//! `mount.fuse.larder` and `umount.fuse.larder`: what mount(8) and umount(8) call.
//!
//! They make `mount -t fuse.larder IMAGE DIR`, fstab lines and a plain `umount` that waits work. Arguments and exit codes
//! are mount(8)'s: 0 success, 1 wrong invocation, 2 system error, 32 failure.

use crate::commands::{mount, umount};
use crate::failure;
use crate::mount_options::MountWishes;
use std::ffi::OsString;
use std::path::PathBuf;
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
            let text = arg.to_str().filter(|t| t.len() > 1 && t.starts_with('-')).map(str::to_owned);
            let Some(text) = text else {
                out.places.push(arg.into());
                continue;
            };
            for (i, letter) in text[1..].bytes().enumerate() {
                if letter == b'o' || Self::WITH_VALUE.contains(&letter) {
                    let rest = &text[i + 2..];
                    let value = if rest.is_empty() { args.next() } else { Some(rest.into()) };
                    let value = value.and_then(|v| v.into_string().ok());
                    let value = value.ok_or_else(|| format!("-{} needs a value", char::from(letter)))?;
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
        eprintln!("mount.fuse.larder: {what}");
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
        return wrong("usage: mount.fuse.larder IMAGE|DEVICE DIRECTORY [-sfnv] [-o options]".into());
    };
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
            eprintln!("{}", failure::text(&e));
            ExitCode::from(SYSTEM_ERROR)
        }
    }
}

/// `umount.fuse.larder DIR [-flnrv] [-N namespace] [-t type]`
pub(crate) fn umount(args: Vec<OsString>) -> ExitCode {
    let wrong = |what: String| {
        eprintln!("umount.fuse.larder: {what}");
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
    match umount::unmount(point, lazy, !lazy) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{}", failure::text(&e));
            ExitCode::from(FAILURE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Invocation, String> {
        Invocation::parse(args.iter().map(Into::into).collect(), b"sfnv")
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
