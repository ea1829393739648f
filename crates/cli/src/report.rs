//! The page that `train --report` writes: curves and plan, nothing from outside.

use std::fmt::Write;

use fusestep_planner::{Plan, html_page};

use crate::output::duration;
use crate::train::summary::{Epoch, TrainSummary};

/// Size of a chart in SVG units, and the room for its labels.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 14.0;

/// Labelled lines across a chart.
const GRID_LINES: usize = 4;

/// The page.
pub(crate) fn report_page(summary: &TrainSummary, plan: &Plan) -> String {
    let skipped = Some(summary.skipped_steps).filter(|skipped| *skipped > 0);
    let ours = Some(summary.optimizer_ns_per_step).filter(|_| !summary.was_complete());
    let rows = [
        ("test accuracy", Some(format!("{:.2} %", 100.0 * summary.test_accuracy))),
        ("final loss", Some(format!("{:.4}", summary.final_loss))),
        ("steps", Some(summary.steps.to_string())),
        ("steps skipped", skipped.map(|skipped| skipped.to_string())),
        ("optimizer, per step", ours.map(duration)),
        ("candle's AdamW, per step", summary.candle_ns_per_step.map(duration)),
        ("parameters (xxh3)", Some(summary.params_hash.clone())),
    ];
    let mut body = String::from("<table>");
    for (what, value) in rows.into_iter().filter_map(|(what, value)| Some((what, value?))) {
        let _ = write!(body, "<tr><td>{what}</td><td class=\"n\">{value}</td></tr>");
    }
    body.push_str("</table>\n");
    type Curve = fn(&Epoch) -> f64;
    let curves: [(_, Curve, _, _); 3] = [
        ("Training loss", |epoch| epoch.loss, "#4878a8", 3),
        ("Test loss", |epoch| epoch.test_loss, "#5a9367", 3),
        ("Test accuracy in %", |epoch| 100.0 * epoch.test_accuracy, "#c27c3e", 1),
    ];
    for (what, of, color, decimals) in curves {
        let values: Vec<f64> = summary.history.iter().map(of).collect();
        let curve = curve(&values, color, decimals);
        let _ = write!(body, "<h2>{what} by epoch</h2>\n{curve}");
    }
    body.push_str("<h2>Plan of the optimizer step</h2>\n");
    body.push_str(&plan.to_html_fragment());
    body.push_str(&buckets(plan));
    html_page("fusestep train", &body)
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
            bucket.numel(),
            part.end - part.start,
        );
    }
    table.push_str("</table>\n");
    if let Some(more) = plan.buckets().len().checked_sub(MOST).filter(|&more| more > 0) {
        let _ = writeln!(table, "<p>and {more} more buckets</p>");
    }
    table
}

/// A line over epochs 1, 2, …, with labelled axes.
fn curve(values: &[f64], color: &str, decimals: usize) -> String {
    let (low, high) = bounds(values);
    let x = |at: usize| {
        let last = values.len().saturating_sub(1).max(1) as f64;
        LEFT + (WIDTH - LEFT - 20.0) * at as f64 / last
    };
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" font-size=\"15\">");
    for line in 0..=GRID_LINES {
        let value = low + (high - low) * line as f64 / GRID_LINES as f64;
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{0:.1}\" y2=\"{0:.1}\" stroke=\"#8888\" stroke-width=\"1\"/>\
             <text x=\"{1:.1}\" y=\"{2:.1}\" text-anchor=\"end\" fill=\"currentColor\">{value:.decimals$}</text>",
            y(value),
            LEFT - 8.0,
            y(value) + 5.0,
        );
    }
    let labels = values.len().div_ceil(10).max(1);
    for at in (0..values.len()).step_by(labels) {
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"currentColor\">{}</text>",
            x(at),
            HEIGHT - BOTTOM + 24.0,
            at + 1,
        );
    }
    let points: Vec<String> = values
        .iter()
        .enumerate()
        .map(|(at, &value)| format!("{:.1},{:.1}", x(at), y(value)))
        .collect();
    let _ = write!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"3\"/>",
        points.join(" ")
    );
    for (at, &value) in values.iter().enumerate() {
        let _ = write!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{color}\"><title>epoch {}: {value:.4}</title></circle>",
            x(at),
            y(value),
            at + 1,
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// The least and greatest value, apart even if all are equal.
fn bounds(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !low.is_finite() || !high.is_finite() {
        return (0.0, 1.0);
    }
    if low == high {
        return (low - 0.5, high + 0.5);
    }
    (low, high)
}
