//! What can be wrong with a stream, and where.

use crate::attribute::Attribute;
use crate::wire::Protocol;
use std::io;

/// Something is wrong with a stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// There is nothing at all.
    #[error("the stream is empty")]
    Empty,
    /// It could not be read.
    #[error("cannot read the stream at byte {offset}: {source}")]
    Read {
        /// Where.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// A stream has to begin here, and does not.
    #[error("at byte {offset} of the stream: no btrfs send stream begins here")]
    NotAStream {
        /// Where.
        offset: u64,
    },
    /// A protocol that is not known here.
    #[error(
        "at byte {offset}: the stream has protocol {number}; only 1 and 2 are known here. \
         Write it again with `--proto 2`"
    )]
    Protocol {
        /// Where.
        offset: u64,
        /// Which.
        number: u32,
    },
    /// It ends before the command `end`.
    #[error(
        "the stream is cut off at byte {offset}: it has no `end`. Was the sender interrupted, or \
         is the disk that holds the stream full?"
    )]
    CutOff {
        /// Where.
        offset: u64,
    },
    /// A command is wrong.
    #[error("at byte {offset} of the stream: {}: {trouble}", command_name(*number, *name))]
    Command {
        /// Where the command begins.
        offset: u64,
        /// Which command.
        number: u16,
        /// Its name, if it has one.
        name: Option<&'static str>,
        /// What is wrong with it.
        trouble: Trouble,
    },
}

/// What is wrong with a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// Its bytes are not those that were sent.
    #[error("the checksum is {is:08x} and should be {said:08x}: the stream is damaged")]
    Checksum {
        /// What the stream says.
        said: u32,
        /// What the bytes have.
        is: u32,
    },
    /// Longer than any command may be.
    #[error("it says that it has {len} bytes; a command may have {limit}")]
    TooLong {
        /// What it says.
        len: u64,
        /// What it may say.
        limit: usize,
    },
    /// The protocol has no such command.
    #[error("protocol {} has no such command", .0.number())]
    UnknownCommand(Protocol),
    /// No protocol has such an attribute.
    #[error("it has an attribute of the unknown type {0}")]
    UnknownAttribute(u16),
    /// An attribute goes on behind the command's end, or cannot be said by its length.
    #[error("its attribute `{0}` is too long")]
    AttributeTooLong(Attribute),
    /// The command ends within an attribute's header.
    #[error("it ends within an attribute")]
    AttributeCutOff,
    /// The same attribute again.
    #[error("it has the attribute `{0}` twice")]
    Twice(Attribute),
    /// An attribute that it needs is not there.
    #[error("it has no attribute `{0}`")]
    Missing(Attribute),
    /// A number with too few or too many bytes.
    #[error("its attribute `{0}` has {1} bytes, which is not the length of its type")]
    WrongLength(Attribute, usize),
}

fn command_name(number: u16, name: Option<&str>) -> String {
    match name {
        Some(name) => format!("`{name}`"),
        None => format!("command {number}"),
    }
}
