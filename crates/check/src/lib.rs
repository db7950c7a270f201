//! The offline checker: reads an image, compares everything in it with everything else, says what is wrong.
pub mod finding;
pub use finding::{Count, Finding, Kind, Severity};
