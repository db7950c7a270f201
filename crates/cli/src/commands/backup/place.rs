//! Where a backup goes: an image, a mount, or `ssh://[USER@]HOST[:PORT]/PATH`.
//!
//! Hidden here is the form of an address on another machine, and what of it is refused: parts that
//! `ssh` would take for options. The path behind the host is passed on as it stands, without
//! escapes of URLs. It may be `IMAGE:DIR` there, too. `/~/` at its start is the home directory.

use crate::failure::usage;
use crate::print;
use crate::target::Place;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// What an address on another machine begins with.
const SSH: &[u8] = b"ssh://";

/// A place for snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Here(Place),
    There(Remote),
}

/// A place on another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    /// With the user, if one is named.
    pub(super) host: OsString,
    pub(super) port: Option<u16>,
    /// As `larder` there takes it.
    pub(super) path: Vec<u8>,
}

impl Address {
    pub(super) fn parse(text: &OsStr) -> anyhow::Result<Self> {
        match text.as_bytes().strip_prefix(SSH) {
            Some(rest) => Remote::parse(rest).map(Self::There),
            None => Place::parse_existing(text).map(Self::Here),
        }
    }
}

impl Remote {
    fn parse(rest: &[u8]) -> anyhow::Result<Self> {
        let wrong = |why: &str| {
            let shown = print::name(&[SSH, rest].concat());
            usage(format!("{shown} {why}: give ssh://HOST/PATH, or ssh://USER@HOST:PORT/PATH"))
        };
        let slash = rest.iter().position(|b| *b == b'/').filter(|at| rest.len() > at + 1);
        let Some(slash) = slash else { return wrong("has no path") };
        let (authority, path) = rest.split_at(slash);
        let (host, port) = match split_port(authority) {
            Ok(parts) => parts,
            Err(()) => return wrong("has no port behind its colon"),
        };
        let at = host.iter().rposition(|b| *b == b'@');
        let (user, name) = at.map_or((None, host), |at| (Some(&host[..at]), &host[at + 1..]));
        let name = name.strip_prefix(b"[").and_then(|n| n.strip_suffix(b"]")).unwrap_or(name);
        if !is_plain(name) || user.is_some_and(|user| !is_plain(user)) {
            return wrong("has no host that could be one");
        }
        let host = user.map_or_else(|| name.to_vec(), |user| [user, b"@", name].concat());
        Ok(Self { host: OsString::from_vec(host), port, path: on_that_machine(path) })
    }

    /// For messages.
    pub(super) fn display(&self) -> String {
        let host = print::name(self.host.as_bytes());
        let port = self.port.map_or_else(String::new, |port| format!(":{port}"));
        let slash = if self.path.starts_with(b"/") { "" } else { "/~/" };
        format!("ssh://{host}{port}{slash}{}", print::name(&self.path))
    }
}

/// The host and its port. A colon within brackets is one of the address.
fn split_port(authority: &[u8]) -> Result<(&[u8], Option<u16>), ()> {
    let colon = authority.iter().rposition(|b| *b == b':');
    let bracket = authority.iter().rposition(|b| *b == b']');
    match colon.filter(|colon| bracket.is_none_or(|bracket| bracket < *colon)) {
        None => Ok((authority, None)),
        Some(colon) => {
            let port = std::str::from_utf8(&authority[colon + 1..]).map_err(drop)?;
            Ok((&authority[..colon], Some(port.parse().map_err(drop)?)))
        }
    }
}

/// Is it a name that `ssh` takes for one? It would take `-x` for an option, and may run commands of
/// its configuration with a name in them.
fn is_plain(name: &[u8]) -> bool {
    let fits = |b: &u8| b.is_ascii_alphanumeric() || b"._-:%+".contains(b) || *b >= 0x80;
    !name.is_empty() && name[0] != b'-' && name.iter().all(fits)
}

fn on_that_machine(path: &[u8]) -> Vec<u8> {
    match path.strip_prefix(b"/~/") {
        None => path.to_vec(),
        // Not an option either.
        Some(rest) if rest.starts_with(b"-") || rest.is_empty() => [b"./", rest].concat(),
        Some(rest) => rest.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<Remote> {
        match Address::parse(OsStr::new(text))? {
            Address::There(remote) => Ok(remote),
            Address::Here(place) => panic!("{place:?}"),
        }
    }

    #[test]
    fn addresses_of_other_machines() {
        for (text, host, port, path) in [
            ("ssh://nas/srv/b.img:/home", "nas", None, "/srv/b.img:/home"),
            ("ssh://me@nas:2222/mnt/b", "me@nas", Some(2222), "/mnt/b"),
            ("ssh://[fe80::1%eth0]:22/x", "fe80::1%eth0", Some(22), "/x"),
            ("ssh://me@[::1]/a b'c", "me@::1", None, "/a b'c"),
            ("ssh://nas/~/b.img:/", "nas", None, "b.img:/"),
            ("ssh://nas/~/-x", "nas", None, "./-x"),
        ] {
            let remote = parse(text).unwrap();
            let expected = Remote { host: host.into(), port, path: path.as_bytes().to_vec() };
            assert_eq!(remote, expected, "{text}");
        }
        assert_eq!(parse("ssh://nas:1/~/b").unwrap().display(), "ssh://nas:1/~/b");
    }

    #[test]
    fn what_ssh_would_take_for_something_else_is_refused() {
        for text in [
            "ssh://-oProxyCommand=x/y",
            "ssh://-x@nas/y",
            "ssh://me@-nas/y",
            "ssh:///y",
            "ssh://nas",
            "ssh://nas/",
            "ssh://nas:/y",
            "ssh://nas:99999/y",
            "ssh://a b/y",
            "ssh://a;b/y",
            "ssh://a`b`/y",
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains("give ssh://HOST/PATH"), "{text}: {error}");
        }
    }
}
