//! Streams that a daemon writes for programs that asked at the socket.
//!
//! Each is written by the thread that got the request, and counts until that thread is done with
//! the file system. Between two writes it holds nothing but its subvolumes, so a slow reader keeps
//! no other caller waiting; those subvolumes can be read, but not deleted or made writable. Before
//! the file system is closed all streams are ended, and their threads have let go of it.

use crate::attach::SendRequest;
use crate::conduit::{Ended, Outlet};
use crate::failure;
use crate::print;
use crate::streams::{End, Sent, describe, send_all_until};
use anyhow::anyhow;
use larder_fs::Filesystem;
use larder_stream::{Protocol, StreamWriter};
use std::io::BufWriter;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes that are written at once.
const BUFFER: usize = 256 << 10;

/// The streams that are being written.
#[derive(Debug, Default)]
pub(super) struct Sends {
    running: Mutex<Running>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Running {
    outlets: Vec<Arc<Outlet>>,
    /// No more may begin.
    ended: bool,
}

/// One of them, as long as it is written.
struct Counted<'a> {
    all: &'a Sends,
    outlet: Arc<Outlet>,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.all.running().outlets.retain(|outlet| !Arc::ptr_eq(outlet, &self.outlet));
        self.all.changed.notify_all();
    }
}

impl Sends {
    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is wanted, and says how that ended. `open` gives the file system while it is
    /// open.
    pub(super) fn serve(
        &self,
        open: impl FnOnce() -> Option<Arc<Filesystem>>,
        wanted: &SendRequest,
        outlet: Outlet,
    ) {
        let outlet = Arc::new(outlet);
        let counted = self.begin(&outlet);
        let fs = counted.as_ref().and_then(|_| open());
        let ended = fs.as_ref().map_or_else(|| Err(unmounted()), |fs| send(fs, wanted, &outlet));
        drop(fs);
        outlet.conclude(&match ended {
            Ok(sent) => Ended::Complete { summary: describe(&sent) },
            Err(_) if self.running().ended => refused(&unmounted()),
            Err(error) => refused(&error),
        });
        // The process may end now.
        drop(counted);
    }

    fn begin(&self, outlet: &Arc<Outlet>) -> Option<Counted<'_>> {
        let mut running = self.running();
        if running.ended {
            return None;
        }
        running.outlets.push(Arc::clone(outlet));
        Some(Counted { all: self, outlet: Arc::clone(outlet) })
    }

    /// Ends all, and waits until nothing of the file system is in use by them.
    pub(super) fn end(&self) {
        let mut running = self.running();
        running.ended = true;
        running.outlets.iter().for_each(|outlet| outlet.end());
        while !running.outlets.is_empty() {
            running = self.changed.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn send(fs: &Filesystem, wanted: &SendRequest, outlet: &Arc<Outlet>) -> anyhow::Result<Sent> {
    let here = wanted.fsid == print::uuid(fs.info().fsid)
        && wanted.daemon.is_none_or(|pid| pid == std::process::id());
    if !here {
        return Err(anyhow!("the image of the mount is not the one that has its path now"));
    }
    let protocol = Protocol::from_number(wanted.protocol)
        .ok_or_else(|| anyhow!("there is no protocol {}", wanted.protocol))?;
    let end: End = {
        let outlet = Arc::clone(outlet);
        Arc::new(move || outlet.is_over())
    };
    let mut writer = StreamWriter::new(BufWriter::with_capacity(BUFFER, &**outlet), protocol);
    if wanted.joined {
        writer.join_streams();
    }
    let sent = send_all_until(fs, &wanted.wanted, &mut writer, &mut |_| (), Some(&end))?;
    writer.end_joined()?;
    writer.flush()?;
    Ok(sent)
}

fn unmounted() -> anyhow::Error {
    anyhow!("the image was unmounted before the stream was complete")
}

/// An error in the form in which it travels.
fn refused(error: &anyhow::Error) -> Ended {
    let said = failure::text(error);
    let said = said.strip_prefix("larder: ").unwrap_or(&said);
    let (why, hint) = match said.split_once("\nhint: ") {
        Some((why, hint)) => (why, Some(hint.to_owned())),
        None => (said, None),
    };
    let could_not_run = failure::code(error) == failure::COULD_NOT_RUN;
    Ended::Refused { why: why.to_owned(), hint, could_not_run }
}
