//! Running the built command in tests.

#![allow(dead_code, unreachable_pub)]

pub mod crash;
pub mod places;
pub mod scene;

use larder_simtest::oracle::MemoryCgroup;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// How a run of `larder` ended.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Run {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8(self.out.clone()).expect("output is UTF-8")
    }

    /// It must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "failed: {}", self.err);
        self
    }

    /// It must have failed with this code and said this.
    #[track_caller]
    pub fn fails(self, code: i32, says: &str) -> Self {
        assert_eq!(self.code, code, "stderr: {}", self.err);
        assert!(self.err.contains(says), "{says:?} is not in {:?}", self.err);
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }
}

impl From<Output> for Run {
    fn from(o: Output) -> Self {
        // Killed by a signal is as bad as it gets.
        let code = o.status.code().unwrap_or(-1);
        Self { code, out: o.stdout, err: String::from_utf8_lossy(&o.stderr).into_owned() }
    }
}

/// The command.
pub fn command() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_larder"));
    c.env_remove("SOURCE_DATE_EPOCH").env_remove("LARDER_LOG").stdin(Stdio::null());
    c
}

/// The command, within a memory group if there is one.
pub fn command_in(group: Option<&MemoryCgroup>) -> Command {
    group.map_or_else(command, |group| group.command(env!("CARGO_BIN_EXE_larder")))
}

/// Is something mounted there?
pub fn is_mounted(point: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table.contains(&format!(" {} ", point.display()))
}

/// Runs `larder` with arguments.
pub fn larder<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    command().args(args).output().expect("the command starts").into()
}

/// `image:path` as one argument.
pub fn inside(image: &Path, path: &str) -> PathBuf {
    let mut s = image.as_os_str().to_owned();
    s.push(":");
    s.push(path);
    s.into()
}

/// Arguments of different kinds in one list.
#[macro_export]
macro_rules! args {
    ($($a:expr),* $(,)?) => { [$(std::ffi::OsString::from($a)),*] };
}
