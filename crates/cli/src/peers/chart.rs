//! Times as bars.

use std::fmt::Write;

use fusestep_tensor::escaped;

use super::PeerSummary;
use crate::output::duration;

/// Size of a picture in SVG units, and the room for names and times.
const WIDTH: f64 = 1000.0;
const ROW: f64 = 30.0;
const NAMES: f64 = 330.0;
const TIMES: f64 = 200.0;

/// Colors of a ceiling, of ours and of theirs.
const CEILING: &str = "#8888";
const OURS: &str = "#4878a8";
const THEIRS: &str = "#c27c3e";

/// Table and bars as a part of a page.
pub(super) fn section(summary: &PeerSummary) -> String {
    let mut body = format!(
        "<p>{} on {} parameters, {} elements of f32; {} threads, {}. The best of all rounds, in \
         turns.</p>\n{}<h2>Numbers</h2>\n<table>\n",
        summary.optimizer,
        summary.parameters,
        summary.elements,
        summary.threads,
        summary.simd,
        bars(summary),
    );
    for (name, ns, note) in summary.rows() {
        let _ = writeln!(
            body,
            "<tr><td>{}</td><td class=\"n\">{}</td><td>{note}</td></tr>",
            text(&name),
            duration(ns)
        );
    }
    for absent in &summary.absent {
        let _ = writeln!(
            body,
            "<tr><td>{}</td><td></td><td>not timed: {}; to add it: {}</td></tr>",
            text(&absent.name),
            text(&absent.reason),
            text(&absent.help)
        );
    }
    body.push_str("</table>\n<h2>Plan of our step</h2>\n");
    body
}

/// The bars as a file of their own, dark or light as the reader has it.
pub(super) fn picture(summary: &PeerSummary) -> String {
    let style = "<style>svg{color:#1c1c1c}\
                 @media(prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>";
    bars(summary).replacen("<svg ", "<svg xmlns=\"http://www.w3.org/2000/svg\" ", 1).replacen(
        '>',
        &format!(">{style}"),
        1,
    )
}

/// A bar for each time, to scale; a bar that would leave the picture is cut and says so.
fn bars(summary: &PeerSummary) -> String {
    let rows = summary.rows();
    let longest = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    // A peer that takes forty times as long would leave a pixel for the others.
    let scale = longest.min(8.0 * summary.ns_per_step);
    let room = WIDTH - NAMES - TIMES;
    let height = ROW * rows.len() as f64 + 10.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" font-size=\"15\" \
         font-family=\"system-ui,sans-serif\">\n"
    );
    for (at, (name, ns, _)) in rows.iter().enumerate() {
        let top = ROW * at as f64 + 5.0;
        let length = room * (ns / scale).min(1.0);
        let color = match at {
            0 => CEILING,
            1 => OURS,
            _ => THEIRS,
        };
        let mut label = duration(*ns);
        if at > 1 {
            let _ = write!(label, ", {:.1} times ours", ns / summary.ns_per_step);
        }
        if *ns > scale {
            label.push_str(" (cut)");
        }
        let (end, start, base) = (NAMES - 10.0, NAMES + length + 8.0, top + 15.0);
        let name = text(name);
        let _ = writeln!(
            svg,
            "<text x=\"{end:.0}\" y=\"{base:.1}\" text-anchor=\"end\" fill=\"currentColor\">\
             {name}</text>\
             <rect x=\"{NAMES}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"20\" \
             fill=\"{color}\"/>\
             <text x=\"{start:.1}\" y=\"{base:.1}\" fill=\"currentColor\">{label}</text>"
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Text that a page shows and does not obey: names come from other programs.
fn text(name: &str) -> String {
    escaped(name).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::{Absent, PeerTime};
    use super::*;

    #[test]
    fn bars_are_to_scale_and_names_are_not_obeyed() {
        let peer = |name: &str, times: f64| PeerTime {
            name: name.to_owned(),
            version: "1".to_owned(),
            ns_per_step: 100.0 * times,
            times_ours: times,
        };
        let summary = PeerSummary {
            parameters: 1,
            elements: 1,
            optimizer: "adamw",
            simd: "portable",
            threads: 1,
            ns_per_step: 100.0,
            ceiling_ns: 50.0,
            share_of_ceiling: 0.5,
            peers: vec![peer("<b>", 4.0), peer("slow", 40.0)],
            absent: vec![Absent {
                name: "none".to_owned(),
                reason: "<i>".to_owned(),
                help: "&".to_owned(),
            }],
        };
        let svg = picture(&summary);
        // 470 units are 8 times ours.
        for width in ["29.4", "58.8", "235.0", "470.0"] {
            assert!(svg.contains(&format!("width=\"{width}\"")), "{width} in {svg}");
        }
        assert!(svg.contains("40.0 times ours (cut)"), "{svg}");
        let page = section(&summary);
        assert!(page.contains("&lt;b&gt; (1)") && !page.contains("<b>"));
        assert!(page.contains("not timed: &lt;i&gt;; to add it: &amp;"));
    }
}
