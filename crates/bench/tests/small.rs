//! The whole benchmark, as small as it can be, so that a change that breaks it is noticed. Nothing
//! here depends on how fast anything is.

use larder_simtest::oracle::{Need, need};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

const NEEDS: [Need; 5] =
    [Need::Root, Need::Fuse, Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

/// One at a time: each drops the machine's caches and syncs its disks, which takes the longer the
/// more the others do.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The `larder` command of this source tree; Cargo hands tests only the programs of their own
/// package. Asked for in this way it is the one that the tests of the whole workspace have built
/// already: by itself it would be built with other features.
fn larder() -> PathBuf {
    let built = Command::new(env!("CARGO"))
        .args(["test", "--quiet", "--workspace", "--no-run", "--test", "usage"])
        .arg("--message-format=json-render-diagnostics")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "larder builds");
    let text = String::from_utf8(built.stdout).expect("text");
    let mut messages =
        text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).expect("JSON"));
    let found = messages.find_map(|m| {
        (m["target"]["name"] == "larder" && m["executable"].is_string())
            .then(|| m["executable"].as_str().map(PathBuf::from))?
    });
    found.expect("an executable named larder")
}

fn tree(dir: &Path) -> PathBuf {
    let tree = dir.join("tree");
    for i in 0..20 {
        fs::create_dir_all(tree.join(format!("d{i}"))).unwrap();
        fs::write(tree.join(format!("d{i}/f")), vec![i as u8; i * 1000]).unwrap();
    }
    std::os::unix::fs::symlink("d1/f", tree.join("link")).unwrap();
    let tar = dir.join("tree.tar");
    let made =
        Command::new("tar").arg("cf").arg(&tar).arg("-C").arg(dir).arg("tree").status().unwrap();
    assert!(made.success());
    tar
}

fn bench(dir: &Path, args: &[&str]) -> Output {
    let usual = ["--image-mib", "256"];
    Command::new(env!("CARGO_BIN_EXE_larder-bench"))
        .args(usual.iter().filter(|_| !args.contains(&usual[0])))
        .args(["--stream-mib", "24", "--dir"])
        .arg(dir)
        .args(args)
        .output()
        .unwrap()
}

/// Runs the benchmark in a directory, with the command of this source tree: its report, and its
/// data.
fn measured(dir: &Path, args: &[&str]) -> (String, serde_json::Value) {
    let name = |path: PathBuf| path.display().to_string();
    let (out, json) = (name(dir.join("report.md")), name(dir.join("measured.json")));
    let files = ["--out", &out, "--json", &json, "--tables", "--larder", &name(larder())];
    let run = bench(dir, &[args, &["--rounds", "1"], &files].concat());
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let data = fs::read_to_string(json).unwrap();
    (fs::read_to_string(out).unwrap(), serde_json::from_str(&data).unwrap())
}

/// Runs a workload that takes a tree on three targets.
fn measured_with_a_tree(dir: &Path, workload: &str) -> (String, serde_json::Value) {
    let tar = tree(dir).display().to_string();
    let small = ["--tar", &tar, "--files", "1500"];
    let what = ["--workloads", workload, "--targets", "kernel,larder,ceiling"];
    measured(dir, &[small.as_slice(), &what].concat())
}

#[test]
fn a_small_run_makes_a_report() {
    if !need(&NEEDS) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let tar = tree(dir.path()).display().to_string();
    fs::write(dir.path().join("report.md"), "# Mine\n\nText that stays.\n").unwrap();
    let (text, data) = measured(dir.path(), &["--tar", &tar, "--metadata", "dup"]);
    assert!(text.starts_with("# Mine\n\nText that stays.\n"));
    for target in
        ["kernel", "kernel again", "kernel, direct", "Larder", "Larder, direct", "ceiling"]
    {
        for step in [
            "unpack",
            "read back",
            "find, cold",
            "find, warm",
            "rm -rf",
            "write 1 file",
            "read 1 file",
            "random 4 KiB",
            "random 4 KiB, read",
        ] {
            // The ceiling has forgotten the file by then.
            if step == "random 4 KiB, read" && target == "ceiling" {
                continue;
            }
            let row = format!("| {step} | {target} |");
            assert!(text.contains(&row), "{row} in\n{text}");
        }
    }
    let plots = ["report-kernel.svg", "report-ceiling.svg"].map(|name| {
        assert!(text.contains(&format!("]({name})")));
        let path = dir.path().join(name);
        (fs::read_to_string(&path).unwrap(), path)
    });
    assert!(plots.iter().all(|(svg, _)| svg.starts_with("<svg")));
    plots.iter().for_each(|(_, path)| fs::remove_file(path).unwrap());
    let redrawn = Command::new(env!("CARGO_BIN_EXE_larder-bench"))
        .arg("plots")
        .arg(dir.path().join("measured.json"))
        .arg("--out")
        .arg(dir.path().join("report.md"))
        .output()
        .unwrap();
    assert!(redrawn.status.success(), "{}", String::from_utf8_lossy(&redrawn.stderr));
    for (svg, path) in &plots {
        assert_eq!(fs::read_to_string(path).unwrap(), *svg, "the same picture, in the same place");
    }
    let steps = data["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 7 * 9 - 1, "file systems, steps; the ceiling reads no blocks");
    // 20 files, 20 directories, the one around them, a link.
    assert_eq!(data["archive"]["entries"], 42);
    let requests = |target: &str, step: &str| {
        let found = steps.iter().find(|s| s["target"] == target && s["step"] == step).unwrap();
        found["requests"].as_f64()
    };
    // Every entry costs at least the request that makes it.
    assert!(requests("ceiling", "unpack").unwrap() > 1.0);
    assert!(requests("larder", "unpack").unwrap() > 1.0);
    assert!(requests("kernel", "unpack").is_none());
    nothing_stays(dir.path());
}

#[test]
fn fsyncs_are_counted() {
    if !need(&NEEDS) || !need(&[Need::FsyncPrograms]) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let small = ["--jobs", "4", "--fsync-mib", "1", "--clients", "2", "--dbench-seconds", "3"];
    let what = ["--workloads", "fsync,dbench", "--targets", "kernel,larder"];
    let (text, data) = measured(dir.path(), &[small.as_slice(), &what].concat());
    let steps = data["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 4, "file systems, steps");
    let ours =
        steps.iter().find(|s| s["target"] == "larder" && s["step"] == "fsync, 4 jobs").unwrap();
    // At least 16 pieces of 64 KiB each, and none behind the last.
    assert_eq!(ours["fsync"]["fsyncs"], 60);
    let log = &ours["stats"]["engine"]["log"];
    assert!(log["fsyncs"].as_u64() >= Some(60), "{log}");
    assert!(ours["fsync"]["floor_seconds"].as_f64() > Some(0.0));
    for row in
        ["| fsync, 4 jobs | Larder |", "| dbench | kernel |", "fsync, 4 jobs, against the kernel"]
    {
        assert!(text.contains(row), "{row} in\n{text}");
    }
    nothing_stays(dir.path());
}

#[test]
fn old_behaviour_slow_flushes_and_little_memory() {
    if !need(&NEEDS) || !need(&[Need::FsyncPrograms, Need::MemoryCgroup]) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let small = ["--jobs", "2", "--fsync-mib", "1", "--names-seconds", "1", "--names-mib", "16"];
    let targets = [
        "larder-locked-copies",
        "larder-log-waits",
        "larder-log-alone",
        "larder-slow-flush",
        "larder",
    ];
    let what = ["--workloads", "fsync,names", "--targets", &targets.join(",")];
    let (text, data) = measured(dir.path(), &[small.as_slice(), &what].concat());
    let steps = data["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 2 * targets.len(), "file systems, steps");
    for s in steps {
        let (target, step) = (s["target"].as_str().unwrap(), s["step"].as_str().unwrap());
        let number =
            |path: &str| s["stats"].pointer(path).and_then(serde_json::Value::as_u64).unwrap();
        assert!(number("/engine/log/fsyncs_logged") > 0, "{target}, {step}: {s}");
        // One that deletes checksums first writes logs as the others do.
        assert!(number("/engine/log/csum_items") > 0, "{target}, {step}: {s}");
        assert!(s["fsync"]["latency_ms"].as_f64() > Some(0.0));
        if target == "larder-slow-flush" && step.starts_with("fsync") {
            // One after the other, each takes two flushes or waits for those of the other.
            let flushes = number("/engine/device_flushes");
            assert!(
                s["seconds"].as_f64().unwrap() >= flushes as f64 * 0.002 / 2.0,
                "{flushes}: {s}"
            );
        }
    }
    assert!(text.contains("| names beside 16 fsyncs | Larder, each logs alone |"), "{text}");
    assert!(text.contains("](report-switches.svg)"), "{text}");
    nothing_stays(dir.path());
}

#[test]
fn snapshots_clones_and_deduplication() {
    if !need(&NEEDS) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (text, data) = measured_with_a_tree(dir.path(), "sharing");
    let steps = data["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 2 * 5, "file systems that keep something, steps");
    for step in
        ["10 snapshots", "delete 9 of them", "delete all of it", "clone 1 file", "dedupe 2 trees"]
    {
        for target in ["kernel", "Larder"] {
            let row = format!("| {step} | {target} |");
            assert!(text.contains(&row), "{row} in\n{text}");
        }
    }
    nothing_stays(dir.path());
}

#[test]
fn both_cases_a_database_and_offline_commands() {
    if !need(&NEEDS) || !need(&[Need::MemoryCgroup]) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let small = ["--database-mib", "16", "--database-clients", "2", "--database-seconds", "1"];
    let cases = ["--pages", "cold,hot", "--mkfs", "larder"];
    let what = ["--workloads", "database,offline", "--targets", "kernel,larder,ceiling"];
    let (text, data) = measured(dir.path(), &[small.as_slice(), &cases, &what].concat());
    let steps = data["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 2 * (3 + 2 + 3 + 3), "cases; the database, commands");
    for s in steps {
        assert_eq!(s["case"]["mkfs"], "larder");
        let cached = s["image_cached_mib"].as_f64().unwrap();
        let is_checked_by_linux = s["target"] == "kernel" && s["step"] == "check with data";
        // `btrfs check` drops the image's pages.
        if s["case"]["pages"] == "hot" && s["step"] == "check with data" && !is_checked_by_linux {
            assert!(cached > 200.0, "read past the page cache, a hot image stays hot: {s}");
        }
    }
    for target in ["kernel", "Larder", "ceiling"] {
        for row in ["database, 2 clients (hot, larder mkfs)", "check with data (larder mkfs)"] {
            let row = format!("| {row} | {target} |");
            assert!(text.contains(&row), "{row} in\n{text}");
        }
    }
    nothing_stays(dir.path());
}

#[test]
fn snapshots_are_sent_and_received() {
    if !need(&NEEDS) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (text, data) = measured_with_a_tree(dir.path(), "send");
    assert_eq!(data["steps"].as_array().unwrap().len(), 3 * 2 * 4, "file systems, steps");
    for thing in ["a tree", "a compressed tree", "many files", "1 % of many files"] {
        for target in ["kernel", "Larder", "ceiling"] {
            for what in ["send", "receive"] {
                let row = format!("| {what} {thing} | {target} |");
                assert!(text.contains(&row), "{row} in\n{text}");
            }
        }
    }
    assert!(text.contains("| anonymous memory to send and receive: under 256 MiB |"), "{text}");
    nothing_stays(dir.path());
}

#[test]
fn a_failure_leaves_nothing_behind() {
    if !need(&NEEDS) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    // The image is too small for its file, so the step fails while it is mounted.
    let out = dir.path().join("report.md").display().to_string();
    let args =
        ["--rounds", "1", "--targets", "kernel", "--workloads", "stream", "--stream-mib", "512"];
    let run = Command::new(env!("CARGO_BIN_EXE_larder-bench"))
        .args(["--image-mib", "256", "--out", &out, "--dir"])
        .arg(dir.path())
        .args(args)
        .output()
        .unwrap();
    assert!(!run.status.success());
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(said.contains("stream on kernel"), "{said}");
    nothing_stays(dir.path());
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    if !need(&NEEDS) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("report.md");
    let mut run = Command::new(env!("CARGO_BIN_EXE_larder-bench"))
        .args([
            "--image-mib",
            "256",
            "--stream-mib",
            "24",
            "--rounds",
            "1000000",
            "--workloads",
            "stream",
        ])
        .args(["--targets", "kernel,ceiling", "--dir"])
        .arg(dir.path())
        .arg("--out")
        .arg(&out)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    // By now each has been mounted once, and one probably is.
    assert!(lines.any(|l| l.starts_with("round 2 of")));
    let pid = rustix::process::Pid::from_child(&run);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let rest: Vec<String> = lines.collect();
    assert!(!run.wait().unwrap().success());
    assert!(rest.iter().any(|l| l.contains("interrupted")), "{rest:?}");
    assert!(!out.exists());
    nothing_stays(dir.path());
}

fn nothing_stays(dir: &Path) {
    assert!(!dir.join("larder-bench.img").exists());
    let image = dir.join("larder-bench.img");
    let loops = fs::read_dir("/sys/block")
        .unwrap()
        .filter_map(|e| fs::read_to_string(e.ok()?.path().join("loop/backing_file")).ok());
    for backing in loops {
        assert!(!backing.starts_with(&*image.to_string_lossy()), "{backing} is still attached");
    }
}

#[test]
fn a_device_is_lost_and_comes_back() {
    if !need(&NEEDS) {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    // Four devices need more room.
    let spread = ["--image-mib", "1024", "--spread", "raid0,raid1,raid5"];
    let what = ["--workloads", "lost", "--targets", "kernel,larder"];
    let (text, data) = measured(dir.path(), &[spread.as_slice(), &what].concat());
    let steps = data["steps"].as_array().unwrap();
    // RAID0 is scrubbed only.
    assert_eq!(steps.len(), 2 * (1 + 3 + 3), "file systems, steps");
    for step in ["scrub (raid0)", "read 1 file, degraded (raid1)", "rebuild (raid5)"] {
        for target in ["kernel", "Larder"] {
            let row = format!("| {step} | {target} |");
            assert!(text.contains(&row), "{row} in\n{text}");
        }
    }
    nothing_stays(dir.path());
}
