//! What there is, as a table for people and as JSON.

use super::held::Told;
use crate::print;
use larder_backup::{Name, Plan};
use serde_json::json;

/// What both sides have after a run, or would have.
#[derive(Debug)]
pub(super) struct Report {
    /// The snapshot of this run.
    pub(super) made: Name,
    /// The oldest first.
    pub(super) rows: Vec<Row>,
    pub(super) dry_run: bool,
}

/// A snapshot.
#[derive(Debug)]
pub(super) struct Row {
    name: String,
    time: i64,
    source: &'static str,
    target: &'static str,
    kept: Vec<&'static str>,
}

impl Row {
    pub(super) fn new(row: &larder_backup::Row, prefix: &[u8], plan: &Plan, made: &Name) -> Self {
        let source = match row.at_source {
            false => "-",
            true if plan.prune_source.contains(&row.id) => "deleted",
            true if row.time == made.time => "new",
            true => "yes",
        };
        let target = match row.at_target {
            true if plan.prune_target.contains(&row.id) => "deleted",
            true => "yes",
            false if plan.send.iter().any(|send| send.id == row.id) => "sent",
            false => "-",
        };
        let newest = row.why.newest.then_some("newest");
        let parent = row.is_parent.then_some("parent");
        let rules = row.why.rules.iter().map(|rule| rule.name());
        Self {
            name: print::name(&Name { prefix: prefix.to_vec(), time: row.time }.bytes()),
            time: row.time,
            source,
            target,
            kept: newest.into_iter().chain(parent).chain(rules).collect(),
        }
    }
}

impl Report {
    pub(super) fn print(&self, as_json: bool) -> anyhow::Result<()> {
        if as_json {
            return print::json(&self.describe());
        }
        let cells = self.rows.iter().map(|row| {
            let kept = if row.kept.is_empty() { "-".to_owned() } else { row.kept.join(", ") };
            [row.name.clone(), row.source.to_owned(), row.target.to_owned(), kept]
        });
        columns(["SNAPSHOT", "SOURCE", "TARGET", "KEPT AS"], cells.collect())?;
        match self.dry_run {
            true => print::line("Nothing was done: this is what a run would lead to."),
            false => Ok(()),
        }
    }

    fn describe(&self) -> serde_json::Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "name": row.name,
                "time": row.time,
                "source": row.source,
                "target": row.target,
                "kept_as": row.kept,
            })
        });
        json!({
            "made": print::name(&self.made.bytes()),
            "dry_run": self.dry_run,
            "snapshots": rows.collect::<Vec<_>>(),
        })
    }
}

/// What one directory has.
pub(super) fn list(mut all: Vec<Told>, as_json: bool) -> anyhow::Result<()> {
    all.sort_by(|a, b| (a.time, &a.name).cmp(&(b.time, &b.name)));
    if as_json {
        return print::json(&all);
    }
    let cells = all.into_iter().map(|told| [told.name, print::time(told.time), told.state]);
    columns(["SNAPSHOT", "MADE (UTC)", "STATE"], cells.collect())
}

fn columns<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> anyhow::Result<()> {
    let head = head.map(str::to_owned);
    let width = |column: usize| {
        let all = rows.iter().chain([&head]);
        all.map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in [&head].into_iter().chain(&rows) {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        print::line(cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}
