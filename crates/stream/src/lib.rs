//! The send stream of btrfs: what `btrfs send` writes and `btrfs receive` applies.
//!
//! A stream is a header and then commands, each with a checksum, up to the command `end`. A command
//! names what it does and has attributes: type, length, value. Any number of streams may follow one
//! another. [`StreamReader`] takes a stream apart and [`StreamWriter`] puts one together; both
//! speak of [`Command`]s, and both know the protocols 1 and 2 ([`Protocol`]).
//!
//! Hidden here: numbers, lengths, checksums, which attributes a command has in which order, and
//! that protocol 2 has data without a length. A command that Linux wrote comes out as the same
//! bytes when it is written again. Bytes are hostile: a length is compared with its limit before
//! memory is taken for it, and each error has the offset at which the wrong thing begins.
//!
//! Not known here: what a command does. Paths are bytes that nobody has checked.

mod attribute;
mod attributes;
mod command;
mod error;
mod first;
mod reader;
mod value;
mod wire;
mod writer;

pub use attribute::Attribute;
pub use command::Command;
pub use error::{StreamError, Trouble};
pub use first::FirstStream;
pub use reader::{Batch, Frame, StreamReader};
pub use wire::{MAX_DATA_V1, MAX_DATA_V2, Protocol};
pub use writer::{StreamWriter, WriteError};
