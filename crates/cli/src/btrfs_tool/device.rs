//! `btrfs device`: of one device, what it holds, and the errors that its counters have; adding and
//! removing devices.
//!
//! The counters lie in the device tree, where Linux reads and writes them, too.

use super::elsewhere::Anything;
use super::mounted::Mounted;
use super::units::Units;
use super::{Done, Failed, Global, each, elsewhere, must_be_directory, usage};
use crate::device_changes::NewDevice;
use crate::device_figures::{self, COUNTERS, counters, name, number};
use crate::device_orders::{Order, Which};
use crate::on_mount::devices::change_devices;
use crate::print;
use serde_json::{Map, Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Show the error counters
    Stats(Stats),
    /// Show what the chunks take of the device
    Usage(Usage),
    /// Add devices
    Add(Add),
    /// Remove devices
    #[command(alias = "delete")]
    Remove(Remove),
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
    /// Set the counters to zero after they are shown
    #[arg(short = 'z', long)]
    reset: bool,
    /// Print a table
    #[arg(short = 'T')]
    table: bool,
    path: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Add {
    /// Overwrite what a device holds
    #[arg(short, long)]
    force: bool,
    /// Accepted
    #[arg(short = 'K', long)]
    nodiscard: bool,
    /// Accepted
    #[arg(long)]
    enqueue: bool,
    /// The devices, and a directory of a mount
    #[arg(required = true, num_args = 2.., value_name = "PATH")]
    paths: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Remove {
    /// Accepted
    #[arg(long)]
    enqueue: bool,
    /// Names or numbers of devices, or `missing`, and a directory of a mount
    #[arg(required = true, num_args = 2.., value_name = "DEVICE")]
    words: Vec<OsString>,
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
            usage::device(&Mounted::at(path)?, &device_figures::of(path, false)?, options.units)
        }),
        What::Add(options) => add(&options),
        What::Remove(options) => remove(&options),
        What::Replace(_) => elsewhere::refuse("device replace"),
        What::Scan(_) => elsewhere::refuse("device scan"),
        What::Ready(_) => elsewhere::refuse("device ready"),
    }
}

fn add(options: &Add) -> Done {
    let Some((target, devices)) = options.paths.split_last() else { return Ok(()) };
    must_be_directory(target)?;
    each(devices, |path| {
        let new = NewDevice { path, size: None, force: options.force };
        new.add(|device| change_devices(target, Order::Add, Some(device)))?;
        Ok(())
    })
}

fn remove(options: &Remove) -> Done {
    let Some((target, words)) = options.words.split_last() else { return Ok(()) };
    let target = Path::new(target);
    must_be_directory(target)?;
    each(words, |word| {
        let which = match word.to_str().map(str::parse::<Which>) {
            Some(Ok(which)) => which.whole(),
            _ => Which::Path(PathBuf::from(word)).whole(),
        };
        Ok(change_devices(target, Order::Remove(which), None).map(drop)?)
    })
}

/// Exit code where a counter is not zero and --check asks for that.
const NOT_ZERO: u8 = 64;

fn stats(options: &Stats, global: Global) -> Done {
    let source = match options.path.is_dir() {
        true => Some(Mounted::at(&options.path)?.source),
        false => None,
    };
    // An image that is in use is read as it is.
    let devices = device_figures::of(&options.path, true)?;
    let device = |value: &Value| Counted {
        id: number(&value["id"]),
        // The mount table knows the name that was mounted.
        name: match &source {
            Some(source) if devices.len() == 1 => print::path(source.as_ref()),
            _ => print::name(name(value).as_bytes()),
        },
        counters: counters(value),
    };
    let counted: Vec<Counted> = devices.iter().map(device).collect();
    if global.json {
        let lines: Vec<Value> = counted.iter().map(Counted::json).collect();
        print::json(&json!({ "__header": { "version": "1" }, "device-stats": lines }))?;
    } else if options.table {
        table(&counted)?;
    } else {
        for device in &counted {
            for ((counter, _), n) in COUNTERS.iter().zip(device.counters) {
                print::line(&format!("[{}].{counter:<16} {n}", device.name))?;
            }
        }
    }
    if options.reset {
        device_figures::reset(&options.path)?;
    }
    let bad = options.check && counted.iter().any(|d| d.counters != [0; 5]);
    if bad { Err(Failed::silently().with_code(NOT_ZERO)) } else { Ok(()) }
}

/// The counters of a device.
struct Counted {
    id: u64,
    name: String,
    counters: [u64; 5],
}

impl Counted {
    fn json(&self) -> Value {
        let mut line = Map::from_iter([
            ("device".to_owned(), Value::from(self.name.clone())),
            ("devid".to_owned(), Value::from(self.id)),
        ]);
        let named = COUNTERS.iter().zip(self.counters);
        line.extend(named.map(|((name, _), n)| ((*name).to_owned(), n.into())));
        line.into()
    }
}

fn table(devices: &[Counted]) -> Done {
    let longest = devices.iter().map(|d| d.name.chars().count()).max().unwrap_or(0);
    let width = longest.max("Path".len());
    let mut lines = vec![format!("Id {:<width$}", "Path"), format!("-- {}", "-".repeat(width))];
    lines.extend(devices.iter().map(|d| format!("{:>2} {:<width$}", d.id, d.name)));
    for (which, (_, title)) in COUNTERS.iter().enumerate() {
        let width = title.len();
        lines[0] += &format!(" {title}");
        lines[1] += &format!(" {}", "-".repeat(width));
        for (line, device) in lines[2..].iter_mut().zip(devices) {
            *line += &format!(" {:>width$}", device.counters[which]);
        }
    }
    Ok(print::line(&lines.join("\n"))?)
}
