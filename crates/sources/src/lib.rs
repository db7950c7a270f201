//! What an image is to hold: a tree of entries, from directories, archives, layers and manifests.
//!
//! A source may be anything that knows files. All of them become the same: a stream of [`Entry`]
//! in the order of [`TreePath`], in which a later source lies over an earlier one, and every
//! directory comes before what it holds. The contents of a file are not in the stream. An entry has
//! a [`Locator`] for them, and [`Contents`] reads what it names.
//!
//! [`Sources`] is the door: it takes [`SourceSpec`]s and [`Options`]. Behind it, readers tell a
//! collector what each source holds, and the overlay makes one tree of it by sorting on disk
//! ([`spill`]). The same sources give the same stream, whatever the order of directories, the user,
//! the machine or the time.

mod acl;
mod change;
mod entry;
mod error;
mod flags;
mod overlay;
mod path;
mod read;
mod rules;
mod sources;
mod spec;
pub mod spill;
mod stop;
mod table;

pub use change::Change;
pub use entry::{Attributes, Contents, Entry, Kind, LinkGroup, Locator, SourceNumber, Time};
pub use error::{Error, Result};
pub use flags::flag_names;
pub use overlay::Entries;
pub use path::TreePath;
pub use rules::{Options, Pattern, Rule, parse_owner, parse_time};
pub use sources::Sources;
pub use spec::{Sort, SourceSpec};
pub use stop::Stop;
pub use table::Table;
