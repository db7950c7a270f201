//! Commands on an image that is not mounted, beside the rate of the disk under it.
//!
//! The image holds one large file, which the kernel has written. Larder checks it with all data,
//! prints the file, and restores it without writing it anywhere. The kernel's side is `btrfs check`
//! with all data, and the file read through a mount. Here the ceiling is the machine itself: `dd`
//! reads as many bytes of the image past the page cache. Output goes nowhere, so only reading takes
//! time.
//!
//! How much of the image a command leaves in the page cache is a result, too: other programs lose
//! that memory.

use crate::interrupt;
use crate::target::Target;
use crate::units::Mib;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

/// Every structure and all data.
pub(crate) const CHECK: &str = "check with data";
/// The file to its end.
pub(crate) const CAT: &str = "cat 1 file, offline";
/// The file to its end, by the command that needs no intact image.
pub(crate) const RESTORE: &str = "restore, dry run";

/// Are there commands for this target? The disk counts as one.
pub(crate) fn is_for(target: Target) -> bool {
    matches!(target, Target::Kernel | Target::KernelAgain | Target::Larder | Target::Ceiling)
}

/// The commands of the kernel's side. The file is read through a mount.
pub(crate) fn of_linux(image: &Path) -> Vec<(&'static str, Command)> {
    let mut check = Command::new("btrfs");
    check.args(["check", "--check-data-csum"]).arg(image);
    vec![(CHECK, check)]
}

/// Larder's commands.
pub(crate) fn of_larder(larder: &Path, image: &Path, file: &str) -> Vec<(&'static str, Command)> {
    let command = |args: &[&str]| {
        let mut command = Command::new(larder);
        command.args(args);
        command
    };
    let mut check = command(&["check", "--data"]);
    check.arg(image);
    let mut cat = command(&["cat"]);
    cat.arg(path_in(image, file));
    let mut restore = command(&["restore", "--dry-run"]);
    restore.arg(image);
    vec![(CHECK, check), (CAT, cat), (RESTORE, restore)]
}

/// The disk alone, once for each step, because targets are compared within a step.
pub(crate) fn of_disk(image: &Path, mib: Mib) -> Vec<(&'static str, Command)> {
    let dd = || {
        let mut from = OsString::from("if=");
        from.push(image);
        let mut dd = Command::new("dd");
        dd.arg(from).args(["of=/dev/null", "bs=1M", "iflag=direct", "status=none"]);
        dd.arg(format!("count={mib}"));
        dd
    };
    [CHECK, CAT, RESTORE].map(|step| (step, dd())).into()
}

fn path_in(image: &Path, file: &str) -> OsString {
    let mut path = image.as_os_str().to_owned();
    path.push(":/");
    path.push(file);
    path
}

/// Is what `cat` prints the `block`, a MiB, so many times?
pub(crate) fn verify(
    larder: &Path,
    image: &Path,
    file: &str,
    block: &[u8],
    Mib(times): Mib,
) -> Result<()> {
    let mut cat =
        Command::new(larder).arg("cat").arg(path_in(image, file)).stdout(Stdio::piped()).spawn()?;
    let mut out = cat.stdout.take().context("its output")?;
    let mut found = vec![0; block.len()];
    for n in 0..times {
        interrupt::check()?;
        out.read_exact(&mut found).with_context(|| format!("larder cat ends within MiB {n}"))?;
        ensure!(found == block, "larder cat prints what was not written, in MiB {n}");
    }
    ensure!(out.read(&mut found)? == 0, "larder cat prints more than was written");
    let status = cat.wait()?;
    ensure!(status.success(), "larder cat: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_stands_beside_each_command() {
        let image = Path::new("a.img");
        let larder = of_larder(Path::new("larder"), image, "stream");
        let disk = of_disk(image, Mib(8));
        let names =
            |steps: &[(&'static str, Command)]| steps.iter().map(|s| s.0).collect::<Vec<_>>();
        assert_eq!(names(&larder), names(&disk));
        assert!(of_linux(image).iter().all(|(step, _)| names(&larder).contains(step)));
        assert_eq!(larder[1].1.get_args().last(), Some("a.img:/stream".as_ref()));
        assert!(disk[0].1.get_args().any(|arg| arg == "count=8"));
    }
}
