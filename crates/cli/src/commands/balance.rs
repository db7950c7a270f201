//! `larder balance`: moves chunks so that others become free, or to another profile.
//!
//! What is mounted is balanced by the daemon of the mount (`on_mount::balance`), an image by this
//! process. Without filters only that is moved which frees chunks, and it is said before what that
//! brings.

use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::jobs::BalanceOrder;
use crate::on_mount::balance::{Balanced, NOT_RUNNING, Plan, Sets, Told};
use crate::watched::watched;
use crate::{devices, print, size};
use anyhow::{anyhow, bail};
use indicatif::{HumanDuration, ProgressBar};
use larder_fs::{
    BalanceControl, BalanceState, BalanceStatus, BalanceWish, DataMay, Filesystem, Filters,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Move chunks so that others become free, or convert them to another profile. Without filters,
/// only that is moved which frees chunks.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
On a mount the daemon balances, while the file system is in use. Ctrl-C pauses
it. A balance that is paused or interrupted goes on at the next mount, unless
that has -o skip_balance. Linux goes on with it as well.

Exit codes: 0 complete, 1 some chunks could not be moved, 2 could not run.

Examples:
  larder balance mnt
  larder balance --dry-run disk.img
  larder balance start -d usage=30 mnt
  larder balance status mnt"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// Only say what it would free
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Directory on a mount, or image; several devices if the file system spans them
    #[arg(value_name = "DIR|IMAGE", required = true)]
    targets: Vec<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct Start {
    /// Balance the chunks of data that pass these filters, or `all`
    #[arg(short, long, value_name = "FILTERS", value_parser = filters_of)]
    data: Option<Filters>,
    /// The same for metadata, and for system chunks unless -s is given
    #[arg(short, long, value_name = "FILTERS", value_parser = filters_of)]
    metadata: Option<Filters>,
    /// The same for system chunks: needs --force
    #[arg(short, long, value_name = "FILTERS", value_parser = filters_of)]
    system: Option<Filters>,
    /// Move everything, which takes as long as copying all of it
    #[arg(long, conflicts_with_all = ["data", "metadata", "system"])]
    full_balance: bool,
    /// Convert to a profile that survives less, and allow -s
    #[arg(short, long)]
    force: bool,
    /// Do not wait for the end (on a mount)
    #[arg(short, long)]
    background: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Directory on a mount, or image; several devices if the file system spans them
    #[arg(value_name = "DIR|IMAGE", required = true)]
    targets: Vec<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Start a balance with filters
    #[command(after_help = "\
Filters (comma-separated):
  usage=N, usage=A..B       less than N percent used, or A to B
  profiles=raid1|single     of one of these profiles
  devid=ID                  with a stripe on this device
  drange=A..B               in these bytes of that device
  vrange=A..B               at these logical addresses
  stripes=A..B              with so many stripes
  limit=N, limit=A..B       N chunks at most; none if there are fewer than A
  convert=PROFILE           convert to this profile
  soft                      with convert: leave those alone that have it

Examples:
  larder balance start -d usage=30 mnt
  larder balance start -d convert=dup -m convert=dup,soft mnt
  larder balance start --full-balance --background mnt")]
    Start(Box<Start>),
    /// Pause a balance; it can be resumed
    #[command(after_help = "Example:\n  larder balance pause mnt")]
    Pause {
        /// Directory on the mount
        directory: PathBuf,
    },
    /// Go on with a balance that was paused
    #[command(
        after_help = "Examples:\n  larder balance resume mnt\n  larder balance resume disk.img"
    )]
    Resume {
        /// Do not wait for the end (on a mount)
        #[arg(short, long)]
        background: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Directory on a mount, or image
        #[arg(value_name = "DIR|IMAGE", required = true)]
        targets: Vec<PathBuf>,
    },
    /// End a balance; what has been moved stays there
    #[command(after_help = "Example:\n  larder balance cancel mnt")]
    Cancel {
        /// Directory on a mount, or image
        #[arg(value_name = "DIR|IMAGE", required = true)]
        targets: Vec<PathBuf>,
    },
    /// Say how far a balance is
    #[command(after_help = "Example:\n  larder balance status --json mnt")]
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Directory on a mount, or image
        #[arg(value_name = "DIR|IMAGE", required = true)]
        targets: Vec<PathBuf>,
    },
}

/// Filters, or the word for none.
fn filters_of(text: &str) -> Result<Filters, String> {
    if text == "all" { Ok(Filters::default()) } else { text.parse() }
}

/// How the end is waited for and shown.
#[derive(Clone, Copy, Debug)]
struct Shown {
    background: bool,
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        None => freeing(args),
        Some(What::Start(start)) => {
            let shown = Shown { background: start.background, json: start.json };
            begin(&place(&start.targets)?, Some(wish_of(start)?), shown)
        }
        Some(What::Resume { background, json, targets }) => {
            resume(&place(targets)?, Shown { background: *background, json: *json })
        }
        Some(What::Pause { directory }) => {
            let was = "The balance is paused; `larder balance resume` goes on with it";
            end(&Balanced::behind(directory)?, BalanceOrder::Pause, was)
        }
        Some(What::Cancel { targets }) => cancel(&place(targets)?),
        Some(What::Status { json, targets }) => status(&place(targets)?, *json),
    }
}

/// What is balanced.
enum Place {
    Mount(PathBuf),
    Image(PathBuf),
}

fn place(targets: &[PathBuf]) -> anyhow::Result<Place> {
    match targets {
        [one] if one.is_dir() => Ok(Place::Mount(one.clone())),
        several if several.iter().any(|path| path.is_dir()) => {
            usage("a directory of a mount stands alone")
        }
        images => Ok(Place::Image(devices::join(images))),
    }
}

impl Place {
    fn shown(&self) -> String {
        match self {
            Self::Mount(path) | Self::Image(path) => print::path(path),
        }
    }
}

fn open(path: &Path, access: Access) -> anyhow::Result<Image> {
    Image::open(path, access, None)
}

/// What `start` says. Metadata takes the chunk tree along, as with btrfs-progs.
fn wish_of(start: &Start) -> anyhow::Result<BalanceWish> {
    if start.system.is_some() && !start.force {
        return usage("system chunks are balanced with -m; by themselves only with --force");
    }
    let all = || Some(Filters::default());
    let (data, metadata, system) = if start.full_balance {
        (all(), all(), all())
    } else {
        let system = start.system.clone().or_else(|| start.metadata.clone());
        (start.data.clone(), start.metadata.clone(), system)
    };
    let wish = BalanceWish { data, metadata, system, force: start.force };
    if wish == (BalanceWish { force: start.force, ..BalanceWish::default() }) {
        return usage(
            "-d, -m or --full-balance says what to balance; `larder balance DIR` without `start` \
             moves what frees chunks",
        );
    }
    Ok(wish)
}

/// Moves what frees chunks.
fn freeing(args: &Args) -> anyhow::Result<()> {
    let place = place(&args.targets)?;
    let plan = match &place {
        Place::Mount(directory) => Balanced::behind(directory)?.plan()?,
        Place::Image(path) => {
            let image = open(path, Access::Read { force: false })?;
            let plan = Plan::of(&image.fs);
            image.close()?;
            plan
        }
    };
    if args.json && (args.dry_run || plan.sets.is_none()) {
        return print::json(&plan);
    }
    if !args.json {
        for line in plan_lines(&plan) {
            print::line(&line)?;
        }
    }
    let Some(sets) = plan.sets.filter(|_| !args.dry_run) else { return Ok(()) };
    begin(&place, Some(wish_in(&sets)?), Shown { background: false, json: args.json })
}

fn wish_in(sets: &Sets) -> anyhow::Result<BalanceWish> {
    let read = |set: &Option<String>| -> anyhow::Result<Option<Filters>> {
        let read = set.as_ref().map(|set| set.parse::<Filters>());
        read.transpose().map_err(|why| anyhow!(why))
    };
    Ok(BalanceWish {
        data: read(&sets.data)?,
        metadata: read(&sets.metadata)?,
        system: read(&sets.system)?,
        force: false,
    })
}

/// What a balance frees, in words. `larder df` has the same.
fn plan_lines(plan: &Plan) -> Vec<String> {
    if plan.frees == 0 {
        return vec![
            "Nothing would become free: what chunks hold does not fit in fewer".to_owned(),
        ];
    }
    let kinds = [("data", plan.plan.data), ("metadata", plan.plan.metadata)];
    let freed = kinds.iter().filter(|(_, freeing)| freeing.chunks > 0);
    let lines = freed.map(|(name, freeing)| {
        format!(
            "Frees {} of device space: {} of {name}, which hold {}",
            size::human(freeing.frees),
            print::number(freeing.chunks, "chunk"),
            size::human(freeing.moves)
        )
    });
    lines.collect()
}

/// Starts a balance, or goes on with the one that is paused.
fn begin(place: &Place, wish: Option<BalanceWish>, shown: Shown) -> anyhow::Result<()> {
    let state = match place {
        Place::Mount(directory) => {
            let balanced = Balanced::behind(directory)?;
            let order = wish.map_or(BalanceOrder::Resume, |wish| {
                let Sets { data, metadata, system } = Sets::of(&wish);
                BalanceOrder::Start { data, metadata, system, force: wish.force, as_linux: false }
            });
            let told = balanced.ask(order)?;
            if shown.background {
                return show(&told, shown.json, &place.shown());
            }
            let bar = print::progress_to_the_end();
            let state = balanced.wait_for_the_end(told, &|now| show_progress(&bar, now))?;
            bar.finish_and_clear();
            state
        }
        Place::Image(path) => on_image(path, wish)?,
    };
    conclude(&state, shown.json, &place.shown())
}

/// Balances what is not mounted. A signal pauses it.
fn on_image(path: &Path, wish: Option<BalanceWish>) -> anyhow::Result<BalanceState> {
    let image = open(path, Access::Write)?;
    let control = BalanceControl::new();
    let work = || match &wish {
        Some(wish) => image.fs.balance(wish, DataMay::KeepRedundancy, &control),
        None => image.fs.resume_balance(&control),
    };
    let result = watched(
        &print::progress_to_the_end(),
        work,
        |bar| show_progress(bar, &control.state()),
        || control.pause(),
    );
    image.close()?;
    let name = print::path(path);
    result?.map_err(|e| anyhow!(e).context(name)).could_not_run()?;
    Ok(control.state())
}

/// Nothing is left to be done.
const NONE: &str = "No balance is running or paused";

/// Has the daemon end a balance. Without one, what is wanted holds already.
fn end(balanced: &Balanced, order: BalanceOrder, was: &str) -> anyhow::Result<()> {
    match balanced.ask(order) {
        Err(e) if format!("{e:#}").contains(NOT_RUNNING) => print::line(NONE),
        other => {
            other?;
            print::line(was)
        }
    }
}

fn cancel(place: &Place) -> anyhow::Result<()> {
    let was = "The balance is cancelled; what it has moved stays there";
    match place {
        Place::Mount(directory) => end(&Balanced::behind(directory)?, BalanceOrder::Cancel, was),
        Place::Image(path) => {
            let image = open(path, Access::Write)?;
            let is_paused = image.fs.unfinished_balance()?.is_some();
            if is_paused {
                image.fs.cancel_paused_balance()?;
            }
            image.close()?;
            print::line(if is_paused { was } else { NONE })
        }
    }
}

/// Goes on with the balance that is paused, if there is one.
fn resume(place: &Place, shown: Shown) -> anyhow::Result<()> {
    let told = told(place)?;
    if told.unfinished.is_none() && told.running().is_none() {
        return show(&told, shown.json, &place.shown());
    }
    begin(place, None, shown)
}

fn status(place: &Place, json: bool) -> anyhow::Result<()> {
    show(&told(place)?, json, &place.shown())
}

/// What is known of balances there.
fn told(place: &Place) -> anyhow::Result<Told> {
    match place {
        Place::Mount(directory) => Balanced::behind(directory)?.ask(BalanceOrder::Status),
        Place::Image(path) => {
            let image = open(path, Access::Read { force: false })?;
            let unfinished = unfinished(&image.fs)?;
            image.close()?;
            Ok(Told { state: None, unfinished })
        }
    }
}

fn unfinished(fs: &Filesystem) -> anyhow::Result<Option<Sets>> {
    Ok(fs.unfinished_balance()?.as_ref().map(Sets::of))
}

/// What is known, as text or JSON.
fn show(told: &Told, json: bool, name: &str) -> anyhow::Result<()> {
    if json {
        return print::json(told);
    }
    match (&told.state, &told.unfinished) {
        (Some(state), _) => lines(state).iter().try_for_each(|line| print::line(line)),
        (None, Some(sets)) => {
            print::line(&format!(
                "A balance is paused: `larder balance resume {name}` goes on with it"
            ))?;
            filters(sets).iter().try_for_each(|line| print::line(line))
        }
        (None, None) => print::line(NONE),
    }
}

fn filters(sets: &Sets) -> Vec<String> {
    let all = [("Data", &sets.data), ("Metadata", &sets.metadata), ("System", &sets.system)];
    let lines = all.iter().filter_map(|(name, set)| {
        let words =
            set.as_ref().map(|set| if set.is_empty() { "everything" } else { set.as_str() });
        words.map(|words| format!("{name:<12} {words}"))
    });
    lines.collect()
}

fn lines(state: &BalanceState) -> Vec<String> {
    let how = match state.status {
        BalanceStatus::Running => "runs",
        BalanceStatus::Finished => "is complete",
        BalanceStatus::Paused => "is paused: `larder balance resume` goes on with it",
        BalanceStatus::Canceled => "was cancelled",
        BalanceStatus::Failed => "has failed",
    };
    let sets = Sets {
        data: state.data.clone(),
        metadata: state.metadata.clone(),
        system: state.system.clone(),
    };
    let mut lines = vec![format!("The balance {how}")];
    lines.extend(filters(&sets));
    lines.push(format!(
        "Moved        {} of {}: {} of {}, {}/s",
        state.completed,
        print::number(state.expected, "chunk"),
        size::human(state.moved),
        size::human(state.total),
        size::human(state.rate()),
    ));
    if let Some(left) = state.seconds_left() {
        let left = HumanDuration(Duration::from_secs_f64(left.min(1e9)));
        lines.push(format!("Left         about {left}"));
    }
    if state.left > 0 {
        lines.push(format!("Stayed       {}", print::number(state.left, "chunk")));
    }
    if let Some(why) = &state.why {
        lines.push(format!("Because      {why}"));
    }
    lines
}

/// Shows what came of a balance that has ended. Chunks that stayed are an error.
fn conclude(state: &BalanceState, json: bool, name: &str) -> anyhow::Result<()> {
    let shown = if json {
        print::json(state)
    } else {
        lines(state).iter().try_for_each(|line| print::line(line))
    };
    print::unless_closed(shown).could_not_run()?;
    match state.status {
        BalanceStatus::Finished if state.left == 0 => Ok(()),
        BalanceStatus::Finished => {
            bail!("{name}: {} could not be moved", print::number(state.left, "chunk"))
        }
        BalanceStatus::Failed => bail!("{name}: {}", state.why.as_deref().unwrap_or("it failed")),
        _ => bail!("{name}: the balance has ended before it was complete"),
    }
}

fn show_progress(bar: &ProgressBar, state: &BalanceState) {
    bar.set_length(state.total.max(state.moved));
    bar.set_position(state.moved);
    bar.set_message(format!("{} of {}", state.completed, print::number(state.expected, "chunk")));
}
