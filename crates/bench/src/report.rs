//! The report: ratios, what was expected, and plots, on the terminal and in Markdown.
//!
//! People read these figures in a document with text around them, which a person has written. So
//! the figures go between two marks, and what is outside of them stays. The tables of what each
//! file system took are long and appear on request only; JSON with every single measurement is for
//! programs.

use crate::Run;
use crate::case::{Case, Mkfs, Pages};
use crate::fsync;
use crate::measure::Machine;
use crate::moving;
use crate::names;
use crate::plot::{self, Plot};
use crate::ratio::{Ratio, Results};
use crate::source::Archive;
use crate::spread::Spread;
use crate::target::Target;
use crate::transfer;
use crate::workload::Step;
use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Deserialize;
use serde_json::json;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- figures: written by make bench -->";
const END: &str = "<!-- end of figures -->";

/// Writes the report and its plots, prints it, and writes the measurements where that is wanted.
pub(crate) fn write(
    run: &Run,
    machine: &Machine,
    archive: Option<&Archive>,
    steps: &[Step],
) -> Result<()> {
    let results = Results(steps);
    if let Some(parent) = run.out.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut text = setting(run, machine, archive)?;
    for (path, title) in plots(&run.out, results)? {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        writeln!(text, "\n![{title}]({name})")?;
    }
    ratios(&mut text, results)?;
    expectations(&mut text, run, results)?;
    if run.tables {
        costs(&mut text, results)?;
        fsyncs(&mut text, results)?;
    }
    let old = fs::read_to_string(&run.out).unwrap_or_default();
    fs::write(&run.out, insert(&old, &text)).with_context(|| run.out.display().to_string())?;
    print!("{text}");
    eprintln!("written to {}", run.out.display());
    if let Some(path) = &run.json {
        let data = json!({ "run": run, "machine": machine, "archive": archive, "steps": steps });
        fs::write(path, serde_json::to_string_pretty(&data)?)
            .with_context(|| path.display().to_string())?;
        eprintln!("every measurement is in {}", path.display());
    }
    Ok(())
}

/// Draws the plots that the report at `out` shows. Returns their files and titles.
fn plots(out: &Path, results: Results<'_>) -> Result<Vec<(PathBuf, &'static str)>> {
    let mut drawn = Vec::new();
    for (suffix, plot) in
        [("kernel", &AGAINST_KERNEL), ("ceiling", &AGAINST_CEILING), ("switches", &AGAINST_OLD)]
    {
        if let Some(svg) = plot::draw(plot, results) {
            let path = beside(out, &format!("-{suffix}.svg"));
            fs::write(&path, svg).with_context(|| path.display().to_string())?;
            drawn.push((path, plot.title));
        }
    }
    Ok(drawn)
}

/// What is read of a run's measurements.
#[derive(Deserialize)]
struct Data {
    steps: Vec<Step>,
}

/// Draws the plots of the report at `out` anew, from a run's measurements.
pub(crate) fn redraw(data: &Path, out: &Path) -> Result<()> {
    let read = || -> Result<Data> { Ok(serde_json::from_str(&fs::read_to_string(data)?)?) };
    let steps = read().with_context(|| data.display().to_string())?.steps;
    for (path, _) in plots(out, Results(&steps))? {
        println!("{}", path.display());
    }
    Ok(())
}

const AGAINST_KERNEL: Plot<'_> = Plot {
    title: "Speed against the kernel's btrfs (median and range of the rounds)",
    one: "kernel",
    pairs: &[
        ((Target::Larder, Target::Kernel), "Larder"),
        ((Target::LarderDirect, Target::KernelDirect), "both direct"),
        ((Target::LarderLoop, Target::Kernel), "Larder on the loop device"),
        ((Target::KernelAgain, Target::Kernel), "kernel against itself"),
    ],
    expected: None,
};

const AGAINST_CEILING: Plot<'_> = Plot {
    title: "Larder's share of the ceiling (median and range of the rounds)",
    one: "ceiling",
    pairs: &[((Target::Larder, Target::Ceiling), "Larder")],
    expected: None,
};

const AGAINST_OLD: Plot<'_> = Plot {
    title: "Larder against itself with something switched (median and range of the rounds)",
    one: "switched",
    pairs: &[
        ((Target::Larder, Target::LarderWholeInodes), "whole files reclaimed"),
        ((Target::Larder, Target::LarderLockedCopies), "copies under the lock"),
        ((Target::Larder, Target::LarderLogWaits), "log waits for commit"),
        ((Target::Larder, Target::LarderLogAlone), "each logs alone"),
        ((Target::Larder, Target::LarderNoSandbox), "no sandbox"),
    ],
    expected: None,
};

/// `dir/NAME.md` to `dir/name` and the suffix.
fn beside(out: &Path, suffix: &str) -> PathBuf {
    let stem = out.file_stem().and_then(|n| n.to_str()).unwrap_or("bench").to_lowercase();
    out.with_file_name(stem + suffix)
}

/// Puts the figures between the marks of `old`, or at its end.
fn insert(old: &str, figures: &str) -> String {
    let block = format!("{BEGIN}\n\n{}\n\n{END}", figures.trim());
    match (old.find(BEGIN), old.find(END)) {
        (Some(from), Some(to)) if from < to => {
            format!("{}{block}{}", &old[..from], &old[to + END.len()..])
        }
        _ if old.trim().is_empty() => format!("# Benchmarks\n\n{block}\n"),
        _ => format!("{}\n\n{block}\n", old.trim_end()),
    }
}

fn setting(run: &Run, machine: &Machine, archive: Option<&Archive>) -> Result<String> {
    let mut t = String::new();
    let [low, median, high] = machine.flush_ms;
    writeln!(
        t,
        "{} round{} on Linux {} with {} CPUs and {:.0} GiB of memory; FUSE over {}. Before the \
         start, threads waited for a CPU {}. The image: {} MiB on {}, where a 4 KiB write and \
         flush takes {median:.2} ms (half of them {low:.2}–{high:.2}); data single, \
         metadata {}, {}.",
        run.rounds,
        if run.rounds == 1 { "" } else { "s" },
        machine.kernel,
        machine.cpus,
        machine.memory_mib as f64 / 1024.0,
        if machine.uring { "io_uring" } else { "/dev/fuse" },
        machine.waited_before.map_or("for an unknown time".to_owned(), |w| format!(
            "{:.0} % of the time",
            w * 100.0
        )),
        run.image_mib(),
        machine.disk,
        run.metadata.name(),
        run.csum
    )?;
    if let Some(a) = archive {
        writeln!(
            t,
            "The tree: {}, {} entries, {} MiB. The single file: {} MiB.",
            a.what,
            a.entries,
            a.bytes >> 20,
            run.stream_mib()
        )?;
    }
    t.push_str(&cases(run));
    Ok(t)
}

/// What the names of the cases mean; nothing where only the default one was run.
fn cases(run: &Run) -> String {
    let spread: String = run
        .spread
        .iter()
        .filter(|spread| **spread != Spread::One)
        .map(|spread| {
            format!(
                "{}: {} devices of an equal share of the image, metadata {}. ",
                spread.data(),
                spread.devices(),
                spread.metadata().unwrap_or("as above")
            )
        })
        .collect();
    if Case::all(&run.pages, &run.mkfs, &[Spread::One]) == [Case::default()] {
        return if spread.is_empty() { spread } else { format!("{}\n", spread.trim_end()) };
    }
    let pages = run.pages.iter().map(|pages| match pages {
        Pages::Cold => "cold (on the disk only)",
        Pages::Hot => "hot (all in the page cache)",
    });
    let mkfs = run.mkfs.iter().map(|mkfs| match mkfs {
        Mkfs::Linux => "mkfs.btrfs",
        Mkfs::Larder => "larder mkfs",
    });
    let (pages, mkfs) =
        (pages.collect::<Vec<_>>().join(" and "), mkfs.collect::<Vec<_>>().join(" and "));
    format!(
        "{spread}The image's pages before each mount: {pages}. It was formatted by {mkfs}. Steps \
         without a mark are of the case cold, mkfs.btrfs.\n"
    )
}

fn cell(ratio: Option<Ratio>) -> String {
    ratio.map_or_else(|| "–".into(), |r| r.to_string())
}

fn pair_name(a: Target, b: Target) -> String {
    match (a, b) {
        (Target::KernelAgain, _) => "kernel : kernel (noise)".into(),
        (Target::LarderDirect, _) => "both direct".into(),
        (Target::LarderSlowFlush, _) => "both with slow flushes".into(),
        _ => format!("{} : {}", a.name(), b.name()),
    }
}

/// What Larder's processor time is compared with.
const CPU_OF: [Target; 2] = [Target::Kernel, Target::Ceiling];

/// Ratios of each pair's time, and of the processor time of the whole machine.
fn ratios(t: &mut String, results: Results<'_>) -> Result<()> {
    let pairs: Vec<_> = results.pairs().collect();
    if pairs.is_empty() {
        return Ok(());
    }
    let has_larder = results.has(Target::Larder);
    let cpu: Vec<_> = CPU_OF.into_iter().filter(|o| has_larder && results.has(*o)).collect();
    t.push_str("\n### Speed, and CPU of the whole machine\n\n| step |");
    for (a, b) in &pairs {
        write!(t, " {} |", pair_name(*a, *b))?;
    }
    for other in &cpu {
        write!(t, " CPU, {} |", pair_name(*other, Target::Larder))?;
    }
    writeln!(t, "\n|---|{}", "---|".repeat(pairs.len() + cpu.len()))?;
    for row in results.rows() {
        write!(t, "| {row} |")?;
        for (a, b) in &pairs {
            write!(t, " {} |", cell(results.ratio(*a, *b, row)))?;
        }
        for other in &cpu {
            write!(t, " {} |", cell(results.ratio_of(Target::Larder, *other, row, cpu_of_work)))?;
        }
        t.push('\n');
    }
    Ok(())
}

/// Processor time of the same amount of work: of the step, or of one fsync if the step says how
/// many there were. A program that runs for a fixed time does more work where it is fast.
fn cpu_of_work(s: &Step) -> f64 {
    s.cpu_seconds / s.fsync.map_or(1, |f| f.fsyncs).max(1) as f64
}

fn costs(t: &mut String, results: Results<'_>) -> Result<()> {
    t.push_str(
        "\n### What it took\n\nMiB: the peak of the anonymous memory of the daemon or command; for \
         the kernel, the growth of slab and dirty pages. Page cache: the largest growth of the \
         machine's page cache since before the mount. Of the image: what the page cache held of it \
         at the end.\n\n| step | target | seconds | CPU s | stolen s | daemon's CPU s | MiB | \
         page cache, MiB | of the image, MiB | requests |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in results.rows() {
        for target in Target::value_variants() {
            let m = |field: fn(&Step) -> Option<f64>| results.median_of(*target, row, field);
            let Some(seconds) = m(|s| Some(s.seconds)) else { continue };
            let show =
                |v: Option<f64>, digits: usize| v.map_or("–".into(), |v| format!("{v:.digits$}"));
            writeln!(
                t,
                "| {row} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                target.name(),
                show(Some(seconds), if seconds < 0.1 { 4 } else { 2 }),
                show(m(|s| Some(s.cpu_seconds)), 2),
                show(m(|s| Some(s.stolen_seconds)), 2),
                show(m(|s| s.daemon_cpu_seconds), 2),
                show(m(|s| Some(s.memory_mib)), 0),
                show(m(|s| s.page_cache_mib), 0),
                show(m(|s| s.image_cached_mib), 0),
                show(m(|s| s.requests), 1),
            )?;
        }
    }
    Ok(())
}

/// What an fsync took, in steps whose program reported how many there were.
fn fsyncs(t: &mut String, results: Results<'_>) -> Result<()> {
    if results.0.iter().all(|s| s.fsync.is_none()) {
        return Ok(());
    }
    t.push_str(
        "\n### What an fsync took\n\nLatency: the 99th percentile of the fsyncs of fio and the \
         database, the 99.9th of the calls that make names, the longest call of dbench and \
         bonnie++. The floor: the same bytes and flushes by a bare loop on the same file.\n\n\
         | step | target | latency, ms | CPU of the machine, µs | flushes | bytes written, KiB | \
         fsyncs in a batch | were commits | share of the floor |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for row in results.rows() {
        for target in Target::value_variants() {
            let m = |field: &dyn Fn(&Step) -> Option<f64>| results.median_of(*target, row, field);
            let Some(latency) = m(&|s| Some(s.fsync?.latency_ms)) else { continue };
            let each =
                |s: &Step, n: f64| Some(n / s.fsync?.fsyncs as f64).filter(|n| n.is_finite());
            let engine = |s: &Step, path: &[&str]| fsync::engine(s.stats.as_ref(), path);
            let show =
                |v: Option<f64>, digits: usize| v.map_or("–".into(), |v| format!("{v:.digits$}"));
            let batch = |s: &Step| {
                s.fsync.filter(|f| f.fsyncs > 0)?;
                let logged = engine(s, &["log", "fsyncs_logged"])?;
                Some(logged / engine(s, &["log", "batches"])?).filter(|n| n.is_finite())
            };
            let commits = |s: &Step| {
                s.fsync.filter(|f| f.fsyncs > 0)?;
                let all = engine(s, &["log", "fsyncs"])?;
                let rest = all - engine(s, &["log", "fsyncs_logged"])?;
                Some((rest - engine(s, &["log", "fsyncs_with_nothing_to_do"])?) / all * 100.0)
            };
            writeln!(
                t,
                "| {row} | {} | {latency:.2} | {} | {} | {} | {} | {} | {} |",
                target.name(),
                show(m(&|s| each(s, s.cpu_seconds * 1e6)), 0),
                show(m(&|s| each(s, engine(s, &["device_flushes"])?)), 2),
                show(m(&|s| each(s, engine(s, &["device_written_bytes"])? / 1024.0)), 1),
                show(m(&batch), 1),
                m(&commits).filter(|c| c.is_finite()).map_or("–".into(), |c| format!("{c:.2} %")),
                show(m(&|s| Some(s.fsync?.floor_seconds? / s.seconds)), 2),
            )?;
        }
    }
    Ok(())
}

/// What is expected, and what was measured.
fn expectations(t: &mut String, run: &Run, results: Results<'_>) -> Result<()> {
    let mut rows = Vec::new();
    let mut at_least = |what: &str, ratio: Option<Ratio>, wanted: f64| {
        if let Some(r) = ratio {
            rows.push((format!("{what}: at least {wanted}"), r.to_string(), r.median >= wanted));
        }
    };
    at_least(
        "unpack, share of the ceiling",
        results.ratio(Target::Larder, Target::Ceiling, "unpack"),
        0.8,
    );
    at_least(
        "unpack, against the kernel",
        results.ratio(Target::Larder, Target::Kernel, "unpack"),
        0.45,
    );
    at_least(
        "random 4 KiB, share of the ceiling",
        results.ratio(Target::Larder, Target::Ceiling, "random 4 KiB"),
        0.8,
    );
    for step in ["write 1 file", "read 1 file"] {
        at_least(
            &format!("{step}, against the kernel"),
            results.ratio(Target::Larder, Target::Kernel, step),
            0.8,
        );
    }
    for (jobs, step) in fsync::JOBS {
        let wanted = match jobs {
            ..16 => 1.0,
            16..256 => 1.5,
            _ => 1.2,
        };
        let ratio = results.ratio(Target::Larder, Target::Kernel, step);
        at_least(&format!("{step}, against the kernel"), ratio, wanted);
    }
    for (step, wanted) in transfer::WANTED.into_iter().chain(moving::WANTED) {
        let ratio = results.ratio(Target::Larder, Target::Kernel, step);
        at_least(&format!("{step}, against the kernel"), ratio, wanted);
    }
    at_least(
        "dbench, against the kernel",
        results.ratio(Target::Larder, Target::Kernel, fsync::DBENCH),
        1.0,
    );
    let latency = |target| results.median_of(target, fsync::DBENCH, |s| Some(s.fsync?.latency_ms));
    if let (Some(ours), Some(theirs)) = (latency(Target::Larder), latency(Target::Kernel)) {
        let what = "dbench, longest call: no longer than the kernel's (medians)".to_owned();
        rows.push((what, format!("{ours:.1} ms, the kernel {theirs:.1} ms"), ours <= theirs));
    }
    let latencies = |step| {
        results.ratio_of(Target::Larder, Target::Kernel, step, |s| {
            s.fsync.map_or(f64::NAN, |f| f.latency_ms)
        })
    };
    if let Some(r) = latencies(names::NAMES) {
        let what = "names beside 16 fsyncs, 99.9th percentile, against the kernel's: at least 1"
            .to_owned();
        rows.push((what, r.to_string(), r.median >= 1.0));
    }
    for step in moving::BESIDE {
        if let Some(r) = latencies(step) {
            let what = format!("{step}, 99th percentile, against the kernel's: at least 1");
            rows.push((what, r.to_string(), r.median >= 1.0));
        }
    }
    rows.extend(memory_of_streams(results));
    if run.cache_size.is_none()
        && let Some(peak) = results.peak(Target::Larder, |s| s.memory_mib)
    {
        let cache = larder_fuse::default_cache_size() >> 20;
        rows.push((
            format!("the daemon's anonymous memory: under {cache} + 256 MiB"),
            format!("{peak:.0} MiB"),
            peak < (cache + 256) as f64,
        ));
    }
    if rows.is_empty() {
        return Ok(());
    }
    t.push_str("\n### Expected and measured\n\n| expected | measured | |\n|---|---|---|\n");
    for (what, measured, met) in rows {
        writeln!(t, "| {what} | {measured} | {} |", if met { "met" } else { "missed" })?;
    }
    Ok(())
}

/// Most memory that a command which sends or receives may have, MiB.
const STREAM_MEMORY: f64 = 256.0;

/// What is expected of the memory of those commands, what was measured, and whether that is met.
fn memory_of_streams(results: Results<'_>) -> Option<(String, String, bool)> {
    let is_stream =
        |s: &Step| transfer::ALL.iter().any(|one| s.step == one.send || s.step == one.receive);
    let peak = results.peak(Target::Larder, |s| if is_stream(s) { s.memory_mib } else { 0.0 })?;
    let what = format!("anonymous memory to send and receive: under {STREAM_MEMORY} MiB");
    (peak > 0.0).then(|| (what, format!("{peak:.0} MiB"), peak < STREAM_MEMORY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ratio::tests::step;

    #[test]
    fn text_around_the_figures_stays() {
        let first = insert("", "one");
        assert!(first.starts_with("# Benchmarks\n") && first.contains("\none\n"));
        let edited = format!("Before.\n{first}After.\n");
        let second = insert(&edited, "two");
        assert!(second.starts_with("Before.\n") && second.ends_with("After.\n"));
        assert!(second.contains("\ntwo\n") && !second.contains("\none\n"));
        assert_eq!(insert(&second, "two"), second);
        assert!(insert("Only text.\n", "x").starts_with("Only text.\n\n<!-- figures"));
    }

    #[test]
    fn expectations_are_judged_by_the_median() {
        let steps = [
            step(Target::Ceiling, 0, 1.0),
            step(Target::Larder, 0, 2.0),
            step(Target::Ceiling, 1, 1.0),
            step(Target::Larder, 1, 1.25),
        ];
        let run = <crate::Cli as clap::Parser>::try_parse_from(["bench"]).unwrap().run;
        let mut text = String::new();
        expectations(&mut text, &run, Results(&steps)).unwrap();
        assert!(text.contains("**0.65** (0.50–0.80) | missed"), "{text}");
        assert!(text.contains("2 MiB | met"), "{text}");
    }

    #[test]
    fn cases_are_named_where_there_is_more_than_the_default() {
        let run_of = |args: &[&str]| {
            <crate::Cli as clap::Parser>::try_parse_from([&["bench"], args].concat()).unwrap().run
        };
        assert_eq!(cases(&run_of(&[])), "");
        let said = cases(&run_of(&["--pages", "cold,hot", "--mkfs", "larder"]));
        assert!(said.contains("disk only) and hot") && said.contains("by larder mkfs."), "{said}");

        let hot = Case { pages: Pages::Hot, ..Case::default() };
        let mut steps = vec![step(Target::Kernel, 0, 2.0), step(Target::Larder, 0, 1.0)];
        let table = |steps: &[Step]| {
            let mut text = String::new();
            ratios(&mut text, Results(steps)).unwrap();
            text
        };
        assert!(table(&steps).contains("\n| unpack | **2.00** (2.00–2.00) |"));
        steps.push(Step { case: hot, ..step(Target::Kernel, 0, 3.0) });
        steps.push(Step { case: hot, ..step(Target::Larder, 0, 1.0) });
        assert!(table(&steps).contains("\n| unpack (hot) | **3.00** (3.00–3.00) |"));
    }

    #[test]
    fn processor_time_is_that_of_the_same_work() {
        let of = |target, cpu_seconds, fsyncs| Step {
            cpu_seconds,
            fsync: Some(fsync::Extra { fsyncs, latency_ms: 1.0, floor_seconds: None }),
            ..step(target, 0, 1.0)
        };
        // In the same time Larder does twice the work, and needs as much.
        let steps = [
            of(Target::Kernel, 4.0, 100),
            of(Target::Larder, 4.0, 200),
            of(Target::Ceiling, 1.0, 100),
        ];
        let mut text = String::new();
        ratios(&mut text, Results(&steps)).unwrap();
        assert!(text.contains(" | CPU, kernel : Larder | CPU, ceiling : Larder |\n"), "{text}");
        assert!(text.ends_with(" | **2.00** (2.00–2.00) | **0.50** (0.50–0.50) |\n"), "{text}");
    }
}
