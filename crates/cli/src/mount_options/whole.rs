//! Options of the whole file system, as opposed to those of one mount.
//!
//! An image has one engine, however often it is mounted, and the first mount sets its options. A
//! further mount may leave them out or repeat them. If one of them differs, the mount is refused
//! and the option named: an option that is silently ignored is a promise not kept. This module
//! knows which options these are, their values in a running daemon, and which of them a command
//! line gives.

use super::{MountWishes, words};
use crate::size;
use larder_fs::Compress;
use larder_volume::Caching;
use std::collections::BTreeMap;

/// Options of the whole file system, each under one name, as a user would write them.
pub(crate) type Settings = BTreeMap<String, String>;

/// The name under which a word is compared; `None` for options of a mount.
fn group(word: &str) -> Option<&'static str> {
    Some(match word.split('=').next().unwrap_or_default() {
        "cache_size" => "cache_size",
        "commit" => "commit",
        "compress" | "compress-force" => "compress",
        "discard" | "nodiscard" => "discard",
        "max_inline" => "max_inline",
        "reclaim" => "reclaim",
        "nodatacow" | "datacow" => "nodatacow",
        "nodatasum" | "datasum" => "nodatasum",
        "direct" | "buffered" => "direct",
        "notreelog" | "treelog" => "notreelog",
        "tuning" => "tuning",
        "nosandbox" => "nosandbox",
        "nologreplay" | "norecovery" => "nologreplay",
        "skip_balance" => "skip_balance",
        _ => return None,
    })
}

/// The settings of a daemon that was started with these options, with defaults filled in.
pub(crate) fn settings(wishes: &MountWishes, block_device: bool) -> Settings {
    let either = |on: bool, yes: &str, no: &str| if on { yes } else { no }.to_owned();
    let compress = match &wishes.compress {
        None => "compress=no".to_owned(),
        Some(Compress { packing, force: false }) => format!("compress={packing}"),
        Some(Compress { packing, force: true }) => format!("compress-force={packing}"),
    };
    let cache = wishes.cache_size.unwrap_or_else(larder_fuse::default_cache_size);
    let max_inline = wishes.max_inline.unwrap_or(larder_fs::OpenOptions::default().max_inline);
    let mut tuning = wishes.tuning.clone();
    tuning.no_log = false;
    let discard = wishes.discard.unwrap_or(!block_device);
    let caching = match wishes.caching {
        Caching::Auto => "neither direct nor buffered",
        Caching::Direct => "direct",
        Caching::Buffered => "buffered",
    };
    [
        ("cache_size", format!("cache_size={}", bytes(cache))),
        ("commit", format!("commit={}", wishes.commit.as_secs())),
        ("compress", compress),
        ("discard", either(discard, "discard", "nodiscard")),
        ("max_inline", format!("max_inline={max_inline}")),
        ("reclaim", format!("reclaim={}", wishes.reclaim.unwrap_or(0))),
        ("nodatacow", either(wishes.no_data_cow, "nodatacow", "datacow")),
        ("nodatasum", either(wishes.no_data_sum, "nodatasum", "datasum")),
        ("direct", caching.to_owned()),
        ("notreelog", either(wishes.tuning.no_log, "notreelog", "treelog")),
        ("tuning", format!("{tuning:?}")),
        ("nosandbox", either(!wishes.sandbox, "nosandbox", "the sandbox")),
        ("skip_balance", either(wishes.skip_balance, "skip_balance", "its balance goes on")),
        ("nologreplay", either(wishes.no_log_replay, "nologreplay", "its log replayed")),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// Those of the settings that a command line gives.
pub(crate) fn given(lists: &[String], cache_size: bool, settings: &Settings) -> Settings {
    let said = lists.iter().flat_map(|list| words(list)).filter_map(|word| group(&word));
    let said: Vec<&str> = said.chain(cache_size.then_some("cache_size")).collect();
    let given = |name: &String| said.contains(&name.as_str());
    settings.iter().filter(|(name, _)| given(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

/// The first option that differs: as it was given, and as it is.
pub(crate) fn conflict<'a>(given: &'a Settings, have: &'a Settings) -> Option<(&'a str, &'a str)> {
    given.iter().find_map(|(name, said)| {
        let is = have.get(name).map_or("another version's", String::as_str);
        (is != said).then_some((said.as_str(), is))
    })
}

/// A size as a user would write it.
fn bytes(n: u64) -> String {
    for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
        if n > 0 && n.is_multiple_of(1 << shift) {
            return format!("{}{unit}", n >> shift);
        }
    }
    // A default that depends on the memory of the machine need not be round.
    debug_assert_eq!(size::parse(&n.to_string()), Ok(n));
    n.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(options: &str) -> Settings {
        settings(&MountWishes::parse([options]).unwrap(), false)
    }
    fn said(options: &str) -> Settings {
        given(&[options.to_owned()], false, &of(options))
    }

    #[test]
    fn options_of_a_mount_are_nobody_elses_business() {
        let words = "ro,rw,subvol=/a,subvolid=7,nosuid,dev,noexec,sync,dirsync,allow_other,\
                     default_permissions,\
                     writeback,transport=dev,nofuseblk,fsname=x,noatime,x-systemd.automount,user";
        assert_eq!(said(words), Settings::new());
        assert_eq!(conflict(&said(words), &of("")), None);
    }

    #[test]
    fn what_differs_is_named_and_what_is_left_out_is_not() {
        let differs = |wanted: &str, running: &str| {
            let (given, have) = (said(wanted), of(running));
            conflict(&given, &have).map(|(said, is)| format!("{said} / {is}"))
        };
        for (wanted, running, want) in [
            ("commit=30", "", "commit=30 / commit=5"),
            ("commit=5", "commit=30", "commit=5 / commit=30"),
            ("cache_size=64M", "cache_size=1G", "cache_size=64M / cache_size=1G"),
            ("compress", "", "compress=zlib:3 / compress=no"),
            ("compress=no", "compress-force=zstd", "compress=no / compress-force=zstd:3"),
            ("nodiscard", "", "nodiscard / discard"),
            ("max_inline=0", "", "max_inline=0 / max_inline=2048"),
            ("reclaim=20", "", "reclaim=20 / reclaim=0"),
            ("nodatacow", "", "nodatacow / datacow"),
            ("datasum", "nodatasum", "datasum / nodatasum"),
            ("direct", "", "direct / neither direct nor buffered"),
            ("buffered", "direct", "buffered / direct"),
            ("notreelog", "", "notreelog / treelog"),
            ("treelog", "notreelog", "treelog / notreelog"),
            ("nosandbox", "", "nosandbox / the sandbox"),
            ("skip_balance", "", "skip_balance / its balance goes on"),
            ("ro,norecovery", "", "nologreplay / its log replayed"),
        ] {
            assert_eq!(differs(wanted, running).as_deref(), Some(want));
            assert_eq!(differs(running, running), None, "{running}");
            assert_eq!(differs("ro,subvol=b", running), None, "{running}");
        }
        assert!(differs("tuning=log-alone", "").is_some());
        let cache = given(&[], true, &of("cache_size=64M"));
        assert_eq!(
            conflict(&cache, &of("cache_size=32M")),
            Some(("cache_size=64M", "cache_size=32M"))
        );
        assert_eq!(bytes(1 << 30), "1G");
        assert_eq!(bytes((1 << 20) + 1), "1048577");
    }
}
