//! A database: many clients, one table, more data than memory, and a transaction is over when it is
//! durable.
//!
//! It works as PostgreSQL does. A page has 8 KiB and is read or written alone, through the page
//! cache. A transaction reads nine pages, writes four and calls `fsync`: about what a transaction
//! of `pgbench` does, with the indices that lead it to its rows. The table is one file, in which
//! all calls of `fsync` meet in one inode, or several, of which a transaction writes one. (On FUSE
//! the kernel lets one write or `fsync` of an inode through at a time, so the two differ.) Before
//! anything is measured each file is preallocated and written to its end. So each write goes over
//! old data, the case that is worst for copy-on-write.
//!
//! It runs for a time, not for an amount. The result is the seconds that a thousand transactions
//! took, so that a ratio means the same as elsewhere. `docs/BENCHMARKS.md` says why fio does not do
//! this, and which memory is limited.

use crate::fsync::Said;
use crate::interrupt;
use crate::units::Mib;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Numbers of clients by default.
pub(crate) const CLIENTS: [u64; 3] = [1, 16, 64];
const PAGE: usize = 8 << 10;
/// Of a transaction.
const READS: u64 = 9;
const WRITES: u64 = 4;

/// Works on a table as the clients of a database do.
#[derive(Args, Debug)]
pub(crate) struct Database {
    root: PathBuf,
    #[arg(long)]
    clients: u64,
    #[arg(long)]
    files: u64,
    /// Runs for so many seconds.
    #[arg(long)]
    seconds: u64,
}

/// How many clients work on how many files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) clients: u64,
    pub(crate) files: u64,
}

/// What was done, as the process reports it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Done {
    seconds: f64,
    transactions: u64,
    /// 99 of 100 calls of `fsync` took no longer.
    p99_ms: f64,
}

impl Database {
    pub(crate) fn run(self) -> Result<()> {
        let shape = Shape { clients: self.clients, files: self.files };
        let done = work(&self.root, shape, Duration::from_secs(self.seconds))?;
        println!("{}", serde_json::to_string(&done)?);
        Ok(())
    }
}

/// What the step of this shape is called.
pub(crate) fn step(shape: Shape) -> Cow<'static, str> {
    let plural = if shape.clients == 1 { "" } else { "s" };
    let files = if shape.files == 1 { String::new() } else { format!(", {} files", shape.files) };
    format!("database, {} client{plural}{files}", shape.clients).into()
}

fn segment(root: &Path, n: u64) -> PathBuf {
    root.join(format!("table.{n}"))
}

/// Makes the table: preallocated, then written with `block` again and again.
pub(crate) fn fill(root: &Path, size: Mib, files: u64, block: &[u8]) -> Result<()> {
    for n in 0..files {
        fill_segment(&segment(root, n), size.bytes() / files, block)?;
    }
    Ok(())
}

fn fill_segment(path: &Path, bytes: u64, block: &[u8]) -> Result<()> {
    let mut file = File::create(path)?;
    // The ceiling cannot do it: it keeps no data.
    match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
        Err(e) => return Err(e).context("preallocating the table"),
    }
    let mut left = bytes;
    while left > 0 {
        interrupt::check()?;
        let part = usize::try_from(left)?.min(block.len());
        file.write_all(&block[..part])?;
        left -= part as u64;
    }
    Ok(file.sync_all()?)
}

/// Runs the clients as a process that `command`, this program, starts.
pub(crate) fn database(
    mut command: Command,
    root: &Path,
    shape: Shape,
    time: Duration,
) -> Result<Said> {
    let numbers = [shape.clients, shape.files, time.as_secs()].map(|n| n.to_string());
    command.arg("database").arg(root);
    for (option, number) in ["--clients", "--files", "--seconds"].into_iter().zip(numbers) {
        command.args([option, &number]);
    }
    let out = command.output()?;
    ensure!(out.status.success(), "the database: {}", String::from_utf8_lossy(&out.stderr).trim());
    let done: Done = serde_json::from_slice(&out.stdout).context("what it says")?;
    Ok(done.said())
}

impl Done {
    fn said(self) -> Said {
        let seconds = self.seconds * 1000.0 / self.transactions as f64;
        Said { seconds, fsyncs: self.transactions, latency_ms: self.p99_ms }
    }
}

fn work(root: &Path, shape: Shape, time: Duration) -> Result<Done> {
    let open = |n| File::options().read(true).write(true).open(segment(root, n));
    let table = (0..shape.files).map(open).collect::<Result<Vec<_>, _>>()?;
    let pages = table[0].metadata()?.len() / PAGE as u64;
    ensure!(pages > 0, "the table has no page");
    let start = Instant::now();
    let mut calls = std::thread::scope(|threads| {
        let working: Vec<_> = (0..shape.clients)
            .map(|n| {
                let client = Client { table: &table, pages, random: fastrand::Rng::with_seed(n) };
                threads.spawn(move || client.run(start, time))
            })
            .collect();
        let mut calls = Vec::new();
        for one in working {
            calls.append(&mut one.join().expect("a client does not panic")?);
        }
        anyhow::Ok(calls)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    calls.sort_unstable();
    let p99 = calls[calls.len() - 1 - calls.len() / 100];
    Ok(Done { seconds, transactions: calls.len() as u64, p99_ms: p99.as_secs_f64() * 1e3 })
}

/// One client, and the state of its random numbers.
struct Client<'a> {
    table: &'a [File],
    /// Of each file.
    pages: u64,
    /// Another for each client, and the same in each run.
    random: fastrand::Rng,
}

impl<'a> Client<'a> {
    /// Makes transactions until the time is over, at least one. How long their calls of `fsync`
    /// took.
    fn run(mut self, start: Instant, time: Duration) -> Result<Vec<Duration>> {
        let mut page = vec![0; PAGE];
        let mut calls = Vec::new();
        while calls.is_empty() || start.elapsed() < time {
            for _ in 0..READS {
                self.file().read_exact_at(&mut page, self.place())?;
            }
            let file = self.file();
            for _ in 0..WRITES {
                let at = self.place();
                page[..8].copy_from_slice(&at.wrapping_add(calls.len() as u64).to_le_bytes());
                file.write_all_at(&page, at)?;
            }
            let begin = Instant::now();
            file.sync_all()?;
            calls.push(begin.elapsed());
        }
        Ok(calls)
    }

    fn file(&mut self) -> &'a File {
        &self.table[self.random.usize(..self.table.len())]
    }

    /// The offset of a page.
    fn place(&mut self) -> u64 {
        self.random.u64(..self.pages) * PAGE as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_work_on_a_table_that_keeps_its_length() {
        for files in [1, 2] {
            let dir = tempfile::tempdir().unwrap();
            let length = || std::fs::metadata(segment(dir.path(), files - 1)).unwrap().len();
            fill(dir.path(), Mib(2), files, &[7; 3 << 19]).unwrap();
            let filled = std::fs::read(segment(dir.path(), 0)).unwrap();
            assert!(filled.iter().all(|b| *b == 7));
            assert_eq!(length(), (2 << 20) / files);
            let done = work(dir.path(), Shape { clients: 3, files }, Duration::ZERO).unwrap();
            assert_eq!(done.transactions, 3, "one for each client");
            assert!(done.p99_ms > 0.0 && done.seconds > 0.0);
            assert_eq!(length(), (2 << 20) / files);
        }
    }

    #[test]
    fn a_result_is_for_a_thousand_transactions() {
        let said = Done { seconds: 2.0, transactions: 500, p99_ms: 4.0 }.said();
        assert!((said.seconds - 4.0).abs() < 1e-9 && (said.latency_ms - 4.0).abs() < 1e-9);
        assert_eq!(said.fsyncs, 500);
        assert_eq!(step(Shape { clients: 1, files: 1 }), "database, 1 client");
        assert_eq!(step(Shape { clients: 16, files: 4 }), "database, 16 clients, 4 files");
    }
}
