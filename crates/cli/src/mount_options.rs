//! `-o` of `larder mount` and of the mount helper.
//!
//! An option is one of Larder's own, a generic one that mount(8) and fstab know for every file
//! system, or a mistake. An option that is silently ignored is a promise not kept, so an unknown
//! option is an error. Later options win over earlier ones.

pub(crate) mod whole;

use crate::size;
use larder_fs::{Compress, Packing, SubvolChoice, Tuning, older};
use larder_fuse::Transport;
use larder_volume::Caching;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct MountWishes {
    pub(crate) read_only: bool,
    pub(crate) nosuid: bool,
    pub(crate) nodev: bool,
    pub(crate) noexec: bool,
    pub(crate) synchronous: bool,
    pub(crate) dirsync: bool,
    pub(crate) allow_other: bool,
    /// `None`: as is usual for the user that mounts.
    pub(crate) default_permissions: Option<bool>,
    pub(crate) no_log_replay: bool,
    /// A balance that was interrupted stays paused.
    pub(crate) skip_balance: bool,
    /// Further devices of the file system.
    pub(crate) devices: Vec<PathBuf>,
    /// Do without devices that are missing.
    pub(crate) degraded: bool,
    pub(crate) writeback: bool,
    pub(crate) caching: Caching,
    pub(crate) fuseblk: bool,
    pub(crate) sandbox: bool,
    /// `None`: for image files, not for devices.
    pub(crate) discard: Option<bool>,
    pub(crate) transport: Transport,
    pub(crate) subvol: SubvolChoice,
    pub(crate) commit: Duration,
    pub(crate) compress: Option<Compress>,
    pub(crate) cache_size: Option<u64>,
    pub(crate) max_inline: Option<u64>,
    pub(crate) no_data_cow: bool,
    pub(crate) no_data_sum: bool,
    /// Chunks of which fewer percent are used are freed in the background.
    pub(crate) reclaim: Option<u8>,
    pub(crate) fsname: String,
    /// Old behaviour switched back on: for benchmarks, and not in the help.
    pub(crate) tuning: Tuning,
}

impl Default for MountWishes {
    fn default() -> Self {
        Self {
            read_only: false,
            nosuid: false,
            nodev: false,
            noexec: false,
            synchronous: false,
            dirsync: false,
            allow_other: false,
            default_permissions: None,
            no_log_replay: false,
            skip_balance: false,
            devices: Vec::new(),
            degraded: false,
            writeback: false,
            caching: Caching::Auto,
            fuseblk: true,
            sandbox: true,
            discard: None,
            transport: Transport::Auto,
            subvol: SubvolChoice::Default,
            commit: DEFAULT_COMMIT,
            compress: None,
            cache_size: None,
            max_inline: None,
            no_data_cow: false,
            no_data_sum: false,
            reclaim: None,
            fsname: String::new(),
            tuning: Tuning::default(),
        }
    }
}

const DEFAULT_COMMIT: Duration = Duration::from_secs(5);
/// Longest commit interval, as in Linux's own advice.
const MAX_COMMIT: u64 = 300;

/// Larder's own options, for `--help`.
pub(crate) const HELP: &str = "\
Options for -o (comma-separated; -o may be repeated):
  ro, rw                read-only or writable
  subvol=PATH           root of the mount: a subvolume, by path from the top
  subvolid=N            the same, by number (5 is the top)
  commit=SECONDS        longest time until changes are durable by themselves
                        (default 5)
  cache_size=SIZE       as --cache-size
  compress[=METHOD]     compress new data that looks as if it would become
                        smaller: zlib[:1..9], lzo, zstd[:-15..15] (zlib:3 if
                        nothing is said), or no
  compress-force[=METHOD]
                        try all new data
  max_inline=BYTES      longest file that is kept in its leaf (default 2048;
                        0 for none)
  nodatacow, datacow    new files are overwritten in place, without checksums
                        or compression; or not
  nodatasum, datasum    new files have no checksums; or have
  allow_other           let other users in, with the rights that the files give
                        them; otherwise only the user who mounts can enter, even
                        if that is root (as with fstab). Ordinary users need
                        user_allow_other in fuse.conf(5)
  default_permissions   let the kernel check permissions even for an owner-only
                        mount
  notreelog, treelog    make each fsync a commit of everything; or not
  nologreplay           with ro: show the last commit of an image that has a
                        log, without replaying it; norecovery is the same, as
                        on Linux
  reclaim=PERCENT       free chunks of data in the background of which less than
                        that is used (default 0: never)
  skip_balance          leave a balance paused that was interrupted; otherwise
                        it goes on
  device=PATH           a further device of the file system, where it is not
                        found: block devices are by their file system's id,
                        image files if they lie in the directory of the first
  degraded              mount although devices are missing, if the others have
                        everything
  writeback             let the kernel delay and merge writes in its page cache:
                        fewer requests where a file is written in small pieces.
                        What a program wrote to a file that is still open may
                        be lost with the daemon, and a full disk is reported
                        late. Mounted by root it may hold as many dirty pages
                        as other file systems, otherwise few
  discard, nodiscard    give freed space back: an image file gets holes, a
                        device is told (default: for image files, not for
                        devices). discard=sync and discard=async mean the same
  direct                bypass the page cache for all of the image (O_DIRECT),
                        or fail; by default writes and long reads do, where
                        that can be done
  buffered              never bypass it
  transport=auto|dev|uring
                        how to talk to the kernel
  nofuseblk             as root on a block device: plain fuse, not fuseblk
  fsname=NAME           name shown in the mount table
  nosandbox             let the daemon keep its rights: for profilers and such,
                        or where the sandbox is in the way (then please report
                        it)
  nosuid, nodev, noexec, sync, dirsync and fstab's generic options work as
  usual; Larder mounts are noatime.

An image that is mounted already gets a further mount, served by the same
daemon. commit, cache_size, compress, discard, max_inline, nodatacow, nodatasum,
reclaim, direct, buffered, notreelog, nologreplay, skip_balance and nosandbox
are options of the whole file system: the first mount decides, and a later one
may only say the same.";

impl MountWishes {
    /// Reads the words of all `-o` lists in order.
    pub(crate) fn parse<'a>(lists: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut w = Self::default();
        for word in lists.into_iter().flat_map(words) {
            w.apply(&word)?;
        }
        if w.no_log_replay && !w.read_only {
            return Err(
                "nologreplay needs ro: a log that is not replayed must not be written over".into(),
            );
        }
        Ok(w)
    }

    fn apply(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = word.split_once('=').map_or((word, None), |(n, v)| (n, Some(v)));
        if self.flag(name, value) || passes(name, value) {
            return Ok(());
        }
        let needs = || {
            value
                .filter(|v| !v.is_empty())
                .ok_or(format!("mount option {name} needs a value: {name}=…"))
        };
        match name {
            "subvol" => {
                self.subvol = SubvolChoice::Path(std::ffi::OsStr::new(needs()?).as_bytes().to_vec())
            }
            "subvolid" => self.subvol = SubvolChoice::Id(subvolid(needs()?)?),
            "commit" => {
                let seconds = needs()?.parse().ok().filter(|s| *s <= MAX_COMMIT);
                let seconds: u64 = seconds.ok_or(format!(
                    "commit={}: not a number of seconds up to {MAX_COMMIT}",
                    needs()?
                ))?;
                self.commit =
                    if seconds == 0 { DEFAULT_COMMIT } else { Duration::from_secs(seconds) };
            }
            "compress" | "compress-force" => {
                self.compress = compress(name, value)?;
                if self.compress.is_some() {
                    (self.no_data_cow, self.no_data_sum) = (false, false);
                }
            }
            "cache_size" => self.cache_size = Some(cache_size(needs()?)?),
            "device" => self.devices.push(needs()?.into()),
            "discard" => {
                self.discard = match needs()? {
                    "sync" | "async" => Some(true),
                    other => return Err(format!("discard={other}: use sync or async")),
                }
            }
            "reclaim" => self.reclaim = reclaim(needs()?)?,
            "max_inline" => self.max_inline = Some(size::parse(needs()?)?),
            "fsname" => self.fsname = needs()?.into(),
            "transport" => {
                self.transport = match needs()? {
                    "auto" => Transport::Auto,
                    "dev" => Transport::DevFuse,
                    "uring" => Transport::Uring,
                    other => return Err(format!("transport={other}: use auto, dev or uring")),
                }
            }
            "tuning" => needs()?.split('+').try_for_each(|name| switch(&mut self.tuning, name))?,
            "loop" => {
                return Err(
                    "mount option loop is not needed: Larder opens image files itself".into()
                );
            }
            "remount" => {
                return Err(
                    "mount(8) is the command for a remount: `mount -o remount,ro DIRECTORY` as \
                     root (`mount -i -o …` where the mount helper is not installed)"
                        .into(),
                );
            }
            "strictatime" => {
                return Err(
                    "mount option strictatime is not supported: Larder mounts are noatime".into()
                );
            }
            "" => return Err("empty mount option".into()),
            _ => {
                return Err(format!(
                    "unknown mount option {word:?} (larder mount --help lists those that exist)"
                ));
            }
        }
        Ok(())
    }

    /// Applies an option without a value; false if it is none of these.
    fn flag(&mut self, name: &str, value: Option<&str>) -> bool {
        if value.is_some() && !matches!(name, "user") {
            return false;
        }
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "nosuid" => self.nosuid = true,
            "suid" => self.nosuid = false,
            "nodev" => self.nodev = true,
            "dev" => self.nodev = false,
            "noexec" => self.noexec = true,
            "exec" => self.noexec = false,
            "sync" => self.synchronous = true,
            "async" => self.synchronous = false,
            "dirsync" => self.dirsync = true,
            // What fstab lets ordinary users mount is restricted, unless later words say otherwise.
            "user" | "users" => (self.nosuid, self.nodev, self.noexec) = (true, true, true),
            "owner" | "group" => (self.nosuid, self.nodev) = (true, true),
            "defaults" => {
                (self.read_only, self.nosuid, self.nodev, self.noexec) =
                    (false, false, false, false);
                self.synchronous = false;
            }
            "allow_other" => self.allow_other = true,
            "default_permissions" => self.default_permissions = Some(true),
            "nologreplay" | "norecovery" => self.no_log_replay = true,
            "skip_balance" => self.skip_balance = true,
            "degraded" => self.degraded = true,
            "writeback" => self.writeback = true,
            "nowriteback" => self.writeback = false,
            "direct" => self.caching = Caching::Direct,
            "buffered" => self.caching = Caching::Buffered,
            "discard" => self.discard = Some(true),
            "nodiscard" => self.discard = Some(false),
            // As Linux combines them: what is not copied on write has neither checksums nor
            // compression.
            "nodatacow" => (self.no_data_cow, self.no_data_sum, self.compress) = (true, true, None),
            "datacow" => self.no_data_cow = false,
            "nodatasum" => self.no_data_sum = true,
            "datasum" => (self.no_data_cow, self.no_data_sum) = (false, false),
            "treelog" => self.tuning.no_log = false,
            "notreelog" => self.tuning.no_log = true,
            "nofuseblk" => self.fuseblk = false,
            "nosandbox" => self.sandbox = false,
            _ => return false,
        }
        true
    }
}

/// A percentage; 0 is never.
fn reclaim(value: &str) -> Result<Option<u8>, String> {
    let percent = value.parse().ok().filter(|percent| *percent <= 90);
    let percent = percent.ok_or(format!("reclaim={value}: not a percentage up to 90"))?;
    Ok((percent > 0).then_some(percent))
}

/// Generic options that change nothing: they are for other programs that read fstab, or ask for
/// what Larder does anyway.
fn passes(name: &str, value: Option<&str>) -> bool {
    if name.starts_with("x-") || name.starts_with("X-") {
        return true;
    }
    match value {
        Some(_) => matches!(name, "comment" | "helper" | "uhelper"),
        None => matches!(
            name,
            "auto"
                | "noauto"
                | "nofail"
                | "_netdev"
                | "nouser"
                | "nousers"
                | "noowner"
                | "nogroup"
                | "noatime"
                | "relatime"
                | "norelatime"
                | "nostrictatime"
                | "nodiratime"
                | "diratime"
                | "atime"
                | "lazytime"
                | "nolazytime"
                | "nomand"
                | "iversion"
                | "noiversion"
                | "silent"
                | "loud"
        ),
    }
}

/// Switches something back to what Linux once did, so that benchmarks can show what it is worth.
fn switch(tuning: &mut Tuning, name: &str) -> Result<(), String> {
    match name {
        "whole-inodes" => tuning.reclaim = older::Reclaim::WholeInodes,
        "locked-copies" => tuning.log_copies = older::LogCopies::Locked,
        "log-waits" => tuning.log_start = older::LogStart::AfterCommit,
        "log-alone" => tuning.log_entry = older::LogEntry::Alone,
        _ => {
            return Err(format!(
                "tuning={name}: use whole-inodes, locked-copies, log-waits or log-alone, joined \
                 by +"
            ));
        }
    }
    Ok(())
}

/// Splits at commas that are not quoted: `subvol="a,b"` and `a\,b` keep theirs.
fn words(list: &str) -> Vec<String> {
    let mut out = Vec::new();
    let (mut word, mut quoted, mut escaped) = (String::new(), false, false);
    for c in list.chars() {
        match c {
            _ if escaped => {
                word.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(std::mem::take(&mut word)),
            _ => word.push(c),
        }
    }
    out.push(word);
    // A trailing comma, as scripts leave it, is no option.
    out.retain(|w| !w.is_empty());
    out
}

/// `compress` and `compress-force`: the later of them wins, and `no` takes either back.
fn compress(name: &str, value: Option<&str>) -> Result<Option<Compress>, String> {
    let packing = match value {
        None => Some(Packing::default()),
        Some(text) => Packing::parse(text).map_err(|e| format!("{name}={text}: {e}"))?,
    };
    Ok(packing.map(|packing| Compress { packing, force: name == "compress-force" }))
}

/// Number of a subvolume; 0 is the top, as in Linux.
pub(crate) fn subvolid(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    match parsed {
        Ok(0) => Ok(5),
        Ok(n) => Ok(n),
        Err(_) => Err(format!("{text:?} is not the number of a subvolume")),
    }
}

/// Smallest cache that the engine can work with.
const MIN_CACHE: u64 = 16 << 20;

/// Size of the cache.
pub(crate) fn cache_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    if bytes < MIN_CACHE {
        return Err(format!("a cache of {text} is too small: at least {}", size::human(MIN_CACHE)));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(lists: &[&str]) -> MountWishes {
        MountWishes::parse(lists.iter().copied()).unwrap()
    }
    fn err(list: &str) -> String {
        MountWishes::parse([list]).unwrap_err()
    }

    #[test]
    fn own_options() {
        assert_eq!(ok(&[]), MountWishes::default());
        let w = ok(&[
            "ro,subvol=/a/b,commit=30",
            "cache_size=64M,transport=dev,allow_other,writeback,direct,nologreplay",
        ]);
        assert!(w.sandbox && !ok(&["nosandbox"]).sandbox);
        assert!(
            w.read_only
                && w.allow_other
                && w.writeback
                && w.caching == Caching::Direct
                && w.no_log_replay
        );
        assert_eq!(w.subvol, SubvolChoice::Path(b"/a/b".to_vec()));
        assert_eq!(
            (w.commit, w.cache_size, w.transport),
            (Duration::from_secs(30), Some(64 << 20), Transport::DevFuse)
        );
        assert_eq!(ok(&["subvolid=257"]).subvol, SubvolChoice::Id(257));
        assert_eq!(ok(&["subvolid=0"]).subvol, SubvolChoice::Id(5));
        assert_eq!(ok(&["subvolid=0x100"]).subvol, SubvolChoice::Id(256));
        assert_eq!(ok(&[r#"subvol="a,b",ro"#]).subvol, SubvolChoice::Path(b"a,b".to_vec()));
        assert_eq!(ok(&["commit=0"]).commit, DEFAULT_COMMIT);
        assert!(ok(&["ro,norecovery"]).no_log_replay);
        let kept = |list| {
            let w = ok(&[list]);
            (w.no_data_cow, w.no_data_sum)
        };
        assert_eq!(kept("nodatacow"), (true, true));
        assert_eq!(kept("nodatacow,datacow"), (false, true));
        assert_eq!(kept("nodatacow,compress"), (false, false));
        assert_eq!(ok(&["compress,nodatacow"]).compress, None);
        assert_eq!(kept("nodatacow,datasum"), (false, false));
        assert_eq!(kept("nodatasum"), (false, true));
        assert_eq!(ok(&["max_inline=0"]).max_inline, Some(0));
    }

    #[test]
    fn compression() {
        let shown = |list: &str| ok(&[list]).compress.map(|c| (c.packing.to_string(), c.force));
        for (list, want) in [
            ("compress", Some(("zlib:3", false))),
            ("compress=zstd:16", Some(("zstd:15", false))),
            ("compress-force=lzo", Some(("lzo", true))),
            ("compress-force", Some(("zlib:3", true))),
            ("compress=no", None),
            ("compress-force=zstd,compress=zlib", Some(("zlib:3", false))),
            ("compress-force=lzo,compress=none", None),
            ("compress=zstd,compress-force=no", None),
            ("compress=none,compress-force", Some(("zlib:3", true))),
        ] {
            assert_eq!(shown(list), want.map(|(p, f)| (p.to_owned(), f)), "{list}");
        }
    }

    #[test]
    fn discarding_is_as_linux_spells_it() {
        assert_eq!(ok(&[]).discard, None);
        for list in ["discard", "discard=async", "nodiscard,discard=sync"] {
            assert_eq!(ok(&[list]).discard, Some(true), "{list}");
        }
        assert_eq!(ok(&["discard,nodiscard"]).discard, Some(false));
    }

    #[test]
    fn generic_options_pass_and_later_ones_win() {
        let w = ok(&[
            "defaults,noauto,nofail,_netdev,x-systemd.automount,x-a=b,comment=x,relatime,noatime,\
             nodiratime",
        ]);
        assert_eq!(w, MountWishes::default());
        let w = ok(&["ro,user,rw,suid"]);
        assert!(!w.read_only && !w.nosuid && w.nodev && w.noexec);
        let w = ok(&["nosuid,nodev,noexec,sync,dirsync,user=alice"]);
        assert!(w.nosuid && w.nodev && w.noexec && w.synchronous && w.dirsync);
        assert_eq!(ok(&["rw,"]), MountWishes::default());
    }

    #[test]
    fn old_behaviour_is_for_benchmarks() {
        let w = ok(&["notreelog,treelog,tuning=log-alone+log-waits,notreelog"]);
        assert!(w.tuning.no_log && w.tuning.log_entry == older::LogEntry::Alone);
        assert_eq!(w.tuning.log_start, older::LogStart::AfterCommit);
        assert_eq!(w.tuning.log_copies, older::LogCopies::None);
        assert_eq!(w.tuning.reclaim, older::Reclaim::AsNeeded);
        assert!(!HELP.contains("tuning") && HELP.contains("notreelog"));
    }

    #[test]
    fn mistakes_are_errors() {
        for list in ["rwx", "ro=1", "space_cache=v2", "ssd"] {
            assert!(err(list).contains(list), "{list}");
        }
        for (list, want) in [
            ("subvol=", "needs a value"),
            ("subvol", "needs a value"),
            ("subvolid=abc", "not the number"),
            ("commit=soon", "seconds"),
            ("commit=301", "300"),
            ("cache_size=1M", "too small"),
            ("cache_size=x", "not a size"),
            ("discard=later", "sync or async"),
            ("transport=pigeon", "auto, dev or uring"),
            ("nologreplay", "needs ro"),
            ("nologreplay,ro,rw", "needs ro"),
            ("loop", "not needed"),
            ("remount,ro", "mount -o remount,ro"),
            ("strictatime", "noatime"),
            ("tuning=log-alone+fast", "tuning=fast"),
            ("compress=gzip", "use zlib"),
            ("compress=", "use zlib"),
            ("compress-force=zstd:x", "number"),
        ] {
            assert!(err(list).contains(want), "{list}: {}", err(list));
        }
    }
}
