//! `larder inspect block-groups`: how full the block groups are.

use super::common::{Common, devices};
use crate::print;
use crate::raw::groups::{Group, read_groups};
use crate::raw::{session, type_text};
use crate::size::{self, Share};
use serde_json::{Value, json};

pub(super) fn run(common: &Common) -> anyhow::Result<()> {
    session(devices(&common.image, &common.how)?, |s| {
        let groups = read_groups(s);
        let map = s.reader.volume().map();
        if common.how.json {
            let value = |g: &Group| {
                let stripes: Vec<Value> = map.chunk_at(g.start).map_or(Vec::new(), |c| {
                    c.stripes
                        .iter()
                        .map(|s| json!({ "devid": s.device.0, "offset": s.at.0 }))
                        .collect()
                });
                json!({
                    "start": g.start.0,
                    "length": g.length,
                    "type": type_text(g.flags.bits()),
                    "used": g.used,
                    "stripes": stripes,
                })
            };
            return print::json(&groups.iter().map(value).collect::<Vec<_>>());
        }
        print::line(&format!("{:>16} {:>12} {:>12} {:>6}  type", "start", "length", "used", "%"))?;
        for g in &groups {
            let (length, used) = (size::human(g.length), size::human(g.used));
            let kind = type_text(g.flags.bits());
            let full = Share { part: g.used, whole: g.length }.percent();
            print::line(&format!("{:>16} {length:>12} {used:>12} {full:>6.1}  {kind}", g.start.0))?;
        }
        let (length, used): (u64, u64) = groups
            .iter()
            .fold((0, 0), |(l, u), g| (l.saturating_add(g.length), u.saturating_add(g.used)));
        print::line(&format!(
            "{} block groups, {} of {} used ({:.1} %)",
            groups.len(),
            size::human(used),
            size::human(length),
            Share { part: used, whole: length }.percent()
        ))
    })
}
