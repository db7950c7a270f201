//! `larder map`: a picture of the space.
//!
//! | module | decision |
//! |---|---|
//! | `space` | what a cell of a device holds: bounded memory, however large the device |
//! | `layout` | where on the picture a cell lies |
//! | `paint` | colours and letters, as every viewer shows them |
//! | `draw` | shapes, tooltips, legends |
//!
//! Read without the engine, so that a damaged image has a map, too.

mod draw;
mod layout;
mod paint;
mod space;

use crate::failure::usage;
use crate::image::{Access, as_devices, open_devices};
use crate::print;
use crate::raw::session;
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use layout::Layout;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Draw a picture of an image's space: what lies where, how full it is, how old.
///
/// Every cell is the same number of bytes of a device; several devices stand below each other.
/// Left: data, metadata, system, unallocated; the fuller, the stronger. Right: how long ago what
/// lies there was written, by transaction. Point at a cell for its facts.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder map disk.img -o map.html
  larder map --layout rows disk.img -o map.svg")]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// File to write: .svg, or .html for tooltips that come at once; `-` is an SVG on standard
    /// output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// How cells are put on the picture
    #[arg(long, value_enum, default_value_t = Layout::Hilbert)]
    layout: Layout,
    /// About how many cells; Hilbert curves take a power of four
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16_384,
        value_parser = clap::value_parser!(u32).range(16..=262_144)
    )]
    cells: u32,
    /// Read the image even if it is in use
    #[arg(long)]
    force: bool,
}

impl Args {
    /// A picture of an image, drawn as it is by default.
    pub(crate) fn of(image: &std::path::Path, output: &std::path::Path) -> Self {
        let (image, output) = (image.to_owned(), output.to_owned());
        Self { image, output, layout: Layout::Hilbert, cells: 16_384, force: false }
    }

    /// Is the picture a page, and no SVG? The name says so.
    ///
    /// # Errors
    /// The name says neither.
    pub(crate) fn is_html(&self) -> anyhow::Result<bool> {
        let extension = self.output.extension().and_then(|e| e.to_str()).unwrap_or_default();
        match &extension.to_ascii_lowercase()[..] {
            "html" | "htm" => Ok(true),
            "svg" => Ok(false),
            _ if self.output.as_os_str() == "-" => Ok(false),
            _ => usage("the output must end in .svg or .html, or be - for an SVG"),
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let to_stdout = args.output.as_os_str() == "-";
    let html = args.is_html()?;
    let devices = open_devices(&args.image, Access::Read { force: args.force })?;
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) =
        ProgressStyle::with_template("{bytes} of {total_bytes} in extents ({elapsed})")
    {
        bar.set_style(style);
    }
    let name =
        args.image.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let grid = layout::Grid::new(args.layout, args.cells);
    session(as_devices(&devices), |s| {
        let whole = space::Whole::read(s, grid.cells(), &bar);
        bar.finish_and_clear();
        let picture = draw::picture(&whole, &grid, &name, html);
        if to_stdout {
            return std::io::stdout().lock().write_all(picture.as_bytes()).context(print::STDOUT);
        }
        write(&args.output, picture.as_bytes()).with_context(|| print::path(&args.output))
    })
}

/// Writes a file, of which nothing is left if that fails and it is a new one.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let existed = path.symlink_metadata().is_ok();
    let written = std::fs::write(path, bytes);
    if written.is_err() && !existed {
        let _ = std::fs::remove_file(path);
    }
    written
}
