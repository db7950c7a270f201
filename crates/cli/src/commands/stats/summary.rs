//! The statistics of a mount for people, on one screen of 80 columns.
//!
//! This module decides which questions they answer: how busy the mount is, how long an fsync takes
//! and how many were logged, what commits cost, what reaches the device, what the cache and the
//! rest of the memory hold, and whether something is wrong. A figure that only matters if it is not
//! zero is left out while it is zero. The daemon may be of another version: what it does not report
//! is left out, too.

use crate::{print, size};
use serde_json::Value;

/// Columns that a line has at most.
const WIDTH: usize = 80;
/// Where the text of a line begins.
const INDENT: usize = 12;

/// What the daemon told.
#[derive(Clone, Copy)]
struct Told<'a>(&'a Value);

impl<'a> Told<'a> {
    /// A number by its dotted name; 0 where there is none.
    fn number(self, path: &str) -> u64 {
        self.get(path).and_then(Value::as_u64).unwrap_or(0)
    }
    fn text(self, path: &str) -> Option<&'a str> {
        self.get(path)?.as_str()
    }
    fn get(self, path: &str) -> Option<&'a Value> {
        path.split('.').try_fold(self.0, |v, name| v.get(name))
    }
    fn bytes(self, path: &str) -> String {
        size::human(self.number(path))
    }
    /// Seconds that it has been counted.
    fn age(self) -> Option<f64> {
        self.get("uptime_seconds")?.as_f64().filter(|s| *s > 0.0)
    }
}

/// The lines.
pub(super) fn lines(value: &Value) -> Vec<String> {
    let told = Told(value);
    let mut out = Lines::default();
    out.say("Mounted", mounted(told));
    requests(told, &mut out);
    fsyncs(told, &mut out);
    commits(told, &mut out);
    device(told, &mut out);
    cache(told, &mut out);
    memory(told, &mut out);
    state(told, &mut out);
    out.0
}

/// Lines with a heading in front of the first of each group.
#[derive(Default)]
struct Lines(Vec<String>);

impl Lines {
    fn say(&mut self, heading: &str, text: impl AsRef<str>) {
        let mut line = format!("{heading:<INDENT$}");
        for (nth, word) in text.as_ref().split(' ').enumerate() {
            if nth > 0 && line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.0.push(line.trim_end().to_owned());
                line = " ".repeat(INDENT);
            } else if nth > 0 {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.0.push(line.trim_end().to_owned());
    }
    fn more(&mut self, text: impl AsRef<str>) {
        self.say("", text);
    }
}

fn mounted(told: Told<'_>) -> String {
    let label = told.text("file_system.label").filter(|l| !l.is_empty());
    let name = match (label, told.text("file_system.fsid")) {
        (Some(label), _) => format!("\"{}\"", print::name(label.as_bytes())),
        (None, Some(fsid)) => fsid.to_owned(),
        (None, None) => "?".to_owned(),
    };
    let how = if told.get("file_system.read_only") == Some(&Value::Bool(true)) {
        ", read-only"
    } else {
        ""
    };
    let age = told.age().map(|s| format!(", for {}", duration(s))).unwrap_or_default();
    format!("{name}{how}{age}, generation {}", told.number("file_system.generation"))
}

fn requests(told: Told<'_>, out: &mut Lines) {
    let total = told.number("requests.total");
    let rate = told.age().map(|s| format!(", {} a second", rate(total, s))).unwrap_or_default();
    out.say(
        "Requests",
        format!(
            "{}{rate}; {} answered with an error",
            count(total),
            count(told.number("requests.errors"))
        ),
    );
    let mut kinds: Vec<(&String, u64)> = told
        .get("requests.by_kind")
        .and_then(Value::as_object)
        .map(|kinds| kinds.iter().map(|(name, n)| (name, n.as_u64().unwrap_or(0))).collect())
        .unwrap_or_default();
    kinds.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let most: Vec<String> =
        kinds.iter().take(5).map(|(name, n)| format!("{name} {}", count(*n))).collect();
    if !most.is_empty() {
        out.more(format!("most: {}", most.join(", ")));
    }
    let moved = |path: &str| {
        let bytes = told.number(path);
        let rate = told
            .age()
            .map(|s| format!(" ({}/s)", size::human(per_second(bytes, s))))
            .unwrap_or_default();
        format!("{}{rate}", size::human(bytes))
    };
    out.more(format!(
        "read {}, written {}",
        moved("requests.read_bytes"),
        moved("requests.written_bytes")
    ));
    let panics = told.number("requests.panics");
    if panics > 0 {
        out.more(format!("{} ended in an internal error: please report it", count(panics)));
    }
}

fn fsyncs(told: Told<'_>, out: &mut Lines) {
    let log = |name: &str| told.number(&format!("engine.log.{name}"));
    let fsyncs = log("fsyncs");
    if fsyncs == 0 {
        return out.say("Fsyncs", "none");
    }
    let logged = log("fsyncs_logged");
    let committed = fsyncs.saturating_sub(logged + log("fsyncs_with_nothing_to_do"));
    let batches = log("batches");
    out.say(
        "Fsyncs",
        format!(
            "{}: by the log {}, by a commit {}, nothing to do {}",
            count(fsyncs),
            count(logged),
            count(committed),
            count(log("fsyncs_with_nothing_to_do"))
        ),
    );
    if batches > 0 {
        #[allow(clippy::cast_precision_loss)]
        let mean = logged as f64 / batches as f64;
        out.more(format!(
            "{} batches of {mean:.1} in the mean, {} at most; {} flushes",
            count(batches),
            count(log("largest_batch")),
            count(log("flushes"))
        ));
    }
    let took = |name: &str| time(told.number(&format!("requests.fsync_latency.{name}")));
    if told.number("requests.fsync_latency.count") > 0 {
        out.more(format!(
            "half took up to {}, 99 of 100 up to {}, the longest {}",
            took("p50_us"),
            took("p99_us"),
            took("max_us")
        ));
    }
}

fn commits(told: Told<'_>, out: &mut Lines) {
    let commits = told.number("engine.commits");
    let Some(mean) = told.number("engine.commit_total_us").checked_div(commits) else {
        return out.say("Commits", "none");
    };
    out.say(
        "Commits",
        format!(
            "{}: {} in the mean, the longest {}; {} nodes",
            count(commits),
            time(mean),
            time(told.number("engine.commit_max_us")),
            count(told.number("engine.nodes_written"))
        ),
    );
    let waits = told.number("engine.commit_waits");
    out.more(format!(
        "{} waited for one, others were held up for {} at most",
        if waits == 1 { "1 caller".to_owned() } else { format!("{} callers", count(waits)) },
        time(told.number("engine.seal_max_us"))
    ));
}

fn device(told: Told<'_>, out: &mut Lines) {
    let engine = |name: &str| format!("engine.device_{name}");
    out.say(
        "Device",
        format!(
            "{} reads, {}; {} writes, {}; {} flushes",
            count(told.number(&engine("reads"))),
            told.bytes(&engine("read_bytes")),
            count(told.number(&engine("writes"))),
            told.bytes(&engine("written_bytes")),
            count(told.number(&engine("flushes")))
        ),
    );
    let (raw, packed) =
        (told.number("engine.compress_in_bytes"), told.number("engine.compress_out_bytes"));
    if raw > 0 {
        out.more(format!("compressed {} to {}", size::human(raw), size::human(packed)));
    }
    let (waits, refusals) =
        (told.number("engine.space_waits"), told.number("engine.space_refusals"));
    if waits + refusals > 0 {
        out.more(format!("for space: {} waited, {} were refused", count(waits), count(refusals)));
    }
}

fn cache(told: Told<'_>, out: &mut Lines) {
    let (hits, reads) = (told.number("engine.cache_hits"), told.number("engine.cache_reads"));
    let share = (hits * 1000).checked_div(hits + reads).map_or_else(String::new, |thousandths| {
        let found = format!("{}.{} %", thousandths / 10, thousandths % 10);
        format!(", {found} of {} look-ups hit", count(hits + reads))
    });
    let of = |part: &str| {
        let held = |what: &str| told.bytes(&format!("engine.memory.{part}.{what}"));
        format!("{} of {}", held("held"), held("budget"))
    };
    out.say("Cache", format!("nodes {}{share}", of("clean_nodes")));
    out.more(format!(
        "to be written {}, to be committed {}",
        of("delayed_data"),
        of("transaction")
    ));
}

fn memory(told: Told<'_>, out: &mut Lines) {
    out.say(
        "Memory",
        format!(
            "{} now, {} at most; {} inodes known",
            told.bytes("memory.resident"),
            told.bytes("memory.peak"),
            count(told.number("engine.inodes_in_memory"))
        ),
    );
}

/// What is wrong, or could be better.
fn state(told: Told<'_>, out: &mut Lines) {
    let mut said = Vec::new();
    if let Some(why) = told.text("engine.read_only") {
        said.push(format!("nothing can be written: {}", print::name(why.as_bytes())));
    }
    let devices = |name: &str| {
        let ids = told.get(&format!("engine.devices_{name}")).and_then(Value::as_array);
        let ids: Vec<String> = ids.into_iter().flatten().map(ToString::to_string).collect();
        (!ids.is_empty()).then(|| ids.join(", "))
    };
    if let Some(ids) = devices("failed") {
        said.push(format!("device {ids} has failed: what is written now has fewer copies"));
    }
    if let Some(ids) = devices("missing") {
        said.push(format!("device {ids} is missing: what is written now has fewer copies"));
    }
    if let Some(ids) = devices("behind") {
        said.push(format!("device {ids} was away: `larder scrub` brings it up to date"));
    }
    let damaged = told.number("engine.damaged_copies");
    if damaged > 0 {
        let found = if damaged == 1 { "a damaged copy was" } else { "damaged copies were" };
        said.push(format!("{found} found ({}): `larder check` says more", count(damaged)));
    }
    let dropping = told.number("engine.subvolumes_to_drop");
    if dropping > 0 {
        said.push(format!("{} still being deleted", print::number(dropping, "subvolume")));
    }
    let sandbox = |name: &str| told.get(&format!("sandbox.{name}"));
    if sandbox("seccomp") == Some(&Value::Bool(false)) {
        said.push("the daemon runs without a sandbox".to_owned());
    }
    if sandbox("refused_system_calls")
        .and_then(Value::as_array)
        .is_some_and(|calls| !calls.is_empty())
    {
        said.push("the sandbox refused a call: please report it (--all shows which)".to_owned());
    }
    if said.is_empty() {
        said.push("nothing wrong".to_owned());
    }
    for (nth, text) in said.iter().enumerate() {
        out.say(if nth == 0 { "State" } else { "" }, text);
    }
}

/// `12,345`, and from a hundred million on `123 M`.
fn count(n: u64) -> String {
    if n >= 100_000_000 {
        return format!("{} M", count(n / 1_000_000));
    }
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn per_second(n: u64, seconds: f64) -> u64 {
    (n as f64 / seconds).round() as u64
}

/// As much of it as says something.
fn rate(n: u64, seconds: f64) -> String {
    #[allow(clippy::cast_precision_loss)]
    let exact = n as f64 / seconds;
    if exact < 10.0 { format!("{exact:.1}") } else { count(per_second(n, seconds)) }
}

/// `85 µs`, `1.2 ms`, `3.4 s`.
fn time(us: u64) -> String {
    let tenths = |unit: u64| format!("{}.{}", us / unit, us % unit * 10 / unit);
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..10_000 => format!("{} ms", tenths(1_000)),
        10_000..1_000_000 => format!("{} ms", us / 1_000),
        _ => format!("{} s", tenths(1_000_000)),
    }
}

/// `12 s`, `3 min 20 s`, `5 h 3 min`, `2 days 4 h`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn duration(seconds: f64) -> String {
    let s = seconds as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} {} h", print::number(s / 86400, "day"), s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_busiest_mount_fits_a_screen() {
        let most = u64::from(u32::MAX);
        let part = json!({ "held": most, "budget": most });
        let names =
            ["lookup", "copy_file_range", "readdirplus", "setxattr", "getxattr", "write", "fsync"];
        let kinds: serde_json::Map<String, Value> =
            names.map(|n| (n.to_owned(), most.into())).into_iter().collect();
        let value = json!({
            "uptime_seconds": 12_345_678.9,
            "requests": {
                "total": most, "errors": most, "panics": most, "read_bytes": most,
                "written_bytes": most, "by_kind": kinds,
                "fsync_latency": {
                    "count": most, "p50_us": 1234, "p99_us": 98_765, "max_us": 123_456_789,
                },
            },
            "engine": {
                "commits": most, "commit_total_us": most, "commit_max_us": most,
                "commit_waits": most, "seal_max_us": most, "nodes_written": most,
                "device_reads": most, "device_read_bytes": most, "device_writes": most,
                "device_written_bytes": most, "device_flushes": most, "cache_hits": most,
                "cache_reads": most, "inodes_in_memory": most, "damaged_copies": 2,
                "compress_in_bytes": most, "compress_out_bytes": most, "space_waits": most,
                "space_refusals": most, "subvolumes_to_drop": 3,
                "read_only": "a commit failed: disk.img: write failed",
                "memory": { "delayed_data": part, "clean_nodes": part, "transaction": part },
                "log": {
                    "fsyncs": most, "fsyncs_logged": most / 2, "batches": most / 4,
                    "largest_batch": most, "flushes": most, "fsyncs_with_nothing_to_do": most / 3,
                },
            },
            "memory": { "resident": most, "peak": most },
            "sandbox": { "seccomp": false, "refused_system_calls": [1] },
            "file_system": { "label": "x\u{1b}[2J", "read_only": true, "generation": most },
        });
        let lines = lines(&value);
        assert!(lines.len() <= 24, "{}", lines.join("\n"));
        for line in &lines {
            assert!(line.chars().count() <= WIDTH, "too wide: {line:?}");
            assert!(!line.contains('\u{1b}'), "{line:?}");
        }
        let text = lines.join("\n");
        for says in [
            "\"x\\u{1b}[2J\", read-only, for 142 days 21 h",
            "half took up to 1.2 ms",
            "damaged copies were found (2)",
            "a commit failed",
        ] {
            assert!(text.contains(says), "{says:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_daemon_that_tells_little_is_no_trouble() {
        let text = lines(&json!({})).join("\n");
        assert!(text.contains("Fsyncs      none") && text.contains("nothing wrong"), "{text}");
    }

    #[test]
    fn numbers_are_for_people() {
        assert_eq!([count(0), count(999), count(1_234_567)], ["0", "999", "1,234,567"]);
        assert_eq!(count(u64::from(u32::MAX)), "4,294 M");
        assert_eq!(
            [time(85), time(1234), time(12_345), time(3_456_789)],
            ["85 µs", "1.2 ms", "12 ms", "3.4 s"]
        );
        assert_eq!(
            [duration(59.9), duration(200.0), duration(90_000.0)],
            ["59 s", "3 min 20 s", "1 day 1 h"]
        );
        assert_eq!([rate(7, 2.0), rate(10_000, 2.0)], ["3.5", "5,000"]);
    }
}
