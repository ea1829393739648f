//! The page that `train --report` writes: curves, times, settings and plan, nothing from outside.

use std::fmt::Write;

use fusestep_pictures::{COLORS, Line, Lines, safe};
use fusestep_planner::{Plan, html_page};
use fusestep_tensor::grouped;

use crate::output::duration;
use crate::records::curves::{Curve, Drawn};
use crate::train::summary::{Epoch, TrainSummary};
use crate::training::recorder::{Recorded, Stopped};

/// Most lines of one chart.
const MOST_LINES: usize = COLORS.len();

/// Most points of a curve of times, which jump from update to update.
const MOST_TIMES: usize = 90;

/// Charts beside each other where there is room.
const CHARTS: &str = "<div style=\"display:grid;gap:.4em 1.2em;\
grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr))\">\n";

/// The page of a run that was done.
pub(crate) fn report_page(
    summary: &TrainSummary,
    plan: &Plan,
    recorded: Option<&Recorded>,
) -> String {
    let ours = Some(summary.optimizer_ns_per_step).filter(|_| !summary.was_complete());
    let rows = [
        ("test accuracy", Some(format!("{:.2} %", 100.0 * summary.test_accuracy))),
        ("final loss", Some(format!("{:.4}", summary.final_loss))),
        ("steps", Some(grouped(summary.steps))),
        ("steps skipped", skipped(summary.skipped_steps)),
        ("optimizer, per step", ours.map(duration)),
        ("candle's AdamW, per step", summary.candle_ns_per_step.map(duration)),
        ("parameters (xxh3)", Some(summary.params_hash.clone())),
    ];
    let mut outcome = "<h2>Outcome</h2>\n".to_owned();
    table(&mut outcome, &rows);
    let epochs = Epochs { of: &summary.history, before: summary.resumed_epochs.unwrap_or(0) };
    page(&Page { outcome, epochs, plan, recorded, config: summary.config.as_deref() })
}

/// The page of a run that has ended early by this error, as far as rank 0 has seen it.
pub(crate) fn page_of_stopped(stopped: &Stopped, error: &str, config: Option<&str>) -> String {
    let rows =
        [("steps", Some(grouped(stopped.steps))), ("steps skipped", skipped(stopped.skipped))];
    let mut outcome =
        format!("<h2>The run has ended early</h2>\n<pre>error: {}</pre>\n", safe_lines(error));
    table(&mut outcome, &rows);
    let epochs = Epochs { of: &stopped.history, before: stopped.resumed_epochs.unwrap_or(0) };
    let (plan, recorded) = (&stopped.plan, Some(&stopped.recorded));
    page(&Page { outcome, epochs, plan, recorded, config })
}

fn skipped(steps: u64) -> Option<String> {
    (steps > 0).then(|| grouped(steps))
}

fn table(body: &mut String, rows: &[(&str, Option<String>)]) {
    body.push_str("<table>");
    for (what, value) in rows.iter().filter_map(|(what, value)| Some((what, value.as_ref()?))) {
        let _ = write!(body, "<tr><td>{what}</td><td class=\"n\">{value}</td></tr>");
    }
    body.push_str("</table>\n");
}

/// Parts of a page.
struct Page<'a> {
    outcome: String,
    epochs: Epochs<'a>,
    plan: &'a Plan,
    recorded: Option<&'a Recorded>,
    config: Option<&'a str>,
}

/// Epochs of a session, and how many were over before it.
struct Epochs<'a> {
    of: &'a [Epoch],
    before: usize,
}

fn page(of: &Page<'_>) -> String {
    let Page { outcome, epochs, plan, recorded, config } = of;
    let mut body = String::new();
    if let Some(recorded) = recorded {
        run(&mut body, recorded);
    }
    body.push_str(outcome);
    if let Some(recorded) = recorded {
        by_update(&mut body, &recorded.drawn);
        times(&mut body, &recorded.drawn);
    }
    by_epoch(&mut body, epochs);
    if let Some(config) = config {
        let config = safe_lines(config);
        let _ = write!(body, "<h2>File of flags that repeats the run</h2>\n<pre>{config}</pre>\n");
    }
    body.push_str("<h2>Plan of the optimizer step</h2>\n");
    body.push_str(&plan.to_html_fragment());
    body.push_str(&buckets(plan));
    html_page("fusestep train", &body)
}

/// The command, the machine and the day.
fn run(body: &mut String, recorded: &Recorded) {
    let run = &recorded.run;
    let machine = format!("{}, {} processors", run.machine.processor, run.machine.processors);
    let ranks = format!("{} ({})", run.world, run.engine);
    let rows = [
        ("command", format!("<code>{}</code>", safe(&run.command))),
        ("date", safe(&run.date)),
        ("machine", safe(&machine)),
        ("model", safe(&run.model)),
        ("ranks", ranks),
    ];
    body.push_str("<table>");
    for (what, value) in rows {
        let _ = write!(
            body,
            "<tr><td>{what}</td><td style=\"overflow-wrap:anywhere\">{value}</td></tr>"
        );
    }
    body.push_str("</table>\n");
}

/// Curves of the loss, the rate and the norms.
fn by_update(body: &mut String, drawn: &Drawn) {
    if drawn.updates.is_empty() {
        return;
    }
    let _ = writeln!(body, "<h2>By update</h2>");
    of_points(body, drawn);
    body.push_str(CHARTS);
    for curve in &drawn.of_run {
        // A rate that stays is a number, and so is a share that is nil.
        let is_nil = curve.values.iter().all(|value| *value == 0.0);
        if !(is_nil && curve.name == "share skipped") {
            chart(body, &curve.name, drawn, &[curve]);
        }
    }
    let mut moved: Vec<&Curve> = drawn.tensors.iter().collect();
    moved.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
    if !moved.is_empty() {
        let most = moved.len().min(MOST_LINES);
        let title = match moved.len() - most {
            0 => "update norm of each tensor".to_owned(),
            _ => format!("update norm of the {most} tensors that moved most"),
        };
        chart(body, &title, drawn, &moved[..most]);
    }
    body.push_str("</div>\n");
}

/// Times of batches and of their parts, on every rank.
fn times(body: &mut String, drawn: &Drawn) {
    if drawn.updates.is_empty() {
        return;
    }
    let all = drawn;
    let drawn = &smoothed(drawn);
    body.push_str("<h2>Time of an update</h2>\n");
    of_points(body, drawn);
    body.push_str(CHARTS);
    let shown = drawn.ranks.len().min(MOST_LINES);
    let scaled = |curve: &Curve, name: &str, unit: &Unit| {
        Curve::of(name, curve.values.iter().map(|value| value * unit.times).collect())
    };
    // All pictures have one unit, so that they can be compared.
    let unit = Unit::of(drawn.ranks.iter().map(|rank| rank[0].mean()).fold(0.0, f64::max));
    if drawn.ranks.len() > 1 {
        let ranks = drawn.ranks.iter().take(shown).enumerate();
        let ranks: Vec<Curve> =
            ranks.map(|(at, rank)| scaled(&rank[0], &format!("rank {at}"), &unit)).collect();
        let title = format!("whole batches in {}", unit.name);
        chart(body, &title, drawn, &ranks.iter().collect::<Vec<_>>());
    }
    // Every picture has these parts, so that a part has one colour in all of them.
    let names = largest_parts(&drawn.ranks[..shown]);
    for (at, rank) in drawn.ranks.iter().take(shown).enumerate() {
        let parts = names.iter().filter_map(|name| rank.iter().find(|part| part.name == **name));
        let parts: Vec<Curve> = parts.map(|part| scaled(part, &part.name, &unit)).collect();
        let title = match drawn.ranks.len() {
            1 => format!("batch and its parts in {}", unit.name),
            _ => format!("rank {at}: batch and its parts in {}", unit.name),
        };
        chart(body, &title, drawn, &parts.iter().collect::<Vec<_>>());
    }
    body.push_str("</div>\n");
    table_of_times(body, all, &unit, shown);
}

/// Names of the parts that take longest on any of these ranks, the longest first.
fn largest_parts(ranks: &[Vec<Curve>]) -> Vec<&str> {
    let mut parts: Vec<(&str, f64)> = Vec::new();
    for part in ranks.iter().flatten() {
        match parts.iter_mut().find(|(name, _)| *name == part.name) {
            Some((_, mean)) => *mean = mean.max(part.mean()),
            None => parts.push((&part.name, part.mean())),
        }
    }
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let least = 0.002 * parts.first().map_or(0.0, |(_, mean)| *mean);
    let shown = parts.into_iter().filter(|(_, mean)| *mean > least).take(MOST_LINES);
    shown.map(|(name, _)| name).collect()
}

/// Curves of times with fewer points, each the mean of some.
fn smoothed(drawn: &Drawn) -> Drawn {
    let of = drawn.updates.len().div_ceil(MOST_TIMES).max(1);
    let mean = |values: &[f64]| Curve::of("", values.to_vec()).mean();
    let curve = |curve: &Curve| Curve {
        name: curve.name.clone(),
        values: curve.values.chunks(of).map(mean).collect(),
    };
    Drawn {
        updates: drawn.updates.chunks(of).filter_map(|some| some.last().copied()).collect(),
        of_point: drawn.of_point * of as u64,
        ranks: drawn.ranks.iter().map(|rank| rank.iter().map(curve).collect()).collect(),
        ..Drawn::default()
    }
}

/// Says what a point stands for, where it is more than one update.
fn of_points(body: &mut String, drawn: &Drawn) {
    if drawn.of_point > 1 {
        let of_point = drawn.of_point;
        let _ =
            writeln!(body, "<p class=\"muted\">Each point is the mean of {of_point} updates.</p>");
    }
}

/// Mean times, a row for each part and a column for each rank.
fn table_of_times(body: &mut String, drawn: &Drawn, unit: &Unit, shown: usize) {
    let _ = write!(body, "<table><tr><th>mean in {}</th>", unit.name);
    for rank in 0..shown {
        let _ = write!(body, "<th style=\"text-align:right;white-space:nowrap\">rank {rank}</th>");
    }
    body.push_str("</tr>\n");
    for (at, part) in drawn.ranks[0].iter().enumerate() {
        let means: Vec<f64> = drawn.ranks.iter().take(shown).map(|rank| rank[at].mean()).collect();
        if means.iter().all(|mean| *mean == 0.0) {
            continue;
        }
        let _ = write!(body, "<tr><td>{}</td>", part.name);
        for mean in means {
            let _ = write!(body, "<td class=\"n\">{:.3}</td>", mean * unit.times);
        }
        body.push_str("</tr>\n");
    }
    body.push_str("</table>\n");
    if let Some(more) = drawn.ranks.len().checked_sub(shown).filter(|more| *more > 0) {
        let _ = writeln!(body, "<p>and {more} more ranks</p>");
    }
    body.push_str(
        "<p class=\"muted\">A batch is all that an update takes. Its parts are the model's passes \
         and those of a step. What is missing to a batch is the command's own: it adds up losses \
         over ranks, and waits there for the slowest.</p>\n",
    );
}

/// A unit of time.
struct Unit {
    name: &'static str,
    times: f64,
}

impl Unit {
    /// The unit in which these seconds are no less than one.
    fn of(seconds: f64) -> Self {
        match seconds {
            long if long >= 1.0 => Self { name: "seconds", times: 1.0 },
            middle if middle >= 1e-3 => Self { name: "milliseconds", times: 1e3 },
            _ => Self { name: "microseconds", times: 1e6 },
        }
    }
}

/// Curves of the losses and the accuracy of epochs.
fn by_epoch(body: &mut String, epochs: &Epochs<'_>) {
    let Epochs { of: history, before } = epochs;
    if history.is_empty() {
        return;
    }
    let drawn = Drawn {
        updates: (1..=history.len()).map(|epoch| (before + epoch) as f64).collect(),
        ..Drawn::default()
    };
    let curve =
        |name: &str, of: fn(&Epoch) -> f64| Curve::of(name, history.iter().map(of).collect());
    let losses = [curve("training", |epoch| epoch.loss), curve("test", |epoch| epoch.test_loss)];
    let accuracy = curve("accuracy", |epoch| 100.0 * epoch.test_accuracy);
    body.push_str("<h2>By epoch</h2>\n");
    body.push_str(CHARTS);
    along(body, "training loss and test loss", "epoch", &drawn, &losses.iter().collect::<Vec<_>>());
    along(body, "test accuracy in %", "epoch", &drawn, &[&accuracy]);
    body.push_str("</div>\n");
}

/// A chart by updates, below its title.
fn chart(body: &mut String, title: &str, drawn: &Drawn, curves: &[&Curve]) {
    along(body, title, "update", drawn, curves);
}

fn along(body: &mut String, title: &str, along: &str, drawn: &Drawn, curves: &[&Curve]) {
    let lines = curves.iter().map(|curve| Line { name: &curve.name, values: curve.values.clone() });
    let lines = Lines { title, along, places: &drawn.updates, lines: lines.collect() };
    let _ = writeln!(body, "<figure style=\"margin:0\"><figcaption>{}</figcaption>", safe(title));
    body.push_str(&lines.svg());
    body.push_str("</figure>\n");
}

/// Text of several lines, made safe.
fn safe_lines(text: &str) -> String {
    text.lines().map(safe).collect::<Vec<_>>().join("\n")
}
/// The buckets that ranks reduce, in the order of the calls; empty on one rank.
fn buckets(plan: &Plan) -> String {
    /// Rows of the table; a naive plan has one for each tensor.
    const MOST: usize = 64;
    if plan.buckets().is_empty() {
        return String::new();
    }
    let topology = plan.topology();
    let mut table = format!(
        "<h2>Buckets between {} ranks, ZeRO stage {}</h2>\n\
         <table><tr><th>bucket</th><th>tensors</th><th>elements</th><th>of rank {}</th></tr>\n",
        topology.world,
        plan.zero().number(),
        topology.rank
    );
    for (index, bucket) in plan.buckets().iter().enumerate().take(MOST) {
        let part = bucket.part(plan.shard_place().rank);
        let _ = writeln!(
            table,
            "<tr><td>{index}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            plan.segments()[bucket.segment].tensors.len(),
            grouped(bucket.numel()),
            grouped(part.end - part.start),
        );
    }
    table.push_str("</table>\n");
    if let Some(more) = plan.buckets().len().checked_sub(MOST).filter(|&more| more > 0) {
        let _ = writeln!(table, "<p>and {more} more buckets</p>");
    }
    table
}
