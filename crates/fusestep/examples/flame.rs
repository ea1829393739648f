//! The spans of one rank's steps as a flame: each part below the part that it ran in, with a bar
//! for its share of the time.
//!
//! `cargo run --release -p fusestep --features tracing --example flame`
//!
//! The library opens spans and brings no subscriber. This one adds up times by path. Programs that
//! have `tracing-subscriber`, `tracing-chrome` or an exporter of OpenTelemetry install that.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Steps that are added up.
const STEPS: u32 = 20;

/// Characters of the longest bar.
const BAR: f64 = 40.0;

/// Names of a span and of those around it, the outermost first.
type Path = Vec<&'static str>;

/// Time and number of the spans of one path.
#[derive(Clone, Copy, Default)]
struct Total {
    time: Duration,
    count: u32,
}

/// Subscriber that adds up the time of spans, by thread and path.
#[derive(Default)]
struct Flame {
    names: Mutex<BTreeMap<u64, &'static str>>,
    totals: Mutex<BTreeMap<Path, Vec<(ThreadId, Total)>>>,
    next: AtomicU64,
}

thread_local! {
    /// Spans that this thread is in, and when it entered them.
    static ENTERED: RefCell<Vec<(&'static str, Instant)>> = const { RefCell::new(Vec::new()) };
}

impl Subscriber for &'static Flame {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == "fusestep"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let number = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.names.lock().unwrap().insert(number, span.metadata().name());
        Id::from_u64(number)
    }

    fn enter(&self, span: &Id) {
        let name = self.names.lock().unwrap().get(&span.into_u64()).copied().unwrap_or_default();
        ENTERED.with_borrow_mut(|entered| entered.push((name, Instant::now())));
    }

    fn exit(&self, _: &Id) {
        let (path, time) = ENTERED.with_borrow_mut(|entered| {
            let path: Path = entered.iter().map(|(name, _)| *name).collect();
            (path, entered.pop().map_or(Duration::ZERO, |(_, at)| at.elapsed()))
        });
        let (own, mut totals) = (thread::current().id(), self.totals.lock().unwrap());
        let of_path = totals.entry(path).or_default();
        let at = of_path.iter().position(|(thread, _)| *thread == own).unwrap_or(of_path.len());
        if at == of_path.len() {
            of_path.push((own, Total::default()));
        }
        let total = &mut of_path[at].1;
        (total.time, total.count) = (total.time + time, total.count + 1);
    }

    fn try_close(&self, span: Id) -> bool {
        self.names.lock().unwrap().remove(&span.into_u64());
        true
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}
}

impl Flame {
    /// Forgets what has been added up so far.
    fn begin(&self) {
        self.totals.lock().unwrap().clear();
    }

    /// Lines of this thread's spans, of one step each on average.
    fn lines(&self, steps: u32) -> Vec<String> {
        let (own, totals) = (thread::current().id(), self.totals.lock().unwrap());
        let found: Vec<(&Path, Total)> = totals
            .iter()
            .filter_map(|(path, of_path)| {
                let (_, total) = of_path.iter().find(|(thread, _)| *thread == own)?;
                Some((path, *total))
            })
            .collect();
        let outer = found.iter().filter(|(path, _)| path.len() == 1);
        let whole: Duration = outer.map(|(_, total)| total.time).sum();
        let line = |(path, total): &(&Path, Total)| {
            let name = format!("{}{}", "  ".repeat(path.len() - 1), path.last().unwrap_or(&""));
            let share = total.time.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
            let bar = "█".repeat((BAR * share).round() as usize);
            let micros = total.time.as_secs_f64() * 1e6 / f64::from(steps);
            let count = f64::from(total.count) / f64::from(steps);
            format!("{name:<16} {micros:>9.1} µs  {count:>4.1} a step  {bar}")
        };
        found.iter().map(line).collect()
    }
}

pub(crate) fn main() -> Result<(), Error> {
    let flame: &'static Flame = Box::leak(Box::default());
    tracing::subscriber::set_global_default(flame)?;
    let params: Vec<ParamDesc> = (0..12)
        .map(|layer| {
            Ok(ParamDesc::new(format!("layer{layer}"), Shape::new([512, 256])?, DType::F32))
        })
        .collect::<Result<_, Error>>()?;
    let grad = vec![0.01f32; 512 * 256];
    let told = fusestep::threads(2, |comm| {
        let rank = comm.rank();
        let rule = AdamW::new(1e-3).clip_norm(1.0).zero(1).bucket_cap_mib(2.0);
        let mut opt = rule.on(comm).build(&params, Cpu::with_threads(NonZeroUsize::MIN))?;
        for step in 0..=STEPS {
            if step == 1 && rank == 0 {
                // The first step has the handshake in it, and memory that is touched first.
                flame.begin();
            }
            for param in params.iter().rev() {
                opt.push_grad(&param.name, &grad)?;
            }
            opt.step()?;
        }
        Ok(flame.lines(STEPS))
    })?;
    println!("rank 0, {STEPS} steps, on average:");
    told[0].iter().for_each(|line| println!("{line}"));
    let has = |name: &str| told[0].iter().any(|line| line.trim_start().starts_with(name));
    for name in ["give", "step", "update", "gather"] {
        if !has(name) {
            return Err(format!("expected a span `{name}`, found {:?}", told[0]).into());
        }
    }
    Ok(())
}
