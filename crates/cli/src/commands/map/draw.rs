//! Shapes, tooltips, legends: cells become an SVG.
//!
//! The picture must be readable on screen and on paper, without scripts and without anything from
//! elsewhere. Runs of cells that look alike and say the same are one shape, which keeps pictures of
//! empty devices small.

use super::layout::{Grid, Layout};
use super::paint::{self, Colour, Letters, Line, Paint, STEPS};
use super::space::{Cell, Kind, Space, Whole};
use crate::raw::type_text;
use crate::size;
use crate::size::Share;
use std::fmt::Write as _;

/// Steps of age.
const AGES: usize = paint::AGES.len();
/// Side of a panel on the picture.
/// (a multiple of the usual numbers of cells on a side, so that cells are whole pixels).
const PANEL: f64 = 512.0;
const MARGIN: f64 = 36.0;
const GAP: f64 = 48.0;
const TOP: f64 = 118.0;
const WIDTH: f64 = 2.0 * MARGIN + 2.0 * PANEL + GAP;

/// Escapes text for XML.
fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // Control characters cannot stand in XML in any form.
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// `3.52 GiB`.
fn human(bytes: u64) -> String {
    let text = size::human(bytes);
    let unit = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    format!("{} {}", &text[..unit], &text[unit..])
}

fn share(share: Share) -> String {
    match share.percent() {
        p if p > 0.0 && p < 0.1 => "under 0.1 %".into(),
        p if p >= 9.95 => format!("{p:.0} %"),
        p => format!("{p:.1} %"),
    }
}

/// The kind that a cell shows. System space is tiny and would never have most of a large cell, so
/// it always shows.
fn shown(cell: &Cell, bytes: u64) -> Option<Kind> {
    if cell.allocated[Kind::System as usize] > 0 {
        return Some(Kind::System);
    }
    // In mixed block groups nodes are used where the free space counts as data.
    let weight = |k: Kind| cell.used[k as usize].max(cell.allocated[k as usize]);
    let most = [Kind::Data, Kind::Metadata].into_iter().max_by_key(|k| weight(*k))?;
    (cell.allocated().saturating_mul(2) >= bytes && weight(most) > 0).then_some(most)
}

/// Step of fullness; only what is empty is 0, only what is nearly full is the last.
fn step(cell: &Cell) -> usize {
    match (Share { part: cell.used(), whole: cell.allocated() }).percent() {
        p if p <= 0.0 => 0,
        p if p < 35.0 => 1,
        p if p < 65.0 => 2,
        p if p < 95.0 => 3,
        _ => STEPS - 1,
    }
}

/// Upper ends of the age steps, so that each has about as many bytes.
fn age_ends(space: &Space) -> Vec<u64> {
    let mut all: Vec<(u64, u64)> =
        space.cells.iter().filter_map(|c| Some((c.mean_generation()?, c.used()))).collect();
    all.sort_unstable();
    let total: u128 = all.iter().map(|(_, n)| u128::from(*n)).sum();
    let mut ends = Vec::new();
    let mut sum = 0u128;
    for (generation, n) in all {
        sum += u128::from(n);
        // The step is full: whatever comes with the same generation still belongs to it.
        if sum * AGES as u128 >= total * (ends.len() as u128 + 1)
            && ends.last() != Some(&generation)
        {
            ends.push(generation);
        }
    }
    ends.truncate(AGES);
    ends
}

fn age_step(ends: &[u64], generation: u64) -> usize {
    ends.partition_point(|e| *e < generation).min(ends.len().saturating_sub(1))
}

/// Which of the age colours a step has: few steps are spread over the whole scale.
fn age_colour(step: usize, steps: usize) -> usize {
    if steps <= 1 { AGES / 2 } else { step * (AGES - 1) / (steps - 1) }
}

/// What a run of cells has in common.
#[derive(Clone, PartialEq, Eq)]
struct Look {
    paint: Paint,
    group: Option<u32>,
}

/// Draws cells as runs of the same look, each with its tooltip.
fn panel(
    out: &mut String,
    whole: &Whole,
    space: &Space,
    grid: &Grid,
    look: impl Fn(&Cell, u64) -> Look,
) {
    let count = space.cells.len();
    let mut from = 0;
    let bytes = |i: usize| space.start(i + 1) - space.start(i);
    while from < count {
        let first = look(&space.cells[from], bytes(from));
        let mut to = from + 1;
        while to < count && look(&space.cells[to], bytes(to)) == first {
            to += 1;
        }
        let _ = write!(out, "<path{} d=\"", first.paint);
        // Neighbours on a line are one rectangle.
        let mut places: Vec<(u32, u32)> = (from..to)
            .map(|i| grid.place(u32::try_from(i).unwrap_or(0)))
            .map(|(x, y)| (y, x))
            .collect();
        places.sort_unstable();
        let mut i = 0;
        while i < places.len() {
            let (y, x) = places[i];
            let mut n = 1;
            while i + n < places.len() && places[i + n] == (y, x + u32::try_from(n).unwrap_or(0)) {
                n += 1;
            }
            let _ = write!(out, "M{x} {y}h{n}v1h-{n}z");
            i += n;
        }
        let _ = writeln!(out, "\"><title>{}</title></path>", xml(&tip(whole, space, from, to)));
        from = to;
    }
}

/// White lines that make cells out of areas, where cells are large enough.
fn tiles(out: &mut String, grid: &Grid) {
    const SMALLEST: f64 = 6.0;
    let side = grid.side;
    if PANEL / f64::from(side) < SMALLEST {
        return;
    }
    let line = Line { colour: paint::GROUND, width: f64::from(side) / PANEL, opacity: "1" };
    let _ = write!(out, "<path{line} d=\"");
    for i in 1..side {
        let _ = write!(out, "M0 {i}h{side}M{i} 0v{side}");
    }
    out.push_str("\"/>\n");
}

/// Lines between cells of different block groups, as far as that helps.
fn borders(out: &mut String, whole: &Whole, space: &Space, grid: &Grid) {
    let side = grid.side as usize;
    if whole.groups.is_empty() || whole.groups.len() * 12 > space.cells.len() {
        return;
    }
    let mut at = vec![None; space.cells.len()];
    for (i, cell) in space.cells.iter().enumerate() {
        let (x, y) = grid.place(u32::try_from(i).unwrap_or(0));
        at[y as usize * side + x as usize] = cell.group.map(|g| g.0);
    }
    let line =
        Line { colour: paint::INK, width: f64::from(grid.side) / PANEL * 1.2, opacity: ".7" };
    let _ = write!(out, "<path{line} d=\"");
    for y in 0..side {
        for x in 0..side {
            let here = at[y * side + x];
            if x + 1 < side && at[y * side + x + 1] != here {
                let _ = write!(out, "M{} {y}v1", x + 1);
            }
            if y + 1 < side && at[(y + 1) * side + x] != here {
                let _ = write!(out, "M{x} {}h1", y + 1);
            }
        }
    }
    out.push_str("\"/>\n");
}

fn range_text(space: &Space, from: usize, to: usize) -> String {
    let (a, b) = (space.start(from), space.start(to));
    format!("{} – {} on the device ({})", human(a), human(b), human(b - a))
}

fn group_text(whole: &Whole, group: Option<u32>) -> Option<String> {
    let g = whole.groups.get(group? as usize)?;
    let full = share(Share { part: g.used, whole: g.length });
    let kind = type_text(g.flags.bits());
    Some(format!("Block group at {}: {kind}, {}, {full} used", g.start, human(g.length)))
}

/// Facts of a run of cells.
fn tip(whole: &Whole, space: &Space, from: usize, to: usize) -> String {
    let cells = &space.cells[from..to];
    let mut lines = vec![range_text(space, from, to)];
    for kind in Kind::ALL {
        let used: u64 = cells.iter().map(|c| c.used[kind as usize]).sum();
        let allocated: u64 = cells.iter().map(|c| c.allocated[kind as usize]).sum();
        if used > 0 || allocated > 0 {
            let whole = allocated.max(used);
            lines.push(format!(
                "{}: {} used of {} ({})",
                kind.name(),
                human(used),
                human(whole),
                share(Share { part: used, whole })
            ));
        }
    }
    let allocated: u64 = cells.iter().map(Cell::allocated).sum();
    let free = (space.start(to) - space.start(from)).saturating_sub(allocated);
    if free > 0 {
        lines.push(format!("Unallocated: {}", human(free)));
    }
    let group = cells.first().and_then(|c| c.group).map(|g| g.0);
    lines.extend(group_text(whole, group));
    let ages =
        cells.iter().filter_map(|c| c.generations).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    if let Some((oldest, newest)) = ages {
        lines.push(if oldest == newest {
            format!("Written in transaction {oldest}")
        } else {
            format!("Written in transactions {oldest} to {newest}")
        });
    }
    lines.join("\n")
}

fn text(out: &mut String, x: f64, y: f64, letters: Letters, content: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\"{letters}>{}</text>", xml(content));
}

/// A swatch of the legend whose text stands at `y`.
fn swatch(out: &mut String, x: f64, y: f64, width: u32, paint: Paint) {
    let y = y - 11.0;
    let _ =
        writeln!(out, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width}\" height=\"13\"{paint}/>");
}

/// Colour swatches of a kind, from empty to full.
fn ramp(out: &mut String, x: f64, y: f64, colour: Colour) {
    for i in 0..STEPS {
        swatch(out, x + i as f64 * 14.0, y, 13, Paint::at_step(colour, i));
    }
}

const KINDS: [(Kind, Colour); 3] =
    [(Kind::Data, paint::DATA), (Kind::Metadata, paint::METADATA), (Kind::System, paint::SYSTEM)];

fn legend(out: &mut String, space: &Space, y: f64) -> f64 {
    let mut at = y;
    let right = MARGIN + PANEL;
    text(out, MARGIN, at, Letters::SOFT, "empty – full");
    text(out, right - 170.0, at, Letters::SOFT.before(), "used");
    text(out, right - 62.0, at, Letters::SOFT.before(), "allocated");
    text(out, right, at, Letters::SOFT.before(), "full");
    for (kind, colour) in KINDS {
        at += 24.0;
        let (used, allocated) = (space.used[kind as usize], space.allocated[kind as usize]);
        ramp(out, MARGIN, at, colour);
        text(out, MARGIN + 82.0, at, Letters::PLAIN, kind.name());
        text(out, right - 170.0, at, Letters::PLAIN.before(), &human(used));
        text(out, right - 62.0, at, Letters::PLAIN.before(), &human(allocated));
        if allocated > 0 {
            text(
                out,
                right,
                at,
                Letters::PLAIN.before(),
                &share(Share { part: used, whole: allocated }),
            );
        }
    }
    at += 24.0;
    let free = space.size.saturating_sub(space.allocated.iter().sum());
    swatch(out, MARGIN, at, 69, Paint::full(paint::UNALLOCATED));
    text(out, MARGIN + 82.0, at, Letters::PLAIN, "Unallocated");
    text(out, right - 62.0, at, Letters::PLAIN.before(), &human(free));
    text(out, right, at, Letters::PLAIN.before(), &share(Share { part: free, whole: space.size }));
    at
}

fn age_legend(out: &mut String, space: &Space, ends: &[u64], y: f64) -> f64 {
    let left = MARGIN + PANEL + GAP;
    let mut bytes = vec![0u64; ends.len()];
    let mut from = vec![u64::MAX; ends.len()];
    for cell in &space.cells {
        if let Some(g) = cell.mean_generation() {
            let i = age_step(ends, g);
            bytes[i] = bytes[i].saturating_add(cell.used());
            from[i] = from[i].min(g);
        }
    }
    text(out, left, y, Letters::SOFT, "mean transaction of a cell, oldest first");
    text(out, left + PANEL, y, Letters::SOFT.before(), "used");
    let mut at = y;
    for i in 0..ends.len() {
        at += 24.0;
        let colour = age_colour(i, ends.len());
        swatch(out, left, at, 41, Paint::full(paint::AGES[colour]));
        let range = if from[i] == ends[i] {
            format!("{}", ends[i])
        } else {
            format!("{} – {}", from[i], ends[i])
        };
        text(out, left + 54.0, at, Letters::PLAIN, &range);
        text(out, left + PANEL, at, Letters::PLAIN.before(), &human(bytes[i]));
    }
    at += 24.0;
    let (allocated, used): (u64, u64) = (space.allocated.iter().sum(), space.used.iter().sum());
    swatch(out, left, at, 41, Paint::full(paint::FREE));
    text(out, left + 54.0, at, Letters::PLAIN, "free in block groups");
    text(out, left + PANEL, at, Letters::PLAIN.before(), &human(allocated.saturating_sub(used)));
    at
}

/// How many block groups are how full: where a balance would gain something.
fn histogram(out: &mut String, whole: &Whole, y: f64) -> f64 {
    const BINS: usize = 10;
    const HEIGHT: f64 = 54.0;
    let width = (WIDTH - 2.0 * MARGIN - 2.0 * GAP) / 3.0;
    text(out, MARGIN, y, Letters::HEADING, "Block groups by how full they are");
    for (n, (kind, colour)) in KINDS.into_iter().enumerate() {
        let left = MARGIN + n as f64 * (width + GAP);
        let mut bins = [0usize; BINS];
        for g in whole.groups.iter().filter(|g| Kind::of_group(g.flags) == kind) {
            let tenth = u128::from(g.used) * BINS as u128 / u128::from(g.length.max(1));
            bins[usize::try_from(tenth).unwrap_or(BINS).min(BINS - 1)] += 1;
        }
        let most = bins.iter().copied().max().unwrap_or(0).max(1);
        let base = y + 22.0 + HEIGHT;
        for (i, count) in bins.iter().enumerate().filter(|(_, c)| **c > 0) {
            let h = (*count as f64 / most as f64 * HEIGHT).max(2.0);
            let x = left + i as f64 * width / BINS as f64;
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{h:.1}\" \
                 fill=\"{colour}\"><title>{count} {} block groups are {} to {} % \
                 full</title></rect>",
                x + 1.0,
                base - h,
                width / BINS as f64 - 2.0,
                kind.name().to_lowercase(),
                i * 10,
                (i + 1) * 10
            );
        }
        let line = Line { colour: paint::SOFT, width: 1.0, opacity: ".5" };
        let _ = writeln!(out, "<path{line} d=\"M{left:.1} {base:.1}h{width:.1}\"/>");
        text(out, left, base + 16.0, Letters::SOFT, "0 %");
        text(out, left + width, base + 16.0, Letters::SOFT.before(), "100 %");
        let all: usize = bins.iter().sum();
        let label = format!("{all} {}", kind.name().to_lowercase());
        text(out, left + width / 2.0, base + 16.0, Letters::SOFT.around(), &label);
    }
    y + 22.0 + HEIGHT + 16.0
}

/// The devices in words.
fn facts(whole: &Whole) -> String {
    let size: u64 = whole.devices.iter().map(|space| space.size).sum();
    let used: u64 = whole.devices.iter().flat_map(|space| space.used).sum();
    let on = match whole.devices.len() {
        1 => "the device".to_owned(),
        n => format!("{n} devices"),
    };
    let mut facts = format!(
        "{} – {} in use on {on} ({}), transaction {}",
        human(size),
        human(used),
        share(Share { part: used, whole: size }),
        whole.generation
    );
    if !whole.missing.is_empty() {
        let missing: Vec<String> = whole.missing.iter().map(ToString::to_string).collect();
        let _ = write!(facts, "; missing: device {}", missing.join(", "));
    }
    facts
}

/// Which device a section shows.
fn device_text(space: &Space) -> String {
    let used: u64 = space.used.iter().sum();
    format!(
        "Device {}: {} – {}, {} in use ({}); a cell is {}",
        space.id,
        space.name,
        human(space.size),
        human(used),
        share(Share { part: used, whole: space.size }),
        human(space.size / space.cells.len().max(1) as u64)
    )
}

/// The two panels of a device, with their upper edge at `top`, and their legends. Where they end.
fn section(out: &mut String, whole: &Whole, space: &Space, grid: &Grid, top: f64) -> f64 {
    let right = MARGIN + PANEL + GAP;
    text(out, MARGIN, top - 14.0, Letters::HEADING, "What lies where");
    text(out, right, top - 14.0, Letters::HEADING, "How old it is");
    let way = match grid.layout {
        Layout::Hilbert => "starts top left, ends top right",
        Layout::Rows => "line by line",
    };
    text(out, MARGIN + PANEL, top - 14.0, Letters::SOFT.before(), way);
    let scale = PANEL / f64::from(grid.side);
    let open = |out: &mut String, x: f64| {
        let _ = writeln!(
            out,
            "<g class=\"c\" transform=\"translate({x:.1} {top:.1}) scale({scale:.5})\" \
             shape-rendering=\"crispEdges\">"
        );
    };
    open(out, MARGIN);
    panel(out, whole, space, grid, fullness);
    tiles(out, grid);
    borders(out, whole, space, grid);
    out.push_str("</g>\n");
    open(out, right);
    let ends = age_ends(space);
    panel(out, whole, space, grid, |cell, _| age(cell, &ends));
    tiles(out, grid);
    out.push_str("</g>\n");
    let y = top + PANEL + 34.0;
    legend(out, space, y).max(age_legend(out, space, &ends, y))
}

/// How a cell looks by what it holds, and how much of its bytes.
fn fullness(cell: &Cell, bytes: u64) -> Look {
    let group = cell.group.map(|g| g.0);
    let colour = match shown(cell, bytes) {
        Some(kind) => KINDS.into_iter().find_map(|(k, colour)| (k == kind).then_some(colour)),
        None => None,
    };
    let paint = match colour {
        Some(colour) => Paint::at_step(colour, step(cell)),
        None => Paint::full(paint::UNALLOCATED),
    };
    Look { group, paint }
}

/// How a cell looks by its age.
fn age(cell: &Cell, ends: &[u64]) -> Look {
    let colour = match cell.mean_generation() {
        Some(g) => paint::AGES[age_colour(age_step(ends, g), ends.len())],
        None if cell.allocated() > 0 => paint::FREE,
        None => paint::UNALLOCATED,
    };
    // Where nothing lies, one shape is enough.
    let group = cell.generations.and(cell.group).map(|g| g.0);
    Look { paint: Paint::full(colour), group }
}

/// The whole picture: the devices below each other.
pub(super) fn picture(whole: &Whole, grid: &Grid, name: &str, html: bool) -> String {
    let mut body = String::new();
    let title =
        if whole.label.is_empty() { name.to_owned() } else { format!("{} ({name})", whole.label) };
    text(&mut body, MARGIN, 46.0, Letters::TITLE, &title);
    text(&mut body, MARGIN, 70.0, Letters::SOFT, &facts(whole));
    let mut bottom = 70.0;
    match &whole.devices[..] {
        [one] => bottom = section(&mut body, whole, one, grid, TOP),
        several => {
            for space in several {
                text(&mut body, MARGIN, bottom + 46.0, Letters::HEADING, &device_text(space));
                bottom = section(&mut body, whole, space, grid, bottom + 94.0);
            }
        }
    }
    let bottom = histogram(&mut body, whole, bottom + 50.0);
    let mut foot = "Lines are borders of block groups, where there is room for them.".to_owned();
    match &whole.devices[..] {
        [one] => {
            let cell = human(one.size / one.cells.len().max(1) as u64);
            foot = format!("A cell is {cell} of the device. {foot}");
        }
        _ => foot += " Parity counts as full as its row is.",
    }
    text(&mut body, MARGIN, bottom + 36.0, Letters::SOFT, &foot);
    let height = bottom + 60.0;
    let svg = paint::frame(&xml(&title), WIDTH, height, &body);
    if html { page(&svg, &title) } else { svg }
}

/// The picture in a page of its own. The script only makes tooltips come at once; without it the
/// browser's own appear.
fn page(svg: &str, title: &str) -> String {
    const PAGE: &str = "
:root{color-scheme:light dark}
body{margin:0;background:#fff}svg{display:block;max-width:1400px;margin:auto}
#t{position:fixed;pointer-events:none;white-space:pre;font:13px/1.45 \
system-ui,sans-serif;background:#1b1e23;color:#fff;
padding:8px 11px;border-radius:6px;box-shadow:0 2px 12px #0006;display:none;max-width:90vw}
@media(prefers-color-scheme:dark){body{background:#14171c}#t{background:#e8eaed;color:#14171c}}";
    const SCRIPT: &str = "
const t=document.getElementById('t');
document.querySelectorAll('svg path>title,svg rect>title').forEach(e=>{const \
p=e.parentNode;p.dataset.t=e.textContent;e.remove()});
document.addEventListener('mousemove',e=>{const \
s=e.target.dataset&&e.target.dataset.t;if(!s){t.style.display='none';return}
t.textContent=s;t.style.display='block';const w=t.offsetWidth,h=t.offsetHeight;
t.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-w-4))+'px';
t.style.top=(e.clientY+18+h>innerHeight?e.clientY-h-10:e.clientY+18)+'px'});";
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{}</title>\n\
         <style>{PAGE}</style>\n</head>\n<body>\n{svg}<div id=\"t\"></div>\n\
         <script>{SCRIPT}</script>\n</body>\n</html>\n",
        xml(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_place() {
        assert_eq!(xml("<script>\"a\"&\u{1b}[2J"), "&lt;script&gt;&quot;a&quot;&amp;\u{fffd}[2J");
    }

    #[test]
    fn ages_take_equal_shares_of_whatever_there_is() {
        assert_eq!(age_step(&[5, 9, 20], 5), 0);
        assert_eq!(age_step(&[5, 9, 20], 6), 1);
        assert_eq!(age_step(&[5, 9, 20], 99), 2);
        assert_eq!((age_colour(0, 2), age_colour(1, 2), age_colour(0, 1)), (0, AGES - 1, AGES / 2));
        assert_eq!(age_colour(5, 6), 5);
    }
}
