//! Send streams that nobody sent: read to their end or to their first error, and written again.
//!
//! An input is a program that makes commands with right checksums: attributes of the command's own
//! kinds, in Linux's order and of the right lengths, unless the program says otherwise. One value
//! of the first choice means that the rest of the input is the stream itself.

use super::choices::Choices;
use super::tools::ask;
use larder_format::csum::crc32c_raw;
use larder_stream::{Command, Frame, Protocol, StreamError, StreamReader, StreamWriter};

/// A stream of so many bytes is long enough, whatever the program says.
const LONG: usize = 4 << 20;
/// The attributes of each command, by the command's number.
const COMMANDS: [&[u16]; 26] = [
    &[],
    &[15, 1, 2],
    &[15, 1, 2, 20, 21],
    &[15, 3],
    &[15, 3],
    &[15, 3, 8, 5],
    &[15, 3, 8, 5],
    &[15, 3, 8, 5],
    &[15, 3, 17],
    &[15, 16],
    &[15, 17],
    &[15],
    &[15],
    &[15, 13, 14],
    &[15, 13],
    &[15, 18, 19],
    &[18, 24, 15, 20, 21, 22, 23],
    &[15, 4],
    &[15, 5],
    &[15, 6, 7],
    &[15, 9, 10, 11, 12],
    &[],
    &[15, 18, 4],
    &[15, 25, 18, 4],
    &[15, 26],
    &[15, 18, 27, 28, 29, 30, 31, 19],
];
/// The attribute whose length protocol 2 leaves out.
const DATA: u16 = 19;
/// The command that ends a stream.
const END: u16 = 21;

/// Reads a stream that the input makes, and writes what it says.
///
/// # Panics
/// If the reader breaks a limit, or what is written is not what was read.
pub fn stream(input: &[u8]) {
    let bytes = made(input);
    let read = ask("read a stream", 0, || read(&bytes));
    if let Err(error) = &read.end {
        let text = error.to_string();
        assert!(!text.chars().any(char::is_control), "hostile: a terminal would obey {text:?}");
        let at = offset(error);
        assert!(at <= bytes.len() as u64, "hostile: an error behind the end: {text}");
    }
    for frames in read.frames.chunk_by(|a, b| a.protocol() == b.protocol()) {
        let protocol = frames[0].protocol();
        let commands: Vec<_> = frames.iter().filter_map(|frame| frame.command().ok()).collect();
        let once = written(protocol, &commands);
        let again = self::read(&once);
        let copies: Vec<_> =
            again.frames.iter().map(|frame| frame.command().expect("a command of ours")).collect();
        assert!(commands == copies, "hostile: {commands:?} became {copies:?}");
        let twice = written(protocol, &copies);
        assert!(once == twice, "hostile: the same commands as other bytes");
    }
}

struct Read {
    frames: Vec<Frame>,
    end: Result<(), StreamError>,
}

fn read(bytes: &[u8]) -> Read {
    let mut reader = StreamReader::new(bytes);
    let mut frames = Vec::new();
    let end = loop {
        let mut frame = Frame::default();
        match reader.read(&mut frame) {
            Ok(true) => {
                assert!(frame.offset() < reader.offset(), "hostile: a command of no bytes");
                assert!(reader.offset() <= bytes.len() as u64, "hostile: more than there is");
                if let Err(error) = frame.command() {
                    assert_eq!(offset(&error), frame.offset(), "hostile: an error elsewhere");
                }
                frames.push(frame);
            }
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    if end.is_ok() {
        assert_eq!(reader.offset(), bytes.len() as u64, "hostile: a rest that was not read");
    }
    Read { frames, end }
}

fn offset(error: &StreamError) -> u64 {
    match error {
        StreamError::Empty => 0,
        StreamError::Read { offset, .. }
        | StreamError::NotAStream { offset }
        | StreamError::Protocol { offset, .. }
        | StreamError::CutOff { offset }
        | StreamError::Command { offset, .. } => *offset,
    }
}

fn written(protocol: Protocol, commands: &[Command<'_>]) -> Vec<u8> {
    let mut writer = StreamWriter::new(Vec::new(), protocol);
    for command in commands {
        writer.write(command).expect("what was read can be written");
    }
    writer.into_inner()
}

/// The stream that a program makes.
fn made(program: &[u8]) -> Vec<u8> {
    let mut choices = Choices::new(program);
    let how = choices.byte();
    if how == 0xff {
        return choices.rest().to_vec();
    }
    let mut maker = Maker { choices, protocol: 1 + u32::from(how & 1), out: Vec::new() };
    maker.begin();
    while !maker.choices.is_empty() && maker.out.len() < LONG {
        maker.command();
    }
    if how & 2 == 0 {
        maker.push(END, &[], 0);
    }
    if how & 4 != 0 {
        let keep = maker.out.len() - usize::from(how >> 3).min(maker.out.len());
        maker.out.truncate(keep);
    }
    maker.out
}

struct Maker<'a> {
    choices: Choices<'a>,
    protocol: u32,
    out: Vec<u8>,
}

impl Maker<'_> {
    fn begin(&mut self) {
        self.out.extend(b"btrfs-stream\0");
        self.out.extend(self.protocol.to_le_bytes());
    }

    fn command(&mut self) {
        let number = self.choices.below(COMMANDS.len() + 1) as u16;
        let shape = self.choices.byte();
        let mut kinds = COMMANDS.get(usize::from(number)).map_or(&[][..], |kinds| kinds).to_vec();
        if shape & 1 != 0 && !kinds.is_empty() {
            kinds.remove(self.choices.below(kinds.len()));
        }
        if shape & 2 != 0 {
            let at = self.choices.below(kinds.len() + 1);
            kinds.insert(at, self.choices.below(34) as u16);
        }
        if shape & 4 != 0 && kinds.len() > 1 {
            let at = self.choices.below(kinds.len());
            kinds.swap(0, at);
        }
        let mut body = Vec::new();
        for kind in kinds {
            self.attribute(&mut body, kind, shape & 8 != 0);
        }
        let damage = if shape & 16 == 0 { 0 } else { self.choices.byte() };
        let times = if shape & 0xe0 == 0xe0 { self.choices.byte() } else { 0 };
        for _ in 0..=times {
            if self.out.len() < LONG {
                self.push(number, &body, damage);
            }
        }
        if number == END {
            self.protocol = 1 + self.choices.below(3) as u32 % 2;
            self.begin();
        }
    }

    /// Adds an attribute; with a length of its own if `odd`.
    fn attribute(&mut self, body: &mut Vec<u8>, kind: u16, odd: bool) {
        let mut len = match kind {
            1 | 20 => 16,
            9..=12 => 12,
            25 | 30 | 31 => 4,
            13..=17 | DATA | 22 => usize::from(self.choices.byte()),
            _ => 8,
        };
        if odd {
            len = self.choices.below(300);
        }
        let mut value = self.choices.bytes(len).to_vec();
        value.resize(len, 0);
        if kind == DATA && len == 255 {
            // As much as a command can have, or more.
            value.resize(64 * usize::from(self.choices.word()), 0);
        }
        body.extend(kind.to_le_bytes());
        if self.protocol == 1 || kind != DATA {
            let states = if odd { self.choices.word() } else { value.len() as u16 };
            body.extend(states.to_le_bytes());
        }
        body.extend(value);
    }

    fn push(&mut self, number: u16, body: &[u8], damage: u8) {
        let mut header = [0; 10];
        header[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        header[4..6].copy_from_slice(&number.to_le_bytes());
        let sum = crc32c_raw(crc32c_raw(0, &header), body) ^ u32::from(damage);
        header[6..].copy_from_slice(&sum.to_le_bytes());
        self.out.extend(header);
        self.out.extend(body);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_of_a_plain_program_is_understood() {
        for (protocol, last) in [(0u8, 22u8), (1, 25)] {
            for number in (1..=last).filter(|&number| u16::from(number) != END) {
                let read = read(&made(&[protocol, number, 0, 1, b'a']));
                assert!(read.end.is_ok(), "{number}: {:?}", read.end);
                for frame in &read.frames {
                    frame.command().expect("a command");
                }
                assert_eq!(read.frames.len(), 2, "{number}");
            }
        }
    }
}
