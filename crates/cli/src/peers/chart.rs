//! Bars: times as a chart.

use std::fmt::Write;

use fusestep::Figures;
use fusestep_pictures::{Bar, Bars, Group, Place, Side, safe};
use fusestep_tensor::grouped;

use super::{OUR_NAME, PeerSummary};
use crate::output::duration;
use crate::records::told::{now, typed};

/// Machine and day of the times, and the command that repeats them.
#[derive(Debug)]
pub(super) struct Measured {
    processor: String,
    date: String,
    command: String,
}

impl Measured {
    /// Machine, day and command of this run.
    pub(super) fn here() -> Self {
        let date = now();
        let day = date.split(['T', ' ']).next().unwrap_or_default().to_owned();
        Self { processor: Figures::unmeasured().processor, date: day, command: typed() }
    }
}

/// Table and bars as a part of a page.
pub(super) fn section(summary: &PeerSummary, measured: &Measured) -> String {
    let mut body = format!(
        "<p>{} on {} parameters, {} elements of {}; {} threads, {}. The best of all rounds, in \
         turns.</p>\n{}<h2>Numbers</h2>\n<table>\n",
        summary.optimizer,
        summary.parameters,
        grouped(summary.elements),
        summary.kept(),
        summary.threads,
        summary.simd,
        bars(summary, measured).svg(Place::Page),
    );
    for (name, ns, note) in summary.rows() {
        let _ = writeln!(
            body,
            "<tr><td>{}</td><td class=\"n\">{}</td><td>{note}</td></tr>",
            safe(&name),
            duration(ns)
        );
    }
    for absent in &summary.absent {
        let _ = writeln!(
            body,
            "<tr><td>{}</td><td></td><td>not timed: {}; to add it: {}</td></tr>",
            safe(&absent.name),
            safe(&absent.reason),
            safe(&absent.help)
        );
    }
    body.push_str("</table>\n<h2>Plan of our step</h2>\n");
    body
}

/// The bars as a file of their own, dark or light as the reader's system is.
pub(super) fn picture(summary: &PeerSummary, measured: &Measured) -> String {
    bars(summary, measured).svg(Place::File)
}

/// A bar for each time.
fn bars(summary: &PeerSummary, measured: &Measured) -> Bars<'static> {
    let rows = summary.rows().into_iter().enumerate();
    let bars = rows.map(|(at, (name, ns, _))| {
        let side = match at {
            0 => Side::Memory,
            _ if name.starts_with(OUR_NAME) => Side::Ours,
            _ => Side::Theirs,
        };
        let note = label(summary, at, ns);
        Bar { name, units: ns / summary.ns_per_step, note, side }
    });
    let state = match summary.state_dtype {
        "f32" => String::new(),
        other => format!(", state in {other}"),
    };
    let title = format!(
        "{}, {} elements{state}: {}, {} threads, {}",
        summary.optimizer,
        grouped(summary.elements),
        measured.processor,
        summary.threads,
        measured.date
    );
    let group = Group { title, bars: bars.collect(), notes: Vec::new() };
    let mut bars = Bars { title: "Time of a step", groups: vec![group] };
    bars.groups[0].notes = footnotes(summary, &bars);
    bars.groups[0].notes.push(measured.command.clone());
    bars
}

/// A row's time, and how it compares with ours.
fn label(summary: &PeerSummary, row: usize, ns: f64) -> String {
    let mut label = duration(ns);
    if row > 1 {
        let _ = write!(label, ", {:.1} times ours", ns / summary.ns_per_step);
    }
    label
}

/// Meaning of the colours and of a gap, and why a step may take less than a stream.
fn footnotes(summary: &PeerSummary, bars: &Bars<'_>) -> Vec<String> {
    let gap = if bars.is_broken() { " A bar with a gap is longer than drawn." } else { "" };
    let mut notes = vec![format!("Blue is ours.{gap}")];
    if summary.ns_per_step < summary.ceiling_ns {
        notes.push("The stream is a plain loop: a step may fetch ahead better.".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::{Absent, PeerTime};
    use super::*;

    fn summary(peers: &[(&str, f64)]) -> PeerSummary {
        let peer = |(name, times): &(&str, f64)| PeerTime {
            name: (*name).to_owned(),
            version: "1".to_owned(),
            ns_per_step: 100.0 * times,
            times_ours: *times,
        };
        PeerSummary {
            parameters: 1,
            elements: 1,
            optimizer: "adamw",
            state_dtype: "f32",
            simd: "portable",
            threads: 1,
            ns_per_step: 100.0,
            ceiling_ns: 50.0,
            share_of_ceiling: 0.5,
            peers: peers.iter().map(peer).collect(),
            absent: vec![Absent {
                name: "none".to_owned(),
                reason: "<i>".to_owned(),
                help: "&".to_owned(),
            }],
        }
    }

    fn measured() -> Measured {
        let [processor, date, command] =
            ["A processor", "2026-01-02", "fusestep bench <file> --peers"].map(str::to_owned);
        Measured { processor, date, command }
    }

    #[test]
    fn a_picture_says_what_was_measured_where_and_how_and_names_are_not_obeyed() {
        let summary = summary(&[("<b>", 4.0), ("fusestep through candle", 1.0), ("slow", 40.0)]);
        let svg = picture(&summary, &measured());
        for told in ["adamw, 1 elements", "A processor", "2026-01-02", "&lt;file&gt; --peers"] {
            assert!(svg.contains(told), "{told} in {svg}");
        }
        assert!(svg.contains("40.0 times ours") && svg.contains("A bar with a gap"), "{svg}");
        let page = section(&summary, &measured());
        assert!(page.contains("&lt;b&gt; (1)") && !page.contains("<b>"));
        assert!(page.contains("not timed: &lt;i&gt;; to add it: &amp;"));
        // The memory's, ours twice, and three peers', of which one has a gap.
        let of = |side: Side| {
            let bars = bars(&summary, &measured());
            bars.groups[0].bars.iter().filter(|bar| bar.side == side).count()
        };
        assert_eq!([of(Side::Memory), of(Side::Ours), of(Side::Theirs)], [1, 2, 2]);
        assert_eq!(svg.matches("<polygon").count(), 6, "{svg}");
    }

    /// The page's picture is what this draws of the numbers beside it.
    /// `FUSESTEP_BLESS=1 cargo test --release -p fusestep-cli --bins` draws it anew.
    #[test]
    fn the_picture_of_the_readme_is_drawn_from_its_numbers() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pictures");
        let text = std::fs::read_to_string(format!("{folder}/peers.json")).unwrap();
        let found: Value = serde_json::from_str(&text).unwrap();
        let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
        let peer = |peer: &Value| PeerTime {
            name: peer["name"].as_str().unwrap().to_owned(),
            version: peer["version"].as_str().unwrap().to_owned(),
            ns_per_step: number(peer, "ns_per_step"),
            times_ours: number(peer, "ns_per_step") / number(&found, "ns_per_step"),
        };
        let text = |key: &str| found[key].as_str().unwrap().to_owned();
        let measured =
            Measured { processor: text("processor"), date: text("date"), command: text("command") };
        let summary = PeerSummary {
            parameters: number(&found, "parameters") as usize,
            elements: number(&found, "elements") as u64,
            threads: number(&found, "threads") as usize,
            ns_per_step: number(&found, "ns_per_step"),
            ceiling_ns: number(&found, "ceiling_ns"),
            peers: found["peers"].as_array().unwrap().iter().map(peer).collect(),
            ..summary(&[])
        };
        let (path, svg) = (format!("{folder}/peers.svg"), picture(&summary, &measured));
        if std::env::var_os("FUSESTEP_BLESS").is_some() {
            std::fs::write(&path, &svg).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), svg, "{path} is stale");
    }
}
