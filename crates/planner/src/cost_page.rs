//! A predicted step as a page.

use std::fmt::Write;

use crate::html::escape;
use crate::{CostModel, Event, EventKind, Plan, cost, html, html_page, rank_summary};
use fusestep_tensor::grouped;

/// Width and height of the timeline's drawing, and of a row.
const WIDTH: f64 = 1_000.0;
const ROW: f64 = 22.0;

/// [`Plan::ranks_to_html`].
pub(crate) fn page(plan: &Plan, model: &CostModel) -> String {
    let topology = plan.topology();
    let title = format!("Step of rank {} of {}", topology.rank, topology.world);
    let mut page = String::new();
    let summary = rank_summary::rank_summary(plan, *model);
    let _ = writeln!(page, "<pre>{}</pre>", escape(&summary.to_string()));
    page.push_str("<h2>Timeline</h2>\n<p class=\"muted\">Backward passes and the update, calls that reduce buckets, \
         calls that gather parameters, as the cost model predicts them. Hover for numbers.</p>\n");
    draw(&mut page, &cost::timeline(plan, model));
    page.push_str(&html::fragment(plan));
    html_page(&title, &page)
}

fn draw(page: &mut String, events: &[Event]) {
    let end = events.iter().map(|event| event.end).fold(0.0, f64::max);
    let scale = WIDTH / end.max(f64::MIN_POSITIVE);
    let _ = write!(page, "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">", 3.0 * ROW);
    for event in events {
        let (row, color) = match event.kind {
            EventKind::Backward => (0.0, "#7a8ca3"),
            EventKind::Update => (0.0, "#5f8f6a"),
            EventKind::Reduce => (1.0, "#4878a8"),
            EventKind::Gather => (2.0, "#a8784a"),
        };
        let name = match event.kind {
            EventKind::Backward => "backward pass",
            EventKind::Update => "update",
            EventKind::Reduce => "bucket",
            EventKind::Gather => "gather of line",
        };
        let _ = write!(
            page,
            "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{color}\"><title>{name} {}: {} bytes, {:.3} to {:.3} ms</title></rect>",
            event.start * scale,
            row * ROW + 1.0,
            ((event.end - event.start) * scale - 0.3).max(0.2),
            ROW - 2.0,
            event.index,
            grouped(event.len_bytes),
            event.start * 1e3,
            event.end * 1e3,
        );
    }
    page.push_str("</svg>\n");
}
