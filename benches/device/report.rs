//! What was measured, as JSON and as a table.

use std::fmt;
use std::num::NonZeroU32;

use fusestep_cuda::{DeviceInfo, DeviceTime};
use serde::Serialize;

use crate::SEED;
use crate::arguments::Arguments;

/// What a line is about.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Subject {
    /// The set.
    pub(crate) set: String,
    /// The rule and what comes before it.
    pub(crate) rule: String,
    /// How parameters are kept.
    pub(crate) dtype: &'static str,
    /// How the step gets to the device.
    pub(crate) way: &'static str,
    /// Tensors of the set.
    pub(crate) tensors: usize,
    /// Elements of all tensors.
    pub(crate) elements: u64,
    /// Launches of a step.
    pub(crate) launches: usize,
    /// States that take turns, so that none is found in the cache.
    pub(crate) rotated: usize,
    /// Bytes that a step must move.
    pub(crate) bytes: u64,
}

/// Medians of one subject and of copies of its bytes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    #[serde(flatten)]
    subject: Subject,
    /// Steps of a round.
    steps: u32,
    /// A step by the device's events, nanoseconds.
    device_ns: f64,
    /// The fastest round's.
    device_ns_least: f64,
    /// A step by the host's clock, the last wait included.
    wall_ns: f64,
    /// Bytes per second by the device's events, in 10^9.
    gb_per_s: f64,
    /// Bytes per second of the copies, in 10^9.
    copy_gb_per_s: f64,
    /// The first over the second.
    share_of_copy: f64,
}

impl Line {
    /// The medians of rounds.
    pub(crate) fn new(
        subject: Subject,
        steps: NonZeroU32,
        times: &[DeviceTime],
        copied: &[DeviceTime],
    ) -> Self {
        let device_ns = median(times.iter().map(DeviceTime::device_ns));
        let copy_ns = median(copied.iter().map(DeviceTime::device_ns));
        let rate = |ns: f64| subject.bytes as f64 / ns.max(1.0);
        Self {
            steps: steps.get(),
            device_ns,
            device_ns_least: times.iter().map(DeviceTime::device_ns).fold(f64::INFINITY, f64::min),
            wall_ns: median(times.iter().map(DeviceTime::wall_ns)),
            gb_per_s: rate(device_ns),
            copy_gb_per_s: rate(copy_ns),
            share_of_copy: copy_ns / device_ns.max(1.0),
            subject,
        }
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// All lines of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    device: String,
    compute_capability: String,
    driver: String,
    l2_bytes: u64,
    multiprocessors: u32,
    fusestep: &'static str,
    seed: u64,
    rounds: usize,
    scale: u64,
    lines: Vec<Line>,
    /// What there was no time for.
    left_out: Vec<String>,
    /// What went wrong.
    pub(crate) failed: Vec<String>,
}

impl Report {
    /// A report without lines.
    pub(crate) fn new(info: &DeviceInfo, arguments: &Arguments) -> Self {
        let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        Self {
            device: info.name.clone(),
            compute_capability: dotted(info.compute_capability),
            driver: dotted(info.driver_version),
            l2_bytes: info.l2_bytes,
            multiprocessors: info.multiprocessors,
            fusestep: env!("CARGO_PKG_VERSION"),
            seed: SEED,
            rounds: arguments.rounds,
            scale: arguments.scale,
            lines: Vec::new(),
            left_out: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// Adds a line and says so on standard error.
    pub(crate) fn add(&mut self, line: Line) {
        eprintln!("{}", Row(&line));
        self.lines.push(line);
    }

    /// Notes what there was no time for.
    pub(crate) fn leave_out(&mut self, what: String) {
        eprintln!("left out: {what}");
        self.left_out.push(what);
    }

    /// Notes what went wrong.
    pub(crate) fn fail(&mut self, what: String) {
        eprintln!("failed: {what}");
        self.failed.push(what);
    }

    /// Writes what there is so far, so that a run that is stopped leaves its lines.
    pub(crate) fn save(&self, arguments: &Arguments) -> Result<(), String> {
        let write = |path: &std::path::Path, text: String| {
            std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
        };
        if let Some(path) = &arguments.json {
            let text = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
            write(path, text + "\n")?;
        }
        if let Some(path) = &arguments.table {
            write(path, self.to_string())?;
        }
        Ok(())
    }
}

struct Row<'a>(&'a Line);

impl fmt::Display for Row<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.0;
        write!(
            f,
            "| {} | {} | {} | {} | {:.2} | {:.2} | {:.2} | {:.0} | {:.1} % | {} |",
            line.subject.set,
            line.subject.rule,
            line.subject.dtype,
            line.subject.way,
            line.device_ns / 1e3,
            line.wall_ns / 1e3,
            line.subject.bytes as f64 / 1e6,
            line.gb_per_s,
            100.0 * line.share_of_copy,
            line.subject.launches,
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, compute capability {}, driver for CUDA {}; fusestep {}, seed {}, medians of {} \
             rounds, scale 1/{}\n",
            self.device,
            self.compute_capability,
            self.driver,
            self.fusestep,
            self.seed,
            self.rounds,
            self.scale
        )?;
        writeln!(
            f,
            "| set | rule | dtype | way | device µs | wall µs | MB | GB/s | of the copy | \
             launches |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        for line in &self.lines {
            writeln!(f, "{}", Row(line))?;
        }
        for what in &self.left_out {
            writeln!(f, "\nleft out: {what}")?;
        }
        for what in &self.failed {
            writeln!(f, "\nfailed: {what}")?;
        }
        Ok(())
    }
}
