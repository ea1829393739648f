//! Common parts of pictures: colours, fonts, room of texts, and the way from `plotters` to a page.

use fusestep_tensor::escaped;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Colours of lines, which can be told from a light and from a dark page.
pub const COLORS: [&str; 8] =
    ["#4878a8", "#c27c3e", "#4f8f5f", "#8e6bb0", "#2f8f95", "#b0556b", "#8a7a2f", "#7a7f87"];

/// Units of `plotters` in one unit of a picture: `plotters` draws at whole numbers.
const FINE: f64 = 10.0;

/// Colour of texts until they take the page's.
const TEXT: RGBColor = RGBColor(1, 2, 3);

/// The text's colour as `plotters` writes them.
const TEXT_WRITTEN: &str = "#010203";

/// Colour of lines of a grid, and of what is neither ours nor a peer's.
pub(crate) const GREY: RGBAColor = RGBAColor(0x88, 0x88, 0x88, 0.5);

/// Colours of a page and its texts where a picture is a file of its own.
pub(crate) const LIGHT: [&str; 2] = ["#ffffff", "#1c1c1c"];
pub(crate) const DARK: [&str; 2] = ["#16181b", "#e6e6e6"];

/// Font of all texts.
const FAMILY: &str = "system-ui,sans-serif";

/// `plotters` writes a size of text divided by this.
const WRITTEN_PER_SIZE: f64 = 1.24;

/// Size of a picture, in units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) width: f64,
    pub(crate) height: f64,
}

/// Side of its place on which a text lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    /// It begins there.
    Start,
    /// It ends there.
    End,
}

/// A drawing area of `plotters`.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// A picture that `draw` fills, as a part of a page.
pub(crate) fn picture(title: &str, size: Size, draw: impl FnOnce(&Area<'_>)) -> String {
    let mut svg = String::new();
    let (width, height) = (fine(size.width), fine(size.height));
    {
        let pixels = (width.unsigned_abs(), height.unsigned_abs());
        let area = SVGBackend::with_string(&mut svg, pixels).into_drawing_area();
        draw(&area);
        drawn(area.present());
    }
    let body = svg.split_once('>').map_or("", |(_, body)| body);
    let body = body.replace(&format!("fill=\"{TEXT_WRITTEN}\""), "fill=\"currentColor\"");
    format!(
        "<svg viewBox=\"0 0 {width} {height}\" role=\"img\"><title>{}</title>\n{body}",
        safe(title)
    )
}

/// A picture as a file of its own, dark or light as the reader's system is.
pub(crate) fn file(svg: &str) -> String {
    let style = format!(
        "<style>svg{{color:{};background:{}}}\
         @media(prefers-color-scheme:dark){{svg{{color:{};background:{}}}}}</style>",
        LIGHT[1], LIGHT[0], DARK[1], DARK[0]
    );
    let namespace = "<svg xmlns=\"http://www.w3.org/2000/svg\"";
    svg.replacen("<svg", namespace, 1).replacen('>', &format!(">{style}"), 1)
}

/// Text as `plotters` draws it, in the page's colour.
pub(crate) fn style(font: f64, anchor: Anchor) -> TextStyle<'static> {
    let horizontal = match anchor {
        Anchor::Start => HPos::Left,
        Anchor::End => HPos::Right,
    };
    let font = (FAMILY, font * FINE * WRITTEN_PER_SIZE).into_font();
    TextStyle::from(font).color(&TEXT).pos(Pos::new(horizontal, VPos::Center))
}

/// Writes a text at a place; its middle lies at the place's height.
pub(crate) fn write(area: &Area<'_>, text: &str, place: (f64, f64), style: &TextStyle<'_>) {
    drawn(area.draw_text(&escaped(text), style, at(place)));
}

/// A length in units of `plotters`.
pub(crate) fn fine(length: f64) -> i32 {
    (length * FINE).round() as i32
}

/// A place in units of `plotters`.
pub(crate) fn at((x, y): (f64, f64)) -> (i32, i32) {
    (fine(x), fine(y))
}

/// A colour as `plotters` takes it.
pub(crate) fn color(hex: &str) -> RGBColor {
    let part = |from: usize| {
        let digits = hex.get(from..from + 2).unwrap_or_default();
        u8::from_str_radix(digits, 16).unwrap_or_default()
    };
    RGBColor(part(1), part(3), part(5))
}

/// Room that a text takes, in any font without serifs.
pub(crate) fn room(text: &str, font: f64) -> f64 {
    escaped(text).chars().count() as f64 * 0.64 * font
}

/// Room of the widest of these texts.
pub(crate) fn widest<'t>(texts: impl Iterator<Item = &'t str>, font: f64) -> f64 {
    texts.map(|text| room(text, font)).fold(0.0, f64::max)
}

/// A text that is cut where its room ends.
pub(crate) fn shortened(text: &str, width: f64, font: f64) -> String {
    if room(text, font) <= width {
        return text.to_owned();
    }
    let text = escaped(text);
    let most = (width / (0.64 * font)) as usize;
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Text that a page shows and does not obey: names come from files.
pub fn safe(text: &str) -> String {
    escaped(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Result of drawing into memory, which cannot fail.
pub(crate) fn drawn<T, E: std::fmt::Debug>(result: Result<T, E>) -> T {
    result.expect("a picture in memory has room for what is drawn")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_can_be_told_from_light_and_dark_pages() {
        let luminance = |color: &str| {
            let part = |at: usize| {
                let value = f64::from(u8::from_str_radix(&color[at..at + 2], 16).unwrap()) / 255.0;
                if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5) + 0.05
        };
        let contrast = |a: &str, b: &str| {
            let (a, b) = (luminance(a), luminance(b));
            (a / b).max(b / a)
        };
        for [page, text] in [LIGHT, DARK] {
            assert!(contrast(page, text) >= 7.0);
            for color in COLORS {
                assert!(contrast(page, color) >= 3.0, "{color} on {page}");
            }
        }
    }

    #[test]
    fn a_file_follows_the_readers_system_and_a_part_the_page() {
        let size = Size { width: 10.0, height: 5.0 };
        let svg =
            picture("<t>", size, |area| write(area, "<b>", (1.0, 1.0), &style(2.0, Anchor::End)));
        assert!(
            svg.contains("viewBox=\"0 0 100 50\"") && svg.contains("<title>&lt;t&gt;"),
            "{svg}"
        );
        assert!(svg.contains("fill=\"currentColor\"") && svg.contains("&lt;b&gt;"), "{svg}");
        let file = file(&svg);
        assert!(file.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox"), "{file}");
        assert!(file.contains("prefers-color-scheme:dark") && !svg.contains("prefers"), "{file}");
    }
}
