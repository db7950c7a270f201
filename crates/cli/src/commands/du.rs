//! `larder du`: how much space files, directories and subvolumes take, alone and together with
//! others.
//!
//! All figures are bytes on the device, where compressed data counts as it lies there; data in
//! leaves is not counted. What is *exclusive* would be free if a file were deleted; what is
//! *shared* is also used by something else — another file or a snapshot — and counts once for a
//! directory, however many files below it have it.

use crate::files::{Files, Kind, Node};
use crate::{mount_options, print, size};
use larder_fs::ExtentPlace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::ops::Range;

/// Show how much space files and directories take, alone and shared with others.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder du mnt/home mnt/home-monday
  larder du --depth 1 disk.img:/

TOTAL counts what each file has; EXCLUSIVE is what nothing else uses; SHARED is
used by other files or snapshots, too, and counts once. On a mount it may be
necessary to be root, to read everything.")]
pub(crate) struct Args {
    /// Show so many levels below each PATH, too
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Print bytes instead of sizes with units
    #[arg(short, long)]
    bytes: bool,
    /// Print JSON: a list of what is shown
    #[arg(long)]
    json: bool,
    /// Number of the subvolume that paths in an image start in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Read the image even if it is in use
    #[arg(long)]
    force: bool,
    /// IMAGE:PATH, or a path on a mount
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
}

/// Ranges of the device, none of which touch.
#[derive(Debug, Default)]
struct Runs(BTreeMap<u64, u64>);

impl Runs {
    fn add(&mut self, run: Range<u64>) {
        let Range { mut start, mut end } = run;
        if let Some((at, stop)) = self.0.range(..=start).next_back().map(|(a, b)| (*a, *b))
            && stop >= start
        {
            start = at;
            end = end.max(stop);
        }
        while let Some((at, stop)) = self.0.range(start..=end).next().map(|(a, b)| (*a, *b)) {
            end = end.max(stop);
            self.0.remove(&at);
        }
        self.0.insert(start, end);
    }
    fn bytes(&self) -> u64 {
        self.0.iter().map(|(a, b)| b - a).sum()
    }
}

/// The figures of one line.
#[derive(Debug, Default)]
pub(crate) struct Sum {
    total: u64,
    exclusive: u64,
    shared: Runs,
}

impl Sum {
    pub(crate) fn add_file(&mut self, files: &Files, node: &Node) -> anyhow::Result<()> {
        // Windows into one compressed extent count once.
        let mut packed = HashSet::new();
        files.extents(node, &mut |e| {
            let ExtentPlace::Device { at, len, offset, compressed, shared, .. } = e.place else {
                return;
            };
            let (start, len) =
                if compressed { (at.0, len) } else { (at.0.saturating_add(offset), e.len) };
            if compressed && !packed.insert(start) {
                return;
            }
            self.total += len;
            if shared {
                self.shared.add(start..start.saturating_add(len));
            } else {
                self.exclusive += len;
            }
        })
    }
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
    pub(crate) fn exclusive(&self) -> u64 {
        self.exclusive
    }
    pub(crate) fn shared(&self) -> u64 {
        self.shared.bytes()
    }
    pub(crate) fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.exclusive += other.exclusive;
        other.shared.0.iter().for_each(|(a, b)| self.shared.add(*a..*b));
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut lines = Vec::new();
    for text in &args.paths {
        let files = Files::open(text, args.subvolid, args.force)?;
        let bar = print::progress();
        let mut seen = HashSet::new();
        let top = files.top()?;
        let shown = files.shown().to_owned();
        count(&files, &top, &shown, args.depth, &mut seen, &bar, &mut lines)?;
        bar.finish_and_clear();
        files.close()?;
    }
    show(args, &lines)
}

/// Counts a node and what is below it. A directory is shown behind what is in it, as `du` does.
fn count(
    files: &Files,
    top: &Node,
    shown: &str,
    depth: usize,
    seen: &mut HashSet<u64>,
    bar: &indicatif::ProgressBar,
    lines: &mut Vec<Value>,
) -> anyhow::Result<Sum> {
    let mut sum = Sum::default();
    let mut ahead = vec![top.clone()];
    while let Some(node) = ahead.pop() {
        bar.inc(1);
        match node.kind {
            Kind::File if !node.linked || seen.insert(node.ino) => sum.add_file(files, &node)?,
            Kind::Directory => {
                for (name, child) in files.entries(&node)? {
                    if depth > 0 {
                        let path =
                            format!("{}/{}", shown.trim_end_matches('/'), print::name(&name));
                        sum.add(&count(files, &child, &path, depth - 1, seen, bar, lines)?);
                    } else {
                        ahead.push(child);
                    }
                }
            }
            _ => {}
        }
    }
    lines.push(json!({
        "path": shown,
        "total": sum.total,
        "exclusive": sum.exclusive,
        "shared": sum.shared.bytes(),
    }));
    Ok(sum)
}

fn show(args: &Args, lines: &[Value]) -> anyhow::Result<()> {
    if args.json {
        return print::json(&lines);
    }
    let size = |v: &Value| match v.as_u64().unwrap_or_default() {
        n if args.bytes => n.to_string(),
        n => size::human(n),
    };
    print::line(&format!("{:>12} {:>12} {:>12}  PATH", "TOTAL", "EXCLUSIVE", "SHARED"))?;
    for l in lines {
        let [total, exclusive, shared] = ["total", "exclusive", "shared"].map(|k| size(&l[k]));
        let path = l["path"].as_str().unwrap_or_default();
        print::line(&format!("{total:>12} {exclusive:>12} {shared:>12}  {path}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_count_once() {
        let mut runs = Runs::default();
        for (a, b) in [(10, 20), (30, 40), (20, 25), (5, 6), (12, 13), (24, 31), (100, 101)] {
            runs.add(a..b);
        }
        assert_eq!(runs.0.into_iter().collect::<Vec<_>>(), [(5, 6), (10, 40), (100, 101)]);
    }
}
