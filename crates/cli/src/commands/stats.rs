//! `larder stats`: what a mount's daemon has done.

use crate::commands::sync::mounted;
use crate::print;
use anyhow::Context;
use larder_fuse::control;
use serde_json::Value;
use std::path::PathBuf;

/// Show what the daemon of a mount has done: operations, commits, flushes, bytes, lock hold times, cache, memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  larder stats mnt\n  larder stats --json mnt")]
pub(crate) struct Args {
    /// Directory on the mount
    directory: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let text = mounted(&args.directory, control::stats)?;
    let value: Value = serde_json::from_str(&text).context("the daemon's answer is not JSON")?;
    if args.json {
        return print::json(&value);
    }
    let mut lines = Vec::new();
    flatten("", &value, &mut lines);
    let width = lines.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
    for (name, value) in lines {
        print::line(&format!("{name:<width$}  {value}"))?;
    }
    Ok(())
}

/// Nested values as lines with dotted names.
fn flatten(prefix: &str, value: &Value, out: &mut Vec<(String, String)>) {
    let name = |n: &str| if prefix.is_empty() { n.to_owned() } else { format!("{prefix}.{n}") };
    match value {
        Value::Object(o) => o.iter().for_each(|(n, v)| flatten(&name(n), v, out)),
        Value::Array(a) => a.iter().enumerate().for_each(|(i, v)| flatten(&name(&i.to_string()), v, out)),
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
