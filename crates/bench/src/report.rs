//! The figures, as a table and as a plot.
//!
//! A ratio is the kernel's time over Larder's in the same round: above 1 Larder is faster. The median of the rounds stands first, the range
//! behind it. The noise is the same ratio of the kernel against itself in the round before.

use crate::Run;
use crate::measure::{Machine, median};
use crate::source::Archive;
use crate::target::Target;
use crate::workload::Step;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::fs;

/// Who is compared with whom.
const PAIRS: [(Target, Target); 3] = [
    (Target::Larder, Target::Kernel),
    (Target::LarderDirect, Target::KernelDirect),
    (Target::LarderLoop, Target::Kernel),
];

/// Median and range of ratios.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    median: f64,
    low: f64,
    high: f64,
}

impl Ratio {
    fn of(mut values: Vec<f64>) -> Option<Self> {
        let median = (!values.is_empty()).then(|| median(&mut values))?;
        Some(Self { median, low: values[0], high: values[values.len() - 1] })
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "**{:.2}** ({:.2}–{:.2})", self.median, self.low, self.high)
    }
}

struct Results<'a>(&'a [Step]);

impl Results<'_> {
    fn steps(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for s in self.0 {
            if !names.contains(&s.step) {
                names.push(s.step);
            }
        }
        names
    }
    fn of<'s>(&'s self, target: Target, step: &'s str) -> impl Iterator<Item = &'s Step> {
        self.0.iter().filter(move |s| s.target == target && s.step == step)
    }
    fn median_of(&self, target: Target, step: &str, field: impl Fn(&Step) -> Option<f64>) -> Option<f64> {
        let mut values: Vec<f64> = self.of(target, step).filter_map(field).collect();
        (!values.is_empty()).then(|| median(&mut values))
    }
    /// Time of `base` over time of `target`, round by round.
    fn ratio(&self, target: Target, base: Target, step: &str) -> Option<Ratio> {
        let ratios = self.of(target, step).filter_map(|s| {
            let other = self.of(base, step).find(|o| o.round == s.round)?;
            Some(other.seconds / s.seconds)
        });
        Ratio::of(ratios.collect())
    }
    fn noise(&self, target: Target, step: &str) -> Option<Ratio> {
        let mut times: Vec<(usize, f64)> = self.of(target, step).map(|s| (s.round, s.seconds)).collect();
        times.sort_by_key(|t| t.0);
        Ratio::of(times.windows(2).map(|w| w[0].1 / w[1].1).collect())
    }
}

/// Writes the report and its plot, and prints the report.
pub(crate) fn write(run: &Run, machine: &Machine, archive: Option<&Archive>, steps: &[Step]) -> Result<()> {
    let results = Results(steps);
    let text = markdown(run, machine, archive, &results)?;
    let plot = run.out.with_extension("svg");
    if let Some(parent) = run.out.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(&run.out, &text).with_context(|| format!("writing {}", run.out.display()))?;
    fs::write(&plot, svg(&results)?)?;
    print!("{text}");
    eprintln!("written to {} and {}", run.out.display(), plot.display());
    Ok(())
}

fn markdown(
    run: &Run,
    machine: &Machine,
    archive: Option<&Archive>,
    results: &Results<'_>,
) -> Result<String> {
    let mut t = String::from("# Benchmarks\n\n`make bench` writes this file. ");
    writeln!(
        t,
        "{} rounds, order alternating, on Linux {} with {} CPUs and {} MiB of memory; a 4 KiB write and flush on the \
         image's disk takes {:.2} ms. Image: {} MiB, single profiles, made by mkfs.btrfs on a file full of zeros; \
         both sides commit every 5 s; the kernel mounts with `-o ssd`.",
        run.rounds, machine.kernel, machine.cpus, machine.memory_mib, machine.flush_ms, run.image_mib
    )?;
    if let Some(a) = archive {
        writeln!(
            t,
            "\nThe tree: {}, {} entries. The single file: {} MiB.",
            a.what, a.entries, run.stream_mib
        )?;
    }
    writeln!(
        t,
        "\nRatios are the kernel's time over Larder's in the same round, median and range: above 1, Larder is faster. \
         Steps that write are timed through the unmount; steps that read start from a fresh mount with empty caches. \
         *Noise* is the kernel against itself in the round before. *Of the ceiling*: the time of an in-memory server over the same \
         transport, over Larder's.\n"
    )?;
    t.push_str("![Ratios](");
    t.push_str(run.out.with_extension("svg").file_name().and_then(|n| n.to_str()).unwrap_or_default());
    t.push_str(")\n\n## Time against the kernel\n\n| step |");
    for (a, b) in PAIRS {
        write!(t, " {} : {} |", a.name(), b.name())?;
    }
    t.push_str(" noise | of the ceiling |\n|---|---|---|---|---|---|\n");
    let cell = |r: Option<Ratio>| r.map_or_else(|| "–".into(), |r| r.to_string());
    for step in results.steps() {
        write!(t, "| {step} |")?;
        for (a, b) in PAIRS {
            write!(t, " {} |", cell(results.ratio(a, b, step)))?;
        }
        writeln!(
            t,
            " {} | {} |",
            cell(results.noise(Target::Kernel, step)),
            cell(results.ratio(Target::Larder, Target::Ceiling, step))
        )?;
    }
    t.push_str(
        "\n## What it took\n\nMedians. CPU is the whole machine's. Memory is the daemon's anonymous peak; for the kernel, the growth of slab \
         and dirty pages. Requests are per entry of the tree, or per MiB.\n\n\
         | step | who | seconds | CPU seconds | MiB | requests |\n|---|---|---|---|---|---|\n",
    );
    for step in results.steps() {
        for target in Target::ALL {
            let m = |field: fn(&Step) -> Option<f64>| results.median_of(target, step, field);
            let (Some(s), Some(c), Some(mem)) =
                (m(|s| Some(s.seconds)), m(|s| Some(s.cpu_seconds)), m(|s| Some(s.memory_mib)))
            else {
                continue;
            };
            let requests = m(|s| s.requests).map_or_else(|| "–".into(), |r| format!("{r:.1}"));
            writeln!(t, "| {step} | {} | {s:.2} | {c:.2} | {mem:.0} | {requests} |", target.name())?;
        }
    }
    Ok(t)
}

/// A bar for each ratio, with its range as a line; the line at 1 is the kernel.
fn svg(results: &Results<'_>) -> Result<String> {
    const LEFT: f64 = 210.0;
    const WIDTH: f64 = 420.0;
    const ROW: f64 = 16.0;
    let mut rows = Vec::new();
    for step in results.steps() {
        for (a, b) in PAIRS {
            if let Some(r) = results.ratio(a, b, step) {
                rows.push((format!("{step}: {}", a.name()), r));
            }
        }
    }
    let most = rows.iter().map(|(_, r)| r.high).fold(1.5, f64::max);
    let x = |v: f64| LEFT + v / most * WIDTH;
    let height = 30.0 + ROW * rows.len() as f64;
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"680\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for (i, (name, r)) in rows.iter().enumerate() {
        let y = 10.0 + ROW * i as f64;
        let mid = y + 6.0;
        let colour = if r.median >= 1.0 { "#2a7" } else { "#c63" };
        writeln!(
            s,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"12\" fill=\"{colour}\"/>\
             <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{mid:.1}\" y2=\"{mid:.1}\" stroke=\"#222\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{:.2}</text>",
            LEFT - 6.0,
            y + 10.0,
            x(r.median) - LEFT,
            x(r.low),
            x(r.high),
            x(r.high) + 4.0,
            y + 10.0,
            r.median
        )?;
    }
    writeln!(
        s,
        "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"4\" y2=\"{1:.1}\" stroke=\"#000\" stroke-dasharray=\"3 2\"/>\
         <text x=\"{0:.1}\" y=\"{2:.1}\" text-anchor=\"middle\">kernel = 1</text>\n</svg>",
        x(1.0),
        height - 16.0,
        height - 4.0
    )?;
    Ok(s)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(target: Target, round: usize, seconds: f64) -> Step {
        Step { target, round, step: "unpack", seconds, cpu_seconds: 1.0, memory_mib: 2.0, requests: None }
    }

    #[test]
    fn ratios_pair_rounds() {
        let steps = [
            step(Target::Kernel, 0, 2.0),
            step(Target::Larder, 0, 1.0),
            step(Target::Larder, 1, 8.0),
            step(Target::Kernel, 1, 4.0),
        ];
        let results = Results(&steps);
        let r = results.ratio(Target::Larder, Target::Kernel, "unpack").unwrap();
        assert_eq!(r, Ratio { median: 1.25, low: 0.5, high: 2.0 });
        let noise = results.noise(Target::Kernel, "unpack").unwrap();
        assert_eq!((noise.low, noise.high), (0.5, 0.5));
        assert_eq!(results.ratio(Target::Ceiling, Target::Kernel, "unpack"), None);
        let plot = svg(&results).unwrap();
        assert!(plot.contains("unpack: Larder") && plot.contains("1.25"));
    }
}
