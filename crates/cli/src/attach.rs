//! The way to a daemon that serves an image already, for a program that wants a further mount, or a
//! stream of subvolumes.
//!
//! A daemon has an **attach socket**: a Unix datagram socket beside the state files. It is named
//! after the image's inode or device, and is bound before the daemon goes into its sandbox. The
//! program that wants a mount does itself what needs rights or a mount namespace: it claims the
//! state file, and starts a [mount helper](larder_fuse::helper) that will make the mount. Then it
//! sends one message. The message says what is wanted and carries three descriptors: the mount
//! helper's socket, the locked state file, and a socket for the answer. A message that wants a
//! stream carries two, the daemon's end of a [conduit](crate::conduit). One about a
//! [job](crate::jobs) carries the same two, and in front of them the files that the job needs. The
//! daemon only receives. It opens, connects and accepts nothing, so its filter of system calls
//! allows nothing more than before.
//!
//! What can come in between, when a mount is wanted:
//!
//! - *The daemon is dead.* Sending says so. The socket file is removed, the mount is a first one.
//! - *The daemon ends before it has read the message.* The descriptors are closed with it, which
//!   the requester sees. It waits for the daemon's end, and the mount is a first one. The same
//!   holds for the answer [`Answer::Ending`].
//! - *The requester is killed before it sends.* Nothing was mounted. Its mount helper sees that,
//!   and ends.
//! - *The requester is killed before it has the answer.* The daemon cannot deliver the answer, and
//!   unmounts again.
//! - *Two first mounts start at the same time.* Each holds the image's [`StartLock`] until it has a
//!   mount or an error. The second then finds the socket of the first.
//!
//! Only the user of the daemon gets a mount: the directory belongs to that user, and with each
//! message the kernel says which user has sent it. Root gets streams as well, because root may read
//! everything on Linux; for any other user a stream would have files that this user may not read.

use crate::conduit::{self, Inlet, Outlet};
use crate::jobs::JobRequest;
use crate::mount_options::whole::Settings;
use crate::state::{self, directories, is_at, open_to_lock, own_directory};
use crate::streams::Wanted;
use anyhow::Context;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Changed whenever a message means something else than before.
const VERSION: u32 = 3;
/// Longest message; a path and a list of options take up to some KiB each.
const MESSAGE_LEN: usize = 128 << 10;

/// A message.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Message {
    version: u32,
    #[serde(flatten)]
    wanted: Request,
}

/// All that is read of a message of another version.
#[derive(Deserialize)]
struct AnyMessage {
    version: u32,
}

/// What a requester wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Request {
    Mount(MountRequest),
    Send(SendRequest),
    Job(JobRequest),
}

/// What a requester of a stream wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SendRequest {
    pub(crate) wanted: Wanted,
    pub(crate) protocol: u32,
    /// One stream with one end.
    pub(crate) joined: bool,
    /// The file system that the subvolumes are of: another image may have come to lie where that
    /// of a mount was.
    pub(crate) fsid: String,
    /// The process that serves the mount, if the requester knows it.
    pub(crate) daemon: Option<u32>,
}

/// What a requester of a mount wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MountRequest {
    /// `-o`, as it was given.
    pub(crate) options: Vec<String>,
    /// Those of the options that are about the whole file system.
    pub(crate) whole: Settings,
    /// Where; absolute and without symbolic links.
    pub(crate) mountpoint: PathBuf,
    /// Process of the mount helper.
    // Its name since the first version of the message.
    #[serde(rename = "porter")]
    pub(crate) helper: u32,
}

/// What the daemon says.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    /// The mount can be used.
    Ready {
        /// FUSE over io_uring was off on this machine and is on now.
        enabled_uring: bool,
    },
    /// There is no mount: why, and what to do about it.
    Refused { why: String, hint: Option<String> },
    /// The daemon, whose process this is, is about to end.
    Ending { pid: u32 },
}

/// Do both paths lead to the same image?
pub(crate) fn are_one(image: &Path, other: &Path) -> bool {
    identity(image).is_some_and(|name| identity(other) == Some(name))
}

/// A name for an image, the same for every path to it; `None` if it cannot be looked at.
fn identity(image: &Path) -> Option<String> {
    let meta = fs::metadata(image).ok()?;
    let key = if meta.file_type().is_block_device() {
        format!("device {}", meta.rdev())
    } else {
        format!("file {}:{}", meta.dev(), meta.ino())
    };
    let hash = larder_format::CsumType::Blake2b.compute(key.as_bytes());
    Some(hash[..12].iter().map(|b| format!("{b:02x}")).collect())
}

const ATTACH: &str = "attach";
const START: &str = "start";

/// Held by the one process that is just mounting this image.
#[derive(Debug)]
pub(crate) struct StartLock {
    lock: File,
    /// Removed when it is released; not by a process in its sandbox.
    path: Option<PathBuf>,
}

impl Drop for StartLock {
    fn drop(&mut self) {
        // Removed while it is locked: a process that waits for this lock then sees that another
        // file has the name.
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

impl StartLock {
    /// Waits until no other process holds it.
    ///
    /// # Errors
    /// There is no place for the lock.
    pub(crate) fn of(image: &Path) -> anyhow::Result<Option<Self>> {
        let Some(identity) = identity(image) else { return Ok(None) };
        let path = own_directory()?.join(format!("{identity}.{START}"));
        loop {
            let file = open_to_lock(&path)?;
            while let Err(e) = flock(&file, FlockOperation::LockExclusive) {
                if e != rustix::io::Errno::INTR {
                    return Err(e).with_context(|| path.display().to_string());
                }
            }
            // The file may have been removed meanwhile: others would lock another one.
            if is_at(&file, &path) {
                return Ok(Some(Self { lock: file, path: Some(path) }));
            }
        }
    }

    /// Releases it and leaves the file, for a process that removes no files any more.
    pub(crate) fn leave(mut self) {
        self.path = None;
    }
}

/// Removes what a daemon leaves behind at its end: its attach socket, and the start lock unless it
/// is held.
pub(crate) fn tidy_up(image: &Path, socket: Option<&Path>) {
    if let Some(socket) = socket {
        let _ = fs::remove_file(socket);
    }
    if let (Some(identity), Ok(dir)) = (identity(image), own_directory()) {
        remove_if_free(&dir.join(format!("{identity}.{START}")));
    }
}

/// Removes what is left of daemons and of commands that were killed.
fn sweep(dir: &Path) {
    for file in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = file.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some(ATTACH) => drop(connect(&path)),
            Some(START) => remove_if_free(&path),
            _ => {}
        }
    }
}

/// Removes a start lock unless it is held.
fn remove_if_free(start_lock: &Path) {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if let Ok(lock) = rustix::fs::open(start_lock, flags, Mode::empty())
        && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
    {
        let _ = fs::remove_file(start_lock);
    }
}

/// A connection to the daemon behind an attach socket. The socket of a dead one is removed.
fn connect(path: &Path) -> Option<OwnedFd> {
    let socket = datagrams().ok()?;
    let (address, _dir) = address(path).ok()?;
    let connected = rustix::net::connect(&socket, &address);
    if connected == Err(rustix::io::Errno::CONNREFUSED) {
        let _ = fs::remove_file(path);
    }
    connected.ok().map(|()| socket)
}

/// The attach sockets of an image in a directory of this user. In a directory that belongs to
/// another user they might be anybody's.
fn sockets(dir: &Path, user: u32, identity: &str) -> Vec<PathBuf> {
    if !state::belongs_to(dir, user) {
        return Vec::new();
    }
    let names = fs::read_dir(dir).into_iter().flatten().flatten();
    let ours = |name: &str| name.starts_with(&format!("{identity}.")) && name.ends_with(ATTACH);
    names.filter(|f| f.file_name().to_str().is_some_and(ours)).map(|f| f.path()).collect()
}

/// A socket address for a path of any length. It names the directory by a descriptor, which has to
/// stay open as long as the address is used.
fn address(path: &Path) -> io::Result<(SocketAddrUnix, OwnedFd)> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())?;
    let short = Path::new(&format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
    Ok((SocketAddrUnix::new(short.as_os_str().as_bytes())?, dir))
}

fn datagrams() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// The daemon's side.
#[derive(Debug)]
pub(crate) struct AttachSocket {
    socket: OwnedFd,
    path: PathBuf,
}

/// A request, with what came along.
#[derive(Debug)]
pub(crate) enum Received {
    /// A mount is wanted.
    Mount {
        wanted: MountRequest,
        /// The mount helper's socket.
        helper: OwnedFd,
        /// The locked state file.
        state: File,
        requester: Requester,
    },
    /// A stream is wanted.
    Send { wanted: SendRequest, outlet: Outlet },
    /// A job is to be begun, changed or ended; how far it is goes to the outlet. The files are
    /// those that came along.
    Job { wanted: JobRequest, files: Vec<OwnedFd>, outlet: Outlet },
}

impl AttachSocket {
    /// Makes the attach socket of an image.
    ///
    /// # Errors
    /// There is no place for it.
    pub(crate) fn open(image: &Path) -> anyhow::Result<Self> {
        let identity = identity(image).with_context(|| image.display().to_string())?;
        // Process ids are given again, perhaps in another namespace; these numbers are not.
        let number = uuid::Uuid::new_v4().simple();
        let dir = own_directory()?;
        sweep(&dir);
        let path = dir.join(format!("{identity}.{number}.{ATTACH}"));
        let open = || -> io::Result<OwnedFd> {
            let socket = datagrams()?;
            rustix::net::sockopt::set_socket_passcred(&socket, true)?;
            let (address, _dir) = address(&path)?;
            rustix::net::bind(&socket, &address)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            Ok(socket)
        };
        let socket = open().with_context(|| path.display().to_string())?;
        Ok(Self { socket, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next request of a user that may ask, in this version's form. Works in the
    /// sandbox.
    ///
    /// # Errors
    /// What receiving says.
    pub(crate) fn next(&self) -> io::Result<Received> {
        let mut message = vec![0; MESSAGE_LEN];
        loop {
            if let Some(received) = self.accept_requests(&mut message)? {
                return Ok(received);
            }
        }
    }

    fn accept_requests(&self, message: &mut [u8]) -> io::Result<Option<Received>> {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4), ScmCredentials(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(message)];
        let got = match rustix::net::recvmsg(
            &self.socket,
            &mut parts,
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(rustix::io::Errno::INTR) => return Ok(None),
            got => got?,
        };
        let (mut fds, mut sender) = (Vec::new(), None);
        for part in ancillary.drain() {
            match part {
                RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
                RecvAncillaryMessage::ScmCredentials(user) => sender = Some(user.uid),
                _ => {}
            }
        }
        // Requesters that get no answer see that their descriptors are closed.
        let own = rustix::process::getuid();
        let Some(sender) = sender.filter(|user| *user == own || user.is_root()) else {
            return Ok(None);
        };
        let message = &message[..got.bytes];
        if !serde_json::from_slice(message).is_ok_and(|any: AnyMessage| any.version == VERSION) {
            refuse_another_version(&fds);
            return Ok(None);
        }
        let wanted = serde_json::from_slice(message).map(|message: Message| message.wanted);
        Ok(match wanted {
            Ok(Request::Mount(wanted)) if sender == own => {
                <[OwnedFd; 3]>::try_from(fds).ok().map(|[helper, state, answer]| Received::Mount {
                    wanted,
                    helper,
                    state: state.into(),
                    requester: Requester(answer),
                })
            }
            Ok(Request::Send(wanted)) => <[OwnedFd; 2]>::try_from(fds)
                .ok()
                .map(|ends| Received::Send { wanted, outlet: Outlet::new(ends) }),
            Ok(Request::Job(wanted)) => {
                with_files(fds).map(|(files, outlet)| Received::Job { wanted, files, outlet })
            }
            _ => None,
        })
    }
}

/// The two ends of a conduit, and the files in front of them, if any came along.
fn with_files(mut fds: Vec<OwnedFd>) -> Option<(Vec<OwnedFd>, Outlet)> {
    let ends = fds.split_off(fds.len().saturating_sub(2));
    <[OwnedFd; 2]>::try_from(ends).ok().map(|ends| (fds, Outlet::new(ends)))
}

/// The last descriptor of a message is for the answer, whatever the version.
fn refuse_another_version(fds: &[OwnedFd]) {
    let Some(answer) = fds.last() else { return };
    let why = "the daemon that serves this image is of another version of larder".to_owned();
    let hint = Some("unmount the image everywhere, and mount it again".to_owned());
    let _ = say(answer, &Answer::Refused { why, hint });
}

/// The requester, to be answered.
#[derive(Debug)]
pub(crate) struct Requester(OwnedFd);

impl Requester {
    /// Answers. Fails if the requester is gone.
    pub(crate) fn say(self, answer: &Answer) -> io::Result<()> {
        say(&self.0, answer)
    }
}

fn say(to: &OwnedFd, answer: &Answer) -> io::Result<()> {
    let text = serde_json::to_vec(answer)?;
    rustix::net::send(to, &text, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The requester's side: the socket of a daemon that lives.
#[derive(Debug)]
pub(crate) struct Found {
    socket: OwnedFd,
    pub(crate) path: PathBuf,
}

impl Found {
    /// The attach socket of an image that this user serves. Sockets of killed daemons are removed.
    pub(crate) fn of(image: &Path) -> Option<Self> {
        Self::of_user(image, rustix::process::geteuid().as_raw())
    }

    /// The attach socket of an image that another user may serve.
    pub(crate) fn of_user(image: &Path, user: u32) -> Option<Self> {
        let identity = identity(image)?;
        let dirs = directories(Some(user)).into_iter();
        let mut all = dirs.flat_map(|dir| sockets(&dir, user, &identity));
        all.find_map(|path| Some(Self { socket: connect(&path)?, path }))
    }

    /// The attach socket of this name, if it is one of this user.
    pub(crate) fn at(path: &Path, user: u32) -> Option<Self> {
        let dir = path.parent()?;
        let is_of_user = directories(Some(user)).iter().any(|of_user| of_user == dir)
            && state::belongs_to(dir, user);
        let socket = is_of_user.then(|| connect(path)).flatten()?;
        Some(Self { socket, path: path.to_owned() })
    }

    /// Asks for a mount, and waits for the answer. `None`: the daemon is gone.
    ///
    /// # Errors
    /// What sending says.
    pub(crate) fn ask(
        &self,
        wanted: &MountRequest,
        helper: impl AsFd,
        state: impl AsFd,
    ) -> io::Result<Option<Answer>> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let wanted = Request::Mount(wanted.clone());
        if !self.deliver(wanted, &[helper.as_fd(), state.as_fd(), theirs.as_fd()])? {
            return Ok(None);
        }
        drop(theirs);
        let mut answer = vec![0; MESSAGE_LEN];
        let len = loop {
            match rustix::net::recv(&ours, &mut answer[..], RecvFlags::empty()) {
                Ok((len, _)) => break len,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => break 0,
                Err(e) => return Err(e.into()),
            }
        };
        if len == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&answer[..len])?))
    }

    /// Asks for a stream, which then comes out of the inlet. `None`: the daemon is gone.
    ///
    /// # Errors
    /// What sending says.
    pub(crate) fn ask_to_send(&self, wanted: SendRequest) -> io::Result<Option<Inlet>> {
        let (inlet, [stream, word]) = conduit::new()?;
        let delivered = self.deliver(Request::Send(wanted), &[stream.as_fd(), word.as_fd()])?;
        Ok(delivered.then_some(inlet))
    }

    /// Asks for a job to be begun, changed or ended. `files` come along. How far it is then comes
    /// out of the inlet. `None`: the daemon is gone.
    ///
    /// # Errors
    /// What sending says.
    pub(crate) fn ask_for_job(
        &self,
        wanted: JobRequest,
        files: &[BorrowedFd<'_>],
    ) -> io::Result<Option<Inlet>> {
        let (inlet, [stream, word]) = conduit::new()?;
        let fds = [files, &[stream.as_fd(), word.as_fd()]].concat();
        let delivered = self.deliver(Request::Job(wanted), &fds)?;
        Ok(delivered.then_some(inlet))
    }

    /// Sends a message. False: the daemon is gone.
    fn deliver(&self, wanted: Request, fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let text = serde_json::to_vec(&Message { version: VERSION, wanted })?;
        if text.len() > MESSAGE_LEN {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "paths or options of more than 100 KiB",
            ));
        }
        self.post(&text, fds)
    }

    fn post(&self, text: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(
            ancillary.push(SendAncillaryMessage::ScmRights(fds)),
            "the buffer was made for four"
        );
        loop {
            let parts = [IoSlice::new(text)];
            match rustix::net::sendmsg(&self.socket, &parts, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::PIPE) => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl MountRequest {
    pub(crate) fn new(options: &[String], whole: Settings, mountpoint: &Path, helper: u32) -> Self {
        let (options, mountpoint) = (options.to_vec(), mountpoint.to_owned());
        Self { options, whole, mountpoint, helper }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conduit::Ended;
    use crate::streams::Named;
    use larder_format::ObjectId;
    use larder_send::Options;
    use std::io::Write;

    #[test]
    fn a_request_arrives_with_its_descriptors_and_is_answered() {
        let image = tempfile::NamedTempFile::new().unwrap();
        assert!(Found::of(image.path()).is_none());
        let socket = AttachSocket::open(image.path()).unwrap();
        let found = Found::of(image.path()).unwrap();
        assert_eq!(found.path, socket.path());
        let whole = Settings::from([("commit".to_owned(), "commit=7".to_owned())]);
        let wanted = MountRequest::new(&["ro".to_owned()], whole, Path::new("/mnt/a b"), 4711);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let received = socket.next().unwrap();
                let Received::Mount { wanted: got, helper: _helper, state, requester } = received
                else {
                    panic!("a mount was asked for")
                };
                assert_eq!(
                    (&got.options[..], &got.mountpoint),
                    (&["ro".to_owned()][..], &wanted.mountpoint)
                );
                assert_eq!((got.whole["commit"].as_str(), got.helper), ("commit=7", 4711));
                assert_eq!(
                    state.metadata().unwrap().ino(),
                    image.as_file().metadata().unwrap().ino()
                );
                requester.say(&Answer::Ready { enabled_uring: true }).unwrap();
                // The next request gets no answer.
                drop(socket.next().unwrap());
            });
            let ask = || found.ask(&wanted, rustix::stdio::stdin(), image.as_file()).unwrap();
            assert_eq!(ask(), Some(Answer::Ready { enabled_uring: true }));
            assert_eq!(ask(), None);
        });
        // Another version, and nonsense.
        std::thread::scope(|threads| {
            threads.spawn(|| socket.next().unwrap());
            let (inlet, [stream, word]) = conduit::new().unwrap();
            let fds = [stream.as_fd(), word.as_fd()];
            assert!(found.post(br#"{"version":1,"options":[]}"#, &fds).unwrap());
            drop((stream, word));
            let ended = inlet.ended().unwrap();
            assert!(matches!(ended, Some(Ended::Refused { why, .. }) if why.contains("version")));
            rustix::net::send(&found.socket, b"hello", SendFlags::empty()).unwrap();
            assert_eq!(found.ask(&wanted, rustix::stdio::stdin(), image.as_file()).unwrap(), None);
        });
        let path = socket.path().to_owned();
        drop(socket);
        assert_eq!(found.ask(&wanted, rustix::stdio::stdin(), image.as_file()).unwrap(), None);
        assert!(path.exists());
        assert!(Found::of(image.path()).is_none() && !path.exists(), "nobody is there any more");
    }

    #[test]
    fn a_request_for_a_stream_arrives_with_the_way_for_it() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let socket = AttachSocket::open(image.path()).unwrap();
        let found = Found::of(image.path()).unwrap();
        let named = |id, shown: &str| Named { id: ObjectId(id), shown: shown.to_owned() };
        let wanted = Wanted {
            subvolumes: vec![named(258, "mnt/new")],
            parent: Some(named(257, "mnt/old")),
            clones: Vec::new(),
            options: Options { compressed_data: true, no_data: false },
        };
        let request =
            SendRequest { wanted, protocol: 2, joined: false, fsid: "f".into(), daemon: Some(1) };
        let inlet = found.ask_to_send(request).unwrap().unwrap();
        let Received::Send { wanted: got, outlet } = socket.next().unwrap() else {
            panic!("a stream was asked for")
        };
        assert_eq!((got.protocol, got.fsid.as_str(), got.daemon), (2, "f", Some(1)));
        let (sub, parent) = (&got.wanted.subvolumes[0], got.wanted.parent.unwrap());
        assert_eq!((sub.id.0, sub.shown.as_str(), parent.id.0), (258, "mnt/new", 257));
        assert!(got.wanted.options.compressed_data && !got.wanted.options.no_data);
        (&outlet).write_all(b"stream").unwrap();
        let complete = Ended::Complete { summary: serde_json::Value::Null };
        outlet.conclude(&complete);
        let mut out = Vec::new();
        inlet.copy_to(&mut out, &mut |_| ()).unwrap();
        assert_eq!((out, inlet.ended().unwrap()), (b"stream".to_vec(), Some(complete)));
    }

    #[test]
    fn a_directory_of_another_user_is_not_searched() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let socket = AttachSocket::open(image.path()).unwrap();
        let (dir, identity) = (socket.path().parent().unwrap(), identity(image.path()).unwrap());
        let me = rustix::process::geteuid().as_raw();
        assert_eq!(sockets(dir, me, &identity), [socket.path()]);
        assert!(sockets(dir, me + 1, &identity).is_empty());
    }

    #[test]
    fn one_process_at_a_time_holds_the_start_lock() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let first = StartLock::of(image.path()).unwrap().unwrap();
        let (say, said) = std::sync::mpsc::channel();
        let path = image.path().to_owned();
        let second = std::thread::spawn(move || {
            let _second = StartLock::of(&path).unwrap().unwrap();
            said.try_recv().expect("the first one has left");
        });
        // One that is held is not removed.
        tidy_up(image.path(), None);
        say.send(()).unwrap();
        drop(first);
        second.join().unwrap();
        tidy_up(image.path(), None);
        assert!(StartLock::of(Path::new("/nonexistent")).unwrap().is_none());
    }
}
