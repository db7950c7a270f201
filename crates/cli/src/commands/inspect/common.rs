//! Arguments that the questions have in common, and the device that they name.

use crate::image::{Access, as_devices, open_devices};
use larder_volume::Device;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments that most kinds have.
#[derive(Debug, clap::Args)]
pub(super) struct Common {
    /// Image file or block device
    pub(super) image: PathBuf,
    #[command(flatten)]
    pub(super) how: How,
}

// How to read and how to print. clap would take a doc comment for the help of each command.
#[derive(Debug, clap::Args)]
pub(super) struct How {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Read the image even if it is in use
    #[arg(long)]
    pub(super) force: bool,
}

/// Opens the devices of an image for reading.
pub(super) fn devices(image: &Path, how: &How) -> anyhow::Result<Vec<Arc<dyn Device>>> {
    Ok(as_devices(&open_devices(image, Access::Read { force: how.force })?))
}
