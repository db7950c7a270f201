//! Bars with whiskers as SVG: a group for each step, and in it a bar for each pair. Its length is
//! the median, and a line across its end shows the range of the rounds.

use crate::ratio::{Ratio, Results, Row};
use crate::target::Target;
use std::fmt::Write as _;

/// What a plot compares.
#[derive(Debug)]
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    /// What the line at 1 stands for.
    pub(crate) one: &'a str,
    /// Pairs with the names of their bars.
    pub(crate) pairs: &'a [((Target, Target), &'a str)],
    /// A ratio that is expected at least, drawn as a line.
    pub(crate) expected: Option<f64>,
}

/// Width of the bars, and of the space for a number right of them.
const WIDTH: f64 = 470.0;
const RIGHT: f64 = 80.0;
const ROW: f64 = 17.0;
const BAR: f64 = 12.0;
const GAP: f64 = 9.0;
const TOP: f64 = 56.0;
/// More than a letter takes on average in any usual font: in the small text, and in the title,
/// which is bold.
const LETTER: f64 = 6.6;
const TITLE_LETTER: f64 = 8.8;
const COLOURS: [&str; 5] = ["#33658a", "#86bbd8", "#758e4f", "#b0b0b0", "#c08552"];

/// The plot; `None` where nothing of it was measured.
pub(crate) fn draw(plot: &Plot<'_>, results: Results<'_>) -> Option<String> {
    let groups: Vec<(Row<'_>, Vec<(usize, Ratio)>)> = results
        .rows()
        .into_iter()
        .map(|row| {
            let bars = plot.pairs.iter().enumerate();
            let bars = bars.filter_map(|(i, ((a, b), _))| Some((i, results.ratio(*a, *b, row)?)));
            (row, bars.collect())
        })
        .filter(|(_, bars): &(Row<'_>, Vec<_>)| !bars.is_empty())
        .collect();
    if groups.is_empty() {
        return None;
    }
    let rows: usize = groups.iter().map(|g| g.1.len()).sum();
    let bottom = TOP + rows as f64 * ROW + groups.len() as f64 * GAP;
    let most = groups.iter().flat_map(|g| &g.1).map(|(_, r)| r.high).fold(1.2, f64::max);
    let step =
        [0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0].into_iter().find(|s| most / s <= 8.0).unwrap_or(50.0);
    let longest =
        groups.iter().map(|(row, _)| row.to_string().chars().count()).max().unwrap_or_default();
    let left = 24.0 + longest as f64 * LETTER;
    let width = (left + WIDTH + RIGHT).max(16.0 + plot.title.chars().count() as f64 * TITLE_LETTER);
    let x = |v: f64| left + v / most * WIDTH;
    let mut s = String::new();
    let mut put = |line: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = s.write_fmt(line);
        s.push('\n');
    };
    put(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{:.0}" font-family="sans-serif" font-size="11">"#,
        bottom + 34.0
    ));
    put(format_args!(r##"<rect width="100%" height="100%" fill="#fff"/>"##));
    put(format_args!(
        r#"<text x="8" y="18" font-size="14" font-weight="bold">{}</text>"#,
        plot.title
    ));
    let mut at = 8.0;
    for (i, (_, name)) in plot.pairs.iter().enumerate() {
        if !groups.iter().any(|g| g.1.iter().any(|b| b.0 == i)) {
            continue;
        }
        put(format_args!(
            r#"<rect x="{at:.0}" y="28" width="10" height="10" fill="{}"/><text x="{:.0}" y="37">{name}</text>"#,
            COLOURS[i % COLOURS.len()],
            at + 14.0
        ));
        at += 34.0 + LETTER * name.chars().count() as f64;
    }
    // Multiples of 0.2 are not exact: the last may lie a little behind the end, and two places are
    // all that it has.
    for tick in (0..).map(|i| f64::from(i) * step).take_while(|tick| *tick <= most + step / 100.0) {
        let said = (tick * 100.0).round() / 100.0;
        put(format_args!(
            r##"<line x1="{0:.1}" x2="{0:.1}" y1="{TOP}" y2="{bottom:.1}" stroke="#ddd"/><text x="{0:.1}" y="{1:.1}" text-anchor="middle" fill="#555">{said}</text>"##,
            x(tick),
            bottom + 13.0
        ));
    }
    let mut y = TOP;
    for (row, bars) in &groups {
        let middle = y + bars.len() as f64 * ROW / 2.0 + 3.0;
        put(format_args!(
            r#"<text x="{:.0}" y="{middle:.1}" text-anchor="end">{row}</text>"#,
            left - 8.0
        ));
        for (i, r) in bars {
            let mid = y + BAR / 2.0 + 1.0;
            put(format_args!(
                r#"<rect x="{left:.1}" y="{:.1}" width="{:.1}" height="{BAR}" fill="{}"/>"#,
                y + 1.0,
                x(r.median) - left,
                COLOURS[i % COLOURS.len()]
            ));
            put(format_args!(
                r##"<path d="M{0:.1} {2:.1}H{1:.1}M{0:.1} {3:.1}v6M{1:.1} {3:.1}v6" stroke="#222" fill="none"/><text x="{4:.1}" y="{5:.1}">{6:.2}</text>"##,
                x(r.low),
                x(r.high),
                mid,
                mid - 3.0,
                x(r.high) + 5.0,
                mid + 4.0,
                r.median
            ));
            y += ROW;
        }
        y += GAP;
    }
    put(format_args!(
        r##"<line x1="{0:.1}" x2="{0:.1}" y1="{1:.1}" y2="{bottom:.1}" stroke="#000"/><text x="{0:.1}" y="{2:.1}" text-anchor="middle">{3} = 1</text>"##,
        x(1.0),
        TOP - 4.0,
        bottom + 27.0,
        plot.one
    ));
    if let Some(expected) = plot.expected {
        put(format_args!(
            r##"<line x1="{0:.1}" x2="{0:.1}" y1="{TOP}" y2="{bottom:.1}" stroke="#c33" stroke-dasharray="4 3"/>"##,
            x(expected)
        ));
    }
    put(format_args!("</svg>"));
    Some(s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ratio::tests::step;

    #[test]
    fn a_bar_for_each_pair_that_was_measured() {
        let steps = [
            step(Target::Kernel, 0, 5.0),
            step(Target::Larder, 0, 2.0),
            step(Target::Larder, 1, 1.0),
        ];
        let pairs = [
            ((Target::Larder, Target::Kernel), "Larder"),
            ((Target::LarderDirect, Target::KernelDirect), "both direct"),
        ];
        let plot = Plot { title: "Time", one: "kernel", pairs: &pairs, expected: Some(0.6) };
        let svg = draw(&plot, Results(&steps)).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains(">2.50<") && svg.contains(">unpack<") && svg.contains("kernel = 1"));
        assert!(!svg.contains("both direct"), "no legend without a bar");
        assert!(draw(&Plot { pairs: &pairs[1..], ..plot }, Results(&steps)).is_none());
    }

    #[test]
    fn ticks_are_round() {
        let steps = [step(Target::Ceiling, 0, 0.9), step(Target::Larder, 0, 1.0)];
        let pairs = [((Target::Larder, Target::Ceiling), "Larder")];
        let svg = draw(
            &Plot { title: "Time", one: "ceiling", pairs: &pairs, expected: None },
            Results(&steps),
        )
        .unwrap();
        assert!(svg.contains(">0.6</text>") && svg.contains(">1.2</text>"), "{svg}");
    }

    /// Where the labels of the steps end, and how long the longest is, as wide as DejaVu Sans sets
    /// it.
    #[test]
    fn no_label_begins_left_of_the_picture() {
        let mut steps = [step(Target::Kernel, 0, 5.0), step(Target::Larder, 0, 2.0)];
        let pairs = [((Target::Larder, Target::Kernel), "Larder")];
        let plot = Plot { title: "Time", one: "kernel", pairs: &pairs, expected: None };
        for name in ["rm", "names beside 16 fsyncs", "deleting all of what was shared before"] {
            steps.iter_mut().for_each(|s| s.step = name.into());
            let svg = draw(&plot, Results(&steps)).unwrap();
            let label = svg.lines().find(|l| l.contains(name)).unwrap();
            let end: f64 = label.split('"').nth(1).unwrap().parse().unwrap();
            assert!(end >= 6.3 * name.len() as f64, "{label}");
            assert!(end < 40.0 + 7.0 * name.len() as f64, "not much wider than needed: {label}");
        }
    }
}
