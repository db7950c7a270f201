//! `btrfs subvolume list`: which subvolumes, which fields of them, in which order.

use super::mounted::{id_of, subvolumes_of};
use super::{Done, Failed, elsewhere, must_be_directory};
use crate::print;
use serde_json::Value;
use std::cmp::Ordering;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Options {
    /// Only subvolumes below PATH
    #[arg(short = 'o')]
    below: bool,
    /// Mark those that are not directly in the subvolume of PATH
    #[arg(short = 'a')]
    all: bool,
    /// Show the parent's id
    #[arg(short = 'p')]
    parent: bool,
    /// Show the transaction that made it
    #[arg(short = 'c')]
    made_in: bool,
    /// Show the transaction of the last change
    #[arg(short = 'g')]
    generation: bool,
    /// Show the UUID
    #[arg(short = 'u')]
    uuid: bool,
    /// Show the UUID of the subvolume that it is a snapshot of
    #[arg(short = 'q')]
    parent_uuid: bool,
    /// Show the UUID of the subvolume that it was received from
    #[arg(short = 'R')]
    received_uuid: bool,
    /// Only snapshots
    #[arg(short = 's')]
    snapshots: bool,
    /// Only read-only ones
    #[arg(short = 'r')]
    read_only: bool,
    /// Deleted ones (not supported)
    #[arg(short = 'd')]
    deleted: bool,
    /// Print a table
    #[arg(short = 't')]
    table: bool,
    /// Only with this transaction of the last change; +N: or later, -N: or earlier
    #[arg(short = 'G', value_name = "[+|-]N", allow_hyphen_values = true)]
    with_generation: Option<String>,
    /// Only with this transaction that made it; +N: or later, -N: or earlier
    #[arg(short = 'C', value_name = "[+|-]N", allow_hyphen_values = true)]
    with_made_in: Option<String>,
    /// gen, ogen, rootid, path, each with - in front for the reverse
    #[arg(long, value_name = "KEYS", allow_hyphen_values = true)]
    sort: Option<String>,
    path: PathBuf,
}

/// A field: its name, and the value of a subvolume.
type Field = (&'static str, fn(&Value) -> String);

pub(super) fn run(options: &Options) -> Done {
    if options.deleted {
        return elsewhere::refuse("subvolume list -d");
    }
    must_be_directory(&options.path)?;
    let (mut all, _) = subvolumes_of(&options.path)?;
    let here = id_of(&options.path)?;
    let generation = bound(options.with_generation.as_deref())?;
    let made_in = bound(options.with_made_in.as_deref())?;
    all.retain(|s| {
        s["id"] != 5
            && (!options.below || s["parent_id"] == here)
            && (!options.snapshots || s["parent_uuid"].is_string())
            && (!options.read_only || s["read_only"] == true)
            && generation.as_ref().is_none_or(|bound| bound.has(&s["generation"]))
            && made_in.as_ref().is_none_or(|bound| bound.has(&s["created_in"]))
    });
    sort(&mut all, options.sort.as_deref().unwrap_or("rootid"))?;
    let fields = fields(options);
    if options.table {
        head(&fields)?;
    }
    for s in &all {
        print::line(&line(options, &fields, s, here))?;
    }
    Ok(())
}

fn fields(options: &Options) -> Vec<Field> {
    let number = |on: bool, field: Field| on.then_some(field);
    let made_in = options.made_in || options.snapshots || options.with_made_in.is_some();
    [
        Some::<Field>(("ID", |s| s["id"].to_string())),
        Some(("gen", |s| s["generation"].to_string())),
        number(made_in, ("cgen", |s| s["created_in"].to_string())),
        number(options.parent, ("parent", |s| s["parent_id"].to_string())),
        Some(("top level", |s| s["parent_id"].to_string())),
        number(
            options.snapshots,
            ("otime", |s| s["created"].as_i64().map_or_else(|| "-".to_owned(), print::time)),
        ),
        number(options.parent_uuid, ("parent_uuid", |s| uuid(&s["parent_uuid"]))),
        number(options.received_uuid, ("received_uuid", |s| uuid(&s["received_uuid"]))),
        number(options.uuid, ("uuid", |s| uuid(&s["uuid"]))),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// As wide as a UUID also where there is none.
fn uuid(value: &Value) -> String {
    format!("{:<36}", value.as_str().unwrap_or("-"))
}

fn head(fields: &[Field]) -> Done {
    let names = || fields.iter().map(|(name, _)| *name).chain(["path"]);
    let titles: String = names().map(|name| format!("{name}\t")).collect();
    let rules: String = names().map(|name| format!("{}\t", "-".repeat(name.len()))).collect();
    Ok(print::line(&format!("{titles}\n{rules}"))?)
}

fn line(options: &Options, fields: &[Field], s: &Value, here: u64) -> String {
    let elsewhere = options.all && s["parent_id"] != here;
    let path = print::name(s["path"].as_str().unwrap_or_default().as_bytes());
    let path = if elsewhere { format!("<FS_TREE>/{path}") } else { path };
    if !options.table {
        let shown: String =
            fields.iter().map(|(name, value)| format!("{name} {} ", value(s))).collect();
        return format!("{shown}path {path}");
    }
    // The title of this column is wider than a tab.
    let tabs = |name: &str| if name == "top level" { "\t\t" } else { "\t" };
    let shown: String =
        fields.iter().map(|(name, value)| format!("{}{}", value(s), tabs(name))).collect();
    shown + &path
}

/// A transaction, or all from it on, or all up to it.
struct Bound {
    order: Option<Ordering>,
    transaction: u64,
}

impl Bound {
    fn has(&self, value: &Value) -> bool {
        let order = value.as_u64().unwrap_or_default().cmp(&self.transaction);
        order == Ordering::Equal || Some(order) == self.order
    }
}

fn bound(text: Option<&str>) -> Result<Option<Bound>, Failed> {
    let Some(text) = text else { return Ok(None) };
    let (order, digits) = match text.split_at_checked(1) {
        Some(("+", digits)) => (Some(Ordering::Greater), digits),
        Some(("-", digits)) => (Some(Ordering::Less), digits),
        _ => (None, text),
    };
    match digits.parse() {
        Ok(transaction) => Ok(Some(Bound { order, transaction })),
        Err(_) => Err(Failed::because(format!("{text} is not the number of a transaction"))),
    }
}

fn sort(all: &mut [Value], keys: &str) -> Done {
    // The last key counts least, so it goes first.
    for key in keys.split(',').rev() {
        let (reverse, name) = match key.split_at_checked(1) {
            Some(("-", name)) => (true, name),
            Some(("+", name)) => (false, name),
            _ => (false, key),
        };
        let by: fn(&Value, &Value) -> Ordering = match name {
            "gen" => |a, b| a["generation"].as_u64().cmp(&b["generation"].as_u64()),
            "ogen" => |a, b| a["created_in"].as_u64().cmp(&b["created_in"].as_u64()),
            "rootid" => |a, b| a["id"].as_u64().cmp(&b["id"].as_u64()),
            "path" => |a, b| a["path"].as_str().cmp(&b["path"].as_str()),
            _ => return Err(Failed::because(format!("cannot sort by {name}"))),
        };
        all.sort_by(|a, b| if reverse { by(b, a) } else { by(a, b) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bounds_have_a_side() {
        let has = |text, n: u64| bound(Some(text)).unwrap().unwrap().has(&json!(n));
        assert!(has("7", 7) && !has("7", 8) && !has("7", 6));
        assert!(has("+7", 7) && has("+7", 8) && !has("+7", 6));
        assert!(has("-7", 7) && !has("-7", 8) && has("-7", 6));
        assert!(bound(Some("x")).is_err() && bound(Some("")).is_err());
    }

    #[test]
    fn the_first_key_counts_most() {
        let mut all: Vec<Value> = [(1, 3), (2, 5), (3, 3)]
            .map(|(id, generation)| json!({"id": id, "generation": generation}))
            .into();
        sort(&mut all, "-gen,rootid").unwrap();
        assert_eq!(all.iter().map(|s| s["id"].clone()).collect::<Vec<_>>(), [2, 1, 3]);
        assert!(sort(&mut all, "size").is_err());
    }
}
