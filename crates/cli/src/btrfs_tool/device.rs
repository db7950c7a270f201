//! `btrfs device`: of one device, what it holds, and the errors that its counters have.
//!
//! The counters lie in the device tree, where Linux writes them. Larder leaves them as they are: it
//! reports an error to the program that meets it.

use super::elsewhere::Anything;
use super::mounted::Mounted;
use super::units::Units;
use super::{Done, Failed, Global, each, elsewhere, must_be_directory, usage};
use crate::image::{Access, as_devices, open_devices};
use crate::print;
use crate::raw::session;
use larder_format::{Key, KeyType, ObjectId};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Show the error counters
    Stats(Stats),
    /// Show what the chunks take of the device
    Usage(Usage),
    /// Not supported
    Add(Anything),
    /// Not supported
    Delete(Anything),
    /// Not supported
    Remove(Anything),
    /// Not supported
    Replace(Anything),
    /// Not needed
    Scan(Anything),
    /// Not needed
    Ready(Anything),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Stats {
    /// End with 64 if a counter is not zero
    #[arg(short, long)]
    check: bool,
    /// Set the counters to zero (not supported)
    #[arg(short = 'z', long)]
    reset: bool,
    /// Print a table
    #[arg(short = 'T')]
    table: bool,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Usage {
    #[command(flatten)]
    units: Units,
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

pub(super) fn run(what: What, global: Global) -> Done {
    match what {
        What::Stats(options) => stats(&options, global),
        What::Usage(options) => each(&options.paths, |path| {
            must_be_directory(path)?;
            usage::device(&Mounted::at(path)?, options.units)
        }),
        What::Add(_) => elsewhere::refuse("device add"),
        What::Delete(_) => elsewhere::refuse("device delete"),
        What::Remove(_) => elsewhere::refuse("device remove"),
        What::Replace(_) => elsewhere::refuse("device replace"),
        What::Scan(_) => elsewhere::refuse("device scan"),
        What::Ready(_) => elsewhere::refuse("device ready"),
    }
}

/// The counters in their order on disk: names, and titles in a table.
const COUNTERS: [(&str, &str); 5] = [
    ("write_io_errs", "Write errors"),
    ("read_io_errs", "Read errors"),
    ("flush_io_errs", "Flush errors"),
    ("corruption_errs", "Corruption errors"),
    ("generation_errs", "Generation errors"),
];

/// Exit code where a counter is not zero and --check asks for that.
const NOT_ZERO: u8 = 64;

fn stats(options: &Stats, global: Global) -> Done {
    if options.reset {
        return elsewhere::refuse("device stats -z");
    }
    let source = if options.path.is_dir() {
        PathBuf::from(Mounted::at(&options.path)?.source)
    } else {
        options.path.clone()
    };
    let counters = counters(&source)?;
    let shown = print::path(&source);
    if global.json {
        let mut line = Map::from_iter([
            ("device".to_owned(), Value::from(shown)),
            ("devid".to_owned(), Value::from(1)),
        ]);
        let named = COUNTERS.iter().zip(counters);
        line.extend(named.map(|((name, _), n)| ((*name).to_owned(), n.into())));
        print::json(&json!({ "__header": { "version": "1" }, "device-stats": [line] }))?;
    } else if options.table {
        table(&shown, counters)?;
    } else {
        for ((name, _), n) in COUNTERS.iter().zip(counters) {
            print::line(&format!("[{shown}].{name:<16} {n}"))?;
        }
    }
    let bad = options.check && counters.iter().any(|n| *n != 0);
    if bad { Err(Failed::silently().with_code(NOT_ZERO)) } else { Ok(()) }
}

fn table(shown: &str, counters: [u64; 5]) -> Done {
    let width = shown.chars().count().max("Path".len());
    let mut lines = [
        format!("Id {:<width$}", "Path"),
        format!("-- {}", "-".repeat(width)),
        format!(" 1 {shown:<width$}"),
    ];
    for ((_, title), n) in COUNTERS.iter().zip(counters) {
        let width = title.len();
        lines[0] += &format!(" {title}");
        lines[1] += &format!(" {}", "-".repeat(width));
        lines[2] += &format!(" {n:>width$}");
    }
    Ok(print::line(&lines.join("\n"))?)
}

/// What the last commit has. Where there is no item, nothing was ever counted.
fn counters(source: &Path) -> Result<[u64; 5], Failed> {
    const PERSISTENT_ITEM: KeyType = KeyType(249);
    let mut counters = [0; 5];
    // An image that is in use is read as it is: the item is in a tree of one block or two.
    session(as_devices(&open_devices(source, Access::Read { force: true })?), |s| {
        let Some(tree) = s.trees.tree(ObjectId::DEV_TREE) else { return Ok(()) };
        let key = Key::new(0, PERSISTENT_ITEM, 1);
        let Some(item) = tree.find(s.reader, key)? else { return Ok(()) };
        for (counter, bytes) in counters.iter_mut().zip(item.as_chunks::<8>().0) {
            *counter = u64::from_le_bytes(*bytes);
        }
        Ok(())
    })?;
    Ok(counters)
}
