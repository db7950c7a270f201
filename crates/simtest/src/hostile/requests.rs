//! What a mount answers to messages that no kernel would send.
//!
//! An input is a sound seed, then messages. A message has an operation, a node, an argument of any
//! length, and what follows it, with or without the NUL that should end it. The node is mostly one
//! that an earlier reply has named: otherwise the mount would only say that it knows no such node.
//! Some messages are well-formed in all but what they ask for (ioctls about subvolumes, ranges,
//! properties), because such messages would not come about by chance. Messages reach the server
//! through the code that takes apart what `/dev/fuse` gives. Each has to get an answer; a handler
//! that panics is found by its panic.

use super::choices::Choices;
use super::device::HostileDevice;
use super::limits::{self, HEAP};
use super::seeds;
use larder_fs::{Compress, Filesystem, OpenOptions, Tuning};
use larder_fuse::control::{FITRIM, IOC_DF, IOC_START_SYNC, IOC_STATS, IOC_SYNC};
use larder_fuse::proto::{
    Dirent, EntryOut, FallocateIn, InHeader, IoctlIn, Opcode, ROOT_NODE, SetxattrIn, align_record,
};
use larder_fuse::server::Server;
use larder_fuse::sharing::{IOC_CLONE, IOC_DEDUPE};
use larder_fuse::subvolumes::{IOC_SNAPSHOT, IOC_SUBVOLS};
use larder_fuse::transport::Direct;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Messages of one input.
const MESSAGES: usize = 64;
/// Memory that the engine may use for its caches.
const CACHE: usize = 16 << 20;
/// Names that are there, and some that are asked for.
const NAMES: [&[u8]; 16] = [
    b"dir\0",
    b"symlink\0",
    b"sparse\0",
    b"link 1\0",
    b"new\0",
    b"..\0",
    b"user.number\0",
    b"a\0b\0",
    b"sub\0",
    b"plain\0",
    b"deep\0",
    b"inline\0",
    b"prealloc\0",
    b"user.short\0",
    b"system.posix_acl_access\0",
    b"\0",
];

/// A command of an ioctl: direction (1: to the kernel, 2: from it), kind, number, size of the
/// argument.
const fn ioc(direction: u32, kind: u8, number: u32, size: u32) -> u32 {
    direction << 30 | size << 16 | (kind as u32) << 8 | number
}

/// Commands that are known, and where in their argument a name stands.
const COMMANDS: [(u32, usize); 30] = [
    (ioc(1, 0x94, 14, 4096), 8),
    (ioc(1, 0x94, 24, 4096), 56),
    (ioc(1, 0x94, 15, 4096), 8),
    (ioc(1, 0x94, 15, 4096), 8),
    (ioc(1, 0x94, 63, 4096), 56),
    (IOC_SNAPSHOT, 56),
    (IOC_SNAPSHOT, 56),
    (IOC_SNAPSHOT, 56),
    (ioc(2, 0x94, 25, 8), 0),
    (ioc(1, 0x94, 26, 8), 0),
    (ioc(1, 0x94, 19, 8), 0),
    (ioc(2, 0x94, 60, 504), 0),
    (ioc(3, 0x94, 61, 4096), 0),
    (ioc(3, 0x94, 18, 4096), 0),
    (IOC_SUBVOLS, 0),
    (IOC_SYNC, 0),
    (IOC_STATS, 0),
    (IOC_DF, 0),
    (FITRIM, 0),
    (ioc(2, b'f', 1, 8), 0),
    (ioc(1, b'f', 2, 8), 0),
    (ioc(2, b'X', 31, 28), 0),
    (ioc(1, b'X', 32, 28), 0),
    (ioc(2, 0x94, 49, 256), 0),
    (ioc(1, 0x94, 50, 256), 0),
    (ioc(2, 0x94, 31, 1024), 0),
    (ioc(2, 0x94, 24, 8), 0),
    (IOC_CLONE, 0),
    (IOC_DEDUPE, 0),
    (IOC_START_SYNC, 0),
];

/// The result: replies with data, errors, messages without a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Outcome {
    pub answered: usize,
    pub refused: usize,
    pub silent: usize,
}

/// Sends the messages of an input.
///
/// # Panics
/// If a request breaks a limit, or a reply is none that the protocol knows.
pub fn requests(input: &[u8]) -> Outcome {
    let mut c = Choices::new(input);
    let ((seed, variant), how) = (seeds::choose(c.byte()), c.byte());
    let device = Arc::new(HostileDevice::new(seeds::seed(seed).image.clone()));
    let pack =
        |text: &str| text.parse().ok().map(|packing| Compress { packing, force: variant & 1 != 0 });
    let options = OpenOptions {
        read_only: how & 1 != 0,
        compress: pack(["none", "zstd", "lzo", "zlib"][usize::from(how >> 2 & 3)]),
        discard: how & 0x10 != 0,
        cache_size: CACHE as u64,
        commit_interval: None,
        tuning: Tuning { fake_clock: true, ..Tuning::default() },
        ..OpenOptions::default()
    };
    let mut outcome = Outcome::default();
    let Ok(fs) = Filesystem::open(device.clone(), options) else { return outcome };
    let server = Server::new(fs.clone(), how & 2 != 0, Arc::default());
    let mut direct = Direct::new(Arc::new(server), Arc::default());
    let base = limits::live();
    let mut nodes = vec![ROOT_NODE.0];
    for _ in 0..MESSAGES {
        if c.is_empty() {
            break;
        }
        let message = message(&mut c, &nodes);
        device.begin();
        limits::reset_peak();
        let answer = limits::timed("message", || {
            direct
                .message(&message)
                .map(|answer| answer.map(|body| body[..body.len().min(2048)].to_vec()))
        });
        let (peak, allowed) = (limits::peak(), base + CACHE + HEAP + 2 * device.written() as usize);
        assert!(peak <= allowed, "hostile: a message took {} MiB of memory", (peak - base) >> 20);
        match answer {
            Some(Ok(body)) => {
                outcome.answered += 1;
                nodes.extend(named(&body));
            }
            Some(Err(e)) => {
                assert!(e > 0 && e < 4096, "hostile: {e} is no errno");
                outcome.refused += 1;
            }
            None => outcome.silent += 1,
        }
    }
    drop(direct);
    device.begin();
    limits::timed("close", || drop((fs.close(), fs)));
    outcome
}

/// Nodes that a reply names, if it is one to a look-up, a creation or READDIRPLUS; from others
/// something is taken for them, which does no harm.
fn named(mut body: &[u8]) -> Vec<u64> {
    let mut nodes = Vec::new();
    while let Ok((entry, rest)) = EntryOut::read_from_prefix(body) {
        nodes.extend(Some(entry.nodeid).filter(|n| *n != 0));
        let Ok((record, _)) = Dirent::read_from_prefix(rest) else { break };
        let Some(next) = rest.get(align_record(size_of::<Dirent>() + record.namelen as usize)..)
        else {
            break;
        };
        body = next;
    }
    nodes
}

fn message(c: &mut Choices<'_>, nodes: &[u64]) -> Vec<u8> {
    let shape = c.byte();
    if shape == 0xff {
        let len = usize::from(c.byte());
        return c.bytes(len).to_vec();
    }
    if let 0xfc..=0xfe = shape {
        return well_formed(c, nodes, shape);
    }
    let opcode = Opcode::ALL[c.below(Opcode::ALL.len())];
    let node = |choice: u8| match choice {
        0xf0..=0xfe => u64::from(choice) << 56 | u64::from(choice & 3),
        0xe0..=0xef => u64::from(choice & 15),
        _ => nodes[usize::from(choice) % nodes.len()],
    };
    let header = InHeader {
        len: u32::from(shape),
        opcode: if shape & 0x7f == 0x7f { u32::from(c.word()) } else { opcode as u32 },
        unique: 2,
        nodeid: node(c.byte()),
        uid: [0, 0, 1000, u32::MAX][usize::from(shape & 3)],
        gid: if shape & 4 == 0 { 0 } else { 1000 },
        pid: 1,
        total_extlen: if shape & 0x18 == 0x18 { c.word() } else { 0 },
        padding: 0,
    };
    let mut message = header.as_bytes().to_vec();
    // The argument: fields from the input, small unless said otherwise, the first perhaps a node.
    let mut arg = vec![0; opcode.arg_len()];
    for field in arg.chunks_mut(8) {
        let choice = c.byte();
        let value = match choice {
            0..=0x3f => u64::from(choice),
            0x40..=0x6f => node(c.byte()),
            0x70..=0x9f => u64::from(c.word()),
            0xa0..=0xaf => u64::MAX - u64::from(choice & 7),
            0xb0..=0xbf => 1 << (c.byte() & 63),
            0xc0..=0xcf => i64::MAX.cast_unsigned() - u64::from(choice & 15) * 4096,
            // Two numbers of 32 bits.
            0xd0..=0xdf => u64::from(c.word()) << 32 | u64::from(choice & 15),
            _ => c.long(),
        };
        field.copy_from_slice(&value.to_ne_bytes()[..field.len()]);
    }
    message.extend(&arg);
    match shape >> 5 {
        0 | 1 => message.extend(NAMES[c.below(NAMES.len())]),
        2 => {
            message.extend(NAMES[c.below(NAMES.len())]);
            message.extend(NAMES[c.below(NAMES.len())]);
        }
        3 => {
            // A name of any bytes, and its end.
            let len = usize::from(c.byte());
            message.extend(c.bytes(len));
            message.push(0);
        }
        4 => {
            message.extend(NAMES[c.below(NAMES.len())]);
            let len = usize::from(c.byte());
            message.extend(c.bytes(len));
        }
        // As much data as a write may have.
        5 => message.resize(message.len() + usize::from(c.word()) * 16, shape),
        6 => {
            let len = usize::from(c.byte());
            message.extend(c.bytes(len));
        }
        // Cut off.
        _ => message.truncate(usize::from(c.byte())),
    }
    message
}

/// A message that is right in all but what it asks for.
fn well_formed(c: &mut Choices<'_>, nodes: &[u64], shape: u8) -> Vec<u8> {
    let one = |c: &mut Choices<'_>| nodes[c.below(nodes.len())];
    let nodeid = one(c);
    let (opcode, rest) = match shape {
        0xfe => {
            let (cmd, name) = COMMANDS[c.below(COMMANDS.len())];
            let size = cmd >> 16 & 0x3fff;
            let mut arg = vec![0; if cmd >> 30 & 1 == 0 { 0 } else { size as usize }];
            for (i, word) in arg.chunks_exact_mut(8).take(3).enumerate() {
                let value = match c.byte() {
                    0xff => u64::MAX,
                    // A node, where a snapshot is taken; a subvolume; flags.
                    choice @ 0x80.. => nodes[usize::from(choice) % nodes.len()],
                    choice @ 0x40.. => 256 + u64::from(choice & 15),
                    _ if i == 0 && cmd == IOC_SNAPSHOT => one(c),
                    choice => u64::from(choice & 0x1f),
                };
                word.copy_from_slice(&value.to_ne_bytes());
            }
            if name > 0 {
                let text = if c.byte() < 0xc0 { NAMES[c.below(NAMES.len())] } else { c.bytes(40) };
                arg[name..name + text.len()].copy_from_slice(text);
            }
            let head =
                IoctlIn { cmd, in_size: arg.len() as u32, out_size: size, ..IoctlIn::default() };
            (Opcode::Ioctl, [head.as_bytes(), &arg].concat())
        }
        0xfd => {
            // What is reserved, zeroed or punched, in odd places.
            let mode = [0, 1, 3, 0x10, 0x11, 3, 8, 0x20][c.below(8)];
            let (offset, length) = (u64::from(c.word()) * 37, u64::from(c.word()) * 41);
            let head = FallocateIn { fh: 0, offset, length, mode, padding: 0 };
            (Opcode::Fallocate, head.as_bytes().to_vec())
        }
        _ => {
            let value: &[u8] =
                [&b"zstd"[..], b"lzo", b"zlib", b"none", b"", b"no", b"zstd:15"][c.below(7)];
            let head = SetxattrIn { size: value.len() as u32, ..SetxattrIn::default() };
            (Opcode::Setxattr, [head.as_bytes(), b"btrfs.compression\0", value].concat())
        }
    };
    let header =
        InHeader { opcode: opcode as u32, unique: 2, nodeid, pid: 1, ..InHeader::default() };
    let mut message = [header.as_bytes(), &rest].concat();
    let len = message.len() as u32;
    message[..4].copy_from_slice(&len.to_ne_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_answered() {
        let mut rng = fastrand::Rng::with_seed(41);
        let mut sum = Outcome::default();
        for round in 0..40u8 {
            // Each seed in turn, those that came later too.
            let mut input = vec![if round % 3 == 0 { 255 - round } else { round }, 0];
            input.extend((0..1500).map(|_| rng.u8(..)));
            let outcome = requests(&input);
            sum.answered += outcome.answered;
            sum.refused += outcome.refused;
            sum.silent += outcome.silent;
        }
        assert!(sum.answered > 100 && sum.refused > 300 && sum.silent > 20, "{sum:?}");
    }
}
