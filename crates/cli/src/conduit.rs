//! The way of a stream from a daemon to the program that asked for it.
//!
//! The program makes two pairs of sockets, and hands one end of each to the daemon. The daemon
//! writes the stream into one, and says through the other how the stream ended. The program copies
//! from the first to wherever the stream is to go. So the daemon never has the program's file or
//! pipe: it writes to a socket only, which its sandbox allows, and which can be shut down. That is
//! how a daemon that has to end wakes its own thread that waits for a slow reader.
//!
//! | end | is noticed |
//! |---|---|
//! | the program is gone | by the next write, or by [`Outlet::is_over`] while there is none |
//! | the daemon must end | [`Outlet::end`]; the program still learns why |
//! | the daemon was killed | no word about the end comes out of the second socket |

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Longest word about the end.
const WORD_LEN: usize = 192 << 10;
/// Bytes that the program copies at a time.
const BUFFER: usize = 256 << 10;
/// The daemon looks once in so many questions whether the program is still there.
const QUESTIONS: u32 = 1024;

/// How a stream ended.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ended {
    /// It is complete: a summary.
    Complete { summary: serde_json::Value },
    /// It is not: why, what to do about it, and whether nothing was tried.
    Refused {
        why: String,
        hint: Option<String>,
        /// A daemon of another version does not say it.
        #[serde(default = "nothing_was_tried")]
        could_not_run: bool,
    },
}

fn nothing_was_tried() -> bool {
    true
}

fn pair(kind: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
}

/// Both ends: that of the program, and the descriptors for [`Outlet::new`].
pub(crate) fn new() -> io::Result<(Inlet, [OwnedFd; 2])> {
    let (stream, for_stream) = pair(SocketType::STREAM)?;
    let (word, for_word) = pair(SocketType::SEQPACKET)?;
    Ok((Inlet { stream, word }, [for_stream, for_word]))
}

/// The program's end.
#[derive(Debug)]
pub(crate) struct Inlet {
    stream: OwnedFd,
    word: OwnedFd,
}

impl Inlet {
    /// Copies what comes, until no more does. `watch` gets the number of bytes so far.
    ///
    /// # Errors
    /// Those of reading and of `out`.
    pub(crate) fn copy_to(
        &self,
        out: &mut dyn Write,
        watch: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        let (mut buffer, mut bytes) = (vec![0; BUFFER], 0);
        loop {
            let len = match recv(&self.stream, &mut buffer[..], RecvFlags::empty()) {
                Ok((0, _)) => return out.flush(),
                Ok((len, _)) => len,
                Err(Errno::INTR) => continue,
                // The daemon was killed with something unread.
                Err(Errno::CONNRESET) => return out.flush(),
                Err(e) => return Err(e.into()),
            };
            out.write_all(&buffer[..len])?;
            bytes += len as u64;
            watch(bytes);
        }
    }

    /// Tells the daemon that it need not go on. It still says how the stream ended.
    pub(crate) fn let_go(&self) {
        let _ = shutdown(&self.word, Shutdown::Write);
    }

    /// How the stream ended. `None`: the daemon is gone, or did not take the request.
    ///
    /// # Errors
    /// Those of reading; a word that is none.
    pub(crate) fn ended(self) -> io::Result<Option<Ended>> {
        let mut word = vec![0; WORD_LEN];
        let len = loop {
            match recv(&self.word, &mut word[..], RecvFlags::empty()) {
                Ok((len, _)) => break len,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => break 0,
                Err(e) => return Err(e.into()),
            }
        };
        if len == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&word[..len])?))
    }
}

/// The daemon's end. All calls work in its sandbox.
#[derive(Debug)]
pub(crate) struct Outlet {
    stream: OwnedFd,
    word: OwnedFd,
    over: AtomicBool,
    questions: AtomicU32,
}

impl Outlet {
    pub(crate) fn new([stream, word]: [OwnedFd; 2]) -> Self {
        Self { stream, word, over: AtomicBool::new(false), questions: AtomicU32::new(0) }
    }

    /// Ends it: what is written from now on fails, and so does a write that waits.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// Has it been ended, or has the program gone? Made to be asked often.
    pub(crate) fn is_over(&self) -> bool {
        if self.over.load(Ordering::Acquire) {
            return true;
        }
        let question = self.questions.fetch_add(1, Ordering::Relaxed);
        question.is_multiple_of(QUESTIONS) && self.is_left()
    }

    /// Has the program gone, or let go? It says nothing. So if something can be read, that is its
    /// end.
    pub(crate) fn is_left(&self) -> bool {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        !matches!(recv(&self.word, &mut [0; 1][..], flags), Err(Errno::AGAIN | Errno::INTR))
    }

    /// Says how the stream ended, behind its last byte. Nothing is done if the program has gone.
    pub(crate) fn conclude(&self, ended: &Ended) {
        let Ok(mut word) = serde_json::to_vec(ended) else { return };
        if word.len() > WORD_LEN {
            let why = "the daemon has more to say about the end of the stream than fits".to_owned();
            let ended = Ended::Refused { why, hint: None, could_not_run: false };
            word = serde_json::to_vec(&ended).unwrap_or_default();
        }
        // The only one, so there is room for it.
        let _ = send(&self.word, &word, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        let _ = shutdown(&self.stream, Shutdown::Both);
    }
}

impl Write for &Outlet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.stream, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> (Inlet, Outlet) {
        let (inlet, fds) = new().unwrap();
        (inlet, Outlet::new(fds))
    }

    fn complete() -> Ended {
        Ended::Complete { summary: serde_json::json!([1]) }
    }

    #[test]
    fn a_stream_arrives_and_then_how_it_ended() {
        let (inlet, outlet) = both();
        let sent: Vec<u8> = (0..3 << 20).map(|n: u32| n as u8).collect();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                (&outlet).write_all(&sent).unwrap();
                assert!(!outlet.is_over());
                outlet.conclude(&complete());
            });
            let (mut got, mut bytes) = (Vec::new(), 0);
            inlet.copy_to(&mut got, &mut |n| bytes = n).unwrap();
            assert!(got == sent && bytes == sent.len() as u64);
            assert_eq!(inlet.ended().unwrap(), Some(complete()));
        });
    }

    #[test]
    fn a_write_that_waits_for_a_slow_reader_can_be_ended() {
        let (inlet, outlet) = both();
        let why = || Ended::Refused { why: "over".into(), hint: None, could_not_run: false };
        std::thread::scope(|threads| {
            let (say, said) = std::sync::mpsc::channel();
            let outlet = &outlet;
            threads.spawn(move || {
                let block = [0; 64 << 10];
                let mut out = outlet;
                // More than all buffers hold: nobody reads.
                let error = loop {
                    match out.write_all(&block) {
                        Ok(()) => say.send(()).unwrap(),
                        Err(e) => break e,
                    }
                };
                assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
                outlet.conclude(&why());
            });
            said.recv().unwrap();
            outlet.end();
            assert!(outlet.is_over());
        });
        inlet.copy_to(&mut io::sink(), &mut |_| ()).unwrap();
        assert_eq!(inlet.ended().unwrap(), Some(why()));
    }

    #[test]
    fn each_side_learns_that_the_other_is_gone() {
        let (inlet, outlet) = both();
        drop(outlet);
        inlet.copy_to(&mut io::sink(), &mut |_| ()).unwrap();
        assert_eq!(inlet.ended().unwrap(), None);
        let (inlet, outlet) = both();
        drop(inlet);
        assert!(outlet.is_over(), "the first question looks");
        assert_eq!((&outlet).write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        outlet.conclude(&complete());
    }
}
