//! Lines over updates: round ticks, gaps where nothing is known, and texts within the frame.

use plotters::prelude::*;

use crate::canvas::{
    Anchor, Area, COLORS, GREY, Size, at, color, drawn, fine, picture, room, shortened, style,
    widest, write,
};
use crate::scale::{Axis, Scale};

/// Size of a picture and of its texts, in units. Two of them lie beside each other on a page.
const WIDTH: f64 = 520.0;
const PLOT: f64 = 190.0;
const FONT: f64 = 13.0;

/// Room around texts.
const GAP: f64 = 6.0;

/// Height of a line of texts.
const LINE: f64 = 18.0;

/// Lines of a picture over the same places.
pub struct Lines<'a> {
    /// Title, for readers that cannot see it.
    pub title: &'a str,
    /// Name of the places along the axis.
    pub along: &'a str,
    /// Places of the values, whole numbers.
    pub places: &'a [f64],
    /// The lines, told from each other by colours and by a legend.
    pub lines: Vec<Line<'a>>,
}

/// A line: a value for each place, infinite or NaN where there is none.
pub struct Line<'a> {
    /// Name in the legend.
    pub name: &'a str,
    /// Values in the order of the places.
    pub values: Vec<f64>,
}

/// An entry of the legend, at its place.
struct Entry {
    x: f64,
    row: usize,
    name: String,
}

impl Lines<'_> {
    /// The picture, as a part of a page.
    pub fn svg(&self) -> String {
        let values = self.lines.iter().flat_map(|line| line.values.iter().copied());
        let down = Scale::of(values).with_ticks(5);
        let left = widest(down.ticks.iter().map(|tick| &tick.label[..]), FONT) + 2.0 * GAP;
        let across = places_below(self.places, WIDTH - left);
        // The last label may lie at the plot's end.
        let right = widest(across.ticks.iter().map(|tick| &tick.label[..]), FONT) / 2.0 + GAP;
        let legend = legend(&self.lines);
        let rows = legend.last().map_or(0, |entry| entry.row + 1);
        let top = GAP + FONT / 2.0;
        let height = top + PLOT + 2.0 * LINE + GAP + LINE * rows as f64;
        let size = Size { width: WIDTH, height };
        let along = self.named_places(&down.scale);
        picture(self.title, size, |area| {
            let (plot, _) = area.split_vertically(fine(top + PLOT + 2.0 * LINE));
            let mut builder = ChartBuilder::on(&plot);
            builder
                .margin_top(fine(top))
                .margin_right(fine(right))
                .set_label_area_size(LabelAreaPosition::Left, fine(left))
                .set_label_area_size(LabelAreaPosition::Bottom, fine(2.0 * LINE));
            let mut chart = drawn(builder.build_cartesian_2d(across.clone(), down.clone()));
            let text = style(FONT, Anchor::Start);
            drawn(
                chart
                    .configure_mesh()
                    .disable_x_mesh()
                    .axis_style(TRANSPARENT)
                    .set_tick_mark_size(LabelAreaPosition::Bottom, fine(GAP))
                    .set_tick_mark_size(LabelAreaPosition::Left, fine(GAP))
                    .bold_line_style(GREY.stroke_width(10))
                    .light_line_style(TRANSPARENT)
                    .label_style(text.clone())
                    .axis_desc_style(text)
                    .x_desc(&along)
                    .x_label_formatter(&|place| across.label(*place))
                    .y_label_formatter(&|value| down.label(*value))
                    .draw(),
            );
            for (line, hex) in self.lines.iter().zip(COLORS.iter().cycle()) {
                let color = color(hex);
                for piece in self.pieces(&down.scale, &line.values) {
                    match &piece[..] {
                        [point] => {
                            let dot = Circle::new(*point, fine(3.0), color.filled());
                            drawn(chart.draw_series([dot]));
                        }
                        _ => {
                            let line = LineSeries::new(piece, color.stroke_width(16));
                            drawn(chart.draw_series(line));
                        }
                    }
                }
            }
            self.draw_legend(area, &legend, top + PLOT + 2.5 * LINE + GAP / 2.0);
        })
    }

    /// The places' name, and how values are drawn above them where that is not by themselves.
    fn named_places(&self, scale: &Scale) -> String {
        let log = if scale.is_log() { " (values on a log scale)" } else { "" };
        format!("{}{log}", self.along)
    }

    /// Parts of a line between which values are missing.
    fn pieces(&self, scale: &Scale, values: &[f64]) -> Vec<Vec<(f64, f64)>> {
        let points: Vec<(f64, f64)> =
            self.places.iter().zip(values).map(|(place, value)| (*place, *value)).collect();
        let pieces = points.split(|(_, value)| !scale.takes(*value));
        pieces.filter(|piece| !piece.is_empty()).map(<[_]>::to_vec).collect()
    }

    fn draw_legend(&self, area: &Area<'_>, legend: &[Entry], middle: f64) {
        for (entry, hex) in legend.iter().zip(COLORS.iter().cycle()) {
            let y = middle + LINE * entry.row as f64;
            let corners = [at((entry.x, y - 2.0)), at((entry.x + 12.0, y + 2.0))];
            drawn(area.draw(&Rectangle::new(corners, color(hex).filled())));
            write(area, &entry.name, (entry.x + LINE, y), &style(FONT, Anchor::Start));
        }
    }
}

/// The axis of places: whole numbers, as many as have room beside each other.
fn places_below(places: &[f64], width: f64) -> Axis {
    let scale = Scale::linear(places.iter().copied());
    for most in (1..=8).rev() {
        let mut axis = scale.with_ticks(most);
        axis.ticks.retain(|tick| tick.value.fract() == 0.0);
        for tick in &mut axis.ticks {
            // Places are whole numbers, however close to each other they are.
            if tick.value.abs() < 1e7 {
                tick.label = format!("{:.0}", tick.value);
            }
        }
        let room = widest(axis.ticks.iter().map(|tick| &tick.label[..]), FONT) + 2.0 * GAP;
        if room * (axis.ticks.len() + 1) as f64 <= width || most == 1 {
            axis.ticks.truncate(((width / room) as usize).max(1));
            return axis;
        }
    }
    unreachable!("the last round returns")
}

/// Names of lines with their places, in as many rows as they take; none for a single line.
fn legend(lines: &[Line<'_>]) -> Vec<Entry> {
    if lines.len() < 2 {
        return Vec::new();
    }
    let (mut x, mut row) = (GAP, 0);
    let entries = lines.iter().map(|line| {
        let name = shortened(line.name, WIDTH - LINE - 3.0 * GAP, FONT);
        let width = LINE + room(&name, FONT) + 2.0 * GAP;
        if x + width > WIDTH && x > GAP {
            (x, row) = (GAP, row + 1);
        }
        let entry = Entry { x, row, name };
        x += width;
        entry
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seen::{Seen, height, texts, width};

    fn chart(lines: &[(&str, &[f64])], places: &[f64]) -> String {
        let lines = lines.iter().map(|(name, values)| Line { name, values: values.to_vec() });
        Lines { title: "t", along: "update", places, lines: lines.collect() }.svg()
    }

    #[test]
    fn texts_lie_in_the_frame_and_clear_of_each_other_at_any_length() {
        let long = "encoder.layers.11.attention.self.query.weight & <more> than fits a row, by far";
        let places: Vec<f64> = (0..2_000).map(|at| 123_456_789.0 + f64::from(at) * 1e6).collect();
        let waves: Vec<f64> = (0..2_000).map(|at| f64::from(at % 7)).collect();
        let scaled = |by: f64| -> Vec<f64> { waves.iter().map(|wave| wave * by).collect() };
        let (tiny, huge, low) = (scaled(1e-300), scaled(-1e300), scaled(1e-7));
        let many: Vec<(&str, &[f64])> = (0..12).map(|at| (["a", long][at % 2], &low[..])).collect();
        for svg in [
            chart(&[(long, &tiny)], &places),
            chart(&[(long, &huge), ("b", &low)], &places),
            chart(&many, &places),
            chart(&[("a", &[])], &[]),
            chart(&[("a", &[f64::NAN])], &[1.0]),
            chart(&[("a", &[2.5e-12])], &[1e15]),
            chart(&[("a", &[-1e-300, 1e300])], &[1.0, 2.0]),
            chart(&[("a", &[1.0, 2.0])], &[9_999_999.0, 10_000_001.0]),
        ] {
            let texts = texts(&svg);
            for (at, text) in texts.iter().enumerate() {
                assert!(text.start >= 0.0 && text.end <= width(&svg), "{text:?} in {svg}");
                assert!(text.y >= 0.0 && text.y <= height(&svg), "{text:?} in {svg}");
                let clash = texts[..at].iter().find(|other| {
                    (other.y - text.y).abs() < 0.8 * text.font
                        && other.start < text.end
                        && text.start < other.end
                });
                assert!(clash.is_none(), "{text:?} and {clash:?} in {svg}");
            }
            assert!(!svg.contains("<more>") && !svg.contains("NaN"), "{svg}");
            // A label at each axis, and the name of one.
            let is_number = |text: &&Seen| text.text.parse::<f64>().is_ok();
            assert!(texts.iter().filter(is_number).count() >= 2, "{svg}");
            assert!(texts.iter().any(|text| text.text == "update"), "{svg}");
        }
    }

    #[test]
    fn a_log_scale_is_told() {
        let told = |values: &[f64]| chart(&[("a", values)], &[1.0, 2.0]);
        let label = "update (values on a log scale)";
        let has_label = |svg: &str| texts(svg).iter().any(|text| text.text == label);
        assert!(has_label(&told(&[1e-3, 1.0])));
        assert!(!has_label(&told(&[1.0, 2.0])));
    }

    #[test]
    fn lines_have_gaps_where_values_are_missing_and_the_rest_is_to_scale() {
        let values = [1.0, 2.0, f64::NAN, 3.0, f64::INFINITY, 5.0, 4.0];
        let svg = chart(&[("a", &values)], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!((svg.matches("points=\"").count(), svg.matches("<circle").count()), (2, 1));
        let points = svg.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let ys = points.split_whitespace().map(|point| point.split_once(',').unwrap().1);
        let ys: Vec<f64> = ys.map(|y| y.parse().unwrap()).collect();
        // From 1 to 5 over the height of the plot.
        let (bottom, plot) = (f64::from(fine(GAP + FONT / 2.0 + PLOT)), f64::from(fine(PLOT)));
        assert!((ys[0] - bottom).abs() <= 10.0, "{svg}");
        assert!((ys[0] - ys[1] - plot / 4.0).abs() <= 2.0, "{svg}");
    }
}
