//! The side that receives, on another machine: `ssh`, and `larder` there.
//!
//! Three commands run there: `larder backup --list --json`, `larder receive --resume`, and `larder
//! subvolume delete`. So that machine needs nothing but Larder, and a user that may do these three.
//! What runs there is a line for a shell, in which every name is quoted. Errors there are said by
//! `larder` there: its standard error is this one's.

use super::flow::{Sender, first_of};
use super::held::{Entry, Told};
use super::place::Remote;
use super::target::Target;
use crate::failure::Advise;
use anyhow::{Context, anyhow};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::process::{Command, ExitStatus, Stdio};

/// Exit code of `ssh` if it could not connect.
const NO_CONNECTION: i32 = 255;
/// Exit code of a shell that does not find the command.
const NO_COMMAND: i32 = 127;
/// Names in one command line.
const AT_ONCE: usize = 64;

/// A directory on another machine.
#[derive(Debug)]
pub(super) struct Ssh {
    pub(super) to: Remote,
    /// The command `larder` there.
    pub(super) program: OsString,
    /// Snapshots with this name are looked for.
    pub(super) prefix: Vec<u8>,
}

impl Ssh {
    /// Runs `larder` there with these arguments.
    fn command(&self, arguments: &[&[u8]]) -> Command {
        let program = self.program.clone().into_vec();
        let words = [&program[..]].into_iter().chain(arguments.iter().copied());
        let line = words.map(quoted).collect::<Vec<_>>().join(&b' ');
        let mut ssh = Command::new("ssh");
        if let Some(port) = self.to.port {
            ssh.arg("-p").arg(port.to_string());
        }
        ssh.arg("--").arg(&self.to.host).arg(OsString::from_vec(line));
        ssh
    }

    fn judge(&self, status: ExitStatus, what: &str) -> anyhow::Result<()> {
        if status.success() {
            return Ok(());
        }
        let host = self.to.display();
        match status.code() {
            Some(NO_CONNECTION) => Err(anyhow!("{host}: ssh failed")).could_not_run(),
            Some(NO_COMMAND) => Err(anyhow!("{host}: there is no such command"))
                .hint("install larder there, or say where it is: --remote-larder PATH")
                .could_not_run(),
            _ => Err(anyhow!("{host}: `larder {what}` failed there: {status}")),
        }
    }

    /// Everything that the directory there says of itself.
    pub(super) fn told(&self) -> anyhow::Result<Vec<Told>> {
        let mut ssh = self.command(&[b"backup", b"--json", b"--list", &self.to.path]);
        let said = ssh.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let said = said.context("starting ssh").could_not_run()?;
        self.judge(said.status, "backup --list")?;
        serde_json::from_slice(&said.stdout)
            .with_context(|| format!("{}: it says what is no list", self.to.display()))
    }
}

/// A word for a shell.
fn quoted(word: &[u8]) -> Vec<u8> {
    let mut out = vec![b'\''];
    for byte in word {
        match byte {
            b'\'' => out.extend(b"'\\''"),
            byte => out.push(*byte),
        }
    }
    out.push(b'\'');
    out
}

impl Target for Ssh {
    fn list(&mut self) -> anyhow::Result<Vec<Entry>> {
        let told = self.told()?;
        let understood = told.iter().map(|told| told.understand(&self.prefix));
        let all: Vec<Option<Entry>> = understood
            .collect::<anyhow::Result<_>>()
            .with_context(|| format!("{}: it says what is no list", self.to.display()))?;
        Ok(all.into_iter().flatten().collect())
    }

    fn receive(&mut self, send: &mut Sender<'_>) -> anyhow::Result<()> {
        let mut ssh = self.command(&[b"receive", b"--resume", b"--quiet", &self.to.path]);
        let child = ssh.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let mut child = child.context("starting ssh").could_not_run()?;
        let mut stream = child.stdin.take().context("ssh has no standard input")?;
        let sent = send(&mut stream);
        // It sees the end, also if the stream is cut off here, and notes how far it is.
        drop(stream);
        let status = child.wait().context("waiting for ssh")?;
        first_of(sent, self.judge(status, "receive"))
    }

    fn delete(&mut self, names: &[Vec<u8>]) -> anyhow::Result<()> {
        let dir = &self.to.path[..];
        let slash: &[u8] = if dir.ends_with(b"/") { b"" } else { b"/" };
        let paths: Vec<Vec<u8>> = names.iter().map(|name| [dir, slash, name].concat()).collect();
        for paths in paths.chunks(AT_ONCE) {
            let mut arguments: Vec<&[u8]> = vec![b"subvolume", b"delete", b"--commit"];
            arguments.extend(paths.iter().map(Vec::as_slice));
            let mut ssh = self.command(&arguments);
            let status = ssh.stdin(Stdio::null()).stdout(Stdio::null()).status();
            self.judge(status.context("starting ssh").could_not_run()?, "subvolume delete")?;
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::print;

    #[test]
    fn a_shell_takes_each_word_as_it_is() {
        let words: [&[u8]; 5] = [b"a b", b"it's", b"$(x) `y` \\ \"z\"", b"\xff\n*", b""];
        for word in words {
            let line = [b"printf %s ", &quoted(word)[..]].concat();
            let said = Command::new("sh").arg("-c").arg(OsString::from_vec(line)).output().unwrap();
            assert_eq!(said.stdout, word, "{}", print::name(word));
        }
    }
}
