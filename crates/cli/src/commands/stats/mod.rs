//! `larder stats`: what a mount's daemon has done.
//!
//! People get a summary that fits a screen ([`summary`]), or with `--all` every counter by name;
//! programs get JSON, whose names stay.

mod summary;

use crate::mounted::mounted;
use crate::print;
use anyhow::Context;
use larder_fuse::control;
use serde_json::Value;
use std::path::PathBuf;

/// Show what the daemon of a mount has done: requests, fsyncs, commits, cache, memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder stats mnt
  larder stats --all mnt | grep device
  larder stats --json mnt

Rates are averages since the mount began. --all has what each FUSE request
came to, lock hold times, reclaiming of space, reasons for commits, and more.")]
pub(crate) struct Args {
    /// Show every counter instead of a summary
    #[arg(short, long)]
    all: bool,
    /// Print JSON: every counter
    #[arg(long, conflicts_with = "all")]
    json: bool,
    /// Directory on the mount
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let text = mounted(&args.directory, control::stats)?;
    let value: Value = serde_json::from_str(&text).context("the daemon's answer is not JSON")?;
    if args.json {
        return print::json(&value);
    }
    if !args.all {
        return summary::lines(&value).iter().try_for_each(|line| print::line(line));
    }
    let mut lines = Vec::new();
    flatten("", &value, &mut lines);
    let width = lines.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
    for (name, value) in lines {
        print::line(&format!("{name:<width$}  {}", print::name(value.as_bytes())))?;
    }
    Ok(())
}

/// Nested values as lines with dotted names.
fn flatten(prefix: &str, value: &Value, out: &mut Vec<(String, String)>) {
    let name = |n: &str| if prefix.is_empty() { n.to_owned() } else { format!("{prefix}.{n}") };
    match value {
        Value::Object(o) => o.iter().for_each(|(n, v)| flatten(&name(n), v, out)),
        Value::Array(a) => {
            a.iter().enumerate().for_each(|(i, v)| flatten(&name(&i.to_string()), v, out))
        }
        Value::String(s) => out.push((prefix.to_owned(), s.clone())),
        other => out.push((prefix.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_values_become_lines() {
        let mut out = Vec::new();
        flatten("", &serde_json::json!({ "a": { "b": 1, "c": ["x", true] }, "d": null }), &mut out);
        let text: Vec<String> = out.iter().map(|(n, v)| format!("{n}={v}")).collect();
        assert_eq!(text, ["a.b=1", "a.c.0=x", "a.c.1=true", "d=null"]);
    }
}
