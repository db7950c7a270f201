//! bonnie++: a large file, then many small ones, with less memory than both.
//!
//! The file is twice as large as the memory that program and file system share, so both have to
//! wait for memory. The report is a line of values between commas: first the rates, then the
//! longest calls.

use crate::fsync::Said;
use crate::units::Mib;
use anyhow::{Context, Result, ensure};
use std::borrow::Cow;
use std::path::Path;
use std::process::Command;

/// A step, the field of its rate, and that of its longest call.
const FIELDS: [(&str, usize, usize); 7] = [
    ("bonnie++: write", 11, 39),
    ("bonnie++: rewrite", 13, 40),
    ("bonnie++: read", 17, 42),
    ("bonnie++: create", 26, 44),
    ("bonnie++: delete", 30, 46),
    ("bonnie++: random create", 32, 47),
    ("bonnie++: random delete", 36, 49),
];

/// Runs it, as a process that `command` starts, with a file of twice `mib` MiB and 32,768 small
/// ones.
pub(crate) fn bonnie(
    mut command: Command,
    root: &Path,
    mib: Mib,
) -> Result<Vec<(Cow<'static, str>, Said)>> {
    let out = command
        .args(["-q", "-f", "-u", "root", "-m", "larder", "-n", "32:8192:0:32"])
        .args(["-r", &mib.to_string(), "-s", &format!("{}m", mib.doubled()), "-d"])
        .arg(root)
        .output()
        .context("running bonnie++")?;
    let text = String::from_utf8_lossy(&out.stdout);
    ensure!(
        out.status.success(),
        "bonnie++: {}{}",
        text.trim(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    said(&text).with_context(|| format!("bonnie++'s report: {text}"))
}

/// The steps in the report. A step that was over too soon to be measured is left out.
fn said(text: &str) -> Result<Vec<(Cow<'static, str>, Said)>> {
    let line =
        text.lines().rev().find(|l| l.split(',').count() >= 50).context("no line of values")?;
    let fields: Vec<&str> = line.split(',').collect();
    let steps = FIELDS.iter().filter_map(|(step, rate, latency)| {
        let rate: f64 = fields[*rate].parse().ok().filter(|rate| *rate > 0.0)?;
        let latency_ms = milliseconds(fields[*latency])?;
        // For ten thousand files, or for a GiB: rates of bytes are in KiB.
        let of_files = step.ends_with("create") || step.ends_with("delete");
        let amount = if of_files { 1e4 } else { 1024.0 * 1024.0 };
        Some(((*step).into(), Said { seconds: amount / rate, fsyncs: 0, latency_ms }))
    });
    let steps: Vec<_> = steps.collect();
    ensure!(!steps.is_empty(), "nothing was measured");
    Ok(steps)
}

fn milliseconds(text: &str) -> Option<f64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
    let number: f64 = number.parse().ok()?;
    match unit {
        "us" => Some(number / 1e3),
        "ms" => Some(number),
        "s" => Some(number * 1e3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says() {
        let mut fields = vec![""; 50];
        for (at, value) in [
            (11, "204800"),
            (39, "1500us"),
            (13, "+++++"),
            (40, "12ms"),
            (26, "20000"),
            (44, "3s"),
            (32, "5000"),
            (47, "7us"),
        ] {
            fields[at] = value;
        }
        let steps = said(&format!("a line before\n{}\n", fields.join(","))).unwrap();
        let of = |name: &str| steps.iter().find(|(step, _)| *step == name).map(|(_, said)| *said);
        let write = of("bonnie++: write").unwrap();
        assert!((write.seconds - 5.12).abs() < 1e-9 && (write.latency_ms - 1.5).abs() < 1e-9);
        assert!(of("bonnie++: rewrite").is_none(), "too fast to be measured");
        let create = of("bonnie++: create").unwrap();
        assert!((create.seconds - 0.5).abs() < 1e-9 && (create.latency_ms - 3000.0).abs() < 1e-9);
        assert!((of("bonnie++: random create").unwrap().seconds - 2.0).abs() < 1e-9);
        assert!(said("no values\n").is_err());
    }
}
