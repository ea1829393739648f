//! Bars of times: ours and those of peers, to scale or visibly broken.

use plotters::prelude::*;

use crate::canvas::{
    Anchor, Area, COLORS, GREY, Size, at, color, drawn, file, picture, room, shortened, style,
    widest, write,
};

/// Size of a picture and of its texts, in units.
const WIDTH: f64 = 1000.0;
const FONT: f64 = 15.0;
const ROW: f64 = 26.0;
const BAR: f64 = 18.0;

/// Room around texts.
const GAP: f64 = 10.0;

/// Most room for names and for what is written behind bars; the rest is for bars.
const MOST_OF_NAMES: f64 = 410.0;
const MOST_OF_NOTES: f64 = 340.0;

/// The longest bar that is drawn to scale, in times the unit; longer bars would leave a pixel for
/// the others.
const MOST_UNITS: f64 = 8.0;

/// Bars of a picture, in groups.
pub struct Bars<'a> {
    /// Title, for readers that cannot see it.
    pub title: &'a str,
    /// Groups of bars, from above.
    pub groups: Vec<Group>,
}

/// Bars below a line of text.
pub struct Group {
    /// Heading of the group; empty for none.
    pub title: String,
    /// The bars, from above.
    pub bars: Vec<Bar>,
    /// Lines of text below the bars.
    pub notes: Vec<String>,
}

/// A bar between its name and its note.
pub struct Bar {
    /// Name, before the bar.
    pub name: String,
    /// Length in units of the picture: ours is one long.
    pub units: f64,
    /// Text behind the bar, such as its time.
    pub note: String,
    /// Owner of the time.
    pub side: Side,
}

/// Owner of the time that a bar shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Ours: blue.
    Ours,
    /// A peer's: orange.
    Theirs,
    /// The memory's: grey.
    Memory,
}

/// Place of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Within a page, whose colours it takes.
    Page,
    /// In a file of its own, dark or light as the reader's system is.
    File,
}

/// Columns of a picture.
struct Columns {
    names: f64,
    bars: f64,
    notes: f64,
}

impl Bars<'_> {
    /// Whether a bar is longer than it is drawn.
    pub fn is_broken(&self) -> bool {
        self.all().any(|bar| bar.units > MOST_UNITS)
    }

    /// The picture.
    pub fn svg(&self, place: Place) -> String {
        let columns = self.columns();
        let texts = |group: &Group| group.notes.len() + usize::from(!group.title.is_empty());
        let lines = self.groups.iter().map(|group| group.bars.len() + texts(group)).sum::<usize>();
        let height = ROW * lines as f64 + GAP * (self.groups.len() + 1) as f64;
        let svg = picture(self.title, Size { width: WIDTH, height }, |area| {
            let mut y = GAP + ROW / 2.0;
            for group in &self.groups {
                let title = Some(&group.title).filter(|title| !title.is_empty());
                if let Some(text) = title {
                    line(area, text, y);
                    y += ROW;
                }
                for bar in &group.bars {
                    self.draw(area, &columns, bar, y);
                    y += ROW;
                }
                for text in &group.notes {
                    line(area, text, y);
                    y += ROW;
                }
                y += GAP;
            }
        });
        match place {
            Place::Page => svg,
            Place::File => file(&svg),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Bar> {
        self.groups.iter().flat_map(|group| &group.bars)
    }

    /// Names and notes have what they need, up to a limit; bars have the rest.
    fn columns(&self) -> Columns {
        let names = widest(self.all().map(|bar| &bar.name[..]), FONT).min(MOST_OF_NAMES);
        let notes = widest(self.all().map(|bar| &bar.note[..]), FONT).min(MOST_OF_NOTES);
        Columns { names, bars: WIDTH - names - notes - 4.0 * GAP, notes }
    }

    /// Units of the picture's longest bar.
    fn longest(&self) -> f64 {
        self.all().map(|bar| bar.units).fold(0.0, f64::max).min(MOST_UNITS)
    }

    fn draw(&self, area: &Area<'_>, columns: &Columns, bar: &Bar, middle: f64) {
        let name = shortened(&bar.name, columns.names, FONT);
        let start = 2.0 * GAP + columns.names;
        write(area, &name, (start - GAP, middle), &style(FONT, Anchor::End));
        let length = columns.bars * (bar.units / self.longest()).clamp(0.0, 1.0);
        let fill = match bar.side {
            Side::Ours => color(COLORS[0]).to_rgba(),
            Side::Theirs => color(COLORS[1]).to_rgba(),
            Side::Memory => GREY,
        };
        let edges = [middle - BAR / 2.0, middle + BAR / 2.0];
        let blocks = if bar.units > MOST_UNITS {
            let gap = start + 0.85 * length;
            let first = block([start, gap - 4.0], edges, [0.0, 4.0]);
            vec![first, block([gap + 4.0, start + length], edges, [4.0, 0.0])]
        } else {
            vec![block([start, start + length], edges, [0.0, 0.0])]
        };
        for block in blocks {
            drawn(area.draw(&Polygon::new(block, fill.filled())));
        }
        let note = shortened(&bar.note, columns.notes, FONT);
        write(area, &note, (start + length + GAP, middle), &style(FONT, Anchor::Start));
    }
}

/// A line of text as wide as the picture.
fn line(area: &Area<'_>, text: &str, middle: f64) {
    let text = shortened(text, WIDTH - 2.0 * GAP, FONT);
    if room(&text, FONT) > 0.0 {
        write(area, &text, (GAP, middle), &style(FONT, Anchor::Start));
    }
}

/// Corners of a block from `left` to `right`, whose ends lean by `slants`.
fn block(
    [left, right]: [f64; 2],
    [top, bottom]: [f64; 2],
    [first, last]: [f64; 2],
) -> Vec<(i32, i32)> {
    let corners =
        [(left + first, top), (right + last, top), (right - last, bottom), (left - first, bottom)];
    corners.map(at).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seen::{attribute, height, texts, width};

    /// Bars by name and units; names in capitals are ours.
    fn bars(given: &[(&str, f64)]) -> Bars<'static> {
        let bars = given.iter().map(|(name, units)| Bar {
            name: (*name).to_owned(),
            units: *units,
            note: format!("{units} times ours"),
            side: if *name == "OURS" { Side::Ours } else { Side::Theirs },
        });
        let group = Group { title: String::new(), bars: bars.collect(), notes: Vec::new() };
        Bars { title: "times", groups: vec![group] }
    }

    /// Each polygon's length and colour, from above.
    fn blocks(svg: &str) -> Vec<(f64, String)> {
        let blocks = svg.split("<polygon ").skip(1).map(|rest| {
            let xs = attribute(rest, "points").split_whitespace();
            let xs: Vec<f64> =
                xs.map(|at| at.split_once(',').unwrap().0.parse().unwrap()).collect();
            let [least, most] = [f64::min, f64::max].map(|of| xs.iter().copied().reduce(of));
            (most.unwrap() - least.unwrap(), attribute(rest, "fill").to_lowercase())
        });
        blocks.collect()
    }

    #[test]
    fn bars_are_to_scale_in_two_colours() {
        let svg = bars(&[("OURS", 1.0), ("<b>", 4.0), ("half", 0.5)]).svg(Place::Page);
        let blocks = blocks(&svg);
        let colours: Vec<&str> = blocks.iter().map(|block| &block.1[..]).collect();
        assert_eq!(colours, [COLORS[0], COLORS[1], COLORS[1]]);
        for (block, expected) in blocks.iter().zip([1.0, 4.0, 0.5]) {
            assert!((block.0 / blocks[0].0 - expected).abs() < 0.01, "{svg}");
        }
        assert!(svg.contains("&lt;b&gt;") && !svg.contains("<b>"), "{svg}");
    }

    #[test]
    fn a_bar_that_is_too_long_has_a_gap() {
        let given = bars(&[("OURS", 1.0), ("slow", 40.0)]);
        assert!(given.is_broken() && !bars(&[("OURS", 1.0), ("b", 8.0)]).is_broken());
        let svg = given.svg(Place::File);
        let [ours, first, last] = &blocks(&svg)[..] else { panic!("{svg}") };
        // Eight units with the gap and without the slants, which overlap by as much.
        assert!((first.0 + last.0 - 8.0 * ours.0).abs() < 0.02 * ours.0, "{svg}");
        assert!(svg.contains("40 times ours"), "{svg}");
    }

    #[test]
    fn texts_lie_in_the_frame_and_clear_of_bars_at_any_length() {
        let long = "A peer whose name is longer than any that was ever thought of, by far, & more";
        for given in [
            &[][..],
            &[("OURS", 0.0)],
            &[("OURS", 1.0), (long, 4e7), ("slow", 123_456.789_012_345)],
            &[(long, 1.0)],
        ] {
            for text in ["", long] {
                let mut bars = bars(given);
                bars.groups[0].title = text.repeat(2);
                bars.groups[0].notes = vec![text.repeat(3); 2];
                for bar in &mut bars.groups[0].bars {
                    bar.note += text;
                }
                let svg = bars.svg(Place::File);
                for text in texts(&svg) {
                    assert!(text.start >= 0.0 && text.end <= width(&svg), "{text:?} in {svg}");
                    assert!(text.y >= 0.0 && text.y <= height(&svg), "{text:?} in {svg}");
                }
                let least = if given.len() > 1 { 10.0 } else { 0.0 };
                assert!(blocks(&svg).iter().all(|bar| bar.0 >= least && bar.0 < width(&svg)));
            }
        }
    }
}
