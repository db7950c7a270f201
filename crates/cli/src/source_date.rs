//! The time that reproducible builds ask for.

use crate::failure::usage;
use larder_fs::Timestamp;

/// `SOURCE_DATE_EPOCH`, if the environment has it.
pub(crate) fn source_date() -> anyhow::Result<Option<Timestamp>> {
    let Some(text) = std::env::var_os("SOURCE_DATE_EPOCH") else { return Ok(None) };
    match text.to_str().and_then(|t| t.parse().ok()) {
        Some(sec) => Ok(Some(Timestamp { sec, nsec: 0 })),
        None => usage(format!("SOURCE_DATE_EPOCH={} is not a number of seconds", text.display())),
    }
}
