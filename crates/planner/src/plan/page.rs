//! The plan as a self-contained page, storages and launches drawn to scale, and a predicted step as
//! another.

use std::fmt::Write;

use fusestep_amp::MaxNorm;
use fusestep_launch::Batch;
use fusestep_tensor::{counted, grouped, power_of_two};

use crate::plan::cost::{CostModel, Event, EventKind};
use crate::plan::stage::Stage;
use crate::plan::tensor_table::tensor_table;
use crate::plan::text::{bytes, escape};
use crate::plan::value::Plan;
use crate::plan::{cost, rank_summary};

const BAR_WIDTH: f64 = 1000.0;
const BAR_HEIGHT: f64 = 26.0;

/// Tensors narrower than this are drawn together: a bar of 10,000 tensors stays readable and small.
const MIN_WIDTH: f64 = 1.0;

const COLORS: [&str; 6] = ["#4878a8", "#6aa84f", "#c27c3e", "#8e6bb0", "#3f9aa0", "#b0556b"];

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em;\
background:#fff;color:#1c1c1c}h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}svg{width:100%;height:auto;display:block}\
table{border-collapse:collapse}td,th{padding:.2em .9em .2em 0;text-align:left;vertical-align:top}\
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.muted{color:#666}\
.wide,pre{overflow-x:auto}.k{white-space:nowrap}.why{min-width:22em}summary{cursor:pointer}\
@media(prefers-color-scheme:dark){body{background:#16181b;color:#e6e6e6}.muted{color:#9a9a9a}}";

/// A self-contained page in the plan's style, light or dark as the reader has it; `body` is HTML.
pub fn html_page(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n{body}\
         </body></html>\n"
    )
}

/// [`Plan::to_html_fragment`].
pub(crate) fn fragment(plan: &Plan) -> String {
    let mut page = String::new();
    totals(plan, &mut page);
    page.push_str("<h2>Launches</h2>\n<p class=\"muted\">Each bar is one launch; its length is its share of the largest, each \
         block a tensor to scale. Hover for names.</p>\n");
    launch_bars(plan, &mut page);
    page.push_str("<h2>Buffers</h2>\n<p class=\"muted\">Tensors in the order they lie in memory, one buffer for each role.</p>\n");
    storage_bars(plan, &mut page);
    tensor_table(plan, &mut page);
    page.push_str("<h2>What the passes did</h2>\n<table><tr><th>pass</th><th>verdict</th><th>reason</th></tr>\n");
    for note in &plan.notes {
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&note.pass),
            note.verdict,
            escape(&note.reason)
        );
    }
    page.push_str("</table>\n");
    page
}

pub(crate) fn svg(plan: &Plan) -> String {
    /// Bars drawn; a naive plan may have thousands.
    const MOST: usize = 16;
    let launches = drawn_launches(plan);
    let largest = largest(&launches);
    let rows = launches.len().min(MOST) + usize::from(launches.len() > MOST);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {BAR_WIDTH} {}\" role=\"img\" \
         font-size=\"15\" font-family=\"system-ui,sans-serif\"><style>text{{fill:#1c1c1c}}\
         @media(prefers-color-scheme:dark){{text{{fill:#e6e6e6}}}}</style>\n",
        rows as f64 * 2.0 * BAR_HEIGHT,
    );
    for (index, (label, batch, storage)) in launches.iter().take(MOST).enumerate() {
        let top = index as f64 * 2.0 * BAR_HEIGHT;
        let _ = writeln!(
            svg,
            "<text y=\"{:.0}\">launch {index}: {label}</text><g transform=\"translate(0 {:.0})\">",
            top + 0.75 * BAR_HEIGHT,
            top + BAR_HEIGHT,
        );
        blocks(&mut svg, blocks_of(plan, batch, *storage), largest);
        svg.push_str("</g>\n");
    }
    if let Some(more @ 1..) = launches.len().checked_sub(MOST) {
        let y = (MOST as f64 * 2.0 + 0.75) * BAR_HEIGHT;
        let _ = writeln!(svg, "<text y=\"{y:.0}\">and {more} more launches</text>");
    }
    svg.push_str("</svg>\n");
    svg
}

fn totals(plan: &Plan, page: &mut String) {
    let scale = plan.gradients.loss_scale.map(|scale| power_of_two(scale.scale()));
    let rows = [
        ("parameters", grouped(plan.params.len() as u64)),
        ("elements", grouped(plan.elements())),
        ("launches per step", grouped(plan.launches() as u64)),
        ("launches of the naive plan", grouped(plan.naive_launches() as u64)),
        ("optimizer state", bytes(plan.state_bytes())),
        ("memory traffic per step", bytes(plan.traffic_bytes())),
        ("norm of gradients clipped to", or_not(plan.gradients.max_norm.map(MaxNorm::value))),
        ("loss scale of the first step", or_not(scale)),
        ("argument bytes per launch", grouped(plan.limits.argument_bytes as u64)),
    ];
    page.push_str("<table>\n");
    let schedule = plan.schedule().map(ToString::to_string);
    let schedule = schedule.map(|schedule| ("learning rates follow", schedule));
    for (what, value) in schedule.into_iter().chain(rows) {
        let _ = writeln!(page, "<tr><td>{what}</td><td class=\"n\">{value}</td></tr>");
    }
    page.push_str("</table>\n");
}

/// Label, batch and storage of each launch.
fn drawn_launches(plan: &Plan) -> Vec<(String, &Batch, usize)> {
    let launches = plan.stages.iter().flat_map(|stage| stage_launches(plan, stage));
    let labelled = launches.map(|(kernel, storage, batch)| {
        let label = format!(
            "{}, {}, {}, {}",
            escape(kernel),
            counted(batch.records.len() as u64, "tensor"),
            counted(batch.chunks.into(), "chunk"),
            counted(batch.elements(), "element"),
        );
        (label, batch, storage)
    });
    labelled.collect()
}

/// Kernel, storage and batch of each launch of a stage.
fn stage_launches<'a>(plan: &'a Plan, stage: &'a Stage) -> Vec<(&'a str, usize, &'a Batch)> {
    match stage {
        Stage::Norm(norm) => {
            let launches = norm.reads.iter().flat_map(|read| {
                read.batches.iter().map(|batch| ("norm of gradients", read.storage, batch))
            });
            launches.collect()
        }
        Stage::Optimize(stage) | Stage::ReduceUpdate(stage) => {
            let kernel = plan.storages[stage.storage].kernel;
            let launch = |batch| (kernel, stage.storage, batch);
            stage.batches.iter().map(launch).collect()
        }
        _ => Vec::new(),
    }
}

/// Name and elements of each tensor of a launch.
fn blocks_of<'a>(
    plan: &'a Plan,
    batch: &'a Batch,
    storage: usize,
) -> impl Iterator<Item = (&'a str, u64)> {
    let records = batch.records.iter();
    records.map(move |record| (plan.name(storage, record.tensor), record.numel))
}

fn launch_bars(plan: &Plan, page: &mut String) {
    /// Bars drawn; a naive plan may have thousands.
    const MOST: usize = 64;
    let launches = drawn_launches(plan);
    let largest = largest(&launches);
    for (index, (label, batch, storage)) in launches.iter().take(MOST).enumerate() {
        let _ = writeln!(page, "<div>launch {index}: {label}</div>");
        bar(page, blocks_of(plan, batch, *storage), largest);
    }
    if launches.len() > MOST {
        let _ = writeln!(page, "<p>and {} more launches</p>", launches.len() - MOST);
    }
}

fn storage_bars(plan: &Plan, page: &mut String) {
    /// Storages drawn; a naive plan has one for each tensor.
    const MOST: usize = 16;
    let largest = plan.storages.iter().map(|s| s.layout.total_numel()).max().unwrap_or(0);
    for (index, storage) in plan.storages.iter().take(MOST).enumerate() {
        let roles = storage.roles();
        let _ = writeln!(
            page,
            "<div>storage {index}: {}, {} in {} ({})</div>",
            counted(storage.members.len() as u64, "tensor"),
            bytes(storage.len_bytes()),
            counted(roles.len() as u64, "buffer"),
            roles.join(", "),
        );
        let blocks = (0..storage.members.len())
            .map(|t| (plan.name(index, t as u32), storage.layout.numel(t)));
        bar(page, blocks, largest);
    }
    if plan.storages.len() > MOST {
        let _ = writeln!(page, "<p>and {} more storages</p>", plan.storages.len() - MOST);
    }
}

fn largest(launches: &[(String, &Batch, usize)]) -> u64 {
    let elements = launches.iter().map(|(_, batch, _)| batch.elements());
    elements.max().unwrap_or(0)
}

/// One bar of blocks to scale.
fn bar<'a>(page: &mut String, of: impl Iterator<Item = (&'a str, u64)>, largest: u64) {
    let _ = write!(page, "<svg viewBox=\"0 0 {BAR_WIDTH} {BAR_HEIGHT}\" role=\"img\">");
    blocks(page, of, largest);
    page.push_str("</svg>\n");
}

/// Block of a bar, in which neighbours that are too narrow to be seen come together.
#[derive(Default)]
struct Block {
    width: f64,
    /// Number of neighbours in the block.
    count: usize,
    /// Name of the first.
    first: String,
    numel: u64,
}

/// Blocks to scale; neighbours too narrow to be seen share a block.
fn blocks<'a>(page: &mut String, blocks: impl Iterator<Item = (&'a str, u64)>, largest: u64) {
    let scale = BAR_WIDTH / largest.max(1) as f64;
    let (mut x, mut color) = (0.0, 0);
    let mut pending = Block::default();
    let mut draw = |x: &mut f64, block: Block| {
        let Block { width, count, first, numel } = block;
        if count == 0 || width == 0.0 {
            return;
        }
        let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        let _ = write!(
            page,
            "<rect x=\"{x:.2}\" y=\"1\" width=\"{:.2}\" height=\"{}\" fill=\"{}\"><title>{}{more}: {} elements</title></rect>",
            (width - 0.3).max(0.2),
            BAR_HEIGHT - 2.0,
            COLORS[color % COLORS.len()],
            escape(&first),
            grouped(numel),
        );
        *x += width;
        color += 1;
    };
    for (name, numel) in blocks {
        if pending.count == 0 {
            pending.first = name.to_owned();
        }
        pending.width += numel as f64 * scale;
        pending.count += 1;
        pending.numel += numel;
        if pending.width >= MIN_WIDTH {
            draw(&mut x, std::mem::take(&mut pending));
        }
    }
    draw(&mut x, pending);
}

/// A setting of a pass, or that the pass is not there.
fn or_not(value: Option<impl ToString>) -> String {
    value.map_or("not at all".to_owned(), |value| value.to_string())
}

/// Width and height of the timeline's drawing, and of a row.
const WIDTH: f64 = 1_000.0;
const ROW: f64 = 22.0;

/// [`Plan::ranks_to_html`].
pub(crate) fn page_of_ranks(plan: &Plan, model: &CostModel) -> String {
    let topology = plan.topology();
    let title = format!("Step of rank {} of {}", topology.rank, topology.world);
    let mut page = String::new();
    let summary = rank_summary::rank_summary(plan, *model);
    let _ = writeln!(page, "<pre>{}</pre>", escape(&summary.to_string()));
    page.push_str("<h2>Timeline</h2>\n<p class=\"muted\">Backward passes and the update, calls that reduce buckets, \
         calls that gather parameters, as the cost model predicts them. Hover for numbers.</p>\n");
    draw(&mut page, &cost::timeline(plan, model));
    page.push_str(&fragment(plan));
    html_page(&title, &page)
}

fn draw(page: &mut String, events: &[Event]) {
    let end = events.iter().map(|event| event.end).fold(0.0, f64::max);
    let scale = WIDTH / end.max(f64::MIN_POSITIVE);
    let _ = write!(page, "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">", 3.0 * ROW);
    for event in events {
        let (row, color, name) = match event.kind {
            EventKind::Backward => (0.0, "#7a8ca3", "backward pass"),
            EventKind::Update => (0.0, "#5f8f6a", "update"),
            EventKind::Reduce => (1.0, "#4878a8", "bucket"),
            EventKind::Gather => (2.0, "#a8784a", "gather of line"),
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
