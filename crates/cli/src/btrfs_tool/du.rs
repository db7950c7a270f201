//! `btrfs filesystem du`: a line for each file and directory, as far as it is on the mount.

use super::mounted::must_be_larder;
use super::units::{LongUnits, Units};
use super::{Done, Failed, each, reason};
use crate::commands::du::Sum;
use crate::files::{Files, Kind, Node};
use crate::print;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only a sum for each PATH
    #[arg(short = 's', long)]
    summarize: bool,
    #[command(flatten)]
    units: LongUnits,
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

pub(super) fn run(options: Options) -> Done {
    let units = options.units.into();
    print::line(&format!("{:>10}  {:>10}  {:>10}  Filename", "Total", "Exclusive", "Set shared"))?;
    each(&options.paths, |path| top(path, units, options.summarize))
}

fn top(path: &Path, units: Units, summarize: bool) -> Done {
    if let Err(e) = path.metadata() {
        let why = format!("cannot check space of '{}': {}", path.display(), reason(&e));
        return Err(Failed::because(why));
    }
    must_be_larder(path)?;
    let files = Files::open(path.as_os_str(), None, false)?;
    let node = files.top()?;
    let shown = print::path(path);
    let walk = Walk { files: &files, units, quiet: summarize };
    let sum = walk.below(&node, &shown)?;
    walk.line(&sum, Some(units.text(sum.shared())), &shown)?;
    Ok(files.close()?)
}

struct Walk<'a> {
    files: &'a Files,
    units: Units,
    quiet: bool,
}

impl Walk<'_> {
    /// Adds a node up. Lines are printed for what is below it, not for itself.
    fn below(&self, node: &Node, shown: &str) -> Result<Sum, Failed> {
        let mut sum = Sum::default();
        match node.kind {
            Kind::File => sum.add_file(self.files, node)?,
            Kind::Directory => {
                for (name, child) in self.files.entries(node)? {
                    if child.kind == Kind::Other {
                        continue;
                    }
                    let path = format!("{}/{}", shown.trim_end_matches('/'), print::name(&name));
                    let of_child = self.below(&child, &path)?;
                    if !self.quiet {
                        self.line(&of_child, None, &path)?;
                    }
                    sum.add(&of_child);
                }
            }
            Kind::Other => {}
        }
        Ok(sum)
    }

    fn line(&self, sum: &Sum, shared: Option<String>, shown: &str) -> Done {
        let (total, exclusive) = (self.units.text(sum.total()), self.units.text(sum.exclusive()));
        let shared = shared.unwrap_or_else(|| "-".to_owned());
        Ok(print::line(&format!("{total:>10}  {exclusive:>10}  {shared:>10}  {shown}"))?)
    }
}
