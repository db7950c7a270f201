//! Trees: sorted items in copy-on-write blocks.

pub mod ops;

pub use ops::TreeOps;
