//! Bars: times as a chart.

use std::fmt::Write;

use fusestep_tensor::escaped;

use super::{OUR_NAME, PeerSummary};
use crate::output::duration;

/// Size of a picture in SVG units.
const WIDTH: f64 = 1000.0;
const ROW: f64 = 30.0;
const FONT: f64 = 15.0;

/// Room for one character of any font without serifs, in units.
const CHARACTER: f64 = 0.64 * FONT;

/// Most characters of a name; beside the longest name and its time there is room for bars in any
/// case.
const MOST_OF_NAME: usize = 42;

/// Least room for bars.
const LEAST_BARS: f64 = 200.0;

/// Room between a text and its bar.
const GAP: f64 = 10.0;

/// The longest bar that is drawn to scale, in times ours; longer bars would leave a pixel for the
/// others.
const MOST_TIMES: f64 = 8.0;

/// Colors of the ceiling, of our bars and of the peers' bars.
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

/// The bars as a file of their own, dark or light as the reader's system is.
pub(super) fn picture(summary: &PeerSummary) -> String {
    let style = "<style>svg{color:#1c1c1c}\
                 @media(prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>";
    bars(summary).replacen("<svg ", "<svg xmlns=\"http://www.w3.org/2000/svg\" ", 1).replacen(
        '>',
        &format!(">{style}"),
        1,
    )
}

/// A bar for each time, to scale; a bar that would leave the picture is drawn with a gap.
fn bars(summary: &PeerSummary) -> String {
    let rows = summary.rows();
    let longest = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    let scale = longest.min(MOST_TIMES * summary.ns_per_step);
    let names: Vec<String> = rows.iter().map(|(name, ..)| shortened(name)).collect();
    let labels: Vec<String> =
        rows.iter().enumerate().map(|(at, row)| label(summary, at, row.1)).collect();
    let names_width = widest(&names) + GAP;
    let room = (WIDTH - names_width - widest(&labels) - GAP).max(LEAST_BARS);
    let height = ROW * (rows.len() + 1) as f64 + 10.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" font-size=\"{FONT}\" \
         font-family=\"system-ui,sans-serif\">\n"
    );
    for (at, (name, ns, _)) in rows.iter().enumerate() {
        let (top, length) = (ROW * at as f64 + 5.0, room * (ns / scale).min(1.0));
        let color = match at {
            0 => CEILING,
            _ if name.starts_with(OUR_NAME) => OURS,
            _ => THEIRS,
        };
        let (end, start, base) = (names_width - GAP, names_width + length + GAP, top + 15.0);
        let (name, label) = (text(&names[at]), &labels[at]);
        let _ = writeln!(
            svg,
            "<text x=\"{end:.0}\" y=\"{base:.1}\" text-anchor=\"end\" fill=\"currentColor\">\
             {name}</text>\
             <path d=\"{}\" fill=\"{color}\"/>\
             <text x=\"{start:.1}\" y=\"{base:.1}\" fill=\"currentColor\">{label}</text>",
            bar([names_width, top, length], if *ns > scale { Bar::Broken } else { Bar::Whole }),
        );
    }
    let base = ROW * rows.len() as f64 + 20.0;
    let _ = writeln!(
        svg,
        "<text x=\"{:.0}\" y=\"{base:.1}\" font-size=\"12\" fill=\"currentColor\">{}</text>",
        GAP,
        footnote(summary, longest > scale)
    );
    svg.push_str("</svg>\n");
    svg
}

/// Whether a bar is drawn as long as its time, or with a gap.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bar {
    Whole,
    Broken,
}

/// The outline of a bar at `x` and `y`, of `length` units; a slanted gap breaks it.
fn bar([x, y, length]: [f64; 3], kind: Bar) -> String {
    let block = |from: f64, to: f64, slant: [f64; 2]| {
        format!(
            "M{:.1} {y:.1}L{:.1} {y:.1}L{:.1} {bottom:.1}L{:.1} {bottom:.1}Z",
            from + slant[0],
            to + slant[1],
            to - slant[1],
            from - slant[0],
            bottom = y + 20.0
        )
    };
    match kind {
        Bar::Whole => block(x, x + length, [0.0, 0.0]),
        Bar::Broken => {
            let at = x + 0.85 * length;
            let first = block(x, at - 4.0, [0.0, 4.0]);
            first + &block(at + 4.0, x + length, [4.0, 0.0])
        }
    }
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
fn footnote(summary: &PeerSummary, is_broken: bool) -> String {
    let mut text = String::from("Blue is ours.");
    if is_broken {
        text.push_str(" A bar with a gap is longer than drawn.");
    }
    if summary.ns_per_step < summary.ceiling_ns {
        text.push_str(" The stream is a plain loop: a step may fetch ahead better.");
    }
    text
}

/// Room for the widest of these texts.
fn widest(texts: &[String]) -> f64 {
    let most = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0);
    most as f64 * CHARACTER + GAP
}

/// A name that leaves room for bars.
fn shortened(name: &str) -> String {
    if name.chars().count() <= MOST_OF_NAME {
        return name.to_owned();
    }
    name.chars().take(MOST_OF_NAME - 1).chain(['…']).collect()
}

/// Text that a page shows and does not obey: names come from other programs.
fn text(name: &str) -> String {
    escaped(name).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
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

    /// Each bar's length and colour.
    fn drawn(svg: &str) -> Vec<(f64, &str)> {
        let bars = svg.split("<path d=\"M").skip(1).map(|rest| {
            let (path, rest) = rest.split_once("\" fill=\"").unwrap();
            let xs = path.split(['M', 'L', 'Z']).filter_map(|point| point.split_once(' '));
            let xs: Vec<f64> = xs.map(|(x, _)| x.parse().unwrap()).collect();
            let [least, most] = [f64::min, f64::max].map(|of| xs.iter().copied().reduce(of));
            (most.unwrap() - least.unwrap(), rest.split('"').next().unwrap())
        });
        bars.collect()
    }

    /// Where each text begins and ends, if a character is as wide as a digit of a wide font.
    fn texts(svg: &str) -> Vec<(f64, f64, &str)> {
        let texts = svg.split("<text x=\"").skip(1).map(|rest| {
            let (x, rest) = rest.split_once('"').unwrap();
            let (attributes, rest) = rest.split_once('>').unwrap();
            let shown = rest.split_once("</text>").unwrap().0;
            let size = if attributes.contains("font-size=\"12\"") { 12.0 } else { FONT };
            let x: f64 = x.parse().unwrap();
            let width = 0.636 * size * shown.chars().count() as f64;
            if attributes.contains("text-anchor=\"end\"") {
                (x - width, x, shown)
            } else {
                (x, x + width, shown)
            }
        });
        texts.collect()
    }

    #[test]
    fn bars_are_to_scale_and_names_are_not_obeyed() {
        let summary = summary(&[("<b>", 4.0), ("fusestep through candle", 1.0), ("slow", 40.0)]);
        let svg = picture(&summary);
        let bars = drawn(&svg);
        let colors: Vec<&str> = bars.iter().map(|bar| bar.1).collect();
        assert_eq!(colors, [CEILING, OURS, THEIRS, OURS, THEIRS]);
        // In units of a step; the last one is broken at eight.
        let times = bars.iter().map(|(length, _)| length / bars[1].0);
        for (found, expected) in times.zip([0.5, 1.0, 4.0, 1.0, 8.0]) {
            assert!((found - expected).abs() < 0.01, "{svg}");
        }
        assert_eq!(svg.matches('Z').count(), bars.len() + 1, "one bar has a gap: {svg}");
        assert!(svg.contains("40.0 times ours") && svg.contains("A bar with a gap"), "{svg}");
        let page = section(&summary);
        assert!(page.contains("&lt;b&gt; (1)") && !page.contains("<b>"));
        assert!(page.contains("not timed: &lt;i&gt;; to add it: &amp;"));
    }

    #[test]
    fn texts_lie_in_the_frame_and_clear_of_bars_at_any_length() {
        let long = "A peer whose name is longer than any that was ever thought of, by far";
        for peers in [&[][..], &[("b", 1.5)], &[(long, 4e7), ("slow", 123_456.0)], &[(long, 1.0)]] {
            let summary = PeerSummary { ceiling_ns: 120.0, ..summary(peers) };
            let svg = picture(&summary);
            for (start, end, text) in texts(&svg) {
                assert!(start >= 0.0 && end <= WIDTH, "{start} to {end}: {text} in {svg}");
            }
            assert!(drawn(&svg).iter().all(|bar| bar.0 >= 1.0 && bar.0 < WIDTH), "{svg}");
        }
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
        let summary = PeerSummary {
            ns_per_step: number(&found, "ns_per_step"),
            ceiling_ns: number(&found, "ceiling_ns"),
            peers: found["peers"].as_array().unwrap().iter().map(peer).collect(),
            ..summary(&[])
        };
        let (path, svg) = (format!("{folder}/peers.svg"), picture(&summary));
        if std::env::var_os("FUSESTEP_BLESS").is_some() {
            std::fs::write(&path, &svg).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), svg, "{path} is stale");
    }
}
