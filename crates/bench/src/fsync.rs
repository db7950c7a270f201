//! Workloads in which `fsync` takes most of the time, run by the programs that are usual for them.
//!
//! `fio` writes files in sequence, 64 KiB at a time with an `fsync` after each, from 1 to 1024
//! processes. `dbench` replays the calls of a file server's clients. The result is what they
//! report, not the time of the process: starting a thousand processes takes as long as their work.
//! The unmount is added to fio's time.
//!
//! The *floor* under a result is what the device alone takes. One loop over the same file writes as
//! many bytes as Larder has written, in as many pieces as Larder has made flushes, with a flush
//! after each piece.

use crate::units::Mib;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Numbers of fio's processes, and what the steps are called.
pub(crate) const JOBS: [(u64, &str); 11] = [
    (1, "fsync, 1 job"),
    (2, "fsync, 2 jobs"),
    (4, "fsync, 4 jobs"),
    (8, "fsync, 8 jobs"),
    (16, "fsync, 16 jobs"),
    (32, "fsync, 32 jobs"),
    (64, "fsync, 64 jobs"),
    (128, "fsync, 128 jobs"),
    (256, "fsync, 256 jobs"),
    (512, "fsync, 512 jobs"),
    (1024, "fsync, 1024 jobs"),
];
/// What dbench's step is called.
pub(crate) const DBENCH: &str = "dbench";
const PIECE_KIB: u64 = 64;

/// What a program reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    /// Seconds that the work took; for dbench, that a GiB took, for the database a thousand
    /// transactions.
    pub(crate) seconds: f64,
    /// How often it called `fsync`, if it reports that.
    pub(crate) fsyncs: u64,
    /// How long one call took, in milliseconds: the 99th percentile of the fsyncs of fio and of the
    /// database, the 99.9th of calls that make names, the longest call of dbench and of bonnie++.
    pub(crate) latency_ms: f64,
}

/// What is measured of an fsync step beside its time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Extra {
    pub(crate) fsyncs: u64,
    pub(crate) latency_ms: f64,
    /// Seconds of the bare loop; for Larder.
    pub(crate) floor_seconds: Option<f64>,
}

/// How much each of `jobs` processes writes of all: at least 16 pieces.
fn kib_per_job(all: Mib, jobs: u64) -> u64 {
    (all.0 * 1024 / jobs / PIECE_KIB).max(16) * PIECE_KIB
}

/// Runs fio, which `command` starts.
pub(crate) fn fio(mut command: Command, root: &Path, jobs: u64, all: Mib) -> Result<Said> {
    let per_job = kib_per_job(all, jobs);
    let out = command
        .args(["--name=fsync", "--rw=write", "--bs=64k", "--fsync=1", "--fallocate=none"])
        .args(["--group_reporting", "--output-format=json"])
        .arg(format!("--directory={}", root.display()))
        .arg(format!("--numjobs={jobs}"))
        .arg(format!("--size={per_job}k"))
        .output()
        .context("running fio")?;
    ensure!(out.status.success(), "fio: {}", String::from_utf8_lossy(&out.stderr).trim());
    let report: Value = serde_json::from_slice(&out.stdout).context("what fio says")?;
    let bytes = (jobs * per_job) << 10;
    fio_said(&report, bytes).with_context(|| format!("fio's report: {report}"))
}

fn fio_said(report: &Value, bytes: u64) -> Result<Said> {
    let job = &report["jobs"][0];
    let write = &job["write"];
    let done = write["io_bytes"].as_u64().context("no bytes")?;
    ensure!(job["error"] == 0 && done == bytes, "{done} bytes written, not {bytes}");
    let rate = write["bw_bytes"].as_f64().filter(|rate| *rate > 0.0).context("no rate")?;
    let sync = &job["sync"];
    let p99 = sync["lat_ns"]["percentile"]["99.000000"].as_f64().context("no latency")?;
    // There is none after a file's last piece.
    let fsyncs = sync["total_ios"].as_u64().context("no count of fsyncs")?;
    Ok(Said { seconds: bytes as f64 / rate, fsyncs, latency_ms: p99 / 1e6 })
}

/// Runs dbench, which `command` starts, with its own script of a client's calls.
pub(crate) fn dbench(
    mut command: Command,
    root: &Path,
    clients: u64,
    time: Duration,
) -> Result<Said> {
    let script =
        ["/usr/share/dbench/client.txt", "/usr/share/client.txt", "/usr/local/share/client.txt"]
            .into_iter()
            .find(|path| Path::new(path).exists())
            .context("dbench's client.txt is nowhere")?;
    let out = command
        .args(["-c", script, "-t", &time.as_secs().to_string(), "-D"])
        .arg(root)
        .arg(clients.to_string())
        .output()
        .context("running dbench")?;
    let text = String::from_utf8_lossy(&out.stdout);
    ensure!(
        out.status.success(),
        "dbench: {}{}",
        text.trim(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    dbench_said(&text).with_context(|| format!("dbench's report: {text}"))
}

fn dbench_said(text: &str) -> Result<Said> {
    let line =
        text.lines().rev().find(|l| l.starts_with("Throughput ")).context("no throughput")?;
    let rate: f64 = line.split_ascii_whitespace().nth(1).context("no throughput")?.parse()?;
    let (_, latency) = line.split_once("max_latency=").context("no latency")?;
    let latency_ms = latency.trim_end_matches(" ms").trim().parse()?;
    // `Flush` is its name for fsync: operation, count, average and longest time.
    let flushes = text.lines().find_map(|l| l.trim().strip_prefix("Flush "));
    let fsyncs = flushes.and_then(|l| l.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0);
    if rate > 0.0 {
        Ok(Said { seconds: 1024.0 / rate, fsyncs, latency_ms })
    } else {
        bail!("nothing was done")
    }
}

/// A number of the daemon's engine.
pub(crate) fn engine(stats: Option<&Value>, path: &[&str]) -> Option<f64> {
    path.iter().try_fold(&stats?["engine"], |at, name| at.get(name))?.as_f64()
}

/// The floor under a step with these statistics: the seconds of a bare loop over `file`. The
/// content of `file` is lost.
pub(crate) fn floor(file: &Path, stats: &Value) -> Result<f64> {
    let number = |name: &str| {
        engine(Some(stats), &[name]).with_context(|| format!("the daemon does not say {name}"))
    };
    let (bytes, flushes) =
        (number("device_written_bytes")? as u64, (number("device_flushes")? as u64).max(1));
    let device = File::options().write(true).open(file)?;
    let room = device.metadata()?.len();
    let piece = vec![0x5a; usize::try_from((bytes / flushes).clamp(4096, room))?];
    let len = piece.len() as u64;
    let start = Instant::now();
    let mut at = 0;
    for _ in 0..flushes {
        if at + len > room {
            at = 0;
        }
        device.write_all_at(&piece, at)?;
        device.sync_data()?;
        at += len;
    }
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_scale_down_to_sixteen_pieces() {
        assert_eq!(kib_per_job(Mib(192), 1), 192 << 10);
        assert_eq!(kib_per_job(Mib(192), 128), 1536);
        assert_eq!(kib_per_job(Mib(192), 1024), 1024);
    }

    #[test]
    fn what_fio_says() {
        let report = serde_json::json!({"jobs": [{
            "error": 0,
            "write": {"io_bytes": 1 << 20, "bw_bytes": 2 << 20},
            "sync": {"total_ios": 15, "lat_ns": {"percentile": {"99.000000": 2_500_000}}},
        }]});
        let said = fio_said(&report, 1 << 20).unwrap();
        assert!((said.seconds - 0.5).abs() < 1e-9 && (said.latency_ms - 2.5).abs() < 1e-9);
        assert_eq!(said.fsyncs, 15);
        assert!(fio_said(&report, 2 << 20).is_err(), "not all was written");
    }

    #[test]
    fn what_dbench_says() {
        let text = " Operation      Count    AvgLat    MaxLat\n Flush           1234     1.0    \
            9.0\n\n\
                    Throughput 512 MB/sec  64 clients  64 procs  max_latency=12.500 ms\n";
        let said = dbench_said(text).unwrap();
        assert!((said.seconds - 2.0).abs() < 1e-9 && (said.latency_ms - 12.5).abs() < 1e-9);
        assert_eq!(said.fsyncs, 1234);
        assert!(dbench_said("failed").is_err());
    }
}
