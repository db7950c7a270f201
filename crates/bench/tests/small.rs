//! The whole benchmark, as small as it can be, so that it cannot rot.

use std::path::Path;
use std::process::Command;

fn missing() -> Option<&'static str> {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !rustix::process::geteuid().is_root() {
        Some("root")
    } else if !Path::new("/dev/fuse").exists() {
        Some("/dev/fuse")
    } else if !Path::new("/dev/loop-control").exists() {
        Some("loop devices")
    } else if !has("mkfs.btrfs") || !has("tar") {
        Some("mkfs.btrfs and tar")
    } else {
        None
    }
}

#[test]
fn a_small_run_makes_a_report() {
    if let Some(missing) = missing() {
        assert!(std::env::var("LARDER_REQUIRE_ORACLES").is_err(), "needs {missing}");
        eprintln!("skipped: a_small_run_makes_a_report needs {missing}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    for i in 0..20 {
        std::fs::create_dir_all(tree.join(format!("d{i}"))).unwrap();
        std::fs::write(tree.join(format!("d{i}/f")), vec![i as u8; i * 1000]).unwrap();
    }
    let tar = dir.path().join("tree.tar");
    let made =
        Command::new("tar").arg("cf").arg(&tar).arg("-C").arg(dir.path()).arg("tree").status().unwrap();
    assert!(made.success());
    let out = dir.path().join("report.md");
    let run = Command::new(env!("CARGO_BIN_EXE_larder-bench"))
        .args(["--rounds", "1", "--image-mib", "160", "--stream-mib", "16", "--targets", "kernel,ceiling"])
        .arg("--dir")
        .arg(dir.path())
        .arg("--tar")
        .arg(&tar)
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let text = std::fs::read_to_string(&out).unwrap();
    for row in ["| unpack | kernel |", "| rm -rf | ceiling |", "| read 1 file | kernel |"] {
        assert!(text.contains(row), "{row} in\n{text}");
    }
    assert!(std::fs::read_to_string(out.with_extension("svg")).unwrap().starts_with("<svg"));
    assert!(!dir.path().join("larder-bench.img").exists(), "nothing is left behind");
}
