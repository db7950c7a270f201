//! `larder inspect log`: what was fsynced after the last commit, and waits to be replayed.

use super::common::{Common, devices};
use super::trees;
use crate::print;
use crate::raw::{log, with_reader};
use serde_json::{Value, json};
use std::ops::ControlFlow;

pub(super) fn run(common: &Common) -> anyhow::Result<()> {
    with_reader(devices(&common.image, &common.how)?, |reader, problems| {
        let logs = log::trees(reader, problems);
        let mut values = Vec::new();
        if logs.is_empty() && !common.how.json {
            return print::line("there is no log: everything that was synced is committed");
        }
        for (subvol, tree) in &logs {
            let (mut nodes, mut result) = (Vec::<Value>::new(), Ok(()));
            if !common.how.json {
                print::line(&format!("log of subvolume {subvol}"))?;
            }
            let gaps = tree.nodes(reader, &mut |view| {
                if common.how.json {
                    nodes.push(trees::node_value(view));
                } else {
                    result = print::line(trees::node_text(view).trim_end());
                }
                if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            problems.gaps(gaps);
            result?;
            values.push(json!({ "subvolume": subvol.0, "nodes": nodes }));
        }
        if common.how.json { print::json(&values) } else { Ok(()) }
    })
}
