//! Logs as they are written.
