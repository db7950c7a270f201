//! What a mount answers to messages that no kernel would send.
//!
//! An input is a sound seed (the kernel is attacked from elsewhere, here it attacks), then messages: an operation, a node —
//! mostly one that an earlier reply has named, or the mount would only ever say that it knows none —, an argument of any
//! length, and what follows it, with or without the NUL that should end it. Messages reach the server by the code that takes
//! apart what `/dev/fuse` gives. Whatever they say, an answer comes back; a handler that panics is found by its panic.

use super::choices::Choices;
use super::device::HostileDevice;
use super::limits::{self, HEAP};
use super::seeds;
use larder_fs::{Filesystem, OpenOptions, Tuning};
use larder_fuse::proto::{Dirent, EntryOut, InHeader, Opcode, ROOT_NODE, align_record};
use larder_fuse::server::Server;
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

/// What came of it: replies with data, errors, messages without a reply.
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
    let (seed, how) = (c.below(seeds::NAMES.len()), c.byte());
    let device = Arc::new(HostileDevice::new(seeds::seed(seed).image.clone()));
    let options = OpenOptions {
        read_only: how & 1 != 0,
        cache_size: CACHE as u64,
        commit_interval: None,
        tuning: Tuning { fake_clock: true, ..Tuning::default() },
        ..OpenOptions::default()
    };
    let mut outcome = Outcome::default();
    // The log of one seed can only be read.
    let Ok(fs) = Filesystem::open(device.clone(), options) else { return outcome };
    let server = Server::new(fs.clone(), how & 2 != 0, Arc::default());
    let mut direct = Direct::new(Arc::new(server), Arc::default());
    let base = limits::live();
    let mut nodes = vec![ROOT_NODE];
    for _ in 0..MESSAGES {
        if c.is_empty() {
            break;
        }
        let message = message(&mut c, &nodes);
        device.begin();
        limits::reset_peak();
        let answer = limits::timed("message", || {
            direct.message(&message).map(|answer| answer.map(|body| body[..body.len().min(2048)].to_vec()))
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

/// Nodes that a reply names, if it is one to a look-up, a creation or READDIRPLUS; from others something is taken for them,
/// which does no harm.
fn named(mut body: &[u8]) -> Vec<u64> {
    let mut nodes = Vec::new();
    while let Ok((entry, rest)) = EntryOut::read_from_prefix(body) {
        nodes.extend(Some(entry.nodeid).filter(|n| *n != 0));
        let Ok((record, _)) = Dirent::read_from_prefix(rest) else { break };
        let Some(next) = rest.get(align_record(size_of::<Dirent>() + record.namelen as usize)..) else {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::noise;

    #[test]
    fn noise_is_answered() {
        let mut rng = noise(41);
        let mut sum = Outcome::default();
        for round in 0..40 {
            let mut input = vec![(round % 7) as u8, 0];
            input.extend((0..1500).map(|_| rng() as u8));
            let outcome = requests(&input);
            sum.answered += outcome.answered;
            sum.refused += outcome.refused;
            sum.silent += outcome.silent;
        }
        assert!(sum.answered > 100 && sum.refused > 300 && sum.silent > 20, "{sum:?}");
    }
}
